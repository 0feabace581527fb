"""The head: the planner's real driver. It feeds events to the planner, logs them, and carries its commands out.

It never imports torch, so that no training step can stall a heartbeat. Everything durable goes into the ledger before
the next command is carried out; `service` answers the links, `scoring` and `evals` look after results, `status` tells
people.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from echo2.broadcast.origin import OriginNode
from echo2.buffer import Ledger
from echo2.buffer.records import GroupRecord
from echo2.config import Config
from echo2.control import commands as do
from echo2.control import events as ev
from echo2.control.broadcast import BroadcastOptions
from echo2.control.fleet import Worker
from echo2.control.planner import Planner
from echo2.errors import InvariantError, NoRoomError, UserError
from echo2.offers import Offer
from echo2.reward.process import RewardProcess
from echo2.rollout.generate import assignment_of
from echo2.runtime import portions, strangers
from echo2.runtime.accounts import CostBook
from echo2.runtime.archive import Archive
from echo2.runtime.broadcast_meter import BroadcastMeter
from echo2.runtime.clock import Clock
from echo2.runtime.distribution import Distribution
from echo2.runtime.evals import Evals
from echo2.runtime.eventlog import EventLog
from echo2.runtime.machines import Machines
from echo2.runtime.metrics import Metrics, Sink, TensorBoardSink, WandbSink, known_ess
from echo2.runtime.planner_options import planner_options, read_offers
from echo2.runtime.presence import LearnerPresence, Pending, Presence
from echo2.runtime.reading import Reader
from echo2.runtime.recovery import recovered
from echo2.runtime.referee import Referee
from echo2.runtime.rollout_log import RolloutLog
from echo2.runtime.rundir import RunDir
from echo2.runtime.scoring import score
from echo2.tasks.base import TaskStream
from echo2.tasks.load import load_tasks
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.identity import RunIdentity
from echo2.types import GroupRef, Lease, RolloutGroup, SnapshotRef, Task
from echo2.weights import ChunkStore

log = logging.getLogger(__name__)

#: Orders that may wait for one worker; one that reads so slowly is cut off and comes back.
OUTBOX_ORDERS_MAX = 1024


class Head:
    """One run's control plane. `happen(event)` is the one place where the planner is called."""

    def __init__(self, rundir: RunDir, config: Config, identity: RunIdentity) -> None:
        self.rundir, self.config, self.identity = rundir, config, identity
        self.clock = Clock()
        self.tasks = TaskStream(
            load_tasks(config.tasks.source, config.tasks.params, config.run.seed), config.run.seed, config.tasks.shuffle
        )
        self.eval_tasks, eval_size = self._load_eval()
        self.ledger = Ledger(rundir.ledger)
        self.run_id = self._meta("run_id", lambda: secrets.token_hex(6))
        offers = read_offers(config)
        self.options = planner_options(config, eval_size, offers)
        self.planner = Planner(self.options)
        self.log = EventLog(rundir.events, self.options)
        self.metrics = Metrics(rundir.metrics, self._sinks())
        self.costs = CostBook(self.ledger.get_meta("costs"))
        self.counters: dict[str, int] = {"workers_lost": 0, **self.ledger.get_meta("counters", {})}
        self._traffic_before = {name: self.counters.pop(name, 0) for name in ("origin_bytes", "peer_bytes")}
        self.vocab_size: int | None = self.ledger.get_meta("vocab_size")
        self.evals, self.turned_away = Evals(), dict[str, str]()
        self.broadcast = BroadcastMeter()
        self.reader = Reader()
        self.referee = Referee(config.tasks.environment) if config.tasks.environment else None
        self.rollout_log = RolloutLog(rundir.rollouts, config.run.log_rollouts)
        self.reward = RewardProcess(
            config.reward.functions, config.reward.weights, config.reward.timeout_seconds, rundir.logs / "reward.log"
        )
        self.workers: dict[str, Presence] = {}
        self.learner: LearnerPresence | None = None
        self.pending: dict[int, Pending] = {}
        self.lease_started: dict[int, tuple[str, float]] = {}
        self.started_at = self.clock.now() - self.ledger.get_meta("seconds", 0.0)  # of all heads of this run together
        self.outcome: tuple[str, str] | None = None
        self.distribution = self._distribution()
        self.over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self.machines = self._machines(offers)
        self._carry = self._carriers()

    def _load_eval(self) -> tuple[TaskStream | None, int]:
        config = self.config
        if not config.eval.source:
            return None, 0
        source = load_tasks(config.eval.source, config.eval.params, config.run.seed)
        return TaskStream(source, config.run.seed, False), min(config.eval.limit, len(source))

    def _distribution(self) -> Distribution:
        store, broadcast = ChunkStore(self.rundir.snapshots), self.config.broadcast
        options = BroadcastOptions(scheme=broadcast.scheme, fan_out=broadcast.fan_out)
        archive = Archive(store, deltas=broadcast.deltas)
        dial = GrpcNetwork(self.identity.credentials).to_peer
        origin = OriginNode(store, options, self.order, self.clock, dial=dial, on_error=self.fail)
        return Distribution(archive, origin, self.identity, self.order, self.attending, self.spawn)

    def _machines(self, offers: Mapping[str, Offer]) -> Machines:
        return Machines(
            offers,
            self.run_id,
            self.rundir.ticket,
            self.rundir.logs / "machines.log",
            self.ledger.get_meta("machines", {}),
            lambda plain: self.ledger.set_meta("machines", plain),
            self._rent_failed,
            self.spawn,
        )

    def _sinks(self) -> list[Sink]:
        run, sinks = self.config.run, list[Sink]()
        if run.tensorboard:
            sinks.append(TensorBoardSink(self.rundir.path / "tensorboard"))
        if run.wandb_project:
            sinks.append(WandbSink(run.wandb_project, self.run_id, self.rundir.path, asdict(self.config)))
        return sinks

    def _meta(self, key: str, make: Callable[[], Any]) -> Any:
        """A value that is made once and kept over restarts."""
        value = self.ledger.get_meta(key)
        if value is None:
            value = make()
            self.ledger.set_meta(key, value)
        return value

    # ---- the one place where things happen -----------------------------------------------------------------------

    def happen(self, event: ev.Event) -> list[do.Command]:
        """Tell the planner, log it, and carry out what it asks for."""
        if self.outcome is not None:
            return []
        now = self.clock.now()
        commands = self.planner.handle(event, now)
        self.log.write(now, event, commands)
        with self.ledger.together():
            for command in commands:
                self._carry[type(command)](command)
        return commands

    async def start(self) -> None:
        """Tell the planner what the ledger and the snapshot store hold.

        Raises:
            UserError: the run has done more steps than it now is to do.
        """
        published = await self.distribution.archive.mend()
        if published:
            await self.read_files(max(published))
        state = self.ledger.recover()
        if state.version > self.options.max_steps:
            raise UserError(
                f"run.max_steps = {self.options.max_steps}, but {state.version} steps are trained already. "
                f"Set it to {state.version} or more."
            )
        self.happen(
            ev.HeadStarted(
                version=state.version,
                lineage=max(1, state.lineage),
                checkpoint_version=self.ledger.get_meta("checkpoint_version", -1),
                oldest_kept=self.ledger.get_meta("oldest_kept", 0),
                next_number=state.next_number,
                next_lease_id=max(state.next_lease_id, self.ledger.get_meta("next_lease_id", 1)),
                **recovered(state, self.options.group_size, self._is_flat),
                published=tuple(published),
                evaluated=tuple(row["step"] for row in self.metrics.rows if "eval/accuracy" in row),
                machines=tuple(ev.RecoveredMachine(one.offer, one.worker_id) for one in self.machines.kept()),
                ess=known_ess(self.metrics.rows, state.version),
            )
        )

    async def read_files(self, ref: SnapshotRef) -> None:
        """Load the tokenizer that comes with a snapshot which is stored whole, unless there is one.

        Raises:
            PeerError: the store is damaged.
            UserError: transformers can't read the tokenizer.
        """
        if not self.reader.is_loaded:
            stop = self.referee.stop if self.referee is not None else ""
            await self.reader.load(self.distribution.archive.store.files(ref), stop)

    def _is_flat(self, group: GroupRecord) -> bool:
        """Only dynamic sampling asks, of groups that it may still replace and of those it kept (a metric of their step,
        should it be trained again).
        """
        if group.state not in ("ready", "trained") or not self.options.dynamic_sampling:
            return False
        delivered = self.delivered_group(GroupRef("train", group.number))
        return delivered is not None and delivered.is_flat

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run something beside the handlers; its failure stops the run instead of vanishing."""
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)
        return task

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The run can't go on."""
        log.error("the run stops", exc_info=error)
        kind = "no_room" if isinstance(error, NoRoomError) else "user_error" if isinstance(error, UserError) else "bug"
        self.end(kind, str(error) or repr(error))

    def end(self, kind: str, reason: str) -> None:
        """The first end counts. `kind`: finished, stopped, user_error, no_room (of this head, not the run) or bug."""
        if self.outcome is None:
            self.outcome = (kind, reason)
            self.over.set()

    def check_budget(self) -> None:
        """End the run once its budget is spent."""
        budget = self.config.fleet.budget_usd
        if budget and self.costs.cum_usd(self.clock.now()) >= budget:
            self.end("stopped", f"the budget of ${budget:g} is spent; raise fleet.budget_usd to go on with --resume")

    def save_books(self) -> None:
        self.ledger.set_meta("costs", self.costs.to_plain(self.clock.now()))
        self.ledger.set_meta("counters", {**self.counters, **self.traffic()})
        self.ledger.set_meta("seconds", self.clock.now() - self.started_at)

    def traffic(self) -> dict[str, int]:
        """Bytes of chunks since the run began: sent by the origin, and by workers to each other."""
        origin = self.distribution.origin
        before = self._traffic_before
        return {
            "origin_bytes": before["origin_bytes"] + origin.origin_bytes,
            "peer_bytes": before["peer_bytes"] + origin.peer_bytes,
        }

    async def close(self) -> None:
        """Tell everybody that it is over and let go of all files."""
        kind, reason = self.outcome or ("stopped", "the head is closing")
        if kind not in ("user_error", "no_room"):
            for presence in self.workers.values():
                self._put(presence, wire.Order(stop=wire.Stop(reason=reason)))
        if self.learner is not None and self.learner.feed is not None and kind != "no_room":
            self.learner.feed.put_nowait(wire.StepDone(stop=True, reason=reason))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # those that score end their process first
        await self.reward.close()
        if self.referee is not None:
            self.referee.close()
        try:
            self.save_books()
        except UserError:
            log.exception("the books of the last step could not be saved")
        self.ledger.close()
        self.metrics.close()
        self.log.close()

    # ---- commands ------------------------------------------------------------------------------------------------

    def _carriers(self) -> dict[type[do.Command], Callable[[Any], object]]:
        return {
            do.IssueGroup: lambda c: self.ledger.issue(c.number, c.step, c.number, self.clock.now()),
            do.GrantLeases: self._grant,
            do.CloseLease: self._close_lease,
            do.RevokeLease: lambda c: strangers.revoke(self, c),
            do.ExpelWorker: lambda c: log.warning("%s is expelled for %.0f s: %s", c.worker_id, c.seconds, c.reason),
            do.AcceptDelivery: self._accept,
            do.RefuseDelivery: self._refuse,
            do.ScoreGroup: lambda c: self.spawn(score(self, c.group)),
            do.RetireGroup: self._retire,
            do.FeedGroup: self._feed,
            do.EndStep: self._end_step,
            do.RecordStep: lambda c: self.ledger.train(c.step, c.lineage, c.numbers, self.clock.now()),
            do.RecordLearner: self._record_learner,
            do.RefuseLearner: lambda c: None,
            do.AnnounceSnapshot: self._announce,
            do.DropSnapshot: self._drop_snapshot,
            do.RecordCheckpoint: self._record_checkpoint,
            do.StartEval: lambda c: self.evals.start(c.ref.version),
            do.FinishEval: self._finish_eval,
            do.SkipEval: lambda c: strangers.skip_evaluation(self, c),
            do.WakeAt: self._wake_at,
            do.WorkerGone: self._worker_gone,
            do.ActivateWorker: lambda c: self.costs.activated(c.worker_id, self.clock.now()),
            do.ReleaseWorker: self._release,
            do.RentMachine: lambda c: self.machines.rent(c.offer),
            do.ReturnMachine: self._return_machine,
            do.StopRun: lambda c: self.end("stopped", c.reason),
            do.FinishRun: lambda c: self.end("finished", c.reason),
        }

    def order(self, worker_id: str, order: wire.Order) -> None:
        """Send an order to a worker, if it attends."""
        presence = self.workers.get(worker_id)
        if presence is not None:
            self._put(presence, order)

    @staticmethod
    def _put(presence: Presence, order: wire.Order) -> None:
        if presence.outbox.qsize() >= OUTBOX_ORDERS_MAX:
            while not presence.outbox.empty():
                presence.outbox.get_nowait()
            presence.outbox.put_nowait(None)  # ends its stream; it reconnects and is told everything anew
            return
        presence.outbox.put_nowait(order)

    def task_of(self, group: GroupRef, cursor: int) -> Task:
        if group.kind == "train":
            return self.tasks.task(cursor)
        if self.eval_tasks is None:
            raise InvariantError(f"{group} without evaluation tasks")
        return self.eval_tasks.task(cursor)

    def _grant(self, command: do.GrantLeases) -> None:
        now, batch = self.clock.now(), wire.LeaseBatch()
        for lease in command.leases:
            if lease.group.kind == "train":
                attempts = (lease.num_samples, lease.first_sample)
                self.ledger.grant(lease.lease_id, lease.group.number, command.worker_id, now, lease.deadline, *attempts)
            self.lease_started[lease.lease_id] = (command.worker_id, now)
            try:
                batch.leases.append(self._assignment(lease))
            except UserError as error:  # nobody can sample it
                self._tell_next(ev.GroupUnfit(lease.group, "prompt_unfit", str(error)))
        if command.leases[0].group.kind == "eval":  # the ledger does not see these leases, and their ids count too
            self.ledger.set_meta("next_lease_id", command.leases[-1].lease_id + 1)
        self.order(command.worker_id, wire.Order(leases=batch))

    def _assignment(self, lease: Lease) -> wire.Lease:
        config, kind, task = self.config, lease.group.kind, self.task_of(lease.group, lease.cursor)
        params = config.sampling_params if kind == "train" else config.eval_params
        turns = (config.tasks.environment, config.sampling.max_turns)
        return messages.encode_assignment(assignment_of(lease, task, self.reader.prompt(kind, task), params, *turns))

    def _close_lease(self, command: do.CloseLease) -> None:
        now = self.clock.now()
        if command.group.kind == "train":
            self.ledger.close_lease(command.lease_id, command.outcome, now)
        started = self.lease_started.pop(command.lease_id, None)
        if started is not None and command.outcome in ("expired", "lost", "failed", "superseded"):
            cause = "duplicate" if command.outcome == "superseded" else command.outcome
            self.costs.wasted_lease(started[0], cause, now - started[1])

    def _accept(self, command: do.AcceptDelivery) -> None:
        pending = self.pending[command.lease_id]
        group = pending.group
        share, now = portions.share(group, self.options.group_size), self.clock.now()
        self.costs.useful(command.worker_id, min(group.generate_seconds, self.options.lease_seconds), now, share)
        if group.group.kind == "eval":
            self.evals.deliver(group)
            return
        if (whole := portions.take(self.ledger, command, group, pending.payload, self.options.group_size)) is None:
            return
        group, payload = whole
        self.ledger.deliver(
            number=group.group.number,
            payload=payload,
            worker_id=group.worker_id,
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            num_tokens=group.num_tokens,
            seconds=group.generate_seconds,
            now=now,
        )

    def _refuse(self, command: do.RefuseDelivery) -> None:
        pending = self.pending.get(command.lease_id)
        group = pending.group if pending is not None else None
        seconds, tokens = (group.generate_seconds, group.num_tokens) if group is not None else (0.0, 0)
        self.costs.wasted(command.worker_id, command.refusal, seconds, self.clock.now())
        if command.group is None or command.group.kind == "train":
            number = command.group.number if command.group is not None else 0
            args = (command.lease_id, number, command.worker_id, command.refusal, tokens, seconds, self.clock.now())
            self.ledger.refuse(*args)

    def _retire(self, command: do.RetireGroup) -> None:
        self.ledger.retire(command.number, command.why, self.clock.now())
        record = self.planner.groups.get(command.number)
        for name, part in portions.shares(record) if record is not None else ():
            self.costs.regretted(name, command.why, part)  # its result came, and counted as useful so far

    def keep_scored(self, group: RolloutGroup) -> None:
        """The scored form of a delivered group, in place of the other.

        Raises:
            PeerError: "oversized".
        """
        if group.group.kind == "eval":
            self.evals.deliver(group)
        else:
            self.ledger.score(group.group.number, messages.encode_group(group).SerializeToString(), self.clock.now())

    def delivered_group(self, ref: GroupRef) -> RolloutGroup | None:
        """As it was delivered, or as it was scored since."""
        if ref.kind == "eval":
            return self.evals.get(ref)
        return messages.decode_group(wire.RolloutGroup.FromString(self.ledger.payload(ref.number)))

    def seconds_of(self, lease_id: int) -> float:
        """Since an open lease was granted; one that was granted by an earlier head has all its length."""
        started = self.lease_started.get(lease_id)
        return self.options.lease_seconds if started is None else self.clock.now() - started[1]

    def _feed(self, command: do.FeedGroup) -> None:
        payload = wire.RolloutGroup.FromString(self.ledger.payload(command.number))
        if self.learner is not None and self.learner.feed is not None:
            self.learner.feed.put_nowait(payload)
        self.rollout_log.write(command.step + 1, payload, lambda: self.tasks.task(payload.cursor))

    def _end_step(self, command: do.EndStep) -> None:
        if self.learner is not None and self.learner.feed is not None:
            self.learner.feed.put_nowait(wire.StepDone(cursor=command.cursor, num_groups=command.num_groups))

    def _record_learner(self, command: do.RecordLearner) -> None:
        self.ledger.learner_joined(command.version, command.lineage, self.clock.now())
        self.metrics.truncate(command.version)

    def _announce(self, command: do.AnnounceSnapshot) -> None:
        self.distribution.announce(command.ref, command.worker_ids)

    def _drop_snapshot(self, command: do.DropSnapshot) -> None:
        self.spawn(self.distribution.archive.drop(command.ref))

    def attending(self, worker_id: str) -> Worker | None:
        """The worker, if it can be told something now."""
        worker = self.planner.fleet.get(worker_id)
        return worker if worker is not None and worker_id in self.workers else None

    def _record_checkpoint(self, command: do.RecordCheckpoint) -> None:
        self.ledger.checkpoint(command.version, command.oldest_kept)
        self.ledger.set_meta("checkpoint_version", command.version)
        self.ledger.set_meta("oldest_kept", command.oldest_kept)

    def _finish_eval(self, command: do.FinishEval) -> None:
        values = self.evals.finish(command.version, command.num_failed)
        self.metrics.amend(command.version, values)

    def _wake_at(self, command: do.WakeAt) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, command.at - self.clock.now())
        self._wake = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._tell(ev.Tick())

    def _tell_next(self, event: ev.Event) -> None:
        """Once the event that is being handled is through."""
        asyncio.get_running_loop().call_soon(self._tell, event)

    def _tell(self, event: ev.Event) -> None:
        try:
            self.happen(event)
        except Exception as error:  # the event loop would only log it
            self.fail(error)

    def _rent_failed(self, offer: str, reason: str) -> None:
        self.happen(ev.RentFailed(offer, reason))

    def _release(self, command: do.ReleaseWorker) -> None:
        self.costs.stands_by(command.worker_id, self.clock.now())
        self.broadcast.gone(command.worker_id)  # it need not fetch what is on its way

    def _return_machine(self, command: do.ReturnMachine) -> None:
        self.order(command.worker_id, wire.Order(stop=wire.Stop(reason="its machine is given back")))
        self.machines.give_back(command.offer, command.worker_id)

    def _worker_gone(self, command: do.WorkerGone) -> None:
        self.counters["workers_lost"] += 1
        self.costs.left(command.worker_id, self.clock.now())
        self.broadcast.gone(command.worker_id)
        self.distribution.origin.left(command.worker_id, command.reason)
        presence = self.workers.pop(command.worker_id, None)
        if presence is not None:
            presence.outbox.put_nowait(None)
