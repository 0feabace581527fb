"""Random worlds for the properties of the deciders, and what must be true of every run in them.

`random_scenario(seed)` draws a small run and its machines; `judge(report, scenario)` says what is wrong with a report,
as a list of sentences. The planner's and the relays' invariants are checked by `invariants` after every event.

    PYTHONPATH=src:tests:benchmarks/strangers python tests/worlds.py judge_forging 1000 2000  # these seeds
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import fields, replace
from typing import Any

from hostile_workers import HostileSpec

from echo2.core.errors import InvariantError
from echo2.core.types import SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import pacing
from echo2.head.decide.groups import TOP_UPS_MAX
from echo2.head.decide.planner import Planner
from echo2.head.decide.results import RESAMPLED_MAX
from echo2.head.fleet.decide.fleet import LOOK_AHEAD
from echo2.head.strangers.decide.checks import UNTRUSTED
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import HeadSpec, LearnerSpec, Scenario, WorkersSpec
from invariants import run_scenario

#: Virtual seconds that a run may take after the last fault, before it counts as deadlocked.
CALM_SECONDS = 4000.0


def random_scenario(seed: int) -> Scenario:
    """Anything may happen: any S in 0..6, any allowed kappa, every fault at every rate."""
    rng = random.Random(seed)
    max_staleness = rng.randint(0, 6)
    deterministic = rng.random() < 0.4
    faults_until = rng.choice([0.0, 60.0, 200.0])
    workers = tuple(random_workers(rng, faults_until > 0) for _ in range(rng.randint(1, 3)))
    slowest = max(spec.rollout_seconds for spec in workers)
    scenario = Scenario(
        name=f"random {seed}",
        max_steps=rng.randint(1, 12),
        groups_per_step=rng.randint(1, 9),
        group_size=rng.randint(2, 4),
        max_staleness=max_staleness,
        publish_every=rng.randint(1, max_staleness + 1),
        deterministic=deterministic,
        groups_per_batch=rng.randint(1, 5),
        order="any" if deterministic else rng.choice(["any", "frontier"]),
        swap="between" if deterministic else rng.choice(["between", "during"]),
        lease_seconds=rng.uniform(6.0, 20.0) * slowest + 10.0,
        max_failures=1_000_000,
        eval_size=rng.choice([0, 0, 3, 11]),
        eval_every=rng.randint(0, 3),
        snapshot_chunks=rng.choice([1, 3, 20]),
        chunk_bytes=100_000,
        delta_chance=rng.choice([0.0, 0.5, 1.0]),
        peers=rng.choice(["star", "star", "trees", "trees"]),
        fan_out=rng.randint(1, 4),
        faults_until_seconds=faults_until,
        time_limit_seconds=faults_until + CALM_SECONDS,
        workers=workers,
        learner=LearnerSpec(
            train_seconds=rng.uniform(0.1, 5.0),
            spread=rng.uniform(0.0, 1.0),
            publish_seconds=rng.uniform(0.01, 3.0),
            checkpoint_every=rng.randint(1, 4),
            keep_checkpoints=rng.randint(1, 3),
            life_seconds=rng.choice([0.0, 15.0, 60.0]),
        ),
        head=HeadSpec(score_seconds=rng.uniform(0.0, 2.0), life_seconds=rng.choice([0.0, 10.0, 60.0])),
    )
    passes = random.Random(f"passes of {seed}").choice([0.0, 0.0, 0.1, 1.0])
    adapters = random.Random(f"base model of {seed}")
    base_model, base_chunks = adapters.choice([0, 1]), adapters.choice([1, 10, 60])
    scenario = replace(scenario, base_model=base_model, base_chunks=base_chunks)
    scenario = replace(scenario, head=replace(scenario.head, pass_seconds=passes))
    return with_dials(with_failures(scenario, seed), seed)


def with_failures(scenario: Scenario, seed: int) -> Scenario:
    """In some worlds the environment or the reward of single rollouts fails, which a deterministic run would repeat."""
    rng = random.Random(f"rollouts of {seed}")
    if scenario.deterministic:
        return scenario
    workers = (replace(spec, rollout_failures=rng.choice([0.0, 0.15, 0.5])) for spec in scenario.workers)
    head = replace(scenario.head, reward_failures=rng.choice([0.0, 0.1, 0.4]))
    size = scenario.group_size + rng.choice([0, 4])
    scenario = replace(scenario, group_size=size, workers=tuple(workers), head=head)
    # A group that needs more than are usually left would be retired again and again: no deadlock, but no end either.
    fails = max(1 - (1 - spec.rollout_failures) * (1 - head.reward_failures) for spec in scenario.workers)
    usually_left = round(size * (1 - fails ** (1 + TOP_UPS_MAX)))
    return replace(scenario, min_group=min(rng.randint(2, size), max(2, usually_left)))


def with_dials(scenario: Scenario, seed: int) -> Scenario:
    """Some worlds replace uninformative groups; deterministic ones do not."""
    rng = random.Random(f"dials of {seed}")
    if scenario.deterministic:
        return scenario
    if rng.random() < 0.5:
        shares = rng.choice([0.2, 0.6, 1.0])
        scenario = replace(scenario, dynamic_sampling=True, flat_share=shares)
    return scenario


HOSTILE: tuple[Any, ...] = ("holds", "holds_some", "fails", "malformed", "junk", "claims")


def hostile_spec(spec: WorkersSpec, **changes: Any) -> HostileSpec:
    """Workers like these that mean harm."""
    return HostileSpec(**{entry.name: getattr(spec, entry.name) for entry in fields(spec)} | changes)


def hostile_scenario(seed: int) -> Scenario:
    """A random world whose own workers do not fail, with honest strangers and some that mean harm, many of one ticket;
    in some worlds all are strangers. Three failures in a row would stop the run.
    """
    scenario, rng = random_scenario(seed), random.Random(f"liars of {seed}")
    own = tuple(replace(spec, joins_at_seconds=0.0) for spec in calm(scenario).workers)
    quiet = {"life_seconds": 0.0, "cut_every_seconds": 0.0, "loss": 0.0}
    kinds = [replace(spec, **quiet) for spec in own]
    strangers = [
        hostile_spec(rng.choice(kinds), count=rng.randint(1, 8), ticket=rng.choice("abc"), hostile=rng.choice(HOSTILE))
        for _ in range(rng.randint(1, 3))
    ]
    honest = [replace(rng.choice(kinds), ticket="honest")] if rng.random() < 0.5 else []
    if rng.random() < 0.25:
        kinds = [replace(spec, ticket="honest") for spec in kinds]
    return replace(
        scenario,
        max_failures=3,
        head=calm(scenario).head,
        workers=(*kinds, *honest, *strangers),
        time_limit_seconds=scenario.faults_until_seconds + 5 * CALM_SECONDS,
    )


def supplied(report: Report, scenario: Scenario) -> dict[int, dict[str, int]]:
    """Of each step that was trained: the samples of each stranger's ticket."""
    tickets = {f"w{at}-{n}": spec.ticket for at, spec in enumerate(scenario.workers) for n in range(spec.count)}
    sizes: dict[int, int] = {}
    of_group: dict[int, dict[str, int]] = {}
    steps: dict[int, dict[str, int]] = {}
    for command in (command for life in report.history.lives for _, _, answer in life for command in answer):
        if isinstance(command, do.GrantLeases):
            sizes.update((lease.lease_id, lease.num_samples) for lease in command.leases)
        elif isinstance(command, do.AcceptDelivery) and command.group.kind == "train":
            given, ticket = of_group.setdefault(command.group.number, {}), tickets[command.worker_id]
            given[ticket] = given.get(ticket, 0) + sizes[command.lease_id]
        elif isinstance(command, do.RecordStep):
            steps[command.step] = {
                ticket: sum(of_group[number].get(ticket, 0) for number in command.numbers)
                for ticket in sorted(set(tickets.values()) - {""})
            }
    return steps


