"""PEFT adapters that tenants bring to the service: what is taken computes as PEFT does, what is not is refused."""

from __future__ import annotations

import io
import json
import tarfile
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from echo2.config.sections import LoraConfig as Lora
from echo2.core.errors import PeerError, UserError
from echo2.learner.core.adapters import load_base
from echo2.learner.core.datum import Datum
from echo2_service.backend import BaseInfo
from echo2_service.front.own_adapters import take_adapter
from echo2_service.learner.tenants import Tenants
from front_service import Service
from learner_cases import model_directory, tiny_module

#: PEFT asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
TOKENS = [1, 5, 2, 9, 3, 3, 7]


@pytest.fixture
def base(tmp_path: Path) -> BaseInfo:
    return BaseInfo("echo2/tiny", str(model_directory(tmp_path / "base")), 256)


def peft_adapter(folder: Path, hidden: int = 16, **more: Any) -> Any:
    """One of PEFT's own over the base model, with factors that are not 0."""
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **more}
    model = get_peft_model(tiny_module(hidden=hidden), LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model


def packed(folder: Path) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(folder, arcname=".")
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_accepted_adapter_computes_as_in_peft(tmp_path: Path, base: BaseInfo, dtype: torch.dtype) -> None:
    model = peft_adapter(tmp_path / "mine")
    weights = tmp_path / "mine" / "adapter_model.safetensors"
    rounded = {name: tensor.to(dtype).contiguous() for name, tensor in load_file(weights).items()}
    save_file(rounded, weights)
    model.load_state_dict(
        {name.replace(".weight", ".default.weight"): each.float() for name, each in rounded.items()}, strict=False
    )
    spec = take_adapter(packed(tmp_path / "mine"), base, "ada", tmp_path / "taken")
    assert (spec.rank, spec.alpha, spec.targets) == (2, 6, ("down_proj", "q_proj"))
    tenants = Tenants(load_base(base.directory, "cpu"))
    tenants.add("m", Lora(spec.rank, spec.alpha, list(spec.targets)), 0)
    tenants.load("m", tmp_path / "taken", with_optimizer=False)
    datum = Datum(array("i", TOKENS[:1]), array("i", TOKENS[1:]), b"\1" * (len(TOKENS) - 1))
    total = tenants.forward_backward("m", [datum], "cross_entropy", {}).total
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(TOKENS[1:]), reduction="sum")
    assert total == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"hidden": 24}, r"is \[2, 48\]; rank 2 makes it \[2, 32\]"),
        ({"layers_to_transform": [1]}, r"layers\.0\..* is no such tensor"),
    ],
)
def test_an_adapter_that_would_compute_differently_is_refused(
    tmp_path: Path, base: BaseInfo, more: dict[str, Any], complaint: str
) -> None:
    peft_adapter(tmp_path / "mine", **more)
    with pytest.raises(UserError, match=complaint):
        take_adapter(packed(tmp_path / "mine"), base, "ada", tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


CONFIGS = [{"peft_type": "IA3"}, {"r": 0}, {"r": 2.5}, {"r": True}, {"lora_alpha": float("nan")}, {"lora_alpha": "6"}]
CONFIGS += [{"r": 10**9}, {"base_model_name_or_path": "base-0123456789abcdef"}]


@pytest.mark.parametrize("change", CONFIGS)
def test_settings_out_of_bounds_are_refused(tmp_path: Path, base: BaseInfo, change: dict[str, Any]) -> None:
    peft_adapter(tmp_path / "mine")
    path = tmp_path / "mine" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError):
        take_adapter(packed(tmp_path / "mine"), base, "ada", tmp_path / "taken")


