"""When the worker's scheduler installs new weights, by what its run asks for: between generations, during them, or
beside the weights that they began with.
"""

from __future__ import annotations

from echo2.core.types import PayloadId
from echo2.worker.decide import messages as ev
from worker_cases import V1, V2, V3, Bench, announced, granted, kinds, lease, produced, started, whole


def test_swaps_between_generations_wait_for_the_end_of_one() -> None:
    bench = Bench(swap="between")
    bench.install(V1)
    bench.tell(granted((lease(1),)), announced(V2))
    assert kinds(bench.tell(whole(V2))) == []
    assert kinds(bench.tell(granted((lease(2),)))) == []  # nor does another begin before it
    assert kinds(bench.tell(produced(1))) == ["Deliver", "InstallSnapshot"]
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [2]


def test_swaps_during_generations_happen_at_once() -> None:
    bench = Bench(swap="during")
    bench.install(V1)
    bench.tell(granted((lease(1),)), announced(V2))
    assert kinds(bench.tell(whole(V2))) == ["InstallSnapshot"]


def test_separate_swaps_wait_for_no_lease_of_one_older_version() -> None:
    bench = Bench(swap="apart")
    bench.install(V1)
    bench.tell(granted((lease(1),)), announced(V2))
    assert kinds(bench.tell(whole(V2))) == ["InstallSnapshot"]
    bench.tell(granted((lease(2),)))  # which the engine may sample with either
    bench.tell(ev.SnapshotInstalled(V2))
    assert started(bench.tell(granted((lease(3),)))) == []  # no slot is free
    assert started(bench.tell(produced(1))) == [3]
    assert kinds(bench.tell(announced(V3), whole(V3))) == ["FetchSnapshot"]  # lease 2 began with the first
    assert kinds(bench.tell(produced(2))) == ["Deliver", "InstallSnapshot"]
    assert list(bench.scheduler.generating) == [3]


def test_a_worker_without_room_for_two_versions_swaps_between_generations_from_then_on() -> None:
    bench = Bench(swap="apart")
    bench.install(V1)
    bench.tell(granted((lease(1),)), announced(V2), whole(V2))
    assert kinds(bench.tell(ev.SnapshotTooLarge(PayloadId(V2), "full"))) == ["ReportInstalled"]
    assert started(bench.tell(granted((lease(2),)))) == []
    assert kinds(bench.tell(produced(1))) == ["Deliver", "InstallSnapshot"]
    assert started(bench.tell(ev.SnapshotInstalled(V2))) == [2]


def test_no_swap_during_a_batch_that_demands_its_version() -> None:
    bench = Bench(swap="during")
    bench.install(V1)
    bench.tell(granted((lease(1, exact=1),)), announced(V2))
    assert bench.tell(whole(V2)) == []
