"""Carries out the planner's commands, after the ledger has recorded what must be durable. A worker's orders are a
stream: one by one, and all waiting leases in one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from echo2.core.decide.seeds import group_seed
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import Lease, RolloutGroup
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.serve.connections import WorkerConnection
from echo2.head.serve.head import Head
from echo2.reward.judge import BudgetSpent
from echo2.rollouts.generate import assignment_of
from echo2.sandbox.plugins import traceback_of
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire

log = logging.getLogger(__name__)

#: Outcome of a lease without a result -> the cause under which the worker's time is counted as wasted.
_WASTED = {"expired": "expired", "lost": "lost", "failed": "failed", "superseded": "duplicate"}


async def orders(head: Head, connection: WorkerConnection) -> AsyncIterator[wire.Order]:
    """Yield a worker's orders, until its stream ends."""
    async for item in connection.orders():
        if isinstance(item, wire.Order):
            yield item
        elif batch := await _batch(head, item):
            yield wire.Order(leases=wire.LeaseBatch(leases=batch))


async def _batch(head: Head, leases: Sequence[Lease]) -> list[wire.Lease]:
    """Return the messages of these leases. Groups whose task is unfit are reported to the planner and left out."""
    batch = []
    for lease in leases:
        try:
            batch.append(await _assignment(head, lease))
        except UserError as error:
            head.events.tell(ev.GroupUnfit(lease.group, "bad_task", str(error), traceback=traceback_of(error)))
    return batch


async def _assignment(head: Head, lease: Lease) -> wire.Lease:
    config, kind = head.config, lease.group.kind
    task = await head.tasks.task(lease.group, lease.cursor)
    head.scoring.teaching(kind, task)  # what cannot be taught is not sampled
    params = config.sampling_params if kind == "train" else config.eval_params
    turns = (config.tasks.environment, config.sampling.max_turns)
    prompt = head.tokenizer.result().prompt(kind, task)
    return messages.encode_assignment(assignment_of(lease, task, prompt, params, *turns))


async def send_check(head: Head, command: do.CheckGroup) -> None:
    """Send a group to the checking worker: its assignment, and the rollouts that were delivered."""
    try:
        data = head.ledger.rollouts(command.group.number)
    except InvariantError:  # a checkpoint covers the group, so its rollouts are deleted
        head.events.tell(ev.GroupChecked(command.worker_id, command.group, missed="its rollouts are not kept any more"))
        return
    config, group = head.config, messages.parse_group(data)
    if group.logged:
        missed = "it comes from a log and was not sampled"
        head.events.tell(ev.GroupChecked(command.worker_id, command.group, missed=missed))
        return
    seconds = head.options.lease_seconds
    seed, size = group_seed(head.options.seed, group.group), len(group.rollouts)
    lease = Lease(0, group.group, group.step, group.cursor, size, 0, None, 0.0, seconds, seed)
    try:
        task = await head.tasks.task(group.group, group.cursor)
    except UserError as error:
        head.events.tell(ev.GroupChecked(command.worker_id, command.group, missed=str(error)))
        return
    turns = (config.tasks.environment, config.sampling.max_turns)
    assignment = assignment_of(lease, task, group.prompt_tokens, config.sampling_params, *turns)
    check = wire.Check(
        lease=messages.encode_assignment(assignment),
        group=data,
        ref=messages.encode_ref(command.ref),
        is_from_stream=command.is_from_stream,
        form=command.form,
    )
    head.connections.order(command.worker_id, wire.Order(check=check))


