"""Turns a delivery into checked rollouts: tokens and logprobs come from the worker, everything else from the head.

A delivery that is impossible under the run's configuration is refused here, before the planner sees it. Texts and
rewards are added later (`scoring.py`).
"""

from __future__ import annotations

from dataclasses import replace

from echo2.control.head import events as ev
from echo2.errors import PeerError, UserError
from echo2.runtime.head.head import Head
from echo2.runtime.head.strangers import check_own
from echo2.tasks.harness_process import is_harness
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import MESSAGE_BYTES_MAX, TOKENS_MAX
from echo2.transport.top_logprobs import check_top
from echo2.types import LOGGED_ROLLOUTS, Attachment, Lease, RolloutGroup, Task

#: Maximum bytes of groups sent to the learner in one message, unless a single group is larger.
FEED_BYTES = 8 << 20
#: Maximum bytes of a stored group without its scores: the learner receives both in one message.
GROUP_BYTES_MAX = MESSAGE_BYTES_MAX - FEED_BYTES - (1 << 20)


async def read_delivery(head: Head, worker_id: str, lease: Lease, delivery: wire.Delivery) -> ev.GroupDelivered:
    """Check a delivery under its lease. Return the event with the group, its prompt, and the bytes to store and feed.
    The planner checks that the lease is open and that the versions are allowed.

    Raises:
        PeerError: "malformed" or "oversized": the result cannot have been sampled under this lease. "late": it ended
            before the environment had replayed the result.
        UserError: the environment fails.
    """
    task, config = await head.tasks.task(lease.group, lease.cursor), head.config
    params = config.sampling_params if lease.group.kind == "train" else config.eval_params
    seconds = head.seconds_of(lease.lease_id)
    if by_harness := is_harness(config.tasks.environment):
        check_own(head, worker_id)
        group = messages.decode_played(delivery, lease, worker_id, seconds)
    else:
        prompt = head.reader.prompt(lease.group.kind, task)
        group = messages.decode_delivery(delivery, lease, prompt, worker_id, seconds)
    told = group.rollouts
    if not 0 < group.lineage <= head.planner.lineage:
        raise PeerError("malformed", f"sampled in lineage {group.lineage}; the run is in {head.planner.lineage}")
    # A harness's rollout may begin with a prompt of its own, which max_tokens does not bound.
    head.reader.check_lengths(group, TOKENS_MAX if by_harness else params.max_tokens)
    messages.check_turns(group, config.sampling.max_turns if config.tasks.environment else 1, by_harness)
    if head.vocab_size is not None:  # None only before the first learner, when no group is leased
        messages.check_support(group, params, head.vocab_size)
        messages.check_vocabulary(group, head.vocab_size)
        check_top(group, params.top_logprobs, head.vocab_size)
    if LOGGED_ROLLOUTS in task.columns:
        group = _as_logged(head, task, group, params.max_tokens)
    elif head.referee is not None:
        is_chat = not isinstance(task.prompt, str)
        rules = head.reader.turn_rules(await head.referee.stop(), is_chat, config.sampling.max_turns, params.max_tokens)
        seconds_left = lease.deadline - head.clock.now()
        group = await head.referee.judged(rules, lease, task, group, seconds_left)
    elif not by_harness:
        head.reader.check_ends(group, params.max_tokens)
    member = head.identity.member(worker_id)
    if not (group.logged or member.is_own):
        head.copied.check(group, member.ticket_id)
    as_told = delivery.rollouts if group.rollouts is told and not by_harness else ()
    message = messages.encode_group(group, as_told)
    if group.logged:  # these rollouts come from the user's log and were not checked when decoded
        messages.check_rollouts(message.rollouts)
    stored = message.SerializeToString()
    if len(stored) > GROUP_BYTES_MAX:
        raise PeerError("oversized", f"a group of {len(stored)} bytes; the limit is {GROUP_BYTES_MAX}")
    versions = sorted({version for rollout in group.rollouts for _, version in rollout.version_spans})
    return ev.GroupDelivered(
        worker_id=worker_id,
        lease_id=lease.lease_id,
        group=group.group,
        num_samples=len(group.rollouts),
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        num_tokens=group.num_tokens,
        seconds=group.generate_seconds,
        rollouts=Attachment(stored, group),
        lineage=group.lineage,
        versions_between=tuple(versions[1:-1][: config.schedule.max_staleness]),  # with more of them, one is stale
        logged=group.logged,
        is_own=member.is_own,
    )


def _as_logged(head: Head, task: Task, group: RolloutGroup, max_tokens: int) -> RolloutGroup:
    """Return the group with the rollouts that the head itself reads from the task's log.

    Raises:
        PeerError: "malformed": the log is unusable, or the worker's tokens differ from the log.
    """
    try:
        logged = head.reader.logged(task, len(group.rollouts), max_tokens, group.newest_version)
    except UserError as error:
        raise PeerError("malformed", f"the log has no such rollouts: {error}") from error
    for place, (said, known) in enumerate(zip(group.rollouts, logged, strict=True)):
        if said.tokens != known.tokens or said.finish != known.finish:
            raise PeerError("malformed", f"rollout {place} is not what the log says")
    return replace(group, rollouts=tuple(logged), logged=True)
