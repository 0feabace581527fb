"""The rate that a run asks of its workers: the formula's, unless fewer machines keep the learner as busy."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from echo2.head.fleet.decide import standby
from echo2.head.fleet.decide.forecast import WorkerKind, forecast
from echo2.head.fleet.decide.formulas import Demand, mu_target


@given(
    staleness=st.integers(1, 6),
    groups=st.integers(1, 16),
    rate=st.floats(0.2, 4.0),
    broadcast_seconds=st.floats(0.0, 20.0),
    spread=st.sampled_from((0.0, 0.3)),
)
def test_a_rate_that_gains_nothing_is_not_asked_for(
    staleness: int, groups: int, rate: float, broadcast_seconds: float, spread: float
) -> None:
    """It is at least what the learner consumes and at most what the formula asks for, and the learner hardly waits
    longer with it.
    """
    demand = Demand(32, 8, 1, staleness, 30.0, broadcast_seconds)
    kind, most = WorkerKind(rate, 1, groups, spread), math.ceil(mu_target(demand) / rate)
    found = standby._fewest(demand, kind, most)
    counts = [found, max(found, most)]
    idle = [forecast(demand, [replace(kind, count=count)], standby.STEPS).steady_idle_ratio for count in counts]
    least = math.ceil(32 * 8 / 30.0 / rate)
    assert least <= found <= max(most, least)
    assert idle[0] <= idle[1] + standby.LITTLE_MORE + 1e-9


def test_where_the_window_is_narrow_more_machines_than_keep_up_gain_nothing() -> None:
    """Of `make bench-wrong_settings`: 13.1 rollouts/s by the formula, and the learner waits for the last group."""
    narrow, wide = (Demand(32, 8, 1, staleness, 30.0, 6.5, rollout_seconds=32.0) for staleness in (2, 4))
    assert mu_target(narrow) > 13.0
    kind = WorkerKind(1.0, 1, 4, 0.1)
    assert [standby._fewest(demand, kind, math.ceil(mu_target(demand))) for demand in (narrow, wide)] == [9, 9]
