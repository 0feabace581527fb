"""The simulated head: the production driver, planner and ledger, a virtual clock, and kill -9 between any two
statements of a transaction, or any two effects.

The ledger, the published snapshots, and the evaluations that metrics.jsonl would name outlive a kill.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2.core.decide.machine import Event
from echo2.core.errors import InvariantError
from echo2.core.types import Attachment, GroupRef, LostRollout, PayloadId, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.ledger.driver import Driver, Stored
from echo2.head.ledger.ledger import Ledger
from echo2.planning.sim.origin import Arriving, ChunkAsked, ManifestAsked, SimOrigin
from echo2.planning.sim.report import FleetMeter, History, TrainedStep
from echo2.planning.sim.scenario import Scenario
from echo2.planning.sim.world import (
    HEAD,
    LEARNER,
    Actor,
    Check,
    Fed,
    HeadCall,
    Hello,
    Kill,
    Publish,
    Refused,
    SampledBatch,
    SimNetwork,
    SimWorld,
    Start,
    StepDone,
    StreamBroke,
    Take,
    Welcome,
    rollouts_in,
)
from echo2.weights.broadcast.decide import origin_messages as bev
from echo2.worker.decide import messages as wev


class Returned(Event):
    """The machine goes back to the provider and no longer costs anything."""


class Provider:
    """Starts the first machine of an offer that is not up, `restart_seconds` after the request."""

    def __init__(self, world: SimWorld, scenario: Scenario) -> None:
        self._world = world
        self._delay: dict[str, float] = {}
        self._machines: dict[str, list[str]] = {}
        self._coming: dict[str, float] = {}
        for kind, spec in enumerate(scenario.workers):
            if spec.offer:
                self._delay[spec.offer] = spec.restart_seconds
                names = [f"w{kind}-{index}" for index in range(spec.count)]
                self._machines.setdefault(spec.offer, []).extend(names)

    def rent(self, offer: str) -> None:
        """Rent a machine of the offer; do nothing if all of them are rented."""
        world = self._world
        for name in self._machines[offer]:
            if not world.actors[name].up and self._coming.get(name, -1.0) < world.now:
                self._coming[name] = world.now + self._delay[offer]
                world.post(self._delay[offer], name, Start())
                return

    def out(self) -> tuple[ev.RecoveredMachine, ...]:
        """Return the machines that are up, or on their way."""
        machines = []
        for offer, names in self._machines.items():
            for name in names:
                if self._world.actors[name].up:
                    machines.append(ev.RecoveredMachine(offer, name))
                elif self._coming.get(name, -1.0) >= self._world.now:
                    machines.append(ev.RecoveredMachine(offer))
        return tuple(machines)

    def take_back(self, worker_id: str) -> None:
        self._world.post(0.0, worker_id, Returned())


class Killed(Exception):
    """Unwinds the work under way when a kill comes. The ledger rolls back, as SQLite does for the next process."""


class MortalLedger(Ledger):
    """`statements_left`: statements that a transaction may still execute before the kill; None: no kill is planned."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.statements_left: int | None = None

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if self.statements_left is not None and self._in_transaction():
            if self.statements_left == 0:
                self.statements_left = None
                raise Killed
            self.statements_left -= 1
        return super()._execute(sql, parameters)


class _Wake(Event):
    number: int


class _Score(Event):
    group: GroupRef


class _Pass(Event):
    """The events that wait to share a transaction have waited long enough."""


