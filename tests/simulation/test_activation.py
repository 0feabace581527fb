"""Live activation in simulated worlds: enough and no more are active, what is lost is replaced, and nothing flaps."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from echo2.head.decide import commands as do
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import OutageSpec, Scenario, WorkersSpec, load_study
from invariants import run_scenario
from seeds import seeds

CHURN = Path(__file__).resolve().parents[2] / "simulations" / "churn_spot.toml"


def changes(report: Report) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """(time, worker) of each activation and each release."""
    found: dict[type[do.Command], list[tuple[float, str]]] = {do.ActivateWorker: [], do.ReleaseWorker: []}
    for life in report.history.lives:
        for _, now, commands in life:
            for command in commands:
                if isinstance(command, do.ActivateWorker | do.ReleaseWorker):
                    found[type(command)].append((now, command.worker_id))
    return found[do.ActivateWorker], found[do.ReleaseWorker]


def peace() -> Scenario:
    return replace(load_study(CHURN).cases[0].scenario, max_steps=50)


@cache
def peaceful() -> Report:
    return run_scenario(peace(), 1)


def test_a_stable_fleet_chooses_the_cheapest_sufficient_workers_once() -> None:
    report = peaceful()
    activated, released = changes(report)
    assert report.finished
    assert report.steady_idle_ratio <= 0.03
    assert {worker_id[:2] for _, worker_id in released[:24]} >= {"w1"}  # the dear ones go first of all
    assert 15 <= report.history.fleet[-1][2] <= 26  # 17.1 rollouts/s are needed, each has 1
    late = [at for at, _ in activated + released if at > 600.0]
    assert len(late) <= 4, late


def test_a_zone_that_dies_is_replaced_and_its_cheaper_machines_come_back() -> None:
    outage = OutageSpec("cheap", 600.0, 400.0)
    report = run_scenario(replace(peace(), outages=(outage,)), 1)
    activated, _ = changes(report)
    assert report.finished
    assert [worker_id for at, worker_id in activated if 600.0 < at < 700.0]
    assert report.idle_ratio < peaceful().idle_ratio + 0.05


def test_machines_ten_times_slower_than_advertised_are_released_without_delay_to_others() -> None:
    scenario = peace()
    slow = replace(scenario.workers[2], count=12)
    report = run_scenario(replace(scenario, max_steps=30, workers=(*scenario.workers[:2], slow)), 2)
    activated, released = changes(report)
    assert report.finished
    assert report.steady_idle_ratio <= 0.02
    assert len({who for _, who in released if who.startswith("w2")}) == 12
    assert not [who for _, who in activated if who.startswith("w2")]


def released_soon(report: Report) -> list[tuple[float, str]]:
    """Activations that were taken back within a minute."""
    activated, released = changes(report)
    return [(at, who) for at, who in activated for gone_at, other in released if other == who and 0 < gone_at - at < 60]


@pytest.mark.slow
def test_links_that_break_every_minute_cause_no_flapping() -> None:
    """Of the cheap zone, which does all the work in peace: each is cut off every minute, for 6 s in the median."""
    scenario = peace()
    flapping = replace(scenario.workers[0], cut_every_seconds=60.0, cut_seconds=6.0)
    reports = [run_scenario(replace(scenario, workers=(flapping, *scenario.workers[1:])), seed) for seed in range(1, 5)]
    for report in reports:
        assert report.finished
        assert report.leases["lost"] > 20  # else there is nothing to be seen
        assert not released_soon(report)
        assert len(changes(report)[1]) <= len(changes(peaceful())[1]) + 12
    assert statistics.mean(report.steady_idle_ratio for report in reports) <= 0.12  # .04 to .16, by the seed


def test_machines_are_rented_when_those_that_attend_are_too_few() -> None:
    scenario = peace()
    kinds = (replace(scenario.workers[0], count=6), replace(scenario.workers[1], offer="spot", restart_seconds=30.0))
    report = run_scenario(replace(scenario, workers=kinds), 1)
    rents = [c for life in report.history.lives for _, _, cs in life for c in cs if isinstance(c, do.RentMachine)]
    assert report.finished
    assert 10 <= len(rents) <= 20
    assert report.history.fleet[-1][2] >= 17
    assert report.steady_idle_ratio < 0.05


@pytest.mark.parametrize("seed", seeds(1, 2))
def test_a_head_that_dies_again_and_again_does_not_forget_what_it_has_rented(seed: int) -> None:
    """Machines take 200 s to come; the head lives for about 120 s. Who is on the way is not rented a second time, and
    work that was begun under an earlier head says nothing of anybody's rate.
    """
    scenario = peace()
    dear = replace(scenario.workers[1], count=80, offer="spot", restart_seconds=200.0)
    head = replace(scenario.head, life_seconds=120.0)
    kinds = (replace(scenario.workers[0], count=6), dear)
    report = run_scenario(replace(scenario, workers=kinds, head=head, faults_until_seconds=1500.0), seed)
    rents = [c for life in report.history.lives for _, _, cs in life for c in cs if isinstance(c, do.RentMachine)]
    assert report.finished, f"seed {seed}"
    assert report.killed["head"] >= 8, f"seed {seed}: {report.killed}"
    assert 10 <= len(rents) <= 26, f"seed {seed}: {len(rents)} rented"


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_nothing_flaps_in_random_fleets_with_random_losses(seed: int) -> None:
    """Who is activated replaces somebody who was lost, or fills a deficit; after that it stays. So there are not many
    more activations than losses and cuts, and nobody is released soon after it was activated.
    """
    rng = random.Random(seed)
    kinds = tuple(
        WorkersSpec(
            count=rng.randint(5, 20),
            rollouts_per_second=rng.uniform(0.5, 2.0),
            price_usd_per_hour=rng.uniform(0.1, 1.0),
            life_seconds=rng.choice([0.0, 600.0, 1500.0]),
            restart_seconds=rng.uniform(20.0, 200.0),
            cut_every_seconds=rng.choice([0.0, 200.0]),
        )
        for _ in range(rng.randint(1, 3))
    )
    scenario = replace(peace(), workers=kinds, faults_until_seconds=1500.0)
    report = run_scenario(scenario, seed)
    activated, _ = changes(report)
    losses = sum(report.killed.values())
    assert report.finished, f"seed {seed}"
    again = released_soon(report)
    assert not again, f"seed {seed}: released soon after activation: {again}"
    assert len(activated) <= 3 * losses + 25, f"seed {seed}: {len(activated)} activations, {losses} losses"
