"""A worker's relay by example: batches, swaps, snapshots that supersede, break or vanish, results that are not
answered.
"""

from __future__ import annotations

import random

import pytest

from echo2.control import relay_commands as do
from echo2.control import relay_events as ev
from echo2.control.relay import MAX_FETCHES, REDELIVER_SECONDS, REFUSED_SECONDS, RETRY_SECONDS, Relay
from echo2.errors import InvariantError
from echo2.types import GroupRef, Lease, SnapshotRef

V1, V2, V3 = SnapshotRef(1, 1), SnapshotRef(1, 2), SnapshotRef(1, 3)
CHUNKS = (b"a", b"b")


def lease(lease_id: int, min_version: int = 0, exact: int | None = None) -> Lease:
    group = GroupRef("train", lease_id)
    return Lease(lease_id, group, 1, lease_id, 2, min_version if exact is None else exact, exact, 99.0, 99.0, 0)


class Bench:
    """A relay, a clock, and the names of what it asked for."""

    def __init__(self, groups_per_batch: int = 2, swap_during: bool = False) -> None:
        self.relay = Relay(groups_per_batch, swap_during)
        self.now = 0.0

    def tell(self, *events: ev.Event) -> list[do.Command]:
        commands = [command for event in events for command in self.relay.handle(event, self.now)]
        self.relay.check_invariants()
        assert all(command.reason for command in commands)
        return [command for command in commands if not isinstance(command, do.WakeAt)]

    def install(self, ref: SnapshotRef) -> list[do.Command]:
        """Connected and with this snapshot, from nothing."""
        self.tell(ev.Connected(), ev.SnapshotAnnounced(ref, CHUNKS))
        self.tell(*(ev.ChunkStored(chunk) for chunk in CHUNKS))
        return self.tell(ev.SnapshotInstalled(ref))


def kinds(commands: list[do.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def started(commands: list[do.Command]) -> list[tuple[int, ...]]:
    return [command.lease_ids for command in commands if isinstance(command, do.StartBatch)]


def test_a_snapshot_is_fetched_installed_and_reported() -> None:
    bench = Bench()
    bench.tell(ev.Connected())
    fetch = bench.tell(ev.SnapshotAnnounced(V1, CHUNKS))
    assert [command.chunks for command in fetch if isinstance(command, do.FetchChunks)] == [CHUNKS]
    assert bench.tell(ev.ChunkStored(b"a")) == []
    assert kinds(bench.tell(ev.ChunkStored(b"b"))) == ["InstallSnapshot"]
    assert kinds(bench.tell(ev.SnapshotInstalled(V1))) == ["Report"]


def test_nothing_is_sampled_before_a_snapshot_is_installed() -> None:
    bench = Bench()
    bench.tell(ev.Connected())
    assert started(bench.tell(ev.LeasesGranted((lease(1),)))) == []
    assert started(bench.install(V1)) == [(1,)]


def test_loose_leases_are_sampled_in_order_as_many_as_fit_a_batch() -> None:
    bench = Bench(groups_per_batch=2)
    bench.install(V1)
    assert started(bench.tell(ev.LeasesGranted((lease(1), lease(2), lease(3))))) == [(1, 2)]
    bench.tell(ev.GroupProduced(1), ev.GroupProduced(2))
    assert started(bench.tell(ev.BatchEnded())) == [(3,)]


def test_exact_leases_are_sampled_grant_by_grant() -> None:
    bench = Bench(groups_per_batch=2)
    bench.install(V1)
    first = tuple(lease(n, exact=1) for n in (1, 2, 3))
    assert started(bench.tell(ev.LeasesGranted(first))) == [(1, 2, 3)]  # longer than a batch: the shape was granted so
    bench.tell(ev.LeasesGranted((lease(4, exact=1),)), ev.LeasesGranted((lease(5, exact=1),)))
    assert started(bench.tell(ev.BatchEnded())) == [(4,)]
    assert started(bench.tell(ev.BatchEnded())) == [(5,)]


def test_a_lease_waits_for_a_version_that_is_new_enough() -> None:
    bench = Bench()
    bench.install(V1)
    assert started(bench.tell(ev.LeasesGranted((lease(1, min_version=2),)))) == []
    bench.tell(ev.SnapshotAnnounced(V2, (b"c",)), ev.ChunkStored(b"c"))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [(1,)]


def test_an_older_version_that_a_lease_demands_is_asked_for_and_put_in() -> None:
    bench = Bench()
    bench.install(V3)
    asked = bench.tell(ev.LeasesGranted((lease(1, exact=2),)))
    assert [command.ref for command in asked if isinstance(command, do.AskManifest)] == [SnapshotRef(0, 2)]
    bench.tell(ev.SnapshotAnnounced(V2, (b"c",), asked_for=True), ev.ChunkStored(b"c"))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [(1,)]
    asked = bench.tell(ev.BatchEnded())  # nothing demands the old one any more
    assert [command.ref for command in asked if isinstance(command, do.AskManifest)] == [V3]


def test_a_demanded_version_that_is_gone_fails_its_leases() -> None:
    bench = Bench()
    bench.install(V3)
    bench.tell(ev.LeasesGranted((lease(1, exact=2), lease(2, exact=2), lease(3, exact=3))))
    failed = [c for c in bench.tell(ev.SnapshotUnknown(2)) if isinstance(c, do.FailLease)]
    assert [(command.lease_id, command.failure) for command in failed] == [(1, "snapshot_gone"), (2, "snapshot_gone")]
    assert list(bench.relay.generating) == [3]


def test_a_newer_snapshot_supersedes_an_unfinished_one() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), ev.SnapshotAnnounced(V1, CHUNKS))
    fetch = bench.tell(ev.SnapshotAnnounced(V2, (b"b", b"c")))
    assert [command.ref for command in fetch if isinstance(command, do.FetchChunks)] == [V2]
    assert kinds(bench.tell(ev.ChunkStored(b"b"), ev.ChunkStored(b"c"))) == ["InstallSnapshot"]
    bench.tell(ev.SnapshotInstalled(V2))
    assert bench.relay.installed == V2


