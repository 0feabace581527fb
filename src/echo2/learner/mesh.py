"""The ranks of one learner: processes that share a model, one GPU or CPU each. Only here, `torch.distributed` is used.

FSDP2 (`fully_shard`): every weight is cut along its first dimension, a layer is whole only while it computes, and each
rank has the gradients and moments of its own rows. All ranks call the same verbs with the same data in the same order;
which part of the data a rank runs is the trainer's. `Mesh` itself is one process: nothing is cut, nobody is asked, and
`torch.distributed` is not imported. Ranks trust each other and the network between them.

A process learns which rank it is from its environment: `torchrun`'s, or that of the first rank, which starts the others
on its own machine. Those meet in a file and talk over loopback.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from echo2.errors import InvariantError, UserError
from echo2.learner.datum import Datum

R = TypeVar("R")
Fill = Callable[[nn.Module], None]
#: A collective of a step that takes longer than this has lost a rank.
STEP_TIMEOUT = timedelta(minutes=10)
#: The ranks wait for the first one's word while it waits for rollouts. A rank that dies ends the wait at once.
WORD_TIMEOUT = timedelta(days=7)
RENDEZVOUS_VARIABLE = "ECHO2_RENDEZVOUS"


class ModuleRun(Protocol):
    """Through which a model's weights are used."""

    def __call__(self, compute: Callable[[], R]) -> R:
        """What is computed with them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the learner's `size` processes this is, which one on its machine, and where they meet (an init method of
    torch.distributed)."""

    rank: int
    size: int
    local_rank: int
    rendezvous: str

    def environment(self) -> dict[str, str]:
        """What `place` reads."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        return {name: str(number) for name, number in numbers.items()} | {RENDEZVOUS_VARIABLE: self.rendezvous}


def place() -> Place | None:
    """This process's place as its environment names it; None: it was started by itself."""
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(text.isdecimal() for text in found):
        return None
    rank, size, local_rank = map(int, found)
    return Place(rank, size, local_rank, os.environ.get(RENDEZVOUS_VARIABLE, "env://"))


class Mesh:
    """One process. `scratch`: where the first rank may put what its memory need not hold."""

    rank = 0
    size = 1
    scratch = Path(tempfile.gettempdir())

    def broadcast(self, data: bytes = b"") -> bytes:
        """What the first rank gives, on every rank."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank gives, in the order of ranks, on every rank."""
        return [data]

    def shard(self, module: nn.Module, fill: Fill | None = None) -> ModuleRun:
        """Cut the module's weights over the ranks, in place, if that is not done. What is computed with them goes
        through the result. Adapters stay whole: each rank has all of them, and `sum` makes their gradients one.

        `fill` is called with each part before that is cut, and with the module at last: to read the weights.

        Raises:
            UserError: there are more ranks than the model can be cut into.
        """
        if fill is not None:
            fill(module)
        return _run

    def rows(self, num_rows: int) -> tuple[int, int]:
        """First and last + 1 of this rank's rows of a weight with so many."""
        return 0, num_rows

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a weight, or of what has its shape: the memory itself."""
        return tensor

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether each rank has rows of its own; else all have the same."""
        return False

    def whole(self, tensor: Tensor) -> Tensor:
        """All rows of a weight, or the sum that a norm is."""
        return tensor

    def sum(self, gradients: Sequence[Tensor]) -> None:
        """Make gradients the sums over all ranks, in place."""

    def cut_like(self, parameter: Tensor, rows: Tensor) -> Tensor:
        """This rank's rows as the tensor of all ranks' that is cut as `parameter` is."""
        return rows

    def leave(self) -> None:
        """Part in good order: every rank says so."""


