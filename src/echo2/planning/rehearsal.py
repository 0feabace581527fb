"""A plan, rehearsed: the same machines, prices and times in the simulator, with the real control code."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.planning.plan import Plan, PlanInputs
from echo2.sim.report import Report
from echo2.sim.run import run_scenario
from echo2.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec

#: Steps that are simulated at most.
MAX_STEPS = 60
#: Of a step: the time between two heartbeats, so that a rehearsal of hours takes no longer than one of seconds.
HEARTBEATS_PER_STEP = 20
#: Steps without end: more than any plan takes.
TIME_LIMIT_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the simulator made of a plan. `idle_ratio` and `usd_per_step` include the cold start; what is steady, and
    `step_seconds`, is of the second half of the steps alone.
    """

    steps: int
    idle_ratio: float
    steady_idle_ratio: float
    mean_staleness: float
    max_staleness: int
    staleness: dict[int, float]
    step_seconds: float
    usd_per_step: float
    steady_usd_per_step: float
    seconds: float


def rehearse(plan: Plan, inputs: PlanInputs, seed: int = 0, train_spread: float = 0.0) -> Rehearsal:
    """Simulate the plan's first steps.

    Raises:
        InvariantError: a rule of the control code did not hold, or the run did not end: our bug.
    """
    scenario = scenario_of(plan, inputs, train_spread)
    return rehearsed(run_scenario(scenario, seed, keeps_events=False))


def rehearsed(report: Report) -> Rehearsal:
    """The figures of a simulated run that plans predict."""
    history, groups = report.history, max(1, sum(report.staleness.values()))
    steps = history.steps[len(history.steps) // 2 :]
    waited, trained = sum(one.wait_seconds for one in steps), sum(one.train_seconds for one in steps)
    step_seconds = (waited + trained) / max(1, len(steps))
    usd = history.usd + history.learner_usd
    shares = {age: count / groups for age, count in report.staleness.items()}
    return Rehearsal(
        steps=report.steps,
        idle_ratio=report.idle_ratio,
        steady_idle_ratio=waited / (waited + trained) if steps else 0.0,
        mean_staleness=sum(age * share for age, share in shares.items()),
        max_staleness=report.max_staleness,
        staleness=shares,
        step_seconds=step_seconds,
        usd_per_step=usd / max(1, report.steps),
        steady_usd_per_step=usd / report.seconds * step_seconds if report.seconds else 0.0,
        seconds=report.seconds,
    )


def scenario_of(plan: Plan, inputs: PlanInputs, train_spread: float = 0.0) -> Scenario:
    """The plan as a scenario. Snapshots take exactly T_bcast; machines that can be lost are lost and replaced."""
    train, steps = inputs.train_seconds, min(inputs.steps, MAX_STEPS)
    seconds = plan.prediction.step_seconds * steps + plan.broadcast_seconds + plan.prediction.run_seconds / inputs.steps
    heartbeat = max(0.05, train / HEARTBEATS_PER_STEP)
    reload_seconds = min(inputs.broadcast.reload_seconds, plan.broadcast_seconds)
    return Scenario(
        name="rehearsal",
        max_steps=steps,
        groups_per_step=inputs.groups_per_step,
        group_size=inputs.group_size,
        max_staleness=plan.max_staleness,
        publish_every=plan.publish_every,
        groups_per_batch=max(_batch(inputs, name) for name in plan.machines),
        lease_seconds=10 * seconds,
        heartbeat_seconds=heartbeat,
        lost_after_seconds=5 * heartbeat,
        generate_during_broadcast=inputs.generate_during_broadcast,
        faults_until_seconds=seconds,
        time_limit_seconds=TIME_LIMIT_FACTOR * seconds,
        workers=tuple(_workers(plan, inputs, name, reload_seconds) for name in plan.machines),
        learner=LearnerSpec(
            train_seconds=train,
            spread=train_spread,
            publish_seconds=0.0,
            checkpoint_every=steps,
            price_usd_per_hour=inputs.learner_usd_per_hour,
        ),
        broadcast=BroadcastSpec(scheme="fixed", seconds=plan.broadcast_seconds - reload_seconds),
    )


def _batch(inputs: PlanInputs, name: str) -> int:
    offer = next(offer for offer in inputs.offers if offer.name == name)
    return offer.groups_per_batch or inputs.groups_per_batch


def _workers(plan: Plan, inputs: PlanInputs, name: str, reload_seconds: float) -> WorkersSpec:
    offer = next(offer for offer in inputs.offers if offer.name == name)
    assert offer.rollouts_per_second is not None
    return WorkersSpec(
        count=plan.machines[name],
        capacity_groups=_batch(inputs, name),
        rollouts_per_second=offer.rollouts_per_second * offer.reliability,
        spread=offer.spread,
        install_seconds=reload_seconds,
        latency_seconds=min(0.05, inputs.train_seconds / 1000),
        bytes_per_second=max(1e9, offer.up_mbps * 1e6 / 8),
        life_seconds=offer.mean_life_hours * 3600,
        restart_seconds=offer.replace_seconds,
        price_usd_per_hour=offer.price_usd_per_hour,
    )
