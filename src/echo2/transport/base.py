"""The interface of links: unary calls and server streams between known peers, without naming a backend.

The workers and the learner dial out; the head serves, and so does every worker that listens. A method says which roles
may call it, and `check_role` checks that for all backends. Messages are protobuf (`wire.proto`), at most
`limits.MESSAGE_BYTES_MAX` each; chunks may be handled as the bytes of their message (`message_bytes`), without a copy.

A message may take two bytes for each message within it, of which each takes 150 in memory: `weigh` tells that before
anything is parsed.

Errors a caller sees: `PeerError` with the other end's reason for refusing; `LinkError` when the other end is
unreachable, closed the connection or let the deadline pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from echo2.core.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.tickets import TICKET_ROLES

#: Words of an end that is there and does not serve a caller now, which hears LinkError: it has too much to do; it may
#: not answer as the head, for its store is away or another head has the run.
BUSY, AWAY = "busy", "away"
#: Ten bytes of seven bits: protobuf's longest number.
VARINT_BITS = 70
#: What a message within a message, an entry of a list of bytes or texts, and a byte of a list of numbers weigh: what
#: they take once parsed, or more, for the time that each takes.
MESSAGE_WEIGHT, ENTRY_WEIGHT, PACKED_WEIGHT = 256, 32, 8


@dataclass(frozen=True, slots=True)
class Peer:
    """The caller, as proven by its certificate. `role`: one of `TICKET_ROLES`, with "join-" before it during enrolment.
    `host`: the address it calls from, as seen here."""

    peer_id: str
    role: str
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Method:
    """A remote method of the head, or of a worker that listens. `raw`: the handler gets the request's bytes, unparsed.
    `in_header`: the request travels in the header of the call, which has a few kilobytes; the body is never read.
    `is_large`: a worker's request may have `MESSAGE_BYTES_MAX` bytes instead of `PEER_MESSAGE_BYTES_MAX`.
    `is_paced`: the handler itself bounds the bytes that it sends to each peer."""

    name: str
    request: type[Any]
    reply: type[Any]
    streaming: bool
    roles: frozenset[str]
    raw: bool = False
    in_header: bool = False
    is_large: bool = False
    is_paced: bool = False


Handler = Callable[[Peer, Any], Any]
Handlers = Mapping[str, Handler]


def _methods() -> list[Method]:
    joining = frozenset(f"join-{role}" for role in TICKET_ROLES)
    worker, learner, sampler = frozenset({"worker"}), frozenset({"learner"}), frozenset({"sampler"})
    node = worker | sampler  # a node attends, and exchanges weights with its peers
    return [
        Method("Enrol", wire.EnrolRequest, wire.EnrolReply, False, joining, in_header=True),  # by anyone with a ticket
        Method("Describe", wire.Empty, wire.RunFacts, False, worker),
        Method("Attend", wire.WorkerHello, wire.Order, True, node),
        Method("Report", wire.WorkerReport, wire.ReportReply, False, node),
        Method("Leave", wire.Empty, wire.Empty, False, worker),  # the head then grants this worker's leases to others
        Method("FailLease", wire.LeaseFailed, wire.Empty, False, worker),
        Method("Deliver", wire.Deliveries, wire.DeliveryReplies, False, worker, is_large=True),
        Method("ReportCheck", wire.CheckReport, wire.Empty, False, worker),
        Method("AnswerSamples", wire.SampleAnswers, wire.Empty, False, sampler, is_large=True),
        Method("FetchManifest", wire.ManifestRequest, wire.SnapshotNotice, False, node),
        # Of the head, and of any worker that listens.
        Method("FetchChunks", wire.ChunkRequest, wire.Chunk, True, node, is_paced=True),
        Method("ReportFetch", wire.FetchReport, wire.Empty, False, node),
        Method("Probe", wire.ProbeRequest, wire.Chunk, True, node),
        Method("PutProbe", wire.Chunk, wire.Empty, False, node, raw=True),
        # Worker to worker: a worker that can't be dialled asks a peer which chunks it wants, and pushes them.
        Method("AskWanted", wire.Empty, wire.ChunkRequest, True, node),
        Method("GiveChunk", wire.Chunk, wire.Empty, False, node, raw=True),
        Method("LearnerHello", wire.LearnerHello, wire.LearnerWelcome, True, learner),
        Method("TakeGroups", wire.TakeGroups, wire.FedGroups, True, learner),
        Method("ReportStep", wire.StepReport, wire.Empty, False, learner),
        Method("OfferChunks", wire.ChunkOffer, wire.MissingChunks, False, learner),
        Method("PutChunk", wire.OfferedChunk, wire.Empty, False, learner),
        Method("Publish", wire.PublishRequest, wire.Empty, False, learner),
        Method("ReportCheckpoint", wire.CheckpointReport, wire.CheckpointReply, False, learner),
        Method("LearnerReport", wire.LearnerReport, wire.Empty, False, learner),
    ]


METHODS: Mapping[str, Method] = {method.name: method for method in _methods()}


class Link(Protocol):
    """The calling end of a connection."""

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        """Send one request (a message or its bytes) and return the reply.

        Raises:
            LinkError: the other end is unreachable, or did not answer in time.
            PeerError: the other end refused.
        """

    def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """Send one request and yield replies until the other end ends the stream. Leaving the iteration ends it, too.

        Raises:
            LinkError: the connection broke.
            PeerError: the other end refused.
        """

    def frames(self, method: str, request: Any) -> AsyncIterator[bytes]:
        """As `stream`, but yield each reply as bytes, unparsed."""

    def open(self) -> None:
        """Begin to connect, so that the first call need not wait for the connection."""

    async def close(self) -> None:
        """End the connection and all calls under way on it."""


class Network(Protocol):
    """One worker's access to the network: opens a new connection at each call, and serves on a port of its own."""

    def to_head(self) -> Link:
        """Return another connection to the head, besides the one on which the worker attends."""

    def to_peer(self, peer_id: str, address: str) -> Link:
        """Return a connection to another worker, which must prove that it is `peer_id`."""

    async def listen(self, host: str, port: int, handlers: Handlers, check_not_revoked: Callable[[str], None]) -> int:
        """Serve other workers; returns the port. `check_not_revoked` raises PeerError for a revoked peer.

        Raises:
            UserError: the address or port is not available.
        """

    async def close(self) -> None:
        """Stop serving. Links stay open: their callers close them."""


