"""What becomes of a delivery: it is checked, scored, and perhaps given to a machine of the owner for a check.

Tokens and logprobs come from the worker, everything else from the head. A delivery that is impossible under the run's
configuration is refused here, before the planner sees it. For its score the head decodes the tokens, and separate
processes compute the rewards. `head/strangers/decide/checks.py` chooses the groups to check and acts on the verdicts.
"""

from __future__ import annotations

from dataclasses import replace

from echo2.core.decide.seeds import group_seed
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.core.printable import printable
from echo2.core.types import LOGGED_ROLLOUTS, Attachment, GroupRef, Lease, RolloutGroup, Task
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import lease_times
from echo2.head.serve.claims import check_own
from echo2.head.serve.head import Head
from echo2.reward.score import RewardFailure
from echo2.rollouts.generate import assignment_of
from echo2.tasks.harness_process import is_harness
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.codecs import check_top
from echo2.transport.limits import MESSAGE_BYTES_MAX, TEXT_CHARS_MAX, TOKENS_MAX
from echo2.transport.messages import encode_scores, parse_group, with_scores

#: Maximum characters of a verdict, which the ticket's history stores.
FAULT_CHARS_MAX = 300
#: Maximum bytes of groups sent to the learner in one message, unless a single group is larger.
FEED_BYTES = 8 << 20
#: Maximum bytes of a stored group without its scores: the learner receives both in one message.
GROUP_BYTES_MAX = MESSAGE_BYTES_MAX - FEED_BYTES - (1 << 20)


async def score(head: Head, command: do.ScoreGroup) -> None:
    """Compute the rewards of a delivered group. A failure ends the group, not the run."""
    ref, delivered = command.group, command.rollouts
    await head.reader.loaded()  # a restarted head may hold groups before it has a snapshot
    event: ev.GroupScored | ev.GroupUnfit
    try:
        group = delivered.group if delivered is not None else None
        event = await _scored(head, group or parse_group(head.ledger.rollouts(ref.number)))
    except RewardFailure as error:
        event = ev.GroupUnfit(ref, "reward_failed", str(error), error.seconds, error.traceback)
    except UserError as error:
        event = ev.GroupUnfit(ref, "reward_failed", str(error))
    except PeerError as error:  # a text is too long for a reward function
        event = ev.GroupUnfit(ref, error.reason, error.detail)
    await head.tell(event)


async def _scored(head: Head, group: RolloutGroup) -> ev.GroupScored:
    """Return the event with the rewards of a group, and the seconds that they took."""
    task = await head.tasks.task(group.group, group.cursor)
    texts = head.reader.texts(group, task)
    if (longest := max(map(len, texts))) > TEXT_CHARS_MAX:
        raise PeerError("oversized", f"a rollout's text has {longest} characters; the limit is {TEXT_CHARS_MAX}")
    scores, seconds = await head.reward.scores(task, group.rollouts, texts)
    is_flat = len({reward for reward, _ in scores}) == 1
    # The scored group is attached only if `HeadEffects` uses it; the ledger stores just the scores.
    is_read = group.group.kind == "eval" or head.train_tasks.source_of(group.cursor)
    whole = with_scores(group, texts, scores) if is_read else None
    return ev.GroupScored(group.group, is_flat, seconds, Attachment(encode_scores(scores), whole))


async def send_check(head: Head, command: do.CheckGroup) -> None:
    """Send a group to the checking worker: its assignment, and the rollouts that were delivered."""
    try:
        data = head.ledger.rollouts(command.group.number)
    except InvariantError:  # a checkpoint covers the group, so its rollouts are deleted
        head.tell(ev.GroupChecked(command.worker_id, command.group, missed="its rollouts are not kept any more"))
        return
    config, group = head.config, messages.parse_group(data)
    if group.logged:
        head.tell(ev.GroupChecked(command.worker_id, command.group, missed="it comes from a log; nobody drew it"))
        return
    seconds = head.options.lease_seconds
    seed, size = group_seed(head.options.seed, group.group), len(group.rollouts)
    lease = Lease(0, group.group, group.step, group.cursor, size, 0, None, 0.0, seconds, seed)
    try:
        task = await head.tasks.task(group.group, group.cursor)
    except UserError as error:
        head.tell(ev.GroupChecked(command.worker_id, command.group, missed=str(error)))
        return
    turns = (config.tasks.environment, config.sampling.max_turns)
    assignment = assignment_of(lease, task, group.prompt_tokens, config.sampling_params, *turns)
    check = wire.Check(
        lease=messages.encode_assignment(assignment),
        group=data,
        ref=messages.encode_ref(command.ref),
        is_from_stream=command.is_from_stream,
    )
    head.order(command.worker_id, wire.Order(check=check))


async def report_check(head: Head, peer: Peer, report: wire.CheckReport) -> wire.Empty:
    """Pass a verdict to the planner, which knows whether it was requested."""
    group = GroupRef(messages.policy_id(report.policy), "train", messages.whole_number("number", report.number))
    if group.policy != head.options.policy:
        raise PeerError("malformed", f"a verdict on {group}; this run's policy is {head.options.policy}")
    await head.tell(
        ev.GroupChecked(
            peer.peer_id,
            group,
            messages.whole_number("num_tokens", report.num_tokens),
            printable(report.fault, FAULT_CHARS_MAX),
            printable(report.missed, FAULT_CHARS_MAX),
            messages.whole_number("num_skipped", report.num_skipped),
            messages.finite("surprise", report.surprise),
            messages.finite("variance", report.variance),
        )
    )
    return wire.Empty()


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
    seconds = max(0.0, head.clock.now() - lease.granted_at)
    if by_harness := is_harness(config.tasks.environment):
        check_own(head, worker_id)
        group = messages.decode_played(delivery, lease, worker_id, seconds)
    else:
        prompt = head.reader.prompt(lease.group.kind, task)
        group = messages.decode_delivery(delivery, lease, prompt, worker_id, seconds)
    told = group.rollouts
    if not 0 < group.lineage <= head.planner.training.lineage:
        raise PeerError(
            "malformed", f"sampled in lineage {group.lineage}; the run is in {head.planner.training.lineage}"
        )
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
        worker = head.planner.fleet.get(worker_id)
        until = lease.deadline if worker is None else lease_times.ends_at(head.planner, worker, lease)
        group = await head.referee.judged(rules, lease, task, group, until - head.clock.now())
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
