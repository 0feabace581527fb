"""The forward pass of the engine `compact`: Llama, Mistral, Qwen2, Qwen3, Qwen 3.5 (without experts), SmolLM3 and
Gemma 3 in plain torch, for inference only.

It is fast on small models because it runs fewer and larger operations: one product for query, key and value, one for
gate and up, joint normalisation and rotation of queries and keys, one prefill per prompt whose keys and values are
copied to its samples, and a cache that is written in place. A test checks that it agrees with transformers within 1e-4
in logprobs (float32).

Shape suffixes: R = prompts, B = rows, T = tokens of a row, D = hidden, H = query heads, K = key-value heads, G = H / K,
E = head dim, F = ffn, L = layers with attention, C = columns of the cache (token slots), V = vocabulary, M = outputs of
a layer's input maps.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from echo2.core.errors import PeerError
from echo2.core.types import Snapshot
from echo2.engines import forms
from echo2.engines.adapter import Adapter, Linear, LowRank, RowAdapters, join
from echo2.engines.compact_cache import CompactCache
from echo2.engines.compact_delta import DeltaLayer, DeltaStates
from echo2.engines.compact_weights import FUSED, CompactWeights, Layer, LayerAdapters, fused_maps
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine, RouteCheck
from echo2.engines.model_values import Architecture, Attention, Rope, read_architecture
from echo2.engines.rows import Cache, Limits
from echo2.engines.snapshot_tensors import computing_dtype
from echo2.engines.torch_engine import Model, TorchDecoder
from echo2.weights.format.snapshot_files import end_tokens, read_config

PREFILL_TOKENS = 1 << 15
"""Prompt tokens prefilled at once (at least one prompt), a quarter in a hybrid; bounds the memory of many prompts."""
PIECE_TOKENS = 1 << 8
"""Tokens of a sequence that `CompactModel.extend` reads at once; bounds the mask."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Recur = Callable[[int, DeltaLayer, Tensor], Tensor]
Rotations = Sequence[tuple[Tensor, Tensor]]
"""cos and sin [B, T, 1, E], for each of a model's rotary embeddings."""


def make_engine(device: str, slots: int) -> Engine:
    """The engine `compact`."""
    return DecodeLoop(TorchDecoder(build_compact, device), slots)


