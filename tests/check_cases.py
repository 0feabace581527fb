"""A planner that checks strangers, and what its workers and machines do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from planner_cases import OPTIONS, Desk, of

FIRST = SnapshotRef(RUN_POLICY, 1, 0)
CHECKED = replace(OPTIONS, groups_per_step=400, groups_per_batch=4, heartbeat_seconds=1e6, check_seed=7)


def joins(desk: Desk, worker_id: str, ticket: str = "", draws: bool = True) -> list[do.Command]:
    return desk.tell(ev.WorkerJoined(worker_id, 16, 0.5, FIRST, ticket=ticket, draws=draws))


def desk_with(*strangers: str, own: bool = True, **options: Any) -> Desk:
    """A machine of the owner that can check, and workers that are strangers of a ticket each."""
    desk = Desk(replace(CHECKED, **options))
    desk.tell(ev.LearnerJoined(0), ev.GroupsWanted(0))
    if own:
        joins(desk, "own")
    for name in strangers:
        joins(desk, name, f"ticket-{name}")
    desk.publish(0)
    return desk


def brings(desk: Desk, worker_id: str) -> list[do.Command]:
    """The worker delivers the first lease that it holds; its group is scored."""
    return desk.deliver(desk.planner.leases.of_worker(worker_id)[0])


def answers(desk: Desk, asked: do.CheckGroup, fault: str = "", missed: str = "") -> list[do.Command]:
    return desk.tell(ev.GroupChecked(asked.worker_id, asked.group, 0 if missed else 50, fault, missed))


def honest(desk: Desk, worker_id: str, num_groups: int, fault: str = "") -> int:
    """So many groups, each check of which is answered at once; how many there were."""
    num_checks = 0
    for _ in range(num_groups):
        for asked in of(do.CheckGroup, brings(desk, worker_id)):
            num_checks += 1
            answers(desk, asked, fault)
    return num_checks
