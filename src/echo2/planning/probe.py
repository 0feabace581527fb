"""`echo2 probe`: measures this machine's rollouts per second with the run's own model, prompts and engine.

Like a worker, but without a head, it samples whole batches; the first batch is a warm-up and does not count. Delays by
the network and other machines are not included. The reward functions are timed separately because the head calls them:
they bound the rollouts per second of the whole run, however many workers there are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from echo2 import config as configuration
from echo2.config.values import FORMS
from echo2.core.errors import UserError, counted
from echo2.core.types import RolloutGroup
from echo2.engines.engine import Engine
from echo2.head.strangers.decide.trust import MISMATCH_ROUNDED_MAX
from echo2.learner.core.fitting import num_parameters
from echo2.planning.lengths import SeenGroup, SeenLengths, seen_lengths
from echo2.rollouts.verification import PrefillEngine
from echo2.worker.alone import LocalSampler, load_engine, local_engine, reward_processes

if TYPE_CHECKING:
    from echo2.engines.tokenizer import Tokenizer

#: Minimum number of batches that count, however long they take.
MIN_BATCHES = 2
#: Number of groups whose rewards are timed; and at most, for the lengths that training prefers: no more after some
#: seconds, nor where a judge is asked.
GROUPS_SCORED, GROUPS_SCORED_MAX, SCORING_SECONDS = 8, 96, 10.0


@dataclass(frozen=True, slots=True)
class RewardTime:
    """Speed of the run's reward functions and its judge. `seconds`: per group; `groups_at_once`: in parallel on this
    machine; `judge_usd`: what the judge costs for a group.
    """

    seconds: float
    groups_at_once: int
    judge_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """`rollouts_per_second` over all counted batches; `standard_error`: of that mean, from batch to batch; `spread`:
    standard deviation of the logarithm of a group's duration. `parameters` and `max_tokens`: of the model that was
    measured and of its answers; 0: unknown. `lengths`: of groups that were scored;
    `core_seconds`: that the processor's cores computed for the counted batches; `mismatch`: of an engine that rounds
    the weights, the mean |log ratio| of its tokens to the published weights, nats a token.
    """

    rollouts_per_second: float
    standard_error: float
    spread: float
    tokens_per_second: float
    groups_per_batch: int
    num_batches: int
    num_rollouts: int
    seconds: float
    group_size: int = 1
    rewards: RewardTime | None = None
    parameters: int = 0
    max_tokens: int = 0
    lengths: SeenLengths | None = None
    core_seconds: float = 0.0
    mismatch: float | None = None


def run(options: argparse.Namespace) -> int:
    """Measure and print an offer.

    Raises:
        UserError: no such model or tasks; nothing could be sampled.
    """
    if not (options.seconds > 0 and math.isfinite(options.seconds)):
        raise UserError(f"--seconds {options.seconds} must be above 0.")
    config = _config(options)
    slots = config.sampling.groups_per_batch * config.sampling.group_size
    choice = local_engine(config, config.model.path)
    engine, tokenizer = load_engine(config, config.model.path, slots)
    as_published = replace(config, workers=replace(config.workers, engine="compact"))
    reader = (lambda: load_engine(as_published, config.model.path, slots)[0]) if choice.name in FORMS else None
    measured = measure_engine(config, engine, tokenizer, options.seconds, time.perf_counter, reader)
    if options.json:
        entry = {"name": options.name, "price_usd_per_hour": options.price_usd_per_hour, "engine": choice.name}
        print(json.dumps({**entry, **asdict(measured)}))
    else:
        print(f"# {choice}", *filter(None, [of_rounding(choice.name, measured)]), sep="\n")
        print(as_offer(options.name, options.price_usd_per_hour, measured))
    return 0


def of_rounding(engine: str, measured: Measured) -> str:
    """Return how far an engine that rounds the weights is from the published ones, and whether a head takes it."""
    if measured.mismatch is None:
        return ""
    line = f"# {engine} rounds the weights: its logprobs are {measured.mismatch:.2g} nats a token from theirs, "
    line += f"and {MISMATCH_ROUNDED_MAX:g} is allowed"
    if measured.mismatch <= MISMATCH_ROUNDED_MAX:
        return line
    return f"{line}: the form is too coarse for this model, and a head turns such a worker away. Take one of more bits"


def as_offer(name: str, price_usd_per_hour: float, measured: Measured) -> str:
    """Return an entry for the offers file."""
    error = measured.standard_error / measured.rollouts_per_second
    rewards = []
    if measured.rewards is not None:
        most = measured.rewards.groups_at_once * measured.group_size / max(1e-9, measured.rewards.seconds)
        usd = measured.rewards.judge_usd
        if usd:
            rewards.append(f"# not included: the judge costs ${usd:.3g} a group of {measured.group_size}")
        rewards.append(
            f"# not included: your reward functions take {measured.rewards.seconds:.3g} s a group; a head like "
            f"this machine scores {most:.4g} rollouts/s at most, whatever you rent (echo2 plan --reward-seconds)"
        )
    return "\n".join(
        (
            *rewards,
            f"# {counted(measured.num_rollouts, 'rollout')} in {measured.seconds:.1f} s, "
            f"{counted(measured.num_batches, 'batch', 'batches')}, "
            f"{measured.tokens_per_second:.0f} tokens/s; the rate is good to {error:.0%} (one standard error)",
            "[[offers]]",
            f"name = {json.dumps(name)}",
            f"price_usd_per_hour = {price_usd_per_hour:g}" + ("" if price_usd_per_hour else "  # put in yours"),
            f"rollouts_per_second = {measured.rollouts_per_second:.4g}",
            *([f"parameters = {measured.parameters}"] if measured.parameters else []),
            *([f"max_tokens = {measured.max_tokens}"] if measured.max_tokens else []),
            f"spread = {measured.spread:.2f}",
            f"groups_per_batch = {measured.groups_per_batch}",
            "count = 1",
        )
    )


def _config(options: argparse.Namespace) -> configuration.Config:
    """Return the run's configuration; for a model directory, one that trains this model on the built-in task."""
    if options.target.is_dir() and not (options.target / "metrics.jsonl").exists():
        raw = {
            "model": {"path": str(options.target)},
            "tasks": {"source": "digit_sorting"},
            "reward": {"functions": ["exact_match"]},
        }
        config = configuration.build(raw, str(options.target), options.overrides)
    else:
        target = options.target / "config.json" if options.target.is_dir() else options.target
        config = configuration.load(target, options.overrides)
    return replace(config, workers=replace(config.workers, engine=options.engine)) if options.engine else config


