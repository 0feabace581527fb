"""A worker's scheduler by example: slots, swaps, snapshots that supersede, break or vanish, results that are not
answered.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from echo2.core.errors import InvariantError, UserError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as ev
from echo2.worker.decide.scheduler import (
    MAX_FETCHES,
    REDELIVER_SECONDS,
    REFUSED_SECONDS,
    RETRY_SECONDS,
    Swap,
    WorkerScheduler,
)
from invariants import check
from seeds import seeds
from worker_cases import (
    V1,
    V2,
    V3,
    Bench,
    announced,
    asked,
    failed,
    fetched,
    granted,
    kinds,
    lease,
    produced,
    refused,
    started,
    units,
    whole,
)


def test_a_snapshot_is_fetched_installed_and_reported() -> None:
    bench = Bench()
    bench.tell(ev.Connected())
    assert fetched(bench.tell(announced(V1))) == [PayloadId(V1)]
    assert kinds(bench.tell(whole(V1))) == ["InstallSnapshot"]
    assert kinds(bench.tell(ev.SnapshotInstalled(V1))) == ["ReportInstalled"]


def test_a_delta_on_what_is_installed_is_fetched_and_another_is_asked_for() -> None:
    bench = Bench()
    bench.install(V1)
    assert fetched(bench.tell(announced(V2, V1))) == [PayloadId(V2, V1)]
    bench.tell(whole(V2, V1), ev.SnapshotInstalled(V2))
    commands = bench.tell(announced(SnapshotRef(RUN_POLICY, 1, 4), V3))  # V3 was never here
    assert (fetched(commands), asked(commands)) == ([], [(SnapshotRef(RUN_POLICY, 1, 4), V2)])


def test_a_delta_whose_base_was_swapped_out_meanwhile_is_asked_for_whole() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(granted((lease(1),)), announced(V2), whole(V2), announced(V3, V1))
    bench.tell(produced(1), ev.SnapshotInstalled(V2))
    assert bench.scheduler.installed == V2
    bench.tell(announced(V3, V2, asked_for=True), whole(V3, V2))
    assert bench.scheduler.installing == V3
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V1))
    bench.scheduler.installed = V3  # as if it had been put in by another way
    assert asked(bench.tell(whole(V2, V1))) == [(V2, None)]


def test_a_delta_that_does_not_give_its_digest_is_asked_for_whole() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V1), whole(V2, V1))
    assert asked(bench.tell(refused(V2, V1))) == [(V2, None)]
    assert fetched(bench.tell(announced(V2, V1, asked_for=True))) == []  # not again
    assert fetched(bench.tell(announced(V2, asked_for=True))) == [PayloadId(V2)]
    bench.tell(whole(V2))
    assert kinds(bench.tell(ev.SnapshotInstalled(V2))) == ["ReportInstalled"]


def test_nothing_is_sampled_before_a_snapshot_is_installed() -> None:
    bench = Bench()
    bench.tell(ev.Connected())
    assert started(bench.tell(granted((lease(1),)))) == []
    assert started(bench.install(V1)) == [1]


def test_leases_start_in_order_while_a_slot_is_free() -> None:
    bench = Bench(slots=4)
    bench.install(V1)
    assert started(bench.tell(granted((lease(1), lease(2), lease(3), lease(4))))) == [1, 2]
    assert started(bench.tell(ev.RolloutEnded(1))) == [3]  # its second rollout waits at the engine for the next slot
    assert started(bench.tell(ev.RolloutEnded(1))) == []
    assert started(bench.tell(produced(1), ev.RolloutEnded(2))) == [4]


def test_a_group_larger_than_the_engine_starts_in_an_empty_one() -> None:
    bench = Bench(slots=1)
    bench.install(V1)
    assert started(bench.tell(granted((lease(1), lease(2))))) == [1]
    assert started(bench.tell(ev.RolloutEnded(1))) == []
    assert started(bench.tell(ev.RolloutEnded(1))) == [2]


def test_the_values_of_a_lease_travel_with_it() -> None:
    bench = Bench(slots=2)
    bench.install(V1)
    (start,) = bench.tell(granted((lease(1), lease(2))))
    assert isinstance(start, do.StartLease)
    assert (start.lease, start.assignment) == (lease(1), "assignment 1")
    deliver, start = bench.tell(produced(1))
    assert isinstance(deliver, do.Deliver)
    assert isinstance(start, do.StartLease)
    assert (deliver.lease_id, deliver.result, start.assignment) == (1, "result 1", "assignment 2")
    bench.tell(ev.DeliveryFailed(1))
    bench.now = REDELIVER_SECONDS
    (again,) = bench.tell(ev.Tick())
    assert isinstance(again, do.Deliver)
    assert again.result == "result 1"


def test_deterministic_leases_are_sampled_grant_by_grant() -> None:
    bench = Bench(slots=4, deterministic=True)
    bench.install(V1)
    first = tuple(lease(n, exact=1) for n in (1, 2, 3))
    assert units(bench.tell(granted(first))) == [[1, 2, 3]]  # more than there are slots: the shape was granted so
    commands = bench.tell(granted((lease(4, exact=1),)), granted((lease(5, exact=1),)), produced(1), produced(2))
    assert units(commands) == []
    assert units(bench.tell(produced(3))) == [[4]]
    assert units(bench.tell(ev.LeaseAbandoned(4, "engine_failed", "why"))) == [[5]]


def test_a_lease_waits_for_a_version_that_is_new_enough() -> None:
    bench = Bench()
    bench.install(V1)
    assert started(bench.tell(granted((lease(1, min_version=2),)))) == []
    bench.tell(announced(V2), whole(V2))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [1]


def test_a_lease_that_waits_for_newer_weights_holds_back_no_other() -> None:
    bench = Bench(slots=6)
    bench.install(V1)
    waits = lease(1, min_version=2)
    assert started(bench.tell(granted((waits, lease(2), lease(3, exact=3), lease(4))))) == [2]  # what 3 demands is next
    bench.tell(announced(V2), whole(V2), produced(2))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [1]


def test_an_older_version_that_a_lease_demands_is_asked_for_and_put_in() -> None:
    bench = Bench()
    bench.install(V3)
    assert asked(bench.tell(granted((lease(1, exact=2),)))) == [(SnapshotRef(RUN_POLICY, 0, 2), V3)]
    bench.tell(announced(V2, V3, asked_for=True), whole(V2, V3))
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [1]
    assert asked(bench.tell(produced(1))) == [(V3, V2)]  # nothing demands the old one any more


def test_a_lease_that_needs_older_weights_delays_a_newer_snapshot() -> None:
    bench = Bench(slots=2)
    bench.install(V1)
    bench.tell(granted((lease(1, exact=1),)), announced(V2))
    assert asked(bench.tell(granted((lease(2, exact=1),)))) == []
    bench.tell(announced(V2, asked_for=True), whole(V2))
    assert started(bench.tell(produced(1))) == [2]


def test_a_demanded_version_that_is_gone_fails_its_leases() -> None:
    bench = Bench()
    bench.install(V3)
    bench.tell(granted((lease(1, exact=2), lease(2, exact=2), lease(3, exact=3))))
    gone = bench.tell(ev.SnapshotUnknown(SnapshotRef(RUN_POLICY, 0, 2)))
    assert failed(gone) == [(1, "snapshot_gone"), (2, "snapshot_gone")]
    assert list(bench.scheduler.generating) == [3]


def test_after_a_fall_back_leases_of_versions_that_are_gone_fail_at_once() -> None:
    bench = Bench()
    bench.install(V2)
    bench.tell(announced(V3))
    bench.tell(granted((lease(1, min_version=3), lease(2, exact=3), lease(3, min_version=1))))
    back = bench.tell(announced(SnapshotRef(RUN_POLICY, 2, 1)))
    assert failed(back) == [(1, "snapshot_gone"), (2, "snapshot_gone")]
    assert list(bench.scheduler.generating) == [3]


def test_a_deleted_version_is_not_confused_with_one_of_the_same_number() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V3))  # asks for it, as V3 is not here
    bench.tell(announced(SnapshotRef(RUN_POLICY, 2, 2), V3), ev.SnapshotUnknown(V2))
    assert bench.scheduler.newest == SnapshotRef(RUN_POLICY, 2, 2)


def test_a_newer_snapshot_supersedes_an_unfinished_one() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1))
    assert fetched(bench.tell(announced(V2, progress=0.4))) == [PayloadId(V2)]
    assert bench.tell(whole(V1)) == []  # of the one before: too late
    assert kinds(bench.tell(whole(V2))) == ["InstallSnapshot"]
    bench.tell(ev.SnapshotInstalled(V2))
    assert bench.scheduler.installed == V2


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
    assert bench.scheduler.incoming is not None
    assert bench.scheduler.incoming.ref == V2


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_a_publisher_faster_than_the_link_does_not_starve_the_engine(seed: int) -> None:
    """Every fetch takes several publications; still one install follows each two fetches."""
    rng = random.Random(seed)
    scheduler, now = WorkerScheduler(4, "between", False), 0.0
    fetch_seconds, publish_seconds = rng.uniform(3.0, 9.0), rng.uniform(0.3, 2.0)
    scheduler.handle(ev.Connected(), now)
    installed: list[float] = []
    payload: PayloadId | None = None
    begun, last = 0.0, 0
    for tick in range(1, 2000):
        now = tick * 0.1
        commands: list[do.Command] = []
        if now // publish_seconds > last:
            last = int(now // publish_seconds)
            base = rng.choice([None, SnapshotRef(RUN_POLICY, 1, last - 1), scheduler.installed])
            progress = 0.0 if payload is None else min(1.0, (now - begun) / fetch_seconds)
            commands += scheduler.handle(announced(SnapshotRef(RUN_POLICY, 1, last), base, progress=progress), now)
        if payload is not None and now - begun >= fetch_seconds:
            commands += scheduler.handle(ev.SnapshotWhole(payload), now)
            payload = None
        while commands:
            command = commands.pop(0)
            if isinstance(command, do.FetchSnapshot):
                payload, begun = command.payload, now
            elif isinstance(command, do.AskManifest):
                commands += scheduler.handle(announced(command.ref, command.base, asked_for=True), now)
            elif isinstance(command, do.InstallSnapshot):
                installed.append(now)
                commands += scheduler.handle(ev.SnapshotInstalled(command.payload.ref), now)
    gaps = [after - before for before, after in pairwise(installed)]
    assert gaps, f"seed {seed}: nothing was ever installed"
    assert max(gaps) <= 2 * fetch_seconds + 2 * publish_seconds + 0.5, f"seed {seed}"


def test_after_a_fall_back_the_announced_snapshot_counts_although_its_name_is_older() -> None:
    bench = Bench()
    bench.install(SnapshotRef(RUN_POLICY, 2, 4))
    bench.tell(announced(V3), whole(V3))
    bench.tell(ev.SnapshotInstalled(V3))
    assert bench.scheduler.installed == V3


def test_a_corrupt_snapshot_is_never_installed_and_fetched_a_few_times_in_a_row() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1), whole(V1))
    for _ in range(MAX_FETCHES - 1):
        assert fetched(bench.tell(refused(V1))) == [PayloadId(V1)]
        assert kinds(bench.tell(whole(V1))) == ["InstallSnapshot"]
    assert kinds(bench.tell(refused(V1))) == ["ReportInstalled"]  # why, for people
    assert bench.scheduler.installed is None
    bench.now = REFUSED_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V1, None)]  # it may be whole by now, and no newer one may ever come


def test_a_newer_snapshot_ends_the_pause_after_a_corrupt_one() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1), whole(V1))
    for _ in range(MAX_FETCHES):
        bench.tell(refused(V1), whole(V1))
    assert fetched(bench.tell(announced(V2))) == [PayloadId(V2)]


def test_no_batch_starts_during_an_install() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2), whole(V2))
    assert started(bench.tell(granted((lease(1),)))) == []
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [1]


def test_a_result_is_delivered_again_until_it_is_answered() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(granted((lease(1),)))
    assert kinds(bench.tell(produced(1))) == ["Deliver"]
    bench.tell(ev.DeliveryFailed(1))
    assert bench.tell(ev.Tick()) == []
    bench.now = REDELIVER_SECONDS
    assert kinds(bench.tell(ev.Tick())) == ["Deliver"]
    bench.tell(ev.Disconnected())
    assert kinds(bench.tell(ev.Connected())) == ["Deliver"]
    bench.tell(ev.DeliveryAnswered(1))
    bench.tell(ev.Disconnected())
    assert kinds(bench.tell(ev.Connected())) == []


def test_a_revoked_lease_is_aborted_at_once_and_its_slots_go_to_the_next() -> None:
    bench = Bench(slots=4)
    bench.install(V1)
    bench.tell(granted((lease(1), lease(2), lease(3), lease(4))))
    assert bench.tell(ev.LeaseRevoked(4, "late")) == []
    commands = bench.tell(ev.LeaseRevoked(1, "late"))
    assert kinds(commands) == ["AbortLease", "StartLease"]
    assert started(commands) == [3]
    assert bench.tell(produced(1), ev.RolloutEnded(1)) == []
    bench.tell(produced(2))
    assert bench.tell(ev.LeaseRevoked(2, "late")) == []
    bench.tell(ev.Disconnected())
    assert kinds(bench.tell(ev.Connected())) == []


def test_a_lease_that_fails_costs_no_other() -> None:
    bench = Bench(slots=4)
    bench.install(V1)
    bench.tell(granted((lease(1), lease(2), lease(3))), produced(1))
    commands = bench.tell(ev.LeaseAbandoned(2, "engine_failed", "out of memory"))
    assert failed(commands) == [(2, "engine_failed")]
    assert list(bench.scheduler.generating) == [3]


@pytest.mark.parametrize("swap", ["between", "during"])
def test_a_worker_without_room_for_new_weights_reports_it_goes_on_and_tries_the_next(swap: Swap) -> None:
    bench = Bench(swap=swap)
    bench.install(V1)
    bench.tell(announced(V2), whole(V2))
    commands = bench.tell(ev.SnapshotTooLarge(PayloadId(V2), "cuda:0 is full"))
    assert [command.reason for command in commands] == [f"{V2}: no room for it beside {V1}: cuda:0 is full"]
    assert kinds(commands) == ["ReportInstalled"]
    assert "cuda:0 is full" in bench.scheduler.refused
    assert started(bench.tell(granted((lease(1),)))) == [1]
    bench.tell(produced(1))
    assert fetched(bench.tell(announced(V3, V1))) == [PayloadId(V3, V1)]
    bench.tell(whole(V3, V1), ev.SnapshotInstalled(V3))
    assert bench.scheduler.refused == ""


def test_without_room_for_its_first_weights_the_worker_ends() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1), whole(V1))
    with pytest.raises(UserError, match="no room for the model: cuda:0 is full"):
        bench.tell(ev.SnapshotTooLarge(PayloadId(V1), "cuda:0 is full"))


def test_a_worker_without_room_or_newer_snapshot_tries_again() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2), whole(V2), ev.SnapshotTooLarge(PayloadId(V2), "full"))
    assert asked(bench.tell(ev.Tick())) == []
    bench.now = REFUSED_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V2, V1)]


def test_requests_wait_for_the_connection_and_after_a_failure() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(ev.Disconnected())
    assert bench.tell(announced(V3, V2)) == []
    assert asked(bench.tell(ev.Connected())) == [(V3, V1)]
    assert bench.tell(ev.ManifestFailed()) == []
    bench.now = RETRY_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V3, V1)]


def test_a_snapshot_that_no_peer_has_is_requested_anew() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), announced(V1))
    assert bench.tell(ev.SnapshotGone(PayloadId(V1))) == []
    bench.now = RETRY_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(V1, None)]


def test_a_fetch_is_ended_when_what_is_installed_becomes_the_newest() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(announced(V2, V1))
    stopped = bench.tell(announced(V1))  # the learner fell back
    assert [command.payload for command in stopped if isinstance(command, do.StopFetching)] == [PayloadId(V2, V1)]


def test_an_unrequested_snapshot_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="was installed"):
        Bench().tell(ev.SnapshotInstalled(V1))


@pytest.mark.parametrize("seed", seeds(15, 60))
def test_no_order_of_events_breaks_its_invariants_and_it_is_deterministic(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(rng.randint(1, 6), rng.random() < 0.5, rng.random() < 0.3)
    twin = WorkerScheduler(bench.scheduler.slots, bench.scheduler.swap, bench.scheduler.deterministic)
    over: dict[PayloadId, SnapshotRef | None] = {}  # the base models of what was announced
    for _ in range(200):
        bench.now += rng.random()
        if (event := random_event(rng, bench.scheduler)) is None:
            continue
        if isinstance(event, ev.SnapshotAnnounced):
            over.setdefault(event.payload, event.base_model)
            event = replace(event, base_model=over[event.payload])
        commands = bench.scheduler.handle(event, bench.now)
        assert twin.handle(event, bench.now) == commands
        check(bench.scheduler)
        for command in commands:
            if isinstance(command, do.InstallSnapshot | do.FetchSnapshot):
                assert over[command.payload] in (None, *bench.scheduler.base_models)


BASE_MODELS = tuple(SnapshotRef(f"base-{number:016x}", 0, 0) for number in range(2))


def random_event(rng: random.Random, scheduler: WorkerScheduler) -> ev.Event | None:
    """Any event, in any order, that a driver could send; answers only to what was asked."""
    ref, number = SnapshotRef(RUN_POLICY, rng.randint(1, 2), rng.randint(0, 4)), rng.randint(1, 8)
    exact, base = rng.choice([None, None, rng.randint(0, 4)]), rng.choice([None, scheduler.installed])
    incoming, missing = scheduler.incoming, scheduler.missing_base
    base_model = rng.choice([None, *BASE_MODELS])
    events: list[ev.Event | None] = [
        ev.Connected(),
        ev.Disconnected(),
        granted(tuple(lease(n, rng.randint(0, 4), exact) for n in range(number, number + rng.randint(1, 3)))),
        ev.LeaseRevoked(number, "why"),
        announced(ref, base, rng.random() < 0.3, rng.random()),
        ev.SnapshotAnnounced(PayloadId(ref), rng.random() < 0.3, rng.random(), base_model),
        None if missing is None else ev.SnapshotAnnounced(PayloadId(missing), asked_for=True),
        None if missing is None else ev.SnapshotUnknown(missing),
        ev.SnapshotUnknown(ref),
        ev.ManifestFailed(),
        None if incoming is None else ev.SnapshotWhole(incoming.payload),
        ev.SnapshotGone(PayloadId(ref, base) if incoming is None else incoming.payload),
        produced(number),
        ev.LeaseAbandoned(number, "environment_failed", "why"),
        ev.RolloutEnded(number),
        ev.DeliveryAnswered(number),
        ev.DeliveryFailed(number),
        ev.Tick(),
        None if scheduler.installing is None else ev.SnapshotInstalled(scheduler.installing),
        None if scheduler.installing is None or incoming is None else ev.SnapshotRefused(incoming.payload, "torn"),
        None if base_model not in scheduler.base_models else ev.SnapshotRefused(PayloadId(base_model), "torn"),
        None if scheduler.installing is None or incoming is None else ev.SnapshotTooLarge(incoming.payload, "full"),
    ]
    if scheduler.installed is None:
        events.pop()  # it would end the worker
    return rng.choice(events)


def test_the_head_says_how_many_rollouts_are_decoded_at_once_of_those_that_there_is_room_for() -> None:
    bench = Bench(slots=4)
    bench.install(V1)
    bench.tell(ev.SlotsSet(2))
    assert started(bench.tell(granted((lease(1), lease(2), lease(3))))) == [1]
    assert started(bench.tell(ev.SlotsSet(4))) == [2]
    assert started(bench.tell(ev.SlotsSet(1 << 30))) == []
    assert bench.scheduler.slots == 4
    bench.tell(ev.SlotsSet(0))
    assert bench.scheduler.slots == 1
