"""A planner at a desk: a clock, and shorthand for its events."""

from __future__ import annotations

from typing import TypeVar

from echo2.core.types import RUN_POLICY, Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions
from invariants import check

Kind = TypeVar("Kind", bound=do.Command)
OPTIONS = PlannerOptions(groups_per_step=2, group_size=4, max_steps=10, groups_per_batch=2, max_failures=3)


class Desk:
    """A planner with a clock and shorthand for its events."""

    def __init__(
        self, options: PlannerOptions = OPTIONS, started: ev.HeadStarted | None = None, now: float = 0.0
    ) -> None:
        self.planner, self.now, self.leases = Planner(options), now, dict[int, tuple[str, Lease]]()
        self.group_size = options.group_size
        self.tell(started or ev.HeadStarted())

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.planner.handle(event, self.now)]
        check(self.planner)
        assert all(command.reason and command.cause for command in commands)
        for grant in of(do.GrantLeases, commands):
            self.leases.update((lease.lease_id, (grant.worker_id, lease)) for lease in grant.leases)
        return commands

    def publish(self, version: int, lineage: int = 1) -> list[do.Command]:
        return self.tell(ev.SnapshotPublished(SnapshotRef(RUN_POLICY, lineage, version), 100))

    def join(self, worker_id: str = "a", version: int | None = 0, held: tuple[int, ...] = ()) -> list[do.Command]:
        installed = None if version is None else SnapshotRef(RUN_POLICY, 1, version)
        return self.tell(ev.WorkerJoined(worker_id, 2 * self.group_size, 0.5, installed, held))

    def deliver(
        self, lease_id: int, version: int = 0, scored: bool = True, is_flat: bool = False, **fields: object
    ) -> list[do.Command]:
        """A result; if it is accepted, its group is scored at once unless `scored` is False."""
        worker_id, lease = self.leases[lease_id]
        values = {"worker_id": worker_id, "group": lease.group, "num_samples": lease.num_samples, **fields}
        values = {"oldest_version": version, "newest_version": version, **values}
        commands = self.tell(ev.GroupDelivered(lease_id=lease_id, num_tokens=9, **values))  # type: ignore[arg-type]
        asked = of(do.ScoreGroup, commands) if scored else []
        return commands + self.tell(*(ev.GroupScored(command.group, is_flat) for command in asked))

    def open(self) -> list[int]:
        return [lease.lease_id for _, lease in self.planner.leases.open_leases()]

    def train(self, step: int, mismatches: tuple[ev.WorkerMismatch, ...] = ()) -> list[do.Command]:
        """The learner takes the step, the workers deliver whatever is open of it, the learner reports it."""
        fed = of(do.FeedGroup, self.tell(ev.GroupsWanted(step)))
        for lease_id in self.open():
            held = self.planner.leases.get(lease_id)
            if held is not None and held[1].step == step:
                fed += of(do.FeedGroup, self.deliver(lease_id, self.leases[lease_id][1].min_version))
        return self.tell(ev.StepTrained(step, tuple(command.number for command in fed), 0.0, mismatches))


def of(kind: type[Kind], commands: list[do.Command]) -> list[Kind]:
    return [command for command in commands if isinstance(command, kind)]


def running(options: PlannerOptions = OPTIONS) -> Desk:
    """The learner waits for step 0, version 0 is published, worker `a` holds leases 1, 2 of it and 3, 4 of step 1."""
    desk = Desk(options)
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    desk.publish(0)
    desk.join()
    return desk
