"""The fast engine's forward pass: Llama, Qwen2 and Qwen3 in plain torch, inference only.

What makes it fast on small models is fewer and larger operations: query, key and value in one product, gate and up in
one, queries and keys normalised and rotated together, each prompt read once and its keys and values copied to its
samples, a cache that is written in place. It must agree with transformers within 1e-4 in logprobs (float32); a test
holds it.

Shape suffixes: R = prompts, B = rows, T = tokens of a row, D = hidden, H = query heads, K = key-value heads, G = H / K,
E = head dim, F = ffn, L = layers, C = columns of the cache (token slots), V = vocabulary.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from echo2.rollout.adapter import Adapter, LowRank, join
from echo2.rollout.architecture import Architecture, Rope, read_architecture
from echo2.rollout.decode_loop import DecodeLoop
from echo2.rollout.engine import Engine
from echo2.rollout.rows import Limits
from echo2.rollout.snapshot_files import end_tokens, read_config
from echo2.rollout.snapshot_tensors import computing_dtype
from echo2.rollout.torch_engine import Cache, TorchDecoder
from echo2.types import Snapshot

GROW_COLUMNS = 32
"""The cache grows by at least this many columns, and by half of itself: few copies, little unused memory."""
QKV, GATE_UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
OUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
PREFILL_TOKENS = 1 << 15
"""Prompt tokens read at once (at least one prompt); bounds the memory of long prompts."""


def make_engine(device: str, slots: int) -> Engine:
    """The engine `compact`."""
    return DecodeLoop(TorchDecoder(build_compact, device), slots)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; `qk_norm_HE` is the norm of queries and keys, one row per head. Linear maps that are fused
    have their adapters fused."""

    attention_norm_D: Tensor
    qkv: tuple[Tensor, Tensor | None]
    qk_norm_HE: Tensor | None
    out: tuple[Tensor, Tensor | None]
    ffn_norm_D: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    qkv_adapter: LowRank | None = None
    out_adapter: LowRank | None = None
    gate_up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None