def measure_engine(
    config: configuration.Config,
    engine: Engine,
    tokenizer: Tokenizer,
    seconds: float,
    clock: Callable[[], float],
    reader: Callable[[], Engine] | None = None,
) -> Measured:
    """Sample batches for `seconds` seconds with an engine whose weights are loaded, and return the rates. `reader`:
    makes one that has the published weights.

    Raises:
        UserError: nothing could be sampled.
    """
    sampler = LocalSampler(config, "train", engine, tokenizer, clock)
    measured, groups = asyncio.run(_measure(config, sampler, seconds, clock))
    if reader is None:
        return measured
    other = reader()
    return replace(measured, mismatch=asyncio.run(_mismatch(sampler, other, groups)))


async def _mismatch(sampler: LocalSampler, reader: Engine, groups: list[RolloutGroup]) -> float | None:
    """Return how far what was sampled is from the reader's weights."""
    assert isinstance(reader, PrefillEngine)
    assert reader.installed is not None
    try:
        return await sampler.mismatch(reader, reader.installed, groups[:GROUPS_SCORED])
    finally:
        await reader.close()


async def _measure(
    config: configuration.Config, sampler: LocalSampler, seconds: float, clock: Callable[[], float]
) -> tuple[Measured, list[RolloutGroup]]:
    """Sample one warm-up batch, then whole batches as in a worker's leases, at least `MIN_BATCHES` of them. Return
    their groups, too."""
    size = config.sampling.groups_per_batch
    batches: list[tuple[list[RolloutGroup], float]] = []
    async with aclosing(sampler):
        await _batch(sampler, range(size))
        started, computed = clock(), time.process_time()
        while len(batches) < MIN_BATCHES or clock() - started < seconds:
            began, first = clock(), (len(batches) + 1) * size
            groups = await _batch(sampler, range(first, first + size))
            batches.append((groups, max(1e-9, clock() - began)))
        computed = time.process_time() - computed
    groups, elapsed = [group for batch, _ in batches for group in batch], sum(elapsed for _, elapsed in batches)
    num_rollouts = sum(group.num_rollouts for group in groups)
    rates = [sum(group.num_rollouts for group in batch) / elapsed for batch, elapsed in batches]
    rewards, scored = await _scored(config, sampler, groups)
    measured = Measured(
        rollouts_per_second=num_rollouts / elapsed,
        standard_error=statistics.stdev(rates) / math.sqrt(len(rates)),
        spread=statistics.pstdev(math.log(max(1e-9, group.generate_seconds)) for group in groups),
        tokens_per_second=sum(group.num_tokens for group in groups) / elapsed,
        groups_per_batch=size,
        num_batches=len(batches),
        num_rollouts=num_rollouts,
        seconds=elapsed,
        group_size=config.sampling.group_size,
        rewards=rewards if not config.tasks.environment else None,
        parameters=num_parameters(config.model.path) or 0,
        max_tokens=config.sampling.max_tokens,
        lengths=seen_lengths(scored, size) if scored else None,
        core_seconds=computed,
    )
    return measured, groups


async def _batch(sampler: LocalSampler, cursors: range) -> list[RolloutGroup]:
    groups = await sampler.sample(cursors)
    if not groups:
        raise UserError(f"Nothing could be sampled: {sampler.failures[-1]}.")
    return groups


async def _scored(
    config: configuration.Config, sampler: LocalSampler, groups: list[RolloutGroup]
) -> tuple[RewardTime, list[SeenGroup]]:
    """Return the mean time to score one of these groups, one after the other, and their lengths by reward."""
    judge, size, usd = config.reward.judge_config, config.sampling.group_size, 0.0
    if judge is not None:
        count = len(groups[:GROUPS_SCORED]) * judge.num_requests(size)
        print(f"note: the judge at {judge.base_url} is asked {count} times, and waited for", file=sys.stderr)
    durations, scored = list[float](), list[SeenGroup]()
    async with reward_processes(config) as processes:
        for group in groups[:GROUPS_SCORED_MAX]:
            if len(durations) >= GROUPS_SCORED and (judge is not None or sum(durations) > SCORING_SECONDS):
                break
            rollouts, seconds = await sampler.score(processes, group)
            durations.append(seconds)
            rewards = tuple(rollout.reward or 0.0 for rollout in rollouts)
            answers = tuple(tuple(rollout.tokens) for rollout in rollouts)
            scored.append(SeenGroup(sampler.prompt_tokens(group.cursor), answers, rewards))
        at_once = processes.most_at_once
        if judge is not None and processes.judge is not None:
            at_once = min(at_once, judge.groups_at_once(size))
            usd = processes.judge.spent_usd / len(durations)
        return RewardTime(statistics.fmean(durations), at_once, usd), scored
