"""A model's sizes, layer by layer, from the values of its configuration: what the forecast of memory needs.

A layer has a mixer of tokens and a feed-forward part, or one of the two (Nemotron-H):

    mixers   attention, within a window or not; latent attention (DeepSeek); the gated delta rule (Qwen3-Next, Qwen3.5);
             Mamba 1 and 2; short convolutions (LFM2)
    parts    dense; or a mixture of experts, of which a router chooses some for each token, beside shared ones

Activations are bytes that autograd keeps of a token, by kind as they were measured in transformers' models
(`tests/unit/test_learner_model_shape.py` counts them). Recurrent layers are those of its plain PyTorch code; kernels of
fla and mamba-ssm keep less. A configuration that does not state its layers gives no shape, not a wrong one.

D hidden, F feed-forward, H and K values of all heads' queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from echo2.core.decide.model_config import context_length, is_sparse, num_chosen, num_experts

#: Values of a configuration (`engines/model_values.py`).
Values: TypeAlias = "Mapping[str, Any]"
#: Chunk of the gated delta rule in transformers.
DELTA_CHUNK = 64
#: Share of a recurrent layer's activations that remains in bfloat16: its products are 16 bits, its scan is not.
RECURRENT_SHARE = 0.72
#: Model types whose experts have `intermediate_size`, although others have a value of their own.
WIDE_EXPERTS = frozenset({"gpt_oss", "granitemoehybrid", "mixtral", "olmoe"})
#: Model types whose two matrices of the feed-forward part have no gate beside them.
UNGATED = frozenset(
    {"apertus", "arcee", "gpt2", "gpt_neox", "mpt", "nemotron", "nemotron_h", "opt", "phi", "starcoder2"}
)
#: Model types whose layers are built in other ways than their values say here.
UNKNOWN_LAYERS = frozenset({"falcon", "llama4", "llama4_text"})
#: Model types whose queries have a gate of their size.
GATED_QUERIES = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
QK_NORM = frozenset({"gemma3_text", "gemma4_text", "lfm2", "lfm2_moe", "olmoe", "qwen3", "qwen3_moe"}) | GATED_QUERIES


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer, or a part of one.

    linear   inputs and outputs of its linear maps, to which adapters of `all-linear` are added
    others   other parameters: experts, convolutions. Norms and biases, less than a thousandth, are left out
    kept     bytes of activations per token, in float32
    kept16   the same where products are bfloat16
    cache    values of keys and values per token that decoding keeps, of the last `window` tokens (0: of all)
    state    values per rollout that decoding keeps, however long it is
    stacked  inputs and outputs of all experts' linear maps together; those before the activation are one map
    """

    linear: tuple[tuple[int, int], ...] = ()
    others: int = 0
    kept: int = 0
    kept16: int = 0
    cache: int = 0
    window: int = 0
    state: int = 0
    stacked: int = 0

    @property
    def parameters(self) -> int:
        return self.others + sum(rows * columns for rows, columns in self.linear)

    def __add__(self, other: LayerShape) -> LayerShape:
        """Return both parts together. One of them has no cache."""
        return LayerShape(
            self.linear + other.linear,
            self.others + other.others,
            self.kept + other.kept,
            self.kept16 + other.kept16,
            self.cache + other.cache,
            self.window or other.window,
            self.state + other.state,
            self.stacked + other.stacked,
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `others`: parameters beside layers and embedding; `active`: of all, those that a token passes
    through; `stored_bytes`: bytes per parameter in the stored model.
    """

    vocab: int
    hidden: int
    layers: tuple[LayerShape, ...]
    tied: bool
    max_positions: int
    stored_bytes: int = 4
    others: int = 0
    active: int = 0

    @property
    def vocabulary(self) -> int:
        """Parameters of one embedding."""
        return self.vocab * self.hidden

    @property
    def largest_layer(self) -> int:
        return max(layer.parameters for layer in self.layers)

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * (1 if self.tied else 2)
        return embeddings + self.others + sum(layer.parameters for layer in self.layers)

    @property
    def linear_parameters(self) -> int:
        """Parameters of the layers' linear maps, which 4 bits can hold."""
        return sum(rows * columns for layer in self.layers for rows, columns in layer.linear)

    @property
    def largest_linear(self) -> int:
        """Parameters of the largest linear map in a layer."""
        return max(rows * columns for layer in self.layers for rows, columns in layer.linear)

    def adapter_parameters(self, rank: int, has_experts: bool = False) -> int:
        """Parameters of low-rank adapters on every linear layer except the output head; `has_experts`: and on the
        experts of a mixture."""
        linear = sum(rows + columns for layer in self.layers for rows, columns in layer.linear)
        return rank * (linear + (sum(layer.stacked for layer in self.layers) if has_experts else 0))


def read_shape(values: Values) -> ModelShape | None:
    """Read the sizes of a text model. None if one is missing or bad, or there is a layer of an unknown kind."""
    try:
        return _shape(values)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _shape(values: Values) -> ModelShape:
    if values.get("model_type") in UNKNOWN_LAYERS:
        raise ValueError("model_type")
    vocab, hidden = _size(values, "vocab_size"), _size(values, "hidden_size")
    kinds = values.get("layer_types") or ["full_attention"] * _size(values, "num_hidden_layers")
    layers, inactive = [], 0
    for number, kind in enumerate(kinds):
        layer, unused = _layer(values, number, kind)
        layers.append(layer)
        inactive += unused
    others = 0
    if width := values.get("hidden_size_per_layer_input"):  # Gemma 4: an embedding for each layer
        others = (_size(values, "vocab_size_per_layer_input") + hidden) * len(layers) * width
    if values.get("model_type") == "gpt2":
        others = _size(values, "n_positions") * hidden
    stored = 2 if str(values.get("dtype") or values.get("torch_dtype")).endswith(("float16", "bfloat16")) else 4
    tied = bool(values.get("tie_word_embeddings", False))
    shape = ModelShape(vocab, hidden, tuple(layers), tied, context_length(values) or 1 << 20, stored, others)
    if shape.max_positions < 1:
        raise ValueError("no positions")
    return replace(shape, active=shape.parameters - inactive)


def _size(values: Values, name: str) -> int:
    value = int(values[name])
    if value < 1:
        raise ValueError(name)
    return value


def _layer(values: Values, number: int, kind: str) -> tuple[LayerShape, int]:
    """Return a layer, and how many of its parameters a token does not use."""
    alone = values.get("model_type") in ("nemotron_h", "mamba", "mamba2")  # each layer is one part
    if alone and kind == "moe":
        return _mixture(values)
    if alone and kind == "mlp":
        return _dense(values, _size(values, "intermediate_size")), 0
    mixer = _mixer(values, number, kind)
    if alone:
        return mixer, 0
    part, unused = _mixture(values) if is_sparse(values, number) else (_dense_part(values, number), 0)
    if values.get("model_type") == "granitemoehybrid":
        part += replace(_dense(values, _size(values, "shared_intermediate_size")), kept=0, kept16=0)
    return mixer + part, unused


def _mixer(values: Values, number: int, kind: str) -> LayerShape:
    if kind in ("full_attention", "attention", "sliding_attention", "chunked_attention"):
        return _latent(values) if values.get("kv_lora_rank") else _attention(values, number, kind)
    recurrent: Mapping[str, tuple[str, Callable[[Values], LayerShape]]] = {
        "linear_num_value_heads": ("linear_attention", _delta_rule),
        "conv_L_cache": ("conv", _convolution),
        "mamba_n_heads": ("mamba linear_attention", _mamba2),
        "mamba_num_heads": ("mamba linear_attention", _mamba2),
        "n_groups": ("mamba linear_attention", _mamba2),
        "time_step_rank": ("mamba linear_attention", _mamba1),
    }
    for name, (kinds, make) in recurrent.items():
        if name in values and kind in kinds:
            return make(values)
    raise ValueError(kind)


def _attention(values: Values, number: int, kind: str) -> LayerShape:
    d, heads, model_type = _size(values, "hidden_size"), _size(values, "num_attention_heads"), values.get("model_type")
    kv_heads = int(values.get("num_key_value_heads") or heads)
    own = (values.get("per_layer_config") or {}).get(f"{number:02d}") or {}
    head_dim = int(own.get("head_dim") or values.get("head_dim") or (128 if model_type == "qwen3" else d // heads))
    if min(heads, kv_heads, head_dim) < 1:
        raise ValueError("heads")
    h, k = heads * head_dim, kv_heads * head_dim
    gate, norms = h if model_type in GATED_QUERIES else 0, h + k if model_type in QK_NORM else 0
    is_windowed = kind == "sliding_attention" or values.get("use_sliding_window") or model_type == "mistral"
    linear, more = [(d, h + gate), (d, k), (d, k), (h, d)], 0
    if model_type in ("gemma3_text", "gemma4_text"):  # norms behind both parts, too
        more = d
    if width := values.get("hidden_size_per_layer_input"):
        linear, more = [*linear, (d, width), (width, d)], 2 * d
    return LayerShape(
        tuple(linear),
        # a norm: its input and the normed values; products: their inputs; queries, keys, values and the result, each
        # with all heads, because of our own mask
        kept=4 * (3 * d + 4 * h + 2 * norms + 4 * gate + 9 * more // 2),
        kept16=13 * d + 8 * h + 6 * norms + 6 * gate + 20 * more,  # norms stay float32; inputs are cast for themselves
        cache=2 * k,
        window=int(values.get("sliding_window") or 0) if is_windowed else 0,
    )


def _latent(values: Values) -> LayerShape:
    d, heads, rope = _size(values, "hidden_size"), _size(values, "num_attention_heads"), int(values["qk_rope_head_dim"])
    q, v = heads * (_size(values, "qk_nope_head_dim") + rope), heads * _size(values, "v_head_dim")
    low, inner = _size(values, "kv_lora_rank"), int(values.get("q_lora_rank") or 0)
    queries = ((d, inner), (inner, q)) if inner else ((d, q),)
    keys = ((d, low + rope), (low, q - heads * rope + v), (v, d))
    kept = 37 * (q + v) + 8 * (low + inner)
    return LayerShape((*queries, *keys), kept=12 * d + kept, kept16=13 * d + kept, cache=q + v)


def _delta_rule(values: Values) -> LayerShape:
    d, heads = _size(values, "hidden_size"), _size(values, "linear_num_value_heads")
    key, value = _size(values, "linear_key_head_dim"), _size(values, "linear_value_head_dim")
    keys, width = _size(values, "linear_num_key_heads") * key, heads * value
    chunked = heads * (12 * (key + value) + 5 * DELTA_CHUNK + key * value // DELTA_CHUNK) + 6 * keys
    return _recurrent(
        ((d, 2 * keys + width), (d, width), (d, heads), (d, heads), (width, d)),
        d,
        chunked,
        (2 * keys + width) * _size(values, "linear_conv_kernel_dim"),
        heads * key * value,
    )


def _mamba2(values: Values) -> LayerShape:
    def one(*names: str) -> int:
        return _size(values, next(name for name in names if name in values))

    d, state = one("hidden_size"), one("mamba_d_state", "ssm_state_size", "state_size")
    heads = one("mamba_n_heads", "mamba_num_heads", "num_heads")
    width = heads * one("mamba_d_head", "mamba_head_dim", "head_dim")
    groups, chunk = one("mamba_n_groups", "n_groups"), one("mamba_chunk_size", "chunk_size")
    mixed = width + 2 * groups * state
    chunked = 27 * width // 2 + heads * (3 * chunk + 6 * state)
    kernel = one("mamba_d_conv", "conv_kernel")
    return _recurrent(((d, width + mixed + heads), (width, d)), d, chunked, mixed * kernel, width * state)


def _mamba1(values: Values) -> LayerShape:
    d, state = _size(values, "hidden_size"), _size(values, "state_size")
    width, rank = int(values.get("expand", 2)) * d, _size(values, "time_step_rank")
    linear = ((d, 2 * width), (width, rank + 2 * state), (rank, width), (width, d))
    layer = _recurrent(linear, d, width * (9 + 3 * state), width * _size(values, "conv_kernel"), width * state)
    return replace(layer, others=layer.others + width * state, kept16=layer.kept)


def _convolution(values: Values) -> LayerShape:
    d, kernel = _size(values, "hidden_size"), _size(values, "conv_L_cache")
    layer = _recurrent(((d, 3 * d), (d, d)), d, 6 * d, d * kernel, 0)
    return replace(layer, kept16=21 * d)


def _recurrent(linear: tuple[tuple[int, int], ...], hidden: int, chunked: int, conv: int, state: int) -> LayerShape:
    """Return a mixer with a state. `chunked`: values that its scan keeps of a token; `conv`: of its convolution."""
    kept = 4 * (3 * hidden + chunked)
    return LayerShape(linear, conv, kept, int(RECURRENT_SHARE * kept), state=conv + state)


def _mixture(values: Values) -> tuple[LayerShape, int]:
    """Return a mixture of experts, and how many of its parameters a token does not use."""
    d, experts, model_type = _size(values, "hidden_size"), num_experts(values), values.get("model_type")
    chosen = num_chosen(values)
    if not 0 < chosen <= experts:
        raise ValueError("num_experts_per_tok")
    own = None if model_type in WIDE_EXPERTS else values.get("moe_intermediate_size")
    width, narrow = int(own or values["intermediate_size"]), int(values.get("moe_latent_size") or d)
    each = _matrices(values) * narrow * width
    shared = values.get("shared_expert_intermediate_size") or values.get("moe_shared_expert_intermediate_size")
    shared = int(shared or int(values.get("n_shared_experts") or 0) * width)
    linear = tuple(_maps(values, shared)) if shared else ()
    if narrow != d:
        linear = (*linear, (d, narrow), (narrow, d))
    # of each chosen expert: its input and result in its order, gate and upper values, their products; router values
    routed = 4 * (chosen * (2 * narrow + 4 * width + 9) + experts + 12)
    part = LayerShape(
        linear,
        experts * (each + d),
        stacked=experts * (2 * narrow + _matrices(values) * width),
        kept=12 * d + routed + 16 * shared,
        kept16=13 * d + routed + 8 * shared,
    )
    return part, (experts - chosen) * each


def _dense_part(values: Values, number: int) -> LayerShape:
    width = int(values.get("intermediate_size") or values.get("n_inner") or 4 * _size(values, "hidden_size"))
    if values.get("model_type") == "lfm2" and values.get("block_auto_adjust_ff_dim"):
        multiple = _size(values, "block_multiple_of")
        width = int(float(values.get("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    return _dense(values, width)


def _dense(values: Values, width: int) -> LayerShape:
    d = _size(values, "hidden_size")
    if width < 1:
        raise ValueError("intermediate_size")
    return LayerShape(tuple(_maps(values, width)), kept=4 * (3 * d + 4 * width), kept16=13 * d + 8 * width)


def _matrices(values: Values) -> int:
    return 2 if values.get("model_type") in UNGATED else 3


def _maps(values: Values, width: int) -> list[tuple[int, int]]:
    d = _size(values, "hidden_size")
    return [(d, width)] * (_matrices(values) - 1) + [(width, d)]
