"""The head: one run's control plane, around the driver (`head/ledger/driver.py`) with planner and ledger.

It never imports torch, so that no training step can stall a heartbeat. `service` answers calls and turns them into
events, the `EventQueue` passes these to the driver, those that wait at the same moment together, and `effects` carries
out the planner's commands. `results` reads and scores what workers deliver, `connections` knows who is connected,
`head/ledger/books` keeps and `report` writes what people read. The run is stopped in order (`RunEnd`): the learner
saves a checkpoint while the head still records, then all processes end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.rundir import RunDir, newest_checkpoint
from echo2.core.background import Background
from echo2.core.clock import Clock
from echo2.core.errors import NoRoomError, UserError
from echo2.core.types import SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.decide.state import PlannerOptions, RentableOffer
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.machines import Machines, read_offers
from echo2.head.ledger.books import Failures, RunBooks
from echo2.head.ledger.driver import Driver, Effects, Stored
from echo2.head.ledger.eventlog import EventLog
from echo2.head.ledger.ledger import Ledger
from echo2.head.serve.connections import Connections
from echo2.head.serve.reading import RunTokenizer, TaskReader
from echo2.head.serve.results import Deliveries, Scoring
from echo2.head.store.contents import RunContents
from echo2.head.store.mirror import Mirror
from echo2.reward.judge import open_judge
from echo2.reward.reward_processes import RewardProcesses
from echo2.tasks.streams import Tasks, held_out_tasks, refuse_changed_rows, training_tasks
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.identity import RunIdentity
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)

#: Timeout for the learner to finish its step and save a checkpoint.
SAVE_SECONDS = 600.0
#: Time in which a disconnected learner may reconnect.
LOST_SECONDS = 5.0
LOOK_SECONDS = 0.1


class RunEnd:
    """`stopping`: why the run is about to end; empty while it is not. `outcome`: kind and reason of the end, None
    before; `over` is set then. An exception that background work does not handle ends the run.
    """

    def __init__(self, planner: Planner, connections: Connections, checkpoints: Path, clock: Clock) -> None:
        self._planner, self._connections, self._checkpoints, self._clock = planner, connections, checkpoints, clock
        self._is_requested = False  # by a signal
        self.stopping = ""
        self.outcome: tuple[str, str] | None = None
        self.over = asyncio.Event()
        self.background = Background(self.fail)
        self.spawn = self.background.spawn  # a failure stops the run instead of being lost

    def fail(self, error: BaseException) -> None:
        log.error("the run stops", exc_info=error)
        kind = "no_room" if isinstance(error, NoRoomError) else "user_error" if isinstance(error, UserError) else "bug"
        self.end(kind, str(error) or repr(error))

    def end(self, kind: str, reason: str) -> None:
        """End the run; only the first call counts. `kind`: finished, stopped, user_error, bug, or no_room, which ends
        this head but not the run."""
        if self.outcome is None:
            self.outcome = (kind, reason)
            self.over.set()

    def request_stop(self, reason: str) -> None:
        """Stop the run at the request of a person or the supervisor. The first request waits for the learner's
        checkpoint, even if the run is already stopping for another reason; the second one stops the run at once.
        """
        if self._is_requested:
            self.end("stopped", self.stopping)
        self._is_requested = True
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """End the run once the learner has saved a checkpoint. Does nothing if it is already stopping or over."""
        if self.stopping or self.outcome is not None:
            return
        self.stopping = reason
        log.info("stopping: %s; the learner saves a checkpoint of step %d", reason, self._planner.training.version)
        if (learner := self._connections.learner) is not None:
            learner.stop(reason)
            learner.send(wire.StepDone(stop=True, reason=reason))
        self.spawn(self._end_when_saved())

    async def _end_when_saved(self) -> None:
        here_at = self._clock.now()
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                while not self.has_saved() and self._clock.now() - here_at < LOST_SECONDS:
                    await asyncio.sleep(LOOK_SECONDS)  # poll: the learner may save without a report, or be dead
                    if self._connections.learner is not None:
                        here_at = self._clock.now()
        except TimeoutError:
            version = self._planner.training.version
            log.warning("the learner saved no checkpoint of step %d within %.0f s", version, SAVE_SECONDS)
        self.end("stopped", self.stopping)

    def has_saved(self) -> bool:
        """Whether a checkpoint covers every recorded step, or nothing was trained and no learner is connected."""
        training = self._planner.training
        if training.version == 0 and self._connections.learner is None:
            return True
        version = training.version
        return training.checkpoint_version >= version or newest_checkpoint(self._checkpoints) == version


class EventQueue:
    """All state changes of the run go through `tell` or `dispatch`. `log`: the file of events and commands."""

    def __init__(self, driver: Driver, log: EventLog, failures: Failures, end: RunEnd, clock: Clock) -> None:
        self._driver, self._failures, self._end, self._clock = driver, failures, end, clock
        self._log = log
        self._alive: dict[str, None] = {}
        self._waiting: list[tuple[ev.Event, asyncio.Future[list[do.Command]]]] = []

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

    def seen(self, worker_id: str) -> None:
        """Record that a worker is alive without news. The planner gets all such workers in one event, every half
        heartbeat.
        """
        if not self._alive:
            seconds = self._driver.planner.options.heartbeat_seconds / 2
            asyncio.get_running_loop().call_later(seconds, self._tell_alive)
        self._alive[worker_id] = None

    def _tell_alive(self) -> None:
        alive, self._alive = self._alive, {}
        self.tell(ev.WorkersHeard(tuple(alive)))

    def _handle_waiting(self) -> None:
        """Handle all waiting events in one transaction and one write of the log."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        events = [event for event, _ in waiting]
        try:
            answers = self._handle(events) if self._end.outcome is None else [[] for _ in events]
        except Exception as error:
            self._end.fail(error)
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
            answers = self._driver.handle_all(events, self._clock.now())
        finally:
            self._log.flush()
        for event, commands in zip(events, answers, strict=True):
            self._failures.see(event, commands)
        return answers


