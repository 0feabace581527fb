"""Simulated workers: the real relay, a pretended engine, and everything that happens to rented machines.

A group's payload is a digest of what a deterministic engine would make it of: the weights, the lease's seed, and the
groups that were sampled beside it. Two runs that hand the learner the same payloads have the same weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from echo2.control import events as ev
from echo2.control import fetcher_events as fev
from echo2.control import relay_commands as do
from echo2.control import relay_events as rel
from echo2.control.relay import Relay
from echo2.errors import InvariantError
from echo2.sim.head import Arriving, Deliver, Hello, Refused
from echo2.sim.history import History
from echo2.sim.landlord import Returned
from echo2.sim.network import (
    SMALL_BYTES,
    Answered,
    Network,
    Ordered,
    PeerAsked,
    PeerBroke,
    PeerGave,
    StreamBroke,
    TimedOut,
)
from echo2.sim.origin import Announced, AskChunk, AskManifest, Manifest
from echo2.sim.peering import ORIGIN, FetchTick, Peering
from echo2.sim.scenario import Scenario, WorkersSpec
from echo2.sim.world import Actor, Kill, Start, World
from echo2.types import Lease, PayloadId, SnapshotRef

#: Seconds before a worker whose connection broke dials again.
REDIAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cut:
    """The link of this worker passes nothing for a while (0: some random time)."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Arrived:
    manifest: Manifest


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
    payload: PayloadId


@dataclass(frozen=True, slots=True)
class _Sampled:
    batch: int
    lease_id: int
    stood_seconds: float


