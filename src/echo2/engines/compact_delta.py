"""Layers of the engine `compact` that keep a state of fixed size in place of keys and values: the gated delta rule of
Qwen 3.5. Per head, with the key k, the value v, the decay a = exp(g) and the writing strength b of each token:

    S' = a S + k d^T    d = b (v - a S^T k)    output S'^T q

Tokens of one text are read in chunks: within a chunk, the d of all tokens solve one triangular system, so a chunk takes
a few products in place of one update a token. `step` reads the state twice and writes it once.

Source: Yang, Kautz, Hatamizadeh: Gated Delta Networks (2024), equation 10; chunks: Yang, Wang, Zhang, Shen, Kim:
Parallelizing Linear Transformers with the Delta Rule (2024), section 3.2.

Shape suffixes: L = layers of this kind, B = rows, T = tokens, N = key heads, H = value heads, K = key dim, V = value
dim, W = channels of the convolution (2 N K + H V), J = tokens that the convolution sees (what is kept of them: J - 1),
M = outputs of the layer's input maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from echo2.engines.model_values import DeltaSizes

#: Tokens that are read at once: a triangular system has so many unknowns.
CHUNK_TOKENS = 64
#: Added to the squared length of queries and keys before they are divided by it.
LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Weights of one layer beside its linear maps. Decay and its bias are float32, as they are computed."""

    sizes: DeltaSizes
    rms_eps: float
    conv_W1J: Tensor
    log_rate_H: Tensor
    rate_bias_H: Tensor
    norm_V: Tensor


