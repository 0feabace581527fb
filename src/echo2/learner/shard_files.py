"""Reads and writes the tensors of a checkpoint for any number of writing and reading ranks.

A single rank writes `model.safetensors`. Each of n ranks writes its own rows, to `model.0-of-2.safetensors` and so on;
concatenated in the order of ranks they are the whole tensor. Tensors that are not sharded are in the first file only.
A rank reads only its own rows from the files, so it needs memory for these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echo2.documents import safetensors_pieces
from echo2.errors import UserError
from echo2.learner.model import DTYPES, stored
from echo2.types import StoredTensor

SUFFIX = ".safetensors"


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
        self._pieces: dict[str, list[Any]] = {}
        for file in files:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                self._pieces.setdefault(name, []).append(file.get_slice(name))
        self.shapes = {name: _shape(pieces) for name, pieces in self._pieces.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop` (default: all) of a tensor. A tensor without dimensions is returned whole."""
        pieces = self._pieces[name]
        if not self.shapes[name]:
            scalar: Tensor = pieces[0][...]
            return scalar
        stop, before, found = self.shapes[name][0] if stop is None else stop, 0, []
        for piece in pieces:
            rows = piece.get_shape()[0]
            first, last = max(start - before, 0), min(stop - before, rows)
            if first < last:
                found.append(piece[first:last])
            before += rows
        if not found:
            return pieces[0][0:0] if pieces[0].get_shape()[0] else torch.cat([piece[:] for piece in pieces])[0:0]
        return found[0] if len(found) == 1 else torch.cat(found)


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
    the floating-point tensors written, one of `DTYPES`; empty: unchanged.

    Raises:
        UserError: see `open_tensors` and `cast`.
        OSError: the file can't be written.
    """
    with open_tensors(directory, name) as tensors, to.open("wb") as file:
        for piece in safetensors_pieces({key: _stored(tensors, key, dtype) for key in tensors.shapes}):
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
    sample = stored(cast(name, tensors.read(name, 0, 1), dtype))
    row_bytes = max(sample.num_bytes, 1)

    def read(start: int, stop: int) -> bytes | memoryview:
        rows = stored(cast(name, tensors.read(name, start // row_bytes, -(-stop // row_bytes)), dtype))
        skipped = start // row_bytes * row_bytes
        return rows.read(0, rows.num_bytes)[start - skipped : stop - skipped]

    return StoredTensor(sample.dtype, shape, sample.num_bytes * shape[0], read)


def _shape(pieces: list[Any]) -> tuple[int, ...]:
    first, *rest = pieces[0].get_shape() or [None]
    return () if first is None else (sum(piece.get_shape()[0] for piece in pieces), *rest)
