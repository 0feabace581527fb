"""The paper's rule for choosing machines, beside which ours is tested."""

from __future__ import annotations

from collections.abc import Sequence

from echo2.head.fleet.decide.activation import Candidate, Selection, by_unit_cost, reaches


def choose_greedy(pool: Sequence[Candidate], target_rate: float) -> Selection:
    """The shortest prefix by price / rate that reaches the target."""
    chosen: list[Candidate] = []
    rate = 0.0
    for one in by_unit_cost(pool):
        if reaches(rate, target_rate):
            break
        chosen.append(one)
        rate += one.rate
    usd = sum(one.price_usd_per_hour for one in chosen)
    return Selection(tuple(one.worker_id for one in chosen), rate, usd, max(0.0, target_rate - rate))