class RankMesh(Mesh):
    """Several processes. Made by `join`."""

    def __init__(self, here: Place, device: torch.device, scratch: Path) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        self.rank, self.size, self.scratch = here.rank, here.size, scratch
        self._dist, self._cut = dist, DTensor
        self._runs: dict[nn.Module, ModuleRun] = {}
        self._ranks = DeviceMesh(device.type, torch.arange(here.size))
        self._words = dist.new_group(backend="gloo", timeout=WORD_TIMEOUT)

    def broadcast(self, data: bytes = b"") -> bytes:
        size = torch.tensor([len(data)])
        self._dist.broadcast(size, 0, group=self._words)
        found = _as_tensor(data) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        if found.numel():
            self._dist.broadcast(found, 0, group=self._words)
        return found.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._dist.all_gather(sizes, torch.tensor([len(data)]), group=self._words)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.size
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._dist.all_gather(found, _as_tensor(data.ljust(longest, b"\0")), group=self._words)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(found, sizes, strict=True)]

    def shard(self, module: nn.Module, fill: Fill | None = None) -> ModuleRun:
        from torch.distributed.fsdp import fully_shard

        most = max(parameter.shape[0] for parameter in module.parameters() if parameter.dim())
        if self.size > most:
            raise UserError(
                f"learner.ranks = {self.size}: this model can be cut into {most} parts at most, the rows of its "
                f"largest weight. Set learner.ranks = {most} or less."
            )
        if module in self._runs:
            return self._runs[module]
        layers = set(getattr(module, "_no_split_modules", None) or ())
        adapters = {parameter for name, parameter in module.named_parameters() if ".lora_" in name}
        for layer in [part for part in module.modules() if type(part).__name__ in layers]:
            if fill is not None:
                fill(layer)
            fully_shard(layer, mesh=self._ranks, ignored_params=adapters)
        if fill is not None:
            fill(module)
        whole: Any = fully_shard(_Computed(module), mesh=self._ranks, ignored_params=adapters)

        def run(compute: Callable[[], R]) -> R:
            result: R = whole(compute)
            if not torch.is_grad_enabled():
                whole.reshard()  # with a gradient, the backward pass does that
            return result

        self._runs[module] = run
        return run

    def rows(self, num_rows: int) -> tuple[int, int]:
        each = math.ceil(num_rows / self.size)
        return min(self.rank * each, num_rows), min((self.rank + 1) * each, num_rows)

    def own(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, self._cut):
            return tensor
        mine: Tensor = tensor.to_local()
        start, stop = self.rows(tensor.shape[0])
        if mine.shape[0] != stop - start:
            raise InvariantError(f"rank {self.rank} holds {mine.shape[0]} rows, not {start} to {stop}")
        return mine

    def is_cut(self, tensor: Tensor) -> bool:
        return isinstance(tensor, self._cut)

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, self._cut):
            return tensor
        found: Tensor = tensor.full_tensor()
        return found

    def sum(self, gradients: Sequence[Tensor]) -> None:
        cut = [gradient for gradient in gradients if self.is_cut(gradient)]
        if cut:
            torch._foreach_mul_(cut, self.size)  # FSDP has made them means
        for gradient in gradients:
            if not self.is_cut(gradient):
                self._dist.all_reduce(gradient)

    def cut_like(self, parameter: Tensor, rows: Tensor) -> Tensor:
        if not isinstance(parameter, self._cut):
            return rows
        made: Tensor = self._cut.from_local(
            rows,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made

    def leave(self) -> None:
        self._dist.destroy_process_group()


def _run(compute: Callable[[], R]) -> R:
    return compute()


class _Computed(nn.Module):
    """A module whose weights are whole while something is computed with them: FSDP hooks `forward`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], R]) -> R:
        return compute()


def join(here: Place, device: torch.device, scratch: Path = Mesh.scratch) -> Mesh:
    """Meet the other ranks; each is to do so.

    Raises:
        UserError: they can't be met.
    """
    import torch.distributed as dist

    if here.rendezvous.startswith("file:"):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, init_method=here.rendezvous, rank=here.rank, world_size=here.size, timeout=STEP_TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"Rank {here.rank} of {here.size} does not find the others at {here.rendezvous}: {error}. Start all with "
            "the same torchrun command, or leave it to learner.ranks."
        ) from error
    return RankMesh(here, device, scratch)


def shares(data: Sequence[Datum], num_ranks: int) -> list[list[Datum]]:
    """The data in order, cut into a part for each rank, about as many tokens each. Some may have none."""
    if num_ranks == 1:
        return [list(data)]
    lengths = [len(datum.prompt_tokens) + datum.num_inputs for datum in data]
    parts: list[list[Datum]] = [[] for _ in range(num_ranks)]
    total, before = sum(lengths), 0
    for datum, length in zip(data, lengths, strict=True):
        parts[(2 * before + length) * num_ranks // (2 * total)].append(datum)  # where its middle falls
        before += length
    return parts


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