class Head:
    """The parts of a head, which `open` makes. Its `events` come last: the driver takes the run over from an earlier
    head, and the planner's commands need all parts.
    """

    events: EventQueue

    def __init__(
        self,
        rundir: RunDir,
        config: Config,
        identity: RunIdentity,
        mirror: Mirror | None = None,
    ) -> None:
        self.rundir, self.config, self.identity = rundir, config, identity
        self.train_tasks = training_tasks(config.tasks, config.run.seed)
        held_out = held_out_tasks(config.eval, config.run.seed)
        self.mirror = mirror
        self.ledger = Ledger(rundir.ledger) if mirror is None else mirror.open_ledger()
        self.clock = Clock(self.ledger.last_granted_at)
        self._refuse_changed_rows(held_out)
        self.run_id = self._meta("run_id", lambda: secrets.token_hex(6))
        offers = read_offers(config)
        planned = planner_options(config, len(held_out) if held_out is not None else 0, offers)
        # A new seed at each start: earlier checks must not reveal which groups will be checked.
        self.options = replace(planned, check_seed=secrets.randbits(63))
        self.planner = Planner(self.options)
        self.connections = Connections(config.run.deterministic)
        self.ending = RunEnd(self.planner, self.connections, rundir.checkpoints, self.clock)
        self.spawn = self.ending.spawn
        self.books = RunBooks(rundir, config, self.run_id, self.ledger, held_out, self.clock)
        self.event_log = EventLog(rundir.events, self.options)
        self.distribution = self._distribution()
        self.contents: RunContents | None = None
        if mirror is not None:
            self.contents = RunContents(rundir, identity, self.ledger, self.distribution.archive.store, mirror)
            self.books.metrics.follow(self.contents.keep_row)
        self.tasks = TaskReader(self.train_tasks, held_out, lambda: len(self.planner.leases))
        #: The tokenizer comes with the first snapshot.
        self.tokenizer: asyncio.Future[RunTokenizer] = asyncio.get_running_loop().create_future()
        self.deliveries = Deliveries(
            config, self.planner, self.ledger, identity, self.clock, self.tasks, self.tokenizer
        )
        self.reward = RewardProcesses(
            config.reward.functions,
            config.reward.timeout_seconds,
            rundir.logs / "reward.log",
            on_retry=partial(self.books.failures.add, "reward_retried"),
            judge=open_judge(
                config,
                self.ledger.get_meta("judge_usd", 0.0),
                partial(self.books.failures.add, "judge_retried"),
                partial(self.ledger.set_meta, "judge_usd"),
            ),
        )
        teaching = config.distill, config.tasks.environment
        self.scoring = Scoring(
            self.reward,
            self.ledger,
            self.tasks,
            self.tokenizer,
            self.train_tasks,
            *teaching,
            identity,
            self.connections.foretell,
        )
        self.machines = self._machines(offers)

    @classmethod
    async def open(
        cls,
        rundir: RunDir,
        config: Config,
        identity: RunIdentity,
        effects: Callable[[Head], Effects],
        mirror: Mirror | None = None,
    ) -> Head:
        """Return a head whose planner knows what the ledger and the snapshot store hold, and whose rewards are loaded.
        `effects` makes what carries out the planner's commands on its parts (`HeadEffects`).

        Raises:
            UserError: a reward file does not load; the run has trained more steps than `max_steps`; or groups of
                another size are under way.
        """
        head = cls(rundir, config, identity, mirror)
        try:
            await head.reward.start()
            published = [ref for ref in head.distribution.archive.retained if not ref.is_base_model]
            if published:
                await head.read_files(max(published))
        except BaseException:
            await head.close()
            await head.distribution.close()
            raise
        evaluated = tuple(head.books.metrics.accuracies)
        machines = tuple(ev.RecoveredMachine(one.offer, one.worker_id) for one in head.machines.kept())
        stored = Stored(tuple(published), evaluated, machines)
        driver = Driver(head.planner, head.ledger, effects(head), stored, head.clock.now())
        head.event_log.flush()
        head.events = EventQueue(driver, head.event_log, head.books.failures, head.ending, head.clock)
        head.books.metrics.truncate(head.planner.training.version)  # a kill may have preceded this after a fall-back
        return head

    def _refuse_changed_rows(self, held_out: Tasks | None) -> None:
        """Keep the digests of the run's rows. Raises UserError: an earlier head of this run read other rows."""
        names = [*self.config.tasks.sources, *self.config.eval.sets.values()]
        digests = [*self.train_tasks.digests(), *(held_out.digests() if held_out is not None else [])]
        self.ledger.set_meta("rows", refuse_changed_rows(names, digests, self.ledger.get_meta("rows", {})))

    def _distribution(self) -> Distribution:
        store = ChunkStore(self.rundir.snapshots)
        archive = Archive(store)
        dial = GrpcNetwork(self.identity.credentials).to_peer
        origin = OriginNode(store, self.connections.order, dial, self.ending.fail)
        return Distribution(archive, origin, self.identity, self.connections.order, self.attending, self.spawn)

    def _machines(self, offers: Mapping[str, Offer]) -> Machines:
        return Machines(
            offers,
            self.run_id,
            self.rundir.ticket,
            self.rundir.logs / "machines.log",
            self.ledger.get_meta("machines", {}),
            lambda plain: self.ledger.set_meta("machines", plain),
            lambda offer, reason: self.events.tell(ev.RentFailed(offer, reason)),
            self.spawn,
        )

    def _meta(self, key: str, make: Callable[[], Any]) -> Any:
        """Return a value that is created once and kept over restarts."""
        value = self.ledger.get_meta(key)
        if value is None:
            value = make()
            self.ledger.set_meta(key, value)
        return value

    async def read_files(self, ref: SnapshotRef) -> None:
        """Read the run's tokenizer from a snapshot, unless it is known.

        Raises:
            PeerError: the store is damaged.
            UserError: transformers can't read the tokenizer.
        """
        if not self.tokenizer.done():
            await self.deliveries.read_tokenizer(self.distribution.archive.files(ref))

    def attending(self, worker_id: str) -> Worker | None:
        worker = self.planner.fleet.get(worker_id)
        return worker if worker is not None and worker_id in self.connections.workers else None

    def keep_judge_usd(self) -> None:
        """Have the ledger know what the judge has cost."""
        if self.reward.judge is not None:
            self.reward.judge.keep_usd()

    async def close(self) -> None:
        """Tell the workers and the learner that the run is over, and close all files."""
        kind, reason = self.ending.outcome or ("stopped", "the head is closing")
        if kind not in ("user_error", "no_room"):
            for connection in self.connections.workers.values():
                connection.put(wire.Order(stop=wire.Stop(reason=reason)))
        if self.connections.learner is not None and kind != "no_room":
            self.connections.learner.stop(reason)
        try:
            await self.ending.background.close()  # scoring tasks end their reward process first
            await self.reward.close()
            self.keep_judge_usd()  # of requests that the close has ended, too
            self.tasks.close()
            await self.deliveries.close()
        finally:
            try:
                self.books.close(self.distribution.origin)
            finally:
                self.ledger.close()
                self.event_log.close()


def planner_options(config: Config, eval_size: int, offers: Mapping[str, Offer] | None = None) -> PlannerOptions:
    """Return the part of the configuration that the planner needs."""
    schedule, sampling = config.schedule, config.sampling
    return PlannerOptions(
        groups_per_step=schedule.groups_per_step,
        group_size=sampling.group_size,
        max_steps=config.run.max_steps,
        min_group=sampling.min_group or max(2, -(-sampling.group_size // 2)),
        max_staleness=schedule.max_staleness,
        publish_every=schedule.publish_every,
        dynamic_sampling=schedule.dynamic_sampling,
        deterministic=config.run.deterministic,
        require_checks=config.workers.require_checks,
        groups_per_batch=sampling.groups_per_batch,
        order=schedule.order,
        lease_seconds=schedule.lease_seconds,
        seed=config.run.seed,
        scored_by=config.reward.scored_by,
        eval_size=eval_size,
        eval_every=config.eval.every,
        eval_samples=config.eval.samples,
        activation=bool(config.fleet.offers),
        offers=tuple(
            RentableOffer(offer.name, offer.effective_rate, offer.price_usd_per_hour, offer.count)
            for offer in (offers or {}).values()
            if offer.rent
        ),
    )