def test_after_a_fall_back_the_announced_snapshot_counts_although_its_name_is_older() -> None:
    bench = Bench()
    bench.install(SnapshotRef(2, 4))
    bench.tell(ev.SnapshotAnnounced(V3, (b"c",)), ev.ChunkStored(b"c"))
    bench.tell(ev.SnapshotInstalled(V3))
    assert bench.relay.installed == V3


def test_a_corrupt_snapshot_is_never_installed_and_fetched_a_few_times_in_a_row() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), ev.SnapshotAnnounced(V1, CHUNKS), ev.ChunkStored(b"a"), ev.ChunkStored(b"b"))
    for _ in range(MAX_FETCHES - 1):
        assert kinds(bench.tell(ev.SnapshotRefused(V1, (b"b",), "torn"))) == ["FetchChunks"]
        assert kinds(bench.tell(ev.ChunkStored(b"b"))) == ["InstallSnapshot"]
    assert bench.tell(ev.SnapshotRefused(V1, (b"b",), "torn")) == []
    assert bench.relay.installed is None
    bench.now = REFUSED_SECONDS
    assert kinds(bench.tell(ev.Tick())) == ["AskManifest"]  # it may be whole by now, and no newer one may ever come


def test_a_newer_snapshot_ends_the_pause_after_a_corrupt_one() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), ev.SnapshotAnnounced(V1, (b"a",)), ev.ChunkStored(b"a"))
    for _ in range(MAX_FETCHES):
        bench.tell(ev.SnapshotRefused(V1, (b"a",), "torn"), ev.ChunkStored(b"a"))
    assert kinds(bench.tell(ev.SnapshotAnnounced(V2, (b"c",)))) == ["FetchChunks"]


def test_between_generations_means_not_during_one() -> None:
    bench = Bench(swap_during=False)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1),)), ev.SnapshotAnnounced(V2, (b"c",)))
    assert kinds(bench.tell(ev.ChunkStored(b"c"))) == []
    assert kinds(bench.tell(ev.GroupProduced(1), ev.BatchEnded())) == ["Deliver", "InstallSnapshot"]


def test_during_a_generation_means_at_once() -> None:
    bench = Bench(swap_during=True)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1),)), ev.SnapshotAnnounced(V2, (b"c",)))
    assert kinds(bench.tell(ev.ChunkStored(b"c"))) == ["InstallSnapshot"]


def test_no_swap_during_a_batch_that_demands_its_version() -> None:
    bench = Bench(swap_during=True)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1, exact=1),)), ev.SnapshotAnnounced(V2, (b"c",)))
    assert bench.tell(ev.ChunkStored(b"c")) == []


def test_no_batch_starts_while_a_snapshot_is_going_in() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(ev.SnapshotAnnounced(V2, (b"c",)), ev.ChunkStored(b"c"))
    assert started(bench.tell(ev.LeasesGranted((lease(1),)))) == []
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [(1,)]


