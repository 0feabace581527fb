"""PEFT's settings of LoRA: training, engines and the service compute what PEFT does, or refuse the setting by name."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from echo2.config.sections import LoraConfig as Lora
from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines.compact import build_compact
from echo2.engines.servers.models import ModelDirectories
from echo2.engines.torch_engine import TorchDecoder
from echo2.learner.core.adapters import load_base, load_merged
from echo2.weights.format.adapter_files import ANY_VALUE, VALUES, lora_factors
from echo2.weights.format.model_files import read_adapter, read_base_model
from echo2_service.backend import BaseInfo
from echo2_service.front.own_adapters import take_adapter
from learner_cases import model_directory

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, of settings that go together badly
]
TOKENS = [1, 5, 2, 9, 3, 3, 7]
TARGETS = ["q_proj", "v_proj"]
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 8}
#: What PEFT computes as rank and alpha say.
SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"lora_dropout": 0.1},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
#: What it computes otherwise, and the setting that an error names.
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("use_dora", {"use_dora": True}),
    "alpha_pattern": ("alpha_pattern", {"alpha_pattern": {"q_proj": 1}}),
    "rank_pattern": ("rank_pattern", {"rank_pattern": {"q_proj": 2}}),
    "lora_bias": ("lora_bias", {"lora_bias": True}),
    "bias": ("bias", {"bias": "all"}),
    "modules_to_save": ("modules_to_save", {"modules_to_save": ["norm"]}),
    "tokens": ("trainable_token_indices", {"trainable_token_indices": [3]}),
    "pissa": ("init_lora_weights", {"init_lora_weights": "pissa"}),
    "pissa_niter": ("init_lora_weights", {"init_lora_weights": "pissa_niter_4"}),
    "olora": ("init_lora_weights", {"init_lora_weights": "olora"}),
    "alora": ("alora_invocation_tokens", {"alora_invocation_tokens": [9]}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("model"))


def saved(model: Path, to: Path, **more: Any) -> torch.Tensor:
    """Save an adapter with these settings as PEFT does; return PEFT's logits [T, V]."""
    torch.manual_seed(1)
    settings = {**PLAIN, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **more}
    module = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name or (parameter.requires_grad and "lora" not in name):
                parameter.add_(0.3 * torch.randn_like(parameter))
    module.save_pretrained(to)
    with torch.no_grad():
        found: torch.Tensor = module.eval()(torch.tensor([TOKENS])).logits[0]
    return found


def learned(model: Path, directory: Path) -> torch.Tensor:
    adapter = load_base(str(model), "cpu").adapter(Lora(4, 8, TARGETS), 0)
    adapter.begin_with(directory)
    with adapter.engaged(), torch.no_grad():
        found: torch.Tensor = adapter.module(torch.tensor([TOKENS])).logits[0]
    return found


def merged(model: Path, directory: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = load_merged(str(model), directory, "cpu").module(torch.tensor([TOKENS])).logits[0]
    return found


def snapshot(model: Path, directory: Path) -> tuple[Snapshot, Snapshot]:
    base = read_base_model(model)
    return read_adapter(directory, SnapshotRef(RUN_POLICY, 1, 0), base.ref), base


def sampled(model: Path, directory: Path) -> torch.Tensor:
    decoder = TorchDecoder(build_compact, "cpu")
    decoder.load(*snapshot(model, directory))
    _, engine, _ = decoder._policy()
    with torch.inference_mode():
        cache = engine.prefill([array("i", TOKENS[:1])])
        return torch.stack([engine.step(cache, torch.tensor([token]))[0] for token in TOKENS[1:]])


def written_for_a_server(model: Path, directory: Path) -> None:
    ModelDirectories(directory / "served").write(*snapshot(model, directory), None)


def uploaded(model: Path, directory: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(directory, arcname=".")
    base = BaseInfo("echo2/tiny", str(model), 256)
    take_adapter(file.getvalue(), base, "ada", directory.with_name(f"{directory.name}-taken"))


CONSUMERS: dict[str, Callable[[Path, Path], Any]] = {
    "training": learned,
    "merging": merged,
    "engine": sampled,
    "token server": written_for_a_server,
    "service": uploaded,
}


@pytest.mark.parametrize("variant", SAME)
def test_an_accepted_configuration_computes_as_in_peft(model: Path, tmp_path: Path, variant: str) -> None:
    expected = saved(model, tmp_path / "adapter", **SAME[variant]).log_softmax(-1)
    plain = merged_nothing(model)
    assert (expected - plain).abs().max() > 0.1, "the adapter does something"
    for name in ("training", "merging"):
        found = CONSUMERS[name](model, tmp_path / "adapter").log_softmax(-1)
        assert (found - expected).abs().max() < 1e-4, name
    found = sampled(model, tmp_path / "adapter").log_softmax(-1)
    assert (found - expected[1:]).abs().max() < 1e-4
    written_for_a_server(model, tmp_path / "adapter")
    uploaded(model, tmp_path / "adapter")


def merged_nothing(model: Path) -> torch.Tensor:
    with torch.no_grad():
        module = AutoModelForCausalLM.from_pretrained(model)
        found: torch.Tensor = module(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("variant", OTHER)
def test_the_error_names_options_that_compute_something_else(
    model: Path, tmp_path: Path, variant: str, consumer: str
) -> None:
    setting, more = OTHER[variant]
    saved(model, tmp_path / "adapter", **more)
    with pytest.raises((UserError, PeerError), match=f"has {setting} = .*, which echo2 does not compute"):
        CONSUMERS[consumer](model, tmp_path / "adapter")


def test_rslora_is_computed_where_nothing_is_trained(model: Path, tmp_path: Path) -> None:
    expected = saved(model, tmp_path / "adapter", use_rslora=True).log_softmax(-1)
    assert (merged(model, tmp_path / "adapter").log_softmax(-1) - expected).abs().max() < 1e-4
    assert (sampled(model, tmp_path / "adapter").log_softmax(-1) - expected[1:]).abs().max() < 1e-4
    for consumer in (learned, uploaded):
        with pytest.raises(UserError, match=r"use_rslora = True.* lora_alpha to 16, which computes the same"):
            consumer(model, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": False, "lora_alpha": 16}))
    assert (merged(model, tmp_path / "adapter").log_softmax(-1) - expected).abs().max() < 1e-4


def test_each_setting_of_peft_is_off_or_known() -> None:
    """What PEFT writes with its defaults is taken; a setting that no version of ours knows is not."""
    defaults = LoraConfig(task_type="CAUSAL_LM", **PLAIN).to_dict() | {"target_modules": TARGETS}
    assert dataclasses.astuple(lora_factors(json.loads(json.dumps(defaults, default=str)))) == (4, 8, 2.0)
    for name in defaults.keys() - ANY_VALUE - VALUES.keys() - {"r", "lora_alpha"}:
        with pytest.raises(UserError, match=f"has {name} = True"):
            lora_factors({**defaults, name: True})
    for value in (True, 1, 0, 0.5, "x", [0], {"a": None}):
        with pytest.raises(UserError, match="has scale_by_moon = "):
            lora_factors({**defaults, "scale_by_moon": value})
    for wrong in ("", None, [], 3):
        with pytest.raises(UserError):
            lora_factors(wrong)


def test_unrecognised_tensors_are_not_left_out_of_a_merge(model: Path, tmp_path: Path) -> None:
    """The configuration may not tell of them."""
    saved(model, tmp_path / "adapter", use_dora=True)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": False}))
    with pytest.raises(UserError, match=r"lora_magnitude_vector.* not a factor of a linear layer"):
        merged(model, tmp_path / "adapter")
