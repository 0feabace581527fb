"""What becomes of a delivery: it is checked and scored.

Tokens and logprobs come from the worker, everything else from the head. A delivery that is impossible under the run's
configuration is refused here, before the planner sees it. For its score the head decodes the tokens, and separate
processes compute the rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace

from echo2.config import Config
from echo2.config.sections import DistillConfig
from echo2.core.clock import Clock
from echo2.core.errors import NoRoomError, PeerError, UserError, counted
from echo2.core.types import (
    LOGGED_ROLLOUTS,
    SEVERAL,
    Attachment,
    GroupKind,
    Lease,
    LostRollout,
    RolloutGroup,
    Task,
    Teaching,
)
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import granting
from echo2.head.decide.planner import Planner
from echo2.head.ledger.ledger import Ledger
from echo2.head.serve.reading import RunTokenizer, TaskReader
from echo2.head.strangers.copies import CopiedRollouts
from echo2.head.strangers.replay import EnvironmentReplay, Result
from echo2.reward.judge import BudgetSpent
from echo2.reward.reward_processes import RewardProcesses
from echo2.reward.score import RewardFailure
from echo2.tasks.harness_process import is_harness
from echo2.tasks.streams import Tasks
from echo2.tasks.teaching import teacher_of
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import MESSAGE_BYTES_MAX, TEXT_CHARS_MAX, TOKENS_MAX
from echo2.transport.messages import encode_scores, encode_unscored, parse_group
from echo2.transport.regroup import as_one_row, by_row, joined, with_scores, without
from echo2.transport.routes import RouteShape, check_routes

#: Maximum bytes of groups sent to the learner in one message, unless a single group is larger.
FEED_BYTES = 8 << 20
#: Maximum bytes of a stored group without its scores: the learner receives both in one message.
GROUP_BYTES_MAX = MESSAGE_BYTES_MAX - FEED_BYTES - (1 << 20)


class Scoring:
    """Computes the rewards of delivered groups. `foretell` gets what an endpoint that teaches is asked meanwhile."""

    def __init__(
        self,
        reward: RewardProcesses,
        ledger: Ledger,
        tasks: TaskReader,
        tokenizer: asyncio.Future[RunTokenizer],
        train_tasks: Tasks,
        distill: DistillConfig,
        environment: str,
        identity: RunIdentity,
        foretell: Callable[[bytes], None],
    ) -> None:
        self._reward, self._ledger, self._tasks, self._tokenizer = reward, ledger, tasks, tokenizer
        self._train_tasks, self._distill, self._environment = train_tasks, distill, environment
        self._identity, self._foretell = identity, foretell

    async def score(self, command: do.ScoreGroup) -> ev.GroupScored | ev.GroupUnfit:
        """Return the event with the rewards of a delivered group. A failure ends the group, not the run.

        Raises:
            BudgetSpent: the judge's; the group waits for a head with more.
            NoRoomError: the disk is full, so that what the judge may cost could not be stored.
        """
        ref, delivered = command.group, command.rollouts
        await asyncio.shield(self._tokenizer)  # a restarted head may hold groups before it has a snapshot
        try:
            group = delivered.group if delivered is not None else None
            return await self._scored(group or parse_group(self._ledger.rollouts(ref.number)))
        except (BudgetSpent, NoRoomError):
            raise
        except RewardFailure as error:
            return ev.GroupUnfit(ref, error.cause, str(error), error.seconds, error.traceback)
        except UserError as error:
            return ev.GroupUnfit(ref, "reward_failed", str(error))
        except PeerError as error:  # a text is too long for a reward function
            return ev.GroupUnfit(ref, error.reason, error.detail)

    def teaching(self, kind: GroupKind, task: Task) -> Teaching:
        """Return what the learner gets about the teacher of a task.

        Raises:
            UserError: the row names no teacher, or nothing that a teacher can read, or a harness makes the prompts.
        """
        if not self._distill.teachers or kind == "eval":
            return Teaching()
        name = teacher_of(task, self._distill.teachers, self._environment)
        return Teaching(name, self._tokenizer.result().teacher_prompt(task))

    async def _scored(self, group: RolloutGroup) -> ev.GroupScored:
        """Return the event with the rewards of a group, and the seconds that they took."""
        task = await self._tasks.task(group.group, group.cursor)
        teaching = self.teaching(group.group.kind, task)
        if group.group.kind == "train" and teaching.teacher in self._distill.endpoints:
            self._foretell(encode_unscored(group, teaching))
        group = self._tokenizer.result().read(group, task)
        whole = as_one_row(group)
        texts = [one.text for one in whole]
        if (longest := max(map(len, texts))) > TEXT_CHARS_MAX:
            raise PeerError("oversized", f"a rollout's text has {longest} characters; the limit is {TEXT_CHARS_MAX}")
        results, seconds = await self._reward.scores(task, whole, texts)
        failures = {at: one for at, one in enumerate(results) if isinstance(one, RewardFailure)}
        is_one = group.group.kind == "eval" or not (
            group.worker_id == SEVERAL or self._identity.member(group.worker_id).is_own
        )
        if failures and is_one:  # a stranger could put a text that fails in the place of an answer that it dislikes
            raise next(iter(failures.values()))
        scores = [one for one in results if not isinstance(one, RewardFailure)]
        numbers, remaining_group = list(dict.fromkeys(group.sample_numbers)), None
        lost = tuple(LostRollout(numbers[at], one.cause, str(one)) for at, one in failures.items())
        if lost:
            group = without(group, lost)
            remaining_group = Attachment(messages.encode_group(group).SerializeToString(), group)
        is_flat = len({reward for reward, _ in scores}) == 1
        # The scored group is attached only if `HeadEffects` uses it; the ledger stores just the scores.
        is_read = group.group.kind == "eval" or self._train_tasks.source_of(group.cursor)
        of_rows = by_row(group, scores)
        scored_group = with_scores(group, of_rows) if is_read else None
        scored = Attachment(encode_scores(of_rows, teaching), scored_group)
        return ev.GroupScored(group.group, is_flat, seconds, scored, lost, len(scores), remaining_group)


class Deliveries:
    """Reads and checks what workers deliver. `vocab_size`: None only before the first learner, when no group is leased.
    `routes`: the shape of those that the learner replays; None: it replays none. Where the head can play the
    environment again, the `EnvironmentReplay` does.
    """

    def __init__(
        self,
        config: Config,
        planner: Planner,
        ledger: Ledger,
        identity: RunIdentity,
        clock: Clock,
        tasks: TaskReader,
        tokenizer: asyncio.Future[RunTokenizer],
    ) -> None:
        self._config, self._planner, self._ledger, self._identity = config, planner, ledger, identity
        self._clock, self._tasks, self._tokenizer = clock, tasks, tokenizer
        self._copied = CopiedRollouts()
        walked = config.tasks.environment and not is_harness(config.tasks.environment)
        self._replay = EnvironmentReplay(config.tasks.environment) if walked else None
        self.vocab_size: int | None = ledger.get_meta("vocab_size")
        dimensions = ledger.get_meta("routes") if config.learner.routing_replay else None
        self.routes = RouteShape(*dimensions) if dimensions else None

    @property
    def are_replayed(self) -> bool:
        """Whether the environment judges each result, which may take long."""
        return self._replay is not None

    def timed(self, event: Result) -> Result:
        """Return the event with the seconds that the replay took."""
        return event if self._replay is None else self._replay.timed(event)

    def learn_sizes(self, vocab_size: int, routes: RouteShape | None) -> None:
        """Keep the sizes of the model, which the learner knows."""
        if self.vocab_size != vocab_size:
            self.vocab_size = vocab_size
            self._ledger.set_meta("vocab_size", vocab_size)
        if self.routes != routes:
            self.routes = routes
            self._ledger.set_meta("routes", None if routes is None else astuple(routes))

    async def read_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Read the run's tokenizer from a snapshot's files, on a thread. Raises as `RunTokenizer`."""
        stop, config = await self._replay.stop() if self._replay is not None else "", self._config
        stop_strings = tuple(config.sampling.stop)
        tokenizer = await asyncio.to_thread(RunTokenizer, files, config.model.chat_template_args, stop, stop_strings)
        if not self._tokenizer.done():
            self._tokenizer.set_result(tokenizer)

    async def close(self) -> None:
        """End the environment's process."""
        if self._replay is not None:
            await self._replay.close()

    async def read(self, worker_id: str, lease: Lease, delivery: wire.Delivery) -> ev.GroupDelivered:
        """Check a delivery under its lease. Return the event with the group, its prompt, and the bytes to store and
        feed. The planner checks that the lease is open and that the versions are allowed.

        Raises:
            PeerError: "malformed" or "oversized": the result cannot have been sampled under this lease. "late": it
                ended before the environment had replayed the result.
            UserError: the environment fails.
        """
        earlier = parse_group(self._ledger.rollouts(lease.group.number)) if lease.first_sample else None
        task, config = await self._tasks.task(lease.group, lease.cursor), self._config
        tokenizer = self._tokenizer.result()
        member = self._identity.member(worker_id)
        params = config.sampling_params if lease.group.kind == "train" else config.eval_params
        seconds = max(0.0, self._clock.now() - lease.granted_at)
        if by_harness := is_harness(config.tasks.environment):
            check_own(self._config, self._identity, worker_id)
            group = messages.decode_played(delivery, lease, worker_id, seconds)
        elif delivery.rows:
            raise PeerError("malformed", "a rollout of several rows, which only a harness plays")
        else:
            prompt = tokenizer.prompt(lease.group.kind, task)
            group = messages.decode_delivery(delivery, lease, prompt, worker_id, seconds)
        decoded_rollouts = group.rollouts
        if group.lost and not member.is_own:  # it could choose what is trained on
            raise UserError(f"{counted(len(group.lost), 'rollout')} failed, it says. The first: {group.lost[0].detail}")
        if not 0 < group.lineage <= (newest := self._planner.training.lineage):
            raise PeerError("malformed", f"sampled in lineage {group.lineage}; the run is in {newest}")
        # A harness's rollout may begin with a prompt of its own, which max_tokens does not bound.
        tokenizer.check_lengths(group, TOKENS_MAX if by_harness else params.max_tokens)
        messages.check_turns(group, config.sampling.max_turns if config.tasks.environment else 1, by_harness)
        if self.vocab_size is not None:  # None only before the first learner, when no group is leased
            messages.check_support(group, params, self.vocab_size)
            messages.check_vocabulary(group, self.vocab_size)
        group = await self._with_routes(group, params.routes)
        if LOGGED_ROLLOUTS in task.columns:
            group = self._as_logged(tokenizer, task, group, params.max_tokens)
        elif self._replay is not None:
            is_chat = not isinstance(task.prompt, str)
            stop = await self._replay.stop()
            rules = tokenizer.turn_rules(stop, is_chat, config.sampling.max_turns, params.max_tokens)
            worker = self._planner.fleet.get(worker_id)
            # What a worker may hold can shrink; the deadline of an open lease stays.
            longest = lease.deadline if worker is None else granting.ends_at(self._planner, worker, lease)
            seconds = max(lease.deadline, longest) - self._clock.now()
            group = await self._replay.replay(rules, lease, task, group, seconds, member.is_own)
        elif not by_harness:
            tokenizer.check_ends(group, params.max_tokens)
        if not (group.logged or member.is_own):
            self._copied.check(group, member.ticket_id)
        is_as_delivered = group.rollouts is decoded_rollouts and not (by_harness or earlier)
        return self._delivered(worker_id, lease, group, earlier, delivery.group if is_as_delivered else None)

    def _delivered(
        self,
        worker_id: str,
        lease: Lease,
        group: RolloutGroup,
        earlier: RolloutGroup | None,
        delivered: wire.RolloutGroup | None,
    ) -> ev.GroupDelivered:
        """Return the event of a checked result, with the rollouts that its group kept of earlier ones."""
        lost, sampled_seconds = group.lost, group.generate_seconds
        group = group if earlier is None else joined(earlier, group)
        if group.logged:  # these rollouts come from the user's log and were not checked when decoded
            messages.check_rollouts(group.rollouts)
        stored = messages.encode_group(group, delivered).SerializeToString()
        if len(stored) > GROUP_BYTES_MAX:
            raise PeerError("oversized", f"a group of {len(stored)} bytes; the limit is {GROUP_BYTES_MAX}")
        versions = sorted({version for rollout in group.rollouts for _, version in rollout.version_spans})
        few = versions[1:-1][: self._config.schedule.max_staleness]  # with more of them, one is stale
        return ev.GroupDelivered(
            worker_id=worker_id,
            lease_id=lease.lease_id,
            group=group.group,
            num_samples=lease.num_samples,
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            num_tokens=group.num_tokens,
            seconds=sampled_seconds,
            rollouts=Attachment(stored, group),
            lineage=group.lineage,
            versions_between=tuple(few),
            logged=group.logged,
            is_own=self._identity.member(worker_id).is_own,
            num_rollouts=group.num_rollouts,
            lost=lost,
        )

    async def _with_routes(self, group: RolloutGroup, are_asked: bool) -> RolloutGroup:
        """Return the group with its routes checked, beside the event loop: up to half a second of work. Without them,
        if the learner replays none.

        Raises:
            PeerError: "malformed" or "oversized".
        """
        if are_asked and self.routes is None:
            return replace(group, routes=b"")
        if group.routes:
            await asyncio.to_thread(check_routes, group, self.routes if are_asked else None)
        return group

    def _as_logged(self, tokenizer: RunTokenizer, task: Task, group: RolloutGroup, max_tokens: int) -> RolloutGroup:
        """Return the group with the rollouts that the head itself reads from the task's log.

        Raises:
            PeerError: "malformed": the log is unusable, or the worker's tokens differ from the log.
        """
        try:
            logged = tokenizer.logged(task, len(group.rollouts), max_tokens, group.newest_version)
        except UserError as error:
            raise PeerError("malformed", f"the log has no such rollouts: {error}") from error
        for place, (worker_rollout, logged_rollout) in enumerate(zip(group.rollouts, logged, strict=True)):
            if worker_rollout.tokens != logged_rollout.tokens or worker_rollout.finish != logged_rollout.finish:
                raise PeerError("malformed", f"rollout {place} is not what the log says")
        return replace(group, rollouts=tuple(logged), logged=True)


def check_own(config: Config, identity: RunIdentity, worker_id: str) -> None:
    """Raise PeerError("not_own") for a stranger in a run whose rollouts a harness plays."""
    if not identity.member(worker_id).is_own:
        raise PeerError(
            "not_own",
            f"this run's rollouts are played by {config.tasks.environment}, which the head cannot go through "
            "again: only machines of the run's owner sample for it. Ask the owner for a ticket for own machines",
        )
