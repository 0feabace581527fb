"""The map between stored tensors and those of a module: views, parts of ranks, names, and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2.config import Config
from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.engines.hub_layout import TensorPart
from echo2.launch.preflight import check_lora
from echo2.learner.core.adapters import check_trained, load_base
from echo2.learner.core.model import load_policy
from hub_models import hub_model
from seeds import seeds


def cuts(length: int, rng: random.Random) -> list[tuple[int, int]]:
    """Neighbouring parts of a dimension, as ranks have them."""
    ends = sorted({0, length, *(rng.randint(0, length) for _ in range(2))})
    return list(itertools.pairwise(ends))


@pytest.mark.parametrize("seed", seeds(5, 20))
def test_parts_of_ranks_make_up_the_stored_tensor(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 5) for _ in range(3)]
    whole = torch.arange(float(shape[0] * shape[1] * shape[2])).view(shape)
    dims: list[int | None] = rng.sample(range(3), rng.randint(1, 3))
    region = []
    for dim, length in enumerate(shape):
        low = rng.randrange(length)
        region.append((low, rng.randint(low + 1, length) if dim in dims else low + 1))
    dims.insert(rng.randint(0, len(dims)), None)
    place = TensorPart("a", tuple(region), tuple(dims))
    expected = place.of(whole)
    assert expected.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert tuple(expected.shape) == place.shape
    found = torch.full(place.shape, -1.0)
    for part in itertools.product(*(cuts(length, rng) for length in shape)):
        own = whole[tuple(slice(*span) for span in part)]
        if (both := place.within(part)) is not None:
            inside, stored = both
            found[tuple(slice(*span) for span in stored)] = place.of(own, inside)
    assert torch.equal(found, expected)


def test_experts_of_the_hub_and_fused_ones_are_one_model(tmp_path: Path) -> None:
    """`save_original_format=False` writes the module's own names; both are read, and each is written as it was."""
    import transformers

    hub = hub_model(tmp_path / "hub", "qwen3_moe")
    fused = transformers.AutoModelForCausalLM.from_pretrained(hub)
    fused.save_pretrained(tmp_path / "fused", save_original_format=False)
    both = [load_policy(str(tmp_path / name), "float32", "cpu") for name in ("hub", "fused")]
    ours, theirs = (policy.held() for policy in both)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for policy, name in zip(both, ("hub", "fused"), strict=True):
        assert policy.weights().keys() == load_file(tmp_path / name / "model.safetensors").keys()
    assert both[0].weights().keys() != both[1].weights().keys()


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("mlp.gate.weight", r"fill 1 tensors.*model\.layers\.1\.mlp\.gate\.weight.*save_original_format=False"),
        ("mlp.experts.3.up_proj.weight", r"do not make up the qwen3_moe .* download the model again"),
    ],
)
def test_a_missing_tensor_is_an_error_and_not_drawn_at_random(tmp_path: Path, stored: str, said: str) -> None:
    hub = hub_model(tmp_path / "hub", "qwen3_moe")
    weights = load_file(hub / "model.safetensors")
    del weights[f"model.layers.1.{stored}"]
    save_file(weights, hub / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=said):
        load_policy(str(hub), "float32", "cpu")


def test_the_error_names_tensors_that_the_model_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = hub_model(tmp_path / "hub", "qwen3_moe")
    weights = load_file(hub / "model.safetensors")
    weights["mtp.norm.weight"] = torch.ones(32)
    save_file(weights, hub / "model.safetensors", {"format": "pt"})
    policy = load_policy(str(hub), "float32", "cpu")
    assert "1 tensors of the files are of no part of the model" in caplog.text
    assert "mtp.norm.weight" not in policy.weights()


def lora(path: Path, *targets: str) -> Config:
    config = Config()
    return replace(config, model=replace(config.model, path=str(path)), lora=LoraConfig(2, targets=list(targets)))


def test_adapters_on_a_mixture_say_what_they_leave_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = hub_model(tmp_path / "hub", "qwen3_moe")
    check_lora(lora(hub, "all-linear"))
    said = capsys.readouterr().err
    assert "experts get no adapter, and 51% of this model's weights are experts" in said
    assert '"experts" among lora.targets adapts them' in said
    check_trained(lora(hub, "all-linear"))
    assert "of the weights in layers have no adapter and stay as they are: mlp.experts.down_proj" in caplog.text
    assert '"experts" among lora.targets adapts experts' in caplog.text
    caplog.clear()
    check_lora(lora(hub, "all-linear", "experts"))
    check_trained(lora(hub, "all-linear", "experts"))
    assert capsys.readouterr().err == ""
    assert "1 % of the weights in layers have no adapter and stay as they are: mlp.gate.weight." in caplog.text


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("qwen3_moe", ["gate_proj"], r"'gate_proj'.* no linear layer .* There are: k_proj, o_proj, q_proj, v_proj"),
        ("glm4_moe", ["up_proj"], r"'up_proj', and PEFT does not adapt .* There are: k_proj, o_proj, q_proj, v_proj;"),
        ("qwen3", ["experts"], r"lora\.targets has 'experts', and a qwen3 has no experts .* Leave 'experts' out"),
        ("glm4_moe", ["up_proj"], r"\[\"all-linear\"\] is all of them, and \"experts\", which are all experts"),
        ("mamba", ["out_proj"], r"'out_proj', and PEFT does not adapt .* in a mamba.* There are: dt_proj, in_proj"),
        ("gpt2", ["c_attn"], r"lora\.rank = 2: a gpt2 has no linear layers .* Set lora\.rank = 0"),
    ],
)
def test_a_dry_run_refuses_targets_as_the_learner_does(
    tmp_path: Path, family: str, targets: list[str], said: str
) -> None:
    hub = hub_model(tmp_path / "hub", family)
    with pytest.raises(UserError, match=said):
        check_trained(lora(hub, *targets))
    with pytest.raises(UserError, match=said):
        load_base(str(hub), "cpu").adapter(LoraConfig(2, targets=targets), 0)


def test_a_dry_run_refuses_files_of_another_model(tmp_path: Path) -> None:
    hub = hub_model(tmp_path / "hub", "gemma3")
    config: dict[str, Any] = json.loads((hub / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 48
    (hub / "config.json").write_text(json.dumps(config))
    for refused in (lambda: check_trained(lora(hub, "all-linear")), lambda: load_policy(str(hub), "float32", "cpu")):
        with pytest.raises(UserError, match=r"config\.json gives .*mlp.* the shape .*download the model again"):
            refused()
