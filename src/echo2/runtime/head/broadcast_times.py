"""Measures how long snapshots take from publication to installation, as the head sees it.

A publication starts when the learner has its copy of the weights. `t_bcast` is ECHO-2's: the time until 1/1.1 of the
workers that attended at publication have installed the snapshot, reload included. A worker that skips a version counts
when it has installed a newer one. Workers that joined after the publication, or left, do not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from echo2.types import SnapshotRef

#: Number of versions whose times are remembered.
VERSIONS_MAX = 16
#: ECHO-2's gamma: the fleet is provisioned with this many times the workers it needs.
GAMMA = 1.1


@dataclass(slots=True)
class Publication:
    """The broadcast of one version. `waits_for`: workers that attended at publication and have not installed it yet.
    `seconds`: times of those that have; `late_seconds`: times of workers that joined later."""

    started_at: float
    waits_for: set[str]
    seconds: dict[str, float] = field(default_factory=dict)
    late_seconds: dict[str, float] = field(default_factory=dict)

    def t_bcast(self) -> float | None:
        """Return the seconds until enough workers had installed the version; None while too few have."""
        needed = math.ceil((len(self.seconds) + len(self.waits_for)) / GAMMA)
        if needed == 0 or len(self.seconds) < needed:
            return None
        return sorted(self.seconds.values())[needed - 1]


class BroadcastTimes:
    """Seconds from publication until each worker reported the snapshot installed."""

    def __init__(self) -> None:
        self._publications: dict[SnapshotRef, Publication] = {}
        self._delta_ratio = 1.0
        self.snapshot_bytes = 0  # size of the newest snapshot's whole content

    def published(self, ref: SnapshotRef, started_at: float, attending: Collection[str]) -> None:
        """Start timing a version. One that is published again (whole, after its delta proved wrong) keeps its start."""
        self._publications.setdefault(ref, Publication(started_at, set(attending)))
        while len(self._publications) > VERSIONS_MAX:
            del self._publications[next(iter(self._publications))]

    def sized(self, sent_bytes: int, whole_bytes: int) -> None:
        """Record the bytes of the newest publication's payload, and of its whole content."""
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
        """Return quantiles of the latency over workers, for the newest version that any worker has installed, and
        T_bcast of the newest version that enough workers have installed."""
        row: dict[str, Any] = {"broadcast/t_bcast": None, "broadcast/delta_ratio": self._delta_ratio}
        for publication in self._publications.values():
            seconds = sorted([*publication.seconds.values(), *publication.late_seconds.values()])
            if seconds:
                row["broadcast/latency_p50"] = seconds[len(seconds) // 2]
                row["broadcast/latency_p95"] = seconds[min(len(seconds) - 1, int(len(seconds) * 0.95))]
            t_bcast = publication.t_bcast()
            row["broadcast/t_bcast"] = row["broadcast/t_bcast"] if t_bcast is None else t_bcast
        return row
