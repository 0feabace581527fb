"""Samples the groups of leases: every rollout is an asyncio task, and a group is complete when its last rollout is.

The learner trains on exactly the tokens that the engine read and wrote: nothing is tokenised again. Texts and rewards
are made elsewhere. Imports without torch.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from echo2.core.background import awaited
from echo2.core.types import (
    LOGGED_ROLLOUTS,
    Assignment,
    Lease,
    LostRollout,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Task,
)
from echo2.engines.engine import Completion, Engine, RequestFailure, SampleRequest
from echo2.engines.tokenizer import Tokenizer, stop_rule
from echo2.rollouts.harness import HarnessEnvironment
from echo2.rollouts.logged import read_log, without_rewards
from echo2.rollouts.recorded import Played
from echo2.rollouts.turns import Environment, Lockstep, Sampler, play
from echo2.transport.regroup import with_one_prompt
from echo2.transport.routes import packed

#: Environments and harnesses by their name in `Assignment.environment`.
Environments = Mapping[str, Environment | HarnessEnvironment]
NO_ENVIRONMENTS: Environments = MappingProxyType({})


def assignment_of(
    lease: Lease, task: Task, prompt: array[int], params: SamplingParams, environment: str = "", max_turns: int = 1
) -> Assignment:
    """Return a lease with the parts of its task that sampling needs. The task's columns, which may hold the answer, are
    included only for an environment; logged rollouts come without their rewards."""
    columns: Mapping[str, Any] = {}
    if LOGGED_ROLLOUTS in task.columns:
        columns = {LOGGED_ROLLOUTS: without_rewards(task.columns[LOGGED_ROLLOUTS])}
    elif environment:
        columns = task.columns
    return Assignment(lease, prompt, params, columns, environment, max_turns, not isinstance(task.prompt, str))


async def sample_group(
    engine: Sampler,
    tokenizer: Tokenizer,
    assignment: Assignment,
    worker_id: str,
    environments: Environments = NO_ENVIRONMENTS,
    on_rollout: Callable[[], None] = lambda: None,
) -> RolloutGroup | RequestFailure:
    """Sample the group of one lease, seeded by the lease; texts, rewards and seconds are added later. If the assignment
    names an environment, it plays the rollouts. If the task carries logged rollouts, they are read instead of sampled.
    Cancelling the asyncio task aborts all rollouts under way. `on_rollout()` is called whenever a rollout has been
    sampled or given up.

    The group is given up if a snapshot of another lineage or policy is installed while it is sampled: one version
    number would mean two sets of weights.

    Raises:
        UserError: the engine has no weights.
        PeerError: the policy gives logits that are not finite.
    """
    lease, before = assignment.lease, engine.installed
    is_logged = not is_sampled(assignment)
    lost: list[LostRollout] = []
    outcome: tuple[array[int], list[Rollout], tuple[int, ...]] | RequestFailure
    if is_logged:
        logged = await asyncio.to_thread(read_log, engine, tokenizer, assignment)
        outcome = logged if isinstance(logged, RequestFailure) else (assignment.prompt_tokens, logged, ())
    else:
        outcome = await _rollouts(engine, tokenizer, assignment, environments, on_rollout, lost)
    if isinstance(outcome, RequestFailure):
        return outcome
    prompt, rollouts, samples = outcome
    installed = engine.installed
    if before is None or installed is None or installed.history != before.history:
        detail = f"the group was sampled with {before}, and then with {installed}"
        return RequestFailure("snapshot_gone", detail)
    group = RolloutGroup(
        group=lease.group,
        step=lease.step,
        lineage=before.lineage,
        cursor=lease.cursor,
        prompt_tokens=prompt,
        rollouts=tuple(rollouts),
        worker_id=worker_id,
        logged=is_logged,
        by_harness=isinstance(environments.get(assignment.environment), HarnessEnvironment),
        samples=samples,
        lost=tuple(sorted(lost, key=lambda one: one.sample)),
    )
    return await asyncio.to_thread(packed, group) if assignment.params.routes else group


async def _rollouts(
    engine: Sampler,
    tokenizer: Tokenizer,
    assignment: Assignment,
    environments: Environments,
    on_rollout: Callable[[], None],
    lost: list[LostRollout],
) -> tuple[array[int], list[Rollout], tuple[int, ...]] | RequestFailure:
    """Return the prompt, the rows and their samples of a group (none: each rollout is one row), or the first failure,
    which aborts the other rollouts. A rollout whose environment fails is added to `lost`, and the others go on: unless
    it is the last one, or of an evaluation.
    """
    strings = assignment.params.stop
    stop = await asyncio.to_thread(stop_rule, tokenizer, strings) if strings else None

    environment = environments[assignment.environment] if assignment.environment else None

    async def one(sample: int) -> Rollout | Played | RequestFailure:
        if isinstance(environment, HarnessEnvironment):
            return await environment.play(engine, tokenizer, assignment, sample)
        if environment is not None:
            return await play(engine, tokenizer, environment, assignment, sample)
        seed, params = assignment.lease.seed, assignment.params
        outcome = await engine.submit(SampleRequest(assignment.prompt_tokens, seed, sample, params, stop=stop))
        return outcome if isinstance(outcome, RequestFailure) else _rollout(outcome)

    lease = assignment.lease
    spares = lease.num_samples - 1 if lease.group.kind == "train" else 0

    async def numbered(sample: int) -> tuple[int, Rollout | Played | RequestFailure]:
        return sample, await one(sample)

    numbers = range(lease.first_sample, lease.first_sample + lease.num_samples)
    tasks = [awaited(numbered(sample)) for sample in numbers]
    for task in tasks:
        task.add_done_callback(lambda _: on_rollout())
    try:
        for ended in asyncio.as_completed(tasks):
            sample, failure = await ended
            if not isinstance(failure, RequestFailure):
                continue
            if failure.reason != "environment_failed" or len(lost) == spares:
                return failure
            lost.append(LostRollout(sample, failure.reason, f"{failure.detail}\n{failure.traceback}".rstrip()))
        results = [task.result() for task in tasks]
        played = [(sample, row) for sample, one in results if isinstance(one, Played) for row in one.rows]
        if not played:
            return assignment.prompt_tokens, [one for _, one in results if isinstance(one, Rollout)], ()
        prompt, rollouts = with_one_prompt([row for _, row in played])  # a harness makes the prompt of each row
        if not prompt:
            return RequestFailure("environment_failed", "The rows of the group do not begin with the same token.")
        return prompt, rollouts, tuple(sample for sample, _ in played)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def sample_groups(
    engine: Engine,
    tokenizer: Tokenizer,
    assignments: Sequence[Assignment],
    worker_id: str,
    on_group: Callable[[RolloutGroup, Lease], None],
    on_failed: Callable[[Lease, RequestFailure], None],
    environments: Environments = NO_ENVIRONMENTS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Sample these leases concurrently. Each lease gives exactly one call, as soon as it ends: `on_group` with the
    group of `sample_group` and the seconds since the start, or `on_failed`.

    Raises:
        UserError, PeerError: as `sample_group`.
    """
    started = clock()

    async def one(assignment: Assignment) -> None:
        outcome = await sample_group(engine, tokenizer, assignment, worker_id, environments)
        if isinstance(outcome, RequestFailure):
            on_failed(assignment.lease, outcome)
        else:
            on_group(replace(outcome, generate_seconds=clock() - started), assignment.lease)

    tasks = [awaited(one(assignment)) for assignment in assignments]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_lockstep(engine: Engine, assignments: Sequence[Assignment]) -> Lockstep:
    """Return the engine that samples these leases as one batch of their own (`run.deterministic`)."""
    return Lockstep(engine, sum(one.lease.num_samples for one in assignments if is_sampled(one)))


def is_sampled(assignment: Assignment) -> bool:
    """Whether the policy samples the rollouts of this lease; otherwise the task contains them."""
    return LOGGED_ROLLOUTS not in assignment.columns


def _rollout(completion: Completion) -> Rollout:
    """Return the rollout of a single-turn task: the policy sampled every token."""
    return Rollout(
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        loss_mask=b"\x01" * len(completion.tokens),
        version_spans=completion.version_spans,
        finish=completion.finish,
        support_tokens=completion.support_tokens,
        support_offsets=completion.support_offsets,
        routes=completion.routes,
    )