class DeltaStates:
    """The states of all layers of a batch: the matrices S, and the inputs of the convolution that the next token still
    needs. Rows are those of the batch, in its order."""

    def __init__(self, states_LBHKV: Tensor, inputs_LBJW: Tensor) -> None:
        self.states_LBHKV, self.inputs_LBJW = states_LBHKV, inputs_LBJW

    @classmethod
    def empty(cls, sizes: DeltaSizes, num_layers: int, rows: int, like: Tensor) -> DeltaStates:
        """Return the states of rows that have read nothing. `like`: a tensor of the device and the computing dtype."""
        shape = (num_layers, rows, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
        inputs = like.new_zeros((num_layers, rows, sizes.kernel - 1, sizes.num_channels))
        return cls(like.new_zeros(shape, dtype=torch.float32), inputs)

    @property
    def num_bytes(self) -> int:
        return self.states_LBHKV.nbytes + self.inputs_LBJW.nbytes

    @classmethod
    def gathered(cls, parts: Sequence[tuple[DeltaStates, Tensor]]) -> DeltaStates:
        """Return the states of these rows of each part, one part behind the other."""
        states = torch.cat([part.states_LBHKV.index_select(1, rows) for part, rows in parts], 1)
        return cls(states, torch.cat([part.inputs_LBJW.index_select(1, rows) for part, rows in parts], 1))

    def put(self, row: int, other: DeltaStates) -> None:
        """Give a row the states of another batch's only row."""
        self.states_LBHKV[:, row], self.inputs_LBJW[:, row] = other.states_LBHKV[:, 0], other.inputs_LBJW[:, 0]

    def step(self, at: int, layer: DeltaLayer, mixed_B1M: Tensor) -> Tensor:
        """Read one token per row. `mixed`: the products of the layer's input maps. Returns [B, 1, H V]."""
        inputs_BTW, gates = _split(layer.sizes, mixed_B1M)
        window_BTW = torch.cat((self.inputs_LBJW[at], inputs_BTW), 1)
        self.inputs_LBJW[at] = window_BTW[:, 1:]
        q, k, v = _heads(layer, (window_BTW.mT.float() * layer.conv_W1J[:, 0].float()).sum(-1)[:, None])
        log_decay_BTH, strength_BTH = _gates(layer, gates)
        state_BHKV = self.states_LBHKV[at]
        decay_BH1 = log_decay_BTH[:, 0, :, None].exp()
        key_BHK, query_BHK = k[:, 0], q[:, 0]
        read_BH2V = torch.stack((key_BHK, query_BHK), 2) @ state_BHKV * decay_BH1[..., None]
        delta_BHV = strength_BTH[:, 0, :, None] * (v[:, 0] - read_BH2V[:, :, 0])
        state_BHKV *= decay_BH1[..., None]
        flat = state_BHKV.view(-1, *state_BHKV.shape[2:])
        flat.baddbmm_(key_BHK.flatten(0, 1)[:, :, None], delta_BHV.flatten(0, 1)[:, None])
        out_BHV = read_BH2V[:, :, 1] + (key_BHK * query_BHK).sum(-1, keepdim=True) * delta_BHV
        return _gated(layer, out_BHV[:, None], gates)

    def read(self, at: int, layer: DeltaLayer, mixed_RTM: Tensor, at_R: Tensor, lengths_R: Tensor) -> Tensor:
        """Read more tokens into the rows `at_R`. What lies behind `lengths_R` tokens of a row is padding, and leaves
        its state as it is. Returns [R, T, H V]."""
        columns, before = mixed_RTM.shape[1], layer.sizes.kernel - 1
        all_RTW = torch.cat((self.inputs_LBJW[at, at_R], _split(layer.sizes, mixed_RTM)[0]), 1)
        newest_RJ = lengths_R[:, None] + torch.arange(before, device=lengths_R.device)
        self.inputs_LBJW[at, at_R] = all_RTW.gather(1, newest_RJ[..., None].expand(-1, -1, all_RTW.shape[2]))
        is_padding_RT1 = (torch.arange(columns, device=lengths_R.device) >= lengths_R[:, None])[..., None]
        state_RHKV, out = self.states_LBHKV[at, at_R], []
        for start in range(0, columns, CHUNK_TOKENS):  # all of it: what lies between takes ten times the inputs' memory
            part = slice(start, start + CHUNK_TOKENS)
            seen_RTW = all_RTW[:, start : start + CHUNK_TOKENS + before]
            convolved_RWT = functional.conv1d(seen_RTW.mT, layer.conv_W1J, groups=all_RTW.shape[2])
            gates = _split(layer.sizes, mixed_RTM[:, part])[1]
            written = (one.masked_fill(is_padding_RT1[:, part], 0.0) for one in _gates(layer, gates))
            read = (one.transpose(1, 2) for one in (*_heads(layer, convolved_RWT.mT), *written))
            out_RHTV, state_RHKV = _chunk(state_RHKV, *read)
            out.append(_gated(layer, out_RHTV.transpose(1, 2), gates))
        self.states_LBHKV[at, at_R] = state_RHKV
        return torch.cat(out, 1)


def _chunk(
    state_BHKV: Tensor, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, log_decay_BHT: Tensor, strength_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Read one chunk of tokens. Returns the outputs [B, H, T, V], and the new state."""
    since_BHT1 = log_decay_BHT.cumsum(-1)[..., None]
    between_BHTT = (since_BHT1 - since_BHT1.mT).tril().exp().tril()  # what is left of an earlier token's part
    decayed_BHT1, strength_BHT1 = since_BHT1.exp(), strength_BHT[..., None]
    system_BHTT = strength_BHT1 * between_BHTT * (k_BHTK @ k_BHTK.mT)  # its diagonal is taken for ones
    missing_BHTV = strength_BHT1 * (v_BHTV - decayed_BHT1 * (k_BHTK @ state_BHKV))
    delta_BHTV = torch.linalg.solve_triangular(system_BHTT, missing_BHTV, upper=False, unitriangular=True)
    out_BHTV = decayed_BHT1 * (q_BHTK @ state_BHKV) + between_BHTT * (q_BHTK @ k_BHTK.mT) @ delta_BHTV
    left_BHT1 = between_BHTT[..., -1, :, None]
    return out_BHTV, decayed_BHT1[..., -1:, :] * state_BHKV + (left_BHT1 * k_BHTK).mT @ delta_BHTV


def _split(sizes: DeltaSizes, mixed_BTM: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the input of the convolution, and what gates the output, the strength and the decay."""
    heads, values = sizes.num_value_heads, sizes.num_value_heads * sizes.value_dim
    inputs, gate, strength, rate = mixed_BTM.split((sizes.num_channels, values, heads, heads), -1)
    return inputs, (gate, strength, rate)


def _heads(layer: DeltaLayer, convolved_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys [B, T, H, K] and values [B, T, H, V] (float32), queries and keys of length 1, queries
    scaled. Rounded where transformers rounds them."""
    sizes, dtype = layer.sizes, layer.conv_W1J.dtype
    keys = sizes.num_key_heads * sizes.key_dim
    active_BTW = functional.silu(convolved_BTW.to(dtype)).float()
    q, k, v = active_BTW.split((keys, keys, sizes.num_value_heads * sizes.value_dim), -1)
    group = sizes.num_value_heads // sizes.num_key_heads
    q, k = (one.unflatten(-1, (sizes.num_key_heads, sizes.key_dim)) for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + LENGTH_EPS) for one in (q, k))
    if group > 1:
        q, k = (one.repeat_interleave(group, 2) for one in (q, k))
    return q * sizes.key_dim**-0.5, k, v.unflatten(-1, (sizes.num_value_heads, sizes.value_dim))


def _gates(layer: DeltaLayer, gates: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay, and the writing strength [B, T, H] (float32)."""
    _, strength, rate = gates
    return -layer.log_rate_H.exp() * functional.softplus(rate.float() + layer.rate_bias_H), strength.sigmoid().float()


def _gated(layer: DeltaLayer, out_BTHV: Tensor, gates: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Normalise each head's output, and multiply it by its gate. Returns [B, T, H V] in the computing dtype."""
    dtype = layer.norm_V.dtype
    gate_BTHV = gates[0].unflatten(-1, out_BTHV.shape[2:])
    wide = out_BTHV.to(dtype).float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + layer.rms_eps)
    return ((layer.norm_V * wide.to(dtype)) * functional.silu(gate_BTHV.float())).to(dtype).flatten(2)
