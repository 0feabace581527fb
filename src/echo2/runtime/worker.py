"""`echo2 worker TICKET`: one rollout worker. The relay decides, this drives it: link and engine; `worker_weights`
fetches, installs and gives on.

Three things run at once, so that none delays another: the event loop (link, heartbeats, chunks), one engine thread
(sampling), and one loading thread (apply, verify, load a snapshot beside the old one). Results wait in memory until
the head has answered for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from echo2.control import relay_commands as do
from echo2.control import relay_events as ev
from echo2.control.relay import Relay
from echo2.errors import Echo2Error, LinkError, PeerError, UserError
from echo2.rollout import generate
from echo2.rollout.engine import RequestFailure, SwapMode
from echo2.rollout.engines import make_engine
from echo2.rollout.tokenizer import load_tokenizer
from echo2.runtime.clock import Clock
from echo2.runtime.worker_weights import WorkerWeights, listen_address
from echo2.tasks.environment_process import open_world
from echo2.tasks.environments import BUILT_IN, OpenWorld
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import Membership
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.types import Assignment, Lease, PayloadId, RolloutGroup, Snapshot, SnapshotRef

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0
#: Pause before the first try to reconnect, doubled up to the last.
RECONNECT_SECONDS = (0.2, 5.0)
#: Bytes of results sent in one call, unless a single one is larger; far below the limit of a message.
DELIVER_BYTES = 8 << 20
#: What a worker whose owner sets no limit says that it samples together: any number.
AS_THE_RUN_ASKS = 4096
#: Assignments a worker keeps; far above what a head grants.
ASSIGNMENTS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the owner of the machine decides. `listen`: HOST:PORT for other workers (empty: any port); `advertise`:
    where they dial it (empty: where the head sees it); `relays`: whether it gives them chunks at all. `offer`: name of
    its machine, if the run rented it.
    """

    engine: str = "compact"
    device: str = "auto"
    price_usd_per_hour: float = 0.0
    max_groups: int = 0
    allow_environments: tuple[str, ...] = ()
    patience_seconds: float = 600.0
    listen: str = ""
    advertise: str = ""
    relays: bool = True
    offer: str = ""


@dataclass(slots=True)
class Counters:
    """What heartbeats report."""

    tokens_generated: int = 0
    pause_seconds: float = 0.0
    busy_seconds: float = 0.0
    doing: str = "joining"


@dataclass(slots=True)
class Batch:
    """The batch at the engine."""

    assignments: dict[int, Assignment]
    cancelled: bool = field(default=False)