@dataclass(frozen=True, slots=True)
class _Ended:
    batch: int
    error: str | None
    stood_seconds: float


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
        self.peering = Peering(self, network, spec, scenario, history, self._call, self.tell)
        self.up_since = 0.0
        self.group_seconds = scenario.group_seconds(spec)
        self._restart()

    def _restart(self) -> None:
        self.relay = Relay(self.scenario.groups_per_batch, self.scenario.swap == "during")
        self.leases: dict[int, Lease] = {}
        self.results: dict[int, Deliver] = {}
        self._calls: dict[int, object] = {}
        self.peering.restart()
        self._batch = _Batch()
        self._wakes = 0
        self._stands_until = self._stood_seconds = 0.0

    # ---- events ------------------------------------------------------------------------------------------------------

    def happen(self, event: object) -> None:
        match event:
            case Start():
                self._start()
            case Kill():
                self._die()
            case Returned():
                self.pay()
                self.network.broke(self.name, self.epoch)
                self.network.peer_died(self.name)
                self.dies()
            case Cut():
                seconds = event.seconds or self.world.around(self.spec.cut_seconds, 0.7)
                self.network.cut(self.name, self.epoch, seconds)
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
                self.peering.happen(fev.OriginLost())
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
                self._loaded(event.payload)
            case _Arrived():
                self.peering.arrived(event.manifest)
            case FetchTick():
                self.peering.tick(event)
            case PeerAsked() | PeerGave() | PeerBroke():
                self.peering.peer(event)
            case _Sampled() | _Ended() if event.stood_seconds < self._stood_seconds:
                owed = self._stood_seconds - event.stood_seconds
                self.post(owed, replace(event, stood_seconds=self._stood_seconds))
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
        self.network.peer_died(self.name)
        self.dies()
        if not self.spec.offer:  # else it is gone; who needs one rents another
            self.world.post(self._back_in(self.world.around(self.spec.restart_seconds, 0.5)), self.name, Start())

    def _back_in(self, seconds: float) -> float:
        """No machine of a zone comes back before the zone does."""
        at = self.world.now + seconds
        for outage in self.scenario.outages:
            end = outage.at_seconds + outage.seconds
            if outage.kind == "death" and outage.zone == self.spec.zone and outage.at_seconds <= at < end:
                at = end + seconds
        return at - self.world.now

    def pay(self) -> None:
        """Rent up to now."""
        self.history.usd += (self.world.now - self.up_since) / 3600 * self.spec.price_usd_per_hour
        self.up_since = self.world.now

    def _dial(self) -> None:
        self._call(Hello(self.epoch, self._joined()))

    def _joined(self) -> ev.WorkerJoined:
        """What it says of itself."""
        relay = self.relay
        held = (*relay.waiting, *relay.generating, *relay.produced)
        return ev.WorkerJoined(
            self.name,
            self.spec.capacity_groups,
            self.spec.price_usd_per_hour,
            relay.installed,
            held,
            self.spec.offer,
            self.spec.ticket,
        )

    def _ordered(self, body: object) -> None:
        match body:
            case rel.LeasesGranted():
                self.leases.update((lease.lease_id, lease) for lease in body.leases)
                self.tell(body)
            case Announced():
                self.peering.announced(body)
            case fev.RoutesSet():
                self.peering.happen(body)
            case Arriving():
                self._arriving(body)
            case rel.Connected():
                self.tell(body)
                self.peering.happen(fev.OriginBack())
            case rel.LeaseRevoked():
                self.tell(body)
            case _:
                raise InvariantError(f"a worker does not know {body}")

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, body: object, num_bytes: int = SMALL_BYTES) -> None:
        self._calls[self.network.call(self.name, body, num_bytes)] = body

    def _answered(self, body: object, value: object) -> None:
        match body:
            case Hello() if isinstance(value, Refused) and body.epoch == self.epoch:
                self.epoch += 1
                self.post(REDIAL_SECONDS, _Dial(self.epoch))
            case Deliver():
                self.results.pop(body.event.lease_id, None)
                self.tell(rel.DeliveryAnswered(body.event.lease_id, value == "accepted", str(value)))
            case ev.DeliveryMalformed():
                self.tell(rel.DeliveryAnswered(body.lease_id, False, str(value)))
            case AskManifest():
                if isinstance(value, Announced):
                    self.peering.announced(value)
                else:
                    self.tell(rel.SnapshotUnknown(body.ref))
            case AskChunk():
                self.peering.got(ORIGIN, body, value)

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
            case AskChunk():
                self.peering.failed(ORIGIN, body)
            case ev.LeaseFailed():
                self._call(body)  # the head would wait for the lease's deadline otherwise

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.AskManifest():
                self._call(AskManifest(command.ref, command.base))
            case do.FetchSnapshot():
                self.peering.fetch(command.payload)
            case do.StopFetching():
                self.peering.happen(fev.PayloadUnwanted(command.payload))
            case do.InstallSnapshot():
                self.post(self.world.around(self.spec.install_seconds, 0.3), _Loaded(command.payload))
            case do.StartBatch():
                self._start_batch(command)
            case do.CancelBatch():
                self.post(0.05, _Ended(self._batch.number, None, self._stood_seconds))
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

    def _arriving(self, body: Arriving) -> None:
        """A broadcast as a duration; where the engine stands still meanwhile, all that it is at ends later by that."""
        self.post(body.seconds, _Arrived(body.manifest))
        if not self.scenario.generate_during_broadcast:
            until = self.world.now + body.seconds
            self._stood_seconds += max(0.0, until - max(self._stands_until, self.world.now))
            self._stands_until = max(self._stands_until, until)

    def _loaded(self, payload: PayloadId) -> None:
        incoming = self.relay.incoming
        refusal = self.peering.install(payload, None if incoming is None else incoming.payload)
        if refusal:
            self.tell(rel.SnapshotRefused(payload, refusal))
            return
        self._batch.newest = payload.ref
        self.tell(rel.SnapshotInstalled(payload.ref))

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _start_batch(self, command: do.StartBatch) -> None:
        batch = self._batch
        if self.relay.installed != command.ref:
            raise InvariantError(f"{self.name} starts a batch with {command.ref}, installed is {self.relay.installed}")
        if self.peering.weights != self.history.digests[command.ref]:
            raise InvariantError(f"{self.name} samples with weights that are not those of {command.ref}")
        batch.leases = {lease_id: self.leases[lease_id] for lease_id in command.lease_ids}
        batch.started = batch.newest = command.ref
        stood = self._stood_seconds
        begin, longest = max(0.0, self._stands_until - self.world.now), 0.0
        for lease_id in command.lease_ids:
            seconds = self.world.around(self.group_seconds, self.spec.spread)
            if self.world.chance(self.spec.straggler_chance):
                seconds *= self.spec.straggler_factor
            longest = max(longest, seconds)
            self.post(begin + seconds, _Sampled(batch.number, lease_id, stood))
        if self.world.chance(self.spec.engine_failures):
            self.post(begin + self.world.rng.uniform(0.0, longest), _Ended(batch.number, "the engine broke", stood))
        self.post(begin + longest, _Ended(batch.number, None, stood))

    def _sampled(self, event: _Sampled) -> None:
        batch = self._batch
        lease = batch.leases.get(event.lease_id)
        if event.batch != batch.number or lease is None or event.lease_id not in self.relay.generating:
            return
        if self.world.chance(self.spec.task_failures):
            self.tell(rel.LeaseAbandoned(event.lease_id, "environment_failed", "the environment raised"))
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
            ),
            hashlib.sha256(self.history.digests[batch.started] + f"{lease.seed} {numbers}".encode()).digest(),
            len(numbers),
        )
        self.tell(rel.GroupProduced(event.lease_id))
