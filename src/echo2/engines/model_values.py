"""What config.json says of a model: its values, as transformers builds it, and, of a model that `compact` knows, the
architecture that it computes; variants unknown to it are refused. No torch here.

Gemma 3 on the hub names neither its vocabulary nor its context: its class has them. transformers is asked only then; it
takes up to three seconds to import, of which a process that loads a tokenizer spends most anyway.

Source: transformers' configuration and modelling files (`models/{llama,mistral,qwen2,qwen3,qwen3_5,smollm3,gemma3}`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from echo2.core.decide.model_config import context_length, text_part
from echo2.core.errors import UserError
from echo2.weights.format.snapshot_files import read_config

#: Some classes compute these, and leave them out of what they write (Nemotron-H counts its list of layers).
COMPUTED = ("num_hidden_layers", "layer_types")
#: What llama.cpp and MLX compute here, too.
PLAIN_TYPES = ("llama", "qwen2", "qwen3")
#: Their config.json may leave out what their class has.
WITH_DEFAULTS = ("mistral", "smollm3", "gemma3_text", "gemma3", "qwen3_5_text", "qwen3_5")
MODEL_TYPES = (*PLAIN_TYPES, *WITH_DEFAULTS)
ROPE_TYPES = ("default", "linear", "llama3")
#: Eight times as many as the deepest models have. `tensor_shapes` lists every layer that a config.json claims.
LAYERS_MAX = 1000


def read_text_values(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the values of a snapshot's text model.

    Raises:
        PeerError: config.json is missing or is not a JSON object.
    """
    return text_values(read_config(files))


def read_context(files: Mapping[str, bytes]) -> int | None:
    """Return the context length of a snapshot's text model; None if neither config.json nor the class has one.

    Raises:
        PeerError: config.json is missing or is not a JSON object.
    """
    return context_length(read_text_values(files))


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a text model, with at least its vocabulary and context where they are known."""
    values = text_part(config)
    has_both = values.get("vocab_size") is not None and context_length(values) is not None
    return values if has_both else all_values(config)


def all_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of a text model, under transformers' usual names too (`hidden_size` for GPT-2's `n_embd`).
    What config.json says alone, if transformers does not know the model or refuses the values.
    """
    if "model_type" not in config:
        return text_part(config)
    try:
        return values_of(transformers_config(json.dumps(dict(config)).encode()))
    except Exception:  # each class fails in its own way; code that needs a value names what config.json lacks
        return text_part(config)


def transformers_config(config_json: bytes) -> Any:
    """Return transformers' configuration of a config.json. Code that comes with a model is never run.

    Raises: as transformers, which does not know the model or refuses a value.
    """
    from transformers import AutoConfig  # takes three seconds where torch is installed

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config_json)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def values_of(config: Any) -> dict[str, Any]:
    """Return all values of the text model of a configuration of transformers, under its usual names too."""
    text = config.get_text_config()
    values: dict[str, Any] = text.to_dict()
    for usual in (*text.attribute_map, *COMPUTED):
        if values.get(usual) is None:
            values[usual] = getattr(text, usual, None)
    tied = getattr(config, "tie_word_embeddings", None)
    return values if tied is None else {**values, "tie_word_embeddings": tied}


class UnsupportedError(UserError):
    """`compact` does not support a model's variant. `trait`: what it is that it does not support."""

    def __init__(self, message: str, trait: str) -> None:
        super().__init__(message)
        self.trait = trait


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first `share` of a head's dimensions. Of the last four fields, `llama3` uses all
    and `linear` uses only `factor`."""

    kind: str
    theta: float
    share: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class Attention:
    """What differs between the layers of a model. `window`: a token sees so many tokens, its own included; 0: all.
    `rope`: None if queries and keys are not rotated."""

    window: int
    rope: Rope | None


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What names begin with.

    stored   names of parameters
    modules  names of modules, which adapters have
    beside   names of the parameters of other parts, which are passed over
    """

    stored: str = "model."
    modules: str = "model."
    beside: tuple[str, ...] = ()


