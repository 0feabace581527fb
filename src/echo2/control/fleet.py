"""The workers as the planner sees them: who attends, what each has installed, when each counts as lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.control.deadlines import Deadlines
from echo2.types import SnapshotRef


@dataclass(slots=True)
class Worker:
    """One attending worker. `capacity_groups`: groups it samples together. `detached`: its connection is closed, it
    may return.
    """

    worker_id: str
    capacity_groups: int
    price_usd_per_hour: float
    scores: bool
    installed: SnapshotRef | None
    joined_at: float
    detached: bool = False
    detached_at: float = 0.0
    failures_in_a_row: int = 0
    idle_since: float | None = None


#: A worker that fails its leases rests before it gets more: this long, doubled at each failure in a row, up to the
#: last.
REST_SECONDS = (1.0, 60.0)


@dataclass(slots=True)
class Fleet:
    """Attending workers by id, in order of joining, with one silence deadline each."""

    lost_after_seconds: float
    _workers: dict[str, Worker] = field(default_factory=dict)
    _silence: Deadlines[str] = field(default_factory=Deadlines)
    _resting: Deadlines[str] = field(default_factory=Deadlines)

    def join(self, worker: Worker, now: float) -> None:
        self._workers[worker.worker_id] = worker
        self.heard(worker.worker_id, now)

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def heard(self, worker_id: str, now: float) -> None:
        self._silence.set(worker_id, now + self.lost_after_seconds)

    def detach(self, worker: Worker, now: float, grace_seconds: float) -> None:
        """Its connection closed: it counts as lost after the grace period unless it comes back."""
        worker.detached, worker.detached_at = True, now
        self._silence.set(worker.worker_id, now + grace_seconds)

    def rest(self, worker: Worker, now: float) -> None:
        """It failed a lease: others, where there are any, get the next ones. The failures of one batch count once."""
        others = any(other is not worker and not self.is_resting(other) for other in self.attending())
        if others and not self.is_resting(worker):
            seconds = min(REST_SECONDS[1], REST_SECONDS[0] * 2.0**worker.failures_in_a_row)
            worker.failures_in_a_row += 1
            self._resting.set(worker.worker_id, now + seconds)

    def is_resting(self, worker: Worker) -> bool:
        return self._resting.get(worker.worker_id) is not None

    def end_rests(self, now: float) -> None:
        self._resting.pop_due(now)

    def remove(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        self._silence.drop(worker_id)

    def pop_silent(self, now: float) -> list[str]:
        return self._silence.pop_due(now)

    def earliest_deadline(self) -> float | None:
        dues = [at for at in (self._silence.earliest(), self._resting.earliest()) if at is not None]
        return min(dues, default=None)

    def silence_deadline(self, worker_id: str) -> float | None:
        return self._silence.get(worker_id)

    def attending(self) -> list[Worker]:
        """Workers that can be sent something, in order of joining."""
        return [worker for worker in self._workers.values() if not worker.detached]

    def all(self) -> list[Worker]:
        return list(self._workers.values())
