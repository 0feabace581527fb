"""The hand-written forward pass is transformers' own, for every family and variant that it accepts; others are
refused."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
import torch

from echo2.core.errors import UserError
from echo2.engines import adapter, compact_cache
from echo2.engines.compact import build_compact
from echo2.engines.model_values import read_architecture
from engine_builders import BUILDERS
from rollout_cases import FAMILIES, VOCAB, hf_logits, snapshot_of, tiny_module
from seeds import pairs

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
]
#: Of these, layers see a part of the tokens, or do not rotate: sequences of the test are longer than their windows.
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA_ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
    GLOBAL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
}
MIXED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None, "head_dim": 16}),
    ("smollm3", {"num_hidden_layers": 4}),
    ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": [LOCAL, GLOBAL], "query_pre_attn_scalar": 9}),
    ("gemma3_text", {"sliding_window": 64, "layer_types": [LOCAL, GLOBAL], "rope_parameters": GEMMA_ROPES}),
    ("gemma3_text", {"sliding_window": 4, "num_hidden_layers": 7}),
    ("qwen3_5_text", {}),
    ("qwen3_5_text", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
    ("qwen3_5_text", {"attention_bias": True, "layer_types": [GLOBAL, "linear_attention", "linear_attention"]}),
]
KINDS = [*BUILDERS, "packed", "in blocks"]
CASES = [*pairs(KINDS, VARIANTS), *pairs(["compact", "packed", "in blocks"], MIXED)]


def filled(build: Any, snapshot: Any) -> Any:
    with torch.inference_mode():
        model = build(snapshot, CPU)
        model.fill(snapshot)
    return model


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_prefill_and_steps_give_the_logprobs_of_transformers(
    kind: str, variant: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, rows repeated, dropped and joined by others on the way, more steps than the cache
    first has room for."""
    family, changes = variant
    module = tiny_module(family, **changes)
    model = filled(BUILDERS.get(kind, build_compact), snapshot_of(module))
    if kind == "in blocks":
        monkeypatch.setattr(compact_cache, "SPLIT_ITEMS", 1)
    if kind == "packed":
        monkeypatch.setattr(adapter, "PACK_ITEMS", 1)
        model.pack()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (3, 9, 5)]
    rows = [list(prompts[i]) for i in (0, 0, 1, 2)]
    with torch.inference_mode():
        cache = model.prefill([array("i", prompt) for prompt in prompts])
        cache = cache.select(torch.tensor([0, 0, 1, 2]))
        for step in range(40):
            if step == 20:
                cache, rows = cache.select(torch.tensor([1, 3])), [rows[1], rows[3]]
            if step in (25, 30):  # shorter ones, one of them empty; then one that is longer than all
                others = [[], [4, 5]] if step == 25 else [torch.randint(VOCAB, (44,), generator=generator).tolist()]
                fresh = model.prefill([array("i", prompt) for prompt in others])
                assert cache.can_join
                cache = cache.join(torch.tensor([1]), fresh, torch.arange(len(others)))
                rows = [rows[1], *others]
            tokens = torch.randint(VOCAB, (len(rows),), generator=generator)
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            logits = model.step(cache, tokens)
            if step in (0, 1, 19, 20, 25, 26, 30, 39):
                _assert_same(module, rows, logits)


@pytest.mark.parametrize("variant", MIXED)
def test_texts_that_are_read_at_once_and_on_a_cache_have_the_logits_of_transformers(
    variant: tuple[str, dict[str, Any]],
) -> None:
    """As checks of other workers, and later turns of a rollout, read them."""
    family, changes = variant
    module = tiny_module(family, **changes)
    model = filled(build_compact, snapshot_of(module))
    generator = torch.Generator().manual_seed(2)
    texts = [array("i", torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in (40, 12)]
    with torch.inference_mode():
        wanted = [hf_logits(module, text.tolist()).log_softmax(-1) for text in texts]
        at_once = torch.cat(list(model.logits(texts, [3, 0], 7)))
        expected = torch.cat([wanted[0][3:-1], wanted[1][:-1]])
        assert (at_once.log_softmax(-1) - expected).abs().max() < 1e-4
        cache, tiles = model.extend(None, texts[0][:15], 0, 64)
        first = torch.cat(list(tiles))
        cache, tiles = model.extend(cache, texts[0][15:], 0, 64)
        in_parts = torch.cat([first, *tiles])
        assert (in_parts.log_softmax(-1) - wanted[0]).abs().max() < 1e-4
        known = model.prefill([texts[0][:14]]).copy(0, 14)
        joined = model.prefill([texts[0][:30], texts[1][:11]], [known, None])
        logits = model.step(joined, torch.tensor([texts[0][30], texts[1][11]]))
        assert (logits.log_softmax(-1) - torch.stack([wanted[0][30], wanted[1][11]])).abs().max() < 1e-4


def _assert_same(module: Any, rows: list[list[int]], logits: torch.Tensor) -> None:
    wanted = torch.stack([hf_logits(module, row)[-1] for row in rows]).log_softmax(-1)
    assert (logits.log_softmax(-1) - wanted).abs().max() < 1e-4


def test_weights_that_are_copied_over_packed_ones_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "PACK_ITEMS", 1)
    model = filled(build_compact, snapshot_of(tiny_module("qwen3")))
    model.pack()
    module = tiny_module("qwen3", seed=1)
    with torch.inference_mode():
        model.unpack()
        model.fill(snapshot_of(module))
        _assert_same(module, [[3, 4, 5]], model.step(model.prefill([array("i", [3, 4])]), torch.tensor([5])))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_bfloat16_weights_are_computed_in_bfloat16_with_float32_logits(family: str) -> None:
    module = tiny_module(family)
    half = module.to(torch.bfloat16)
    snapshot = snapshot_of(module.float())
    from echo2.core.types import Snapshot, TensorBytes

    tensors = {
        name: TensorBytes(
            "BF16", source.shape, half.to(torch.bfloat16).state_dict()[name].view(torch.int16).numpy().tobytes()
        )
        for name, source in snapshot.tensors.items()
    }
    model = filled(build_compact, Snapshot(snapshot.ref, tensors, snapshot.files))
    with torch.inference_mode():
        logits = model.step(model.prefill([array("i", [3, 4])]), torch.tensor([5]))
    assert logits.dtype is torch.float32
    wanted = hf_logits(half.to(torch.bfloat16), [3, 4, 5])[-1].float()
    assert (logits[0].log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < 0.15  # bfloat16 has 8 bits


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma4"}, "gemma4"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 32, "use_sliding_window": True}, "32"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
    ],
)
def test_the_error_names_the_unsupported_architecture(changes: dict[str, Any], named: str) -> None:
    config = json.loads(tiny_module("qwen3").config.to_json_string(use_diff=False))
    with pytest.raises(UserError, match=r"workers.engine = \"auto\" or \"transformers\"") as caught:
        read_architecture(config | changes)
    assert named in str(caught.value)


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(UserError, match="incomplete"):
        read_architecture({"model_type": "qwen3"})


def test_old_rope_keys_are_read_like_new_ones() -> None:
    config = json.loads(tiny_module("llama", rope_parameters=LLAMA3).config.to_json_string(use_diff=False))
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    assert read_architecture(old) == read_architecture(config)
