"""Scenario files of many runs, their tables, and what a wrong one is told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.core.errors import UserError
from echo2.planning import simulate
from echo2.planning.sim.scenario import BroadcastSpec, Case, Scenario, WorkersSpec, load_study
from invariants import run_scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "simulations"
SMALL = "max_steps = 4\ngroups_per_step = 4\n[[workers]]\ncount = 2\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_shipped_scenario_is_valid_and_has_a_description() -> None:
    for path in sorted(SCENARIOS.glob("*.toml")):
        study = load_study(path)
        assert study.cases, path
        assert len(study.about) > 40, path


def test_variants_and_sweeps_make_one_run_for_each_combination(tmp_path: Path) -> None:
    text = SMALL + '[sweep]\nworkers.count = [1, 2]\n"max_staleness" = [1, 2, 3]\n'
    text += '[[variants]]\nlabel = "a"\n[[variants]]\nlabel = "b"\n"learner.train_seconds" = 9.0\n'
    study = load_study(write(tmp_path / "many.toml", text))
    assert len(study.cases) == 12
    last = study.cases[-1]
    assert str(last) == "b, count 2, max_staleness 3"
    assert (last.scenario.workers[0].count, last.scenario.max_staleness) == (2, 3)
    assert last.scenario.learner.train_seconds == 9.0
    assert study.cases[0].scenario.learner.train_seconds != 9.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sweep]\nmax_stalness = [1]", "unknown key 'max_stalness'. Did you mean max_staleness"),
        ('[sweep]\n"workers.7.count" = [1]', r"there are 1 \[\[workers\]\], numbered from 0"),
        ("[sweep]\nmax_staleness = 3", "takes lists of values"),
        ("[broadcast]\nscheme = 'pigeon'", "pigeon"),
        ("[[workers]]\nprice_usd_per_hour = -1.0", ">= 0"),
        ("[[workers]]\nrollouts_per_second = inf", "<= 1000000000"),
        ("[[workers]]\nrollout_seconds = 0.0", "> 0"),
        ("[[workers]]\nloss = 1.5", "<= 1"),
        ("[[workers]]\nstraggler_factor = nan", ">= 1"),
        ("[[workers]]\ncount = 0", "there is no worker"),
        ("max_staleness = 1\npublish_every = 3", "waits for ever"),
        ('publish_every = "aut"', "publish_every"),
        ("deterministic = true\ndynamic_sampling = true", "excludes dynamic_sampling"),
        ('deterministic = true\norder = "frontier"', 'excludes order = "frontier"'),
        ("[[workers]]\nzone = 'east'\n[[outages]]\nzone = 'est'\nat_seconds = 1", "Did you mean east"),
        ("[[workers]]\noffer = 'spot'", "offers need activation = true"),
        ("generate_during_broadcast = false", "needs broadcast.scheme"),
    ],
)
def test_a_wrong_study_is_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_study(write(tmp_path / "wrong.toml", text))


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("star", [10.0, 10.0, 20.0]), ("chain", [10.0, 10.0, 10.5])],
)
def test_a_limited_stars_time_grows_with_its_workers_and_a_chains_does_not(scheme: str, expected: list[float]) -> None:
    spec = BroadcastSpec(scheme, 0.0, 100.0, 5.0, 20.0, 10.0)  # type: ignore[arg-type]
    assert [spec.arrival_seconds(count - 1, count) for count in (1, 2, 4)] == expected


def test_the_rate_of_a_worker_is_what_the_scenario_asks_for() -> None:
    spec = WorkersSpec(rollouts_per_second=3.0, capacity_groups=4, spread=0.4)
    scenario = Scenario(group_size=8, groups_per_batch=4)
    assert scenario.worker_rate(spec) == pytest.approx(3.0)
    assert scenario.group_seconds(spec) < 4 * 8 / 3.0  # a batch waits for its longest group


def test_the_simulated_rate_is_that_rate() -> None:
    """A fleet that is far too small is busy all the time: rollouts over time is its rate."""
    workers = (WorkersSpec(count=2, rollouts_per_second=3.0, capacity_groups=4, spread=0.3, latency_seconds=0.001),)
    scenario = Scenario(max_steps=20, max_staleness=2, workers=workers, faults_until_seconds=0.0)
    report = run_scenario(scenario, 1)
    assert report.steps * 16 * 8 / report.seconds == pytest.approx(2 * 3.0, rel=0.05)


@pytest.mark.slow
def test_workers_that_stand_still_during_a_broadcast_lose_exactly_that_time() -> None:
    """Equation (1): too few workers, so a period lasts T_bcast + kappa R / mu, and the learner waits for the rest."""
    workers = (WorkersSpec(count=4, capacity_groups=1, rollouts_per_second=0.5, spread=0.0, latency_seconds=0.001),)
    for generates, period in ((False, 40.0 + 64.0), (True, 64.0)):
        scenario = Scenario(
            max_steps=40,
            groups_per_step=16,
            max_staleness=3,
            publish_every=1,
            swap="during",
            lease_seconds=1000.0,
            generate_during_broadcast=generates,
            faults_until_seconds=0.0,
            workers=workers,
            broadcast=BroadcastSpec("fixed", 40.0),
        )
        report = run_scenario(scenario, 1)
        assert report.finished
        assert report.step_seconds == pytest.approx(period, rel=0.03)


def test_one_run_is_printed_as_text_and_many_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(simulate, "PROGRESS_EVENTS", 1)
    study = load_study(write(tmp_path / "two.toml", SMALL + "[sweep]\nmax_staleness = [1, 2]\n"))
    reports = simulate.simulate(study, seed=3)
    table = simulate.to_table(study, reports)
    assert [line.split("  ")[0] for line in table.splitlines()[1:3]] == ["max_staleness 1", "max_staleness 2"]
    assert "NOT FINISHED" not in table
    written = json.loads(json.dumps(simulate.to_json(study, reports)))
    assert [run["values"] for run in written["runs"]] == [{"max_staleness": 1}, {"max_staleness": 2}]
    told = capsys.readouterr().err.splitlines()
    steps = sum(report.steps for report in reports)
    assert [told[0], told[-1]] == [f"simulated {done} of {steps} steps" for done in (0, steps)]
    simulate.simulate(study, seed=3, quiet=True)
    assert capsys.readouterr().err == ""


def cost_of(case: Case) -> float:
    return run_scenario(case.scenario, 1, keeps_events=False).usd_per_step


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_table_2_and_figure_3a_come_out_as_the_paper_has_them() -> None:
    """Section 9.2 and table 2 of ECHO-2; what is fitted is said in the scenarios."""
    table = {case.label: cost_of(case) for case in load_study(SCENARIOS / "table2.toml").cases}
    assert table["full"] == pytest.approx(8.098, rel=0.002)
    assert table["no relays, 9"] == pytest.approx(8.432, rel=0.005)
    assert table["no relays, 10"] == pytest.approx(8.630, rel=0.008)  # simulated: 8.695
    assert table["no cost"] == pytest.approx(9.339, rel=0.002)
    costs = {case.label: cost_of(case) for case in load_study(SCENARIOS / "fig3a_cost.toml").cases}
    assert costs["verl sync"] == pytest.approx(10.26, rel=0.002)
    assert costs["verl async"] == pytest.approx(10.76, rel=0.002)
    saved = [1 - costs["ECHO-2, S = 3"] / costs[name] for name in ("verl sync", "verl async")]
    assert saved == pytest.approx([0.336, 0.367], abs=0.003)


def test_a_run_that_publishes_too_seldom_comes_to_wait_as_little_as_one_that_publishes_every_step() -> None:
    cases = {
        tuple(value for _, value in case.values): case for case in load_study(SCENARIOS / "publish_every.toml").cases
    }
    short = [replace(cases[9.0, every].scenario, max_steps=20) for every in (1, 4)]
    idle = [run_scenario(scenario, 1).steady_idle_ratio for scenario in short]
    assert max(idle) < 0.01  # 0 and .21 where the number stays


def test_figure_1_alternates_between_staleness_2_and_3() -> None:
    report = run_scenario(load_study(SCENARIOS / "fig1_staleness.toml").cases[0].scenario, 1)
    ages = {step: step - min(done.versions) for step, done in sorted(report.history.surviving().items())}
    assert [ages[step] for step in range(2, 12)] == [2, 3] * 5
