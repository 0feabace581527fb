"""One rollout worker (`joining.py` begins it). The scheduler decides; this module drives the scheduler and the
connection, `sampling` samples leases with the engine, and `weights` fetches, installs and serves weights.

These run concurrently, so that none delays another: the event loop (link, heartbeats, chunks), the engine's decode
thread, a process for each environment, and a loading thread (applies and verifies a snapshot beside the old one). The
scheduler keeps results until the head has answered their delivery.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from echo2.config.values import AUTO, NO_SLOT_LIMIT, SERVERS, ServerPlace
from echo2.core.background import Background, Ending
from echo2.core.clock import Clock
from echo2.core.errors import InvariantError, LinkError, PeerError, UserError
from echo2.core.printable import printable
from echo2.core.types import PayloadId, Snapshot, SnapshotRef
from echo2.engines.registry import make_engine, servers_here
from echo2.engines.tokenizer import prepare_tokenizers
from echo2.rollouts.harness import HarnessEnvironment
from echo2.tasks.environments import EnvironmentProcess
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import Membership, attended
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.weights.broadcast.peer import WeightsReceiver
from echo2.worker.at_home import Delivered, attended_at_home, measurements
from echo2.worker.decide import messages as do
from echo2.worker.decide import messages as ev
from echo2.worker.decide.scheduler import Swap, WorkerScheduler
from echo2.worker.sampling import LeaseSampler
from echo2.worker.weights import WorkerWeights

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0
#: Timeout of the Leave call of a worker that its owner ends.
LEAVE_SECONDS = 2.0
#: Maximum bytes of results sent in one call, unless a single one is larger; far below the size limit of a message.
DELIVER_BYTES = 8 << 20
#: Maximum characters of why a worker is of no use to the run, on its terminal.
NO_USE_CHARS_MAX = 500
#: Maximum number of leases that a worker keeps; far above the number that a head grants.
LEASES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of the machine's owner. `listen`: HOST:PORT to listen on for other workers (empty: any port);
    `advertise`: the address at which they dial this worker (empty: the one that the head sees); `relays`: whether this
    worker sends chunks to others. `offer`: name of the machine, if the run rented it. `engine`: "auto" selects the
    run's; `engine_python`, `engine_url`, `engine_args`: where its token server is, if it is one. `slots`: maximum
    number of rollouts decoded at once (0: as the run asks). `base`: directory or hub id of the base model of the run's
    adapters (empty: it is fetched from the run). `at_home`: it samples only while the machine's owner needs it little
    (`decide/home.py`), in half its memory; `max_memory_gb`: another limit (0: none). `card`: directory of the locks
    of a GPU that the run's learner uses, too.
    """

    engine: str = AUTO
    engine_python: str = ""
    engine_url: str = ""
    engine_args: str = ""
    device: str = "auto"
    price_usd_per_hour: float = 0.0
    slots: int = 0
    allow_environments: tuple[str, ...] = ()
    patience_seconds: float = 600.0
    listen: str = ""
    advertise: str = ""
    relays: bool = True
    offer: str = ""
    base: str = ""
    at_home: bool = False
    max_memory_gb: float = 0.0
    card: str = ""


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What samples the run's leases, and what decides about it."""

    scheduler: WorkerScheduler
    sampler: LeaseSampler


