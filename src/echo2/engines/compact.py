"""The forward pass of the engine `compact`: Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Gemma 3 in plain torch, for
inference only.

It is fast on small models because it runs fewer and larger operations: one product for query, key and value, one for
gate and up, joint normalisation and rotation of queries and keys, one prefill per prompt whose keys and values are
copied to its samples, and a cache that is written in place. A test checks that it agrees with transformers within 1e-4
in logprobs (float32).

Shape suffixes: R = prompts, B = rows, T = tokens of a row, D = hidden, H = query heads, K = key-value heads, G = H / K,
E = head dim, F = ffn, L = layers, C = columns of the cache (token slots), V = vocabulary.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from echo2.core.errors import PeerError
from echo2.core.types import Snapshot
from echo2.engines import forms
from echo2.engines.adapter import Adapter, Linear, LowRank, RowAdapters, join
from echo2.engines.compact_cache import CompactCache
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine, RouteCheck
from echo2.engines.model_values import Architecture, Attention, Rope, read_architecture
from echo2.engines.rows import Cache, Limits
from echo2.engines.snapshot_tensors import computing_dtype
from echo2.engines.torch_engine import Model, TorchDecoder
from echo2.weights.format.snapshot_files import end_tokens, read_config

QKV, GATE_UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
OUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
FUSED = QKV, (OUT,), GATE_UP, (DOWN,)
"""Linear maps of a layer that are computed as one, in the order of `LayerAdapters`."""
PREFILL_TOKENS = 1 << 15
"""Prompt tokens prefilled at once (at least one prompt); bounds the memory of long prompts."""
PIECE_TOKENS = 1 << 8
"""Tokens of a sequence that `CompactModel.extend` reads at once; bounds the mask."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotations = Sequence[tuple[Tensor, Tensor]]
"""cos and sin [B, T, 1, E], for each of a model's rotary embeddings."""


def make_engine(device: str, slots: int) -> Engine:
    """The engine `compact`."""
    return DecodeLoop(TorchDecoder(build_compact, device), slots)


class LayerAdapters(NamedTuple):
    """Adapters of the linear maps of one layer, fused as these are."""

    qkv: LowRank | RowAdapters | None = None
    out: LowRank | RowAdapters | None = None
    gate_up: LowRank | RowAdapters | None = None
    down: LowRank | RowAdapters | None = None


