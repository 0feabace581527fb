"""The interface of links: unary calls and server streams between known peers, without naming a backend.

The workers and the learner dial out; the head serves, and so does every worker that listens. A method says which roles
may call it, and that check is made here for all backends. What crosses is protobuf (`wire.proto`), at most
`limits.MESSAGE_BYTES_MAX` a message; chunks may be handled as the bytes of their message (`chunks`), without a copy.

Errors a caller sees: `PeerError` with the word the other end refused with; `LinkError` when the other end is away,
closed the connection or let the deadline pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from echo2.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.tickets import TICKET_ROLES


@dataclass(frozen=True, slots=True)
class Peer:
    """Who calls: proven by its certificate. `role`: one of `TICKET_ROLES`, or of those after "join-" while it enrols.
    `host`: the address it calls from, as seen here."""

    peer_id: str
    role: str
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Method:
    """One thing the head, or a worker that listens, may be asked. `raw`: the handler gets the request as it came.
    `in_header`: the request travels in the header of the call, which has a few kilobytes; its body is never read.
    `is_large`: a worker's request may be as large as any message, not only `PEER_MESSAGE_BYTES_MAX`."""

    name: str
    request: type[Any]
    reply: type[Any]
    streaming: bool
    roles: frozenset[str]
    raw: bool = False
    in_header: bool = False
    is_large: bool = False


Handler = Callable[[Peer, Any], Any]
Handlers = Mapping[str, Handler]


_RAW = frozenset({"GiveChunk", "PutProbe"})
_LARGE = frozenset({"Deliver", "AnswerSamples"})
_IN_HEADER = frozenset({"Enrol"})  # whoever has a ticket may call it


def _methods() -> dict[str, Method]:
    joining = frozenset(f"join-{role}" for role in TICKET_ROLES)
    worker, learner, sampler = frozenset({"worker"}), frozenset({"learner"}), frozenset({"sampler"})
    node = worker | sampler  # of a fleet: it attends, and takes and gives weights
    rows: list[tuple[str, type[Message], type[Message], bool, frozenset[str]]] = [
        ("Enrol", wire.EnrolRequest, wire.EnrolReply, False, joining),
        ("Attend", wire.WorkerHello, wire.Order, True, node),
        ("Report", wire.WorkerReport, wire.Empty, False, node),
        ("Leave", wire.Empty, wire.Empty, False, worker),  # good-bye: grant its leases to others
        ("FailLease", wire.LeaseFailed, wire.Empty, False, worker),
        ("Deliver", wire.Deliveries, wire.DeliveryReplies, False, worker),
        ("ReportCheck", wire.CheckReport, wire.Empty, False, worker),
        ("AnswerSamples", wire.SampleAnswers, wire.Empty, False, sampler),
        ("FetchManifest", wire.ManifestRequest, wire.SnapshotNotice, False, node),
        ("FetchChunks", wire.ChunkRequest, wire.Chunk, True, node),  # of the head, and of any worker that listens
        ("ReportFetch", wire.FetchReport, wire.Empty, False, node),
        ("Probe", wire.ProbeRequest, wire.Chunk, True, node),
        ("PutProbe", wire.Chunk, wire.Empty, False, node),
        # Worker to worker, dialled by one that can't be dialled itself: it is told what is wanted of it, and gives.
        ("AskWanted", wire.Empty, wire.ChunkRequest, True, node),
        ("GiveChunk", wire.Chunk, wire.Empty, False, node),
        ("LearnerHello", wire.LearnerHello, wire.LearnerWelcome, True, learner),
        ("TakeGroups", wire.TakeGroups, wire.FedGroups, True, learner),
        ("ReportStep", wire.StepReport, wire.Empty, False, learner),
        ("OfferChunks", wire.ChunkOffer, wire.MissingChunks, False, learner),
        ("PutChunk", wire.OfferedChunk, wire.Empty, False, learner),
        ("Publish", wire.PublishRequest, wire.Empty, False, learner),
        ("ReportCheckpoint", wire.CheckpointReport, wire.CheckpointReply, False, learner),
        ("LearnerReport", wire.LearnerReport, wire.Empty, False, learner),
    ]
    return {row[0]: Method(*row, row[0] in _RAW, row[0] in _IN_HEADER, row[0] in _LARGE) for row in rows}


METHODS: Mapping[str, Method] = _methods()


class Link(Protocol):
    """The calling end of a connection."""

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        """One request (a message, or the bytes of one), one reply.

        Raises:
            LinkError: the other end is away, or did not answer in time.
            PeerError: it refused.
        """

    def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """One request, replies until the other end ends the stream. Leaving the iteration ends the stream.

        Raises:
            LinkError: the connection broke.
            PeerError: the other end refused.
        """

    def frames(self, method: str, request: Any) -> AsyncIterator[bytes]:
        """As `stream`, but each reply as the bytes that came."""

    def open(self) -> None:
        """Begin to connect, so that the first call need not wait for it."""

    async def close(self) -> None:
        """End the connection and everything under way on it."""


class Network(Protocol):
    """What one worker can do: open connections, each a new one, and serve on a port of its own."""

    def to_head(self) -> Link:
        """A connection to the head, beside the one it attends on."""

    def to_peer(self, peer_id: str, address: str) -> Link:
        """A connection to another worker, which must prove that it is this one."""

    async def listen(self, host: str, port: int, handlers: Handlers, check_not_revoked: Callable[[str], None]) -> int:
        """Serve other workers; returns the port. `check_not_revoked` raises PeerError for those that are.

        Raises:
            UserError: the address or port can't be had.
        """

    async def close(self) -> None:
        """Stop serving. Links are closed by who opened them."""


def packed(message: Any) -> bytes:
    """The bytes of a message, or the bytes that it is already."""
    if isinstance(message, bytes):
        return message
    data: bytes = message.SerializeToString()
    return data


def parse(kind: type[Any], data: bytes) -> Any:
    """The message in these bytes. Raises PeerError("malformed") where they are none of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise PeerError("malformed", f"these {len(data)} bytes are no {kind.__name__}") from error


def check_role(method: Method, peer: Peer) -> None:
    """Raises PeerError("forbidden") unless the peer's role may call the method."""
    if peer.role not in method.roles:
        raise PeerError("forbidden", f"{method.name} is not for a {peer.role}")