def packed(message: Any) -> bytes:
    """Return the bytes of a message; bytes are returned unchanged."""
    if isinstance(message, bytes):
        return message
    data: bytes = message.SerializeToString()
    return data


def num_bytes(message: Any) -> int:
    """The size of a message when packed."""
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())


def parse(kind: type[Any], data: bytes) -> Any:
    """Parse a message of this kind. Raises PeerError("malformed") if the bytes are not one."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise PeerError("malformed", f"these {len(data)} bytes are no {kind.__name__}") from error


def weigh(kind: type[Any], data: bytes, most: int) -> int:
    """Return what the bytes of a message of this kind weigh: as many bytes as they are, or what the message would take
    in memory, if that is more. Takes .3 microseconds a field, and reads no more once it is over `most`.

    Raises:
        PeerError: "oversized", more than `most`; "malformed", it has a group or an endless number, which no peer sends.
    """
    try:
        weight = _weigh(data, 0, len(data), _layout(kind.DESCRIPTOR), most)
    except IndexError:  # it ends within a field, as `parse` will find
        weight = 0
    return max(len(data), weight)


#: Of each tag of a field that is counted: its weight, the weight of each of its bytes, and the layout of its message.
_Layout = dict[int, tuple[int, int, "_Layout | None"]]


@cache
def _layout(message: Descriptor) -> _Layout:
    layout: _Layout = {}
    for field_ in message.fields:
        tag = field_.number << 3 | 2
        if field_.type == FieldDescriptor.TYPE_MESSAGE:
            layout[tag] = MESSAGE_WEIGHT, 0, _layout(field_.message_type)
        elif field_.is_repeated:
            is_bytes = field_.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
            layout[tag] = (ENTRY_WEIGHT, 0, None) if is_bytes else (0, PACKED_WEIGHT, None)
            layout[tag - 2] = PACKED_WEIGHT, 0, None  # a number that is not packed
    return layout


def _weigh(data: bytes, at: int, end: int, layout: _Layout, most: int) -> int:
    """Raises as `weigh`, or IndexError where the data end within a field."""
    weight = 0
    while at < end:
        tag, at = (byte, at + 1) if (byte := data[at]) < 0x80 else _varint(data, at)
        own, per_byte, within = layout.get(tag, (0, 0, None))
        weight += own
        wire_type = tag & 7
        if wire_type == 2:
            size, at = (byte, at + 1) if (byte := data[at]) < 0x80 else _varint(data, at)
            weight += per_byte * size
            if within is not None and size:
                weight += _weigh(data, at, at + size, within, most - weight)
            at += size
        elif wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise PeerError("malformed", "a group of fields")
        if weight > most:
            raise PeerError("oversized", f"a message of {len(data)} bytes with too many parts for {most} bytes")
    return weight


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins there, and where it ends. Longer ones would take quadratic time."""
    value = 0
    for shift in range(0, VARINT_BITS, 7):
        byte = data[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise PeerError("malformed", "a number of more than ten bytes")


def check_role(method: Method, peer: Peer) -> None:
    """Raises PeerError("forbidden") unless the peer's role may call the method."""
    if peer.role not in method.roles:
        raise PeerError("forbidden", f"{method.name} is not for a {peer.role}")
