"""Simulated workers: the real relay, a pretended engine, and everything that happens to rented machines.

A group's payload is a digest of what a deterministic engine would make it of: the weights, the lease's seed, and the
groups that were sampled beside it. Two runs that hand the learner the same payloads have the same weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from echo2.control import events as ev
from echo2.control import relay_commands as do
from echo2.control import relay_events as rel
from echo2.control.relay import Relay
from echo2.errors import InvariantError
from echo2.sim.head import AskChunks, AskManifest, Deliver, Hello, Refused
from echo2.sim.history import History
from echo2.sim.network import SMALL_BYTES, Answered, Network, Ordered, StreamBroke, TimedOut
from echo2.sim.scenario import Scenario, WorkersSpec
from echo2.sim.world import Actor, Kill, Start, World
from echo2.types import Lease, SnapshotRef

#: Seconds before a worker whose connection broke dials again.
REDIAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The link of this worker passes nothing for a while."""


@dataclass(frozen=True, slots=True)
class _Dial:
    epoch: int


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    pass


@dataclass(frozen=True, slots=True)
class _Wake:
    number: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    ref: SnapshotRef


@dataclass(frozen=True, slots=True)
class _Sampled:
    batch: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class _Ended:
    batch: int
    error: str | None


@dataclass(slots=True)
class _Batch:
    """What the engine is at. `newest`: the snapshot it has got to."""

    number: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    started: SnapshotRef | None = None
    newest: SnapshotRef | None = None


