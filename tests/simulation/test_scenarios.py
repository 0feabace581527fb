"""The scenarios in simulations/: each finishes, keeps its bound, and shows what it is there to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo2.core.errors import UserError
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import HeadSpec, LearnerSpec, Scenario, WorkersSpec, load_study
from invariants import run_scenario
from worlds import judge, judge_replay

SCENARIOS = Path(__file__).resolve().parents[2] / "simulations"


def simulate(name: str, **changes: object) -> Report:
    (case,) = load_study(SCENARIOS / f"{name}.toml").cases
    scenario = replace(case.scenario, **changes)  # type: ignore[arg-type]
    report = run_scenario(scenario, seed=1)
    assert report.finished, report.to_text()
    assert report.max_staleness <= scenario.max_staleness
    assert sum(report.staleness.values()) == scenario.max_steps * scenario.groups_per_step
    return report


def test_the_steady_scenario_wastes_nothing() -> None:
    report = simulate("steady")
    assert (report.refused, report.retired, report.killed, report.fallbacks) == ({}, {}, {}, 0)
    assert set(report.leases) <= {"accepted", "superseded"}
    assert report.leases.get("superseded", 0) < 0.03 * report.leases["accepted"], report.leases
    assert report.idle_ratio < 0.25


@pytest.mark.slow
def test_a_wider_staleness_bound_keeps_the_learner_busier() -> None:
    idle = [simulate("steady", max_staleness=bound, max_steps=25).idle_ratio for bound in (0, 1, 2)]
    assert idle[0] > 0.4  # on-policy: sampling and training take turns
    assert idle[0] > 2 * idle[1] > 2 * idle[2]


def test_churn_kills_everything_and_loses_nothing() -> None:
    report = simulate("churn")
    assert {"head", "learner", "worker"} <= set(report.killed)
    assert report.fallbacks > 0
    assert report.leases["lost"] > 0
    assert report.history.evaluated[-1] == 40


def test_stragglers_are_superseded_and_do_not_age_anybody() -> None:
    report = simulate("stragglers")
    assert report.leases["superseded"] > 0
    assert report.max_staleness == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_machines_ten_times_slower_than_the_others_are_left_out(seed: int) -> None:
    """Second leases overtake all their groups, and they rest; the learner waited half of the time for them before."""
    quick = WorkersSpec(count=6, rollout_seconds=8.0, price_usd_per_hour=0.3)
    slow = WorkersSpec(count=2, rollout_seconds=80.0, price_usd_per_hour=0.3)
    scenario = Scenario(
        max_steps=40,
        max_staleness=4,
        heartbeat_seconds=5.0,
        faults_until_seconds=0.0,
        workers=(quick, slow),
        learner=LearnerSpec(train_seconds=8.0),
    )
    report = run_scenario(scenario, seed)
    assert report.finished
    assert report.steady_idle_ratio < 0.2, report.to_text()
    assert report.leases["superseded"] < 0.1 * report.leases["accepted"], report.to_text()


def test_the_report_is_text_for_people() -> None:
    text = simulate("steady", max_steps=3).to_text()
    for word in ("steady, seed 1: finished", "idle ratio", "staleness", "refused     none", "cost        $"):
        assert word in text


def test_a_run_without_workers_is_reported_as_not_finished() -> None:
    scenario = Scenario(workers=(WorkersSpec(joins_at_seconds=1e9),), time_limit_seconds=100.0)
    assert not run_scenario(scenario, 0).finished


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stalness = 2", r"unknown key 'max_stalness'. Did you mean max_staleness\?"),
        ("[learner]\ntrain_second = 2.0", r"\[learner\]: unknown key 'train_second'. Did you mean train_seconds\?"),
        ("[[workers]]\ncounts = 2", r"\[\[workers\]\]: unknown key 'counts'. Did you mean count\?"),
        ("max_steps = 'many'", "max_steps"),
        ("max_steps =", "not valid TOML"),
    ],
)
def test_a_wrong_scenario_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_study(path)


def test_the_error_names_a_missing_scenario_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read the scenario .*none\.toml"):
        load_study(tmp_path / "none.toml")


def test_a_link_that_is_still_receiving_is_not_abandoned() -> None:
    """A chunk takes two seconds and four are under way, so the last answer comes later than a call may be silent."""
    (case,) = load_study(SCENARIOS / "steady.toml").cases
    slow = (WorkersSpec(count=2, rollout_seconds=2.0, bytes_per_second=5e5),)
    scenario = replace(case.scenario, workers=slow, max_steps=3, groups_per_step=4)
    report = run_scenario(scenario, seed=1)
    assert report.finished
    assert not report.history.given_up


def test_a_judge_that_hangs_costs_time_and_nothing_else() -> None:
    """A step waits for the rewards of its last group."""
    quick = Scenario(max_steps=20, groups_per_step=4, workers=(WorkersSpec(count=2),), max_staleness=0)
    hanging = replace(quick, head=HeadSpec(stalled_rewards=0.5, stall_seconds=60.0))
    for seed in range(3):
        before, after = run_scenario(quick, seed), run_scenario(hanging, seed)
        assert judge(after, hanging) + judge_replay(after, hanging) == [], f"seed {seed}"
        assert after.retired == {}, f"seed {seed}"
        # Fifteen in sixteen steps have a group that stalls.
        assert after.seconds > before.seconds + 0.5 * 60.0 * quick.max_steps, f"seed {seed}"
