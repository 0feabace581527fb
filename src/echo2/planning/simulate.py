"""`echo2 simulate`: runs a scenario file with the real deciders and prints the report. `echo2 plan --rehearse` does so
with the machines, prices and times of a plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from echo2.planning.plan import Plan
from echo2.planning.plan_inputs import PlanInputs
from echo2.planning.sim.report import Report
from echo2.planning.sim.run import run_scenario
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, Study, WorkersSpec, load_study

#: Maximum number of simulated steps.
MAX_STEPS = 60
#: Heartbeats in the time of one step, so that simulating steps of hours takes no longer than steps of seconds.
HEARTBEATS_PER_STEP = 20
#: Time limit, as a multiple of the predicted time; longer than any plan takes.
TIME_LIMIT_FACTOR = 5.0


def rehearse(plan: Plan, inputs: PlanInputs, seed: int = 0) -> Report:
    """Simulate the plan's first steps.

    Raises:
        InvariantError: an invariant of the control code was violated, or the run did not end: a bug in echo2.
    """
    return run_scenario(scenario_of(plan, inputs), seed, keeps_events=False)


def scenario_of(plan: Plan, inputs: PlanInputs) -> Scenario:
    """Return the plan as a scenario. Broadcasts take exactly T_bcast; unreliable machines are lost and replaced."""
    train, steps = inputs.train_seconds, min(inputs.steps, MAX_STEPS)
    seconds = plan.prediction.step_seconds * steps + plan.broadcast_seconds + plan.prediction.run_seconds / inputs.steps
    heartbeat = max(0.05, train / HEARTBEATS_PER_STEP)
    return Scenario(
        name="rehearsal",
        max_steps=steps,
        groups_per_step=inputs.groups_per_step,
        group_size=inputs.group_size,
        max_staleness=plan.max_staleness,
        publish_every=plan.publish_every,
        groups_per_batch=max(inputs.batch(inputs.offer(name)) for name in plan.machines),
        lease_seconds=10 * seconds,
        heartbeat_seconds=heartbeat,
        generate_during_broadcast=inputs.generate_during_broadcast,
        faults_until_seconds=seconds,
        time_limit_seconds=TIME_LIMIT_FACTOR * seconds,
        workers=tuple(_workers(plan, inputs, name) for name in plan.machines),
        learner=LearnerSpec(
            train_seconds=train,
            publish_seconds=0.0,
            checkpoint_every=steps,
            price_usd_per_hour=inputs.learner_usd_per_hour,
        ),
        broadcast=BroadcastSpec(scheme="fixed", seconds=plan.broadcast_seconds),
    )


def _workers(plan: Plan, inputs: PlanInputs, name: str) -> WorkersSpec:
    offer = inputs.offer(name)
    assert offer.rollouts_per_second is not None
    return WorkersSpec(
        count=plan.machines[name],
        capacity_groups=inputs.batch(offer),
        rollouts_per_second=offer.rollouts_per_second * offer.reliability,
        spread=offer.spread,
        install_seconds=0.0,
        latency_seconds=min(0.05, inputs.train_seconds / 1000),
        bytes_per_second=max(1e9, offer.up_mbps * 1e6 / 8),
        life_seconds=offer.mean_life_hours * 3600,
        restart_seconds=offer.replace_seconds,
        price_usd_per_hour=offer.price_usd_per_hour,
    )


def run(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: the scenario is wrong.
    """
    study = load_study(options.scenario)
    reports = simulate(study, options.seed, quiet=options.json)
    if options.json:
        print(json.dumps(to_json(study, reports), indent=1))
    elif len(reports) == 1:
        print(reports[0].to_text())
    else:
        print(to_table(study, reports))
    return 0 if all(report.finished for report in reports) else 1


def simulate(study: Study, seed: int, quiet: bool = False) -> list[Report]:
    """Simulate every run of the study with the same seed, and show a progress bar if stderr is a terminal."""
    reports: list[Report] = []
    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("simulating", total=sum(case.scenario.max_steps for case in study.cases))
        for case in study.cases:
            tell = partial(_tell, bar, task, sum(report.steps for report in reports))
            reports.append(run_scenario(case.scenario, seed, keeps_events=False, progress=tell))
    return reports


def _tell(bar: Progress, task: TaskID, done: int, steps: int) -> None:
    bar.update(task, completed=done + steps)


def to_json(study: Study, reports: list[Report]) -> dict[str, Any]:
    """Return all runs as plain values, for `--json`."""
    runs = [
        {"label": case.label, "values": dict(case.values), **report.to_dict()}
        for case, report in zip(study.cases, reports, strict=True)
    ]
    return {"scenario": study.name, "about": study.about, "runs": runs}


def to_table(study: Study, reports: list[Report]) -> str:
    """Return a table with one line per run."""
    width = max(len(str(case)) for case in study.cases)
    head = f"{study.name:<{width}}  workers   idle  s/step  wait/period  staleness mean, max  broadcast    $/step"
    lines = [head]
    for case, report in zip(study.cases, reports, strict=True):
        waits = report.steady_idle_ratio * report.step_seconds * case.scenario.publish_every
        lines.append(
            f"{case!s:<{width}}  {report.max_workers:>7}  {report.steady_idle_ratio:>5.1%}  {report.step_seconds:>6.4g}"
            f"  {waits:>9.1f} s  {report.mean_staleness:>14.2f}, {report.max_staleness:>3}"
            f"  {report.broadcast_seconds:>7.1f} s  {report.usd_per_step:>8.4f}"
            + ("" if report.finished else "  NOT FINISHED")
        )
    lines.append("idle, s/step and wait are of the second half of the steps; the cold start is not in them.")
    return "\n".join(lines)
