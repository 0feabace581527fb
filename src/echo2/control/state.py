"""What the planner knows: the tables, the run's position, and the commands of the event in hand. Decisions are beside
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control import commands as do
from echo2.control.evaluation import Evaluation
from echo2.control.fleet import Fleet
from echo2.control.groups import GroupBook
from echo2.control.leases import LeaseTable
from echo2.types import SnapshotRef


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """What the planner needs to know of the configuration; names as there."""

    groups_per_step: int
    group_size: int
    max_steps: int
    max_staleness: int = 1
    publish_every: int = 1
    deterministic: bool = False
    groups_per_batch: int = 8
    lease_seconds: float = 120.0
    lost_after_seconds: float = 10.0
    grace_seconds: float = 2.0
    max_failures: int = 8
    seed: int = 0
    reward_functions: tuple[str, ...] = ()
    eval_size: int = 0
    eval_every: int = 0
    keep_snapshots: int = 2


class PlannerState:
    """All of it is plain data. Only the functions of this package change it, and only while an event is handled.

    published   versions of the surviving history that a worker may have installed
    retained    those of them that the origin still stores
    wanted_step the step whose groups the learner waits for; `step_ended` once it has them all
    over        why the run ended, once it has
    highest_version  reached in any lineage: tokens of a later one are made up
    """

    def __init__(self, options: PlannerOptions) -> None:
        self.options = options
        self.version = 0
        self.highest_version = 0
        self.lineage = 1
        self.checkpoint_version = -1
        self.oldest_kept = 0
        self.groups = GroupBook(options.groups_per_batch if options.deterministic else 1)
        self.leases = LeaseTable()
        self.fleet = Fleet(options.lost_after_seconds)
        self.evaluation = Evaluation(options.eval_size, options.eval_every, options.max_steps)
        self.published: dict[int, SnapshotRef] = {}
        self.retained: dict[int, SnapshotRef] = {}
        self.wanted_step: int | None = None
        self.wanted_since: float | None = None
        self.step_ended = False
        self.learner_joined = False
        self.over: str | None = None
        self.failures_in_a_row = 0
        self.num_events = 0
        self.out: list[do.Command] = []

    def emit(self, kind: type[do.Command], reason: str, **fields: object) -> None:
        """Add a command, caused by the event in hand."""
        self.out.append(kind(cause=self.num_events, reason=reason, **fields))
