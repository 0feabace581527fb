"""The ranks of one learner: processes that share a model, one GPU or CPU each. No other module uses
`torch.distributed`.

FSDP2 (`fully_shard`): every weight is cut along its first dimension, a layer is whole only while it computes, and each
rank has the gradients and moments of its own rows. All ranks call the same verbs with the same data in the same order;
the trainer decides which part of the data each runs. `Mesh` itself is a single process: nothing is cut or communicated,
and `torch.distributed` is not imported. Ranks trust each other and the network between them.

A process reads its rank from its environment, which is set by `torchrun`, or by the first rank, which starts the others
on its own machine. In the second case the ranks rendezvous through a file and communicate over loopback.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from echo2.core.addresses import LOOPBACK
from echo2.core.errors import InvariantError, UserError
from echo2.engines.hub_layout import Region
from echo2.learner.core.datum import Datum

R = TypeVar("R")
Fill = Callable[[nn.Module], None]
#: A collective operation of a step that takes longer than this has lost a rank.
STEP_TIMEOUT = timedelta(minutes=10)
#: The other ranks wait for the first rank's orders while it waits for rollouts. A rank that dies ends the wait at once.
WORD_TIMEOUT = timedelta(days=7)
RENDEZVOUS_VARIABLE = "ECHO2_RENDEZVOUS"


class ModuleRun(Protocol):
    """Runs a computation that uses a model's weights."""

    def __call__(self, compute: Callable[[], R]) -> R:
        """Return the result of `compute`."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process's rank among the learner's `size` processes, its rank on its machine, and where the ranks rendezvous
    (an init method of torch.distributed)."""

    rank: int
    size: int
    local_rank: int
    rendezvous: str

    @property
    def first_host(self) -> str:
        """Address of the first rank for the others."""
        return LOOPBACK if self.rendezvous.startswith("file:") else os.environ.get("MASTER_ADDR", LOOPBACK)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that `place` reads."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        return {name: str(number) for name, number in numbers.items()} | {RENDEZVOUS_VARIABLE: self.rendezvous}


def place() -> Place | None:
    """Return this process's place as its environment names it; None if the process was started alone."""
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(text.isdecimal() for text in values):
        return None
    rank, size, local_rank = map(int, values)
    return Place(rank, size, local_rank, os.environ.get(RENDEZVOUS_VARIABLE, "env://"))


class Mesh:
    """A single process. `scratch`: directory for data that the first rank need not hold in memory."""

    rank = 0
    size = 1
    scratch = Path(tempfile.gettempdir())

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return the first rank's data, on every rank."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, in the order of ranks, on every rank."""
        return [data]

    def shard(self, module: nn.Module, fill: Fill | None = None) -> ModuleRun:
        """Cut the module's weights over the ranks, in place, unless that is done. Computations with the weights must go
        through the result. Adapters stay whole: each rank has all of them, and `sum` adds up their gradients.

        `fill` reads the weights: it is called with each part before the part is cut, and with the module at last.

        Raises:
            UserError: there are more ranks than the model can be cut into.
        """
        if fill is not None:
            fill(module)
        return _run

    def region(self, tensor: Tensor) -> Region:
        """Return which part of a weight this rank has."""
        return tuple((0, length) for length in tensor.shape)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a weight, or of a tensor cut like one: the memory itself, not a copy."""
        return tensor

    def is_cut(self, tensor: Tensor) -> bool:
        """Whether ranks have parts of the tensor; otherwise each has all of it."""
        return False

    def whole(self, tensor: Tensor) -> Tensor:
        """Return all of a weight."""
        return tensor

    def sum(self, parameters: Iterable[Tensor]) -> None:
        """Replace the parameters' gradients by their sums over all ranks, in place."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients together."""
        return torch.nn.utils.get_total_norm(gradients)

    def cut_like(self, parameter: Tensor, part: Tensor) -> Tensor:
        """Wrap this rank's part as the tensor of all ranks' parts, cut like `parameter`."""
        return part

    def leave(self) -> None:
        """Shut the communication down; every rank must call it."""


class RankMesh(Mesh):
    """Several processes. Created by `join`."""

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
        content = _as_tensor(data) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        if content.numel():
            self._dist.broadcast(content, 0, group=self._words)
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._dist.all_gather(sizes, torch.tensor([len(data)]), group=self._words)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.size
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._dist.all_gather(parts, _as_tensor(data.ljust(longest, b"\0")), group=self._words)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    def shard(self, module: nn.Module, fill: Fill | None = None) -> ModuleRun:
        from torch.distributed.fsdp import fully_shard

        most = max(parameter.shape[0] for parameter in module.parameters() if parameter.dim())
        if self.size > most:
            raise UserError(
                f"learner.ranks = {self.size}: this model can be cut into {most} parts at most, the rows of its "
                f"largest weight. Set learner.ranks = {most} or less (under torchrun: --nproc-per-node)."
            )
        if module in self._runs:
            return self._runs[module]
        adapters = {parameter for name, parameter in module.named_parameters() if ".lora_" in name}
        for layer in _layers(module):
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

    def region(self, tensor: Tensor) -> Region:
        whole = super().region(tensor)
        if not self.is_cut(tensor):
            return whole
        (_, num_rows), *others = whole
        each = math.ceil(num_rows / self.size)
        return (min(self.rank * each, num_rows), min((self.rank + 1) * each, num_rows)), *others

    def own(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, self._cut):
            return tensor
        part: Tensor = tensor.to_local()
        region = self.region(tensor)
        if tuple(part.shape) != tuple(stop - start for start, stop in region):
            raise InvariantError(f"rank {self.rank} holds a part of shape {tuple(part.shape)}, not the region {region}")
        return part

    def is_cut(self, tensor: Tensor) -> bool:
        return isinstance(tensor, self._cut)

    def whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, self._cut):
            return tensor
        full: Tensor = tensor.full_tensor()
        return full

    def sum(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if not self.is_cut(gradient):
                self._dist.all_reduce(gradient)
                continue
            self.own(gradient).mul_(self.size)  # FSDP has averaged it

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = torch.stack(torch._foreach_norm([self.own(gradient) for gradient in gradients])).double()
        copies = torch.tensor([1 if self.is_cut(gradient) else self.size for gradient in gradients]).to(norms)
        total = (norms.square() / copies).sum()
        self._dist.all_reduce(total)
        return total.sqrt()

    def cut_like(self, parameter: Tensor, part: Tensor) -> Tensor:
        if not isinstance(parameter, self._cut):
            return part
        made: Tensor = self._cut.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made

    def leave(self) -> None:
        self._dist.destroy_process_group()


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the parts that compute as one; of those within each other (Mamba's) the outer ones."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    layers, inside = list[nn.Module](), set[nn.Module]()
    for part in module.modules():
        if type(part).__name__ in names and part not in inside:
            layers.append(part)
            inside.update(part.modules())
    return layers


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
    """Join the other ranks; every rank must call it.

    Raises:
        UserError: the other ranks are not found.
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
    """Split the data, in order, into a share for each rank, with about equally many tokens. Some may be empty."""
    if num_ranks == 1:
        return [list(data)]
    lengths = [len(datum.prompt_tokens) + datum.num_inputs for datum in data]
    parts: list[list[Datum]] = [[] for _ in range(num_ranks)]
    total, before = sum(lengths), 0
    for datum, length in zip(data, lengths, strict=True):
        parts[(2 * before + length) * num_ranks // (2 * total)].append(datum)  # the part that its middle falls into
        before += length
    return parts


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
