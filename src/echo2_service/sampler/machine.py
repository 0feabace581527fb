"""`echo2 worker` with the ticket of a service: samples for the service's tenants on a machine of its owner.

The machine attends like a worker of a run. Calls arrive as orders; answers are sent in batches as they become ready;
base models and adapters are fetched when a call needs them, one at a time, and kept on disk. If the connection breaks,
open calls go to other machines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from echo2.core.background import Ending, Shared, close_all, spawn
from echo2.core.errors import InvariantError, LinkError, PeerError, UserError, counted
from echo2.core.types import PayloadId, Snapshot, SnapshotRef
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import Membership, attended
from echo2.transport.limits import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from echo2.weights.broadcast.peer import Receive, WeightsReceiver
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.content import Content
from echo2.worker.joining import enrolled
from echo2.worker.worker_process import CALL_SECONDS, DELIVER_BYTES, WorkerOptions
from echo2_service.backend import Answer
from echo2_service.calling import REQUESTS, encode
from echo2_service.decide.placing import SLOTS
from echo2_service.fleet.payloads import LINEAGE, VERSION
from echo2_service.sampler.sample_calls import BaseSampler, SampleCalls

log = logging.getLogger(__name__)

#: Maximum size of all adapters on disk; the least recently used are deleted.
ADAPTER_BYTES_MAX = 4 << 30
#: Seconds after which unsent answers are sent again, if the connection holds.
AGAIN_SECONDS = 0.2
ANSWER_BYTES_MAX = MESSAGE_BYTES_MAX - (1 << 20)


class FetchedWeights:
    """`node`: this machine's peer in the broadcast. `own_base`: a base model already here. For one event loop."""

    def __init__(
        self, receive: Receive, contents: Path, fail: Callable[[BaseException], None], own_base: Snapshot | None
    ) -> None:
        self._own_base = own_base
        self._receiver = receive(self._whole, self._gone, fail)
        self.node, self._store = self._receiver.node, self._receiver.store
        self._contents = contents
        contents.mkdir(parents=True, exist_ok=True)
        self._adapters: OrderedDict[PayloadId, int] = OrderedDict(  # sizes in bytes; most recently used last
            (manifest.payload, manifest.content_bytes)
            for manifest in self._store.manifests()
            if not manifest.ref.is_base_model
        )
        self._fetching = asyncio.Lock()
        self._arrival: asyncio.Future[None] | None = None

    async def base(self, policy: str) -> Snapshot:
        """Return a base model, fetching it if necessary.

        Raises:
            LinkError, PeerError: the model can't be fetched now.
            UserError: the disk is full.
        """
        if self._own_base is not None and self._own_base.ref.policy == policy:
            return self._own_base
        return await self.content(SnapshotRef(policy, 0, 0))

    async def content(self, ref: SnapshotRef) -> Snapshot:
        """Return an adapter or a base model, fetching it if necessary. Raises as `base`."""
        async with self._fetching:
            manifest = self._store.manifest(PayloadId(ref))
            if manifest is None or self._store.missing(manifest):
                manifest = await self._fetch(ref)
            content = Content(self._contents / ref.policy)
            try:
                await asyncio.to_thread(content.apply, manifest, self._store.get)
            except PeerError:  # damaged on disk: the next request fetches it again
                self._store.drop_manifest(manifest.payload)
                raise
            if not ref.is_base_model:
                await self._make_room(manifest)
            return content.snapshot()

    async def _fetch(self, ref: SnapshotRef) -> Manifest:
        manifest = await self._receiver.ask(ref)
        if manifest.payload != PayloadId(ref):
            raise PeerError("malformed", f"asked for {ref}, told of {manifest.payload}")
        self._arrival = asyncio.get_running_loop().create_future()
        self.node.fetch(manifest)
        try:
            await self._arrival
        except asyncio.CancelledError:
            self.node.stop_fetching(manifest.payload)
            raise
        finally:
            self._arrival = None
        self._store.put_manifest(manifest)
        log.info("%s is here", ref)
        return manifest

    def _whole(self, payload: PayloadId) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _gone(self, payload: PayloadId) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(PeerError("unknown_snapshot", f"{payload} is no longer stored anywhere"))

    async def _make_room(self, newest: Manifest) -> None:
        self._adapters[newest.payload] = newest.content_bytes
        self._adapters.move_to_end(newest.payload)
        excess = sum(self._adapters.values()) - ADAPTER_BYTES_MAX
        if excess <= 0:
            return
        for payload, num_bytes in list(self._adapters.items())[:-1]:
            if excess <= 0:
                break
            excess -= num_bytes
            del self._adapters[payload]
            (self._contents / payload.ref.policy).unlink(missing_ok=True)
        manifests = [one for one in self._store.manifests() if one.ref.is_base_model or one.payload in self._adapters]
        self._store.forget(manifests)
        await asyncio.to_thread(self._store.sweep)


