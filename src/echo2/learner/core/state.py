"""Writes a policy's weights and moments to the files of a checkpoint and reads them, on any number of ranks.

A single rank writes `model.safetensors`. Each of n ranks writes its own parts of the tensors, to
`model.0-of-2.safetensors` and so on; a part is a rectangle, and the file's metadata says where each starts in the whole
tensor. Tensors that are not sharded are in the first file only. A rank reads only its own parts from the files, so it
needs memory for these alone.

Every rank writes its own part in the background, directly from the weights and moments. The ranks synchronise twice:
before they write, once the directory exists, and when all have written; then the first rank commits the checkpoint. If
a rank dies in between, there is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from echo2.core.documents import parse_json, safetensors_pieces
from echo2.core.errors import NoRoomError, UserError
from echo2.core.types import StoredTensor
from echo2.engines.hub_layout import Region, TensorPart
from echo2.learner.core import checkpoint
from echo2.learner.core.checkpoint import STARTS
from echo2.learner.core.loading import SAFETENSORS_NAMES, kept_in_float32
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import DTYPES, stored
from echo2.learner.core.optimizer import KINDS, set_moments
from echo2.weights.format.model_files import WEIGHTS

OPTIMIZER_FILE = "optimizer.safetensors"
SUFFIX = ".safetensors"
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


class Saving(Protocol):
    """A checkpoint that is being written."""

    def result(self) -> None:
        """Wait until the checkpoint is written."""


@dataclass(frozen=True, slots=True)
class RankSaving:
    """A checkpoint of which every rank writes its part."""

    mesh: Mesh
    directory: Path
    client: Mapping[str, Any]
    part: Future[dict[str, Any]]

    def result(self) -> None:
        """Wait until all ranks have written their parts; all must call it at the same point.

        Raises: on the first rank, as `begin_saving`.
        """
        answer: dict[str, Any]
        try:
            answer = {"index": self.part.result()}
        except UserError as error:
            answer = {"no_room" if isinstance(error, NoRoomError) else "failed": str(error)}
        answers = [json.loads(text) for text in self.mesh.gather(json.dumps(answer).encode())]
        if self.mesh.rank:
            return
        for kind, name in ((NoRoomError, "no_room"), (UserError, "failed")):
            for each in answers:
                if name in each:
                    raise kind(each[name])
        index = {name: entry for each in answers for name, entry in each["index"].items()}
        checkpoint.commit_checkpoint(self.directory, self.client, index)


def begin_saving(
    writer: Executor,
    mesh: Mesh,
    directory: Path,
    client: Mapping[str, Any],
    files: Mapping[str, bytes],
    contents: Mapping[str, Mapping[str, tuple[Tensor, TensorPart]]],
    others: Mapping[str, Mapping[str, StoredTensor]],
) -> tuple[Future[Any], Saving]:
    """Begin to write a checkpoint in `writer`'s thread. Return the future of this rank's part, and the whole saving.

    `contents`: the tensors of model and optimizer by stored name, and what of them is stored, for each file as a single
    rank names it. They must not change until the future is done. `others`: tensors that go into these files as they
    are. Both results raise:
        NoRoomError: no room; an earlier checkpoint in the directory is untouched.
        UserError: the directory cannot be written.
    """
    parts: dict[str, Mapping[str, StoredTensor]] = {}
    starts: dict[str, list[int]] = {}
    for file, tensors in contents.items():
        is_cut = any(mesh.is_cut(tensor) for tensor, _ in tensors.values())
        if not is_cut and mesh.rank:
            continue
        own_tensors = dict(others.get(file, {})) if mesh.rank == 0 else {}
        for key, (tensor, place) in tensors.items():
            overlap = None if mesh.rank and not mesh.is_cut(tensor) else place.within(mesh.region(tensor))
            if overlap is not None:
                own_tensors[key] = stored(place.of(mesh.own(tensor), overlap[0]))
                if mesh.is_cut(tensor):
                    starts[key] = [start for start, _ in overlap[1]]
        parts[file_name(file, mesh.rank, mesh.size if is_cut else 1)] = own_tensors
    if mesh.size == 1:
        whole = writer.submit(checkpoint.write_checkpoint, directory, client, files, parts)
        return whole, whole
    part: Future[dict[str, Any]] = Future()
    try:
        if mesh.rank == 0:
            checkpoint.begin_checkpoint(directory)
    except UserError as error:
        part.set_exception(error)
    mesh.gather(b"")  # now the directory exists, or no rank can write
    if not part.done():
        part = writer.submit(checkpoint.write_part, directory, {} if mesh.rank else files, parts, starts)
    return part, RankSaving(mesh, directory, client, part)


def load_weights(
    mesh: Mesh, directory: Path, state: Mapping[str, Tensor], places: Mapping[str, TensorPart], tensors: ShardedTensors
) -> None:
    """Read the weights of `state` in place; `tensors` has what lies at `places` in them, by stored name.

    Raises:
        UserError: a tensor has another shape. No tensor is changed then.
    """
    for key, place in places.items():
        if tensors.shapes[key] != place.shape:
            raise UserError(
                f"{directory} is a checkpoint of another model: its {key} has the shape {list(tensors.shapes[key])}, "
                f"that of model.path {list(place.shape)}. Set model.path back, or start another --out."
            )
    with torch.no_grad():
        for key, place in places.items():
            tensor = state[place.name]
            overlap = place.within(mesh.region(tensor))
            if overlap is not None:
                place.of(mesh.own(tensor), overlap[0]).copy_(tensors.read(key, overlap[1]))


def load_moments(
    mesh: Mesh, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: ShardedTensors
) -> None:
    """Load the moments in `tensors` into the optimizer of `parameters`.

    Raises:
        UserError: they are of another kind of optimizer.
    """
    for key, parameter in parameters.items():
        moments = dict[str, Tensor]()
        for kind in KINDS:
            if (shape := tensors.shapes.get(f"{kind}.{key}")) is not None:
                is_cut = mesh.is_cut(parameter) and shape == tuple(parameter.shape)
                values = tensors.read(f"{kind}.{key}", mesh.region(parameter) if is_cut else None)
                moments[kind] = mesh.cut_like(parameter, values.to(mesh.own(parameter).device)) if is_cut else values
        if moments:
            set_moments(optimizer, parameter, moments)


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
        bounds = [(0, length) for length in shape] if region is None else list(region)
        values_read = torch.empty([high - low for low, high in bounds], dtype=_DTYPES[pieces[0].values.get_dtype()])
        for piece in pieces:
            overlap = [
                (max(low, start), min(high, stop))
                for (low, high), start, stop in zip(bounds, piece.start, piece.stop, strict=True)
            ]
            if any(low >= high for low, high in overlap):
                continue
            values = piece.values[_slices(overlap, piece.start)]
            if overlap == bounds:
                return values.contiguous()  # type: ignore[no-any-return]
            values_read[_slices(overlap, [low for low, _ in bounds])] = values
        return values_read


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
        float32_names = kept_in_float32(directory, tensors.shapes, dtype) if dtype and name == WEIGHTS else ()
        stored_as = {key: "" if key in float32_names else dtype for key in tensors.shapes}
        for piece in safetensors_pieces({key: _stored(tensors, key, stored_as[key]) for key in tensors.shapes}):
            file.write(piece)


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Return the tensor in `dtype` if it is floating-point and `dtype` is not empty, else unchanged.

    Raises:
        UserError: a number is too large for `dtype`.
    """
    if not dtype or not tensor.is_floating_point():
        return tensor
    converted = tensor.to(DTYPES[dtype])
    if converted.isinf().any():
        worst, most = tensor[converted.isinf()][0].item(), torch.finfo(converted.dtype).max
        raise UserError(
            f"{name} holds {worst:g}, and {dtype} ends at {most:g}. Choose --dtype bfloat16, or leave --dtype out."
        )
    return converted


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
