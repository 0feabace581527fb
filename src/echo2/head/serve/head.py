"""The head: one run's control plane, around the driver (`head/ledger/driver.py`) with planner and ledger.

It never imports torch, so that no training step can stall a heartbeat. `service` answers calls and turns them into
events, `event_queue` passes these to the driver, and `effects` carries out the planner's commands. `results` reads and
scores what workers deliver, `connections` knows who is connected, `books` keeps and `report` writes what people read,
and `shutdown` ends the run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from echo2.config import Config
from echo2.config.offers import Offer
from echo2.config.rundir import RunDir
from echo2.core.clock import Clock
from echo2.core.types import SnapshotRef
from echo2.head.decide import events as ev
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.machines import Machines
from echo2.head.ledger.driver import Driver, Effects, Stored
from echo2.head.ledger.eventlog import EventLog
from echo2.head.ledger.ledger import Ledger
from echo2.head.serve.books import RunBooks
from echo2.head.serve.connections import Connections
from echo2.head.serve.event_queue import EventQueue
from echo2.head.serve.planner_options import planner_options, read_offers
from echo2.head.serve.reading import RunTokenizer, TaskReader
from echo2.head.serve.results import Deliveries, Scoring
from echo2.head.serve.shutdown import RunEnd
from echo2.head.store.contents import Kept
from echo2.head.store.mirror import Mirror
from echo2.reward.judge import open_judge
from echo2.reward.process import RewardProcesses
from echo2.tasks.streams import Tasks, held_out_tasks, refuse_changed_rows, training_tasks
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.identity import RunIdentity
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.store.archive import Archive
from echo2.weights.store.store import ChunkStore


class Head:
    """The parts of a head; `open` makes one that serves. `effects` makes what carries out the planner's commands on
    these parts (`HeadEffects`).
    """

    def __init__(
        self,
        rundir: RunDir,
        config: Config,
        identity: RunIdentity,
        effects: Callable[[Head], Effects],
        mirror: Mirror | None = None,
    ) -> None:
        self.rundir, self.config, self.identity, self.clock = rundir, config, identity, Clock()
        self.train_tasks = training_tasks(config.tasks, config.run.seed)
        held_out = held_out_tasks(config.eval, config.run.seed)
        self.mirror = mirror
        self.ledger = Ledger(rundir.ledger) if mirror is None else mirror.open_ledger()
        self._refuse_changed_rows(held_out)
        self.run_id = self._meta("run_id", lambda: secrets.token_hex(6))
        offers = read_offers(config)
        planned = planner_options(config, len(held_out) if held_out is not None else 0, offers)
        # A new seed at each start: earlier checks must not reveal which groups will be checked.
        self.options = replace(planned, check_seed=secrets.randbits(63))
        self._driver = Driver(self.options, self.ledger, effects(self))
        self.planner = self._driver.planner
        self.connections = Connections(config.run.deterministic)
        self.ending = RunEnd(self.planner, self.connections, rundir.checkpoints, self.clock)
        self.spawn = self.ending.spawn
        self.books = RunBooks(rundir, config, self.run_id, self.ledger, held_out, self.clock)
        log = EventLog(rundir.events, self.options)
        self.events = EventQueue(self._driver, log, self.books.failures, self.ending, self.clock)
        self.distribution = self._distribution()
        self.kept: Kept | None = None
        if mirror is not None:
            self.kept = Kept(rundir, identity, self.ledger, self.distribution.archive.store, mirror)
            self.books.metrics.follow(self.kept.keep_row)
        self.tasks = TaskReader(self.train_tasks, held_out)
        self.reader = RunTokenizer(config.model.chat_template_args)
        self.deliveries = Deliveries(config, self.planner, self.ledger, identity, self.clock, self.tasks, self.reader)
        self.reward = RewardProcesses(
            config.reward.functions,
            config.reward.timeout_seconds,
            rundir.logs / "reward.log",
            on_retry=partial(self.books.failures.add, "reward_retried"),
            judge=open_judge(
                config, self.ledger.get_meta("judge_usd", 0.0), partial(self.books.failures.add, "judge_retried")
            ),
        )
        teachers = config.distill.teachers
        self.scoring = Scoring(self.reward, self.ledger, self.tasks, self.reader, self.train_tasks, teachers, identity)
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

        Raises:
            UserError: a reward file does not load; the run has trained more steps than `max_steps`; or groups of
                another size are under way.
        """
        head = cls(rundir, config, identity, effects, mirror)
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
        head._driver.start(Stored(tuple(published), evaluated, machines), head.clock.now())
        head.events.log.flush()
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
        """Load the tokenizer of a snapshot, unless one is loaded.

        Raises:
            PeerError: the store is damaged.
            UserError: transformers can't read the tokenizer.
        """
        if not self.reader.is_loaded:
            await self.deliveries.load(self.distribution.archive.files(ref))

    def attending(self, worker_id: str) -> Worker | None:
        """Return the worker, if it is connected."""
        worker = self.planner.fleet.get(worker_id)
        return worker if worker is not None and worker_id in self.connections.workers else None

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
            self.tasks.close()
            await self.deliveries.close()
        finally:
            try:
                self.books.close(self.distribution.origin)
            finally:
                self.ledger.close()
                self.events.log.close()
