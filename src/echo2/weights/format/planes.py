"""Entropy coding of the parts of a delta: byte planes, increasing positions, and steps. Works on whole arrays.

A *plane* is an array of bytes with one distribution, for zstd's Huffman stage to model. Match finding is almost
switched off: random planes have nothing to match, and accidental matches cost more than they save.

*Positions* are sent as gaps, and a gap as bytes: 255 means "255 further", and a smaller byte ends the gap. If positions
are random, gaps are geometric. A geometric distribution is memoryless, so this loses nothing against coding each gap as
one symbol. If gaps are long, their low bytes are almost uniform and go into a plane of their own.

*Steps* are differences of items read as integers, modulo their width: a step of -1, 0 or +1 takes 2 bits of a plane
before entropy coding. Four such symbols, or two of 4 bits, make one byte, since Huffman coding needs symbols of several
bits. The largest symbol means any other step; those steps follow in planes of their own.

The input of a reader may come from an untrusted peer: sizes are checked before memory is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from echo2.core.errors import PeerError

Items = NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes
Positions = NDArray[np.int64]

LONG_GAP = 500  # mean gap from which low bytes have a plane of their own; both forms cost the same there
BLOCK_ITEMS = 1 << 16  # items processed at once, so that intermediate results stay in the CPU cache
UNSIGNED: Mapping[int, np.dtype[Any]] = MappingProxyType({width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)})
SIGNED: Mapping[int, np.dtype[Any]] = MappingProxyType({width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)})

_HUFFMAN_ONLY = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=20,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_checksum=False,
)
_NUMBER = struct.Struct("<I")


class Writer:
    """Collects the parts of one record."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def number(self, value: int) -> None:
        """Add an unsigned 32-bit number."""
        self._parts.append(_NUMBER.pack(value))

    def byte(self, value: int) -> None:
        self._parts.append(bytes((value,)))

    def raw(self, data: bytes) -> None:
        """Add these bytes as they are."""
        self._parts.append(data)

    def plane(self, plane: NDArray[np.uint8]) -> None:
        """Add a compressed plane. Its size is not written: the reader knows it."""
        if plane.size:
            frame = zstandard.ZstdCompressor(compression_params=_HUFFMAN_ONLY).compress(
                np.ascontiguousarray(plane).data
            )
            self.number(len(frame))
            self._parts.append(frame)

    def record(self) -> bytes:
        """Return all parts, in the order in which they were added."""
        return b"".join(self._parts)


class Reader:
    """Reads the parts of one record.

    Raises:
        PeerError: "corrupt", for a record that no `Writer` could have written.
    """

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def number(self, limit: int) -> int:
        """Take an unsigned 32-bit number, at most `limit`."""
        (value,) = _NUMBER.unpack(self.raw(_NUMBER.size))
        require(value <= limit, f"the number {value}, where at most {limit} is possible")
        return int(value)

    def byte(self) -> int:
        return self.raw(1)[0]

    def raw(self, num_bytes: int) -> memoryview:
        require(num_bytes <= self._rest.nbytes, f"{self._rest.nbytes} bytes left of {num_bytes}")
        head, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return head

    def plane(self, num_bytes: int) -> NDArray[np.uint8]:
        """Take a plane of exactly `num_bytes`. A frame that claims another size is not decompressed."""
        if not num_bytes:
            return np.empty(0, np.uint8)
        frame = self.raw(self.number(self._rest.nbytes))
        try:
            claimed = zstandard.get_frame_parameters(frame).content_size
            require(claimed == num_bytes, f"a plane of {claimed} bytes, not {num_bytes}")
            data = zstandard.ZstdDecompressor().decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PeerError("corrupt", f"delta: {error}") from error
        require(len(data) == num_bytes, f"a plane of {len(data)} bytes, not {num_bytes}")
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        """Check that nothing is left."""
        require(not self._rest.nbytes, f"{self._rest.nbytes} bytes too many")


def require(is_true: bool, complaint: str) -> None:
    """Raises: PeerError: the delta is corrupt."""
    if not is_true:
        raise PeerError("corrupt", f"delta: {complaint}")


def where(mask: NDArray[np.bool_]) -> Positions:
    """Return the indices at which the mask is true. If they are rare, words of 8 are searched first, because numpy
    alone mispredicts a branch for each index.
    """
    positions: Positions
    if mask.size < 64 or np.count_nonzero(mask) > mask.size // 10:
        positions = mask.nonzero()[0]
        return positions
    whole = mask.size - mask.size % 8
    words = mask[:whole].view(np.uint64)
    some = where(words != 0)
    inside = words[some].view(np.bool_).nonzero()[0]
    positions = some[inside >> 3]
    positions <<= 3
    inside &= 7
    positions += inside
    tail = mask[whole:].nonzero()[0]
    return np.concatenate([positions, tail + whole]) if tail.size else positions


def write_positions(out: Writer, positions: Positions, num_items: int) -> None:
    """Encode ascending positions below `num_items`. Their count is not written."""
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    is_long = num_items >= LONG_GAP * max(1, positions.size)
    out.byte(is_long)
    if is_long:
        out.plane(gaps.astype(np.uint8))
        gaps >>= 8
    far = np.flatnonzero(gaps >= 255)
    plane = gaps.astype(np.uint8)
    if far.size:
        escapes, plane[far] = np.divmod(gaps[far], 255)
        plane = np.insert(plane, np.repeat(far, escapes), 255)
    out.number(plane.size)
    out.plane(plane)


