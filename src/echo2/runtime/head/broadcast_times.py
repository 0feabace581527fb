"""Measures how long snapshots take from publication to installation, as the head sees it.

A publication starts when the learner has its copy of the weights. `t_bcast` is ECHO-2's: until a share of 1/1.1 of the
workers that attended at publication have installed it, reload included. A worker that skipped a version for a newer one
counts from when it has the newer one; who joined later does not count, who left counts no more.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from echo2.types import SnapshotRef

#: Versions whose times are remembered.
VERSIONS_MAX = 16
#: ECHO-2's gamma: the target is provisioned so that this many times the workers are there.
GAMMA = 1.1


@dataclass(slots=True)
class Publication:
    """One version on its way. `waits_for`: workers that attended at publication and do not have it yet."""

    started_at: float
    waits_for: set[str]
    seconds: dict[str, float] = field(default_factory=dict)
    late_seconds: dict[str, float] = field(default_factory=dict)

    def t_bcast(self) -> float | None:
        """Seconds until enough workers had it; None while too few have."""
        needed = math.ceil((len(self.seconds) + len(self.waits_for)) / GAMMA)
        if needed == 0 or len(self.seconds) < needed:
            return None
        return sorted(self.seconds.values())[needed - 1]


class BroadcastTimes:
    """Seconds from publication until each worker reported the snapshot installed."""

    def __init__(self) -> None:
        self._publications: dict[SnapshotRef, Publication] = {}
        self._delta_ratio = 1.0
        self.snapshot_bytes = 0  # of the newest, whole

    def published(self, ref: SnapshotRef, started_at: float, attending: Collection[str]) -> None:
        """A version that is published again (whole, after its delta proved wrong) keeps its time."""
        self._publications.setdefault(ref, Publication(started_at, set(attending)))
        while len(self._publications) > VERSIONS_MAX:
            del self._publications[next(iter(self._publications))]

    def sized(self, sent_bytes: int, whole_bytes: int) -> None:
        """What the newest publication takes to send, and what its content takes."""
        self._delta_ratio = sent_bytes / max(1, whole_bytes)
        self.snapshot_bytes = whole_bytes

    def installed(self, worker_id: str, ref: SnapshotRef, now: float) -> None:
        for other, publication in self._publications.items():
            if other.history != ref.history or other.version > ref.version:
                continue
            if worker_id in publication.waits_for:
                publication.waits_for.discard(worker_id)
                publication.seconds[worker_id] = now - publication.started_at
            elif other == ref and worker_id not in publication.seconds:
                publication.late_seconds.setdefault(worker_id, now - publication.started_at)

    def gone(self, worker_id: str) -> None:
        for publication in self._publications.values():
            publication.waits_for.discard(worker_id)

    def metrics(self) -> dict[str, Any]:
        """Quantiles over the workers of the newest version that any worker has; T_bcast of the newest that enough
        have."""
        row: dict[str, Any] = {"broadcast/t_bcast": None, "broadcast/delta_ratio": self._delta_ratio}
        for publication in self._publications.values():
            seconds = sorted([*publication.seconds.values(), *publication.late_seconds.values()])
            if seconds:
                row["broadcast/latency_p50"] = seconds[len(seconds) // 2]
                row["broadcast/latency_p95"] = seconds[min(len(seconds) - 1, int(len(seconds) * 0.95))]
            t_bcast = publication.t_bcast()
            row["broadcast/t_bcast"] = row["broadcast/t_bcast"] if t_bcast is None else t_bcast
        return row
