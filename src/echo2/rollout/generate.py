"""Leases in, rollout groups out: tokenise the prompts, sample them as one batch, decode, hand over each complete group.

Tokens are made here once and never again: what the engine read and wrote is what the learner trains on. Scoring is
somebody else's work. Imports without torch.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from echo2.errors import PeerError, UserError
from echo2.rollout.engine import Completion, Engine, Outcome, RequestFailure, SampleRequest
from echo2.rollout.replay import replay
from echo2.rollout.tokenizer import Tokenizer
from echo2.rollout.turns import Play, World
from echo2.types import LOGGED_ATTEMPTS, Assignment, Lease, Rollout, RolloutGroup, Task

TOKENIZER_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer among a snapshot's files; code that comes with it is never run.

    Raises:
        PeerError: a file name would leave the directory, or there is no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        for name, data in files.items():
            if Path(name).name != name:
                raise PeerError("bad_snapshot", f"file name {name!r} is a path")
            if Path(name).suffix in TOKENIZER_SUFFIXES:
                (Path(folder) / name).write_bytes(data)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise PeerError("bad_snapshot", f"no tokenizer that transformers reads: {first_line}") from error
    loaded: Tokenizer = tokenizer
    return loaded


def encode_prompt(task: Task, tokenizer: Tokenizer) -> array[int]:
    """Token ids of a prompt. Text is tokenised as it is, with the start token that the tokenizer itself adds (unless
    the text has it); chat messages go through the chat template, followed by the opening of the assistant's turn.

    Raises:
        UserError: chat messages, but there is no chat template or it refuses them.
    """
    if isinstance(task.prompt, str):
        has_start = bool(tokenizer.bos_token) and task.prompt.startswith(tokenizer.bos_token or "")
        return array("i", tokenizer.encode(task.prompt, add_special_tokens=not has_start))
    if not tokenizer.chat_template:
        raise UserError(
            f"Task {task.cursor} has chat messages, but the model's tokenizer has no chat template. "
            "Add chat_template.jinja to the model directory, or give prompts as text."
        )
    from jinja2 import TemplateError

    messages = [{"role": message.role, "content": message.content} for message in task.prompt]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"Task {task.cursor}: the chat template refuses its messages: {error}.") from error
    return array("i", tokenizer.encode(text, add_special_tokens=False))  # templates write the special tokens themselves


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
    """Sample these leases as one batch, seeded by the leases. Each ends in exactly one call of `on_group` (unscored) or
    `on_failed`, as soon as it ends; none at all if `should_stop` ended the batch first. Assignments with an environment
    are played turn by turn in the world of that name; there is one for each. Attempts that a task carries are replayed.

    `lineage` is that of the installed snapshot. A group that was still sampled when a snapshot of another lineage came
    is given up: one version number would mean two policies. `generate_seconds` counts from the start of the batch.

    Raises:
        UserError: the engine has no weights.
        PeerError: the policy gives logits that are not finite.
    """
    started = clock()

    def finish(lease: Lease, prompt: array[int], outcome: list[Rollout] | RequestFailure, is_logged: bool) -> None:
        installed = engine.installed
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
                    prompt_tokens=prompt,
                    rollouts=tuple(outcome),
                    worker_id=worker_id,
                    generate_seconds=clock() - started,
                    logged=is_logged,
                ),
                lease,
            )

    for (is_logged, environment), pairs in _by_kind(assignments, tokenizer, on_failed).items():

        def ended(
            index: int, outcome: list[Rollout] | RequestFailure, pairs: Any = pairs, is_logged: bool = is_logged
        ) -> None:
            finish(pairs[index][0].lease, pairs[index][1], outcome, is_logged)

        of_pairs, prompts = [assignment for assignment, _ in pairs], [prompt for _, prompt in pairs]
        if is_logged:
            replay(engine, tokenizer, of_pairs, prompts, ended, should_stop)
        elif environment:
            Play(engine, tokenizer, worlds[environment], of_pairs, prompts, ended).run(should_stop)
        else:
            _sample(engine, tokenizer, of_pairs, prompts, ended, should_stop)


def _by_kind(
    assignments: Sequence[Assignment], tokenizer: Tokenizer, on_failed: Callable[[Lease, RequestFailure], None]
) -> dict[tuple[bool, str], list[tuple[Assignment, array[int]]]]:
    """The assignments with their prompts, by what is done with them: (whether they are replayed, environment)."""
    kinds: dict[tuple[bool, str], list[tuple[Assignment, array[int]]]] = {}
    for assignment in assignments:
        try:
            prompt = encode_prompt(assignment.task, tokenizer)
        except UserError as error:
            on_failed(assignment.lease, RequestFailure("engine_failed", str(error)))
            continue
        is_logged = LOGGED_ATTEMPTS in assignment.task.columns
        kinds.setdefault((is_logged, assignment.environment), []).append((assignment, prompt))
    return kinds


def _sample(
    engine: Engine,
    tokenizer: Tokenizer,
    assignments: Sequence[Assignment],
    prompts: Sequence[array[int]],
    ended: Callable[[int, list[Rollout] | RequestFailure], None],
    should_stop: Callable[[], bool],
) -> None:
    """Groups of one turn."""

    def finished(index: int, outcome: Outcome) -> None:
        if isinstance(outcome, RequestFailure):
            ended(index, outcome)
        else:
            ended(index, [_rollout(completion, tokenizer) for completion in outcome])

    leases = [assignment.lease for assignment in assignments]
    requests = [
        SampleRequest(prompt, lease.num_samples, lease.seed, assignment.params, first_sample=lease.first_sample)
        for prompt, lease, assignment in zip(prompts, leases, assignments, strict=True)
    ]
    engine.generate(requests, finished, should_stop)


def _rollout(completion: Completion, tokenizer: Tokenizer) -> Rollout:
    """A completion of a single-turn task: every token is the policy's own."""
    return Rollout(
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        loss_mask=b"\x01" * len(completion.tokens),
        version_spans=completion.version_spans,
        finish=completion.finish,
        text=tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True),
        support_tokens=completion.support_tokens,
        support_offsets=completion.support_offsets,
    )
