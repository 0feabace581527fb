"""The simulated engine that arithmetic limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.planning.sim.engine import FullEngine
from echo2.planning.sim.origin import cut


def run_out(engine: FullEngine, now: float) -> list[tuple[int, float]]:
    """Let all groups end; return each with its time."""
    ends, held = [], set(engine.ends)
    while (seconds := engine.keep(held)) is not None:
        now += seconds
        engine.advance(now)
        first = engine.pop_first()
        held.discard(first)
        ends.append((first, now))
    return ends


def test_a_group_is_slower_beside_more_than_fill_the_engine_and_no_quicker_beside_fewer() -> None:
    engine = FullEngine(2)
    for lease_id, seconds in enumerate((4.0, 4.0, 8.0, 8.0)):
        engine.begin(lease_id, seconds)
    # Four at half the pace until 8 s, and then two at the whole one.
    assert run_out(engine, 0.0) == [(0, 8.0), (1, 8.0), (2, 12.0), (3, 12.0)]


def test_a_group_that_comes_later_slows_the_others_from_then_on() -> None:
    engine = FullEngine(1)
    engine.begin(0, 4.0)
    assert engine.keep({0}) == 4.0
    assert engine.keep({0}) is None, "nothing has changed"
    engine.advance(2.0)
    engine.begin(1, 10.0)
    assert engine.keep({0, 1}) == 4.0
    engine.advance(3.0)
    assert engine.keep({1}) == 9.5, "the first was taken back"


@given(
    full=st.integers(1, 8),
    groups=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=20),
)
def test_no_engine_does_more_than_its_groups_or_its_pace_allow(full: int, groups: list[float]) -> None:
    engine = FullEngine(full)
    for lease_id, seconds in enumerate(groups):
        engine.begin(lease_id, seconds)
    ends = run_out(engine, 0.0)
    assert [groups[lease_id] for lease_id, _ in ends] == sorted(groups)
    last = ends[-1][1]
    assert last >= max(max(groups), sum(groups) / full) - 1e-6
    assert last <= max(groups) + sum(groups) / full + 1e-6
    if len(groups) <= full:
        assert last == pytest.approx(max(groups))


def test_workers_share_the_bytes_of_a_chunk() -> None:
    """A hundred thousand of them would hold a gigabyte of the same chunks."""
    digest = bytes(32)
    first, second = cut(digest, b"", 8), cut(bytes(bytearray(digest)), b"", 8)
    assert len(first) == 8
    assert all(first[name] is piece for name, piece in second.items())
