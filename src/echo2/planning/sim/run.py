"""One simulated run, from a scenario and a seed to a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echo2.core.errors import InvariantError
from echo2.planning.sim.fleet import Cut, SimWorker
from echo2.planning.sim.head import MortalLedger, SimHead
from echo2.planning.sim.learner import SimLearner
from echo2.planning.sim.network import HEAD, LEARNER, SimLink, SimNetwork
from echo2.planning.sim.report import History, Report, make_report
from echo2.planning.sim.scenario import Scenario, WorkersSpec
from echo2.planning.sim.world import Kill, SimWorld, Start

#: The learner runs close to the head.
LEARNER_LATENCY_SECONDS = 0.001
LEARNER_BYTES_PER_SECOND = 1e9
#: A fleet starts one machine every 0.1 s; a large fleet starts all its machines within this time.
JOINS_WITHIN_SECONDS = 60.0


#: Events between two calls of `progress`.
PROGRESS_EVENTS = 20_000

MakeWorker = Callable[[SimWorld, SimNetwork, str, WorkersSpec, Scenario, History], SimWorker]


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