class WorkerProcess:
    """Drives one scheduler. `run` returns when the head orders the worker to stop."""

    def __init__(
        self,
        member: Membership,
        directory: Path,
        options: WorkerOptions,
        environments: Mapping[str, EnvironmentProcess | HarnessEnvironment],
        own_base: Snapshot | None = None,
    ) -> None:
        self._worker_id, self._options, self._environments = member.peer_id, options, environments
        self._directory = directory
        self._link, self._clock = member.link(), Clock()
        self._ending = Ending[str](log, "what the worker did")
        receive = partial(WeightsReceiver, member, self._link, directory, options.listen, options.relays)
        self._weights = WorkerWeights(receive, self._dispatch, self._ending.fail, own_base)
        self._sampling: _Sampling | None = None  # from the run's first settings on
        self._servers = (
            servers_here(options.device, options.engine_python, options.engine_url) if options.engine == AUTO else ()
        )
        self._outgoing: deque[do.Deliver] = deque()
        self._delivering = self._leaving = False
        self._pause_seconds = 0.0
        self._delivered = Delivered(options.price_usd_per_hour)
        self._loop = asyncio.get_running_loop()
        self._background = Background(self._ending.fail)
        self._wake: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._heartbeat_seconds = 0.0  # the head says it
        self._of_no_use = ""

    async def run(self) -> str:
        """Attend until the run is over. Return the reason.

        Raises:
            LinkError: the head was away for longer than `patience_seconds`.
            UserError: the engine can't run this model, the disk is full, or the address to listen on is unavailable.
        """
        async with AsyncExitStack() as closing:  # each of them closes, whatever becomes of the others
            closing.enter_context(self._ending)
            closing.push_async_callback(self._link.close)
            closing.push_async_callback(self._weights.close)
            await self._weights.start()
            closing.push_async_callback(self._close_sampler)
            closing.callback(self._background.cancel)
            closing.callback(self._ending.outcome.cancel)  # what fails from now on is logged
            closing.push_async_callback(self._leave_if_ended)
            attending: asyncio.Future[Any] = self._background.spawn(
                attended_at_home(self._keep_attending, self._step_back, self._background, measurements())
                if self._options.at_home
                else self._keep_attending()
            )
            outcome: asyncio.Future[Any] = self._ending.outcome
            await asyncio.wait({attending, outcome}, return_when=asyncio.FIRST_COMPLETED)
            if attending.done() and not outcome.done():
                attending.result()
            return await self._ending.outcome

    async def _leave_if_ended(self) -> None:
        """Leave if it is the owner who ends this worker."""
        log.info("%s", self._delivered)
        if not self._ending.outcome.done() and self._sampling is not None and self._sampling.scheduler.connected:
            await self._leave()

    async def _close_sampler(self) -> None:
        if self._sampling is not None:
            await self._sampling.sampler.close()

    # ---- events and commands -------------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event) -> None:
        if self._sampling is None or self._ending.outcome.done():
            return
        try:
            for command in self._sampling.scheduler.handle(event, self._clock.now()):
                self._carry_out(command, self._sampling.sampler)
        except Exception as error:  # timers and callbacks call this too; their exceptions would only be logged
            self._ending.fail(error)

    def _carry_out(self, command: do.Command, sampler: LeaseSampler) -> None:
        match command:
            case do.AskManifest():
                self._background.spawn(self._weights.ask(command.ref, command.base))
            case do.FetchSnapshot():
                self._weights.fetch(command.payload)
            case do.StopFetching():
                self._weights.node.stop_fetching(command.payload)
            case do.InstallSnapshot():
                self._background.spawn(self._install(command.payload, sampler))
            case do.StartLease():
                sampler.start(command.assignment)
            case do.StartUnit():
                sampler.start_unit(command.assignments)
            case do.AbortLease():
                sampler.abort(command.lease_id)
            case do.Deliver():
                self._deliver(command)
            case do.FailLease():
                self._background.spawn(self._fail_lease(command.lease_id, command.failure, command.reason))
            case do.ReportInstalled():
                self._background.spawn(self._report())
            case do.WakeAt():
                self._wake_at(command)
            case _:
                raise InvariantError(f"a worker does not know {command}")

    def _wake_at(self, command: do.WakeAt) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, command.at - self._clock.now())
        self._wake = self._loop.call_later(delay, self._dispatch, ev.Tick())

    # ---- attending -----------------------------------------------------------------------------------------------

    async def _keep_attending(self) -> None:
        """Consumes: orders. Waits for: the head. Unblocked by: its stream. Produces: events. Reconnects, and gives up
        after `patience_seconds` without the head."""
        patience_seconds = self._options.patience_seconds
        self._delivered.begin()
        try:
            calls = self._hello, patience_seconds, self._disconnected, lambda: self._leaving
            async with aclosing(attended(self._link, *calls)) as orders:
                async for order in orders:
                    if order.HasField("settings"):
                        self._heartbeat_seconds = order.settings.heartbeat_seconds
                        self._beating = self._beating or self._background.spawn(self._beat())
                        await self._start(order.settings)
                    else:
                        self._obey(order)
        finally:
            self._delivered.end()
            self._stop_beating()

    def _disconnected(self) -> None:
        self._stop_beating()
        self._weights.node.disconnected()
        self._dispatch(ev.Disconnected())

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    def _hello(self) -> wire.WorkerHello:
        sampling = self._sampling
        hello = wire.WorkerHello(
            protocol=PROTOCOL_VERSION,
            slots=self._options.slots or NO_SLOT_LIMIT,
            price_usd_per_hour=self._options.price_usd_per_hour,
            engine=(sampling is not None and sampling.sampler.chosen) or self._options.engine,
            device=self._options.device,
            pid=os.getpid(),
            host=socket.gethostname(),
            offer=self._options.offer,
            environments=sorted(self._environments),
            listen_port=self._weights.port,
            advertise=self._options.advertise,
            servers=self._servers if sampling is None else (),  # the choice is made once
        )
        if sampling is not None:
            hello.held_leases.extend(sampling.scheduler.held())
        if (installed := self._installed()) is not None:
            hello.installed.CopyFrom(messages.encode_ref(installed))
        return hello

    def _installed(self) -> SnapshotRef | None:
        """Return the installed snapshot; before the engine exists, the stored one that is about to be loaded."""
        if self._sampling is not None:
            return self._sampling.scheduler.installed
        return self._weights.content.ref

    async def _start(self, settings: wire.RunSettings) -> None:
        """Handle the settings that begin a stream. The first time, make the engine: the run's, unless the owner named
        another."""
        if self._sampling is None:
            self._sampling = await self._begin(settings)
            await self._report()
        self._weights.node.connected()
        self._dispatch(ev.Connected())

    async def _begin(self, settings: wire.RunSettings) -> _Sampling:
        """Make the engine, and give it the weights that an earlier process had installed."""
        options = self._options
        chosen = settings.server if settings.server in self._servers else ""
        name = chosen or (settings.engine if options.engine == AUTO else options.engine)
        if chosen:
            log.info("engine %s: it is installed, and there is a GPU for it alone", name)
        slots = max(1, min(settings.slots, options.slots or NO_SLOT_LIMIT))
        swap: Swap = "during" if settings.swap == "during" else "apart" if settings.swap == "apart" else "between"
        arguments = messages.decode_object("chat_template_args", settings.chat_template_args)
        make = partial(make_engine, name, options.device, slots, self._server_place(name, settings.routes))
        engine = await asyncio.to_thread(make)  # importing torch takes seconds
        self._background.spawn(asyncio.to_thread(prepare_tokenizers))  # while the first weights come
        sampler = LeaseSampler(
            engine,
            self._worker_id,
            self._environments,
            self._dispatch,
            self._ending.fail,
            device=options.device,
            card=options.card,
            name=name,
            template_arguments=arguments,
            server=chosen,
            one_version=swap == "apart",
        )
        self._background.spawn(sampler.card.keep())
        try:
            installed = await self._weights.reload(self._loading(sampler))
        except BaseException:
            await sampler.close()
            raise
        scheduler = WorkerScheduler(slots, swap, settings.deterministic)
        scheduler.installed, scheduler.base_models = installed, self._weights.base_models
        return _Sampling(scheduler, sampler)

    def _server_place(self, engine: str, routes: bool) -> ServerPlace:
        """Return where the token server is. Raises UserError if the owner gave such options and the engine has none."""
        options = self._options
        server_options = options.engine_python, options.engine_url, options.engine_args
        if any(server_options) and engine not in SERVERS:
            raise UserError(f"--engine-python, --engine-url and --engine-args do not apply to the engine {engine!r}.")
        python = options.engine_python or os.environ.get("ECHO2_ENGINE_PYTHON", "")
        return ServerPlace(
            python,
            options.engine_url,
            tuple(shlex.split(options.engine_args)),
            self._directory / "engine",
            routes,
            bool(options.card),
        )

    def _obey(self, order: wire.Order) -> None:
        if order.HasField("leases"):
            granted = tuple(messages.decode_assignment(lease) for lease in order.leases.leases)
            if self._sampling is not None and len(self._sampling.scheduler.waiting) + len(granted) > LEASES_MAX:
                raise PeerError("oversized", f"more than {LEASES_MAX} leases granted")
            self._dispatch(ev.LeasesGranted(tuple(assignment.lease for assignment in granted), granted))
        elif order.HasField("snapshot"):
            self._weights.announced(order.snapshot)
        elif order.HasField("revoked"):
            self._dispatch(ev.LeaseRevoked(order.revoked.lease_id, order.revoked.reason))
        elif order.HasField("slots"):
            self._dispatch(ev.SlotsSet(order.slots))
        elif order.HasField("check"):
            if self._sampling is not None:
                self._background.spawn(self._check(self._sampling.sampler, order.check))
        elif order.HasField("stop"):
            self._ending.tell(order.stop.reason)
        else:
            self._weights.node.obey(order)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            await self._report()

    async def _report(self) -> None:
        report = wire.WorkerReport(doing="joining", pause_seconds=self._pause_seconds)
        if (sampling := self._sampling) is not None:
            report.doing, report.refused = sampling.sampler.doing, sampling.scheduler.refused
            report.engine = sampling.sampler.engine_name
        node = self._weights.node
        report.bytes_received, report.bytes_sent = node.bytes_received, node.bytes_sent
        if (installed := self._installed()) is not None:
            report.installed.CopyFrom(messages.encode_ref(installed))
        reply = await self._tell("Report", report, "heartbeat")
        if reply is not None:
            self._heartbeat_seconds = reply.heartbeat_seconds or self._heartbeat_seconds
            if (of_no_use := printable(reply.of_no_use, NO_USE_CHARS_MAX)) not in ("", self._of_no_use):
                log.warning("the head has hardly any work for this worker: %s", of_no_use)
            self._of_no_use = of_no_use

    async def _tell(self, method: str, message: Any, what: str, seconds: float = CALL_SECONDS) -> Any:
        """Call the head and return its reply; None if it refuses, after which the call is not repeated."""
        try:
            return await self._link.call(method, message, seconds)
        except (LinkError, PeerError) as error:
            log.info("%s not taken: %s", what, error)
            return None

    async def _leave(self) -> None:
        """Tell the head that this worker leaves, so that it grants the leases to others at once."""
        self._leaving = True
        await self._tell("Leave", wire.Empty(), "goodbye", LEAVE_SECONDS)

    async def _step_back(self, why: str) -> bool:
        """Leave the run for a while: others get the leases at once, and the weights stay. False: not yet, for the
        engine is being made."""
        if self._sampling is None:
            return False
        scheduler = self._sampling.scheduler
        log.info("paused, for %s; %s", why, self._delivered)
        if scheduler.connected:
            await self._leave()
        for lease_id in scheduler.held():
            self._dispatch(ev.LeaseRevoked(lease_id, why))
        self._leaving = False
        self._weights.node.disconnected()
        self._dispatch(ev.Disconnected())
        return True

    # ---- checking -------------------------------------------------------------------------------------------------

    async def _check(self, sampler: LeaseSampler, request: wire.Check) -> None:
        report = await sampler.check(request)
        await self._tell("ReportCheck", report, f"verdict on group {report.number}")  # a second call would be too late

    # ---- snapshots -----------------------------------------------------------------------------------------------

    async def _install(self, payload: PayloadId, sampler: LeaseSampler) -> None:
        pause = await self._weights.install(payload, self._loading(sampler))
        if pause is not None:
            self._pause_seconds += pause
            self._dispatch(ev.SnapshotInstalled(payload.ref))
            rate = sampler.num_tokens / max(1e-9, sampler.busy_seconds)
            log.info("%s installed; %.0f tokens/s; %s", payload, rate, self._delivered)
            await self._weights.keep(payload)

    def _loading(self, sampler: LeaseSampler) -> Callable[[Snapshot], Awaitable[float]]:
        return lambda snapshot: sampler.load(snapshot, self._weights.base)

    # ---- delivering ----------------------------------------------------------------------------------------------

    def _deliver(self, command: do.Deliver) -> None:
        self._outgoing.append(command)
        if not self._delivering:
            self._delivering = True
            self._background.spawn(self._deliver_all())

    async def _deliver_all(self) -> None:
        """Send all waiting results together. Results that become ready meanwhile go with the next call."""
        try:
            while self._outgoing:
                batch, size = wire.Deliveries(), 0
                while self._outgoing and (size < DELIVER_BYTES or not batch.items):
                    command = self._outgoing.popleft()
                    size += messages.encode_delivery(command.lease_id, command.result, batch).ByteSize()
                await self._send(batch)
        finally:
            self._delivering = False

    async def _send(self, batch: wire.Deliveries) -> None:
        lease_ids = [item.lease_id for item in batch.items]
        try:
            replies = await self._link.call("Deliver", batch, CALL_SECONDS)
        except (LinkError, PeerError):
            for lease_id in lease_ids:
                self._dispatch(ev.DeliveryFailed(lease_id))
            return
        for item, reply in zip(batch.items, replies.items, strict=True):
            if reply.accepted:
                self._delivered.add(item)
            else:
                log.info("lease %d refused: %s", item.lease_id, reply.reason)
            self._dispatch(ev.DeliveryAnswered(item.lease_id))

    async def _fail_lease(self, lease_id: int, failure: str, detail: str) -> None:
        failed = wire.LeaseFailed(lease_id=lease_id, reason=failure, detail=detail)
        await self._tell("FailLease", failed, f"failure of lease {lease_id}")  # else the head sees the lease expire