class CompactCache:
    """Keys and values, [L, 2, B, K, C, E]. A row's tokens lie in its first columns; what lies behind them is finite and
    masked, for rows are of different lengths."""

    can_join = True

    def __init__(self, kv: Tensor, lengths_B: Tensor, longest: int) -> None:
        self.kv = kv
        self.lengths_B = lengths_B
        self.longest = longest

    def select(self, rows: Tensor) -> CompactCache:
        """These rows; they may repeat."""
        lengths_B = self.lengths_B.index_select(0, rows)
        longest = int(lengths_B.max())
        kv = self.kv.new_zeros(self._shape(len(rows), longest))
        self._copy(kv, 0, rows, longest)
        return CompactCache(kv, lengths_B, longest)

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> CompactCache:
        """These rows, and behind them those of another cache."""
        assert isinstance(other, CompactCache)
        own_B, other_B = self.lengths_B.index_select(0, rows), other.lengths_B.index_select(0, other_rows)
        own, others = int(own_B.max()), int(other_B.max())
        longest = max(own, others)
        kv = self.kv.new_zeros(self._shape(len(rows) + len(other_rows), longest))
        self._copy(kv, 0, rows, own)
        other._copy(kv, len(rows), other_rows, others)
        return CompactCache(kv, torch.cat((own_B, other_B)), longest)

    def _shape(self, rows: int, columns: int) -> tuple[int, ...]:
        layers, two, _, heads, _, head_dim = self.kv.shape
        return (layers, two, rows, heads, columns + GROW_COLUMNS, head_dim)

    def _copy(self, to: Tensor, first: int, rows: Tensor, columns: int) -> None:
        """Layer by layer: what is copied twice is one layer."""
        for source, target in zip(self.kv, to, strict=True):
            target[:, first : first + len(rows), :, :columns] = source[:, :, :, :columns].index_select(1, rows)

    def open_column(self) -> None:
        """Make room for one more token per row."""
        if self.longest == self.kv.shape[4]:
            layers, two, rows, heads, columns, head_dim = self.kv.shape
            more = max(GROW_COLUMNS, columns // 2)
            grown = self.kv.new_zeros((layers, two, rows, heads, columns + more, head_dim))
            grown[:, :, :, :, :columns] = self.kv
            self.kv = grown
        self.longest += 1

    def mask_B11C(self) -> Tensor:
        """To be added to attention scores: -inf behind each row's newest token."""
        column_C = torch.arange(self.longest, device=self.kv.device)
        is_behind_BC = column_C > self.lengths_B[:, None]
        mask_BC = torch.zeros(is_behind_BC.shape, device=self.kv.device).masked_fill_(is_behind_BC, float("-inf"))
        return mask_BC[:, None, None, :]


class CompactModel:
    """One policy. Implements `torch_engine.Model`."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, end: tuple[int, ...]) -> None:
        self._arch = arch
        weights = _Weights(arch, dtype, device)
        self.places = weights.places
        self._embed_VD = weights.new("model.embed_tokens.weight")
        self._final_norm_D = weights.new("model.norm.weight")
        self._head_VD = self._embed_VD if arch.tied else weights.new("lm_head.weight")
        if arch.tied:
            self.places["lm_head.weight"] = self.places["model.embed_tokens.weight"]
        self._layers = [weights.layer(f"model.layers.{layer}.") for layer in range(arch.num_layers)]
        self._frequency_E = rope_frequencies(arch.rope, arch.head_dim).to(self._embed_VD.device).repeat(2)
        self.limits = Limits(arch.vocab_size, arch.max_positions, end)
        self.architecture = (arch, self._embed_VD.dtype)
        shapes = arch.tensor_shapes().items()
        self.linears = {name[:-7]: (shape[0], shape[1]) for name, shape in shapes if name.endswith("_proj.weight")}

    def adapted(self, adapter: Adapter) -> CompactModel:
        """See `Model.adapted`."""
        model = copy.copy(self)

        def fused(prefix: str, *names: str) -> LowRank | None:
            return join([(adapter.get(prefix + name), self.linears[prefix + name][0]) for name in names])

        model._layers = [
            replace(
                layer,
                qkv_adapter=fused(f"model.layers.{at}.", *QKV),
                out_adapter=fused(f"model.layers.{at}.", OUT),
                gate_up_adapter=fused(f"model.layers.{at}.", *GATE_UP),
                down_adapter=fused(f"model.layers.{at}.", DOWN),
            )
            for at, layer in enumerate(self._layers)
        ]
        return model

    def prefill(self, prompts: Sequence[array[int]]) -> CompactCache:
        """Read the prompts, right-padded: causal attention keeps the padding from mattering."""
        arch, device = self._arch, self._embed_VD.device
        lengths = [len(prompt) for prompt in prompts]
        columns = max(lengths)
        tokens_RT = torch.zeros((len(prompts), columns), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_RT[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        kv = self._embed_VD.new_empty((arch.num_layers, 2, len(prompts), arch.num_kv_heads, columns, arch.head_dim))
        cos_sin = self._rotation(torch.arange(columns, device=device)[None])
        step = max(1, PREFILL_TOKENS // max(1, columns))
        for start in range(0, len(prompts) if columns else 0, step):
            part = slice(start, min(start + step, len(prompts)))

            def attend(layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, part: slice = part) -> Tensor:
                k_BKTE, v_BKTE = k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
                kv[layer, 0, part], kv[layer, 1, part] = k_BKTE, v_BKTE
                out_BHTE = functional.scaled_dot_product_attention(
                    q_BTHE.transpose(1, 2),
                    k_BKTE,
                    v_BKTE,
                    is_causal=True,
                    enable_gqa=arch.num_heads > arch.num_kv_heads,
                )
                return out_BHTE.transpose(1, 2)

            self._run(self._embed_VD[tokens_RT[part].to(device)], cos_sin, attend)
        return CompactCache(kv, torch.tensor(lengths, device=device), columns)

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        """Read one token per row."""
        assert isinstance(cache, CompactCache)
        arch, rows = self._arch, len(tokens_B)
        cache.open_column()
        mask_B11C, kv, used, position_B = cache.mask_B11C(), cache.kv, cache.longest, cache.lengths_B
        row_B = torch.arange(rows, device=position_B.device)
        group = arch.num_heads // arch.num_kv_heads

        def attend(layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[layer, 0, row_B, :, position_B], kv[layer, 1, row_B, :, position_B] = k_BTKE[:, 0], v_BTKE[:, 0]
            k_BKCE, v_BKCE = kv[layer, 0, :, :, :used], kv[layer, 1, :, :, :used]
            # The queries that share a key-value head are like several tokens of one head: no key is copied. Two
            # products are a third faster than the fused kernel here, which is made for many queries.
            q_BKGE: Tensor = q_BTHE.reshape(rows, arch.num_kv_heads, group, arch.head_dim) * arch.head_dim**-0.5
            scores_BKGC = (q_BKGE @ k_BKCE.transpose(-1, -2)).float()
            scores_BKGC += mask_B11C
            out_BKGE: Tensor = scores_BKGC.softmax(-1).to(v_BKCE.dtype) @ v_BKCE
            return out_BKGE.view(rows, 1, arch.num_heads, arch.head_dim)

        cos_sin = self._rotation(position_B[:, None])
        logits_BV = self._logits(self._run(self._embed_VD[tokens_B][:, None], cos_sin, attend)[:, 0])
        cache.lengths_B = position_B + 1
        return logits_BV

    def _run(self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """All layers. `attend(layer, queries, keys, values)` keeps the keys and values and returns the attention."""
        arch = self._arch
        rows, columns, _ = x_BTD.shape
        heads, kv_heads, head_dim, eps = arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.rms_eps
        for index, layer in enumerate(self._layers):
            qkv = linear(rms_norm(x_BTD, layer.attention_norm_D, eps), layer.qkv, layer.qkv_adapter)
            qkv_BTHE = qkv.view(rows, columns, heads + 2 * kv_heads, head_dim)
            qk_BTHE, v_BTKE = qkv_BTHE.split((heads + kv_heads, kv_heads), dim=2)
            if layer.qk_norm_HE is not None:
                qk_BTHE = rms_norm(qk_BTHE, layer.qk_norm_HE, eps)
            qk_BTHE = rotate(qk_BTHE, *cos_sin)
            q_BTHE, k_BTKE = qk_BTHE.split((heads, kv_heads), dim=2)
            attended = attend(index, q_BTHE, k_BTKE, v_BTKE).reshape(rows, columns, heads * head_dim)
            x_BTD = x_BTD + linear(attended, layer.out, layer.out_adapter)
            gate_up_BTF = linear(rms_norm(x_BTD, layer.ffn_norm_D, eps), layer.gate_up, layer.gate_up_adapter)
            gate_BTF, up_BTF = gate_up_BTF.chunk(2, dim=-1)
            x_BTD = x_BTD + linear(functional.silu(gate_BTF) * up_BTF, layer.down, layer.down_adapter)
        return x_BTD

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        return functional.linear(rms_norm(hidden_BD, self._final_norm_D, self._arch.rms_eps), self._head_VD).float()

    def _rotation(self, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, 1, E] in the computing dtype; the angles are float32, as in transformers."""
        angle_BT1E = position_BT[..., None, None].float() * self._frequency_E
        return angle_BT1E.cos().to(self._embed_VD.dtype), angle_BT1E.sin().to(self._embed_VD.dtype)


def linear(x: Tensor, weights: tuple[Tensor, Tensor | None], adapter: LowRank | None) -> Tensor:
    """x [..., I] through a linear map, and its adapter where it has one: [..., O]."""
    y = functional.linear(x, *weights)
    return y if adapter is None else adapter.add(y, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the division in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate(x_BTHE: Tensor, cos_BT1E: Tensor, sin_BT1E: Tensor) -> Tensor:
    """Rotary embedding of pairs (e, e + E/2), as Hugging Face lays them out."""
    first, second = x_BTHE.chunk(2, dim=-1)
    return x_BTHE * cos_BT1E + torch.cat((-second, first), dim=-1) * sin_BT1E


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position [E / 2], float32. `llama3` slows long wavelengths by `factor`, blending in between."""
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
    """Room for weights: `places` by name in a snapshot, several of which may be parts of one tensor."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self._shapes = arch.tensor_shapes()
        self.places: dict[str, tuple[Tensor, ...]] = {}

    def new(self, *names: str) -> Tensor:
        """One tensor for these, behind each other."""
        shapes = [self._shapes[name] for name in names]
        whole = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        parts = whole.split([shape[0] for shape in shapes])
        self.places.update((name, (part,)) for name, part in zip(names, parts, strict=True))
        return whole

    def layer(self, prefix: str) -> Layer:
        """The layer whose names begin so."""

        def fused(*names: str) -> tuple[Tensor, Tensor | None]:
            has_bias = f"{prefix}{names[0]}.bias" in self._shapes
            matrix = self.new(*(f"{prefix}{name}.weight" for name in names))
            return matrix, self.new(*(f"{prefix}{name}.bias" for name in names)) if has_bias else None

        return Layer(
            self.new(f"{prefix}input_layernorm.weight"),
            fused(*QKV),
            self._qk_norm(f"{prefix}self_attn.") if self._arch.qk_norm else None,
            fused(OUT),
            self.new(f"{prefix}post_attention_layernorm.weight"),
            fused(*GATE_UP),
            fused(DOWN),
        )

    def _qk_norm(self, prefix: str) -> Tensor:
        """The norm of queries for each of their heads, and that of keys for each of theirs."""
        heads, kv_heads = self._arch.num_heads, self._arch.num_kv_heads
        norm_HE = torch.empty((heads + kv_heads, self._arch.head_dim), dtype=self._dtype, device=self._device)
        self.places[f"{prefix}q_norm.weight"] = norm_HE[:heads].unbind()
        self.places[f"{prefix}k_norm.weight"] = norm_HE[heads:].unbind()
        return norm_HE


def build_compact(snapshot: Snapshot, device: torch.device) -> CompactModel:
    """The model of a snapshot, in the dtype of its largest tensor, its weights yet to be filled in.

    Raises:
        PeerError: the snapshot's files are wrong.
        UserError: the architecture is not one that is computed here.
    """
    arch = read_architecture(read_config(snapshot.files))
    return CompactModel(arch, computing_dtype(snapshot), device, end_tokens(snapshot.files))
