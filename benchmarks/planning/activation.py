"""Choosing machines: the paper's greedy rule, ours, and random choice, against the exact optimum over random pools.

The optimum is found by dynamic programming over whole rates (they are drawn as whole hundredths of a rollout a second);
that shares no code with what it judges. NoCost is the paper's ablation: machines in random order until the rate is
there, the mean of 20 orders. A gap is cost / optimum - 1.

    make bench-activation                  # 200 pools of each family; writes benchmarks/results/
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recording import quantile, save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from echo2.head.fleet.decide.activation import Candidate, Selection, by_unit_cost, choose, reaches

UNIT = 0.01  # rollouts per second
RANDOM_ORDERS = 20
#: price in $/h and rate in units of a card: the paper's two, and others of their kind.
CARDS = ((0.35, 31), (0.22, 17), (0.61, 48), (1.40, 70), (3.06, 90))


def choose_greedy(pool: Sequence[Candidate], target_rate: float) -> Selection:
    """The paper's rule: the shortest prefix by price / rate that reaches the target."""
    chosen: list[Candidate] = []
    rate = 0.0
    for one in by_unit_cost(pool):
        if reaches(rate, target_rate):
            break
        chosen.append(one)
        rate += one.rate
    usd = sum(one.price_usd_per_hour for one in chosen)
    return Selection(tuple(one.worker_id for one in chosen), rate, usd, max(0.0, target_rate - rate))


def kinds_pool(rng: random.Random) -> list[tuple[int, float]]:
    """Offers: a few kinds of equal machines, prices within 30 % of the usual."""
    pool = []
    for price, rate in rng.sample(CARDS, rng.randint(2, len(CARDS))):
        mine = round(price * rng.uniform(0.7, 1.3), 3)
        pool += [(rate, mine)] * rng.randint(1, 20)
    return pool


def single_pool(rng: random.Random) -> list[tuple[int, float]]:
    """Every machine its own rate and price, as measured rates are."""
    return [(rng.randint(10, 100), round(rng.uniform(0.1, 2.0), 3)) for _ in range(rng.randint(10, 60))]


def alike_pool(rng: random.Random) -> list[tuple[int, float]]:
    """Prices that follow rates closely: the hardest to tell apart."""
    return [
        (rate, round(rate * rng.uniform(0.011, 0.013), 3))
        for rate in (rng.randint(10, 100) for _ in range(rng.randint(10, 60)))
    ]


def lumpy_pool(rng: random.Random) -> list[tuple[int, float]]:
    """Few large machines, cheap per rollout, among many small ones."""
    large = [(rng.randint(300, 900), round(rng.uniform(2.0, 6.0), 3)) for _ in range(rng.randint(2, 6))]
    return large + [(rng.randint(10, 40), round(rng.uniform(0.15, 0.5), 3)) for _ in range(rng.randint(5, 40))]


FAMILIES: dict[str, Callable[[random.Random], list[tuple[int, float]]]] = {
    "kinds of machines": kinds_pool,
    "all different": single_pool,
    "nearly alike": alike_pool,
    "a few large": lumpy_pool,
}


def optimum(pool: Sequence[tuple[int, float]], target: int) -> float:
    """The least price of machines whose whole rates add up to the target."""
    least = np.full(target + 1, np.inf)
    least[0] = 0.0
    for rate, price in pool:
        rate = min(rate, target)
        with_it = np.full(target + 1, np.inf)
        with_it[rate:] = least[: target + 1 - rate] + price
        with_it[target] = min(with_it[target], least[target - rate :].min() + price)
        least = np.minimum(least, with_it)
    return float(least[target])


def random_usd(pool: Sequence[tuple[int, float]], target: int, rng: random.Random) -> float:
    costs = []
    for _ in range(RANDOM_ORDERS):
        rate, usd = 0, 0.0
        for one in rng.sample(pool, len(pool)):
            if rate >= target:
                break
            rate, usd = rate + one[0], usd + one[1]
        costs.append(usd)
    return statistics.fmean(costs)


def one_pool(family: str, seed: int) -> dict[str, float]:
    rng = random.Random(f"{family} {seed}")
    pool = FAMILIES[family](rng)
    target = max(1, int(sum(rate for rate, _ in pool) * rng.uniform(0.1, 0.8)))
    machines = [Candidate(f"m{at:03}", rate * UNIT, price) for at, (rate, price) in enumerate(pool)]
    best = optimum(pool, target)
    started = time.perf_counter()
    ours = choose(machines, target * UNIT)
    seconds = time.perf_counter() - started
    if ours.usd_per_hour < best * (1 - 1e-9):
        raise AssertionError(f"family {family!r}, seed {seed}: below the optimum, so one of the two is wrong")
    return {
        "greedy": choose_greedy(machines, target * UNIT).usd_per_hour / best - 1,
        "no search": choose(machines, target * UNIT, max_nodes=0).usd_per_hour / best - 1,
        "ours": ours.usd_per_hour / best - 1,
        "random": random_usd(pool, target, rng) / best - 1,
        "milliseconds": 1000 * seconds,
    }


def summary(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for rule in ("greedy", "no search", "ours", "random"):
        gaps = [row[rule] for row in rows]
        figures[rule] = {"mean": statistics.fmean(gaps), "p95": quantile(gaps, 0.95), "max": max(gaps)}
        figures[rule]["optimal"] = sum(gap < 1e-9 for gap in gaps) / len(gaps)
    figures["milliseconds"] = {
        "mean": statistics.fmean(row["milliseconds"] for row in rows),
        "max": max(row["milliseconds"] for row in rows),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=200, help="pools of each family")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    table = Table(title="Cost above the optimum")
    for heading in ("pools", "rule", "mean", "p95", "max", "optimal", "ms"):
        table.add_column(heading, justify="left" if heading in ("pools", "rule") else "right")
    figures: dict[str, Any] = {}
    for family in FAMILIES:
        rows = [one_pool(family, seed) for seed in track(range(options.pools), family, transient=True)]
        figures[family] = found = summary(rows)
        for rule in ("greedy", "no search", "ours", "random"):
            gap = found[rule]
            took = f"{found['milliseconds']['mean']:.1f}" if rule == "ours" else ""
            cells = [f"{gap[name]:.2%}" for name in ("mean", "p95", "max")]
            table.add_row(family if rule == "greedy" else "", rule, *cells, f"{gap['optimal']:.0%}", took)
    Console().print(table)
    print(f"written to {save('activation', {'pools': options.pools, 'families': figures}, options.out)}")


if __name__ == "__main__":
    main()
