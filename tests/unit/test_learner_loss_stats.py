"""The mismatch as sums: over any split, by lag, by worker, in a bounded number of names."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from echo2.config.rundir import FRESH_MISMATCH, FRESH_SURPRISE, FRESH_TOKENS
from echo2.learner.core.losses import make_loss
from echo2.learner.grpo.step_meter import MAX_WORKERS_NAMED, LossStats, Mismatch, breakdown, measure
from learner_cases import loss_tokens


def stats_of(log_ratio: list[float], sequence: list[int], lag: list[int], worker: list[int]) -> LossStats:
    """Under ppo, all advantages 1; workers are called a, b, c ..."""
    logp = torch.tensor(log_ratio, dtype=torch.float64) - 2.0
    tokens = loss_tokens([-2.0] * len(logp), [1.0] * len(logp), sequence, lag, worker)
    found = make_loss("ppo")(logp, tokens)
    return measure(found.loss_n.sum(), logp, tokens, found, None)


def k3(*log_ratios: float) -> float:
    return sum(math.exp(value) - 1 - value for value in log_ratios)


def test_effective_sample_size() -> None:
    assert LossStats().ess_ratio == 1.0
    # weights 2 and 1 (log ratios summed over each sequence): (2 + 1)^2 / (2 * (4 + 1))
    stats = stats_of([math.log(4.0), math.log(0.5), 0.0], [0, 0, 1], [0, 0, 0], [0, 0])
    assert stats.ess_ratio == pytest.approx(0.9)
    assert stats_of([15.0, 0.0], [0, 1], [0, 0], [0, 0]).weight == pytest.approx(11.0)  # clamped to 10, not exp(15)
    assert stats_of([-15.0, 0.0], [0, 1], [0, 0], [0, 0]).weight == pytest.approx(1.1)


def test_logs_are_clamped() -> None:
    stats = stats_of([50.0, -50.0], [0, 1], [0, 0], [0, 0])
    assert stats.abs_log_ratio == 40.0
    assert stats.k3 == pytest.approx(k3(20.0, -20.0))


def test_by_lag_and_by_worker() -> None:
    stats = stats_of([0.1, -0.2, 0.4, 0.0, 0.3], [0, 0, 1, 2, 2], [0, 3, 4, 32, 33], [1, 0, 1])
    assert {name: part.tokens for name, part in stats.by_lag.items()} == {"0": 1, "3_4": 2, "17_32": 1, "33_up": 1}
    assert stats.by_lag["3_4"].k3 == pytest.approx(k3(-0.2, 0.4))
    assert stats.by_lag["3_4"].dropped_positive == 1  # exp(.4) > 1.28
    assert stats.by_worker["b"].abs_log_ratio == pytest.approx(0.1 + 0.2 + 0.0 + 0.3)
    assert stats.by_worker["a"] == Mismatch(
        1.0, pytest.approx(0.4), pytest.approx(k3(0.4)), 1.0, 0.0, pytest.approx(0.6)
    )
    row = breakdown(stats)
    assert row["mismatch_kl/worker/a"] == pytest.approx(k3(0.4))
    assert row["mismatch/abs_log_ratio/worker/b"] == pytest.approx(0.6 / 4)
    assert row["loss/dropped_positive/lag_3_4"] == 0.5
    assert "mismatch_kl/lag_1" not in row
    assert "mismatch_kl/worker/others" not in row


@pytest.mark.parametrize("seed", range(5))
def test_any_split_adds_up(seed: int) -> None:
    rng = random.Random(seed)
    rows = [(rng.uniform(-1, 1), i, rng.randrange(9), rng.randrange(3)) for i in range(12) for _ in range(3)]
    cut = 3 * rng.randrange(1, 12)

    def part(chosen: list[tuple[float, int, int, int]]) -> LossStats:
        first = chosen[0][1]
        workers = [chosen[i][3] for i in range(0, len(chosen), 3)]
        return stats_of([r[0] for r in chosen], [r[1] - first for r in chosen], [r[2] for r in chosen], workers)

    whole, sums = part(rows), part(rows[:cut]) + part(rows[cut:])
    for name in (
        "tokens",
        "sequences",
        "entropy",
        "loss",
        "k3",
        "abs_log_ratio",
        "weight",
        "weight_squared",
        "ratio_max",
        "k3_max",
    ):
        assert getattr(sums, name) == pytest.approx(getattr(whole, name)), (name, seed)
    for table in ("by_lag", "by_worker", "fresh"):
        left, right = getattr(sums, table), getattr(whole, table)
        assert left.keys() == right.keys(), seed
        assert all(left[key].k3 == pytest.approx(right[key].k3) for key in left), (table, seed)


def test_a_worker_at_lag_0_is_measured_separately() -> None:
    stats = stats_of([0.1, -0.2, 0.4, 0.0, 0.3], [0, 0, 1, 2, 2], [0, 3, 0, 0, 1], [1, 0, 1])
    row = breakdown(stats)
    assert row[FRESH_MISMATCH + "a"] == pytest.approx(0.4)
    assert row[FRESH_MISMATCH + "b"] == pytest.approx((0.1 + 0.0) / 2)
    assert (row[FRESH_TOKENS + "a"], row[FRESH_TOKENS + "b"]) == (1, 2)
    assert not stats_of([0.1], [0], [1], [0]).fresh
    # Every logprob is its log ratio - 2, and the entropies are 1.
    assert row[FRESH_SURPRISE + "b"] == pytest.approx((0.9 + 1.0) / 2)


def test_a_row_names_few_workers_the_worst_of_all() -> None:
    num = MAX_WORKERS_NAMED + 5
    by_worker = {f"w{i}": Mismatch(10.0, float(i), 2.0 * i) for i in range(num)}
    row = breakdown(LossStats(by_worker=by_worker))
    named = {name.rpartition("/")[2] for name in row if "/worker/" in name}
    assert named == {f"w{i}" for i in range(5, num)} | {"others"}
    assert row["mismatch_kl/worker/others"] == pytest.approx(2.0 * (0 + 1 + 2 + 3 + 4) / 50)
    json.dumps(row, allow_nan=False)
