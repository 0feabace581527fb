"""How a model's weights come into memory: as transformers loads them, each once, and only those that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echo2.errors import UserError
from echo2.learner import loading
from echo2.learner.model import load_policy
from echo2.types import StoredTensor
from learner_cases import tiny_module


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
def test_weights_are_those_that_transformers_loads(tmp_path: Path, tied: bool, shard_size: str) -> None:
    tiny_module(tied=tied).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    ours = load_policy(str(tmp_path), "float32", "cpu").module
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    for kind in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(module, kind)()) for module in (ours, theirs))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


def test_every_weight_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_module(tied=True).save_pretrained(tmp_path)
    names, read = list[str](), loading._read

    def noted(into: torch.Tensor, stored: StoredTensor, name: str) -> None:
        names.append(name)
        read(into, stored, name)

    monkeypatch.setattr(loading, "_read", noted)
    module = load_policy(str(tmp_path), "float32", "cpu").module
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())


def test_names_that_transformers_changes_are_its_own_to_load(tmp_path: Path) -> None:
    module: Any = tiny_module()
    module.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("model."): tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    found = load_policy(str(tmp_path), "float32", "cpu").module
    assert torch.equal(found.model.norm.weight, module.model.norm.weight)
    assert torch.equal(found.model.layers[1].mlp.up_proj.weight, module.model.layers[1].mlp.up_proj.weight)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    tiny_module().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight the shape \[\d+\], and the weights have \[3\]"):
        load_policy(str(tmp_path), "float32", "cpu")
