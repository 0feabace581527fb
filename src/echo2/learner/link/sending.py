"""Sends a payload's chunks to the head. Of several ranks each encodes and sends its own share of the segments.

The first rank tells the others what to send (`OtherRanks`), and each answers with its segments once the head has their
chunks. The first rank alone puts the manifest together and announces it, so the head sees one learner, whose calls come
over several connections: chunks are named by their content, and a manifest is taken once all its chunks are there.
Ranks trust each other and the network between them; a token keeps other processes out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from echo2.core.addresses import LOOPBACK, family, join
from echo2.core.background import Background, together
from echo2.core.errors import Echo2Error, LinkError, PeerError, UserError
from echo2.core.frames import frame, receive_frame
from echo2.core.loop_thread import LoopThread, call_in, in_thread
from echo2.core.retries import Retries
from echo2.core.types import Backoff, SnapshotRef
from echo2.learner.core.publication import BorrowedWeights, ChunkedPayload, Payload, Publisher
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.weights.format.manifest import MAX_MANIFEST_BYTES, Segment

log = logging.getLogger(__name__)

CALL_SECONDS = 30.0  # one attempt of a small call
PAUSE_SECONDS = Backoff(0.1, 3.0)
OFFER_CHUNKS = 1024  # chunks named in one call
PARALLEL_CHUNKS = 8  # enough to hide the round trip of a chunk, few enough to be bounded in memory
UNKNOWN_LEARNER = "unknown_learner"  # the head's reason: it was restarted and needs a hello
#: An order to the other ranks: encode and send the weights of a version, the last content as a whole, or those
#: chunks of the last payload that the head lacks.
WEIGHTS, WHOLE, AGAIN = "weights", "whole", "again"

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Meeting(msgspec.Struct, frozen=True):
    """Where the other ranks meet the first one, and the ticket that it was given for the head, if any."""

    host: str
    port: int
    token: bytes
    ticket: str


class _Hello(msgspec.Struct, frozen=True):
    token: bytes
    rank: int


class _Call(msgspec.Struct, frozen=True):
    verb: str
    ref: SnapshotRef
    epoch: int


class Sent(msgspec.Struct, frozen=True):
    """A rank's answer: the segments that it encoded. `error`: why it failed; empty if it did not."""

    segments: list[Segment]
    error: str = ""
    is_user_error: bool = False


class Patience:
    """The attempts of one call to the head, until the time is used up."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._retries = Retries(PAUSE_SECONDS, seconds)

    async def pause(self, error: Exception) -> None:
        """Wait before the next attempt. Raises LinkError if the time is used up."""
        if self._retries.failed():
            raise LinkError(f"{self._what}: the head has not answered for {self._seconds:.0f} s: {error}") from error
        await self._retries.pause()


async def send_parts(payload: ChunkedPayload, send: Callable[[Sequence[bytes]], Awaitable[None]]) -> None:
    """Send each part when it is encoded. Encoding runs in a thread, so that arriving groups do not wait for it. It does
    not wait for the link, because the weights are lent until it ends."""
    loop = asyncio.get_running_loop()
    encoded: asyncio.Queue[list[bytes] | None] = asyncio.Queue()

    def encode() -> None:
        for names in payload.parts():
            call_in(loop, encoded.put_nowait, names)

    encoding = in_thread(encode)  # a future, not a task, which could be cancelled under the thread
    encoding.add_done_callback(lambda _: encoded.put_nowait(None))
    try:
        while (names := await encoded.get()) is not None:
            await send(names)
    finally:
        await asyncio.wait([encoding])  # the next payload overwrites the same content file
    encoding.result()


async def upload(link: Link, epoch: int, payload: ChunkedPayload, names: Sequence[bytes]) -> None:
    """Upload those of the chunks that the head lacks. `epoch`: of the head's last welcome."""
    missing: list[bytes] = []
    for start in range(0, len(names), OFFER_CHUNKS):
        offer = wire.ChunkOffer(hashes=names[start : start + OFFER_CHUNKS], epoch=epoch)
        missing += (await link.call("OfferChunks", offer, CALL_SECONDS)).hashes
    at_once = asyncio.Semaphore(PARALLEL_CHUNKS)

    async def put(name: bytes) -> None:
        async with at_once:
            chunk = wire.OfferedChunk(hash=name, data=payload.chunk(name), epoch=epoch)
            await link.call("PutChunk", chunk, CALL_SECONDS)

    async with together() as tasks:
        for name in missing:
            tasks.create_task(put(name))


