"""Reads and writes the tensors of a checkpoint for any number of writing and reading ranks.

A single rank writes `model.safetensors`. Each of n ranks writes its own parts of the tensors, to
`model.0-of-2.safetensors` and so on; a part is a rectangle, and the file's metadata says where each starts in the whole
tensor. Tensors that are not sharded are in the first file only. A rank reads only its own parts from the files, so it
needs memory for these alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echo2.core.documents import parse_json, safetensors_pieces
from echo2.core.errors import UserError
from echo2.core.types import StoredTensor
from echo2.engines.hub_layout import Region
from echo2.learner.core.checkpoint import STARTS
from echo2.learner.core.loading import SAFETENSORS_NAMES, kept_in_float32
from echo2.learner.core.model import DTYPES, stored
from echo2.weights.format.model_files import WEIGHTS

SUFFIX = ".safetensors"
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def file_name(name: str, rank: int, size: int) -> str:
    """Return the name of a rank's part of the file `name`."""
    return name if size == 1 else f"{name.removesuffix(SUFFIX)}.{rank}-of-{size}{SUFFIX}"


def part_paths(directory: Path, name: str) -> list[Path]:
    """Return the path of the file `name`, or of the ranks' parts of it; empty if there is neither."""
    whole = directory / name
    size = len(list(directory.glob(f"{name.removesuffix(SUFFIX)}.*-of-*{SUFFIX}")))
    return [whole] if whole.is_file() else [directory / file_name(name, rank, size) for rank in range(size)]


class ShardedTensors:
    """The tensors of one open file, or of the ranks' parts of it. `shapes`: shapes of the whole tensors by name."""

    def __init__(self, files: list[Any]) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        for file in files:
            starts = parse_json((file.metadata() or {}).get(STARTS, "{}"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                values, pieces = file.get_slice(name), self._pieces.setdefault(name, [])
                start = starts.get(name) or [0] * len(values.get_shape())
                if not starts and pieces:  # parts without metadata are rows, in the order of files
                    start[0] = pieces[-1].stop[0]
                stop = [first + length for first, length in zip(start, values.get_shape(), strict=True)]
                pieces.append(_Piece(values, start, stop))
        self.shapes = {name: _shape(pieces) for name, pieces in self._pieces.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a region (default: all) of a tensor. A tensor without dimensions is returned whole."""
        pieces, shape = self._pieces[name], self.shapes[name]
        if not shape:
            scalar: Tensor = pieces[0].values[...]
            return scalar
        wanted = [(0, length) for length in shape] if region is None else list(region)
        found = torch.empty([high - low for low, high in wanted], dtype=_DTYPES[pieces[0].values.get_dtype()])
        for piece in pieces:
            overlap = [
                (max(low, start), min(high, stop))
                for (low, high), start, stop in zip(wanted, piece.start, piece.stop, strict=True)
            ]
            if any(low >= high for low, high in overlap):
                continue
            values = piece.values[_slices(overlap, piece.start)]
            if overlap == wanted:
                return values.contiguous()  # type: ignore[no-any-return]
            found[_slices(overlap, [low for low, _ in wanted])] = values
        return found


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rank's part of a tensor: its values in the open file, and where it starts and stops in each dimension."""

    values: Any
    start: Sequence[int]
    stop: Sequence[int]


def _slices(region: Sequence[tuple[int, int]], start: Sequence[int]) -> tuple[slice, ...]:
    """Return the indices of a region in an array that begins at `start`."""
    return tuple(slice(low - first, high - first) for (low, high), first in zip(region, start, strict=True))


def _shape(pieces: list[_Piece]) -> tuple[int, ...]:
    return tuple(map(max, zip(*(piece.stop for piece in pieces), strict=True)))


@contextmanager
def open_tensors(directory: Path, name: str) -> Iterator[ShardedTensors]:
    """Open the file `name` of a checkpoint, or the ranks' parts of it.

    Raises:
        UserError: the file is missing or damaged, or a rank's part is.
    """
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, "pt")) for path in part_paths(directory, name)]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{directory} holds no whole {name}: {error}. Name a checkpoint.") from error
        if not files:
            raise UserError(f"{directory} holds no {name}. Name a checkpoints/step_N of a run.")
        yield ShardedTensors(files)


def write_whole(directory: Path, name: str, to: Path, dtype: str = "") -> None:
    """Write the file `name`, or the ranks' parts of it, as one file, with one piece at a time in memory. `dtype`: of
    the floating-point tensors written, one of `DTYPES`; empty: unchanged. Tensors of a model that transformers keeps in
    float32 stay so.

    Raises:
        UserError: see `open_tensors` and `cast`.
        OSError: the file can't be written.
    """
    with open_tensors(directory, name) as tensors, to.open("wb") as file:
        kept = kept_in_float32(directory, tensors.shapes, dtype) if dtype and name == WEIGHTS else ()
        stored_as = {key: "" if key in kept else dtype for key in tensors.shapes}
        for piece in safetensors_pieces({key: _stored(tensors, key, stored_as[key]) for key in tensors.shapes}):
            file.write(piece)


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Return the tensor in `dtype` if it is floating-point and `dtype` is not empty, else unchanged.

    Raises:
        UserError: a number is too large for `dtype`.
    """
    if not dtype or not tensor.is_floating_point():
        return tensor
    found = tensor.to(DTYPES[dtype])
    if found.isinf().any():
        worst, most = tensor[found.isinf()][0].item(), torch.finfo(found.dtype).max
        raise UserError(
            f"{name} holds {worst:g}, and {dtype} ends at {most:g}. Choose --dtype bfloat16, or leave --dtype out."
        )
    return found


def _stored(tensors: ShardedTensors, name: str, dtype: str) -> StoredTensor:
    shape = tensors.shapes[name]
    if not shape:
        return stored(cast(name, tensors.read(name), dtype))
    others = tuple((0, length) for length in shape[1:])
    sample = stored(cast(name, tensors.read(name, ((0, min(1, shape[0])), *others)), dtype))
    row_bytes = max(sample.num_bytes, 1)

    def read(start: int, stop: int) -> bytes | memoryview:
        region = ((start // row_bytes, -(-stop // row_bytes)), *others)
        rows = stored(cast(name, tensors.read(name, region), dtype))
        skipped = start // row_bytes * row_bytes
        return rows.read(0, rows.num_bytes)[start - skipped : stop - skipped]

    return StoredTensor(sample.dtype, shape, sample.num_bytes * shape[0], read)