def test_a_result_is_delivered_again_until_it_is_answered() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1),)))
    assert kinds(bench.tell(ev.GroupProduced(1))) == ["Deliver"]
    bench.tell(ev.BatchEnded(), ev.DeliveryFailed(1, "no answer"))
    assert bench.tell(ev.Tick()) == []
    bench.now = REDELIVER_SECONDS
    assert kinds(bench.tell(ev.Tick())) == ["Deliver"]
    bench.tell(ev.Disconnected("cut"))
    assert kinds(bench.tell(ev.Connected())) == ["Deliver"]
    bench.tell(ev.DeliveryAnswered(1, True, ""))
    bench.tell(ev.Disconnected("cut"))
    assert kinds(bench.tell(ev.Connected())) == []


def test_a_revoked_lease_is_forgotten_wherever_it_is() -> None:
    bench = Bench(groups_per_batch=1)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1), lease(2))))
    assert bench.tell(ev.LeaseRevoked(2, "late")) == []
    assert kinds(bench.tell(ev.LeaseRevoked(1, "late"))) == ["CancelBatch"]
    assert bench.tell(ev.GroupProduced(1), ev.BatchEnded()) == []


def test_a_broken_engine_fails_the_leases_it_held_and_no_others() -> None:
    bench = Bench(groups_per_batch=2)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1), lease(2), lease(3))), ev.GroupProduced(1))
    commands = bench.tell(ev.BatchEnded("out of memory"))
    assert [(c.lease_id, c.failure) for c in commands if isinstance(c, do.FailLease)] == [(2, "engine_failed")]
    assert started(commands) == [(3,)]


def test_fetches_wait_for_the_connection_and_after_a_failure() -> None:
    bench = Bench()
    assert bench.tell(ev.SnapshotAnnounced(V1, CHUNKS)) == []
    assert kinds(bench.tell(ev.Connected())) == ["FetchChunks"]
    assert bench.tell(ev.ChunksFailed(V1, "timeout")) == []
    bench.now = RETRY_SECONDS
    assert kinds(bench.tell(ev.Tick())) == ["FetchChunks"]


def test_an_order_to_stop_ends_everything() -> None:
    bench = Bench()
    bench.install(V1)
    assert kinds(bench.tell(ev.StopOrdered("finished"))) == ["Stop"]
    assert bench.tell(ev.LeasesGranted((lease(1),))) == []


def test_a_snapshot_that_nobody_asked_for_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="was installed"):
        Bench().tell(ev.SnapshotInstalled(V1))


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_events_breaks_its_invariants_and_it_is_deterministic(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(rng.randint(1, 3), rng.random() < 0.5)
    twin = Relay(bench.relay.groups_per_batch, bench.relay.swap_during)
    for _ in range(200):
        bench.now += rng.random()
        if (event := random_event(rng, bench.relay)) is not None:
            assert twin.handle(event, bench.now) == bench.relay.handle(event, bench.now)
            bench.relay.check_invariants()


def random_event(rng: random.Random, relay: Relay) -> ev.Event | None:
    """Any event, in any order, that a driver could send; answers only to what was asked."""
    ref, number = SnapshotRef(rng.randint(1, 2), rng.randint(0, 4)), rng.randint(1, 8)
    exact = rng.choice([None, None, rng.randint(0, 4)])
    events: list[ev.Event | None] = [
        ev.Connected(),
        ev.Disconnected("cut"),
        ev.LeasesGranted(tuple(lease(n, rng.randint(0, 4), exact) for n in range(number, number + rng.randint(1, 3)))),
        ev.LeaseRevoked(number, "why"),
        ev.SnapshotAnnounced(ref, rng.choice([(), CHUNKS]), rng.random() < 0.3),
        ev.SnapshotUnknown(ref.version),
        ev.ManifestFailed("no answer"),
        ev.ChunkStored(rng.choice(CHUNKS)),
        ev.ChunksFailed(ref, "no answer", rng.random() < 0.5),
        ev.GroupProduced(number),
        ev.LeaseAbandoned(number, "reward_failed", "why"),
        ev.BatchEnded(rng.choice([None, "broke"])),
        ev.DeliveryAnswered(number, True, ""),
        ev.DeliveryFailed(number, "no answer"),
        ev.Tick(),
        None if relay.installing is None else ev.SnapshotInstalled(relay.installing),
        None if relay.installing is None else ev.SnapshotRefused(relay.installing, (b"a",), "torn"),
    ]
    return rng.choice(events)