class SimHead(Actor):
    """Actor `head`. `tell` is the only place where the planner is called. `keeps_events`: for a replay; those of a long
    run with thousands of workers exceed the memory. `evaluated` outlives the head, as metrics.jsonl does.
    """

    def __init__(
        self,
        world: SimWorld,
        network: SimNetwork,
        scenario: Scenario,
        seed: int,
        ledger: MortalLedger,
        history: History,
        keeps_events: bool = True,
    ) -> None:
        super().__init__(world, HEAD)
        self.network, self.scenario, self.ledger, self.history = network, scenario, ledger, history
        self.keeps_events = keeps_events
        self.provider = Provider(world, scenario)
        self.meter = FleetMeter(history, scenario.activation)
        self.evaluated: set[int] = set()
        self.options = scenario.planner_options(seed)
        base = scenario.base_ref  # published before the simulation begins
        self.store = {} if base is None else {base: hashlib.sha256(str(base).encode()).digest()}
        self.history.digests.update(self.store)
        self.dialable: dict[str, bool] = {}
        self.strangers = set[str]()
        self._doomed, self._any_carried_out, self._effects_left = False, False, 0
        self._commands: list[do.Command] = []
        self._restart()

    def _restart(self) -> None:
        self.planner = Planner(self.options)
        self.origin = SimOrigin(self.world, self.scenario, self.store, self.dialable, self._order)
        self.attending: dict[str, int] = {}
        self.learner_known = False
        self.learner_epoch: int | None = None
        self._wakes = 0
        self._waiting: list[ev.Event] = []

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: object) -> None:
        """Handle one event; a kill may end the process on the way."""
        try:
            match event:
                case Start():
                    self._start()
                case Kill():
                    self._doomed = True
                case HeadCall():
                    self._handle_call(event)
                case StreamBroke():
                    self._stream_broke(event)
                case _Wake():
                    if event.number == self._wakes:
                        self.tell(ev.Tick())
                case _Score():
                    self._score(event.group)
                case _Pass():
                    if self._waiting:
                        self.tell(self._waiting.pop())
                case _:
                    raise InvariantError(f"the head does not know {event}")
        except Killed:
            self._die()

    def tell(self, event: ev.Event) -> list[do.Command]:
        """Let the driver handle the event together with the waiting ones. A doomed head dies on the way, or before it
        sends the answer.
        """
        events, self._waiting = [*self._waiting, event], []
        return self._drive(lambda: self.driver.handle_all(events, self.world.now)[-1])

    def tell_soon(self, event: ev.Event) -> None:
        """Likewise, but at the end of a pass, for events whose answer no caller waits for."""
        if self.scenario.head.pass_seconds == 0.0:
            self.tell(event)
            return
        if not self._waiting:
            self.post(self.world.around(self.scenario.head.pass_seconds, 0.9), _Pass())
        self._waiting.append(event)

    def _drive(self, work: Callable[[], list[do.Command]]) -> list[do.Command]:
        self._any_carried_out, self._commands = False, []
        try:
            commands = work()
        except Killed:
            self.history.killed_within["effects" if self._any_carried_out else "transaction"] += 1
            if self._any_carried_out:
                self._note_recorded()
            raise
        self._note_recorded()
        if self._doomed:
            raise Killed
        return commands

    def decided(self, event: ev.Event, now: float, commands: Sequence[do.Command]) -> None:
        """Record the commands. If the head is doomed, choose after which statement or effect it dies."""
        self._commands += commands
        if self.keeps_events:
            self.history.lives[-1].append((event, now, list(commands)))
        self.world.check(self.planner)
        self.meter.look(self.planner, now)
        if self._doomed:
            self._effects_left = self.world.rng.randrange(len(self._commands) + 1)
            if self.world.chance(0.5):
                self.ledger.statements_left = self.world.rng.randrange(2 * len(self._commands) + 2)

    def _start(self) -> None:
        self._restart()
        self.history.lives.append([])
        published = tuple(sorted(ref for ref in self.store if not ref.is_base_model))
        stored = Stored(published, tuple(sorted(self.evaluated)), self.provider.out())
        self._drive(lambda: self._take_over(stored))

    def _take_over(self, stored: Stored) -> list[do.Command]:
        self.driver = Driver(self.planner, self.ledger, self, stored, self.world.now)
        return []

    def _die(self) -> None:
        self.history.killed[HEAD] += 1
        self._doomed, self.ledger.statements_left = False, None
        self.dies()
        for party, epoch in [*self.attending.items(), (LEARNER, self.learner_epoch or 0)]:
            self.world.post(self.world.rng.uniform(0.0, 1.0), party, StreamBroke(party, epoch))
        self.post(self.world.around(self.scenario.head.restart_seconds, 0.3), Start())

    def _stream_broke(self, event: StreamBroke) -> None:
        if self.attending.get(event.party) == event.epoch:
            del self.attending[event.party]
            self.origin.left(event.party)
            self.tell(ev.WorkerDetached(event.party, "its connection closed"))
        elif event.party == LEARNER and self.learner_epoch == event.epoch:
            self.learner_epoch = None
            self.tell(ev.LearnerLost("its stream closed before the step had all its groups"))

    def _score(self, group: GroupRef) -> None:
        record = self.planner.groups.get(group.number) if group.kind == "train" else None
        if record is not None and record.state == "retired":
            return  # a check retired the group while it waited for its rewards
        if group.kind == "eval":
            self.tell_soon(ev.GroupScored(group, scores=Attachment(b"")))
            return
        rollouts = rollouts_in(self.ledger.rollouts(group.number))
        lost = [one for one in rollouts if self.world.chance(self.scenario.head.reward_failures)]
        is_strangers = record is not None and record.worker_id in self.strangers
        if len(lost) == len(rollouts) or (lost and is_strangers):  # as `serve.results`
            self.tell_soon(ev.GroupUnfit(group, "reward_failed", "the judge is down"))
            return
        remaining = Attachment(b"".join(one for one in rollouts if one not in lost))
        failed = tuple(LostRollout(int.from_bytes(one[4:], "big"), "reward_failed") for one in lost)
        scored = ev.GroupScored(group, self.scenario.is_flat(remaining.data), scores=Attachment(b""), lost=failed)
        self.tell_soon(replace(scored, num_rollouts=len(rollouts) - len(lost), rollouts=remaining if lost else None))

    def _joined(self, body: ev.GroupDelivered) -> ev.GroupDelivered:
        """Return a result with the rollouts that its group has already, as `serve.results` does."""
        open_lease, sent = self.planner.leases.get(body.lease_id), body.rollouts
        if open_lease is None or not open_lease[1].first_sample or not isinstance(sent, SampledBatch):
            return body
        record = self.planner.groups.get(body.group.number)
        oldest = body.oldest_version if record is None else min(body.oldest_version, record.oldest_version or 0)
        whole = SampledBatch(self.ledger.rollouts(body.group.number) + sent.data, sent.num_groups)
        count = len(rollouts_in(whole.data))
        return replace(body, oldest_version=oldest, rollouts=whole, num_rollouts=count)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _handle_call(self, call: HeadCall) -> None:
        if self.world.actors[call.sender].life != call.sender_life and call.sender == LEARNER:
            return  # its connection died with it
        value, num_bytes = self._answer(call.sender, call.body), 500
        if isinstance(call.body, ChunkAsked) and isinstance(value, bytes):
            num_bytes += self.scenario.chunk_bytes
            self.history.origin_bytes += num_bytes
        self.network.answer(call, value, num_bytes)

    def _answer(self, sender: str, body: object) -> object:
        if self.planner.penalties.expulsion(sender, self.world.now) is not None:
            return Refused("expelled")
        match body:
            case Hello():
                before = self.attending.get(sender)
                if before is not None:
                    self.world.post(0.1, sender, StreamBroke(sender, before))
                self.attending[sender] = body.epoch
                self.network.order(sender, body.epoch, wev.Connected())
                self.origin.joined(sender, body.event.installed, body.event.ticket)
                self.tell(body.event)
                return None
            case ev.WorkerReported():
                if sender not in self.attending:
                    return Refused("unknown_worker")
                self.origin.holds(sender, body.installed)
                self.tell_soon(body)
                return self.planner.fleet.report_seconds
            case ev.GroupChecked():
                self.tell_soon(body)
                return None
            case ev.GroupDelivered(is_own=False) if sender not in self.attending:
                return Refused("unknown_worker")
            case ev.GroupDelivered():
                return _verdict(self.tell(self._joined(body)))
            case ev.LeaseFailed() | ev.DeliveryMalformed():
                return _verdict(self.tell(body))
            case ManifestAsked():
                return self.origin.manifest_for(sender, body) or Refused("unknown_snapshot")
            case ChunkAsked():
                return self.origin.chunk(body) or Refused("missing")
            case bev.BroadcastEvent():
                self.origin.tell(body)
                return None
            case ev.LearnerJoined():
                return self._learner_joined(body)
        return self._answer_learner(body) if self.learner_known else Refused("unknown_learner")

    def _learner_joined(self, body: ev.LearnerJoined) -> Welcome | Refused:
        refused = _refused(self.tell(body))
        if refused is not None:
            return refused
        self.learner_known, self.learner_epoch = True, None
        return Welcome(self.planner.training.lineage, tuple(sorted(self.planner.snapshots.retained)))

    def _answer_learner(self, body: object) -> object:
        match body:
            case Take():
                self.learner_epoch = body.epoch
                refused = _refused(self.tell(ev.GroupsWanted(body.step)))
                if refused is not None:
                    self.learner_epoch = None
                return refused
            case Publish():
                self.store[body.ref] = body.digest
                if self.history.digests.setdefault(body.ref, body.digest) != body.digest:
                    raise InvariantError(f"snapshot {body.ref} was published with two digests")
                self.tell(ev.SnapshotPublished(body.ref, self.scenario.snapshot_chunks * self.scenario.chunk_bytes))
                return None
            case ev.StepTrained():
                return _refused(self.tell(body))
            case ev.CheckpointSaved():
                return _refused(self.tell(body))
        raise InvariantError(f"the head does not know {body}")

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _note_recorded(self) -> None:
        """Count the recorded commands, for the report and the tests' checks."""
        for command in self._commands:
            match command:
                case do.CloseLease():
                    self.history.closed[command.outcome] += 1
                case do.AcceptDelivery() if command.group.kind == "train":
                    self._note_delivery(command)
                case do.KeepScores() if command.is_flat:
                    self.history.flat.add(command.group.number)
                case do.RefuseDelivery():
                    self.history.refused[command.refusal] += 1
                case do.RetireGroup():
                    self.history.retire(self.planner.groups.get(command.number), command.why)
                case do.RecordStep():
                    self._note_step(command)
                case do.RecordLearner():
                    self.history.fallbacks += "fell back" in command.reason

    def _note_delivery(self, command: do.AcceptDelivery) -> None:
        number, rollouts = command.group.number, command.rollouts
        if not isinstance(rollouts, SampledBatch):
            raise InvariantError(f"group {number} was accepted with {rollouts}")
        history = self.history
        history.shapes.setdefault(number, set()).add(rollouts.num_groups)
        history.sampled.setdefault(number, set()).update((command.oldest_version, command.newest_version))

    def _note_step(self, command: do.RecordStep) -> None:
        versions = []
        for number in command.numbers:
            record = self.planner.groups.get(number)
            if record is None or record.oldest_version is None:
                raise InvariantError(f"group {number} was trained and has no version")
            versions.append(record.oldest_version)
        done = TrainedStep(command.step, command.lineage, command.numbers, tuple(versions))
        self.history.trained.append(done)

    def carry_out(self, command: do.Command, now: float) -> None:
        """Carry out a command outside of the ledger: messages, and state that the head keeps beside the ledger."""
        if self._doomed:
            if self._effects_left == 0:
                self._any_carried_out = True
                raise Killed
            self._effects_left -= 1
        match command:
            case do.GrantLeases():
                self._order(command.worker_id, wev.LeasesGranted(command.leases, (None,) * len(command.leases)))
            case do.RevokeLease():
                for lease_id in command.lease_ids:
                    self._order(command.worker_id, wev.LeaseRevoked(lease_id, command.reason))
            case do.SetWidth():
                self._order(command.worker_id, wev.SlotsSet(command.num_slots))
            case do.AnnounceSnapshot():
                if command.ref not in self.store:
                    raise InvariantError(f"snapshot {command.ref} is announced and not stored")
                self._announce(command.ref, command.worker_ids)
            case do.DropSnapshot():
                self.store.pop(command.ref, None)
                self.origin.dropped(command.ref)
            case do.ScoreGroup():
                spec = self.scenario.head
                stalled = self.world.stalls(spec.stalled_rewards, spec.stall_seconds)
                self.post(self.world.around(spec.score_seconds, 0.3) + stalled, _Score(command.group))
            case do.CheckGroup():
                record = self.planner.groups.get(command.group.number)
                if record is not None:
                    self._order(command.worker_id, Check(command, record.worker_id))
            case do.FeedGroup():
                self._feed(command.number)
            case do.EndStep():
                self._to_learner(StepDone(command.step, command.num_groups, command.publish_every))
                self.learner_epoch = None
            case do.RecordLearner():
                self.evaluated = {version for version in self.evaluated if version <= command.version}
            case do.FinishEval():
                self.evaluated.add(command.version)
                self.history.evaluated.append(command.version)
            case do.WakeAt():
                self._wakes += 1
                self.post(command.at - now, _Wake(self._wakes))
            case do.WorkerGone():
                if (epoch := self.attending.pop(command.worker_id, None)) is not None:
                    self.origin.left(command.worker_id)
                    self.world.post(0.1, command.worker_id, StreamBroke(command.worker_id, epoch))
            case do.RentMachine():
                self.provider.rent(command.offer)
            case do.ReturnMachine():
                if command.worker_id:
                    self.provider.take_back(command.worker_id)
            case do.StopRun() | do.FinishRun():
                self.history.ended = command.reason

    def _feed(self, number: int) -> None:
        data, scenario = self.ledger.rollouts(number), self.scenario
        rollouts = rollouts_in(data)
        if len(set(rollouts)) != len(rollouts) or len(rollouts) < min(scenario.min_group, scenario.group_size):
            raise InvariantError(f"group {number} is fed with {len(rollouts)} rollouts, {len(set(rollouts))} different")
        self._to_learner(Fed(number, data))

    def _announce(self, ref: SnapshotRef, worker_ids: tuple[str, ...]) -> None:
        spec = self.scenario.broadcast
        if spec.scheme == "chunks":
            self.origin.announce(ref, worker_ids)
            return
        for index, worker_id in enumerate(worker_ids):
            seconds = spec.arrival_seconds(index, len(worker_ids))
            self._order(worker_id, Arriving(self.origin.manifest(PayloadId(ref)), seconds))

    def _order(self, worker_id: str, body: object) -> None:
        if (epoch := self.attending.get(worker_id)) is not None:
            self.network.order(worker_id, epoch, body)

    def _to_learner(self, body: object) -> None:
        if self.learner_epoch is not None:
            self.network.order(LEARNER, self.learner_epoch, body)


def _refused(commands: list[do.Command]) -> Refused | None:
    return next((Refused(command.reason) for command in commands if isinstance(command, do.RefuseLearner)), None)


def _verdict(commands: list[do.Command]) -> str:
    """Return the one-word verdict on a delivery."""
    for command in commands:
        if isinstance(command, do.AcceptDelivery):
            return "accepted"
        if isinstance(command, do.RefuseDelivery):
            return command.refusal
    return "late"
