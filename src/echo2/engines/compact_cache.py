"""Keys and values of the engine `compact`, and attention of one query per row over them.

Shape suffixes: B = rows, H = query heads, K = key-value heads, G = H / K, E = head dim, L = layers, C = columns of the
cache (token slots).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echo2.engines.compact_delta import DeltaStates
from echo2.engines.rows import Cache

GROW_COLUMNS = 32
"""The cache grows by half its columns, but at least by this many: few copies, little unused memory."""
SPLIT_ITEMS = 1 << 18
"""On a CPU, a block of rows is split if attention then skips more than this many items (keys and values) per layer."""

Block = tuple[int, int, int]
"""(first place, end place (exclusive), columns in use)"""


class CompactCache(Cache):
    """Keys and values, [L, 2, B, K, C, E]. A row's tokens fill its first columns. The columns behind them are masked,
    since rows differ in length; their values are finite.

    Where lengths differ much, rows are sorted by length and grouped into blocks, and attention of a block runs over its
    own columns only. `order_B`: the row of the batch at each place; `place_B`: the place of each row. `deltas`: what
    layers without keys and values keep.
    """

    def __init__(self, kv: Tensor, lengths_B: Tensor, longest: int, deltas: DeltaStates | None = None) -> None:
        self.kv = kv
        self.deltas = deltas
        self.lengths_B = lengths_B
        self.longest = longest
        self.blocks: list[Block] = []
        self.order_B: Tensor | None = None
        self.place_B = torch.arange(len(lengths_B), device=kv.device)

    @property
    def num_bytes(self) -> int:
        return self.kv.nbytes + (0 if self.deltas is None else self.deltas.num_bytes)

    def copy(self, row: int, length: int) -> CompactCache | None:
        """See `Cache.copy`. A state cannot go back to fewer tokens."""
        if self.deltas is not None and length != int(self.lengths_B[row]):
            return None
        place = int(self.place_B[row])
        kv = self.kv[:, :, place : place + 1, :, :length].clone()
        deltas = None
        if self.deltas is not None:
            deltas = DeltaStates.gathered([(self.deltas, self.lengths_B.new_tensor([row]))])
        return CompactCache(kv, self.lengths_B.new_tensor([length]), length, deltas)

    def select(self, rows: Tensor) -> CompactCache:
        return self._gathered([(self, rows)])

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> CompactCache:
        assert isinstance(other, CompactCache)
        return self._gathered([(self, rows), (other, other_rows)])

    def _gathered(self, parts: list[tuple[CompactCache, Tensor]]) -> CompactCache:
        lengths_B = torch.cat([part.lengths_B.index_select(0, rows) for part, rows in parts])
        layers, two, _, heads, _, head_dim = self.kv.shape
        longest, most = int(lengths_B.max()), SPLIT_ITEMS // (2 * heads * head_dim)
        kv = self.kv.new_zeros((layers, two, len(lengths_B), heads, longest + GROW_COLUMNS, head_dim))
        states = [(part.deltas, rows) for part, rows in parts if part.deltas is not None]
        cache = CompactCache(kv, lengths_B, longest, DeltaStates.gathered(states) if states else None)
        if kv.device.type == "cpu":
            cache.order_B = lengths_B.argsort(descending=True)
            cache.blocks = split_by_length(lengths_B[cache.order_B].tolist(), most)
        if len(cache.blocks) < 2:
            cache.blocks, cache.order_B = [], None
            first = 0
            for part, rows in parts:
                part._copy(kv, first, part.place_B[rows], min(longest, part.longest))
                first += len(rows)
            return cache
        assert cache.order_B is not None
        cache.place_B[cache.order_B] = cache.place_B.clone()
        sources = [(part.kv, place) for part, rows in parts for place in part.place_B[rows].tolist()]
        for (source, place), to, length in zip(sources, cache.place_B.tolist(), lengths_B.tolist(), strict=True):
            kv[:, :, to, :, :length] = source[:, :, place, :, :length]
        return cache

    def _copy(self, to: Tensor, first: int, places: Tensor, columns: int) -> None:
        """Copy layer by layer, so that the temporary copy of `index_select` is one layer large."""
        for source, target in zip(self.kv, to, strict=True):
            target[:, first : first + len(places), :, :columns] = source[:, :, :, :columns].index_select(1, places)

    def grow(self, more: int) -> None:
        layers, two, rows, heads, columns, head_dim = self.kv.shape
        grown = self.kv.new_zeros((layers, two, rows, heads, columns + more, head_dim))
        grown[:, :, :, :, :columns] = self.kv
        self.kv = grown

    def open_column(self) -> None:
        """Make room for one more token per row."""
        if self.longest == self.kv.shape[4]:
            self.grow(max(GROW_COLUMNS, self.longest // 2))
        self.longest += 1
        self.blocks = [(start, stop, columns + 1) for start, stop, columns in self.blocks]

    def mask_B11C(self, window: int = 0) -> Tensor:
        """Return the mask to add to attention scores, by place: -inf behind each row's newest token, and with a window
        for all but the newest tokens, so many."""
        lengths_B = self.lengths_B if self.order_B is None else self.lengths_B[self.order_B]
        column_C = torch.arange(self.longest, device=self.kv.device)
        is_hidden_BC = column_C > lengths_B[:, None]
        if window:
            is_hidden_BC |= column_C <= lengths_B[:, None] - window
        mask_BC = torch.zeros(is_hidden_BC.shape, device=self.kv.device).masked_fill_(is_hidden_BC, float("-inf"))
        return mask_BC[:, None, None, :]

    def attention(self, layer: int, q_BKGE: Tensor, mask_B11C: Tensor) -> Tensor:
        """Return the attention output [B, K, G, E] of one query per row; the queries are scaled already."""
        keys, values = self.kv[layer]
        if self.order_B is None:
            return attention(q_BKGE, keys[:, :, : self.longest], values[:, :, : self.longest], mask_B11C)
        q_BKGE, parts = q_BKGE[self.order_B], []
        for start, stop, used in self.blocks:
            rows = slice(start, stop)
            mask = mask_B11C[rows, ..., :used]
            parts.append(attention(q_BKGE[rows], keys[rows, :, :used], values[rows, :, :used], mask))
        return torch.cat(parts)[self.place_B]


def split_by_length(lengths: Sequence[int], most: int, first: int = 0) -> list[Block]:
    """Split rows, in descending order of length, into blocks wherever a split saves more than `most` columns."""
    saved = [(len(lengths) - place) * (lengths[0] - length) for place, length in enumerate(lengths)]
    best = max(range(len(saved)), key=saved.__getitem__)
    if saved[best] <= most:
        return [(first, first + len(lengths), lengths[0])]
    return [
        *split_by_length(lengths[:best], most, first),
        *split_by_length(lengths[best:], most, first + best),
    ]


def attention(q_BKGE: Tensor, k_BKCE: Tensor, v_BKCE: Tensor, mask_B11C: Tensor) -> Tensor:
    """Grouped-query attention. Queries that share a key-value head are treated as tokens of one head, so no key is
    copied. Two products are a third faster here than the fused kernel, which is made for many queries. On a CPU keys
    times queries makes it .55 to .65 of the time in bfloat16, and .8 in float32; queries times keys is a kernel less.
    """
    is_cpu = q_BKGE.device.type == "cpu"
    scores_BKGC = ((k_BKCE @ q_BKGE.mT).mT.contiguous() if is_cpu else q_BKGE @ k_BKCE.mT).float()
    scores_BKGC += mask_B11C
    out_BKGE: Tensor = scores_BKGC.softmax(-1).to(v_BKCE.dtype) @ v_BKCE
    return out_BKGE