def own_are_late(report: Report, scenario: Scenario) -> bool:
    """Whether all machines of the owner were ever without the newest snapshot for longer than a lease: then they do not
    count as such that can work, and strangers may supply everything. It is so where a learner was killed, or where
    strangers are slow to pass on what they fetch.
    """
    own = {f"w{at}-{n}" for at, spec in enumerate(scenario.workers) for n in range(spec.count) if not spec.ticket}
    newest, waiting_since = None, math.inf
    for event, now, commands in (step for life in report.history.lives for step in life):
        if isinstance(event, ev.WorkerReported) and event.worker_id in own and event.installed == newest:
            waiting_since = math.inf
        if now - waiting_since > scenario.lease_seconds:
            return True
        for command in commands:
            if isinstance(command, do.AnnounceSnapshot):
                newest, waiting_since = command.ref, min(waiting_since, now)
    return not own


def judge_hostile(seed: int) -> list[str]:
    """What is wrong with the hostile world of this seed: strangers never stop a run, and supply a bounded share."""
    scenario = hostile_scenario(seed)
    try:
        report = run_scenario(scenario, seed)
    except InvariantError as error:
        return [str(error)]
    wrong = judge(report, scenario) + judge_replay(report, scenario)
    commands = [command for life in report.history.lives for _, _, answer in life for command in answer]
    wrong += [f"stopped: {command.reason}" for command in commands if isinstance(command, do.StopRun)]
    unit = scenario.group_size * (scenario.groups_per_batch if scenario.deterministic else 1)
    most = max(unit, scenario.groups_per_step * scenario.group_size // 2)
    # A killed head forgets who supplied what.
    is_capped = "head" not in report.killed and not own_are_late(report, scenario)
    for step, given in supplied(report, scenario).items() if is_capped else ():
        wrong += [
            f"ticket {t} supplied {n} samples of step {step}, {most} allowed" for t, n in given.items() if n > most
        ]
    kinds = [(at, spec) for at, spec in enumerate(scenario.workers) if not isinstance(spec, HostileSpec)]
    honest = {f"w{at}-{n}" for at, spec in kinds for n in range(spec.count)}
    expelled = {command.worker_id for command in commands if isinstance(command, do.ExpelWorker)}
    return wrong + [f"{worker_id} is honest and was expelled" for worker_id in sorted(expelled & honest)]


def forging_scenario(seed: int) -> Scenario:
    """A random world whose own workers check strangers, honest ones and such that forge all they deliver."""
    scenario, rng = random_scenario(seed), random.Random(f"forgers of {seed}")
    quiet = {"joins_at_seconds": 0.0, "life_seconds": 0.0, "cut_every_seconds": 0.0, "loss": 0.0}
    own = tuple(replace(spec, draws=True, **quiet) for spec in calm(scenario).workers)
    forgers = [
        replace(rng.choice(own), count=rng.randint(1, 4), ticket=rng.choice("ab"), forges=True)
        for _ in range(rng.randint(1, 2))
    ]
    honest = [replace(rng.choice(own), ticket="honest")] if rng.random() < 0.5 else []
    misnames = hostile_spec(forgers[0], ticket=rng.choice("ac"), hostile="misnames")
    return replace(
        scenario,
        max_failures=3,
        head=calm(scenario).head,
        deterministic=False,
        check_seed=seed,
        workers=(*own, *honest, *forgers, misnames),
        time_limit_seconds=scenario.faults_until_seconds + 5 * CALM_SECONDS,
    )


def judge_forging(seed: int) -> list[str]:
    """What is wrong with the world of forgers of this seed: a forged group that is held for its check is not trained;
    whoever is honest stays, and the run ends.
    """
    scenario = forging_scenario(seed)
    try:
        report = run_scenario(scenario, seed)
    except InvariantError as error:
        return [str(error)]
    wrong = judge(report, scenario) + judge_replay(report, scenario)
    steps = [step for life in report.history.lives for step in life]
    wrong += judge_names(report, scenario)
    specs = {f"w{at}-{n}": spec for at, spec in enumerate(scenario.workers) for n in range(spec.count)}
    sampled: dict[int, str] = {}
    held = set[int]()
    for _, _, commands in steps:
        for command in commands:
            if isinstance(command, do.AcceptDelivery) and command.group.kind == "train":
                sampled[command.group.number] = command.worker_id
                held.discard(command.group.number)  # a head that died without storing an earlier one has forgotten it
            elif isinstance(command, do.RecordCheck) and command.check.holds:
                held.add(command.check.number)
            elif isinstance(command, do.ExpelWorker) and not specs[command.worker_id].forges:
                wrong.append(f"{command.worker_id} is honest and was expelled")
            elif isinstance(command, do.RetireGroup) and command.why == UNTRUSTED:
                if specs[sampled[command.number]].ticket and "has no verdict" in command.reason:
                    continue  # the owner's machines were too slow, or gone: the work of an honest newcomer is lost
                wrong += [
                    f"group {command.number} of {worker_id}, which is honest, was retired"
                    for worker_id in [sampled[command.number]]
                    if not specs[worker_id].forges
                ]
    trained = [number for done in report.history.trained for number in done.numbers if number in held]
    if forged := [number for number in trained if specs[sampled[number]].forges]:
        wrong.append(f"forged groups {forged} were held for their checks, and trained")
    return wrong


def judge_names(report: Report, scenario: Scenario) -> list[str]:
    """No group of a stranger is taken whose weights are not, at that time, published in the lineage that it names; no
    honest worker is said to have made them up; and after each fall-back, and each start of a head, an honest one loses
    no more groups than it may hold and be leased until it is heard of.
    """
    wrong: list[str] = []
    published: dict[int, SnapshotRef] = {}
    specs = {f"w{at}-{n}": spec for at, spec in enumerate(scenario.workers) for n in range(spec.count)}
    honest = {name for name, spec in specs.items() if not isinstance(spec, HostileSpec) and not spec.malformed_results}
    num_lost: dict[str, int] = {}
    for event, now, commands in (step for life in report.history.lives for step in life):
        if isinstance(event, ev.HeadStarted):  # what the head before decided last may not have been recorded
            num_lost.clear()
            published = {ref.version: ref for ref in sorted(event.published) if ref.version <= event.version}
        dropped = [command.ref for command in commands if isinstance(command, do.DropSnapshot)]
        if isinstance(event, ev.SnapshotPublished) and event.ref not in dropped:  # else of a lineage that was left
            published[event.ref.version] = event.ref
        for command in commands:
            if isinstance(command, do.RecordLearner):
                if any(version > command.version for version in published):
                    num_lost.clear()
                published = {version: ref for version, ref in published.items() if version <= command.version}
            elif isinstance(command, do.RefuseDelivery) and command.worker_id in honest:
                if command.refusal == "malformed":
                    wrong.append(f"at {now:.1f} {command.worker_id} is honest; {command.reason}")
                if "not published" in command.reason:
                    num_lost[command.worker_id] = num_lost.get(command.worker_id, 0) + 1
                    if num_lost[command.worker_id] > LOOK_AHEAD * specs[command.worker_id].capacity_groups:
                        wrong.append(f"at {now:.1f} {command.worker_id} has lost {num_lost[command.worker_id]} groups")
            elif isinstance(command, do.AcceptDelivery) and isinstance(event, ev.GroupDelivered):
                named = (event.oldest_version, *event.versions_between, event.newest_version)
                refs = [published.get(version) for version in named]
                if specs[command.worker_id].ticket and any(ref is None or ref.lineage != event.lineage for ref in refs):
                    wrong.append(f"at {now:.1f} {command.group} was taken, sampled with {named} as it says")
    return wrong


def random_workers(rng: random.Random, faulty: bool) -> WorkersSpec:
    def rate(*values: float) -> float:
        return rng.choice((0.0, *values)) if faulty else 0.0

    return WorkersSpec(
        count=rng.randint(1, 3),
        capacity_groups=rng.randint(1, 5),
        rollout_seconds=rng.uniform(0.2, 3.0),
        spread=rng.uniform(0.0, 1.0),
        straggler_chance=rate(0.05),
        install_seconds=rng.uniform(0.01, 3.0),
        latency_seconds=rng.uniform(0.001, 0.5),
        loss=rate(0.01, 0.1),
        joins_at_seconds=rng.choice([0.0, 0.0, 30.0]),
        life_seconds=rate(10.0, 40.0),
        cut_every_seconds=rate(20.0),
        cut_seconds=rng.uniform(1.0, 10.0),
        engine_failures=rate(0.1),
        corrupt_snapshots=rate(0.2),
        malformed_results=rate(0.05),
        task_failures=rate(0.03),
        is_dialable=rng.random() < 0.7,
        lies=rate(0.2),
        mute=faulty and rng.random() < 0.1,
    )


def calm(scenario: Scenario) -> Scenario:
    """The same run where nothing fails."""
    quiet = {
        "straggler_chance": 0.0,
        "loss": 0.0,
        "engine_failures": 0.0,
        "corrupt_snapshots": 0.0,
        "malformed_results": 0.0,
        "task_failures": 0.0,
        "rollout_failures": 0.0,
        "lies": 0.0,
        "mute": False,
    }
    return replace(
        scenario,
        faults_until_seconds=0.0,
        workers=tuple(replace(spec, **quiet) for spec in scenario.workers),
        head=replace(scenario.head, reward_failures=0.0),
    )


def judge(report: Report, scenario: Scenario) -> list[str]:
    """What is wrong with this run; nothing, if all rules held."""
    wrong: list[str] = []
    if not report.finished and report.history.ended.startswith("no group of step"):
        return [] if scenario.deterministic and report.retired else [report.history.ended]
    if not report.finished:
        return [f"it did not finish by {report.seconds:.0f} s: {report.history.ended or 'deadlock'}"]
    surviving = report.history.surviving()
    if sorted(surviving) != list(range(scenario.max_steps)):
        wrong.append(f"steps {sorted(surviving)} survive of {scenario.max_steps}")
    seen: dict[int, int] = {}
    for done in surviving.values():
        if len(done.numbers) > scenario.groups_per_step or len(set(done.numbers)) != len(done.numbers):
            wrong.append(f"step {done.step} trained on {done.numbers}")
        if len(done.numbers) < scenario.groups_per_step and not (scenario.deterministic and report.retired):
            wrong.append(f"step {done.step} trained on {len(done.numbers)} groups of {scenario.groups_per_step}")
        doubled = [number for number in done.numbers if seen.setdefault(number, done.step) != done.step]
        wrong += [f"group {number} was trained at steps {seen[number]} and {done.step}" for number in doubled]
    for done in report.history.trained:  # abandoned lineages too
        for number, version in zip(done.numbers, done.versions, strict=True):
            if not pacing.may_train(done.step, version, scenario.max_staleness):
                wrong.append(f"group {number} of version {version} was trained at step {done.step}")
    if report.retired.get("stale"):
        wrong.append(f"{report.retired['stale']} groups were dropped as stale")
    is_honest = not any(spec.malformed_results or type(spec) is not WorkersSpec for spec in scenario.workers)
    if report.refused.get("malformed") and is_honest:
        wrong.append(f"{report.refused['malformed']} results of honest workers were called malformed")
    return wrong + judge_deterministic(report, scenario) + judge_resampling(report, scenario)


def judge_resampling(report: Report, scenario: Scenario) -> list[str]:
    """A step never replaces more than it may, and is trained on flat groups only where it has replaced so many. (That
    what is replaced was flat, the simulator itself checks.)
    """
    wrong, history = [], report.history
    most = math.ceil(RESAMPLED_MAX * scenario.groups_per_step) if scenario.dynamic_sampling else 0
    for step, count in history.replaced.items():
        if count > most:
            wrong.append(f"step {step} replaced {count} groups, {most} allowed")
    for done in history.trained if scenario.dynamic_sampling else []:
        flat = history.flat.intersection(done.numbers)
        if flat and history.replaced[done.step] < most:
            wrong.append(f"step {done.step} trained on {sorted(flat)}, which are flat, and could have replaced them")
    if report.retired.get("uninformative", 0) != sum(history.replaced.values()):
        wrong.append(f"{report.retired} retired, but replaced: {history.replaced}")
    return wrong


def judge_seed(seed: int) -> list[str]:
    """Everything that is wrong with the world of this seed."""
    scenario = random_scenario(seed)
    try:
        report = run_scenario(scenario, seed)
    except InvariantError as error:
        return [str(error)]
    return judge(report, scenario) + judge_commands(report) + judge_replay(report, scenario)


def judge_deterministic(report: Report, scenario: Scenario) -> list[str]:
    if not scenario.deterministic:
        return []
    wrong = []
    steps = {n: done.step for done in report.history.surviving().values() for n in done.numbers}
    for number, versions in report.history.sampled.items():
        step = steps.get(number, number // scenario.groups_per_step)
        fixed = pacing.fixed_version(step, scenario.max_staleness, scenario.publish_every)
        if versions != {fixed}:
            wrong.append(f"group {number} of step {step} was sampled with versions {versions}, not {fixed}")
    if not report.retired:
        for number, shapes in report.history.shapes.items():
            if shapes != {unit_size(number, scenario)}:
                wrong.append(f"group {number} was sampled in a batch of {shapes}, not of {unit_size(number, scenario)}")
    return wrong


def unit_size(number: int, scenario: Scenario) -> int:
    """Groups in the batch of group `number`: batches are cut from the numbers, and end where a step ends."""
    step, batch = number // scenario.groups_per_step, number // scenario.groups_per_batch
    of_batch = range(batch * scenario.groups_per_batch, (batch + 1) * scenario.groups_per_batch)
    return sum(other // scenario.groups_per_step == step for other in of_batch)


def judge_commands(report: Report) -> list[str]:
    """Rules on the order of commands, read from the head's own record of each of its lives."""
    wrong = []
    for life in report.history.lives:
        fed: dict[int, int] = {}
        for _, now, commands in life:
            for command in commands:
                if isinstance(command, do.FeedGroup):
                    fed[command.step] = fed.get(command.step, 0) + 1
                if isinstance(command, do.RecordLearner):
                    fed.clear()
                if isinstance(command, do.EndStep):
                    if fed.get(command.step, 0) < command.num_groups:
                        wrong.append(
                            f"at {now:.1f} step {command.step} ended with {fed.get(command.step, 0)} groups fed"
                        )
                    fed.pop(command.step, None)
    return wrong


def judge_replay(report: Report, scenario: Scenario) -> list[str]:
    """The same events give the same commands, in every life of the head; no grant was beyond the bound of its time."""
    wrong = []
    for life in report.history.lives:
        planner = Planner(scenario.planner_options(report.seed))
        for event, now, commands in life:
            if planner.handle(event, now) != commands:
                return ["replaying its events gives other commands"]
            for command in commands:
                if isinstance(command, do.GrantLeases) and command.leases[0].exact_version is None:
                    worker = planner.fleet.get(command.worker_id)
                    installed = worker.installed.version if worker is not None and worker.installed is not None else -1
                    ahead = max(lease.step for lease in command.leases) - installed
                    if ahead > scenario.max_staleness:
                        wrong.append(f"at {now:.1f} {ahead} versions ahead, {scenario.max_staleness} allowed")
    return wrong


def main() -> None:
    """Judge the worlds of a range of seeds, and say which went wrong."""
    from lying_worlds import judge_lying

    name, first, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    judges = {one.__name__: one for one in (judge_seed, judge_hostile, judge_forging, judge_lying)}
    began, num_wrong = time.process_time(), 0
    for seed in range(first, end):
        if wrong := judges[name](seed):
            num_wrong += 1
            print(f"seed {seed}: {wrong}", flush=True)
        if (seed + 1 - first) % 100 == 0 or seed + 1 == end:
            seconds = time.process_time() - began
            print(f"{name}: {num_wrong} of {seed + 1 - first} wrong, {seconds:.0f} s of a core", flush=True)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
