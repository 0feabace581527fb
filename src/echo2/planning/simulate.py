"""`echo2 simulate`: runs a scenario file with the real deciders and prints the report. `echo2 plan --rehearse` does so
with the machines, prices and times of a plan. `run_scenario` is one run, from a scenario and a seed to a report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from echo2.core.errors import InvariantError
from echo2.core.printable import PlainLines
from echo2.planning.plan import Plan
from echo2.planning.plan_inputs import PlanInputs
from echo2.planning.sim.fleet import Cut, SimWorker
from echo2.planning.sim.head import MortalLedger, SimHead
from echo2.planning.sim.learner import SimLearner
from echo2.planning.sim.report import History, Report, make_report
from echo2.planning.sim.scenario import BroadcastSpec, HeadSpec, LearnerSpec, Scenario, Study, WorkersSpec, load_study
from echo2.planning.sim.world import HEAD, LEARNER, Kill, SimLink, SimNetwork, SimWorld, Start

#: Maximum number of simulated steps.
MAX_STEPS = 60
#: Heartbeats in the time of one step, so that simulating steps of hours takes no longer than steps of seconds.
HEARTBEATS_PER_STEP = 20
#: Time limit, as a multiple of the predicted time; longer than any plan takes.
TIME_LIMIT_FACTOR = 5.0
#: Rewards that take longer than so many times the usual, and so much more, waited for a judge that hung.
LATE_FACTOR, LATE_SECONDS = 4.0, 1.0
#: The learner runs close to the head.
LEARNER_LATENCY_SECONDS = 0.001
LEARNER_BYTES_PER_SECOND = 1e9
#: A fleet starts one machine every 0.1 s; a large fleet starts all its machines within this time.
JOINS_WITHIN_SECONDS = 60.0
#: Events between two calls of `progress`.
PROGRESS_EVENTS = 20_000
MakeWorker = Callable[[SimWorld, SimNetwork, str, WorkersSpec, Scenario, History], SimWorker]


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
        head=_head(inputs),
    )


def _head(inputs: PlanInputs) -> HeadSpec:
    """Return a head whose rewards take as long as was measured. Those that are late waited for a judge that hung, and
    may have hung again."""
    if inputs.delays is None:
        return HeadSpec()
    usual = inputs.delays.at(0.5)
    late = [seconds - usual for seconds in inputs.delays.seconds if seconds > LATE_FACTOR * usual + LATE_SECONDS]
    share = min(0.9, len(late) / len(inputs.delays.seconds))
    stall_seconds = statistics.fmean(late) * (1.0 - share) if late else 0.0
    return HeadSpec(usual, stalled_rewards=share, stall_seconds=stall_seconds)


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
    """Simulate every run of the study with the same seed, and show how far it is unless `quiet`."""
    reports: list[Report] = []
    plain, total = PlainLines(quiet or sys.stderr.isatty()), sum(case.scenario.max_steps for case in study.cases)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("simulating", total=total)

        def report_progress(done: int, steps: int) -> None:
            bar.update(task, completed=done + steps)
            plain.print_due(f"simulated {done + steps} of {total} steps", is_last=done + steps == total)

        for case in study.cases:
            done = sum(report.steps for report in reports)
            reports.append(
                run_scenario(case.scenario, seed, keeps_events=False, progress=partial(report_progress, done))
            )
    return reports


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
        lines += report.useless_lines()
    lines.append("idle, s/step and wait are of the second half of the steps; the cold start is not in them.")
    return "\n".join(lines)


def run_scenario(
    scenario: Scenario,
    seed: int,
    ledger_path: Path = Path(":memory:"),
    keeps_events: bool = True,
    progress: Callable[[int], None] | None = None,
    check: Callable[[object], None] = lambda machine: None,
    make_worker: MakeWorker = SimWorker,
) -> Report:
    """Simulate one run to its end or its time limit. The same scenario and seed give the same report.

    `keeps_events`: the report's history can be replayed. `progress` is called now and then with the number of trained
    steps; `check` is called with each state machine after each of its events; `make_worker` may make workers that
    behave differently.

    Raises:
        InvariantError: an invariant is violated; the message names the seed and the time.
    """
    world, history = SimWorld(seed, check), History()
    ledger = MortalLedger(ledger_path)
    try:
        workers = build_world(world, scenario, seed, ledger, history, keeps_events, make_worker)
        while not history.ended and world.next_at <= scenario.time_limit_seconds and world.step():
            if progress is not None and world.num_events % PROGRESS_EVENTS == 0:
                progress(len(history.trained))
        for worker in workers:
            if worker.up:
                worker.pay()
        head = world.actors[HEAD]
        assert isinstance(head, SimHead)
        reasons = {worker.worker_id: head.planner.why_of_no_use(worker.worker_id) for worker in head.planner.fleet}
        history.of_no_use = {worker_id: why for worker_id, why in reasons.items() if why}
        if scenario.activation:
            history.usd = history.active_usd
        history.learner_usd = world.now / 3600 * scenario.learner.price_usd_per_hour
    except InvariantError as error:
        raise InvariantError(f"scenario {scenario.name!r}, seed {seed}, at {world.now:.3f} s: {error}") from error
    finally:
        ledger.close()
    return make_report(scenario, seed, history, world.now, world.num_events)


def build_world(
    world: SimWorld,
    scenario: Scenario,
    seed: int,
    ledger: MortalLedger,
    history: History,
    keeps_events: bool = True,
    make_worker: MakeWorker = SimWorker,
) -> list[SimWorker]:
    """Create all actors and links, and schedule every fault before `faults_until_seconds`. Return the workers."""
    network = SimNetwork(world)
    head = SimHead(world, network, scenario, seed, ledger, history, keeps_events)
    SimLearner(world, network, scenario, history)
    network.links[LEARNER] = SimLink(LEARNER_LATENCY_SECONDS, LEARNER_BYTES_PER_SECOND)
    world.post(0.0, HEAD, Start())
    world.post(0.1, LEARNER, Start())
    until = scenario.faults_until_seconds
    workers: list[SimWorker] = []
    for kind, spec in enumerate(scenario.workers):
        for index in range(spec.count):
            name = f"w{kind}-{index}"
            workers.append(make_worker(world, network, name, spec, scenario, history))
            head.dialable[name] = spec.is_dialable
            if spec.ticket:
                head.strangers.add(name)
            network.links[name] = SimLink(spec.latency_seconds, spec.bytes_per_second, spec.loss)
            if spec.offer:
                continue
            world.post(
                spec.joins_at_seconds + min(0.1 * index, JOINS_WITHIN_SECONDS * index / spec.count), name, Start()
            )
            plan_faults(world, name, Kill(), spec.life_seconds, until)
            plan_faults(world, name, Cut(), spec.cut_every_seconds, until)
    plan_outages(world, scenario)
    plan_faults(world, LEARNER, Kill(), scenario.learner.life_seconds, until)
    plan_faults(world, HEAD, Kill(), scenario.head.life_seconds, until)
    return workers


def plan_outages(world: SimWorld, scenario: Scenario) -> None:
    """Schedule the faults that strike a whole zone."""
    for outage in scenario.outages:
        for kind, spec in enumerate(scenario.workers):
            for index in range(spec.count if spec.zone == outage.zone else 0):
                fault = Kill() if outage.kind == "death" else Cut(outage.seconds)
                world.post_always(outage.at_seconds, f"w{kind}-{index}", fault)


def plan_faults(world: SimWorld, actor: str, fault: object, mean_seconds: float, until_seconds: float) -> None:
    """Schedule `fault` for this actor at random times, `mean_seconds` apart on average, up to `until_seconds`."""
    at = world.soon(mean_seconds) if mean_seconds > 0 else until_seconds
    while at < until_seconds:
        world.post_always(at, actor, fault)
        at += world.soon(mean_seconds)
