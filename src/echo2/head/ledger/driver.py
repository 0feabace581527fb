"""Passes events to the planner, records its commands in the ledger, then has the commands carried out.

    events -> planner -> commands -> (one transaction) ledger -> (one by one) effects

Events that are pending at the same moment share one transaction. Durable state is on disk before any message leaves
the process. A kill loses either the whole transaction, or some of the last effects; a restarted head resumes from the
ledger, and workers and learner repeat the requests that got no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeVar

from msgspec import convert

from echo2.core.errors import InvariantError, UserError
from echo2.core.types import Attachment, GroupRef, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from echo2.head.ledger.ledger import Ledger, Left
from echo2.head.strangers.decide.trust import DrawnCheck, TicketRest, Trust

_T = TypeVar("_T")


class Effects(Protocol):
    """Callbacks by which the driver's owner executes the planner's commands. Neither method may call the driver."""

    def decided(self, event: ev.Event, now: float, commands: Sequence[do.Command]) -> None:
        """Observe the planner's answer to an event; nothing is recorded yet."""

    def carry_out(self, command: do.Command, now: float) -> None:
        """Execute a command's effects outside the ledger. The ledger already holds its durable part."""


@dataclass(frozen=True, slots=True)
class Stored:
    """State that outlives a head besides its ledger: snapshots, evaluated versions, rented machines."""

    published: tuple[SnapshotRef, ...] = ()
    evaluated: tuple[int, ...] = ()
    machines: tuple[ev.RecoveredMachine, ...] = ()


class Driver:
    """Takes the run over from an earlier head, if there was one: tells the planner what the ledger and `stored` hold,
    and has its first commands carried out.
    """

    def __init__(self, planner: Planner, ledger: Ledger, effects: Effects, stored: Stored, now: float) -> None:
        """Raises: UserError, the ledger's run can't continue with the planner's options; and as `handle_all`."""
        self.planner, self._ledger, self._effects = planner, ledger, effects
        state = ledger.recover()
        _check_options(state.version, ledger.sizes(), planner.options)
        self.handle(_head_started(ledger, state, stored), now)

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """As `handle_all`, for one event. Return the planner's commands."""
        return self.handle_all((event,), now)[0]

    def handle_all(self, events: Sequence[ev.Event], now: float) -> list[list[do.Command]]:
        """Pass the events to the planner one by one, record all its commands in one transaction, then carry them out in
        order. Return the commands of each event.

        Raises:
            UserError: the ledger can't be written; nothing was recorded or carried out.
            InvariantError: a command contradicts the ledger; nothing was recorded or carried out.
        """
        answers = []
        for event in events:
            answers.append(self.planner.handle(event, now))
            self._effects.decided(event, now, answers[-1])
        commands = [command for answer in answers for command in answer]
        recorded = [command for command in commands if isinstance(command, do.Durable)]
        if recorded:
            with self._ledger.together():
                for durable in recorded:
                    self._record(durable, now)
        for command in commands:
            self._effects.carry_out(command, now)
        return answers

    def _record(self, command: do.Durable, now: float) -> None:
        """Record a command in the ledger. Only the used lease ids of evaluations are recorded."""
        ledger = self._ledger
        match command:
            case do.IssueGroup():
                ledger.issue(command.number, command.step, command.number, now)
            case do.GrantLeases():
                for lease in command.leases:
                    if lease.group.kind == "train":
                        what = (lease.lease_id, lease.group.number, command.worker_id, now, lease.deadline)
                        ledger.grant(*what, lease.num_samples)
                    else:
                        ledger.use_lease_ids(lease.lease_id)
            case do.CloseLease() if command.group.kind == "train":
                ledger.close_lease(command.lease_id, command.outcome, now)
            case do.AcceptDelivery() if command.group.kind == "train":
                ledger.deliver(
                    number=command.group.number,
                    rollouts=_data(command.group, command.rollouts),
                    worker_id=command.worker_id,
                    oldest_version=command.oldest_version,
                    newest_version=command.newest_version,
                    num_tokens=command.num_tokens,
                    seconds=command.seconds,
                    now=now,
                    lost=command.lost,
                )
            case do.RefuseDelivery() if command.group is None or command.group.kind == "train":
                number = command.group.number if command.group is not None else 0
                cost = (command.num_tokens, command.seconds)
                ledger.refuse(command.lease_id, number, command.worker_id, command.refusal, *cost, now)
            case do.KeepScores() if command.group.kind == "train":
                scores = _data(command.group, command.scores)
                ledger.score(command.group.number, scores, command.is_flat, now, _left(command))
            case do.TopUpGroup():
                ledger.top_up(command.number, command.num_kept, command.num_top_ups, _left(command))
            case do.RetireGroup():
                ledger.retire(command.number, command.why, now)
            case do.RecordStep():
                ledger.train(command.step, command.lineage, command.numbers, now)
            case do.RecordLearner():
                ledger.learner_joined(command.version, command.lineage, now)
            case do.RecordCheckpoint():
                ledger.checkpoint(command.version, command.oldest_kept)
            case _:
                _record_of_strangers(ledger, command, now)


