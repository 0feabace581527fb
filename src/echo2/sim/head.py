"""The head's simulated driver: the real planner and ledger, a virtual clock, and kill -9 between any two commands.

What outlives a kill: the ledger, the published snapshots, and what metrics.jsonl would say: the evaluations, the ESS.
Each command is carried out by itself, so that a kill finds the ledger after any prefix of an event's commands
(production is milder: one transaction an event).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.buffer import Ledger
from echo2.control import commands as do
from echo2.control import events as ev
from echo2.control import relay_events as rel
from echo2.control.planner import Planner
from echo2.errors import InvariantError
from echo2.sim.census import Census
from echo2.sim.history import History, TrainedStep
from echo2.sim.landlord import Landlord
from echo2.sim.network import HEAD, Asked, Network, StreamBroke
from echo2.sim.origin import AskChunk, AskManifest, Manifest, SimOrigin
from echo2.sim.peering import Reported
from echo2.sim.portions import take
from echo2.sim.scenario import Scenario
from echo2.sim.world import Actor, Kill, Start, World
from echo2.types import GroupRef, PayloadId, SnapshotRef

#: Groups, leases and workers up to which the planner's invariants are checked after every event.
CHECKED_EACH_EVENT = 200


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker opens its stream of orders."""

    epoch: int
    event: ev.WorkerJoined


@dataclass(frozen=True, slots=True)
class Take:
    """The learner opens the stream of a step's groups."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """A result, its payload, and how many groups were sampled beside it (itself counted)."""

    event: ev.GroupDelivered
    payload: bytes
    num_groups: int


@dataclass(frozen=True, slots=True)
class Publish:
    """The learner's snapshot; `digest` stands for its weights."""

    ref: SnapshotRef
    digest: bytes


