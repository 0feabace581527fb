"""Runs one client on several ranks: the first rank talks to the head and passes each verb to the others.

All ranks hold the same client in the same state and run the same verbs in the same order on the same groups; the
trainer divides the work of a call. If one rank dies, all end, and the run resumes from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from echo2.core.errors import InvariantError
from echo2.core.types import RolloutGroup
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.publication import BorrowedWeights
from echo2.learner.core.state import Saving
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import LossStats, StepStats
from echo2.learner.grpo.trained_policy import RunPosition
from echo2.transport.messages import encode_group, parse_group


class Order(msgspec.Struct, frozen=True):
    """A verb for all ranks, and its arguments."""

    verb: str
    groups: list[bytes] = []
    directory: str = ""
    lineage: int = 0
    cursor: int = 0
    ends_step: bool = True


class LeadingClient(GrpoClient):
    """The first rank's client. Each verb of `GrpoClient` is run by all ranks."""

    def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
        self.tell(Order("forward_backward", [encode_group(group).SerializeToString() for group in groups]))
        return super().forward_backward(groups)

    def optim_step(self, ends_step: bool = True) -> StepStats:
        self.tell(Order("optim_step", ends_step=ends_step))
        return super().optim_step(ends_step)

    def save_weights_for_sampler(self) -> BorrowedWeights:
        self.tell(Order("save_weights_for_sampler"))
        return super().save_weights_for_sampler()

    def save_state(self, directory: Path, lineage: int = 0, cursor: int = 0) -> Saving:
        self.tell(Order("save_state", [], str(directory), lineage, cursor))
        return _ToldSaving(self, super().save_state(directory, lineage, cursor))

    def load_state(self, directory: Path) -> RunPosition:
        self.tell(Order("load_state", [], str(directory)))
        return super().load_state(directory)

    def end(self) -> None:
        """End the other ranks, and leave the mesh."""
        self.tell(Order("end"))
        self.mesh.leave()

    def tell(self, order: Order) -> None:
        """Have the other ranks carry out an order."""
        self.mesh.broadcast(msgspec.msgpack.encode(order))


@dataclass(frozen=True, slots=True)
class _ToldSaving:
    """A checkpoint under way. When the first rank waits for it, the other ranks are told to wait too."""

    client: LeadingClient
    saving: Saving

    def result(self) -> None:
        self.client.tell(Order("finish_saving"))
        self.saving.result()


def follow(client: GrpoClient, mesh: Mesh, lend: Callable[[int, BorrowedWeights], None]) -> None:
    """Carry out the first rank's orders until the order to end. `lend` is given each version's weights, this rank's
    share of them, when they are to be published.

    Raises:
        RuntimeError: the first rank has died.
        UserError: see the verbs.
    """
    saving: Saving | None = None
    while (order := msgspec.msgpack.decode(mesh.broadcast(), type=Order)).verb != "end":
        if order.verb == "save_state":
            saving = client.save_state(Path(order.directory), order.lineage, order.cursor)
        elif order.verb == "finish_saving" and saving is not None:
            saving.result()
        elif order.verb == "save_weights_for_sampler":
            lend(client.version, client.save_weights_for_sampler())
        else:
            _do(client, order)
    mesh.leave()


def _do(client: GrpoClient, order: Order) -> None:
    verbs: dict[str, Any] = {
        "forward_backward": lambda: client.forward_backward([parse_group(data) for data in order.groups]),
        "load_state": lambda: client.load_state(Path(order.directory)),
        "optim_step": lambda: client.optim_step(order.ends_step),
    }
    if order.verb not in verbs:
        raise InvariantError(f"the first rank told {order.verb!r}")
    verbs[order.verb]()
