"""Writes a policy's weights and moments to the files of a checkpoint and reads them, on one rank or several.

Every rank writes its own part in the background, directly from the weights and moments. The ranks synchronise twice:
before they write, once the directory exists, and when all have written; then the first rank commits the checkpoint. If
a rank dies in between, there is no checkpoint. Any number of ranks can read a checkpoint: each reads its own part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from echo2.core.errors import NoRoomError, UserError
from echo2.core.types import StoredTensor
from echo2.engines.hub_layout import TensorPart
from echo2.learner.core import checkpoint
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import stored
from echo2.learner.core.optimizer import KINDS, set_moments
from echo2.learner.core.shard_files import ShardedTensors, file_name

OPTIMIZER_FILE = "optimizer.safetensors"


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
        found = [json.loads(text) for text in self.mesh.gather(json.dumps(answer).encode())]
        if self.mesh.rank:
            return
        for kind, name in ((NoRoomError, "no_room"), (UserError, "failed")):
            for each in found:
                if name in each:
                    raise kind(each[name])
        index = {name: entry for each in found for name, entry in each["index"].items()}
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
        mine = dict(others.get(file, {})) if mesh.rank == 0 else {}
        for key, (tensor, place) in tensors.items():
            found = None if mesh.rank and not mesh.is_cut(tensor) else place.within(mesh.region(tensor))
            if found is not None:
                mine[key] = stored(place.of(mesh.own(tensor), found[0]))
                if mesh.is_cut(tensor):
                    starts[key] = [start for start, _ in found[1]]
        parts[file_name(file, mesh.rank, mesh.size if is_cut else 1)] = mine
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
            found = place.within(mesh.region(tensor))
            if found is not None:
                place.of(mesh.own(tensor), found[0]).copy_(tensors.read(key, found[1]))


def load_moments(
    mesh: Mesh, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: ShardedTensors
) -> None:
    """Load the moments in `tensors` into the optimizer of `parameters`.

    Raises:
        UserError: they are of another kind of optimizer.
    """
    for key, parameter in parameters.items():
        found = dict[str, Tensor]()
        for kind in KINDS:
            if (shape := tensors.shapes.get(f"{kind}.{key}")) is not None:
                is_cut = mesh.is_cut(parameter) and shape == tuple(parameter.shape)
                values = tensors.read(f"{kind}.{key}", mesh.region(parameter) if is_cut else None)
                found[kind] = mesh.cut_like(parameter, values.to(mesh.own(parameter).device)) if is_cut else values
        if found:
            set_moments(optimizer, parameter, found)
