"""The planner and the relays in random worlds: whatever dies, is lost or comes late, at whatever instant, every rule
holds.

Each seed draws a run and its machines (`worlds.random_scenario`) and is simulated with the production planner, relays
and ledger. `invariants.check` runs after every event; `worlds.judge` reads the end. A failure prints the seed:
to see it again,

PYTHONPATH=src:tests python -c "from worlds import *; print(judge_seed(SEED))"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2.head.ledger.audit import audit
from echo2.planning.simulate import run_scenario as run_unchecked
from invariants import run_scenario
from lying_worlds import judge_lying
from seeds import seeds
from worlds import HOSTILE, calm, hostile_scenario, judge_forging, judge_hostile, judge_seed, random_scenario

SEEDS_A_BLOCK = 25


def judge_block(first: int, judge: Callable[[int], list[str]] = judge_seed, count: int = SEEDS_A_BLOCK) -> None:
    wrong = {seed: found for seed in range(first, first + count) if (found := judge(seed))}
    assert not wrong, "\n".join(f"seed {seed}: {found}" for seed, found in wrong.items())


@pytest.mark.parametrize("block", seeds(2, 4))
def test_every_rule_holds_in_random_worlds(block: int) -> None:
    judge_block(SEEDS_A_BLOCK * block)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 101_000, SEEDS_A_BLOCK))
def test_every_rule_holds_in_more_random_worlds(first: int) -> None:
    judge_block(first)


def test_strangers_that_mean_harm_never_stop_a_run_and_supply_a_bounded_share() -> None:
    judge_block(0, judge_hostile, 8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200_000, 201_000, SEEDS_A_BLOCK))
def test_harmful_strangers_never_stop_a_run_in_more_worlds(first: int) -> None:
    judge_block(first, judge_hostile)


def test_forged_groups_are_not_trained_on_and_honest_strangers_stay() -> None:
    judge_block(0, judge_forging, 8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300_000, 301_000, SEEDS_A_BLOCK))
def test_forged_groups_are_not_trained_on_in_more_worlds(first: int) -> None:
    judge_block(first, judge_forging)


def test_random_lies_do_not_pass_the_checks_and_honest_groups_do() -> None:
    judge_block(0, judge_lying, 5)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(400_000, 400_200, SEEDS_A_BLOCK))
def test_random_lies_do_not_pass_the_checks_in_more_worlds(first: int) -> None:
    judge_block(first, judge_lying)


def test_groups_of_a_forger_that_did_not_rejoin_a_new_head_do_not_count_against_others() -> None:
    assert judge_forging(300_185) == []


@pytest.mark.slow
def test_the_hostile_worlds_hold_every_kind_of_harm() -> None:
    kinds = {getattr(spec, "hostile", "") for seed in range(30) for spec in hostile_scenario(seed).workers}
    assert kinds == {"", *HOSTILE}
    refused: set[str] = set()
    leases: set[str] = set()
    for seed in range(30):
        report = run_scenario(hostile_scenario(seed), seed)
        refused, leases = refused | set(report.refused), leases | set(report.leases)
    assert "malformed" in refused
    assert {"accepted", "failed", "malformed", "expired", "superseded", "lost"} <= leases


@pytest.mark.parametrize("half", seeds(1, 2))
def test_no_group_is_lost_or_doubled_in_the_ledger_of_a_random_world(tmp_path: Path, half: int) -> None:
    for seed in range(6 * half, 6 * half + 6):
        path = tmp_path / f"{seed}.sqlite"
        scenario = random_scenario(seed)
        report = run_scenario(scenario, seed, path)
        found = audit(path)
        trained = {number for done in report.history.surviving().values() for number in done.numbers}
        assert (seed, found.lost, found.doubled, found.open) == (seed, 0, 0, 0) or report.retired, found
        assert found.is_balanced
        assert (seed, found.lost, found.doubled, found.trained) == (seed, 0, 0, len(trained)), found
        assert found.max_staleness == report.max_staleness <= scenario.max_staleness


@pytest.mark.parametrize("half", seeds(1, 2))
def test_faults_do_not_change_the_weights_of_a_deterministic_run(half: int) -> None:
    num_compared = 0
    for seed in range(60 * half, 60 * half + 60):
        scenario = random_scenario(seed)
        if not scenario.deterministic or scenario == calm(scenario):
            continue
        faulty = run_unchecked(scenario, seed)
        if faulty.finished and not faulty.retired:
            num_compared += 1
            assert faulty.history.weights == run_unchecked(calm(scenario), seed).history.weights, f"seed {seed}"
    assert num_compared > 5


def test_the_same_seed_is_the_same_world() -> None:
    for seed in (10, 57):
        assert run_scenario(random_scenario(seed), seed) == run_scenario(random_scenario(seed), seed)


@pytest.mark.slow
def test_the_random_worlds_reach_what_they_are_meant_to_attack() -> None:
    """Guards the generator: if nothing ever died or fell back, the tests above would prove nothing."""
    reports = [run_unchecked(random_scenario(seed), seed) for seed in range(80)]
    killed = {name for report in reports for name in report.killed}
    refused = {word for report in reports for word in report.refused}
    outcomes = {name for report in reports for name in report.leases}
    assert killed == {"head", "learner", "worker"}
    assert {"late", "duplicate", "malformed"} <= refused
    assert {"accepted", "expired", "lost", "failed", "revoked"} <= outcomes
    within = sum((report.history.killed_within for report in reports), Counter())
    assert min(within["transaction"], within["effects"]) > 10  # the driver itself is killed, too
    assert sum(report.fallbacks for report in reports) > 20
    assert max(report.max_staleness for report in reports) == 6  # the bound is reached, so it is not vacuous