#: Models with a vision tower, whose text model is computed.
WITH_TOWER = {
    "qwen3_5": Prefixes("model.language_model.", "model.language_model.", ("model.visual.",)),
    "gemma3": Prefixes("language_model.model.", "model.language_model.", ("vision_tower.", "multi_modal_projector.")),
}


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of layers with the gated delta rule (`compact_delta.py`). `kernel`: tokens that the convolution sees."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def tensor_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's parameters."""
        heads, values = self.num_value_heads, self.num_value_heads * self.value_dim
        return {
            "linear_attn.in_proj_qkv.weight": (self.num_channels, hidden_size),
            "linear_attn.in_proj_z.weight": (values, hidden_size),
            "linear_attn.in_proj_b.weight": (heads, hidden_size),
            "linear_attn.in_proj_a.weight": (heads, hidden_size),
            "linear_attn.out_proj.weight": (hidden_size, values),
            "linear_attn.conv1d.weight": (self.num_channels, 1, self.kernel),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (self.value_dim,),
        }


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and variants. Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values.

    query_scale    what queries are multiplied by
    zero_centered  norms multiply by 1 + weight
    gemma          norms stand behind attention and feed-forward, too; embeddings are multiplied by sqrt(hidden_size),
                   and the activation is GELU
    layers         the attention of each layer, or None where it has `delta`; empty: all see all tokens and rotate by
                   `rope`
    gated          attention is multiplied by a gate, which lies behind each head's query
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    qk_norm: bool
    query_scale: float
    zero_centered: bool = False
    gemma: bool = False
    layers: tuple[Attention | None, ...] = ()
    gated: bool = False
    delta: DeltaSizes | None = None
    prefixes: Prefixes = Prefixes()

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its Hugging Face name."""
        d, f, heads, kv = (
            self.hidden_size,
            self.ffn_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.prefixes.stored}embed_tokens.weight": (self.vocab_size, d),
            f"{self.prefixes.stored}norm.weight": (d,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        of_attention = [
            ("self_attn.q_proj", (heads * (2 if self.gated else 1), d), self.qkv_bias),
            ("self_attn.k_proj", (kv, d), self.qkv_bias),
            ("self_attn.v_proj", (kv, d), self.qkv_bias),
            ("self_attn.o_proj", (d, heads), self.out_bias),
        ]
        linears = [
            ("mlp.gate_proj", (f, d), self.ffn_bias),
            ("mlp.up_proj", (f, d), self.ffn_bias),
            ("mlp.down_proj", (d, f), self.ffn_bias),
        ]
        norms = {"input_layernorm": d, "post_attention_layernorm": d}
        if self.gemma:
            norms |= {"pre_feedforward_layernorm": d, "post_feedforward_layernorm": d}
        qk_norms = {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim} if self.qk_norm else {}
        for layer in range(self.num_layers):
            prefix, has_delta = (
                f"{self.prefixes.stored}layers.{layer}.",
                bool(self.layers) and self.layers[layer] is None,
            )
            for name, shape, has_bias in linears if has_delta else of_attention + linears:
                shapes[f"{prefix}{name}.weight"] = shape
                if has_bias:
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
            if has_delta and self.delta is not None:
                shapes |= {prefix + name: shape for name, shape in self.delta.tensor_shapes(d).items()}
            sizes = norms if has_delta else norms | qk_norms
            shapes |= {f"{prefix}{name}.weight": (size,) for name, size in sizes.items()}
        return shapes


def read_architecture(config: Mapping[str, Any], known: Sequence[str] = MODEL_TYPES) -> Architecture:
    """Return the architecture that config.json describes; of these model types alone.

    Raises:
        UserError: `compact` does not support the model type or the variant (the message names the engine that does),
            or config.json is incomplete.
    """
    try:
        _require(config.get("model_type") in known, "model_type", config.get("model_type"))
        values = all_values(config) if config["model_type"] in WITH_DEFAULTS else config
        _check_variant(values)
        arch = _architecture(values)
        if arch.layers and len(arch.layers) != arch.num_layers:
            raise ValueError(f"{len(arch.layers)} layer_types of {arch.num_layers} layers")
        return replace(arch, prefixes=WITH_TOWER.get(config["model_type"], arch.prefixes))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"The model's config.json is incomplete or wrong: {type(error).__name__} {error}.") from error


def _check_variant(config: Mapping[str, Any]) -> None:
    model_type, is_gemma = config["model_type"], config["model_type"] == "gemma3_text"
    activation = "hidden_activation" if is_gemma else "hidden_act"
    function = config.get(activation, "silu")
    _require(function == ("gelu_pytorch_tanh" if is_gemma else "silu"), activation, function)
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        _require(not config.get(key), key, config.get(key))
    may_slide = model_type in ("mistral", "smollm3", "gemma3_text")
    kinds, others = set(config.get("layer_types") or ["full_attention"]), ["sliding_attention"] if may_slide else []
    if model_type == "qwen3_5_text":
        others = ["linear_attention"]
    _require(kinds <= {"full_attention", *others}, "layer_types", sorted(kinds))
    slides = bool(config.get("sliding_window")) and config.get("use_sliding_window", model_type == "llama")
    _require(may_slide or not slides, "sliding_window", config.get("sliding_window"))
    _require(not config.get("quantization_config"), "quantization_config", "set")


def _architecture(config: Mapping[str, Any]) -> Architecture:
    model_type, heads = config["model_type"], int(config["num_attention_heads"])
    layers = int(config["num_hidden_layers"])
    if layers > LAYERS_MAX:
        raise ValueError(f"num_hidden_layers = {layers}; the limit is {LAYERS_MAX}")
    attention_bias, is_gemma = bool(config.get("attention_bias", False)), model_type == "gemma3_text"
    is_hybrid = model_type == "qwen3_5_text"
    head_dim = int(config.get("head_dim") or (128 if model_type == "qwen3" else int(config["hidden_size"]) // heads))
    rope = _rope(config, (config["rope_parameters"] or {})["full_attention"] if is_gemma else None)
    return Architecture(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        ffn_size=int(config["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        max_positions=int(config["max_position_embeddings"]),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        out_bias=attention_bias and model_type != "qwen2",
        ffn_bias=bool(config.get("mlp_bias", False)) and model_type in ("llama", "smollm3"),
        qk_norm=model_type in ("qwen3", "qwen3_5_text", "gemma3_text"),
        query_scale=float(config["query_pre_attn_scalar"] if is_gemma else head_dim) ** -0.5,
        zero_centered=is_gemma or is_hybrid,
        gemma=is_gemma,
        layers=_layers(config, layers, rope),
        gated=is_hybrid,
        delta=_delta(config) if is_hybrid else None,
    )


def _delta(config: Mapping[str, Any]) -> DeltaSizes:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = DeltaSizes(*(int(config[f"linear_{name}"]) for name in names))
    if min(astuple(sizes)) < 1 or sizes.num_value_heads % sizes.num_key_heads:
        raise ValueError(f"{sizes}: each key head needs as many value heads as the others")
    return sizes


def _layers(config: Mapping[str, Any], num_layers: int, rope: Rope) -> tuple[Attention | None, ...]:
    """Return the attention of each layer, None for the delta rule; empty if all layers see all tokens."""
    model_type, window = config["model_type"], int(config.get("sliding_window") or 0)
    if model_type == "mistral":
        return (Attention(window, rope),) * num_layers if window else ()
    if model_type == "smollm3":
        is_rotated = list(config["no_rope_layers"])
        windows = [window if kind == "sliding_attention" else 0 for kind in config["layer_types"]]
        return tuple(
            Attention(one, rope if rotated else None) for one, rotated in zip(windows, is_rotated, strict=True)
        )
    if model_type == "gemma3_text":
        local = Attention(window, _rope(config, config["rope_parameters"]["sliding_attention"]))
        is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
        return tuple(local if one else Attention(0, rope) for one in is_local)
    if model_type == "qwen3_5_text":
        return tuple(Attention(0, rope) if kind == "full_attention" else None for kind in config["layer_types"])
    return ()


def _rope(config: Mapping[str, Any], of_layers: Mapping[str, Any] | None = None) -> Rope:
    """`of_layers`: what a model says of some of its layers. transformers 5 writes `rope_parameters`; 4 wrote
    `rope_theta` and `rope_scaling`."""
    values = of_layers or config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = values.get("rope_type") or values.get("type") or "default"
    _require(kind in ROPE_TYPES, "rope_type", kind)
    share = float(values.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    _require(share == 1.0 or config["model_type"] == "qwen3_5_text", "partial_rotary_factor", share)
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return Rope(kind, theta, share)
    if kind == "linear":
        return Rope(kind, theta, share, float(values["factor"]))
    return Rope(
        kind,
        theta,
        share,
        float(values["factor"]),
        float(values["low_freq_factor"]),
        float(values["high_freq_factor"]),
        int(values["original_max_position_embeddings"]),
    )


def _require(is_known: bool, key: str, value: object) -> None:
    if not is_known:
        trait = f"{key} = {value!r}"
        raise UnsupportedError(
            f"The compact engine supports {', '.join(MODEL_TYPES)} models with {' or '.join(ROPE_TYPES)} rotary "
            f'embeddings; this model has {trait}. Set workers.engine = "auto" or "transformers".',
            trait,
        )
