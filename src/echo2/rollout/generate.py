"""Leases in, rollout groups out: sample the prompts as one batch, hand over each complete group.

What the engine read and wrote is what the learner trains on: nothing is tokenised again. Texts and rewards are somebody
else's work. Imports without torch.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from echo2.rollout.engine import Completion, Engine, Outcome, RequestFailure, SampleRequest
from echo2.rollout.replay import replay, without_rewards
from echo2.rollout.tokenizer import Tokenizer
from echo2.rollout.turns import Play, World
from echo2.types import LOGGED_ATTEMPTS, Assignment, Lease, Rollout, RolloutGroup, SamplingParams, Task


def assignment_of(
    lease: Lease, task: Task, prompt: array[int], params: SamplingParams, environment: str = "", max_turns: int = 1
) -> Assignment:
    """What whoever samples must know of the task, and no more: not its answer, unless an environment begins with it."""
    columns: Mapping[str, Any] = {}
    if LOGGED_ATTEMPTS in task.columns:
        columns = {LOGGED_ATTEMPTS: without_rewards(task.columns[LOGGED_ATTEMPTS])}
    elif environment:
        columns = task.columns
    return Assignment(lease, prompt, params, columns, environment, max_turns, not isinstance(task.prompt, str))


def sample_groups(
    engine: Engine,
    tokenizer: Tokenizer,
    assignments: Sequence[Assignment],
    lineage: int,
    worker_id: str,
    on_group: Callable[[RolloutGroup, Lease], None],
    on_failed: Callable[[Lease, RequestFailure], None],
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
    worlds: Mapping[str, World] = MappingProxyType({}),
) -> None:
    """Sample these leases as one batch, seeded by the leases. Each ends in exactly one call of `on_group` (no texts,
    no rewards) or `on_failed`, as soon as it ends; none at all if `should_stop` ended the batch first. Assignments with
    an environment are played turn by turn in the world of that name; there is one for each. Attempts that a task
    carries are replayed.

    `lineage` is that of the installed snapshot. A group that was still sampled when a snapshot of another lineage came
    is given up: one version number would mean two policies. `generate_seconds` counts from the start of the batch.

    Raises:
        UserError: the engine has no weights.
        PeerError: the policy gives logits that are not finite.
    """
    started = clock()

    def finish(assignment: Assignment, outcome: list[Rollout] | RequestFailure, is_logged: bool) -> None:
        installed, lease = engine.installed, assignment.lease
        if isinstance(outcome, RequestFailure):
            on_failed(lease, outcome)
        elif installed is None or installed.lineage != lineage:
            on_failed(lease, RequestFailure("snapshot_gone", f"lineage {lineage} ended while the group was sampled"))
        else:
            on_group(
                RolloutGroup(
                    group=lease.group,
                    step=lease.step,
                    lineage=lineage,
                    cursor=lease.cursor,
                    prompt_tokens=assignment.prompt_tokens,
                    rollouts=tuple(outcome),
                    worker_id=worker_id,
                    generate_seconds=clock() - started,
                    logged=is_logged,
                ),
                lease,
            )

    kinds: dict[tuple[bool, str], list[Assignment]] = {}  # (whether they are replayed, environment)
    for assignment in assignments:
        kinds.setdefault((LOGGED_ATTEMPTS in assignment.columns, assignment.environment), []).append(assignment)
    for (is_logged, environment), alike in kinds.items():

        def ended(
            index: int, outcome: list[Rollout] | RequestFailure, alike: Any = alike, is_logged: bool = is_logged
        ) -> None:
            finish(alike[index], outcome, is_logged)

        if is_logged:
            replay(engine, tokenizer, alike, ended, should_stop)
        elif environment:
            Play(engine, tokenizer, worlds[environment], alike, ended).run(should_stop)
        else:
            _sample(engine, alike, ended, should_stop)


def _sample(
    engine: Engine,
    assignments: Sequence[Assignment],
    ended: Callable[[int, list[Rollout] | RequestFailure], None],
    should_stop: Callable[[], bool],
) -> None:
    """Groups of one turn."""

    def finished(index: int, outcome: Outcome) -> None:
        if isinstance(outcome, RequestFailure):
            ended(index, outcome)
        else:
            ended(index, [_rollout(completion) for completion in outcome])

    requests = [
        SampleRequest(one.prompt_tokens, lease.num_samples, lease.seed, one.params, first_sample=lease.first_sample)
        for one, lease in ((assignment, assignment.lease) for assignment in assignments)
    ]
    engine.generate(requests, finished, should_stop)


def _rollout(completion: Completion) -> Rollout:
    """A completion of a single-turn task: every token is the policy's own."""
    return Rollout(
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        loss_mask=b"\x01" * len(completion.tokens),
        version_spans=completion.version_spans,
        finish=completion.finish,
        support_tokens=completion.support_tokens,
        support_offsets=completion.support_offsets,
    )
