"""Who holds which group until when. A lease is granted, and closed exactly once, with an outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.control.deadlines import Deadlines
from echo2.errors import InvariantError
from echo2.types import GroupRef, Lease

#: Why a worker may fail a lease, and whether another try can help (a prompt stays too long, an engine may recover).
FAILURES: dict[str, bool] = {
    "prompt_too_long": False,
    "environment_failed": False,
    "log_unfit": False,
    "engine_failed": True,
    "snapshot_gone": True,
    "revoked": True,
    "busy": True,
}
#: Tries (expired, lost or failed leases) after which a group is given up, for each of its portions: it may be what
#: kills its workers.
MAX_ATTEMPTS = 5


@dataclass(slots=True)
class LeaseTable:
    """The open leases, by id, by group and by worker."""

    next_lease_id: int = 1
    _open: dict[int, tuple[str, Lease]] = field(default_factory=dict)
    _by_group: dict[GroupRef, dict[int, None]] = field(default_factory=dict)
    _by_worker: dict[str, dict[int, None]] = field(default_factory=dict)
    _samples: dict[str, int] = field(default_factory=dict)
    _deadlines: Deadlines[int] = field(default_factory=Deadlines)

    def new_id(self) -> int:
        lease_id = self.next_lease_id
        self.next_lease_id += 1
        return lease_id

    def add(self, worker_id: str, lease: Lease) -> None:
        if lease.lease_id in self._open:
            raise InvariantError(f"lease {lease.lease_id} granted twice")
        self._open[lease.lease_id] = (worker_id, lease)
        self._by_group.setdefault(lease.group, {})[lease.lease_id] = None
        self._by_worker.setdefault(worker_id, {})[lease.lease_id] = None
        self._samples[worker_id] = self._samples.get(worker_id, 0) + lease.num_samples
        self._deadlines.set(lease.lease_id, lease.deadline)

    def get(self, lease_id: int) -> tuple[str, Lease] | None:
        """(worker, lease) while it is open."""
        return self._open.get(lease_id)

    def close(self, lease_id: int) -> tuple[str, Lease]:
        """Take an open lease out and return (worker, lease)."""
        worker_id, lease = self._open.pop(lease_id)
        self._deadlines.drop(lease_id)
        self._samples[worker_id] -= lease.num_samples
        del self._by_group[lease.group][lease_id]
        if not self._by_group[lease.group]:
            del self._by_group[lease.group]
        del self._by_worker[worker_id][lease_id]
        if not self._by_worker[worker_id]:
            del self._by_worker[worker_id], self._samples[worker_id]
        return worker_id, lease

    def of_group(self, group: GroupRef) -> tuple[int, ...]:
        return tuple(self._by_group.get(group, ()))

    def of_worker(self, worker_id: str) -> tuple[int, ...]:
        return tuple(self._by_worker.get(worker_id, ()))

    def count_of(self, worker_id: str) -> int:
        return len(self._by_worker.get(worker_id, ()))

    def samples_of(self, worker_id: str) -> int:
        """Samples that the worker has been asked for and not delivered yet."""
        return self._samples.get(worker_id, 0)

    def pop_expired(self, now: float) -> list[int]:
        """Ids of leases whose deadline has passed; they stay open until closed."""
        return self._deadlines.pop_due(now)

    def earliest_deadline(self) -> float | None:
        return self._deadlines.earliest()

    def open_leases(self) -> list[tuple[str, Lease]]:
        return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def check_invariants(self) -> None:
        by_group = sum(len(ids) for ids in self._by_group.values())
        by_worker = sum(len(ids) for ids in self._by_worker.values())
        if not len(self._open) == by_group == by_worker:
            raise InvariantError(f"leases: {len(self._open)} open, {by_group} by group, {by_worker} by worker")
        for lease_id, (worker_id, lease) in self._open.items():
            if lease_id not in self._by_group[lease.group] or lease_id not in self._by_worker[worker_id]:
                raise InvariantError(f"lease {lease_id} is not indexed under {lease.group} and {worker_id}")