def _record_of_strangers(ledger: Ledger, command: do.Durable, now: float) -> None:
    match command:
        case do.RecordTrust():
            ledger.keep("trust", command.ticket, asdict(command.trust))
        case do.RecordCheck():
            ledger.keep("check", command.check.number, asdict(command.check))
        case do.EndCheck():
            ledger.forget("check", command.number)
        case do.RecordRest():
            ledger.keep("rest", command.rest.ticket, asdict(command.rest))
        case do.ExpelWorker():
            gone = ev.RecoveredExpulsion(command.worker_id, now + command.seconds, command.num_expelled, command.reason)
            ledger.keep("expulsion", command.worker_id, asdict(gone))


def _data(group: GroupRef, attachment: Attachment | None) -> bytes:
    if attachment is None:
        raise InvariantError(f"{group} came without what is to be stored of it")
    return attachment.data


def _left(command: do.KeepScores | do.TopUpGroup) -> Left | None:
    if (attachment := command.rollouts) is None:
        return None
    return Left(attachment.data, 0 if attachment.group is None else attachment.group.num_tokens, command.lost)


def _check_options(version: int, sizes: Mapping[int, int], options: PlannerOptions) -> None:
    """Raises UserError if the run in the ledger can't continue with these options."""
    if version > options.max_steps:
        raise UserError(
            f"run.max_steps = {options.max_steps}, but {version} steps are trained already. "
            f"Set it to {version} or more."
        )
    for number, size in sizes.items():
        if size != options.group_size:
            raise UserError(
                f"sampling.group_size = {options.group_size}, but group {number} is under way with "
                f"{size} rollouts. Resume with the size that the run had."
            )


def _head_started(ledger: Ledger, state: ev.HeadStarted, stored: Stored) -> ev.HeadStarted:
    """Return the event that tells a planner its state after a restart."""
    return replace(
        state,
        lineage=max(1, state.lineage),
        published=tuple(sorted(stored.published)),
        # A kill during a fall-back may leave evaluations of later versions, which no longer count.
        evaluated=tuple(sorted(version for version in stored.evaluated if version <= state.version)),
        machines=stored.machines,
        trust=tuple(convert(ledger.kept("trust"), dict[str, Trust]).items()),
        checks=tuple(sorted(_kept(ledger, "check", DrawnCheck), key=lambda check: check.number)),
        rests=tuple(_kept(ledger, "rest", TicketRest)),
        expulsions=tuple(_kept(ledger, "expulsion", ev.RecoveredExpulsion)),
    )


def _kept(ledger: Ledger, kind: str, of: type[_T]) -> list[_T]:
    return convert(list(ledger.kept(kind).values()), list[of])  # type: ignore[valid-type]
