"""The forecast of memory, against what autograd really keeps and what whole processes really take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from microbatch import SMALL, case

from echo2.engines import rows, torch_engine
from echo2.learner.decide import memory
from echo2.learner.decide.memory import (
    GB,
    LearnerSetup,
    engine_parts,
    settle_microbatch,
    worker_parts,
)
from echo2.learner.decide.model_shape import LayerShape, ModelShape, read_shape

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = read_shape(config)
    assert shape is not None
    return shape


def model(kind: str, layers: int, tied: bool = True, **sizes: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SIZES, "num_hidden_layers": layers, "vocab_size": 97, "max_position_embeddings": 1024, **sizes}
    config = AutoConfig.for_model(kind, tie_word_embeddings=tied, **values)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_parameters_are_those_of_the_model(kind: str, tied: bool) -> None:
    module = model(kind, 3, tied)
    real = sum(parameter.numel() for parameter in module.parameters())
    assert 0.98 * real <= shape_of(module.config.to_dict()).parameters <= real


def test_qwen3_of_the_smallest_size_has_596_million() -> None:
    assert shape_of(QWEN3_0_6B).parameters == pytest.approx(596_049_920, rel=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**QWEN3_0_6B, "num_experts": 8},
        {**QWEN3_0_6B, "layer_types": ["of_next_year"]},
        {**QWEN3_0_6B, "hidden_size": "wide"},
        {**QWEN3_0_6B, "vocab_size": -1},
    ],
)
def test_an_unknown_decoder_has_no_forecast(config: dict[str, Any]) -> None:
    assert read_shape(config) is None


def kept_bytes(module: Any, tokens: int, is_bfloat16: bool) -> int:
    """Bytes that autograd keeps of a forward pass under a mask, parameters and their casts left out."""
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # so that no address is used twice
    ours = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast = tensor.dim() == 2 and tensor.shape[0] != tokens and tensor.dtype == torch.bfloat16
        if storage.data_ptr() not in ours and not is_cast:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    later = torch.ones(tokens, tokens).triu(1).bool()
    mask = torch.zeros(1, 1, tokens, tokens).masked_fill_(later, float("-inf"))
    mask = mask.to(torch.bfloat16 if is_bfloat16 else torch.float32)  # else every layer would cast it
    inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "attention_mask": mask, "use_cache": False}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16),
    ):
        module.base_model(**inputs)
    return sum(sizes.values())


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_activations_of_a_layer_are_what_autograd_keeps(kind: str, is_bfloat16: bool) -> None:
    few, more = model(kind, 1), model(kind, 3)
    real = (kept_bytes(more, 200, is_bfloat16) - kept_bytes(few, 200, is_bfloat16)) / 2 / 200
    forecast = LearnerSetup(shape := shape_of(more.config.to_dict()), is_bfloat16).layer_token_bytes(shape.layers[0])
    assert 0.95 * forecast <= real <= 1.05 * forecast


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("layers", "tokens"), [(4, 1024), (8, 1536)])
def test_the_peak_of_a_learner_is_at_most_the_forecast_and_at_least_two_thirds_of_it(
    layers: int, tokens: int, checkpointing: bool
) -> None:
    found = case({**SMALL, "num_hidden_layers": layers}, tokens, checkpointing, "cpu", "float32")
    assert 0.66 * found["forecast"] <= found["peak"] <= 1.05 * found["forecast"]


LAYERS = st.builds(
    LayerShape,
    st.lists(st.tuples(st.sampled_from([64, 8192]), st.sampled_from([64, 1024, 32_768])), min_size=1).map(tuple),
    st.integers(0, 10**9),
    st.integers(1000, 10**6),
    st.integers(1000, 10**6),
)
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
HYBRID = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("changes", [MIXTURE, HYBRID])
def test_the_forecast_bounds_the_peak_of_a_mixture_and_of_a_hybrid(
    changes: dict[str, Any], checkpointing: bool
) -> None:
    found = case({**SMALL, "num_hidden_layers": 8, **changes}, 1024, checkpointing, "cpu", "float32")
    assert 0.66 * found["forecast"] <= found["peak"] <= 1.05 * found["forecast"]


SHAPES = st.builds(
    ModelShape,
    st.integers(100, 200_000),
    st.sampled_from([64, 1024, 8192]),
    st.tuples(LAYERS, st.integers(1, 100)).map(lambda drawn: (drawn[0],) * drawn[1]),
    st.booleans(),
    st.just(40_960),
)
SETUPS = st.builds(
    LearnerSetup,
    SHAPES,
    st.booleans(),
    st.integers(1, 64),
    st.integers(0, 128),
    st.sampled_from([2, 4]),
    st.booleans(),
    st.booleans(),
)


@given(
    SETUPS,
    st.integers(0, 200 * GB),
    st.integers(1, 20_000),
    st.none() | st.integers(1, 100_000),
)
def test_settled_micro_batches_fit_if_any_do(setup: LearnerSetup, memory: int, longest: int, given: int | None) -> None:
    settled = settle_microbatch(setup, memory, longest, given)
    assert settled == settle_microbatch(setup, memory, longest, given)
    assert settled.tokens == given or settled.tokens >= longest
    if setup.needed(max(longest, settled.tokens), settled.checkpointing) > memory:
        assert settled.tokens in (longest, given)
        assert min(setup.needed(max(longest, settled.tokens), each) for each in (False, True)) > memory


def test_a_cpu_with_room_to_spare_takes_a_gigabyte_of_activations_and_no_less_than_256_tokens() -> None:
    real = LearnerSetup(shape_of(QWEN3_0_6B))
    settled = settle_microbatch(real, 1000 * GB, longest=100)
    assert 256 <= settled.tokens < 300
    assert not settled.checkpointing
    assert real.needed(settled.tokens, checkpointing=False) < 16 * real.shape.parameters + 2.5 * GB
    assert settle_microbatch(real, 1000 * GB, longest=700).tokens == 700
    assert settle_microbatch(replace(real, on_gpu=True), 1000 * GB, longest=100).tokens == 16_384
    small = LearnerSetup(shape_of({**QWEN3_0_6B, "hidden_size": 64, "num_hidden_layers": 2}))
    assert settle_microbatch(small, 1000 * GB, longest=100).tokens == 2048


@given(SETUPS, st.integers(1, 20_000), st.booleans())
def test_needs_grow_with_tokens_and_shrink_with_ranks(setup: LearnerSetup, tokens: int, checkpointing: bool) -> None:
    parts = setup.parts(tokens, checkpointing)
    assert min(parts.values()) >= 0
    assert setup.needed(tokens + 1, checkpointing) > setup.needed(tokens, checkpointing)
    shared = [replace(setup, ranks=ranks).needed(tokens, checkpointing) for ranks in (2, 4, 8)]
    assert shared[0] > shared[1] > shared[2]


def test_an_engines_extra_memory_is_a_share_of_the_free_memory() -> None:
    assert (memory.KEPT_SHARE, memory.COPY_SHARE) == (rows.KEPT_SHARE, torch_engine.CPU_SHARE)
    assert (memory.BOTH_SHARE, memory.GPU_SHARE) == (torch_engine.CHECKING_SHARE, torch_engine.GPU_SHARE)
    assert engine_parts(10, 80, 1, False, memory.BOTH_SHARE)["second and packed weights"] == 10
    assert set(engine_parts(10, 319, 3, False).values()) == {0}
    assert engine_parts(10, 320, 3, True) == {"second and packed weights": 30, "rows kept between turns": 20}
    assert engine_parts(10, 320, 0, True) == {"second and packed weights": 0, "rows kept between turns": 20}


def test_a_worker_needs_its_weights_once_and_two_values_a_layer_of_every_token() -> None:
    shape = shape_of(QWEN3_0_6B)
    parts = worker_parts(shape, 2, 64, 1024)
    assert parts["weights"] == 2 * shape.parameters
    assert parts["keys and values"] == 2 * 28 * 1024 * 2 * 64 * 1024