class SamplerMachine:
    """One machine of a service's fleet. For one event loop."""

    def __init__(self, member: Membership, directory: Path, options: WorkerOptions, own_base: Snapshot | None) -> None:
        self._options, self._link = options, member.link()
        self._ending = Ending[None](log, "what the machine did")
        receive = partial(WeightsReceiver, member, self._link, directory, options.listen, options.relays)
        self._weights = FetchedWeights(receive, directory / "contents", self._ending.fail, own_base)
        self._slots = options.slots or SLOTS
        self._bases = Shared(self._load)
        self._calls = SampleCalls(self._bases.get, self._queue_answer)
        self._answers: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._port = 0

    async def run(self) -> NoReturn:
        """Sample until the service is unreachable for `patience_seconds`. The end of the stream tells the service that
        this machine leaves.

        Raises:
            LinkError: the service was unreachable for so long. PeerError: this machine was refused.
            UserError: the address can't be listened on, or the disk is full.
        """
        async with AsyncExitStack() as closing:  # each of them closes, whatever becomes of the others
            closing.enter_context(self._ending)
            closing.push_async_callback(self._link.close)
            closing.push_async_callback(self._weights.node.close)
            self._port = await self._weights.node.start()
            closing.push_async_callback(self._close_samplers)
            closing.callback(self._disconnected)
            attending = spawn(self._attend(), self._ending.fail)
            closing.callback(attending.cancel)
            await asyncio.wait({attending, self._ending.outcome}, return_when=asyncio.FIRST_COMPLETED)
            await (self._ending.outcome if self._ending.outcome.done() else attending)
            raise InvariantError("a machine attends for ever, or fails")

    async def _close_samplers(self) -> None:
        await close_all(*(sampler.close for sampler in self._bases.made().values()))

    async def _attend(self) -> None:
        patience_seconds = self._options.patience_seconds
        async with aclosing(attended(self._link, self._hello, patience_seconds, self._disconnected)) as orders:
            async for order in orders:
                if order.HasField("settings"):
                    log.info("the service %s has taken this machine in", order.settings.run_id)
                    self._beating = spawn(self._beat(order.settings.heartbeat_seconds), self._ending.fail)
                    self._weights.node.connected()
                elif order.HasField("sample"):
                    self._take(order.sample)
                else:
                    self._weights.node.obey(order)

    def _hello(self) -> wire.WorkerHello:
        options = self._options
        return wire.WorkerHello(
            protocol=PROTOCOL_VERSION,
            slots=self._slots,
            price_usd_per_hour=options.price_usd_per_hour,
            engine="compact",
            device=options.device,
            pid=os.getpid(),
            host=socket.gethostname(),
            listen_port=self._port,
            advertise=options.advertise,
        )

    def _take(self, data: bytes) -> None:
        try:
            self._calls.take(REQUESTS.decode(data))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError("malformed", f"a call: {error}") from error

    def _disconnected(self) -> None:
        """Drop all calls; other machines take them."""
        if self._beating is not None:
            self._beating.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self._answers.clear()
        self._calls.drop_all()
        self._weights.node.disconnected()

    async def _beat(self, heartbeat_seconds: float) -> None:
        node = self._weights.node
        while True:
            doing = counted(self._calls.num_under_way, "call") if self._calls.num_under_way else "waits for calls"
            if node.progress is not None:
                payload, num_stored, num_bytes = node.progress
                doing = f"fetches {payload.ref.policy}, {num_stored / max(1, num_bytes):.0%}; {doing}"
            report = wire.WorkerReport(doing=doing, bytes_received=node.bytes_received, bytes_sent=node.bytes_sent)
            try:
                await self._link.call("Report", report, CALL_SECONDS)
            except (LinkError, PeerError) as error:
                log.info("heartbeat not taken: %s", error)
            await asyncio.sleep(heartbeat_seconds)

    # ---- samples -----------------------------------------------------------------------------------------------------

    async def _load(self, base: str) -> BaseSampler:
        """Return the sampler of a base model, which is fetched."""
        snapshot = await self._had(self._weights.base(base))
        make = partial(BaseSampler, snapshot, self._options.device, self._adapter, self._slots)
        return await asyncio.to_thread(make)

    async def _adapter(self, policy: str) -> Snapshot:
        return await self._had(self._weights.content(SnapshotRef(policy, LINEAGE, VERSION)))

    async def _had(self, fetching: Awaitable[Snapshot]) -> Snapshot:
        """Await weights; raise LinkError if they can't be fetched, so that another machine takes the call: this is not
        the tenant's mistake.
        """
        try:
            return await fetching
        except (PeerError, UserError) as error:
            raise LinkError(f"weights are not available: {error}") from error

    def _queue_answer(self, answer: Answer) -> None:
        if answer.has_begun:
            return
        data = encode(answer)
        if len(data) > ANSWER_BYTES_MAX:
            data = encode(Answer(answer.number, fault=f"an answer of {len(data)} bytes", is_ours=True))
        self._answers.append(data)
        if self._sending is None or self._sending.done():
            self._sending = spawn(self._send(), self._ending.fail)

    async def _send(self) -> None:
        while self._answers:
            batch = wire.SampleAnswers()
            num_bytes = 0
            while self._answers and (not batch.answers or num_bytes + len(self._answers[0]) <= DELIVER_BYTES):
                num_bytes += len(self._answers[0])
                batch.answers.append(self._answers.popleft())
            try:
                await self._link.call("AnswerSamples", batch, CALL_SECONDS)
            except LinkError as error:  # a broken connection also ends the stream of orders, and thereby this task
                log.info("%d answers not taken: %s", len(batch.answers), error)
                self._answers.extendleft(reversed(batch.answers))
                await asyncio.sleep(AGAIN_SECONDS)
            except PeerError as error:
                log.warning("%d answers refused: %s", len(batch.answers), error)


async def join(ticket: str, directory: Path | None, options: WorkerOptions) -> NoReturn:
    """Enrol with the ticket and sample.

    Raises:
        UserError: an option that does not apply to a machine of a service; and as `SamplerMachine.run`.
    """
    if options.engine not in ("auto", "compact") or options.allow_environments or options.offer:
        raise UserError("A service samples with the engine compact, without environments, on machines of its owner.")
    member, place, own_base = await enrolled(ticket, directory, options)
    await SamplerMachine(member, place, options, own_base).run()


def run_machine(ticket: str, directory: Path | None, options: WorkerOptions) -> NoReturn:
    """Run the whole process."""
    asyncio.run(join(ticket, directory, options))
