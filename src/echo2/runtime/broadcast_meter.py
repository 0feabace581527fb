"""How long snapshots take from publication to the workers, as the head sees it (installation included)."""

from __future__ import annotations

from typing import Any

from echo2.types import SnapshotRef

#: Versions whose times are remembered.
VERSIONS_MAX = 16


class BroadcastMeter:
    """Seconds from publication until each worker reported the snapshot installed."""

    def __init__(self) -> None:
        self._published: dict[SnapshotRef, float] = {}
        self._seconds: dict[SnapshotRef, dict[str, float]] = {}

    def published(self, ref: SnapshotRef, now: float) -> None:
        self._published[ref] = now
        while len(self._published) > VERSIONS_MAX:
            oldest = next(iter(self._published))
            del self._published[oldest]
            self._seconds.pop(oldest, None)

    def installed(self, worker_id: str, ref: SnapshotRef, now: float) -> None:
        if ref in self._published:
            self._seconds.setdefault(ref, {}).setdefault(worker_id, now - self._published[ref])

    def metrics(self) -> dict[str, Any]:
        """Quantiles over the workers of the newest version that any worker has."""
        newest = max((ref for ref in self._seconds), default=None)
        if newest is None:
            return {}
        seconds = sorted(self._seconds[newest].values())
        return {
            "broadcast/latency_p50": seconds[len(seconds) // 2],
            "broadcast/latency_p95": seconds[min(len(seconds) - 1, int(len(seconds) * 0.95))],
        }
