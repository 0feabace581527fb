"""The leases: which worker holds which group until when. A lease is closed exactly once, with an outcome."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from echo2.control.head.lazy_heap import LazyHeap
from echo2.errors import InvariantError
from echo2.types import GroupRef, Lease, SnapshotRef

#: Reasons for which a worker fails a lease -> whether another try can help (a prompt stays too long, an engine may
#: recover).
FAILURES: dict[str, bool] = {
    "prompt_too_long": False,
    "environment_failed": False,
    "log_unfit": False,
    "engine_failed": True,
    "snapshot_gone": True,
    "revoked": True,
    "busy": True,
}
#: Tries (expired, lost or failed leases) after which a group is given up: perhaps the group itself kills its workers.
MAX_ATTEMPTS = 5
#: The longest lease, as a multiple of `lease_seconds`.
LEASE_STRETCH_MAX = 8.0
#: How long a lease lasts at least, as a multiple of the time that its worker needs for all groups that it may hold.
FULL_TIMES = 2.0


def duration(lease_seconds: float, full_seconds: float) -> float:
    """Return how long a lease of a worker of the owner lasts, which needs `full_seconds` for all that it may hold."""
    return min(LEASE_STRETCH_MAX * lease_seconds, max(lease_seconds, FULL_TIMES * full_seconds))


@dataclass(slots=True)
class LeaseTable:
    """The open leases, by id, by group and by worker. A lease past its deadline stays open until it is closed.
    `next_id`: no lease has had this id or a later one. `installed_at`: the newest weights that its worker had said it
    has when it got the lease; None if there are none.
    """

    next_id: int = 1
    _open: dict[int, tuple[str, Lease]] = field(default_factory=dict)
    _by_group: dict[GroupRef, dict[int, None]] = field(default_factory=dict)
    _by_worker: dict[str, dict[int, None]] = field(default_factory=dict)
    _samples: dict[str, int] = field(default_factory=dict)
    installed_at: dict[int, SnapshotRef | None] = field(default_factory=dict)
    deadlines: LazyHeap[int, float] = field(default_factory=LazyHeap)

    def take_id(self) -> int:
        """Return an id that no lease has had."""
        self.next_id += 1
        return self.next_id - 1

    def add(self, worker_id: str, lease: Lease, installed: SnapshotRef | None = None) -> None:
        """Add a lease held by this worker, which has these weights.

        Raises:
            InvariantError: the lease is granted already.
        """
        if lease.lease_id in self._open:
            raise InvariantError(f"lease {lease.lease_id} granted twice")
        self._open[lease.lease_id] = (worker_id, lease)
        self.installed_at[lease.lease_id] = installed
        self._by_group.setdefault(lease.group, {})[lease.lease_id] = None
        self._by_worker.setdefault(worker_id, {})[lease.lease_id] = None
        self._samples[worker_id] = self._samples.get(worker_id, 0) + lease.num_samples
        self.deadlines.set(lease.lease_id, lease.deadline)

    def extend(self, lease_id: int, deadline: float) -> None:
        """Move the deadline of an open lease."""
        worker_id, lease = self._open[lease_id]
        seconds = lease.seconds + deadline - lease.deadline
        self._open[lease_id] = worker_id, replace(lease, deadline=deadline, seconds=seconds)
        self.deadlines.set(lease_id, deadline)

    def get(self, lease_id: int) -> tuple[str, Lease] | None:
        """Return (worker, lease) of an open lease, or None."""
        return self._open.get(lease_id)

    def close(self, lease_id: int) -> tuple[str, Lease]:
        """Remove an open lease and return (worker, lease)."""
        worker_id, lease = self._open.pop(lease_id)
        self.deadlines.drop(lease_id)
        del self.installed_at[lease_id]
        self._samples[worker_id] -= lease.num_samples
        del self._by_group[lease.group][lease_id]
        if not self._by_group[lease.group]:
            del self._by_group[lease.group]
        del self._by_worker[worker_id][lease_id]
        if not self._by_worker[worker_id]:
            del self._by_worker[worker_id], self._samples[worker_id]
        return worker_id, lease

    def of_group(self, group: GroupRef) -> tuple[int, ...]:
        """Ids of the open leases on this group."""
        return tuple(self._by_group.get(group, ()))

    def of_worker(self, worker_id: str) -> tuple[int, ...]:
        """Ids of the open leases of this worker."""
        return tuple(self._by_worker.get(worker_id, ()))

    def samples_of(self, worker_id: str) -> int:
        """Samples that are leased to the worker and not delivered yet."""
        return self._samples.get(worker_id, 0)

    def open_leases(self) -> list[tuple[str, Lease]]:
        """(worker, lease) of every open lease."""
        return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)