class CompactModel(Model):
    """One policy."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device, end: tuple[int, ...]) -> None:
        self._arch = arch
        weights = CompactWeights(arch, dtype, device)
        self.places = weights.places
        self._embed_VD = weights.new(f"{arch.prefixes.stored}embed_tokens.weight")
        self._final_norm_D = weights.new(f"{arch.prefixes.stored}norm.weight")
        self._head = Linear(self._embed_VD if arch.tied else weights.new("lm_head.weight"))
        if arch.tied:
            self.places["lm_head.weight"] = self.places[f"{arch.prefixes.stored}embed_tokens.weight"]
        kinds = arch.layers or (Attention(0, arch.rope),) * arch.num_layers
        self._layers = [weights.layer(layer, kinds) for layer in range(arch.num_layers)]
        self._attention = [one for one in kinds if one is not None]
        self._windows = {one.window for one in self._attention}
        ropes = list(dict.fromkeys(one.rope for one in self._attention if one.rope is not None))
        self._frequencies = [rope_frequencies(one, arch.head_dim).to(device).repeat(2) for one in ropes]
        self._rope_at = [None if one.rope is None else ropes.index(one.rope) for one in self._attention]
        self.limits = Limits(arch.vocab_size, arch.max_positions, end)
        self.dtype = self._embed_VD.dtype
        self.architecture: tuple[Architecture, torch.dtype] = (arch, self.dtype)
        shapes = arch.tensor_shapes().items()
        self.linears = {
            name.replace(arch.prefixes.stored, arch.prefixes.modules, 1)[:-7]: (shape[0], shape[1])
            for name, shape in shapes
            if "proj" in name and len(shape) == 2
        }
        self._forms: dict[str, CompactModel] = {}  # of these weights; shared by all models over them

    def adapted(self, adapter: Adapter) -> CompactModel:

        def fused(prefix: str, *names: str) -> LowRank | None:
            return join([(adapter.get(prefix + name), self.linears[prefix + name][0]) for name in names])

        modules = self._arch.prefixes.modules
        return self._with(
            [
                LayerAdapters(*(fused(f"{modules}layers.{at}.", *names) for names in fused_maps(layer.delta)))
                for at, layer in enumerate(self._layers)
            ]
        )

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
        return [self._head, *(one for at in self._layers for one in (at.mix, at.out, at.gate_up, at.down))]

    def _empty(self, rows: int, columns: int) -> CompactCache:
        """Return the cache of rows that have read nothing."""
        arch, attends = self._arch, len(self._attention)
        kv = self._embed_VD.new_zeros((attends, 2, rows, arch.num_kv_heads, columns, arch.head_dim))
        deltas = None
        if arch.delta is not None:
            deltas = DeltaStates.empty(arch.delta, arch.num_layers - attends, rows, self._embed_VD)
        return CompactCache(kv, torch.zeros(rows, dtype=torch.long, device=kv.device), 0, deltas)

    def prefill(
        self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = (), keeps_routes: bool = False
    ) -> CompactCache:
        """See `Model.prefill`. Prompts are right-padded, and masks hide the padding."""
        device = self._embed_VD.device
        lengths = [len(prompt) for prompt in prompts]
        known = known or [None] * len(prompts)
        firsts = [one.longest if isinstance(one, CompactCache) else 0 for one in known]
        firsts_R, columns = torch.tensor(firsts, device=device), max(lengths)
        # Rows with known tokens are padded behind these, so they may need more columns than the longest prompt.
        room = columns + max(length - first if first else 0 for length, first in zip(lengths, firsts, strict=True))
        cache = self._empty(len(prompts), room)
        for row, one in enumerate(known):
            if isinstance(one, CompactCache):
                cache.kv[:, :, row, :, : one.longest] = one.kv[:, :, 0]
                if cache.deltas is not None and one.deltas is not None:
                    cache.deltas.put(row, one.deltas)
        step = max(1, PREFILL_TOKENS // (1 if self._arch.delta is None else 4) // max(1, room))
        for read, rows in (
            (self._read, [row for row, first in enumerate(firsts) if not first and lengths[row]]),
            (self._read_on, [row for row, first in enumerate(firsts) if 0 < first < lengths[row]]),
        ):
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                read(cache, torch.tensor(part, device=device), [prompts[row][firsts[row] :] for row in part], firsts_R)
        cache.lengths_B, cache.longest = torch.tensor(lengths, device=device), columns
        return cache

    def _read(self, cache: CompactCache, at_R: Tensor, texts: Sequence[array[int]], firsts_B: Tensor) -> Tensor:
        """Read prompts from their beginning into these rows."""
        kv, tokens_RT = cache.kv, right_padded(texts).to(cache.kv.device)
        columns = tokens_RT.shape[1]

        def attend(at: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[at, 0, at_R, :, :columns] = k_BTKE.transpose(1, 2)
            kv[at, 1, at_R, :, :columns] = v_BTKE.transpose(1, 2)
            return self._causal(at, q_BTHE, k_BTKE, v_BTKE)

        rotations = self._rotations(torch.arange(columns, device=kv.device)[None])
        return self._run(self._embedded(tokens_RT), rotations, attend, _reading(cache.deltas, at_R, texts))

    def _read_on(self, cache: CompactCache, at_R: Tensor, texts: Sequence[array[int]], firsts_B: Tensor) -> Tensor:
        """Read more tokens into these rows, whose first `firsts_B` tokens are in the cache already. Returns [R, T, D]
        before the last norm."""
        kv, tokens_RT, first_R = cache.kv, right_padded(texts).to(cache.kv.device), firsts_B[at_R]
        columns = tokens_RT.shape[1]
        position_RT = first_R[:, None] + torch.arange(columns, device=kv.device)
        used = int(first_R.max()) + columns
        behind_R1TC = (position_RT[..., None] - torch.arange(used, device=kv.device))[:, None]
        sees = {window: _sees(behind_R1TC, window) for window in self._windows}

        def attend(at: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[at, 0, at_R[:, None], :, position_RT] = k_BTKE
            kv[at, 1, at_R[:, None], :, position_RT] = v_BTKE
            out_BHTE = functional.scaled_dot_product_attention(
                q_BTHE.transpose(1, 2),
                kv[at, 0, at_R, :, :used],
                kv[at, 1, at_R, :, :used],
                attn_mask=sees[self._attention[at].window],
                scale=self._arch.query_scale,
                enable_gqa=q_BTHE.shape[2] > k_BTKE.shape[2],
            )
            return out_BHTE.transpose(1, 2)

        rotations = self._rotations(position_RT)
        return self._run(self._embedded(tokens_RT), rotations, attend, _reading(cache.deltas, at_R, texts))

    def extend(
        self, cache: Cache | None, tokens: array[int], first: int, most: int, routes: RouteCheck | None = None
    ) -> tuple[Cache, Iterator[Tensor]]:
        cache = self._empty(1, 0) if cache is None else cache
        assert isinstance(cache, CompactCache)
        cache.grow(len(tokens))
        return cache, self._pieces(cache, tokens, first, most)

    def _pieces(self, cache: CompactCache, tokens: array[int], first: int, most: int) -> Iterator[Tensor]:
        """Read tokens into a cache of one row that has room for them, and yield the logits from place `first` on."""
        only_R = torch.zeros(1, dtype=torch.long, device=cache.kv.device)
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            hidden_RTD = self._read_on(cache, only_R, [piece], cache.lengths_B)
            cache.lengths_B, cache.longest = cache.lengths_B + len(piece), cache.longest + len(piece)
            if start + len(piece) > first:
                for tile_ND in hidden_RTD[0, max(0, first - start) :].split(most):
                    yield self._logits(tile_ND)

    def logits(self, sequences: Sequence[array[int]], firsts: Sequence[int], most: int) -> Iterator[Tensor]:
        tokens_RT = right_padded(sequences).to(self._embed_VD.device)
        rotations = self._rotations(torch.arange(tokens_RT.shape[1], device=tokens_RT.device)[None])
        rows = len(sequences)
        recur = _reading(self._empty(rows, 0).deltas, torch.arange(rows, device=tokens_RT.device), sequences)
        hidden_RTD = self._run(self._embedded(tokens_RT), rotations, self._causal, recur)
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

        def attend(at: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
            kv[at, :, place_B, :, position_B] = torch.stack((k_BTKE[:, 0], v_BTKE[:, 0]), 1)
            q_BKGE = q_BTHE.reshape(rows, arch.num_kv_heads, group, arch.head_dim) * arch.query_scale
            out_BKGE = cache.attention(at, q_BKGE, masks[self._attention[at].window])
            return out_BKGE.view(rows, 1, arch.num_heads, arch.head_dim)

        rotations, recur = self._rotations(position_B[:, None]), None if cache.deltas is None else cache.deltas.step
        logits_BV = self._logits(self._run(self._embedded(tokens_B)[:, None], rotations, attend, recur)[:, 0])
        cache.lengths_B = position_B + 1
        return logits_BV

    def _run(self, x_BTD: Tensor, rotations: Rotations, attend: Attend, recur: Recur | None) -> Tensor:
        """Run all layers. `attend(at, queries, keys, values)` stores keys and values, and returns the attention;
        `recur(at, layer, mixed)` does the same for the delta rule."""
        for layer in self._layers:
            mixed_BTM = layer.mix(self._norm(x_BTD, layer.attention_norm_D), layer.adapters.mix)
            if layer.delta is None:
                read = self._attended(layer, mixed_BTM, rotations, attend)
            else:
                assert recur is not None
                read = recur(layer.at, layer.delta, mixed_BTM)
            out_BTD = layer.out(read, layer.adapters.out)
            x_BTD = x_BTD + (
                out_BTD if layer.after_attention_D is None else self._norm(out_BTD, layer.after_attention_D)
            )
            out_BTD = self._feed_forward(layer, self._norm(x_BTD, layer.ffn_norm_D))
            x_BTD = x_BTD + (out_BTD if layer.after_ffn_D is None else self._norm(out_BTD, layer.after_ffn_D))
        return x_BTD

    def _attended(self, layer: Layer, mixed_BTM: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """Return the attention [B, T, H E] of queries, keys and values."""
        arch = self._arch
        heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        gate = None
        if arch.gated:
            q, mixed_BTM = mixed_BTM.split((2 * heads * head_dim, 2 * kv_heads * head_dim), -1)
            q, gate = q.unflatten(-1, (heads, 2, head_dim)).unbind(-2)
            mixed_BTM = torch.cat((q.flatten(-2), mixed_BTM), -1)
        qk_BTHE, v_BTKE = mixed_BTM.unflatten(-1, (-1, head_dim)).split((heads + kv_heads, kv_heads), dim=2)
        if layer.qk_norm_HE is not None:
            qk_BTHE = self._norm(qk_BTHE, layer.qk_norm_HE)
        if (rotation := self._rope_at[layer.at]) is not None:
            qk_BTHE = rotate(qk_BTHE, *rotations[rotation])
        q_BTHE, k_BTKE = qk_BTHE.split((heads, kv_heads), dim=2)
        attended = attend(layer.at, q_BTHE, k_BTKE, v_BTKE).flatten(2)
        return attended if gate is None else attended * gate.flatten(2).sigmoid()

    def _feed_forward(self, layer: Layer, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = layer.gate_up(x_BTD, layer.adapters.gate_up).chunk(2, dim=-1)
        gate_BTF = functional.gelu(gate_BTF, approximate="tanh") if self._arch.gemma else functional.silu(gate_BTF)
        return layer.down(gate_BTF * up_BTF, layer.adapters.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._arch.rms_eps, self._arch.zero_centered)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self._embed_VD[tokens]
        return x * x.new_tensor(self._arch.hidden_size**0.5) if self._arch.gemma else x

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        return self._head(self._norm(hidden_BD, self._final_norm_D)).float()

    def _rotations(self, position_BT: Tensor) -> Rotations:
        """In the computing dtype; the angles are float32, as in transformers."""
        angles = [position_BT[..., None, None].float() * frequency_E for frequency_E in self._frequencies]
        return [(one.cos().to(self.dtype), one.sin().to(self.dtype)) for one in angles]

    def _causal(self, at: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        """Self-attention of sequences that are read from their beginning."""
        window, columns = self._attention[at].window, q_BTHE.shape[1]
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


def _reading(deltas: DeltaStates | None, at_R: Tensor, texts: Sequence[array[int]]) -> Recur | None:
    """Return what reads these texts into the rows `at_R` of the states; None: there are no states."""
    if deltas is None:
        return None
    return partial(deltas.read, at_R=at_R, lengths_R=torch.tensor([len(text) for text in texts], device=at_R.device))


def _sees(behind: Tensor, window: int) -> Tensor:
    """Whether a token sees one that is so many places behind it; 0: its own."""
    return (behind >= 0) & (behind < window) if window else behind >= 0


def right_padded(sequences: Sequence[array[int]]) -> Tensor:
    """Return the token ids [R, T] of sequences of different lengths, padded with 0."""
    tokens_RT = torch.zeros((len(sequences), max(map(len, sequences))), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        tokens_RT[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
    return tokens_RT


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension, the division in float32; or x / rms(x) * (1 + weight), all in
    float32. On a GPU it is one kernel instead of six: there a step takes as long as its kernels are many."""
    if zero_centered:
        wide = functional.rms_norm(x.float(), x.shape[-1:], eps=eps)
        return (wide * (1.0 + weight.float())).to(x.dtype)
    if x.is_cuda:
        return weight * functional.rms_norm(x, x.shape[-1:], eps=eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate(x_BTHE: Tensor, cos_BT1E: Tensor, sin_BT1E: Tensor) -> Tensor:
    """Rotary embedding of pairs (e, e + E/2), as Hugging Face lays them out; of the first dimensions of a head, if
    there are fewer angles."""
    if (rotated := cos_BT1E.shape[-1]) < x_BTHE.shape[-1]:
        return torch.cat((rotate(x_BTHE[..., :rotated], cos_BT1E, sin_BT1E), x_BTHE[..., rotated:]), -1)
    first, second = x_BTHE.chunk(2, dim=-1)
    return x_BTHE * cos_BT1E + torch.cat((-second, first), dim=-1) * sin_BT1E


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position [E / 2], float32. `llama3` divides those of long wavelengths by `factor`, with a blend."""
    rotated = int(head_dim * rope.share)
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = ((rope.original_positions / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequency / rope.factor + blend * frequency
    return frequency


def build_compact(snapshot: Snapshot, device: torch.device) -> CompactModel:
    """Build the model of a snapshot in the dtype of its largest tensor; its weights are not loaded yet.

    Raises:
        PeerError: the snapshot's files are wrong.
        UserError: this engine does not support the architecture.
    """
    arch = read_architecture(read_config(snapshot.files))
    model = CompactModel(arch, computing_dtype(snapshot), device, end_tokens(snapshot.files))
    beside = {name: () for name in snapshot.tensors if name.startswith(arch.prefixes.beside)}
    model.places = {**model.places, **beside}
    return model
