"""Simulated workers: the real scheduler, a simulated engine, and the faults of rented machines.

A group's rollouts are a digest of the inputs of a deterministic engine: the weights, the lease's seed, and the groups
of its unit. Two runs that feed the learner the same groups have the same weights.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from echo2.core.decide.machine import Event
from echo2.core.errors import InvariantError
from echo2.core.types import Lease, LostRollout, PayloadId, SnapshotRef
from echo2.head.decide import commands as do_head
from echo2.head.decide import events as ev
from echo2.planning.sim.engine import FullEngine
from echo2.planning.sim.head import Returned
from echo2.planning.sim.origin import Announced, Arriving, ChunkAsked, FetchTick, ManifestAsked, Peering, SimManifest
from echo2.planning.sim.report import History
from echo2.planning.sim.scenario import Scenario, WorkersSpec
from echo2.planning.sim.world import (
    SMALL_BYTES,
    Actor,
    Answered,
    Check,
    Hello,
    Kill,
    Ordered,
    PeerAsked,
    PeerBroke,
    PeerGave,
    Refused,
    SampledBatch,
    SimNetwork,
    SimWorld,
    Start,
    StreamBroke,
    TimedOut,
    of_samples,
)
from echo2.weights.broadcast.decide import fetcher as fev
from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as wev
from echo2.worker.decide.scheduler import WorkerScheduler

#: Seconds before a worker whose connection broke dials again.
REDIAL_SECONDS = 1.0
#: Time of checking a group, as a share of the time of sampling it (benchmarks/strangers/hostile_sampling.py, on a CPU).
CHECK_COST = 0.9


class Cut(Event):
    """The link of this worker is cut for `seconds` (0: for a random time)."""

    seconds: float = 0.0


class _Arrived(Event):
    manifest: SimManifest


class _Dial(Event):
    epoch: int


class _Heartbeat(Event):
    pass


class _Wake(Event):
    number: int


class _Loaded(Event):
    payload: PayloadId


class _Sampled(Event):
    lease_id: int
    stood_seconds: float


class _Read(Event):
    """A group was read again; the verdict."""

    verdict: ev.GroupChecked


class _Progress(Event):
    """The group that a full engine ends next is done."""

    number: int


class _Broke(Event):
    """The engine broke while it sampled this lease."""

    lease_id: int
    stood_seconds: float


@dataclass(slots=True)
class _Sampling:
    """A lease being sampled: the snapshot that it began with, the newest one it uses, and the groups of its unit."""

    lease: Lease
    started: SnapshotRef
    newest: SnapshotRef
    numbers: tuple[int, ...]


class SimWorker(Actor):
    """One worker machine. `tell` is the only place where its scheduler is called."""

    def __init__(
        self, world: SimWorld, network: SimNetwork, name: str, spec: WorkersSpec, scenario: Scenario, history: History
    ) -> None:
        super().__init__(world, name)
        self.network, self.spec, self.scenario, self.history = network, spec, scenario, history
        self.epoch = 0
        self.peering = Peering(self, network, spec, scenario, history, self._call, self.tell)
        self.up_since = 0.0
        self.group_seconds = scenario.group_seconds(spec)
        self.claims: dict[int, ev.GroupDelivered] = {}  # a stranger's deliveries, by number
        self._restart()

    def _restart(self) -> None:
        groups = self.spec.capacity_groups
        if self.spec.ticket or self.scenario.deterministic or self.scenario.order == "frontier":
            groups = min(groups, self.scenario.groups_per_batch)
        self.scheduler = WorkerScheduler(
            groups * self.scenario.group_size, self.scenario.swap_of(self.spec), self.scenario.deterministic
        )
        self._calls: dict[int, object] = {}
        self.peering.restart()
        self.scheduler.base_models = self.peering.whole_base_models()
        self._sampling: dict[int, _Sampling] = {}
        self.held_refs: tuple[SnapshotRef, ...] = ()  # what the engine can check under
        self._wakes = 0
        self._heartbeat_seconds = self.scenario.heartbeat_seconds
        self._stands_until = self._stood_seconds = 0.0
        self._engine = FullEngine(self.spec.full_groups) if self.spec.full_groups else None

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: object) -> None:
        """Handle one event. A full engine is as quick as the groups allow that it has then."""
        engine = self._engine
        if engine is not None:
            engine.advance(self.world.now)
        self._handle(event)
        if engine is not None and engine is self._engine:
            seconds = engine.keep(self._sampling)
            if seconds is not None:
                self.post(seconds, _Progress(engine.number))

    def _handle(self, event: object) -> None:
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
                if self.scheduler.connected:
                    self._call(ev.WorkerReported(self.name, self.scheduler.installed))
                self.post(self._heartbeat_seconds, event)
            case _Wake() if event.number == self._wakes:
                self.tell(wev.Tick())
            case Ordered() if event.epoch == self.epoch:
                self._ordered(event.body)
            case Ordered():  # from a stream that is no longer this worker's: reset it
                self.network.reset(self.name, event.epoch)
            case StreamBroke() if event.epoch == self.epoch:
                self.epoch += 1
                self.tell(wev.Disconnected())
                self.peering.handle(fev.OriginLost())
                self.post(REDIAL_SECONDS, _Dial(self.epoch))
            case _Dial() if event.epoch == self.epoch and not self.scheduler.connected:
                self._dial()
            case Answered():
                body = self._calls.pop(event.number, None)
                if body is not None:
                    self._answered(body, event.value)
            case TimedOut() if event.number in self._calls and (seconds := self.network.receives_for(self.name)):
                self.post(seconds, event)
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
            case _Sampled() | _Broke() if event.stood_seconds < self._stood_seconds:
                owed = self._stood_seconds - event.stood_seconds
                self.post(owed, replace(event, stood_seconds=self._stood_seconds))
            case _Sampled():
                self._sampled(event)
            case _Progress() if self._engine is not None and event.number == self._engine.number:
                self._sampled(_Sampled(self._engine.pop_first(), self._stood_seconds))
            case _Read():
                self._call(event.verdict)
            case _Broke() if event.lease_id in self._sampling:
                for lease_id in list(self._sampling):
                    del self._sampling[lease_id]
                    self.tell(wev.LeaseAbandoned(lease_id, "engine_failed", "the engine broke"))

    def tell(self, event: wev.Event) -> None:
        """Pass an event to the scheduler, check the scheduler, and carry out its commands."""
        commands = self.scheduler.handle(event, self.world.now)
        self.world.check(self.scheduler)
        for command in commands:
            self._carry_out(command)

    def _start(self) -> None:
        self.up_since = self.world.now
        self.epoch += 1
        self._restart()
        self._dial()
        self.post(self._heartbeat_seconds, _Heartbeat())

    def _die(self) -> None:
        self.history.killed["worker"] += 1
        self.pay()
        self.network.broke(self.name, self.epoch)
        self.network.peer_died(self.name)
        self.dies()
        if not self.spec.offer:  # a rented machine is gone; the planner may rent another
            self.world.post(self._back_in(self.world.around(self.spec.restart_seconds, 0.5)), self.name, Start())

    def _back_in(self, seconds: float) -> float:
        """Return the seconds until a restart: no machine of a zone comes back before the end of the zone's outage."""
        at = self.world.now + seconds
        for outage in self.scenario.outages:
            end = outage.at_seconds + outage.seconds
            if outage.kind == "death" and outage.zone == self.spec.zone and outage.at_seconds <= at < end:
                at = end + seconds
        return at - self.world.now

    def pay(self) -> None:
        self.history.usd += (self.world.now - self.up_since) / 3600 * self.spec.price_usd_per_hour
        self.up_since = self.world.now

    def _dial(self) -> None:
        self._call(Hello(self.epoch, self._joined()))

    def _joined(self) -> ev.WorkerJoined:
        """Return the worker's report about itself when it joins."""
        scheduler = self.scheduler
        lease_ids = (*scheduler.waiting, *scheduler.generating, *scheduler.produced)
        return ev.WorkerJoined(
            self.name,
            self.scheduler.most_slots,
            self.spec.price_usd_per_hour,
            scheduler.installed,
            lease_ids,
            self.spec.offer,
            self.spec.ticket,
            self.spec.draws,
        )

    def _ordered(self, body: object) -> None:
        match body:
            case wev.LeasesGranted():
                self.tell(body)
            case Announced():
                self.peering.announced(body)
            case fev.RoutesSet():
                self.peering.handle(body)
            case Arriving():
                self._arriving(body)
            case Check():
                self._check(body)
            case wev.Connected():
                self.tell(body)
                self.peering.handle(fev.OriginBack())
            case wev.LeaseRevoked() | wev.SlotsSet():
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
            case ev.WorkerReported() if isinstance(value, float):
                self._heartbeat_seconds = value
            case ev.GroupDelivered() | ev.DeliveryMalformed() if isinstance(value, Refused):
                self._failed(body)
            case ev.GroupDelivered() | ev.DeliveryMalformed():
                self.tell(wev.DeliveryAnswered(body.lease_id))
            case ManifestAsked():
                if isinstance(value, Announced):
                    self.peering.announced(value)
                else:
                    self.tell(wev.SnapshotUnknown(body.ref))
            case ChunkAsked():
                self.peering.got(ORIGIN, body, value)

    def _failed(self, body: object) -> None:
        match body:
            case Hello() if body.epoch == self.epoch and not self.scheduler.connected:
                self.epoch += 1
                self._dial()
            case ev.GroupDelivered() | ev.DeliveryMalformed():
                self.tell(wev.DeliveryFailed(body.lease_id))
            case ManifestAsked():
                self.tell(wev.ManifestFailed())
            case ChunkAsked():
                self.peering.failed(ORIGIN, body)
            case ev.LeaseFailed():
                self._call(body)  # the head would wait for the lease's deadline otherwise

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.AskManifest():
                self._call(ManifestAsked(command.ref, command.base))
            case do.FetchSnapshot():
                self.peering.fetch(command.payload)
            case do.StopFetching():
                self.peering.handle(fev.PayloadUnwanted(command.payload))
            case do.InstallSnapshot():
                self.post(self.world.around(self.spec.install_seconds, 0.3), _Loaded(command.payload))
            case do.StartLease():
                self._sample(command.lease, (command.lease.group.number,))
            case do.StartUnit():
                numbers = tuple(sorted(lease.group.number for lease in command.leases))
                for lease in command.leases:
                    self._sample(lease, numbers)
            case do.AbortLease():
                del self._sampling[command.lease_id]
            case do.Deliver():
                self._deliver(command.lease_id, command.result)
            case do.FailLease():
                self._call(ev.LeaseFailed(self.name, command.lease_id, command.failure, command.reason))
            case do.ReportInstalled():
                self._call(ev.WorkerReported(self.name, self.scheduler.installed))
            case do.WakeAt():
                self._wakes += 1
                self.post(command.at - self.world.now, _Wake(self._wakes))
            case _:
                raise InvariantError(f"a worker does not know {command}")

    def _deliver(self, lease_id: int, result: ev.GroupDelivered) -> None:
        if self.world.chance(self.spec.malformed_results):
            self._call(ev.DeliveryMalformed(self.name, lease_id, "malformed", "noise"))
            return
        if self.spec.ticket:
            self.claims[result.group.number] = result
        self._call(result, self.scenario.tokens_per_group * self.scenario.bytes_per_token)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def _arriving(self, body: Arriving) -> None:
        """Model a broadcast as a duration. If the engine stops meanwhile, all leases in it end later by that."""
        self.post(body.seconds, _Arrived(body.manifest))
        if not self.scenario.generate_during_broadcast:
            until = self.world.now + body.seconds
            self._stood_seconds += max(0.0, until - max(self._stands_until, self.world.now))
            self._stands_until = max(self._stands_until, until)

    def _loaded(self, payload: PayloadId) -> None:
        incoming = self.scheduler.incoming
        outcome = self.peering.install(payload, None if incoming is None else incoming.payload)
        if isinstance(outcome, wev.SnapshotInstalled):
            self.held_refs = (payload.ref, *self.held_refs[:1])
            for sampling in self._sampling.values():
                if self.scheduler.swap != "apart":
                    sampling.newest = payload.ref
        self.tell(outcome)

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _sample(self, lease: Lease, numbers: tuple[int, ...]) -> None:
        installed = self.scheduler.installed
        assert installed is not None
        if self.peering.weights != self.history.digests[installed]:
            raise InvariantError(f"{self.name} samples with weights that are not those of {installed}")
        base_model = self.scenario.base_of(installed)
        if base_model is not None and self.peering.base != (base_model, self.history.digests[base_model]):
            raise InvariantError(f"{self.name} samples with {installed} over {self.peering.base[0]}")
        self._sampling[lease.lease_id] = _Sampling(lease, installed, installed, numbers)
        stood, begin = self._stood_seconds, max(0.0, self._stands_until - self.world.now)
        seconds = self.world.around(self.group_seconds, self.spec.spread)
        if self.world.chance(self.spec.straggler_chance):
            seconds *= self.spec.straggler_factor
        if self.spec.answer_spread:
            seconds *= random.Random(lease.seed).lognormvariate(0.0, self.spec.answer_spread)
        if self._engine is not None:
            self._engine.begin(lease.lease_id, seconds)
        else:
            self.post(begin + seconds, _Sampled(lease.lease_id, stood))
        if self.world.chance(self.spec.engine_failures * self.scenario.group_size / self.scheduler.slots):
            self.post(begin + self.world.rng.uniform(0.0, seconds), _Broke(lease.lease_id, stood))

    def _sampled(self, event: _Sampled) -> None:
        sampling = self._sampling.pop(event.lease_id, None)
        if sampling is None:
            return  # aborted meanwhile
        if self.world.chance(self.spec.task_failures):
            self.tell(wev.LeaseAbandoned(event.lease_id, "environment_failed", "the environment raised"))
            return
        lease, started, numbers = sampling.lease, sampling.started, list(sampling.numbers)
        is_train = lease.group.kind == "train"
        data = hashlib.sha256(self.history.digests[started] + f"{lease.seed} {numbers}".encode()).digest()
        if sampling.newest.history != started.history:  # as `rollouts.generate`
            self.tell(wev.LeaseAbandoned(event.lease_id, "snapshot_gone", "a snapshot of another lineage came"))
            return
        samples = range(lease.first_sample, lease.first_sample + lease.num_samples)
        lost = [one for one in samples if is_train and self.world.chance(self.spec.rollout_failures)]
        if lost and (self.spec.ticket or len(lost) == len(samples)):  # as `rollouts.generate`, and `serve.results`
            self.tell(wev.LeaseAbandoned(event.lease_id, "environment_failed", "the environment raised"))
            return
        result = ev.GroupDelivered(
            worker_id=self.name,
            lease_id=event.lease_id,
            group=lease.group,
            num_samples=lease.num_samples,
            oldest_version=started.version,
            newest_version=sampling.newest.version,
            num_tokens=self.scenario.tokens_per_group,
            rollouts=SampledBatch(of_samples(data, [one for one in samples if one not in lost]), len(numbers)),
            lineage=started.lineage,
            is_own=not self.spec.ticket,
            num_rollouts=lease.num_samples - len(lost),
            lost=tuple(LostRollout(one, "environment_failed") for one in lost),
        )
        self.tell(wev.GroupProduced(event.lease_id, result))

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check(self, check: Check) -> None:
        """Read a group again, which takes some of the time that sampling it takes."""
        sampler, command = self.world.actors[check.sampled_by], check.command
        assert isinstance(sampler, SimWorker)
        cost, verdict = sampler.judged(command, self.held_refs)
        self.post(CHECK_COST * cost * self.group_seconds, _Read(replace(verdict, worker_id=self.name)))

    def judged(self, command: do_head.CheckGroup, held_refs: tuple[SnapshotRef, ...]) -> tuple[float, ev.GroupChecked]:
        """Return what a check of this worker's group finds where these snapshots are held, and the tokens that are read
        for it, as a multiple of those sampled.
        """
        claim = self.claims.get(command.group.number)
        if claim is None:
            return 0.0, ev.GroupChecked("", command.group, missed="its rollouts are not kept any more")
        named = {claim.oldest_version, claim.newest_version}
        if not named <= {ref.version for ref in held_refs if ref.history == command.ref.history}:
            return 0.0, ev.GroupChecked("", command.group, num_skipped=claim.num_tokens)
        fault = "its tokens were not drawn so" if self.spec.forges else ""
        return 1.0, ev.GroupChecked("", command.group, claim.num_tokens, fault)
