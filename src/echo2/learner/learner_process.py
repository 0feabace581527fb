"""`echo2 learner DIR`: runs the GRPO client from the newest checkpoint until the run is over, on as many ranks as there
are devices, which it starts and watches as `torchrun` would.

The first rank talks to the head and passes each verb to the others. All ranks hold the same client in the same state
and run the same verbs in the same order on the same groups; the trainer divides the work of a call.

All ranks end together: the others by the lifeline of the first, and the first as soon as one of the others dies. The
supervisor then restarts the learner from its checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from echo2.config import Config
from echo2.config.rundir import RunDir, claimed, newest_checkpoint
from echo2.core.addresses import is_loopback
from echo2.core.child import ChildProcess
from echo2.core.devices import pick_device
from echo2.core.errors import InvariantError, UserError
from echo2.core.objects import open_objects
from echo2.core.types import RolloutGroup
from echo2.learner.core import checkpoint
from echo2.learner.core.adapters import Adapter, load_trained
from echo2.learner.core.mesh import Mesh, Place, join, place
from echo2.learner.core.model import Policy, check_pass
from echo2.learner.core.publication import PUBLISHING_RANKS_MAX, BorrowedWeights, Publisher, share_of
from echo2.learner.core.state import Saving
from echo2.learner.grpo.card import LearnerCard
from echo2.learner.grpo.loop import GrpoClient, train
from echo2.learner.grpo.step_meter import LossStats, StepStats
from echo2.learner.grpo.trained_policy import RunPosition
from echo2.learner.link.head_client import LearnerInfo
from echo2.learner.link.sending import OtherRanks, RankSender
from echo2.learner.link.session import HeadSession
from echo2.transport.base import Link
from echo2.transport.grpc_link import connect
from echo2.transport.messages import encode_group, parse_group

log = logging.getLogger(__name__)

#: Time for the other ranks to end by themselves after they were released.
RANKS_END_SECONDS = 10.0
#: Exit statuses with a meaning of their own, which are passed on; any other becomes 1.
TELLING_STATUSES = (2, 3)
TOLD_TO_STOP = "the learner got a signal to stop"
#: Exit status after a signal: the run is not over.
STOPPED_STATUS = 128 + signal.SIGTERM


@contextmanager
def started(rundir: RunDir, size: int) -> Iterator[Place]:
    """Run the other ranks, and yield the place of the first. The caller must release them before leaving the context
    (`LeadingClient.end`)."""
    is_over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="echo2-ranks-") as meeting:
        rendezvous = (Path(meeting) / "store").as_uri()
        ranks: list[ChildProcess] = []
        try:
            for rank in range(1, size):
                environment = {**os.environ, **Place(rank, size, rank, rendezvous).environment()}
                command = (sys.executable, "-m", "echo2", "learner", str(rundir.path))
                ended = partial(_end_with_rank, rank, is_over)
                ranks.append(ChildProcess(command, environment=environment, has_lifeline=True, on_end=ended))
                log.info("rank %d of %d is process %d", rank, size, ranks[-1].pid)
            yield Place(0, size, 0, rendezvous)
            is_over.set()
            for process in ranks:
                process.wait(RANKS_END_SECONDS)
        finally:
            is_over.set()
            for process in ranks:
                process.kill()
                process.wait()


def _end_with_rank(rank: int, is_over: threading.Event, status: int) -> None:
    if status and not is_over.is_set():  # 0: it was released, perhaps before the first rank has left
        log.error("rank %d ended with status %d, and with it this learner", rank, status)
        os._exit(status if status in TELLING_STATUSES else 1)


def run_learner(rundir: RunDir, ticket: str, card: str = "") -> int:
    """Train until the run is over, or until a signal; then the last completed step is saved. Return the exit status.
    `card`: directory of the locks of a card that the run's workers use, too.

    Raises:
        UserError: the model can't be loaded, the disk is full, or the head refuses this learner.
        LinkError: the head stayed away.
    """
    here = place()
    size = rundir.read_config().learner.ranks if here is None else here.size
    if here is not None and here.rank:
        return _follow(rundir, here)
    with claimed(rundir.path, "learner"):
        if here is not None or size == 1:
            return _train(rundir, ticket, here, card)
        with started(rundir, size) as here:
            return _train(rundir, ticket, here)


def _follow(rundir: RunDir, here: Place) -> int:
    """Run a rank other than the first, which handles signals for all ranks. Return the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    config, device = rundir.read_config(), pick_device(f"auto:{here.local_rank}")
    mesh = join(here, device, rundir.path / "learner")
    policy = _loaded(config, str(device), mesh)
    if policy is None:
        return UserError.exit_status
    client, meeting = GrpoClient(policy, config, mesh=mesh), mesh.broadcast()
    sender = None
    if here.rank < PUBLISHING_RANKS_MAX:
        publisher = Publisher(mesh.scratch, share=share_of(here.rank, here.size))
        sender = RankSender(here.rank, meeting, publisher, partial(_connected, rundir))
    try:
        follow(client, mesh, sender.lend if sender else lambda *_: None)
    except RuntimeError as error:
        log.warning("rank %d ends, for another is gone: %s", here.rank, error)
        return 1
    finally:
        if sender is not None:
            sender.close()
    return 0