NO_ADAPTERS = LayerAdapters()


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. `qk_norm_HE`: the norm of queries and keys, one row per head. `after_*`: of Gemma."""

    attention_norm_D: Tensor
    qkv: Linear
    qk_norm_HE: Tensor | None
    out: Linear
    ffn_norm_D: Tensor
    gate_up: Linear
    down: Linear
    after_attention_D: Tensor | None = None
    after_ffn_D: Tensor | None = None
    adapters: LayerAdapters = NO_ADAPTERS


class CompactModel(Model):
    """One policy."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, end: tuple[int, ...]) -> None:
        self._arch = arch
        weights = _Weights(arch, dtype, device)
        self.places = weights.places
        self._embed_VD = weights.new("model.embed_tokens.weight")
        self._final_norm_D = weights.new("model.norm.weight")
        self._head = Linear(self._embed_VD if arch.tied else weights.new("lm_head.weight"))
        if arch.tied:
            self.places["lm_head.weight"] = self.places["model.embed_tokens.weight"]
        self._layers = [weights.layer(f"model.layers.{layer}.") for layer in range(arch.num_layers)]
        self._attention = arch.layers or (Attention(0, arch.rope),) * arch.num_layers
        self._windows = {one.window for one in self._attention}
        ropes = list(dict.fromkeys(one.rope for one in self._attention if one.rope is not None))
        self._frequencies = [rope_frequencies(one, arch.head_dim).to(device).repeat(2) for one in ropes]
        self._rope_at = [None if one.rope is None else ropes.index(one.rope) for one in self._attention]
        self.limits = Limits(arch.vocab_size, arch.max_positions, end)
        self.dtype = self._embed_VD.dtype
        self.architecture: tuple[Architecture, torch.dtype] = (arch, self.dtype)
        shapes = arch.tensor_shapes().items()
        self.linears = {name[:-7]: (shape[0], shape[1]) for name, shape in shapes if name.endswith("_proj.weight")}
        self._forms: dict[str, CompactModel] = {}  # of these weights; shared by all models over them

    def adapted(self, adapter: Adapter) -> CompactModel:

        def fused(prefix: str, *names: str) -> LowRank | None:
            return join([(adapter.get(prefix + name), self.linears[prefix + name][0]) for name in names])

        prefixes = [f"model.layers.{at}." for at in range(len(self._layers))]
        return self._with([LayerAdapters(*(fused(prefix, *names) for names in FUSED)) for prefix in prefixes])

    def _with(self, adapters: Sequence[LayerAdapters]) -> CompactModel:
        """Return a model that shares these weights and has these adapters, one for each layer."""
        model = copy.copy(self)
        model._layers = [replace(layer, adapters=own) for layer, own in zip(self._layers, adapters, strict=True)]
        return model

    def formed(self, form: str) -> CompactModel:
        if form not in self._forms:
            if trait := forms.misfit(self._arch.tensor_shapes(), form):
                raise PeerError("unknown_form", f"there is no form {form} of this model: {trait}")
            whole = CompactModel(self._arch, torch.float32, self._embed_VD.device, self.limits.end_tokens)
            for name in self._arch.tensor_shapes():
                kind = forms.format_of(name, form)
                for source, into in zip(self.places[name], whole.places[name], strict=True):
                    into.copy_(forms.rounded(source, kind) if kind else source)
            self._forms[form] = whole
        return self._forms[form]._with([layer.adapters for layer in self._layers])

    def mixed(self, policies: Sequence[tuple[CompactModel, Tensor]]) -> CompactModel:
        """Return a model for a batch in which each of these policies, all over the same weights, has its own rows."""

        def of_rows(at: int, place: int) -> RowAdapters | None:
            parts = [(rows, policy._layers[at].adapters[place]) for policy, rows in policies]
            there = tuple((rows, low) for rows, low in parts if isinstance(low, LowRank))
            return RowAdapters(there) if there else None

        places = range(len(FUSED))
        return self._with([LayerAdapters(*(of_rows(at, one) for one in places)) for at in range(len(self._layers))])

    def pack(self) -> None:
        for linear in self._linear_maps():
            linear.pack()

    def unpack(self) -> None:
        self._forms.clear()
        for linear in self._linear_maps():
            linear.unpack()

    def _linear_maps(self) -> list[Linear]:
        return [self._head, *(one for at in self._layers for one in (at.qkv, at.out, at.gate_up, at.down))]

    def prefill(
        self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = (), keeps_routes: bool = False
    ) -> CompactCache:
        """See `Model.prefill`. Prompts are right-padded, and masks hide the padding."""
        arch, device = self._arch, self._embed_VD.device
        lengths = [len(prompt) for prompt in prompts]
        known = known or [None] * len(prompts)
        firsts = [one.longest if isinstance(one, CompactCache) else 0 for one in known]
        firsts_R, columns = torch.tensor(firsts, device=device), max(lengths)
        # Rows with known tokens are padded behind these, so they may need more columns than the longest prompt.
        room = columns + max(length - first if first else 0 for length, first in zip(lengths, firsts, strict=True))
        kv = self._embed_VD.new_zeros((arch.num_layers, 2, len(prompts), arch.num_kv_heads, room, arch.head_dim))
        for row, one in enumerate(known):
            if isinstance(one, CompactCache):
                kv[:, :, row, :, : one.longest] = one.kv[:, :, 0]
        step = max(1, PREFILL_TOKENS // max(1, room))
        for read, rows in (
            (self._read, [row for row, first in enumerate(firsts) if not first and lengths[row]]),
            (self._read_on, [row for row, first in enumerate(firsts) if 0 < first < lengths[row]]),
        ):
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                at_R = torch.tensor(part, device=device)
                read(kv, at_R, right_padded([prompts[row][firsts[row] :] for row in part]).to(device), firsts_R[at_R])
        return CompactCache(kv, torch.tensor(lengths, device=device), columns)

    def _read(self, kv: Tensor, at_R: Tensor, tokens_RT: Tensor, first_R: Tensor) -> Tensor:
        """Read prompts from their beginning into these rows."""
        columns = tokens_RT.shape[1]

        def attend(layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[layer, 0, at_R, :, :columns] = k_BTKE.transpose(1, 2)
            kv[layer, 1, at_R, :, :columns] = v_BTKE.transpose(1, 2)
            return self._causal(layer, q_BTHE, k_BTKE, v_BTKE)

        rotations = self._rotations(torch.arange(columns, device=kv.device)[None])
        return self._run(self._embedded(tokens_RT), rotations, attend)

    def _read_on(self, kv: Tensor, at_R: Tensor, tokens_RT: Tensor, first_R: Tensor) -> Tensor:
        """Read more tokens into these rows, whose first `first_R` tokens are in the cache already. Returns [R, T, D]
        before the last norm."""
        columns = tokens_RT.shape[1]
        position_RT = first_R[:, None] + torch.arange(columns, device=kv.device)
        used = int(first_R.max()) + columns
        behind_R1TC = (position_RT[..., None] - torch.arange(used, device=kv.device))[:, None]
        sees = {window: _sees(behind_R1TC, window) for window in self._windows}

        def attend(layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[layer, 0, at_R[:, None], :, position_RT] = k_BTKE
            kv[layer, 1, at_R[:, None], :, position_RT] = v_BTKE
            out_BHTE = functional.scaled_dot_product_attention(
                q_BTHE.transpose(1, 2),
                kv[layer, 0, at_R, :, :used],
                kv[layer, 1, at_R, :, :used],
                attn_mask=sees[self._attention[layer].window],
                scale=self._arch.query_scale,
                enable_gqa=q_BTHE.shape[2] > k_BTKE.shape[2],
            )
            return out_BHTE.transpose(1, 2)

        return self._run(self._embedded(tokens_RT), self._rotations(position_RT), attend)

    def extend(
        self, cache: Cache | None, tokens: array[int], first: int, most: int, routes: RouteCheck | None = None
    ) -> tuple[Cache, Iterator[Tensor]]:
        if cache is None:
            arch = self._arch
            kv = self._embed_VD.new_zeros((arch.num_layers, 2, 1, arch.num_kv_heads, 0, arch.head_dim))
            cache = CompactCache(kv, torch.zeros(1, dtype=torch.long, device=kv.device), 0)
        assert isinstance(cache, CompactCache)
        cache.grow(len(tokens))
        return cache, self._pieces(cache, tokens, first, most)

    def _pieces(self, cache: CompactCache, tokens: array[int], first: int, most: int) -> Iterator[Tensor]:
        """Read tokens into a cache of one row that has room for them, and yield the logits from place `first` on."""
        only_R = torch.zeros(1, dtype=torch.long, device=cache.kv.device)
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            hidden_RTD = self._read_on(cache.kv, only_R, right_padded([piece]).to(cache.kv.device), cache.lengths_B)
            cache.lengths_B, cache.longest = cache.lengths_B + len(piece), cache.longest + len(piece)
            if start + len(piece) > first:
                for tile_ND in hidden_RTD[0, max(0, first - start) :].split(most):
                    yield self._logits(tile_ND)

    def logits(self, sequences: Sequence[array[int]], firsts: Sequence[int], most: int) -> Iterator[Tensor]:
        tokens_RT = right_padded(sequences).to(self._embed_VD.device)
        rotations = self._rotations(torch.arange(tokens_RT.shape[1], device=tokens_RT.device)[None])
        hidden_RTD = self._run(self._embedded(tokens_RT), rotations, self._causal)
        for hidden_TD, first, sequence in zip(hidden_RTD, firsts, sequences, strict=True):
            for tile_ND in hidden_TD[first : len(sequence) - 1].split(most):
                yield self._logits(tile_ND)

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        assert isinstance(cache, CompactCache)
        arch, rows = self._arch, len(tokens_B)
        cache.open_column()
        kv, position_B, place_B = cache.kv, cache.lengths_B, cache.place_B
        masks = {window: cache.mask_B11C(window if window < cache.longest else 0) for window in self._windows}
        group = arch.num_heads // arch.num_kv_heads

        def attend(layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[layer, :, place_B, :, position_B] = torch.stack((k_BTKE[:, 0], v_BTKE[:, 0]), 1)
            q_BKGE = q_BTHE.reshape(rows, arch.num_kv_heads, group, arch.head_dim) * arch.query_scale
            out_BKGE = cache.attention(layer, q_BKGE, masks[self._attention[layer].window])
            return out_BKGE.view(rows, 1, arch.num_heads, arch.head_dim)

        rotations = self._rotations(position_B[:, None])
        logits_BV = self._logits(self._run(self._embedded(tokens_B)[:, None], rotations, attend)[:, 0])
        cache.lengths_B = position_B + 1
        return logits_BV

    def _run(self, x_BTD: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """Run all layers. `attend(layer, queries, keys, values)` stores keys and values, and returns the attention."""
        arch = self._arch
        rows, columns, _ = x_BTD.shape
        heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(x_BTD, layer.attention_norm_D), layer.adapters.qkv)
            qkv_BTHE = qkv.view(rows, columns, heads + 2 * kv_heads, head_dim)
            qk_BTHE, v_BTKE = qkv_BTHE.split((heads + kv_heads, kv_heads), dim=2)
            if layer.qk_norm_HE is not None:
                qk_BTHE = self._norm(qk_BTHE, layer.qk_norm_HE)
            if (at := self._rope_at[index]) is not None:
                qk_BTHE = rotate(qk_BTHE, *rotations[at])
            q_BTHE, k_BTKE = qk_BTHE.split((heads, kv_heads), dim=2)
            attended = attend(index, q_BTHE, k_BTKE, v_BTKE).reshape(rows, columns, heads * head_dim)
            out_BTD = layer.out(attended, layer.adapters.out)
            x_BTD = x_BTD + (
                out_BTD if layer.after_attention_D is None else self._norm(out_BTD, layer.after_attention_D)
            )
            out_BTD = self._feed_forward(layer, self._norm(x_BTD, layer.ffn_norm_D))
            x_BTD = x_BTD + (out_BTD if layer.after_ffn_D is None else self._norm(out_BTD, layer.after_ffn_D))
        return x_BTD

    def _feed_forward(self, layer: Layer, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = layer.gate_up(x_BTD, layer.adapters.gate_up).chunk(2, dim=-1)
        gate_BTF = functional.gelu(gate_BTF, approximate="tanh") if self._arch.gemma else functional.silu(gate_BTF)
        return layer.down(gate_BTF * up_BTF, layer.adapters.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._arch.rms_eps, self._arch.gemma)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self._embed_VD[tokens]
        return x * x.new_tensor(self._arch.hidden_size**0.5) if self._arch.gemma else x

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        return self._head(self._norm(hidden_BD, self._final_norm_D)).float()

    def _rotations(self, position_BT: Tensor) -> Rotations:
        """In the computing dtype; the angles are float32, as in transformers."""
        angles = [position_BT[..., None, None].float() * frequency_E for frequency_E in self._frequencies]
        return [(one.cos().to(self.dtype), one.sin().to(self.dtype)) for one in angles]

    def _causal(self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        """Self-attention of sequences that are read from their beginning."""
        window, columns = self._attention[layer].window, q_BTHE.shape[1]
        mask_TC = None
        if 0 < window < columns:
            column_T = torch.arange(columns, device=q_BTHE.device)
            mask_TC = _sees(column_T[:, None] - column_T, window)
        out_BHTE = functional.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            attn_mask=mask_TC,
            is_causal=mask_TC is None,
            scale=self._arch.query_scale,
            enable_gqa=q_BTHE.shape[2] > k_BTKE.shape[2],
        )
        return out_BHTE.transpose(1, 2)


def _sees(behind: Tensor, window: int) -> Tensor:
    """Whether a token sees one that is so many places behind it; 0: its own."""
    return (behind >= 0) & (behind < window) if window else behind >= 0


def right_padded(sequences: Sequence[array[int]]) -> Tensor:
    """Return the token ids [R, T] of sequences of different lengths, padded with 0."""
    tokens_RT = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        tokens_RT[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
    return tokens_RT


def rms_norm(x: Tensor, weight: Tensor, eps: float, is_gemma: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension, the division in float32; Gemma's x / rms(x) * (1 + weight), all in
    float32. On a GPU it is one kernel instead of six: there a step takes as long as its kernels are many."""
    if is_gemma:
        wide = functional.rms_norm(x.float(), x.shape[-1:], eps=eps)
        return (wide * (1.0 + weight.float())).to(x.dtype)
    if x.is_cuda:
        return weight * functional.rms_norm(x, x.shape[-1:], eps=eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate(x_BTHE: Tensor, cos_BT1E: Tensor, sin_BT1E: Tensor) -> Tensor:
    """Rotary embedding of pairs (e, e + E/2), as Hugging Face lays them out."""
    first, second = x_BTHE.chunk(2, dim=-1)
    return x_BTHE * cos_BT1E + torch.cat((-second, first), dim=-1) * sin_BT1E


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position [E / 2], float32. `llama3` divides those of long wavelengths by `factor`, with a blend."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = ((rope.original_positions / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequency / rope.factor + blend * frequency
    return frequency


class _Weights:
    """Allocates weights. `places`: the destination of each tensor of a snapshot, by name; several may be parts of one
    fused tensor."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self._shapes = arch.tensor_shapes()
        self.places: dict[str, tuple[Tensor, ...]] = {}

    def new(self, *names: str) -> Tensor:
        """Allocate one tensor that holds these parameters one behind the other."""
        shapes = [self._shapes[name] for name in names]
        whole = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        parts = whole.split([shape[0] for shape in shapes])
        self.places.update((name, (part,)) for name, part in zip(names, parts, strict=True))
        return whole

    def layer(self, prefix: str) -> Layer:
        """Allocate the layer whose parameter names begin with `prefix`."""

        def fused(*names: str) -> Linear:
            has_bias = f"{prefix}{names[0]}.bias" in self._shapes
            matrix = self.new(*(f"{prefix}{name}.weight" for name in names))
            return Linear(matrix, self.new(*(f"{prefix}{name}.bias" for name in names)) if has_bias else None)

        # Gemma's `post_attention_layernorm` is what its name says; the others' comes before the feed-forward.
        gemma = self._arch.gemma
        ffn = "pre_feedforward" if gemma else "post_attention"
        return Layer(
            self.new(f"{prefix}input_layernorm.weight"),
            fused(*QKV),
            self._qk_norm(f"{prefix}self_attn.") if self._arch.qk_norm else None,
            fused(OUT),
            self.new(f"{prefix}{ffn}_layernorm.weight"),
            fused(*GATE_UP),
            fused(DOWN),
            self.new(f"{prefix}post_attention_layernorm.weight") if gemma else None,
            self.new(f"{prefix}post_feedforward_layernorm.weight") if gemma else None,
        )

    def _qk_norm(self, prefix: str) -> Tensor:
        """Allocate the query and key norms as one tensor: a row for each query head, then one for each key head."""
        heads, kv_heads = self._arch.num_heads, self._arch.num_kv_heads
        norm_HE = torch.empty((heads + kv_heads, self._arch.head_dim), dtype=self._dtype, device=self._device)
        self.places[f"{prefix}q_norm.weight"] = norm_HE[:heads].unbind()
        self.places[f"{prefix}k_norm.weight"] = norm_HE[heads:].unbind()
        return norm_HE


def build_compact(snapshot: Snapshot, device: torch.device) -> CompactModel:
    """Build the model of a snapshot in the dtype of its largest tensor; its weights are not loaded yet.

    Raises:
        PeerError: the snapshot's files are wrong.
        UserError: this engine does not support the architecture.
    """
    arch = read_architecture(read_config(snapshot.files))
    return CompactModel(arch, computing_dtype(snapshot), device, end_tokens(snapshot.files))