@dataclass(frozen=True, slots=True)
class Arriving:
    """To a worker: a snapshot is on its way, and there after so many seconds (see `BroadcastSpec`)."""

    manifest: Manifest
    seconds: float


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a learner that joined."""

    lineage: int
    published: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fed:
    """One group for the learner; `payload` as it was delivered."""

    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class StepDone:
    """The step has all its groups."""

    step: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that the head would not answer, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Wake:
    number: int


@dataclass(frozen=True, slots=True)
class _Score:
    group: GroupRef


class _KilledError(Exception):
    """Unwinds what was being done when the kill came."""


class SimHead(Actor):
    """Actor `head`. `tell` is the one place where the planner is called. `keeps_events`: for a replay; the memory of a
    long run with thousands of workers does not hold them.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        scenario: Scenario,
        seed: int,
        ledger: Ledger,
        history: History,
        keeps_events: bool = True,
    ) -> None:
        super().__init__(world, HEAD)
        self.network, self.scenario, self.ledger, self.history = network, scenario, ledger, history
        self.keeps_events, self._num_unchecked = keeps_events, 0
        self.census, self.landlord = Census(history, scenario.activation), Landlord(world, scenario)
        self.options = scenario.planner_options(seed)
        self.store: dict[SnapshotRef, bytes] = {}
        self.dialable: dict[str, bool] = {}
        self.evaluated: set[int] = set()
        self.ess: dict[int, float] = {}
        self._doomed = False
        self._restart()

    def _restart(self) -> None:
        self.planner = Planner(self.options)
        self.origin = SimOrigin(self.world, self.scenario, self.store, self.dialable, self._order)
        self.attending: dict[str, int] = {}
        self.learner_known = False
        self.learner_epoch: int | None = None
        self._deliveries: dict[int, Deliver] = {}
        self._wakes = 0

    # ---- events ------------------------------------------------------------------------------------------------------

    def happen(self, event: object) -> None:
        try:
            match event:
                case Start():
                    self._start()
                case Kill():
                    self._doomed = True
                case Asked():
                    self._asked(event)
                case StreamBroke():
                    self._stream_broke(event)
                case _Wake():
                    if event.number == self._wakes:
                        self.tell(ev.Tick())
                case _Score():
                    self._score(event.group)
                case _:
                    raise InvariantError(f"the head does not know {event}")
        except _KilledError:
            self._die()

    def tell(self, event: ev.Event) -> list[do.Command]:
        """Tell the planner, check it, carry out what it asks for; a doomed head dies between two of the commands."""
        now = self.world.now
        commands = self.planner.handle(event, now)
        if self.keeps_events:
            self.history.lives[-1].append((event, now, commands))
        self._check()
        self.census.look(self.planner, now)
        last = self.world.rng.randrange(len(commands) + 1) if self._doomed else len(commands)
        for command in commands[:last]:
            self._carry_out(command)
        if self._doomed:
            if last < len(commands) and self.world.chance(0.5):
                self._record(commands[last])  # durable, and the kill came before it was sent
            raise _KilledError
        return commands

    def _check(self) -> None:
        """After every event of a small run; of a large one, so rarely that it costs each event the same."""
        self._num_unchecked += 1
        num_records = len(self.planner.groups) + len(self.planner.leases) + len(self.planner.fleet)
        if num_records <= CHECKED_EACH_EVENT or self._num_unchecked * 10 >= num_records:
            self._num_unchecked = 0
            self.planner.check_invariants()

    def _start(self) -> None:
        self._restart()
        self.history.lives.append([])
        state = self.ledger.recover()
        self.tell(
            ev.HeadStarted(
                version=state.version,
                lineage=max(1, state.lineage),
                checkpoint_version=self.ledger.get_meta("checkpoint_version", -1),
                oldest_kept=self.ledger.get_meta("oldest_kept", 0),
                next_number=state.next_number,
                next_lease_id=max(state.next_lease_id, self.ledger.get_meta("next_lease_id", 1)),
                groups=tuple(
                    ev.RecoveredGroup(
                        *(g.number, g.step, g.state, g.oldest_version, g.num_tokens, g.worker_id, g.reason),
                        g.state == "ready" and self._is_flat(g.number),
                    )
                    for g in state.groups
                ),
                leases=tuple(
                    ev.RecoveredLease(o.lease_id, o.number, o.worker_id, o.deadline, o.first_sample, o.num_samples)
                    for o in state.leases
                ),
                portions=state.portions,
                published=tuple(sorted(self.store)),
                evaluated=tuple(sorted(self.evaluated)),
                ess=tuple((step, ess) for step, ess in self.ess.items() if step < state.version),
                machines=self.landlord.out(),
            )
        )

    def _is_flat(self, number: int) -> bool:
        return self.scenario.is_flat(self.ledger.payload(number))

    def _die(self) -> None:
        self.history.killed[HEAD] += 1
        self._doomed = False
        self.dies()
        for party, epoch in [*self.attending.items(), ("learner", self.learner_epoch or 0)]:
            self.world.post(self.world.rng.uniform(0.0, 1.0), party, StreamBroke(party, epoch))
        self.post(self.world.around(self.scenario.head.restart_seconds, 0.3), Start())

    def _stream_broke(self, event: StreamBroke) -> None:
        if self.attending.get(event.party) == event.epoch:
            del self.attending[event.party]
            self.origin.left(event.party)
            self.tell(ev.WorkerDetached(event.party, "its connection closed"))
        elif event.party == "learner" and self.learner_epoch == event.epoch:
            self.learner_epoch = None
            self.tell(ev.LearnerLost("its stream closed before the step had all its groups"))

    def _score(self, group: GroupRef) -> None:
        if group.kind == "train":
            self.ledger.score(group.number, self.ledger.payload(group.number), self.world.now)
        self.tell(ev.GroupScored(group, group.kind == "train" and self._is_flat(group.number)))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _asked(self, asked: Asked) -> None:
        if self.world.actors[asked.sender].life != asked.sender_life and asked.sender == "learner":
            return  # its connection died with it
        value, num_bytes = self._answer(asked.sender, asked.body), 500
        if isinstance(asked.body, AskChunk) and isinstance(value, bytes):
            num_bytes += self.scenario.chunk_bytes
            self.history.origin_bytes += num_bytes
        self.network.answer(asked, value, num_bytes)

    def _answer(self, sender: str, body: object) -> object:
        if self.planner.expelled_until(sender, self.world.now) is not None:
            return Refused("expelled")
        match body:
            case Hello():
                before = self.attending.get(sender)
                if before is not None:
                    self.world.post(0.1, sender, StreamBroke(sender, before))
                self.attending[sender] = body.epoch
                self.network.order(sender, body.epoch, rel.Connected())
                self.origin.joined(sender, body.event.installed, body.event.ticket)
                self.tell(body.event)
                return None
            case Deliver():
                return self._deliver(body)
            case ev.WorkerReported():
                if sender not in self.attending:
                    return Refused("unknown_worker")
                self.origin.holds(sender, body.installed)
                self.tell(body)
                return None
            case ev.LeaseFailed() | ev.DeliveryMalformed():
                return _verdict(self.tell(body))
            case AskManifest():
                return self.origin.asked(sender, body) or Refused("unknown_snapshot")
            case AskChunk():
                return self.origin.chunk(body) or Refused("missing")
            case Reported():
                self.origin.tell(body.event)
                return None
            case ev.LearnerJoined():
                return self._learner_joined(body)
        return self._answer_learner(body) if self.learner_known else Refused("unknown_learner")

    def _learner_joined(self, body: ev.LearnerJoined) -> Welcome | Refused:
        refused = _refused(self.tell(body))
        if refused is not None:
            return refused
        self.learner_known, self.learner_epoch = True, None
        return Welcome(self.planner.lineage, tuple(sorted(self.planner.retained)))

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
                if body.step == self.planner.version and body.ess is not None:
                    self.ess[body.step] = body.ess  # as in production, the row before the event
                return _refused(self.tell(body))
            case ev.CheckpointSaved():
                return _refused(self.tell(body))
        raise InvariantError(f"the head does not know {body}")

    def _deliver(self, body: Deliver) -> object:
        self._deliveries[body.event.lease_id] = body
        verdict = _verdict(self.tell(body.event))
        del self._deliveries[body.event.lease_id]
        return verdict

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command) -> None:
        self._record(command)
        self._send(command)

    def _record(self, command: do.Command) -> None:
        """The durable half of a command."""
        ledger, now = self.ledger, self.world.now
        match command:
            case do.IssueGroup():
                ledger.issue(command.number, command.step, command.number, now)
            case do.GrantLeases():
                for lease in command.leases:
                    if lease.group.kind == "train":
                        what = (lease.lease_id, lease.group.number, command.worker_id, now, lease.deadline)
                        ledger.grant(*what, lease.num_samples, lease.first_sample)
                # Eval leases are not in the ledger, but their ids must not be given again either.
                ledger.set_meta("next_lease_id", command.leases[-1].lease_id + 1)
            case do.CloseLease():
                self.history.closed[command.outcome] += 1
                if command.group.kind == "train":
                    ledger.close_lease(command.lease_id, command.outcome, now)
            case do.AcceptDelivery() if command.group.kind == "train":
                self._record_delivery(command)
            case do.RefuseDelivery():
                self.history.refused[command.refusal] += 1
                number = command.group.number if command.group is not None else 0
                ledger.refuse(command.lease_id, number, command.worker_id, command.refusal, 0, 0.0, now)
            case do.RetireGroup():
                self.history.retire(self.planner.groups.get(command.number), command.why)
                ledger.retire(command.number, command.why, now)
            case do.RecordStep():
                self._record_step(command)
            case do.RecordLearner():
                self.history.fallbacks += "fell back" in command.reason
                ledger.learner_joined(command.version, command.lineage, now)
                self.evaluated = {version for version in self.evaluated if version <= command.version}
            case do.RecordCheckpoint():
                ledger.checkpoint(command.version, command.oldest_kept)
                ledger.set_meta("checkpoint_version", command.version)
                ledger.set_meta("oldest_kept", command.oldest_kept)
            case do.DropSnapshot():
                self.store.pop(command.ref, None)
                self.origin.dropped(command.ref)
            case do.FinishEval():
                self.evaluated.add(command.version)
                self.history.evaluated.append(command.version)

    def _record_delivery(self, command: do.AcceptDelivery) -> None:
        delivery, number = self._deliveries[command.lease_id], command.group.number
        event = delivery.event
        self.history.shapes.setdefault(number, set()).add(delivery.num_groups)
        self.history.sampled.setdefault(number, set()).update((event.oldest_version, event.newest_version))
        whole = take(self.ledger, command, event, delivery.payload, self.scenario.group_size)
        if whole is None:
            return
        portion, payload = whole
        if self.scenario.is_flat(payload):
            self.history.flat.add(number)
        self.ledger.deliver(
            number=number,
            payload=payload,
            worker_id=portion.worker_id,
            oldest_version=portion.oldest_version,
            newest_version=event.newest_version,
            num_tokens=portion.num_tokens,
            seconds=0.0,
            now=self.world.now,
        )

    def _record_step(self, command: do.RecordStep) -> None:
        self.ledger.train(command.step, command.lineage, command.numbers, self.world.now)
        versions = []
        for number in command.numbers:
            record = self.planner.groups.get(number)
            if record is None or record.oldest_version is None:
                raise InvariantError(f"group {number} was trained and has no version")
            versions.append(record.oldest_version)
        self.history.trained.append(TrainedStep(command.step, command.lineage, command.numbers, tuple(versions)))

    def _send(self, command: do.Command) -> None:
        """The half of a command that leaves the head."""
        match command:
            case do.GrantLeases():
                self._order(command.worker_id, rel.LeasesGranted(command.leases))
            case do.RevokeLease():
                for lease_id in command.lease_ids:
                    self._order(command.worker_id, rel.LeaseRevoked(lease_id, command.reason))
            case do.AnnounceSnapshot():
                if command.ref not in self.store:
                    raise InvariantError(f"snapshot {command.ref} is announced and not stored")
                self._announce(command.ref, command.worker_ids)
            case do.ScoreGroup():
                self.post(self.world.around(self.scenario.head.score_seconds, 0.3), _Score(command.group))
            case do.FeedGroup():
                self._to_learner(Fed(command.number, self.ledger.payload(command.number)))
            case do.EndStep():
                self._to_learner(StepDone(command.step, command.num_groups))
                self.learner_epoch = None
            case do.WakeAt():
                self._wakes += 1
                self.post(command.at - self.world.now, _Wake(self._wakes))
            case do.WorkerGone():
                epoch = self.attending.pop(command.worker_id, None)
                if epoch is not None:
                    self.origin.left(command.worker_id)
                    self.world.post(0.1, command.worker_id, StreamBroke(command.worker_id, epoch))
            case do.RentMachine():
                self.landlord.rent(command.offer)
            case do.ReturnMachine():
                if command.worker_id:
                    self.landlord.take_back(command.worker_id)
            case do.StopRun() | do.FinishRun():
                self.history.ended = command.reason

    def _announce(self, ref: SnapshotRef, worker_ids: tuple[str, ...]) -> None:
        spec = self.scenario.broadcast
        if spec.scheme == "chunks":
            self.origin.announce(ref, worker_ids)
            return
        for index, worker_id in enumerate(worker_ids):
            seconds = spec.arrival_seconds(index, len(worker_ids))
            self._order(worker_id, Arriving(self.origin.manifest(PayloadId(ref)), seconds))

    def _order(self, worker_id: str, body: object) -> None:
        epoch = self.attending.get(worker_id)
        if epoch is not None:
            self.network.order(worker_id, epoch, body)

    def _to_learner(self, body: object) -> None:
        if self.learner_epoch is not None:
            self.network.order("learner", self.learner_epoch, body)


def _refused(commands: list[do.Command]) -> Refused | None:
    return next((Refused(command.reason) for command in commands if isinstance(command, do.RefuseLearner)), None)


def _verdict(commands: list[do.Command]) -> str:
    """One word on a delivery."""
    for command in commands:
        if isinstance(command, do.AcceptDelivery):
            return "accepted"
        if isinstance(command, do.RefuseDelivery):
            return command.refusal
    return "late"
