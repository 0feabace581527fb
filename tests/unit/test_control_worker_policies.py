"""A worker that is moved between policies: whose weights sample which leases, and when weights of another go in."""

from __future__ import annotations

import pytest

from echo2.control.worker import commands as do
from echo2.control.worker import events as ev
from echo2.control.worker.scheduler import WorkerScheduler
from echo2.types import GroupRef, Lease, PayloadId, SnapshotRef
from invariants import check

A1, A2, B1 = SnapshotRef("a", 1, 1), SnapshotRef("a", 1, 2), SnapshotRef("b", 1, 1)


def lease(lease_id: int, policy: str, exact: int | None = None) -> Lease:
    least = 0 if exact is None else exact
    return Lease(lease_id, GroupRef(policy, "train", lease_id), 1, lease_id, 2, least, exact, 99.0, 99.0, 0)


class Bench:
    """A scheduler of four slots with A1 installed, and what it asked for."""

    def __init__(self, swap_during: bool = False) -> None:
        self.scheduler = WorkerScheduler(4, swap_during, deterministic=False)
        self.tell(ev.Connected())
        self.bring(A1)
        self.tell(ev.SnapshotInstalled(A1))

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.scheduler.handle(event, 0.0)]
        check(self.scheduler)
        return commands

    def bring(self, ref: SnapshotRef) -> list[do.Command]:
        return self.tell(ev.SnapshotAnnounced(PayloadId(ref), False, 0.0), ev.SnapshotWhole(PayloadId(ref)))


def granted(leases: tuple[Lease, ...]) -> ev.LeasesGranted:
    return ev.LeasesGranted(leases, (None,) * len(leases))


def started(commands: list[do.Command]) -> list[int]:
    return [one.lease.lease_id for one in commands if isinstance(one, do.StartLease)]


@pytest.mark.parametrize("exact", [None, 1])
def test_a_lease_waits_for_the_weights_of_its_own_policy(exact: int | None) -> None:
    """Also where the version that is installed is the one demanded, of the other policy."""
    bench = Bench()
    assert started(bench.tell(granted((lease(7, "b", exact),)))) == []
    installs = [one for one in bench.bring(B1) if isinstance(one, do.InstallSnapshot)]
    assert [one.payload.ref for one in installs] == [B1]
    assert started(bench.tell(ev.SnapshotInstalled(B1))) == [7]


def test_weights_of_another_policy_go_in_when_nothing_is_sampled_even_where_swaps_go_on_meanwhile() -> None:
    bench = Bench(swap_during=True)
    bench.tell(granted((lease(1, "a"),)))
    assert not [one for one in bench.bring(B1) if isinstance(one, do.InstallSnapshot)]
    ended = bench.tell(ev.GroupProduced(1, None))
    assert [one.payload.ref for one in ended if isinstance(one, do.InstallSnapshot)] == [B1]


def test_newer_weights_of_the_same_policy_go_in_while_leases_are_sampled() -> None:
    bench = Bench(swap_during=True)
    bench.tell(granted((lease(1, "a"),)))
    assert [one.payload.ref for one in bench.bring(A2) if isinstance(one, do.InstallSnapshot)] == [A2]


def test_what_waits_for_the_policy_that_a_worker_leaves_is_failed() -> None:
    bench = Bench()
    bench.tell(granted((lease(1, "a"), lease(2, "a"), lease(3, "a"), lease(4, "b"))))
    failed = [one for one in bench.bring(B1) if isinstance(one, do.FailLease)]
    assert [(one.lease_id, one.failure) for one in failed] == [(3, "snapshot_gone")], "1 and 2 are being sampled"


def test_a_delta_over_another_policys_weights_is_not_asked_for() -> None:
    bench = Bench()
    told = bench.tell(ev.SnapshotAnnounced(PayloadId(B1, SnapshotRef("b", 1, 0)), False, 0.0))
    asked = [(one.ref, one.base) for one in told if isinstance(one, do.AskManifest)]
    assert asked == [(B1, None)]


def test_a_version_that_is_gone_fails_leases_of_its_own_policy_alone() -> None:
    bench = Bench()
    bench.tell(granted((lease(1, "a"),)))
    bench.tell(granted((lease(2, "b", exact=5), lease(3, "a", exact=5))))
    failed = [one for one in bench.tell(ev.SnapshotUnknown(SnapshotRef("a", 1, 5))) if isinstance(one, do.FailLease)]
    assert [one.lease_id for one in failed] == [3]
