"""A worker whose snapshots are adapters: what is fetched before them, once, and what becomes of it."""

from __future__ import annotations

from echo2.core.types import PayloadId, SnapshotRef
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as ev
from echo2.worker.decide.scheduler import MAX_FETCHES, REFUSED_SECONDS, RETRY_SECONDS
from worker_cases import V1, V2, V3, Bench, asked, fetched, granted, kinds, lease, started, whole

BASE, OTHER = SnapshotRef("base-" + "0" * 16, 0, 0), SnapshotRef("base-" + "1" * 16, 0, 0)


def adapter(ref: SnapshotRef, base_model: SnapshotRef = BASE, asked_for: bool = False) -> ev.SnapshotAnnounced:
    return ev.SnapshotAnnounced(PayloadId(ref), asked_for, 0.0, base_model)


def base(ref: SnapshotRef = BASE) -> ev.SnapshotAnnounced:
    return ev.SnapshotAnnounced(PayloadId(ref), asked_for=True)


def installs(commands: list[do.Command]) -> list[SnapshotRef]:
    return [command.payload.ref for command in commands if isinstance(command, do.InstallSnapshot)]


def test_the_base_model_comes_first_and_then_the_newest_adapter() -> None:
    bench = Bench()
    assert asked(bench.tell(ev.Connected(), granted((lease(1),)), adapter(V1))) == [(BASE, None)]
    assert fetched(bench.tell(base())) == [PayloadId(BASE)]
    assert bench.tell(adapter(V2)) == [], "nothing takes the base model's place on its way"
    assert asked(bench.tell(whole(BASE))) == [(V2, None)]
    assert fetched(bench.tell(adapter(V2, asked_for=True))) == [PayloadId(V2)]
    assert installs(bench.tell(whole(V2))) == [V2]
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [1]
    assert fetched(bench.tell(adapter(V3))) == [PayloadId(V3)], "the base model is here"


def test_a_worker_that_had_the_base_model_before_it_was_restarted_fetches_the_adapter_alone() -> None:
    bench = Bench()
    bench.scheduler.base_models = {BASE}
    assert fetched(bench.tell(ev.Connected(), adapter(V1))) == [PayloadId(V1)]


def test_a_base_model_that_does_not_verify_is_fetched_again_and_after_a_few_times_only_later() -> None:
    bench = Bench()
    bench.scheduler.base_models = {BASE}
    bench.tell(ev.Connected(), adapter(V1), granted((lease(1),)))
    for time in range(MAX_FETCHES):
        assert installs(bench.tell(whole(V1))) == [V1]
        refused = bench.tell(ev.SnapshotRefused(PayloadId(BASE), "torn"))
        assert started(refused) == []
        if time + 1 < MAX_FETCHES:
            assert asked(refused) == [(V1, None)]
            assert asked(bench.tell(adapter(V1, asked_for=True))) == [(BASE, None)]
            bench.tell(base(), whole(BASE), adapter(V1, asked_for=True))
    assert asked(refused) == []
    bench.now += REFUSED_SECONDS + 1
    assert asked(bench.tell(ev.Tick())) == [(V1, None)]


def test_a_base_model_that_the_head_does_not_know_is_asked_for_again_later() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), adapter(V1))
    assert asked(bench.tell(ev.SnapshotUnknown(BASE))) == []
    bench.now += RETRY_SECONDS + 0.1
    assert asked(bench.tell(ev.Tick())) == [(V1, None)]
    assert asked(bench.tell(adapter(V1, asked_for=True))) == [(BASE, None)]


def test_weights_of_another_policy_take_the_place_of_a_base_model_on_its_way() -> None:
    bench, moved = Bench(), SnapshotRef("other", 1, 0)
    bench.tell(ev.Connected(), adapter(V1), base())
    assert asked(bench.tell(adapter(moved, OTHER))) == [(OTHER, None)]
    assert fetched(bench.tell(base(OTHER))) == [PayloadId(OTHER)]
    assert asked(bench.tell(whole(OTHER))) == [(moved, None)]
    whole_model = SnapshotRef("third", 1, 0)
    assert fetched(bench.tell(ev.SnapshotAnnounced(PayloadId(whole_model)))) == [PayloadId(whole_model)]


def test_a_base_model_is_not_fetched_further_if_the_newest_snapshot_is_here() -> None:
    bench = Bench()
    bench.install(V1)
    bench.tell(adapter(V2), base())
    assert "StopFetching" in kinds(bench.tell(ev.SnapshotAnnounced(PayloadId(V1))))


def test_a_base_model_on_its_way_is_asked_for_on_each_new_connection_until_that_is_answered() -> None:
    bench = Bench()
    bench.tell(ev.Connected(), adapter(V1), base())
    bench.tell(ev.Disconnected())
    assert asked(bench.tell(ev.Connected())) == [(BASE, None)], "a restarted head has no routes for it"
    bench.tell(adapter(V1), ev.ManifestFailed())
    bench.now += RETRY_SECONDS
    assert asked(bench.tell(ev.Tick())) == [(BASE, None)]
    assert bench.tell(base(), adapter(V1), ev.Tick()) == [], "it is fetched already"
    assert asked(bench.tell(whole(BASE))) == [(V1, None)]