class SimWorker(Actor):
    """One worker machine: `tell` is the one place where its relay is called."""

    def __init__(
        self, world: World, network: Network, name: str, spec: WorkersSpec, scenario: Scenario, history: History
    ) -> None:
        super().__init__(world, name)
        self.network, self.spec, self.scenario, self.history = network, spec, scenario, history
        self.epoch = 0
        self.stored: set[bytes] = set()
        self.up_since = 0.0
        self._restart()

    def _restart(self) -> None:
        self.relay = Relay(self.scenario.groups_per_batch, self.scenario.swap == "during")
        self.leases: dict[int, Lease] = {}
        self.results: dict[int, Deliver] = {}
        self._calls: dict[int, object] = {}
        self._digests: dict[SnapshotRef, bytes] = {}
        self._batch = _Batch()
        self._wakes = 0

    # ---- events ------------------------------------------------------------------------------------------------------

    def happen(self, event: object) -> None:
        match event:
            case Start():
                self._start()
            case Kill():
                self._die()
            case Cut():
                self.network.cut(self.name, self.epoch, self.world.around(self.spec.cut_seconds, 0.7))
            case _Heartbeat():
                if self.relay.connected:
                    self._call(ev.WorkerReported(self.name, self.relay.installed))
                self.post(self.scenario.heartbeat_seconds, event)
            case _Wake() if event.number == self._wakes:
                self.tell(rel.Tick())
            case Ordered() if event.epoch == self.epoch:
                self._ordered(event.body)
            case Ordered():  # of a stream that is none of this life's: reset
                self.network.reset(self.name, event.epoch)
            case StreamBroke() if event.epoch == self.epoch:
                self.epoch += 1
                self.tell(rel.Disconnected("the connection broke"))
                self.post(REDIAL_SECONDS, _Dial(self.epoch))
            case _Dial() if event.epoch == self.epoch and not self.relay.connected:
                self._dial()
            case Answered():
                body = self._calls.pop(event.number, None)
                if body is not None:
                    self._answered(body, event.value)
            case TimedOut():
                body = self._calls.pop(event.number, None)
                if body is not None:
                    self._failed(body)
            case _Loaded():
                self._loaded(event.ref)
            case _Sampled():
                self._sampled(event)
            case _Ended() if event.batch == self._batch.number:
                self._batch = _Batch(event.batch + 1)
                self.tell(rel.BatchEnded(event.error))

    def tell(self, event: rel.Event) -> None:
        """Tell the relay, check it, carry out what it asks for."""
        commands = self.relay.handle(event, self.world.now)
        self.relay.check_invariants()
        for command in commands:
            self._carry_out(command)

    def _start(self) -> None:
        self.up_since = self.world.now
        self.epoch += 1
        self._restart()
        self._dial()
        self.post(self.scenario.heartbeat_seconds, _Heartbeat())

    def _die(self) -> None:
        self.history.killed["worker"] += 1
        self.pay()
        self.network.broke(self.name, self.epoch)
        self.dies()
        self.post(self.world.around(self.spec.restart_seconds, 0.5), Start())

    def pay(self) -> None:
        """Rent up to now."""
        self.history.usd += (self.world.now - self.up_since) / 3600 * self.spec.price_usd_per_hour
        self.up_since = self.world.now

    def _dial(self) -> None:
        relay = self.relay
        held = (*relay.waiting, *relay.generating, *relay.produced)
        rewards = ("reward",) if self.spec.scores else ()
        joined = ev.WorkerJoined(
            self.name, self.spec.capacity_groups, self.spec.price_usd_per_hour, rewards, relay.installed, held
        )
        self._call(Hello(self.epoch, joined))

    def _ordered(self, body: object) -> None:
        match body:
            case rel.LeasesGranted():
                self.leases.update((lease.lease_id, lease) for lease in body.leases)
                self.tell(body)
            case rel.SnapshotAnnounced():
                self.tell(rel.SnapshotAnnounced(body.ref, self._missing(body.ref)))
            case rel.Connected() | rel.LeaseRevoked():
                self.tell(body)
            case _:
                raise InvariantError(f"a worker does not know {body}")

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, body: object, num_bytes: int = SMALL_BYTES) -> None:
        self._calls[self.network.call(self.name, body, num_bytes)] = body

    def _answered(self, body: object, value: object) -> None:
        match body:
            case Deliver():
                self.results.pop(body.event.lease_id, None)
                self.tell(rel.DeliveryAnswered(body.event.lease_id, value == "accepted", str(value)))
            case ev.DeliveryMalformed():
                self.tell(rel.DeliveryAnswered(body.lease_id, False, str(value)))
            case AskManifest():
                if isinstance(value, SnapshotRef):
                    self.tell(rel.SnapshotAnnounced(value, self._missing(value), asked_for=True))
                else:
                    self.tell(rel.SnapshotUnknown(body.ref.version))
            case AskChunks():
                if isinstance(value, Refused):
                    self.tell(rel.ChunksFailed(body.ref, value.reason, is_gone=True))
                    return
                assert isinstance(value, bytes)
                self._digests[body.ref] = value
                for chunk in body.chunks:
                    self.stored.add(chunk)
                    self.tell(rel.ChunkStored(chunk))

    def _failed(self, body: object) -> None:
        reason = "no answer"
        match body:
            case Hello() if body.epoch == self.epoch and not self.relay.connected:
                self.epoch += 1
                self._dial()
            case Deliver():
                self.tell(rel.DeliveryFailed(body.event.lease_id, reason))
            case ev.DeliveryMalformed():
                self.tell(rel.DeliveryFailed(body.lease_id, reason))
            case AskManifest():
                self.tell(rel.ManifestFailed(reason))
            case AskChunks():
                self.tell(rel.ChunksFailed(body.ref, reason))
            case ev.LeaseFailed():
                self._call(body)  # the head would wait for the lease's deadline otherwise

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.AskManifest():
                self._call(AskManifest(command.ref))
            case do.FetchChunks():
                self._call(AskChunks(command.ref, command.chunks))
            case do.InstallSnapshot():
                self.post(self.world.around(self.spec.install_seconds, 0.3), _Loaded(command.ref))
            case do.StartBatch():
                self._start_batch(command)
            case do.CancelBatch():
                self.post(0.05, _Ended(self._batch.number, None))
            case do.Deliver():
                self._deliver(command.lease_id)
            case do.FailLease():
                self._call(ev.LeaseFailed(self.name, command.lease_id, command.failure, command.reason))
            case do.Report():
                self._call(ev.WorkerReported(self.name, self.relay.installed))
            case do.WakeAt():
                self._wakes += 1
                self.post(command.at - self.world.now, _Wake(self._wakes))
            case _:
                raise InvariantError(f"a worker does not know {command}")

    def _deliver(self, lease_id: int) -> None:
        if self.world.chance(self.spec.malformed_results):
            self._call(ev.DeliveryMalformed(self.name, lease_id, "malformed", "noise"))
            return
        self._call(self.results[lease_id], self.scenario.tokens_per_group * self.scenario.bytes_per_token)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def _chunks(self, ref: SnapshotRef) -> tuple[bytes, ...]:
        return tuple(f"{ref}/{index}".encode() for index in range(self.scenario.snapshot_chunks))

    def _missing(self, ref: SnapshotRef) -> tuple[bytes, ...]:
        missing = tuple(chunk for chunk in self._chunks(ref) if chunk not in self.stored)
        # The digest comes with the chunks: a worker that restarted with all of them on disk fetches the last one again.
        return missing or (() if ref in self._digests else self._chunks(ref)[-1:])

    def _loaded(self, ref: SnapshotRef) -> None:
        if self.world.chance(self.spec.corrupt_snapshots):
            torn = self._chunks(ref)[:1]
            self.stored.difference_update(torn)
            self.tell(rel.SnapshotRefused(ref, torn, "a chunk is torn"))
            return
        self._batch.newest = ref
        self.tell(rel.SnapshotInstalled(ref))

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _start_batch(self, command: do.StartBatch) -> None:
        batch = self._batch
        if self.relay.installed != command.ref:
            raise InvariantError(f"{self.name} starts a batch with {command.ref}, installed is {self.relay.installed}")
        batch.leases = {lease_id: self.leases[lease_id] for lease_id in command.lease_ids}
        batch.started = batch.newest = command.ref
        longest = 0.0
        for lease_id in command.lease_ids:
            seconds = self.world.around(self.spec.rollout_seconds, self.spec.spread)
            if self.world.chance(self.spec.straggler_chance):
                seconds *= self.spec.straggler_factor
            longest = max(longest, seconds)
            self.post(seconds, _Sampled(batch.number, lease_id))
        if self.world.chance(self.spec.engine_failures):
            self.post(self.world.rng.uniform(0.0, longest), _Ended(batch.number, "the engine broke"))
        self.post(longest, _Ended(batch.number, None))

    def _sampled(self, event: _Sampled) -> None:
        batch = self._batch
        lease = batch.leases.get(event.lease_id)
        if event.batch != batch.number or lease is None or event.lease_id not in self.relay.generating:
            return
        if self.world.chance(self.spec.reward_failures):
            self.tell(rel.LeaseAbandoned(event.lease_id, "reward_failed", "the reward raised"))
            return
        assert batch.started is not None
        assert batch.newest is not None
        numbers = sorted(other.group.number for other in batch.leases.values())
        self.results[event.lease_id] = Deliver(
            ev.GroupDelivered(
                worker_id=self.name,
                lease_id=event.lease_id,
                group=lease.group,
                num_samples=lease.num_samples,
                oldest_version=batch.started.version,
                newest_version=batch.newest.version,
                num_tokens=self.scenario.tokens_per_group,
                is_scored=True,
            ),
            hashlib.sha256(self._digests[batch.started] + f"{lease.seed} {numbers}".encode()).digest(),
            len(numbers),
        )
        self.tell(rel.GroupProduced(event.lease_id))
