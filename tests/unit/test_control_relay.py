"""A worker's relay by example: batches, swaps, snapshots that supersede, break or vanish, results that are not
answered.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from echo2.control import relay_commands as do
from echo2.control import relay_events as ev
from echo2.control.relay import MAX_FETCHES, REDELIVER_SECONDS, REFUSED_SECONDS, RETRY_SECONDS, Relay
from echo2.errors import InvariantError
from echo2.types import GroupRef, Lease, PayloadId, SnapshotRef

V1, V2, V3 = SnapshotRef(1, 1), SnapshotRef(1, 2), SnapshotRef(1, 3)


def announced(
    ref: SnapshotRef, base: SnapshotRef | None = None, asked_for: bool = False, progress: float = 0.0
) -> ev.SnapshotAnnounced:
    return ev.SnapshotAnnounced(PayloadId(ref, base), asked_for, progress)


def whole(ref: SnapshotRef, base: SnapshotRef | None = None) -> ev.SnapshotWhole:
    return ev.SnapshotWhole(PayloadId(ref, base))


def refused(ref: SnapshotRef, base: SnapshotRef | None = None) -> ev.SnapshotRefused:
    return ev.SnapshotRefused(PayloadId(ref, base), "torn")


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


def started(commands: list[do.Command]) -> list[tuple[int, ...]]:
    return [command.lease_ids for command in commands if isinstance(command, do.StartBatch)]


def test_a_snapshot_is_fetched_installed_and_reported() -> None:
    bench = Bench()
    bench.tell(ev.Connected())
    assert fetched(bench.tell(announced(V1))) == [PayloadId(V1)]
    assert kinds(bench.tell(whole(V1))) == ["InstallSnapshot"]
    assert kinds(bench.tell(ev.SnapshotInstalled(V1))) == ["Report"]


def test_a_delta_on_what_is_installed_is_fetched_and_another_is_asked_for() -> None:
    bench = Bench()
    bench.install(V1)
    assert fetched(bench.tell(announced(V2, V1))) == [PayloadId(V2, V1)]
    bench.tell(whole(V2, V1), ev.SnapshotInstalled(V2))
    commands = bench.tell(announced(SnapshotRef(1, 4), V3))  # V3 was never here
    assert (fetched(commands), asked(commands)) == ([], [(SnapshotRef(1, 4), V2)])


def test_a_delta_whose_base_was_swapped_out_meanwhile_is_asked_for_whole() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1),)), announced(V2), whole(V2), announced(V3, V1))
    bench.tell(ev.GroupProduced(1), ev.BatchEnded(), ev.SnapshotInstalled(V2))
    assert bench.relay.installed == V2
    bench.tell(announced(V3, V2, asked_for=True), whole(V3, V2))
    assert bench.relay.installing == V3
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V1))
    bench.relay.installed = V3  # as if it had been put in by another way
    assert asked(bench.tell(whole(V2, V1))) == [(V2, None)]


def test_a_delta_that_does_not_give_its_digest_is_asked_for_whole() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V1), whole(V2, V1))
    assert asked(bench.tell(refused(V2, V1))) == [(V2, None)]
    assert fetched(bench.tell(announced(V2, V1, asked_for=True))) == []  # not again
    assert fetched(bench.tell(announced(V2, asked_for=True))) == [PayloadId(V2)]
    bench.tell(whole(V2))
    assert kinds(bench.tell(ev.SnapshotInstalled(V2))) == ["Report"]


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
    bench.tell(announced(V2), whole(V2))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [(1,)]


def test_an_older_version_that_a_lease_demands_is_asked_for_and_put_in() -> None:
    bench = Bench()
    bench.install(V3)
    assert asked(bench.tell(ev.LeasesGranted((lease(1, exact=2),)))) == [(SnapshotRef(0, 2), V3)]
    bench.tell(announced(V2, V3, asked_for=True), whole(V2, V3))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [(1,)]
    assert asked(bench.tell(ev.BatchEnded())) == [(V3, V2)]  # nothing demands the old one any more


def test_what_a_lease_demands_keeps_a_whole_newer_snapshot_out_until_it_is_sampled() -> None:
    bench = Bench(groups_per_batch=1)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1, exact=1),)), announced(V2))
    assert asked(bench.tell(ev.LeasesGranted((lease(2, exact=1),)))) == []
    bench.tell(announced(V2, asked_for=True), whole(V2))
    assert started(bench.tell(ev.BatchEnded())) == [(2,)]


def test_a_demanded_version_that_is_gone_fails_its_leases() -> None:
    bench = Bench()
    bench.install(V3)
    bench.tell(ev.LeasesGranted((lease(1, exact=2), lease(2, exact=2), lease(3, exact=3))))
    gone = bench.tell(ev.SnapshotUnknown(SnapshotRef(0, 2)))
    assert failed(gone) == [(1, "snapshot_gone"), (2, "snapshot_gone")]
    assert list(bench.relay.generating) == [3]


def test_after_a_fall_back_leases_of_versions_that_are_gone_fail_at_once() -> None:
    bench = Bench()
    bench.install(V2)
    bench.tell(announced(V3))
    bench.tell(ev.LeasesGranted((lease(1, min_version=3), lease(2, exact=3), lease(3, min_version=1))))
    back = bench.tell(announced(SnapshotRef(2, 1)))
    assert failed(back) == [(1, "snapshot_gone"), (2, "snapshot_gone")]
    assert list(bench.relay.generating) == [3]


def test_a_version_that_is_not_there_any_more_is_not_taken_for_one_of_the_same_number() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V3))  # asks for it, as V3 is not here
    bench.tell(announced(SnapshotRef(2, 2), V3), ev.SnapshotUnknown(V2))
    assert bench.relay.newest == SnapshotRef(2, 2)


def test_a_newer_snapshot_supersedes_an_unfinished_one() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1))
    assert fetched(bench.tell(announced(V2, progress=0.4))) == [PayloadId(V2)]
    assert bench.tell(whole(V1)) == []  # of the one before: too late
    assert kinds(bench.tell(whole(V2))) == ["InstallSnapshot"]
    bench.tell(ev.SnapshotInstalled(V2))
    assert bench.relay.installed == V2


def test_a_snapshot_of_which_more_than_half_is_here_is_finished_first() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1))
    assert kinds(bench.tell(announced(V2, progress=0.6))) == []
    bench.tell(whole(V1))
    assert asked(bench.tell(ev.SnapshotInstalled(V1))) == [(V2, V1)]


def test_no_two_snapshots_in_a_row_are_given_up_for_newer_ones() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1), announced(V2))
    assert kinds(bench.tell(announced(V3))) == []
    assert bench.relay.incoming is not None
    assert bench.relay.incoming.ref == V2


@pytest.mark.parametrize("seed", range(40))
def test_a_publisher_faster_than_the_link_does_not_starve_the_engine(seed: int) -> None:
    """Every fetch takes several publications; still one install follows each two fetches."""
    rng = random.Random(seed)
    relay, now = Relay(2, False), 0.0
    fetch_seconds, publish_seconds = rng.uniform(3.0, 9.0), rng.uniform(0.3, 2.0)
    relay.handle(ev.Connected(), now)
    installed: list[float] = []
    payload: PayloadId | None = None
    begun, last = 0.0, 0
    for tick in range(1, 2000):
        now = tick * 0.1
        commands: list[do.Command] = []
        if now // publish_seconds > last:
            last = int(now // publish_seconds)
            base = rng.choice([None, SnapshotRef(1, last - 1), relay.installed])
            progress = 0.0 if payload is None else min(1.0, (now - begun) / fetch_seconds)
            commands += relay.handle(announced(SnapshotRef(1, last), base, progress=progress), now)
        if payload is not None and now - begun >= fetch_seconds:
            commands += relay.handle(ev.SnapshotWhole(payload), now)
            payload = None
        while commands:
            command = commands.pop(0)
            if isinstance(command, do.FetchSnapshot):
                payload, begun = command.payload, now
            elif isinstance(command, do.AskManifest):
                commands += relay.handle(announced(command.ref, command.base, asked_for=True), now)
            elif isinstance(command, do.InstallSnapshot):
                installed.append(now)
                commands += relay.handle(ev.SnapshotInstalled(command.payload.ref), now)
    gaps = [after - before for before, after in pairwise(installed)]
    assert gaps, f"seed {seed}: nothing was ever installed"
    assert max(gaps) <= 2 * fetch_seconds + 2 * publish_seconds + 0.5, f"seed {seed}"


def test_after_a_fall_back_the_announced_snapshot_counts_although_its_name_is_older() -> None:
    bench = Bench()
    bench.install(SnapshotRef(2, 4))
    bench.tell(announced(V3), whole(V3))
    bench.tell(ev.SnapshotInstalled(V3))
    assert bench.relay.installed == V3


def test_a_corrupt_snapshot_is_never_installed_and_fetched_a_few_times_in_a_row() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1), whole(V1))
    for _ in range(MAX_FETCHES - 1):
        assert fetched(bench.tell(refused(V1))) == [PayloadId(V1)]
        assert kinds(bench.tell(whole(V1))) == ["InstallSnapshot"]
    assert bench.tell(refused(V1)) == []
    assert bench.relay.installed is None
    bench.now = REFUSED_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V1, None)]  # it may be whole by now, and no newer one may ever come


def test_a_newer_snapshot_ends_the_pause_after_a_corrupt_one() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1), whole(V1))
    for _ in range(MAX_FETCHES):
        bench.tell(refused(V1), whole(V1))
    assert fetched(bench.tell(announced(V2))) == [PayloadId(V2)]


def test_between_generations_means_not_during_one() -> None:
    bench = Bench(swap_during=False)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1),)), announced(V2))
    assert kinds(bench.tell(whole(V2))) == []
    assert kinds(bench.tell(ev.GroupProduced(1), ev.BatchEnded())) == ["Deliver", "InstallSnapshot"]


def test_during_a_generation_means_at_once() -> None:
    bench = Bench(swap_during=True)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1),)), announced(V2))
    assert kinds(bench.tell(whole(V2))) == ["InstallSnapshot"]


def test_no_swap_during_a_batch_that_demands_its_version() -> None:
    bench = Bench(swap_during=True)
    bench.install(V1)
    bench.tell(ev.LeasesGranted((lease(1, exact=1),)), announced(V2))
    assert bench.tell(whole(V2)) == []


def test_no_batch_starts_while_a_snapshot_is_going_in() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2), whole(V2))
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


def test_questions_wait_for_the_connection_and_after_a_failure() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(ev.Disconnected("cut"))
    assert bench.tell(announced(V3, V2)) == []
    assert asked(bench.tell(ev.Connected())) == [(V3, V1)]
    assert bench.tell(ev.ManifestFailed("timeout")) == []
    bench.now = RETRY_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V3, V1)]


def test_a_snapshot_that_nobody_has_any_more_is_asked_for_anew() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1))
    assert bench.tell(ev.SnapshotGone(PayloadId(V1), "dropped")) == []
    bench.now = RETRY_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V1, None)]


def test_a_fetch_is_ended_when_what_is_installed_becomes_the_newest() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V1))
    stopped = bench.tell(announced(V1))  # the learner fell back
    assert [command.payload for command in stopped if isinstance(command, do.StopFetching)] == [PayloadId(V2, V1)]


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
    exact, base = rng.choice([None, None, rng.randint(0, 4)]), rng.choice([None, relay.installed])
    incoming = relay.incoming
    events: list[ev.Event | None] = [
        ev.Connected(),
        ev.Disconnected("cut"),
        ev.LeasesGranted(tuple(lease(n, rng.randint(0, 4), exact) for n in range(number, number + rng.randint(1, 3)))),
        ev.LeaseRevoked(number, "why"),
        announced(ref, base, rng.random() < 0.3, rng.random()),
        ev.SnapshotUnknown(ref),
        ev.ManifestFailed("no answer"),
        None if incoming is None else ev.SnapshotWhole(incoming.payload),
        ev.SnapshotGone(PayloadId(ref, base) if incoming is None else incoming.payload, "dropped"),
        ev.GroupProduced(number),
        ev.LeaseAbandoned(number, "environment_failed", "why"),
        ev.BatchEnded(rng.choice([None, "broke"])),
        ev.DeliveryAnswered(number, True, ""),
        ev.DeliveryFailed(number, "no answer"),
        ev.Tick(),
        None if relay.installing is None else ev.SnapshotInstalled(relay.installing),
        None if relay.installing is None or incoming is None else ev.SnapshotRefused(incoming.payload, "torn"),
    ]
    return rng.choice(events)
