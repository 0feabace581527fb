"""The head: one run's control plane, around the driver (`head/ledger/driver.py`) with planner and ledger.

It never imports torch, so that no training step can stall a heartbeat. `service` answers calls and turns them into
events, `effects` carries out the planner's commands, `results` reads and scores what workers deliver, and `report`
writes metrics and status for people.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.rundir import RunDir
from echo2.core.background import Background
from echo2.core.clock import Clock
from echo2.core.errors import NoRoomError, UserError
from echo2.core.types import Lease, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.fleet.accounts import CostBook
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.machines import Machines
from echo2.head.ledger.books import BroadcastTimes, Evals, Failures
from echo2.head.ledger.driver import Driver, Effects, Stored
from echo2.head.ledger.eventlog import EventLog
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.metrics import Metrics, Sink, TensorBoardSink, TrackioSink, WandbSink
from echo2.head.ledger.rollout_log import RolloutLog
from echo2.head.serve.planner_options import planner_options, read_offers
from echo2.head.serve.presence import LearnerPresence, Presence
from echo2.head.serve.reading import RunTokenizer, TaskReader
from echo2.head.strangers.copied_rollouts import CopiedRollouts
from echo2.head.strangers.replay import Referee
from echo2.reward.process import RewardProcesses
from echo2.tasks.harness_process import is_harness
from echo2.tasks.streams import Tasks, held_out_tasks, refuse_changed_rows, training_tasks
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.identity import RunIdentity
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)

#: Maximum number of orders queued for one worker. A worker that reads too slowly is disconnected, and reconnects.
OUTBOX_ORDERS_MAX = 1024


class Head:
    """The parts of a head, and `dispatch(event)`, which all state changes go through. `effects` makes what carries out
    the planner's commands on these parts (`HeadEffects`).
    """

    def __init__(
        self, rundir: RunDir, config: Config, identity: RunIdentity, effects: Callable[[Head], Effects]
    ) -> None:
        self.rundir, self.config, self.identity = rundir, config, identity
        self.clock = Clock()
        self.train_tasks = training_tasks(config.tasks, config.run.seed)
        held_out = held_out_tasks(config.eval, config.run.seed)
        self.tasks = TaskReader(self.train_tasks, held_out)
        self.ledger = Ledger(rundir.ledger)
        self._refuse_changed_rows(held_out)
        self.run_id = self._meta("run_id", lambda: secrets.token_hex(6))
        offers = read_offers(config)
        planned = planner_options(config, len(held_out) if held_out is not None else 0, offers)
        # A new seed at each start: earlier checks must not reveal which groups will be checked.
        self.options = replace(planned, check_seed=secrets.randbits(63))
        self.driver = Driver(self.options, self.ledger, effects(self))
        self.planner = self.driver.planner
        self.log = EventLog(rundir.events, self.options)
        self.metrics = Metrics(rundir.metrics, self._sinks())
        self.costs = CostBook(self.ledger.get_meta("costs"))
        self.counters: dict[str, int] = {"workers_lost": 0, **self.ledger.get_meta("counters", {})}
        self._traffic_before = {name: self.counters.pop(name, 0) for name in ("origin_bytes", "peer_bytes")}
        self.failures = Failures(self.ledger.get_meta("failures"))
        self.vocab_size: int | None = self.ledger.get_meta("vocab_size")
        self.idle_predicted: tuple[float, float] | None = None  # when, and the ratio
        self.evals = Evals() if held_out is None else Evals(held_out.source_of)
        self.turned_away: dict[str, str] = {}
        self.source_rewards: dict[str, list[float]] = {}  # by source, of groups scored since the last row of metrics
        self.broadcast_times = BroadcastTimes()
        self.reader = RunTokenizer(config.model.chat_template_args)
        walked = config.tasks.environment and not is_harness(config.tasks.environment)
        self.referee = Referee(config.tasks.environment) if walked else None
        self.rollout_log, self.copied = RolloutLog(rundir.rollouts, config.learner.advantage), CopiedRollouts()
        self.reward = RewardProcesses(
            config.reward.functions,
            config.reward.timeout_seconds,
            rundir.logs / "reward.log",
            on_retry=partial(self.failures.add, "reward_retried"),
        )
        self.workers: dict[str, Presence] = {}
        self.learner: LearnerPresence | None = None
        self.started_at = self.clock.now() - self.ledger.get_meta("seconds", 0.0)  # earlier heads' time included
        self.stopping = ""  # why the run is about to end; empty while it is not
        self.was_told_to_stop = False  # by a signal
        self.outcome: tuple[str, str] | None = None
        self.distribution = self._distribution()
        self.over = asyncio.Event()
        self._background = Background(self.fail)
        self._heard: dict[str, None] = {}
        self._waiting: list[tuple[ev.Event, asyncio.Future[list[do.Command]]]] = []
        self.machines = self._machines(offers)

    def _refuse_changed_rows(self, held_out: Tasks | None) -> None:
        """Keep the digests of the run's rows. Raises UserError: an earlier head of this run read other rows."""
        names = [*self.config.tasks.sources, *self.config.eval.sets.values()]
        digests = [*self.train_tasks.digests(), *(held_out.digests() if held_out is not None else [])]
        self.ledger.set_meta("rows", refuse_changed_rows(names, digests, self.ledger.get_meta("rows", {})))

    def _distribution(self) -> Distribution:
        store = ChunkStore(self.rundir.snapshots)
        archive = Archive(store)
        dial = GrpcNetwork(self.identity.credentials).to_peer
        origin = OriginNode(store, self.order, dial, self.fail)
        return Distribution(archive, origin, self.identity, self.order, self.attending, self.spawn)

    def _machines(self, offers: Mapping[str, Offer]) -> Machines:
        return Machines(
            offers,
            self.run_id,
            self.rundir.ticket,
            self.rundir.logs / "machines.log",
            self.ledger.get_meta("machines", {}),
            lambda plain: self.ledger.set_meta("machines", plain),
            lambda offer, reason: self.tell(ev.RentFailed(offer, reason)),
            self.spawn,
        )

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = []
        for target in self.config.run.log_to:
            kind, _, project = target.partition(":")
            if kind == "tensorboard":
                sinks.append(TensorBoardSink(self.rundir.path / "tensorboard"))
            elif kind == "trackio":
                sinks.append(TrackioSink(project, self.run_id, asdict(self.config)))
            else:
                rollouts = self.rundir.rollouts if kind == "wandb+rollouts" else None
                sinks.append(WandbSink(project, self.run_id, self.rundir.path, asdict(self.config), rollouts))
        return sinks

    def _meta(self, key: str, make: Callable[[], Any]) -> Any:
        """Return a value that is created once and kept over restarts."""
        value = self.ledger.get_meta(key)
        if value is None:
            value = make()
            self.ledger.set_meta(key, value)
        return value

    # ---- events and commands -------------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> asyncio.Future[list[do.Command]]:
        """Queue an event, to be handled together with other pending events. Return the planner's future answer: no
        commands once the run is over.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._handle_waiting)
        answer: asyncio.Future[list[do.Command]] = loop.create_future()
        self._waiting.append((event, answer))
        return answer

    def dispatch(self, event: ev.Event) -> list[do.Command]:
        """Let the driver handle an event at once. Return the planner's commands: none once the run is over.

        Raises:
            UserError: the ledger or the log can't be written.
            InvariantError: a command contradicts the ledger.
        """
        answer = self.tell(event)
        self._handle_waiting()
        return answer.result()

    def heard(self, worker_id: str) -> None:
        """Record that a worker is alive without news. The planner is told of all such workers together, every half
        heartbeat.
        """
        if not self._heard:
            asyncio.get_running_loop().call_later(self.options.heartbeat_seconds / 2, self._tell_heard)
        self._heard[worker_id] = None

    def _tell_heard(self) -> None:
        heard, self._heard = self._heard, {}
        self.tell(ev.WorkersHeard(tuple(heard)))

    def _handle_waiting(self) -> None:
        """Handle all waiting events in one transaction and one write of the log."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        events = [event for event, _ in waiting]
        try:
            answers = self._handle(events) if self.outcome is None else [[] for _ in events]
        except Exception as error:
            self.fail(error)
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()  # marks it as retrieved: callers of `tell` may ignore the answer
            return
        for (_, answer), commands in zip(waiting, answers, strict=True):
            if not answer.done():
                answer.set_result(commands)

    def _handle(self, events: Sequence[ev.Event]) -> list[list[do.Command]]:
        try:
            answers = self.driver.handle_all(events, self.clock.now())
        finally:
            self.log.flush()
        for event, commands in zip(events, answers, strict=True):
            self.failures.see(event, commands)
        return answers

    async def start(self) -> None:
        """Tell the planner what the ledger and the snapshot store hold.

        Raises:
            UserError: the run has trained more steps than `max_steps`, or groups of another size are under way.
        """
        published = [ref for ref in self.distribution.archive.retained if not ref.is_base_model]
        if published:
            await self.read_files(max(published))
        evaluated = tuple(self.metrics.accuracies)
        machines = tuple(ev.RecoveredMachine(one.offer, one.worker_id) for one in self.machines.kept())
        stored = Stored(tuple(published), evaluated, machines)
        self.driver.start(stored, self.clock.now())
        self.log.flush()
        self.metrics.truncate(self.planner.training.version)  # a kill may have preceded this after a fall-back

    async def read_files(self, ref: SnapshotRef) -> None:
        """Load the tokenizer of a snapshot, unless one is loaded.

        Raises:
            PeerError: the store is damaged.
            UserError: transformers can't read the tokenizer.
        """
        if not self.reader.is_loaded:
            stop = await self.referee.stop() if self.referee is not None else ""
            await self.reader.load(self.distribution.archive.files(ref), stop, tuple(self.config.sampling.stop))

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine in the background. Its failure stops the run instead of being lost."""
        return self._background.spawn(coroutine)

    def fail(self, error: BaseException) -> None:
        """End the run because of an error."""
        log.error("the run stops", exc_info=error)
        kind = "no_room" if isinstance(error, NoRoomError) else "user_error" if isinstance(error, UserError) else "bug"
        self.end(kind, str(error) or repr(error))

    def end(self, kind: str, reason: str) -> None:
        """End the run; only the first call counts. `kind`: finished, stopped, user_error, bug, or no_room, which ends
        this head but not the run."""
        if self.outcome is None:
            self.outcome = (kind, reason)
            self.over.set()

    def save_books(self) -> None:
        self.ledger.set_meta("costs", self.costs.to_plain(self.clock.now()))
        self.ledger.set_meta("counters", {**self.counters, **self.traffic()})
        self.ledger.set_meta("failures", self.failures.to_plain())
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
        """Tell the workers and the learner that the run is over, and close all files."""
        kind, reason = self.outcome or ("stopped", "the head is closing")
        if kind not in ("user_error", "no_room"):
            for presence in self.workers.values():
                self._put(presence, wire.Order(stop=wire.Stop(reason=reason)))
        if self.learner is not None and kind != "no_room":
            self.learner.orders.put_nowait(wire.LearnerWelcome(stop=reason))
        try:
            await self._background.close()  # scoring tasks end their reward process first
            await self.reward.close()
            self.tasks.close()
            if self.referee is not None:
                await self.referee.close()
        finally:
            self._close_books()

    def _close_books(self) -> None:
        try:
            self.save_books()
        except UserError:
            log.exception("the costs of the last step could not be saved")
        self.ledger.close()
        self.metrics.close()
        self.log.close()

    # ---- used by the parts of the head -----------------------------------------------------------------------------

    def order(self, worker_id: str, order: wire.Order) -> None:
        """Send an order to a worker, if it is connected."""
        presence = self.workers.get(worker_id)
        if presence is not None:
            self._put(presence, order)

    def grant(self, worker_id: str, leases: Sequence[Lease]) -> None:
        """Send leases to a worker, if it attends, together with its unsent ones. In deterministic mode each grant is
        sent separately: leases granted together are sampled together.
        """
        presence = self.workers.get(worker_id)
        if presence is None:
            return
        if presence.unsent is not None and not self.config.run.deterministic:
            presence.unsent.extend(leases)
        else:
            presence.unsent = list(leases)
            self._put(presence, presence.unsent)

    @staticmethod
    def _put(presence: Presence, order: wire.Order | list[Lease]) -> None:
        if presence.outbox.qsize() >= OUTBOX_ORDERS_MAX:
            while not presence.outbox.empty():
                presence.outbox.get_nowait()
            presence.outbox.put_nowait(None)  # ends its stream; it reconnects and gets the current state
            return
        presence.outbox.put_nowait(order)

    def attending(self, worker_id: str) -> Worker | None:
        """Return the worker, if it is connected."""
        worker = self.planner.fleet.get(worker_id)
        return worker if worker is not None and worker_id in self.workers else None