class WorkerProcess:
    """Drives one relay. `run` returns when the head says stop."""

    def __init__(
        self,
        member: Membership,
        directory: Path,
        options: WorkerOptions,
        worlds: Mapping[str, OpenWorld],
    ) -> None:
        self._worker_id, self._options, self._worlds = member.peer_id, options, worlds
        self._link, self._clock = member.link(), Clock()
        listen = listen_address(options.listen, options.relays, member.address)
        self._weights = WorkerWeights(
            member, self._link, directory, listen, options.advertise, options.relays, self._happen, self._give_up
        )
        self._relay: Relay | None = None
        self._engine: Any = None
        self._tokenizer: Any = None
        self._tokenizer_files: dict[str, bytes] = {}
        self._assignments: dict[int, Assignment] = {}
        self._results: dict[int, RolloutGroup] = {}
        self._outgoing: deque[int] = deque()
        self._delivering = False
        self._batch: Batch | None = None
        self._counters = Counters()
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: asyncio.Future[str] = self._loop.create_future()
        self._wake: asyncio.TimerHandle | None = None
        self._carry: dict[type[Any], Callable[[Any], None]] = {
            do.AskManifest: lambda c: self._spawn(self._weights.ask(c.ref, c.base)),
            do.FetchSnapshot: lambda c: self._weights.fetch(c.payload),
            do.StopFetching: lambda c: self._weights.stop_fetching(c.payload),
            do.InstallSnapshot: lambda c: self._spawn(self._install(c.payload)),
            do.StartBatch: lambda c: self._spawn(self._generate(c.lease_ids, c.ref)),
            do.CancelBatch: lambda c: self._cancel_batch(),
            do.Deliver: lambda c: self._deliver(c.lease_id),
            do.FailLease: lambda c: self._spawn(self._fail_lease(c.lease_id, c.failure, c.reason)),
            do.Report: lambda c: self._spawn(self._report()),
            do.WakeAt: self._wake_at,
            do.Stop: lambda c: self._stop(c.reason),
        }

    async def run(self) -> str:
        """Attend until the run is over; returns why.

        Raises:
            LinkError: the head was away for longer than `patience_seconds`.
            UserError: the engine can't run this model, the disk is full, or the address to listen on can't be had.
        """
        await self._weights.start()
        attending: asyncio.Future[Any] = asyncio.ensure_future(self._keep_attending())
        stopped: asyncio.Future[Any] = self._stopped
        try:
            await asyncio.wait({attending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if attending.done() and not self._stopped.done():
                attending.result()
            return self._stopped.result()
        finally:
            attending.cancel()
            for task in list(self._tasks):
                task.cancel()
            self._cancel_batch()
            self._engine_thread.shutdown(wait=False, cancel_futures=True)
            for world in self._worlds.values():
                world.close()
            await self._weights.close()
            await self._link.close()

    # ---- the one place where things happen -----------------------------------------------------------------------

    def _happen(self, event: ev.Event) -> None:
        if self._relay is None or self._stopped.done():
            return
        try:
            for command in self._relay.handle(event, self._clock.now()):
                self._carry[type(command)](command)
        except Exception as error:  # called by timers and threads too, from where it would only be logged
            self._give_up(error)

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(error)

    def _stop(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)

    def _wake_at(self, command: do.WakeAt) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, command.at - self._clock.now())
        self._wake = self._loop.call_later(delay, self._happen, ev.Tick())

    # ---- attending -----------------------------------------------------------------------------------------------

    async def _keep_attending(self) -> None:
        """Consumes: orders. Waits for: the head. Unblocked by: its stream. Produces: relay events. Reconnects for ever,
        but gives up after `patience_seconds` without the head."""
        away_since, pause = time.monotonic(), RECONNECT_SECONDS[0]
        while True:
            beating: asyncio.Task[None] | None = None
            try:
                async for order in self._link.stream("Attend", self._hello()):
                    away_since, pause = 0.0, RECONNECT_SECONDS[0]
                    if order.HasField("settings"):
                        beating = beating or asyncio.ensure_future(self._beat(order.settings.heartbeat_seconds))
                        await self._start(order.settings)
                    else:
                        self._obey(order)
                reason = "the head ended the stream"
            except LinkError as error:
                reason = str(error)
            except PeerError as error:
                if error.reason != "expelled":
                    raise
                reason, pause = str(error), RECONNECT_SECONDS[1]
            finally:
                if beating is not None:
                    beating.cancel()
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > self._options.patience_seconds:
                raise LinkError(f"no head for {self._options.patience_seconds:.0f} s: {reason}")
            log.info("not connected (%s); trying again", reason)
            self._counters.doing = f"reconnecting: {reason}"
            self._weights.disconnected()
            self._happen(ev.Disconnected(reason))
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_SECONDS[1])

    def _hello(self) -> wire.WorkerHello:
        relay = self._relay
        hello = wire.WorkerHello(
            protocol=PROTOCOL_VERSION,
            capacity_groups=self._options.max_groups or AS_THE_RUN_ASKS,
            price_usd_per_hour=self._options.price_usd_per_hour,
            engine=self._options.engine,
            device=self._options.device,
            pid=os.getpid(),
            host=socket.gethostname(),
            offer=self._options.offer,
            environments=sorted(self._worlds),
        )
        if relay is not None:
            hello.held_leases.extend([*relay.waiting, *relay.generating, *relay.produced])
        if (installed := self._installed()) is not None:
            hello.installed_version, hello.installed_lineage = installed.version, installed.lineage
        self._weights.introduce(hello)
        return hello

    def _installed(self) -> SnapshotRef | None:
        """What is installed; before the engine is there, what an earlier process had and will be, in a moment."""
        if self._relay is not None:
            return self._relay.installed
        return self._weights.content.ref if self._weights.content is not None else None

    async def _start(self, settings: wire.RunSettings) -> None:
        if self._relay is None:
            swap: SwapMode = "during" if settings.swap == "during" else "between"
            make = partial(make_engine, self._options.engine, self._options.device, swap)
            self._engine = await self._loop.run_in_executor(self._engine_thread, make)  # importing torch takes seconds
            installed = await self._weights.reload(self._load)
            self._relay = Relay(
                min(settings.groups_per_batch, self._options.max_groups or AS_THE_RUN_ASKS), settings.swap == "during"
            )
            self._relay.installed = installed
            await self._report()
        self._weights.connected()
        self._happen(ev.Connected())

    def _obey(self, order: wire.Order) -> None:
        if order.HasField("leases"):
            granted = [messages.decode_assignment(lease) for lease in order.leases.leases]
            for assignment in granted:
                if len(self._assignments) >= ASSIGNMENTS_MAX:
                    raise PeerError("oversized", f"more than {ASSIGNMENTS_MAX} leases granted")
                self._assignments[assignment.lease.lease_id] = assignment
            self._happen(ev.LeasesGranted(tuple(assignment.lease for assignment in granted)))
        elif order.HasField("snapshot"):
            self._weights.announced(order.snapshot)
        elif order.HasField("revoked"):
            lease_id = order.revoked.lease_id
            self._happen(ev.LeaseRevoked(lease_id, order.revoked.reason))
            self._forget(lease_id)
        elif order.HasField("stop"):
            self._happen(ev.StopOrdered(order.stop.reason))
        else:
            self._weights.obey(order)

    async def _beat(self, heartbeat_seconds: float) -> None:
        while True:
            await asyncio.sleep(heartbeat_seconds)
            await self._report()

    async def _report(self) -> None:
        counters = self._counters
        report = wire.WorkerReport(
            doing=counters.doing,
            tokens_generated=counters.tokens_generated,
            pause_seconds=counters.pause_seconds,
            busy_seconds=counters.busy_seconds,
        )
        self._weights.count(report)
        if (installed := self._installed()) is not None:
            report.installed_version, report.installed_lineage = installed.version, installed.lineage
        try:
            await self._link.call("Report", report, CALL_SECONDS)
        except (LinkError, PeerError) as error:
            log.info("heartbeat not taken: %s", error)

    def _forget(self, lease_id: int) -> None:
        self._assignments.pop(lease_id, None)
        self._results.pop(lease_id, None)

    # ---- snapshots -----------------------------------------------------------------------------------------------

    async def _install(self, payload: PayloadId) -> None:
        pause = await self._weights.install(payload, self._load)
        if pause is not None:
            self._counters.pause_seconds += pause
            self._happen(ev.SnapshotInstalled(payload.ref))
            await self._weights.keep(payload)

    def _load(self, snapshot: Snapshot) -> float:
        """In the loading thread: load a verified snapshot beside the old weights, and swap."""
        self._load_tokenizer(snapshot)
        return float(self._engine.load_snapshot(snapshot))

    def _load_tokenizer(self, snapshot: Snapshot) -> None:
        files = {name: bytes(data) for name, data in snapshot.files.items()}
        if files != self._tokenizer_files:
            self._tokenizer, self._tokenizer_files = load_tokenizer(files), files

    # ---- generating ----------------------------------------------------------------------------------------------

    def _cancel_batch(self) -> None:
        if self._batch is not None:
            self._batch.cancelled = True

    async def _generate(self, lease_ids: tuple[int, ...], ref: SnapshotRef) -> None:
        batch = Batch({lease_id: self._assignments[lease_id] for lease_id in lease_ids})
        self._batch = batch
        self._counters.doing = f"sampling {len(lease_ids)} groups with version {ref.version}"
        started = time.monotonic()
        error: str | None = None
        try:
            await self._loop.run_in_executor(self._engine_thread, self._sample, batch, ref)
        except UserError:
            raise
        except (Echo2Error, RuntimeError) as failure:  # torch reports full memory and bad kernels as RuntimeError
            log.exception("the batch failed")
            error = f"{type(failure).__name__}: {failure}"[:500]
        self._counters.busy_seconds += time.monotonic() - started
        self._counters.doing = "waiting"
        self._batch = None
        self._happen(ev.BatchEnded(error))

    def _sample(self, batch: Batch, ref: SnapshotRef) -> None:
        """In the engine thread: sample, and hand each group to the event loop as it completes. A group is
        charged the time since the one before it, so that the groups of a batch add up to the batch."""
        started = time.monotonic()

        def finished(group: RolloutGroup, lease: Lease) -> None:
            nonlocal started
            seconds, started = time.monotonic() - started, time.monotonic()
            self._loop.call_soon_threadsafe(self._produced, lease.lease_id, replace(group, generate_seconds=seconds))

        def failed(lease: Lease, failure: RequestFailure) -> None:
            self._post(ev.LeaseAbandoned(lease.lease_id, failure.reason, failure.detail))

        unknown = {assignment.environment for assignment in batch.assignments.values()} - {"", *self._worlds}
        if unknown:
            raise PeerError("malformed", f"asked for environments that this worker does not run: {sorted(unknown)}")
        generate.sample_groups(
            self._engine,
            self._tokenizer,
            list(batch.assignments.values()),
            lineage=ref.lineage,
            worker_id=self._worker_id,
            on_group=finished,
            on_failed=failed,
            should_stop=lambda: batch.cancelled,
            worlds=self._worlds,
        )

    def _post(self, event: ev.Event) -> None:
        self._loop.call_soon_threadsafe(self._happen, event)

    def _produced(self, lease_id: int, group: RolloutGroup) -> None:
        if lease_id not in self._assignments:
            return  # revoked while it was sampled
        self._results[lease_id] = group
        self._counters.tokens_generated += group.num_tokens
        self._happen(ev.GroupProduced(lease_id))

    # ---- delivering ----------------------------------------------------------------------------------------------

    def _deliver(self, lease_id: int) -> None:
        self._outgoing.append(lease_id)
        if not self._delivering:
            self._delivering = True
            self._spawn(self._deliver_all())

    async def _deliver_all(self) -> None:
        """Send what waits, together; what becomes ready meanwhile goes with the next call."""
        try:
            while self._outgoing:
                batch, size = wire.Deliveries(), 0
                while self._outgoing and (size < DELIVER_BYTES or not batch.items):
                    group = self._results.get(lease_id := self._outgoing.popleft())
                    if group is not None:  # else revoked meanwhile
                        batch.items.append(messages.encode_delivery(lease_id, group))
                        size += batch.items[-1].ByteSize()
                if batch.items:
                    await self._send(batch)
        finally:
            self._delivering = False

    async def _send(self, batch: wire.Deliveries) -> None:
        lease_ids = [item.lease_id for item in batch.items]
        try:
            replies = await self._link.call("Deliver", batch, CALL_SECONDS)
        except (LinkError, PeerError) as error:
            for lease_id in lease_ids:
                self._happen(ev.DeliveryFailed(lease_id, str(error)))
            return
        for lease_id, reply in zip(lease_ids, replies.items, strict=True):
            if not reply.accepted:
                log.info("lease %d refused: %s", lease_id, reply.reason)
            self._happen(ev.DeliveryAnswered(lease_id, reply.accepted, reply.reason))
            self._forget(lease_id)

    async def _fail_lease(self, lease_id: int, failure: str, detail: str) -> None:
        self._forget(lease_id)
        failed = wire.LeaseFailed(lease_id=lease_id, reason=failure, detail=detail)
        try:
            await self._link.call("FailLease", failed, CALL_SECONDS)
        except (LinkError, PeerError) as error:
            log.info("lease %d: failure not taken: %s", lease_id, error)  # its deadline will tell the head


async def join(ticket: str, directory: Path | None, options: WorkerOptions) -> str:
    """Enrol with the ticket, attend until the run is over, and say why it ended."""
    from echo2.transport import grpc_link

    state = directory or Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "echo2"
    member = await grpc_link.join(ticket, state, options.patience_seconds)
    log.info("joined as %s", member.peer_id)
    worlds = {spec: open_world(spec) for spec in (*BUILT_IN, *options.allow_environments)}
    process = WorkerProcess(member, state / member.peer_id, options, worlds)
    return await process.run()


def run_worker(ticket: str, directory: Path | None, options: WorkerOptions) -> str:
    """The whole life of a worker process."""
    return asyncio.run(partial(join, ticket, directory, options)())
