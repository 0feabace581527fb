"""Dynamic sampling in whole simulated runs, with the planner, relays and ledger of production."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echo2.head.ledger.audit import audit
from echo2.planning.sim.scenario import HeadSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario
from worlds import judge, judge_replay

RESAMPLING = Scenario(
    max_steps=6,
    groups_per_step=6,
    group_size=2,
    groups_per_batch=3,
    max_failures=1_000_000,
    dynamic_sampling=True,
    flat_share=0.6,
    faults_until_seconds=200.0,
    learner=LearnerSpec(train_seconds=1.0, checkpoint_every=2),
)


def test_a_head_that_keeps_dying_replaces_each_flat_group_once() -> None:
    """It dies between a result and its retirement, between that and the replacement, and before the learner reports."""
    num_killed = 0
    for seed in range(12):
        scenario = replace(
            RESAMPLING,
            max_staleness=seed % 3,
            workers=(WorkersSpec(count=2),),
            head=HeadSpec(score_seconds=0.5, life_seconds=1.5, restart_seconds=0.5),
            learner=replace(RESAMPLING.learner, life_seconds=20.0),
        )
        report = run_scenario(scenario, seed)
        assert judge(report, scenario) + judge_replay(report, scenario) == [], f"seed {seed}"
        num_killed += report.killed["head"]
    assert num_killed > 300


def test_the_audit_counts_what_was_replaced(tmp_path: Path) -> None:
    report = run_scenario(RESAMPLING, 1, tmp_path / "ledger.sqlite")
    found = audit(tmp_path / "ledger.sqlite")
    assert found.is_balanced
    assert (found.trained, found.lost, found.doubled) == (36, 0, 0)
    assert found.retired == {"uninformative": sum(report.history.replaced.values())}
    assert 30 < found.retired["uninformative"] < 80  # at a share of 0.6 half as many again as are trained


def test_a_run_in_which_every_group_is_flat_goes_on() -> None:
    report = run_scenario(replace(RESAMPLING, flat_share=1.0), 1)
    assert report.finished
    assert set(report.history.replaced.values()) == {12}
    assert report.retired == {"uninformative": 12 * 6}
