"""Random worlds in which several policies share one head and one fleet, and what must be true of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from echo2.control.head import commands as do
from echo2.control.head.policies import Policies
from echo2.errors import InvariantError
from echo2.sim import Report, Scenario
from echo2.sim.scenario import PolicySpec
from invariants import run_policies
from worlds import judge, random_scenario


def policies_scenario(seed: int) -> Scenario:
    """A random world of two or three policies, each with its own bound, steps, evaluations and learner; in some,
    strangers forge what they deliver, and are checked.
    """
    scenario, rng = random_scenario(seed), random.Random(f"policies of {seed}")
    names = rng.choice((("a", "b"), ("a", "b"), ("a", "b", "c")))
    specs = tuple(_random_policy(name, scenario, rng) for name in names)
    if not scenario.deterministic and random.Random(f"forgers of {seed}").random() < 0.5:
        own = tuple(replace(spec, draws=True) for spec in scenario.workers)
        forger = replace(own[0], ticket="a", forges=True)
        scenario = replace(scenario, check_seed=seed, workers=(*own, forger))
    return replace(scenario, policies=specs, time_limit_seconds=scenario.time_limit_seconds * len(specs))


def _random_policy(name: str, scenario: Scenario, rng: random.Random) -> PolicySpec:
    max_staleness = rng.randint(0, 6)
    return PolicySpec(
        policy=name,
        max_steps=rng.randint(1, 8),
        groups_per_step=rng.randint(1, 9),
        max_staleness=max_staleness,
        publish_every=rng.randint(1, max_staleness + 1),
        eval_size=scenario.eval_size,
        eval_every=rng.randint(0, 3),
        base_model=random.Random(f"base model of {name} in {scenario.name}").randint(0, 2),
        learner=replace(scenario.learner, train_seconds=rng.uniform(0.1, 5.0)),
    )


def judge_policies(seed: int) -> list[str]:
    """What is wrong with this world: every policy is judged by its own rules, as if it were alone; no group crosses."""
    scenario = policies_scenario(seed)
    try:
        reports = run_policies(scenario, seed)
    except InvariantError as error:
        return [str(error)]
    wrong = [
        f"{policy}: {word}" for policy, mine in scenario.by_policy().items() for word in judge(reports[policy], mine)
    ]
    return wrong + judge_crossing(reports) + judge_replay(reports, scenario, seed)


def judge_crossing(reports: Mapping[str, Report]) -> list[str]:
    """Every result that was accepted is of the policy that granted its lease, and was sampled by its weights: the
    engine wrote their policy into the rollouts. (That it is that policy's learner who is fed it, the learner checks.)
    """
    wrong, leased = [], dict[int, str]()
    for command in commands_of(reports):
        match command:
            case do.GrantLeases():
                leased.update((lease.lease_id, command.policy) for lease in command.leases)
                wrong += [
                    f"{command.policy} granted {one}" for one in command.leases if one.group.policy != command.policy
                ]
            case do.AcceptDelivery():
                sampled_by = b"" if command.rollouts is None else command.rollouts.data
                policies = {command.policy, command.group.policy, leased[command.lease_id]}
                if len(policies) > 1 or not sampled_by.endswith(command.policy.encode()):
                    wrong.append(f"{command} crosses: its lease is of {leased[command.lease_id]}")
    return wrong


def judge_replay(reports: Mapping[str, Report], scenario: Scenario, seed: int) -> list[str]:
    """The same events give the same commands, in every life of the head."""
    history = next(iter(reports.values())).history
    for life in history.lives:
        policies = Policies([mine.planner_options(seed, policy) for policy, mine in scenario.by_policy().items()])
        for event, now, commands in life:
            if policies.handle(event, now) != commands:
                return [f"replaying its events gives other commands at {now}: {event}"]
    return []


def commands_of(reports: Mapping[str, Report]) -> list[do.Command]:
    """Everything that the head was asked to do, by any policy."""
    history = next(iter(reports.values())).history
    return [command for life in history.lives for _, _, answer in life for command in answer]


def moves(reports: Mapping[str, Report]) -> int:
    """How often a worker was told of another policy's weights than the last time."""
    last: dict[str, str] = {}
    count = 0
    for command in commands_of(reports):
        for worker_id in command.worker_ids if isinstance(command, do.AnnounceSnapshot) else ():
            count += last.get(worker_id, command.ref.policy) != command.ref.policy  # type: ignore[attr-defined]
            last[worker_id] = command.ref.policy  # type: ignore[attr-defined]
    return count