async def _connected(rundir: RunDir, ticket: str) -> Link:
    """Connect to the head; all ranks are one member. `ticket`: empty for that in the run directory."""
    link, learner_id = await connect(ticket or f"@{rundir.learner_ticket}", rundir.path / "learner")
    log.info("joined as %s", learner_id)
    return link


def _loaded(config: Config, device: str, mesh: Mesh) -> Policy | None:
    """Load the policy that the run trains, on every rank, and have all of them compute with it once. None: that fails
    on some rank, and the first such rank has said why, so that a mistake that all ranks meet is one error.

    Raises:
        UserError: it fails on this rank, and on none before it.
    """
    policy, problem = None, None
    try:
        policy = load_trained(config, device, mesh)
    except UserError as error:
        problem = error
    if not _all_go_on(problem, mesh) or policy is None:
        return None
    if mesh.size > 1:
        try:
            check_pass(policy, config.model.path, mesh)
        except UserError as error:
            problem = error
        if not _all_go_on(problem, mesh):
            return None
    return policy


def _all_go_on(problem: UserError | None, mesh: Mesh) -> bool:
    """Whether no rank has a problem. Otherwise this rank leaves the others. Raises `problem` on the first with one."""
    failed = [rank for rank, problems in enumerate(mesh.gather(str(problem or "").encode())) if problems]
    if not failed:
        return True
    mesh.leave()
    if problem is not None and failed[0] == mesh.rank:
        raise problem
    return False


def _train(rundir: RunDir, ticket: str, here: Place | None, card_directory: str = "") -> int:
    config = rundir.read_config()
    if not ticket and not rundir.learner_ticket.is_file():
        raise UserError(f"{rundir.learner_ticket} is missing: start the head first, or give its ticket with --ticket.")
    device = pick_device("auto")
    if (card := LearnerCard(Path(card_directory)) if card_directory else None) is not None:
        log.info("waiting for the card, which the run's workers use, too")
        card.take()
    leads = here is not None and here.size > 1
    mesh = join(here, device, rundir.path / "learner") if here is not None and leads else Mesh()
    policy = _loaded(config, str(device), mesh)
    if policy is None:
        return UserError.exit_status
    client = LeadingClient(policy, config, mesh=mesh) if leads else GrpoClient(policy, config)
    others = OtherRanks()
    if here is not None and leads:
        host = here.first_host if is_loopback(here.first_host) else ""
        others = OtherRanks(min(mesh.size, PUBLISHING_RANKS_MAX) - 1, host)
        mesh.broadcast(others.meeting(here.first_host, ticket))
    url, _ = config.head.store_place
    if url and newest_checkpoint(rundir.checkpoints) is None:
        checkpoint.fetch(open_objects(url), rundir.checkpoints, config.run.max_steps)
    resumed = client.resume(rundir.checkpoints)
    log.info("%s at version %d on %s", "resumed" if resumed else "fresh", client.version, policy.device)

    info = LearnerInfo(
        f"{mesh.size} x {policy.device}" if leads else str(policy.device),
        policy.vocab_size,
        None if policy.routing is None else policy.routing.shape,
    )
    base_model = policy.base.snapshot if isinstance(policy, Adapter) else None
    publisher = Publisher(rundir.path / "learner", base_model, share_of(mesh.rank, mesh.size))
    session = HeadSession(
        partial(_connected, rundir, ticket), client.version, info, publisher, others=others, on_group=client.prepare
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: session.stop(TOLD_TO_STOP))
    try:
        reason = train(client, session, rundir.checkpoints, card)
        log.info("the run is over: %s", reason)
        if isinstance(client, LeadingClient):
            client.end()
    finally:
        session.close()
        if client.teachers is not None:
            client.teachers.close()
    return STOPPED_STATUS if reason == TOLD_TO_STOP else 0


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
        self.send_order(Order("forward_backward", [encode_group(group).SerializeToString() for group in groups]))
        return super().forward_backward(groups)

    def optim_step(self, ends_step: bool = True) -> StepStats:
        self.send_order(Order("optim_step", ends_step=ends_step))
        return super().optim_step(ends_step)

    def save_weights_for_sampler(self) -> BorrowedWeights:
        self.send_order(Order("save_weights_for_sampler"))
        return super().save_weights_for_sampler()

    def save_state(self, directory: Path, lineage: int = 0, cursor: int = 0) -> Saving:
        self.send_order(Order("save_state", [], str(directory), lineage, cursor))
        return _LeadingSaving(self, super().save_state(directory, lineage, cursor))

    def load_state(self, directory: Path) -> RunPosition:
        self.send_order(Order("load_state", [], str(directory)))
        return super().load_state(directory)

    def end(self) -> None:
        """End the other ranks, and leave the mesh."""
        self.send_order(Order("end"))
        self.mesh.leave()

    def send_order(self, order: Order) -> None:
        """Have the other ranks carry out an order."""
        self.mesh.broadcast(msgspec.msgpack.encode(order))


@dataclass(frozen=True, slots=True)
class _LeadingSaving:
    """A checkpoint under way. When the first rank waits for it, it has the other ranks wait too."""

    client: LeadingClient
    saving: Saving

    def result(self) -> None:
        self.client.send_order(Order("finish_saving"))
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
