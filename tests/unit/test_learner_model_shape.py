"""A model's sizes by layer, of every family: parameters against the module's, activations against autograd's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers

from echo2.engines.hub_layout import META, text_module
from echo2.engines.model_values import all_values, values_of
from echo2.learner.decide.memory import GB, LearnerSetup, worker_parts
from echo2.learner.decide.model_shape import ModelShape, read_shape
from hub_models import FAMILIES
from model_cases import QWEN3_30B_A3B

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MAMBA = {"hidden_size": 64, "state_size": 16, "expand": 2, "eos_token_id": 0}
#: Model type -> (kind of the layers, values, whether a mask is given).
KINDS: dict[str, tuple[str | None, dict[str, Any], bool]] = {
    "qwen3_moe": (None, {**SIZES, **EXPERTS}, True),
    "mixtral": (None, {**SIZES, **EXPERTS}, True),
    "olmoe": (None, {**SIZES, **EXPERTS}, True),
    "glm4_moe": (None, {**SIZES, **ROUTED, "first_k_dense_replace": 0}, True),
    "deepseek_v3": (
        None,
        {**SIZES, **LATENT, **ROUTED, "num_key_value_heads": 4, "head_dim": 16, "first_k_dense_replace": 9},
        True,
    ),
    "qwen3_5_text": ("linear_attention", {**SIZES, **DELTA}, False),
    "qwen3_next": ("full_attention", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 48}, True),
    "gemma3_text": ("full_attention", SIZES, True),
    "lfm2": ("conv", {**SIZES, "block_auto_adjust_ff_dim": False}, False),
    "smollm3": ("full_attention", {**SIZES, "pad_token_id": 0, "eos_token_id": 1}, True),
    "phi3": (None, {**SIZES, "pad_token_id": 0, "eos_token_id": 1}, True),
    "gpt2": (None, {"n_embd": 64, "n_head": 4, "n_inner": 96}, True),
    "mamba2": (
        None,
        {**MAMBA, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 64},
        False,
    ),
    "mamba": (None, MAMBA, False),
}
TOKENS = 256


def shape_of(config: Any) -> ModelShape:
    shape = read_shape(values_of(config))
    assert shape is not None
    return shape


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_are_those_of_the_module(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type])
    with META:
        module = text_module(config, torch.float32)
    module.tie_weights()
    real = sum(parameter.numel() for parameter in module.parameters())
    assert 0.96 * real <= shape_of(config).parameters <= real  # norms and biases are much of a tiny model


def test_a_model_of_30_billion_parameters_uses_3_3_of_them_for_a_token() -> None:
    shape = read_shape(all_values(QWEN3_30B_A3B))
    assert shape is not None
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape.active == pytest.approx(3.35e9, rel=1e-2)
    assert shape.largest_layer == pytest.approx(623e6, rel=1e-2)
    assert shape.adapter_parameters(16) == pytest.approx(13.4e6, rel=1e-2)  # attention alone
    assert shape.adapter_parameters(16, has_experts=True) == pytest.approx(642.5e6, rel=1e-2)


def kept_bytes(module: Any, has_mask: bool) -> int:
    """Bytes that autograd keeps of a forward pass in float32, parameters left out."""
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # so that no address is used twice
    ours = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    inputs: dict[str, Any] = {"input_ids": torch.arange(TOKENS)[None] % 90, "use_cache": False}
    if has_mask:
        later = torch.ones(TOKENS, TOKENS).triu(1).bool()
        inputs["attention_mask"] = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill_(later, float("-inf"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.base_model(**inputs)
    return sum(sizes.values())


@pytest.mark.parametrize("model_type", KINDS)
def test_activations_of_each_kind_of_layer_are_what_autograd_keeps(model_type: str) -> None:
    kind, sizes, has_mask = KINDS[model_type]
    found = []
    for layers in (1, 3):
        torch.manual_seed(0)
        kinds = {} if kind is None else {"layer_types": [kind] * layers}
        config = transformers.AutoConfig.for_model(
            model_type, vocab_size=97, num_hidden_layers=layers, **sizes, **kinds
        )
        module = transformers.AutoModelForCausalLM.from_config(config).eval()
        found.append((kept_bytes(module, has_mask), shape_of(config)))
    (few, _), (more, shape) = found
    forecast = LearnerSetup(shape).layer_token_bytes(shape.layers[-1])
    assert 0.8 * forecast <= (more - few) / 2 / TOKENS <= 1.15 * forecast


def test_a_worker_keeps_windows_states_and_nothing_of_layers_that_have_neither() -> None:
    def cache(model_type: str, length: int, **changes: Any) -> int:
        config = transformers.AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **changes})
        return worker_parts(shape_of(config), 2, 3, length)["keys and values"]

    token = 2 * 16 * 2  # keys and values of one head, 16 bits
    assert cache("qwen3", 40) == 3 * 2 * 40 * token
    assert cache("gemma3_text", 40) == 3 * (40 + 4) * token  # the first layer has a window of four
    recurrent = 3 * 4 * (2 * 8 * 8 + 4 * (2 * 16 + 16))
    assert cache("qwen3_5_text", 40) == 3 * 40 * token + recurrent
    for short, long in pairwise([10, 40]):
        assert cache("mamba2", short) == cache("mamba2", long) > 0


def test_a_rank_of_a_large_mixture_needs_its_share_and_two_layers() -> None:
    """The arithmetic: 16 bytes a parameter over the ranks, and layers of 623 million gathered in 16 bits."""
    shape = read_shape(all_values(QWEN3_30B_A3B))
    assert shape is not None
    parts = LearnerSetup(shape, is_bfloat16=True, ranks=8).parts(4096, checkpointing=True)
    assert sum(parts[name] for name in ("weights", "gradients", "moments")) == pytest.approx(61 * GB, rel=0.01)
    assert 3 * GB < parts["gathered and cast weights"] < 5 * GB
    lora = LearnerSetup(shape, is_bfloat16=True, lora_rank=16).parts(4096, checkpointing=True)
    assert lora["weights"] == pytest.approx(61 * GB, rel=0.01)
    assert lora["gradients"] + lora["moments"] < 0.2 * GB
    alone, cut = (
        LearnerSetup(shape, is_bfloat16=True, ranks=ranks, lora_rank=16, adapts_experts=True).parts(4096, True)
        for ranks in (1, 8)
    )
    assert cut["gradients"] + cut["moments"] == alone["gradients"] + alone["moments"]  # each rank has whole adapters
    assert alone["gradients"] + alone["moments"] == pytest.approx(7.7 * GB, rel=0.01)
    assert cut["weights"] == pytest.approx((61 / 8 + 2.6) * GB, rel=0.01)
