"""The tables and rules that the planner composes: staleness, deadlines, groups, leases, evaluations, seeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.decide.lazy_heap import LazyHeap
from echo2.core.decide.seeds import group_seed, mix
from echo2.core.errors import InvariantError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, SnapshotRef
from echo2.head.decide import pacing
from echo2.head.decide.groups import MOVES, GroupBook, LeaseTable, PlannedGroup
from echo2.head.decide.state import Evaluation
from invariants import check


@pytest.mark.parametrize(
    ("step", "max_staleness", "publish_every", "expected"),
    [(0, 0, 1, 0), (5, 0, 1, 5), (5, 2, 1, 3), (1, 3, 1, 0), (5, 2, 3, 3), (6, 2, 3, 6), (7, 2, 3, 6), (8, 2, 3, 6)],
)
def test_fixed_version_is_the_oldest_published_one_that_the_bound_allows(
    step: int, max_staleness: int, publish_every: int, expected: int
) -> None:
    assert pacing.fixed_version(step, max_staleness, publish_every) == expected


@given(step=st.integers(0, 10_000), max_staleness=st.integers(0, 20), data=st.data())
def test_fixed_version_is_published_by_then_and_young_enough(
    step: int, max_staleness: int, data: st.DataObject
) -> None:
    publish_every = data.draw(st.integers(1, max_staleness + 1))
    version = pacing.fixed_version(step, max_staleness, publish_every)
    assert version % publish_every == 0
    assert version <= step  # so waiting for it cannot deadlock
    assert pacing.may_train(step, version, max_staleness)
    assert version == 0 or not pacing.may_train(step, version - publish_every, max_staleness)  # the oldest such


@given(version=st.integers(0, 100), max_staleness=st.integers(0, 10))
def test_pacing_and_consumption_agree(version: int, max_staleness: int) -> None:
    last = pacing.last_step(version, max_staleness)
    assert pacing.may_train(last, version, max_staleness)
    assert not pacing.may_train(last + 1, version, max_staleness)
    assert pacing.min_version(last, max_staleness) == version


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 50)),
            st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("due"), st.just(0), st.integers(0, 50)),
            st.tuples(st.just("that"), st.integers(0, 6), st.integers(0, 5)),
        )
    )
)
def test_deadlines_are_a_dictionary_with_a_smallest_value(actions: list[tuple[str, int, int]]) -> None:
    deadlines, model, since = LazyHeap[int, float](), dict[int, float](), dict[int, int]()
    for number, (action, key, at) in enumerate(actions):
        if action == "set":
            if model.get(key) != at:
                since[key] = number
            deadlines.set(key, at)
            model[key] = at
        elif action == "drop":
            deadlines.drop(key)
            model.pop(key, None)
        elif action == "that":
            in_order = sorted(model, key=lambda one: (model[one], since[one]))
            expected = next((one for one in in_order[:at] if one >= key), None)
            assert deadlines.first_that(lambda one, least=key: one >= least, at) == expected
        else:
            due = deadlines.pop_until(at)
            assert sorted(due) == sorted(k for k, when in model.items() if when <= at)
            assert [model[k] for k in due] == sorted(model[k] for k in due)
            model = {k: when for k, when in model.items() if when > at}
        assert deadlines.first() == min(model.values(), default=None)
        assert len(deadlines) == len(model)
        assert all(deadlines.get(k) == model.get(k) for k in range(6))


def test_a_deadline_that_is_moved_a_thousand_times_does_not_fill_the_heap() -> None:
    deadlines = LazyHeap[str, float]()
    for at in range(1000):
        deadlines.set("worker", float(at))
    assert deadlines.pop_until(998.0) == []
    assert deadlines.pop_until(999.0) == ["worker"]
    assert len(deadlines._heap) == 0


@pytest.mark.parametrize("before", sorted(MOVES))
@pytest.mark.parametrize("after", sorted(MOVES))
def test_a_group_makes_only_the_moves_of_the_table(before: str, after: str) -> None:
    book, record = GroupBook(), PlannedGroup(0, 0, before, oldest_version=0)
    book.restore(record)
    if after in MOVES[before]:
        book.move(record, after)
        assert record.state == after
        check(book)
    else:
        with pytest.raises(InvariantError, match=f"{before} -> {after}"):
            book.move(record, after)


def test_groups_are_queued_earliest_step_first_then_in_issue_order() -> None:
    book = GroupBook()
    for step in (1, 0, 1, 0):
        book.issue(step, 0.0)
    assert [book.pop_unit()[0].number for _ in range(4)] == [1, 3, 0, 2]


def test_a_unit_is_leased_whole_or_not_at_all() -> None:
    book = GroupBook(groups_per_unit=2)
    records = [book.issue(0, 0.0) for _ in range(4)]
    assert [record.number for record in book.pop_unit()] == [0, 1]
    for record in records[:2]:
        book.move(record, "leased")
    records[0].oldest_version = 0
    book.move(records[0], "delivered")
    book.move(records[1], "pending")  # its lease expired; the other group has a result already
    assert [record.number for record in book.pop_unit()] == [0, 1]


def test_retired_groups_are_issued_and_not_live() -> None:
    book = GroupBook()
    book.move(book.issue(3, 0.0), "retired")
    book.issue(3, 0.0)
    assert (book.num_issued(3), book.num_live(3)) == (2, 1)
    book.forget_below(4)
    assert (book.num_issued(3), book.num_live(3), len(book), book.next_number) == (0, 0, 0, 2)


def lease(lease_id: int, number: int, deadline: float = 10.0) -> Lease:
    return Lease(lease_id, GroupRef(RUN_POLICY, "train", number), 0, number, 4, 0, None, deadline, 10.0, 0)


def test_leases_are_found_by_id_group_and_worker_until_closed_once() -> None:
    table = LeaseTable()
    table.add("a", lease(1, 7))
    table.add("b", lease(2, 7, deadline=5.0))
    assert table.of_group(GroupRef(RUN_POLICY, "train", 7)) == (1, 2)
    assert (table.samples_of("a"), len(table.of_worker("a")), table.deadlines.first()) == (4, 1, 5.0)
    assert table.deadlines.pop_until(5.0) == [2]
    assert table.close(2) == ("b", lease(2, 7, deadline=5.0))
    check(table)
    with pytest.raises(KeyError):
        table.close(2)
    with pytest.raises(InvariantError, match="granted twice"):
        table.add("c", lease(1, 8))


def test_an_evaluation_takes_the_oldest_round_that_the_worker_has_reached() -> None:
    evaluation = Evaluation(RUN_POLICY, size=3, every=2, max_steps=5)
    assert [version for version in range(6) if evaluation.is_due(version)] == [0, 2, 4, 5]
    evaluation.start(SnapshotRef(RUN_POLICY, 1, 2), 0.0)
    evaluation.start(SnapshotRef(RUN_POLICY, 1, 0), 0.0)
    taken = evaluation.take(installed_version=1, num_groups=2)
    assert taken is not None
    assert taken == (0, [0, 1])
    evaluation.put_back(evaluation.group(0, 1))
    taken = evaluation.take(installed_version=2, num_groups=9)
    assert taken is not None
    assert taken == (0, [2, 1])
    assert evaluation.take(1, 1) is None  # round 2 asks for a newer worker
    evaluation.forget_after(1)
    assert list(evaluation.rounds) == [0]


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_mix_never_merges_two_values(a: int, b: int) -> None:
    assert (mix(a) == mix(b)) == (a == b)
    assert 0 <= mix(a) < 1 << 64


def test_a_seed_depends_on_run_kind_and_number() -> None:
    groups = [GroupRef(RUN_POLICY, kind, number) for kind in ("train", "eval") for number in range(100)]
    seeds = {group_seed(run, group) for run in range(3) for group in groups}
    assert len(seeds) == 600
    assert max(seeds) < 1 << 63