def test_hostile_bytes_are_refused(tmp_path: Path, base: BaseInfo) -> None:
    peft_adapter(tmp_path / "mine")
    weights = tmp_path / "mine" / "adapter_model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)

    def refused(error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            take_adapter(packed(tmp_path / "mine"), base, "ada", tmp_path / "taken")

    save_file({**tensors, min(tensors): tensors[min(tensors)] * float("inf")}, weights)
    refused(UserError, "not finite")
    save_file({name: tensor.to(torch.int32) for name, tensor in tensors.items()}, weights)
    refused(UserError, "bytes of I32")
    for torn in (whole[:-1], whole[:100], b"", b"\xff" * 8 + whole[8:], b"\2\0\0\0\0\0\0\0[]"):
        weights.write_bytes(torn)
        refused(UserError, "no PEFT adapter that can be read")
    weights.unlink()
    refused(UserError, "holds no adapter_model.safetensors")
    for body in (b"", b"no tar" * 1000):
        with pytest.raises((PeerError, UserError)):
            take_adapter(body, base, "ada", tmp_path / "taken")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind in (
            ("adapter_config.json", tarfile.SYMTYPE),
            ("../../adapter_model.safetensors", tarfile.LNKTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/hostname"
            archive.addfile(entry)
    with pytest.raises(UserError, match="holds no adapter_config"):
        take_adapter(file.getvalue(), base, "ada", tmp_path / "taken")


def test_small_bytes_that_would_become_large_are_refused_unread(tmp_path: Path, base: BaseInfo) -> None:
    """Each of them, as large as an upload may be, would take gigabytes, or the processor for minutes."""
    peft_adapter(tmp_path / "mine")
    config, weights = (tmp_path / "mine" / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    whole = {file: file.read_bytes() for file in (config, weights)}
    parts = b"[%b]" % b",".join([b"{}"] * (1 << 18))

    def refused(match: str, file: Path, data: bytes) -> None:
        file.write_bytes(data)
        with pytest.raises((PeerError, UserError), match=match):
            take_adapter(packed(tmp_path / "mine"), base, "ada", tmp_path / "taken")
        file.write_bytes(whole[file])

    refused("262144 are taken", config, parts)
    refused("262144 are taken", weights, len(parts).to_bytes(8, "little") + parts)
    refused("bytes of JSON", config, b'"%b"' % bytes(5 << 20))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 62] * 65, "data_offsets": [0, 4]}}).encode()
    refused("has 65 sizes", weights, len(header).to_bytes(8, "little") + header + bytes(4))
    for properties in ({"comment": "a" * 20_000}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            entry = tarfile.TarInfo(config.name)
            entry.pax_headers = properties
            archive.addfile(entry)
        with pytest.raises(PeerError, match="an entry has holes"):
            take_adapter(file.getvalue(), base, "ada", tmp_path / "taken")


def archive(service: Service, path: str) -> bytes:
    """The tar file of a checkpoint."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    url = f"/api/v1/training_runs/{model}/checkpoints/{kind}/{name}/archive"
    found: bytes = service.client.get(url, headers={"x-api-key": service.key}).content
    return found


def test_an_adapter_becomes_a_checkpoint_of_its_tenant(tmp_path: Path) -> None:
    service = Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")
    model_directory(tmp_path)  # where the back end says that the base lies
    peft_adapter(tmp_path / "mine")
    body, url = packed(tmp_path / "mine"), "adapters?base_model=echo2/tiny&name=mine"
    path = service.post(url, body)["path"]
    service.sweep()
    (listed,) = service.get("checkpoints")["checkpoints"]
    assert listed["tinker_path"] == path
    info = service.post("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == ("echo2/tiny", 2, False)
    load = {"session_id": service.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    service.post("load_weights", load)
    with tarfile.open(fileobj=io.BytesIO(archive(service, path))) as file:
        assert sorted(file.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
        config = file.extractfile("adapter_config.json")
        assert config is not None
        assert json.load(config)["base_model_name_or_path"] == "echo2/tiny"
    service.post(url.replace("mine", "again"), archive(service, path))
    eve = service.api_keys.add_key("eve")
    service.post("load_weights", {**load, "session_id": service.session(eve)}, eve, 400)
    for wrong in ("adapters?base_model=no/model&name=a", "adapters?base_model=echo2/tiny&name=../a", "adapters"):
        service.post(wrong, body, status=400)
    service.post(url, b"no tar" * 1000, status=400)
    service.post(url, body, service.api_keys.add_key("ada", scopes=["sample"]), 403)
    assert list((tmp_path / "checkpoints" / "arriving").iterdir()) == []
    service.end()
    service.database.close()