def _listening(host: str) -> socket.socket:
    """Listen on a free port of this host; "": of all interfaces."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, 0), family=family(host))


class OtherRanks:
    """The first rank's connections to the `num` other ranks that send. `host`: the address to listen on."""

    def __init__(self, num: int = 0, host: str = LOOPBACK) -> None:
        self._num = num
        self._listening = _listening(host) if num else None
        self._token = secrets.token_bytes(32)
        self._streams: dict[int, Streams] = {}
        self._greetings = Background(self._greeting_failed)
        self._fault: Exception | None = None
        self._are_here = asyncio.Event()
        self._server: asyncio.Server | None = None

    def meeting(self, host: str, ticket: str) -> bytes:
        """Return where the others meet this rank, for `RankSender`. `host`: the address that they dial."""
        port = self._listening.getsockname()[1] if self._listening else 0
        return msgspec.msgpack.encode(Meeting(host, port, self._token, ticket))

    async def open(self) -> None:
        """Let the other ranks in."""
        if self._listening is not None:
            self._server = await asyncio.start_server(self._greet, sock=self._listening)

    async def call(self, verb: str, ref: SnapshotRef, epoch: int) -> None:
        """Tell the other ranks what to send. `epoch`: of the head's last welcome.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._num:
            await self._are_here.wait()
        if self._fault is not None:
            raise RuntimeError("a rank could not be let in") from self._fault
        for rank, (_, writer) in self._streams.items():
            try:
                await _write(writer, _Call(verb, ref, epoch))
            except ConnectionError as error:
                raise RuntimeError(f"rank {rank} is gone") from error

    async def answers(self) -> list[Sent]:
        """Return the answers to the last call, in the order of ranks.

        Raises:
            UserError, LinkError: a rank could not encode or send its share.
            RuntimeError: a rank is gone.
        """
        ranks = sorted(self._streams)
        return await asyncio.gather(*(self._answer(rank, self._streams[rank][0]) for rank in ranks))

    async def _answer(self, rank: int, reader: asyncio.StreamReader) -> Sent:
        try:
            sent = await _read(reader, Sent)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"rank {rank} is gone") from error
        if sent.error:
            raise (UserError if sent.is_user_error else LinkError)(f"Rank {rank}: {sent.error}")
        return sent

    def close(self) -> None:
        """Let no rank in any more, and end the connections."""
        if self._server is not None:
            self._server.close()
        elif self._listening is not None:
            self._listening.close()
        self._greetings.cancel()
        for _, writer in self._streams.values():
            writer.close()

    def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = self._greetings.spawn(self._let_in(reader, writer))
        greeting.add_done_callback(lambda _: self._close_unless_rank(writer))

    def _close_unless_rank(self, writer: asyncio.StreamWriter) -> None:
        if all(writer is not of_rank for _, of_rank in self._streams.values()):
            writer.close()

    def _greeting_failed(self, error: Exception) -> None:
        self._fault = error
        self._are_here.set()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_rank = False
        try:
            async with asyncio.timeout(CALL_SECONDS):
                hello = await _read(reader, _Hello)
            is_rank = secrets.compare_digest(hello.token, self._token)
        except (EOFError, ConnectionError, TimeoutError, PeerError, msgspec.MsgspecError):
            pass
        if not is_rank:
            log.warning("refused a connection that is of no rank of this learner")
            return
        self._streams[hello.rank] = reader, writer
        if len(self._streams) == self._num:
            self._are_here.set()


class RankSender:
    """Another rank's side, in a thread of its own: encodes and sends its share whenever the first rank calls. `connect`
    gives a connection to the head, by a ticket."""

    def __init__(
        self,
        rank: int,
        meeting: bytes,
        publisher: Publisher,
        connect: Callable[[str], Awaitable[Link]],
        patience_seconds: float = 120.0,
    ) -> None:
        """Raises: UserError, the first rank cannot be reached."""
        self._rank, self._meeting = rank, msgspec.msgpack.decode(meeting, type=Meeting)
        place = self._meeting.host, self._meeting.port
        try:
            self._socket = socket.create_connection(place, CALL_SECONDS)
        except OSError as error:
            raise UserError(
                f"Rank {rank} does not reach the first rank at {join(*place)}: {error}. The learner's machines "
                "need a private network without a firewall between them."
            ) from error
        self._publisher, self._connect, self._patience_seconds = publisher, connect, patience_seconds
        self._link: Link | None = None
        self._payload: Payload | None = None
        self._version, self._weights = -1, BorrowedWeights({}, {})
        self._loans: asyncio.Queue[tuple[int, BorrowedWeights]] = asyncio.Queue()
        self._thread = LoopThread("rank-sender")
        self._serving = self._thread.start(self._serve())

    def lend(self, version: int, weights: BorrowedWeights) -> None:
        """Lend this rank's share of the weights of a version, until those of another are lent. It has no effect if the
        first rank is gone, or this sender is closed."""
        if not self._serving.done():
            self._thread.call(self._loans.put_nowait, (version, weights))

    def close(self) -> None:
        """End the thread; an encoding under way runs to its end. A second call does nothing."""
        self._publisher.stop()
        self._thread.close()
        self._socket.close()  # if the thread had not begun to use it

    async def _serve(self) -> None:
        try:
            await self._answer_calls()
        except (EOFError, ConnectionError) as error:
            log.info("rank %d sends no more: %r", self._rank, error)
        except Exception:  # the first rank hears that this one is gone
            log.exception("rank %d sends no more", self._rank)

    async def _answer_calls(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._socket)
        try:
            await _write(writer, _Hello(self._meeting.token, self._rank))
            while True:
                call = await _read(reader, _Call)
                try:
                    sent = await self._carry_out(call)
                except Echo2Error as error:
                    sent = Sent([], error=str(error), is_user_error=isinstance(error, UserError))
                await _write(writer, sent)
        finally:
            writer.close()
            if self._link is not None:
                await self._link.close()

    async def _carry_out(self, call: _Call) -> Sent:
        if self._link is None:
            self._link = await self._connect(self._meeting.ticket)
        if call.verb == AGAIN and self._payload is not None:
            await self._upload(call.epoch, self._link, self._payload, self._payload.names)
            return Sent([])
        if call.verb == WHOLE:
            self._payload = self._publisher.whole(call.ref)
        else:
            while self._version != call.ref.version:
                self._version, self._weights = await self._loans.get()
            self._payload = self._publisher.payload(call.ref, self._weights)
        await send_parts(self._payload, partial(self._upload, call.epoch, self._link, self._payload))
        return Sent(self._payload.segments)

    async def _upload(self, epoch: int, link: Link, payload: Payload, names: Sequence[bytes]) -> None:
        """Upload chunks. A head that was restarted takes none until the first rank has said hello: it will miss them
        when the payload is announced, and they are sent again."""
        patience = Patience("PutChunk", self._patience_seconds)
        while True:
            try:
                await upload(link, epoch, payload, names)
                return
            except LinkError as error:
                await patience.pause(error)
            except PeerError as error:
                if error.reason != UNKNOWN_LEARNER:
                    raise
                return


async def _write(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(frame(msgspec.msgpack.encode(message)))
    await writer.drain()


async def _read(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Raises: EOFError, ConnectionError: the other end is gone. PeerError, MsgspecError: it sent something else."""
    return msgspec.msgpack.decode(await receive_frame(reader, MAX_MANIFEST_BYTES), type=kind)
