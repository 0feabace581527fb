"""A worker's scheduler on a bench, and short names for its events and commands."""

from __future__ import annotations

from echo2.core.types import RUN_POLICY, GroupRef, Lease, PayloadId, SnapshotRef
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as ev
from echo2.worker.decide.scheduler import Swap, WorkerScheduler
from invariants import check

V1, V2, V3 = SnapshotRef(RUN_POLICY, 1, 1), SnapshotRef(RUN_POLICY, 1, 2), SnapshotRef(RUN_POLICY, 1, 3)


def announced(
    ref: SnapshotRef, base: SnapshotRef | None = None, asked_for: bool = False, progress: float = 0.0
) -> ev.SnapshotAnnounced:
    return ev.SnapshotAnnounced(PayloadId(ref, base), asked_for, progress)


def whole(ref: SnapshotRef, base: SnapshotRef | None = None) -> ev.SnapshotWhole:
    return ev.SnapshotWhole(PayloadId(ref, base))


def refused(ref: SnapshotRef, base: SnapshotRef | None = None) -> ev.SnapshotRefused:
    return ev.SnapshotRefused(PayloadId(ref, base), "torn")


def lease(lease_id: int, min_version: int = 0, exact: int | None = None) -> Lease:
    group = GroupRef(RUN_POLICY, "train", lease_id)
    return Lease(lease_id, group, 1, lease_id, 2, min_version if exact is None else exact, exact, 99.0, 99.0, 0)


def granted(leases: tuple[Lease, ...]) -> ev.LeasesGranted:
    return ev.LeasesGranted(leases, tuple(f"assignment {lease.lease_id}" for lease in leases))


def produced(lease_id: int) -> ev.GroupProduced:
    return ev.GroupProduced(lease_id, f"result {lease_id}")


class Bench:
    """A scheduler, a clock, and the names of what it asked for."""

    def __init__(self, slots: int = 4, swap: Swap = "between", deterministic: bool = False) -> None:
        self.scheduler = WorkerScheduler(slots, swap, deterministic)
        self.now = 0.0

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.scheduler.handle(event, self.now)]
        check(self.scheduler)
        assert all(command.reason for command in commands)
        return [command for command in commands if not isinstance(command, do.WakeAt)]

    def install(self, ref: SnapshotRef) -> list[do.Command]:
        """Connected and with this snapshot, from nothing."""
        self.tell(ev.Connected(), announced(ref), whole(ref))
        return self.tell(ev.SnapshotInstalled(ref))


def kinds(commands: list[do.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def fetched(commands: list[do.Command]) -> list[PayloadId]:
    return [command.payload for command in commands if isinstance(command, do.FetchSnapshot)]


def asked(commands: list[do.Command]) -> list[tuple[SnapshotRef, SnapshotRef | None]]:
    return [(command.ref, command.base) for command in commands if isinstance(command, do.AskManifest)]


def failed(commands: list[do.Command]) -> list[tuple[int, str]]:
    return [(command.lease_id, command.failure) for command in commands if isinstance(command, do.FailLease)]


def started(commands: list[do.Command]) -> list[int]:
    return [command.lease.lease_id for command in commands if isinstance(command, do.StartLease)]


def units(commands: list[do.Command]) -> list[list[int]]:
    found = [command for command in commands if isinstance(command, do.StartUnit)]
    return [[lease.lease_id for lease in command.leases] for command in found]
