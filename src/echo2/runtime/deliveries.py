"""What a worker delivers, and what the head makes of it: the samples are the worker's word, all else the head's own.

A delivery that the run's configuration does not make possible is refused here, before the planner is asked. Texts and
rewards come later (`scoring.py`).
"""

from __future__ import annotations

from dataclasses import replace

from echo2.errors import PeerError, UserError
from echo2.rollout.replay import logged_rollouts
from echo2.runtime import portions
from echo2.runtime.head import Head
from echo2.runtime.presence import Pending
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.types import LOGGED_ATTEMPTS, Lease, RolloutGroup, Task


async def read_delivery(head: Head, worker_id: str, lease: Lease, delivery: wire.Delivery) -> Pending:
    """The group, with the prompt that was leased, and as it is stored. Which lease it is of, and whether its versions
    may be, is the planner's to judge.

    Raises:
        PeerError: "malformed" or "oversized", saying what could not have been sampled under this lease.
        UserError: the environment fails.
    """
    if len(delivery.samples) != lease.num_samples:
        raise PeerError("malformed", f"leased {lease.num_samples} attempts, got {len(delivery.samples)}")
    task, config = head.task_of(lease.group, lease.cursor), head.config
    params = config.sampling_params if lease.group.kind == "train" else config.eval_params
    prompt = head.reader.prompt(lease.group.kind, task)
    group = messages.decode_delivery(delivery, lease, prompt, worker_id)
    group = replace(group, generate_seconds=min(group.generate_seconds, head.seconds_of(lease.lease_id)))
    if not 0 < group.lineage <= head.planner.lineage:
        raise PeerError("malformed", f"sampled in lineage {group.lineage}; the run is in {head.planner.lineage}")
    head.reader.check_lengths(group, params.max_tokens)
    messages.check_turns(group, config.sampling.max_turns if head.referee is not None else 1)
    if head.vocab_size is not None:  # else no learner was ever here, and nothing is leased
        messages.check_support(group, params, head.vocab_size)
        messages.check_vocabulary(group, head.vocab_size)
    if LOGGED_ATTEMPTS in task.columns:
        group = _as_logged(head, task, group, params.max_tokens)
    elif head.referee is not None:
        is_chat = not isinstance(task.prompt, str)
        rules = head.reader.turn_rules(head.referee.stop, is_chat, config.sampling.max_turns, params.max_tokens)
        group = await head.referee.judged(rules, lease, task, group)
    else:
        head.reader.check_ends(group, params.max_tokens)
    payload = messages.encode_group(group).SerializeToString()
    if portions.is_portion(lease, head.options.group_size):
        portions.check_size(len(payload), len(group.rollouts), head.options.group_size)
    return Pending(group, payload)


def _as_logged(head: Head, task: Task, group: RolloutGroup, max_tokens: int) -> RolloutGroup:
    """The attempts as the head reads them in the log itself; the worker's say whether its model can read them."""
    column, num_samples, tokenizer = task.columns[LOGGED_ATTEMPTS], len(group.rollouts), head.reader.tokenizer
    try:
        logged = logged_rollouts(column, num_samples, max_tokens, tokenizer, group.newest_version)
    except UserError as error:
        raise PeerError("malformed", f"the log has no such attempts: {error}") from error
    for place, (said, known) in enumerate(zip(group.rollouts, logged, strict=True)):
        if said.tokens != known.tokens or said.finish != known.finish:
            raise PeerError("malformed", f"attempt {place} is not what the log says")
    return replace(group, rollouts=tuple(logged), logged=True)
