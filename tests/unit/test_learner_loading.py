"""How a model's weights come into memory: as transformers loads them, each once, and only those that are kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from echo2.core.errors import UserError
from echo2.core.types import StoredTensor
from echo2.engines.hub_layout import META, text_module
from echo2.learner.core import loading
from echo2.learner.core.adapters import load_base
from echo2.learner.core.mesh import Mesh, _layers
from echo2.learner.core.model import load_policy, outline_policy
from echo2.weights.format.model_files import read_base_model
from hub_models import FAMILIES, hub_model
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
    shapes, read = list[tuple[int, ...]](), loading._read

    def noted(into: torch.Tensor, stored: StoredTensor) -> None:
        shapes.append(stored.shape)
        read(into, stored)

    monkeypatch.setattr(loading, "_read", noted)
    module = load_policy(str(tmp_path), "float32", "cpu").module
    assert sorted(shapes) == sorted(tuple(parameter.shape) for parameter in module.parameters())


def test_names_without_the_prefix_of_the_head_are_read(tmp_path: Path) -> None:
    module: Any = tiny_module()
    module.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("model."): tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    policy = load_policy(str(tmp_path), "float32", "cpu")
    assert policy.weights().keys() == old.keys() - {"lm_head.weight"}
    found = policy.module
    assert torch.equal(found.model.norm.weight, module.model.norm.weight)
    assert torch.equal(found.model.layers[1].mlp.up_proj.weight, module.model.layers[1].mlp.up_proj.weight)


def test_the_error_names_weights_of_another_shape(tmp_path: Path) -> None:
    tiny_module().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight the shape \[\d+\], and the weights have \[3\]"):
        load_policy(str(tmp_path), "float32", "cpu")


def test_a_quantised_model_is_refused_by_its_name(tmp_path: Path) -> None:
    """As compressed-tensors writes W8A8: whole numbers under the weight's name, and scales beside it."""
    tiny_module().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[f"{name}_scale"] = torch.ones(len(weights[name]), 1)
    weights[name] = torch.ones(weights[name].shape, dtype=torch.int8)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"^model\.path: .*quantization_config \(compressed-tensors\).* without quant"):
        load_policy(str(tmp_path), "float32", "cpu")


def in_makers_files(tmp_path: Path, method: str) -> Path:
    """A Qwen3 with weights of 8 bits, or a gpt-oss with experts of 4, as their makers publish them."""
    directory = hub_model(tmp_path / method, "qwen3" if method == "fp8" else "gpt_oss")
    stored = dict[str, torch.Tensor]()
    for name, tensor in load_file(directory / "model.safetensors").items():
        if method == "fp8" and name.endswith("proj.weight"):
            rows, columns = tensor.shape
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.full((rows // 16, columns // 16), 2.0)
        elif method == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            stored[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 125, dtype=torch.uint8)
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    sizes = {"activation_scheme": "dynamic", "weight_block_size": [16, 16]} if method == "fp8" else {}
    config["quantization_config"] = {"quant_method": method, **sizes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_a_makers_own_quantisation_is_refused_with_a_remedy(tmp_path: Path, method: str) -> None:
    directory, new = in_makers_files(tmp_path, method), tmp_path / "new"
    with pytest.raises(UserError, match=rf"quantization_config \({method}\).*Copy the tokenizer") as refused:
        load_policy(str(directory), "float32", "cpu")
    way = str(refused.value).partition("with transformers: ")[2].partition(". Copy")[0]
    named = {name: getattr(transformers, name) for name in re.findall(r"\w+(?:ForCausalLM|Config)\b", way)}
    eval(way, {"DIR": directory, "NEW": new, **named})
    policy = load_policy(str(new), "float32", "cpu")
    scaled = "model.layers.0.self_attn.q_proj.weight"
    stored, found = load_file(directory / "model.safetensors")[scaled].float(), policy.state()[scaled]
    assert torch.equal(found, 2 * stored if method == "fp8" else stored)
    assert all(tensor.isfinite().all() for tensor in policy.state().values())


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "BOOL", "F8_E4M3"])
def test_only_floating_point_numbers_are_read_as_weights(tmp_path: Path, dtype: str) -> None:
    tiny_module().save_pretrained(tmp_path)
    tensors, config = loading.stored_weights(tmp_path), AutoConfig.from_pretrained(tmp_path)
    name = "model.norm.weight"
    other = StoredTensor(dtype, tensors[name].shape, tensors[name].num_bytes, tensors[name].read)
    with pytest.raises(UserError, match=rf"model\.norm\.weight is stored as {dtype}.*without quantisation"):
        loading._fitting_layout(config, tensors | {name: other}, torch.bfloat16)


@pytest.mark.parametrize(
    "header", ["[]", '{"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": null}}']
)
def test_a_damaged_header_is_a_user_error(tmp_path: Path, header: str) -> None:
    tiny_module().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(UserError, match="does not hold a causal language model"):
        load_policy(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize("kept", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_transformers_keeps_in_float32_stay_in_float32(
    tmp_path: Path, kept: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_module().save_pretrained(tmp_path)
    monkeypatch.setattr(Qwen3ForCausalLM, kept, {"norm"})
    ours, _ = loading.load_module(tmp_path, dtype, torch.device("cpu"), Mesh())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found, expected = ({name: part.dtype for name, part in each.named_parameters()} for each in (ours, theirs))
    assert found == expected


@pytest.mark.parametrize("is_other", [False, True])
def test_a_stored_head_that_differs_from_a_tied_one_is_refused(tmp_path: Path, is_other: bool) -> None:
    """transformers unties the two, engines use the embedding for both, and one of them would be wrong in silence."""
    tiny_module(tied=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + float(is_other)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    reads = [lambda: load_policy(str(tmp_path), "float32", "cpu"), lambda: outline_policy(str(tmp_path))]
    reads += [lambda: load_base(str(tmp_path), "cpu"), lambda: read_base_model(tmp_path)]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight) != is_other
    for read in reads if is_other else []:
        with pytest.raises(UserError, match=r'lm_head\.weight .*other values.*"tie_word_embeddings": false'):
            read()
    if is_other:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    read_base_model(tmp_path)
    ours = load_policy(str(tmp_path), "float32", "cpu").module
    assert torch.equal(ours.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(ours.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    outline_policy(str(tmp_path)), load_base(str(tmp_path), "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_find_the_layers_that_are_whole_one_after_the_other(family: str) -> None:
    """By a private name of transformers, `_no_split_modules`. Without it a rank would hold the whole model at once."""
    with META:
        module = text_module(AutoConfig.for_model(family, **FAMILIES[family]), torch.float32)
    inside = {parameter for layer in _layers(module) for parameter in layer.parameters()}
    outside = [name for name, parameter in module.named_parameters() if parameter not in inside]
    assert inside
    assert not [name for name in outside if any(part.isdecimal() for part in name.split("."))], outside
