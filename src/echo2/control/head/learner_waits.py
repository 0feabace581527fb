"""Explains why the learner waited for a step: what the group that arrived last was doing meanwhile.

That group is the step's critical path: if any other group had arrived sooner, the learner would have waited as long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from echo2.control.head.groups import PlannedGroup

#: What the last group waited for, with a description for the operator.
CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "replaced": "groups that were retired and replaced",
        "lost": "leases that brought nothing",
        "lease": "a free worker with the weights",
        "sampling": "workers that sample",
        "rewards": "your reward function",
        "held": "checks of how tokens were drawn, or room on the disk",
    }
)


@dataclass(frozen=True, slots=True)
class LearnerWait:
    """Seconds by cause from when the learner wanted the groups of `step` until it had the last one, which `worker_id`
    sampled. A learner that starts with the first groups was busy for part of that time.
    """

    step: int
    worker_id: str
    seconds: Mapping[str, float]


def learner_wait(step: int, records: Iterable[PlannedGroup], since: float, now: float) -> LearnerWait:
    """Return the wait for a step that the learner wanted at `since` and whose last group is fed at `now`.

    `records`: all groups of the step. A group is issued when it is leased, so the time before that is a wait for a
    worker, unless another group of the step was in progress and was retired.
    """
    records = list(records)
    last = max((one for one in records if one.state != "retired"), key=lambda record: (record.ready_at, record.number))
    retired = [one for one in records if one.state == "retired"]
    replaced_at = max((max(one.leased_at, one.delivered_at, one.ready_at) for one in retired), default=-math.inf)
    before_lease = "lost" if last.attempts else "lease"
    causes = ("replaced", before_lease, "sampling", "rewards", "held")
    came = (min(replaced_at, last.issued_at), last.leased_at, last.delivered_at, last.ready_at, now)
    marks = itertools.accumulate((min(at, now) for at in came), max, initial=since)
    found = {cause: end - start for cause, (start, end) in zip(causes, itertools.pairwise(marks), strict=True)}
    return LearnerWait(step, last.worker_id, dict.fromkeys(CAUSES, 0.0) | found)


def main_cause(waits: Iterable[LearnerWait]) -> str | None:
    """Return the cause of most of the waiting, or None if the learner did not wait."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    for wait in waits:
        for cause, value in wait.seconds.items():
            seconds[cause] += value
    most = max(seconds, key=seconds.__getitem__)
    return most if seconds[most] > 0 else None