def read_positions(reader: Reader, count: int, num_items: int) -> Positions:
    """Decode `count` positions written by `write_positions`."""
    is_long = reader.byte()
    require(is_long <= 1, f"positions of form {is_long}")
    low = reader.plane(count if is_long else 0)
    scale = 256 if is_long else 1
    plane = reader.plane(reader.number(count + num_items // (255 * scale)))
    is_end = plane != 255
    require(not plane.size or bool(is_end[-1]), "a gap without end")
    # Sums fit: a plane has at most as many bytes as a segment has items, and 255 times that is less than 2^32.
    sums = np.cumsum(plane, dtype=np.uint32)
    if plane.size > count:
        sums = sums[is_end]
    require(sums.size == count, "as many gaps as there are positions")
    positions = sums.astype(np.int64)
    if is_long:
        gaps = np.diff(positions, prepend=0)
        gaps <<= 8
        gaps += low
        gaps += 1
        positions = np.cumsum(gaps)
    else:
        positions += np.arange(1, count + 1)
    positions -= 1
    require(not count or int(positions[-1]) < num_items, "a position beyond the last item")
    return positions


def write_item_planes(out: Writer, items: Items) -> None:
    """Encode items as one plane for each of their bytes, the lowest first."""
    for shift in range(0, 8 * items.itemsize, 8):
        plane = np.empty(items.size, np.uint8)
        for start in range(0, items.size, BLOCK_ITEMS):
            plane[start : start + BLOCK_ITEMS] = items[start : start + BLOCK_ITEMS] >> shift
        out.plane(plane)


def read_item_planes(reader: Reader, count: int, width: int) -> Items:
    """Decode `count` items of `width` bytes from their byte planes, the lowest first."""
    items = np.zeros(count, UNSIGNED[width])
    for shift in range(0, 8 * width, 8):
        plane = reader.plane(count)
        for start in range(0, count, BLOCK_ITEMS):
            items[start : start + BLOCK_ITEMS] |= plane[start : start + BLOCK_ITEMS].astype(items.dtype) << shift
    return items


def zigzag(steps: Items) -> Items:
    """Map steps modulo their width to numbers that are small for small steps: 0, -1, 1, -2 as 0, 1, 2, 3."""
    signs = (steps.view(SIGNED[steps.itemsize]) >> (8 * steps.itemsize - 1)).view(steps.dtype)
    return (steps << 1) ^ signs


def unzigzag(numbers: Items) -> Items:
    """The inverse of `zigzag`: 0, 1, 2, 3 as 0, -1, 1, -2."""
    return (numbers >> 1) ^ (~(numbers & 1) + 1)


def write_steps(out: Writer, bits: int, count: int, steps_of: Callable[[int, int], Items]) -> None:
    """Encode `count` steps in symbols of 2, 4 or 8 bits. `steps_of(start, stop)` gives a part of the steps."""
    top, per_byte = (1 << bits) - 1, 8 // bits
    packed = np.empty(-(-count // per_byte), np.uint8)
    others: list[Items] = []
    for start in range(0, count, BLOCK_ITEMS):
        steps = steps_of(start, min(count, start + BLOCK_ITEMS))
        symbols = steps + steps.dtype.type(top >> 1)
        np.minimum(symbols, top, out=symbols)
        places = where(symbols == top)
        if places.size:
            others.append(zigzag(steps[places]))
        part = _pack(symbols.astype(np.uint8, copy=False), bits)
        packed[start // per_byte : start // per_byte + part.size] = part
    out.plane(packed)
    out.number(sum(part.size for part in others))
    if others:
        write_item_planes(out, np.concatenate(others))


def read_steps(reader: Reader, bits: int, count: int, width: int, take: Callable[[int, Items], None]) -> None:
    """Decode the output of `write_steps`, and pass it to `take(start, steps)` in parts."""
    top, per_byte = (1 << bits) - 1, 8 // bits
    packed = reader.plane(-(-count // per_byte))
    others = read_item_planes(reader, reader.number(count), width)
    used = 0
    for start in range(0, count, BLOCK_ITEMS):
        symbols = _unpack(packed[start // per_byte : (start + BLOCK_ITEMS) // per_byte], bits)[: count - start]
        steps = symbols.astype(UNSIGNED[width])
        steps -= steps.dtype.type(top >> 1)
        places = where(symbols == top)
        if places.size:
            require(used + places.size <= others.size, "fewer other steps than there are places for them")
            steps[places] = unzigzag(others[used : used + places.size])
            used += places.size
        take(start, steps)
    require(used == others.size, "more other steps than there are places for them")


def _pack(symbols: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return symbols
    per_byte = 8 // bits
    if symbols.size % per_byte:
        symbols = np.pad(symbols, (0, per_byte - symbols.size % per_byte))
    words: Items = symbols.view(np.dtype("<u4" if bits == 2 else "<u2"))
    packed = words | (words >> (8 - bits))
    if bits == 2:
        packed |= (words >> 12) | (words >> 18)
    low_bytes: NDArray[np.uint8] = packed.astype(np.uint8)
    return low_bytes


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    symbols: NDArray[np.uint8] = np.take(_SYMBOLS[bits], packed).view(np.uint8)
    return symbols


def _symbol_table(bits: int) -> Items:
    """Return for every byte its symbols, one per byte, as one number."""
    every = np.arange(256)
    table = sum(((every >> (bits * place)) & ((1 << bits) - 1)) << (8 * place) for place in range(8 // bits))
    return np.asarray(table, "<u4" if bits == 2 else "<u2")


_SYMBOLS = {bits: _symbol_table(bits) for bits in (2, 4)}