class HeadEffects:
    """The driver's `Effects`: acts on links, costs, metrics and machines."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._wake: asyncio.TimerHandle | None = None

    def decided(self, event: ev.Event, now: float, commands: Sequence[do.Command]) -> None:
        self._head.event_log.write(now, event, commands)
        self._head.books.decisions.see(commands, now)

    def carry_out(self, command: do.Command, now: float) -> None:
        """Carry out one command. Raises InvariantError for an unknown one."""
        head = self._head
        match command:
            case do.RefuseLearner():
                pass  # read by the handler that dispatched the event
            case do.GrantLeases():
                head.connections.grant(command.worker_id, command.leases)
            case do.CloseLease():
                if command.outcome in _WASTED:
                    head.books.costs.wasted_lease(command.worker_id, _WASTED[command.outcome], command.held_seconds)
            case do.RevokeLease():
                for lease_id in command.lease_ids:
                    revoked = wire.LeaseRevoked(lease_id=lease_id, reason=command.reason)
                    head.connections.order(command.worker_id, wire.Order(revoked=revoked))
            case do.AcceptDelivery():
                head.books.costs.useful(command.worker_id, command.seconds, now)
            case do.RefuseDelivery():
                head.books.costs.wasted(command.worker_id, command.refusal, command.seconds, now)
            case do.ScoreGroup():
                head.spawn(self._score(command))
            case do.KeepScores():
                if command.scores is not None and command.scores.group is not None:
                    self._keep_scored(command.scores.group)
            case do.RetireGroup():
                record = head.planner.groups.get(command.number)
                if record is not None and record.worker_id:  # its result was delivered, and counted as useful
                    head.books.costs.count_as_wasted(record.worker_id, command.why)
            case do.FeedGroup() | do.EndStep():
                self._feed(command)
            case do.RecordLearner():
                head.books.metrics.truncate(command.version)
            case do.AnnounceSnapshot():
                head.distribution.announce(command.ref, command.worker_ids)
            case do.DropSnapshot():
                head.spawn(head.distribution.archive.drop(command.ref))
            case do.StartEval() | do.FinishEval() | do.SkipEval():
                self._evaluate(command)
            case do.WakeAt():
                self._wake_at(command.at, now)
            case do.StopRun():
                head.ending.stop(command.reason)
            case do.FinishRun():
                head.ending.end("finished", command.reason)
            case _:
                self._manage_fleet(command, now)

    def _manage_fleet(self, command: do.Command, now: float) -> None:
        """Carry out a command about workers or their machines. Raises InvariantError for an unknown one."""
        head = self._head
        match command:
            case do.WorkerGone():
                self._worker_gone(command, now)
            case do.CheckGroup():
                head.spawn(send_check(head, command))
            case do.ExpelWorker():
                log.warning("%s is expelled for %.0f s: %s", command.worker_id, command.seconds, command.reason)
            case do.SetWidth():
                head.connections.order(command.worker_id, wire.Order(slots=command.num_slots))
            case do.RestWorker() | do.LimitGroups() | do.SpaceSnapshots():
                pass  # the planner's tables have them already
            case do.ActivateWorker():
                head.books.costs.activated(command.worker_id, now)
            case do.ReleaseWorker():
                head.books.costs.stands_by(command.worker_id, now)
                head.books.broadcast_times.gone(command.worker_id)  # on standby it does not fetch snapshots
            case do.RentMachine():
                head.machines.rent(command.offer)
            case do.ReturnMachine():
                head.connections.order(
                    command.worker_id, wire.Order(stop=wire.Stop(reason="its machine is given back"))
                )
                head.machines.return_machine(command.offer, command.worker_id)
            case _ if not isinstance(command, do.Durable):  # of those, the ledger has all
                raise InvariantError(f"the head does not know {command}")

    async def _score(self, command: do.ScoreGroup) -> None:
        head = self._head
        try:
            event = await head.scoring.score(command)
        except BudgetSpent as error:
            head.ending.stop(str(error))
            return
        finally:  # what a group cost that got no score is spent, too
            head.keep_judge_usd()
        await head.events.tell(event)

    def _feed(self, command: do.FeedGroup | do.EndStep) -> None:
        head = self._head
        learner = head.connections.learner
        if isinstance(command, do.EndStep):
            if learner is not None:
                learner.send(wire.StepDone(cursor=command.cursor, publish_every=command.publish_every))
            return
        parts = head.ledger.parts(command.number)
        if learner is not None:
            learner.send(parts)
        if head.books.rollout_log.claim(command.step + 1):
            head.spawn(self._log_rollouts(command.step + 1, b"".join(parts)))

    async def _log_rollouts(self, step: int, data: bytes) -> None:
        head, group, tokenizer = self._head, messages.parse_group(data), self._head.tokenizer.result()
        try:
            task = await head.tasks.task(group.group, group.cursor)
            read = tokenizer.read(group, task)
        except UserError as error:
            log.warning("%s is not in rollouts/: %s", group.group, error)
            return
        head.books.rollout_log.write(f"step_{step}", read, task, tokenizer.pieces)

    def _keep_scored(self, group: RolloutGroup) -> None:
        head = self._head
        if group.group.kind == "eval":
            head.books.evals.keep(group)
            head.spawn(self._log_answers(group))
        elif name := head.train_tasks.source_of(group.cursor):
            head.books.add_rewards(name, group.rewards)

    async def _log_answers(self, group: RolloutGroup) -> None:
        head = self._head
        head.books.rollout_log.write(f"eval_{group.step}", group, await head.tasks.task(group.group, group.cursor))

    def _evaluate(self, command: do.StartEval | do.FinishEval | do.SkipEval) -> None:
        head = self._head
        match command:
            case do.StartEval():
                head.books.evals.start(command.ref.version)
                head.books.rollout_log.begin(f"eval_{command.ref.version}")
            case do.FinishEval():
                head.books.metrics.amend(command.version, head.books.evals.finish(command.version, command.failed))
            case do.SkipEval():
                why = f"version {command.version} is not evaluated: {command.reason}; `echo2 eval DIR` makes up for it"
                log.warning("%s", why)
                head.books.metrics.amend(command.version, head.books.evals.skip(command.version, command.reason))

    def _wake_at(self, at: float, now: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay, head = max(0.0, at - now), self._head
        self._wake = asyncio.get_running_loop().call_later(delay, lambda: head.events.tell(ev.Tick()))

    def _worker_gone(self, command: do.WorkerGone, now: float) -> None:
        head = self._head
        head.books.lose_worker()
        head.books.costs.left(command.worker_id, now)
        head.books.broadcast_times.gone(command.worker_id)
        head.distribution.origin.left(command.worker_id, command.reason)
        head.connections.leave(command.worker_id)
