"""What a link is: unary calls and server streams, between peers that are known. Nothing above names a backend.

The workers and the learner dial out; the head serves. A method says which roles may call it, and that check is made
here for all backends. What crosses is protobuf (`wire.proto`), at most `limits.MESSAGE_BYTES_MAX` a message.

Errors a caller sees: `PeerError` with the word the other end refused with; `LinkError` when the other end is away,
closed the connection or let the deadline pass.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import DecodeError, Message

from echo2.errors import PeerError
from echo2.transport import wire_pb2 as wire


@dataclass(frozen=True, slots=True)
class Peer:
    """Who calls: proven by its certificate. `role` is worker, learner, join-worker or join-learner."""

    peer_id: str
    role: str


@dataclass(frozen=True, slots=True)
class Method:
    """One thing the head may be asked."""

    name: str
    request: type[Any]
    reply: type[Any]
    streaming: bool
    roles: frozenset[str]


Handler = Callable[[Peer, Any], Any]
Handlers = Mapping[str, Handler]


def _methods() -> dict[str, Method]:
    joining = frozenset({"join-worker", "join-learner"})
    worker, learner = frozenset({"worker"}), frozenset({"learner"})
    rows: list[tuple[str, type[Message], type[Message], bool, frozenset[str]]] = [
        ("Enrol", wire.EnrolRequest, wire.EnrolReply, False, joining),
        ("Attend", wire.WorkerHello, wire.Order, True, worker),
        ("Report", wire.WorkerReport, wire.Empty, False, worker),
        ("FailLease", wire.LeaseFailed, wire.Empty, False, worker),
        ("Deliver", wire.Deliveries, wire.DeliveryReplies, False, worker),
        ("FetchManifest", wire.ManifestRequest, wire.SnapshotNotice, False, worker),
        ("FetchChunks", wire.ChunkRequest, wire.Chunk, True, worker),  # of the head, and of any worker that listens
        ("ReportFetch", wire.FetchReport, wire.Empty, False, worker),
        ("Probe", wire.ProbeRequest, wire.Chunk, True, worker),
        ("PutProbe", wire.Chunk, wire.Empty, False, worker),
        # Worker to worker, dialled by one that can't be dialled itself: it is told what is wanted of it, and gives.
        ("AskWanted", wire.Empty, wire.ChunkRequest, True, worker),
        ("GiveChunk", wire.Chunk, wire.Empty, False, worker),
        ("LearnerHello", wire.LearnerHello, wire.LearnerWelcome, False, learner),
        ("TakeGroups", wire.TakeGroups, wire.FedGroups, True, learner),
        ("ReportStep", wire.StepReport, wire.Empty, False, learner),
        ("OfferSnapshot", wire.PublishRequest, wire.MissingChunks, False, learner),
        ("PutChunk", wire.Chunk, wire.Empty, False, learner),
        ("Publish", wire.PublishRequest, wire.Empty, False, learner),
        ("ReportCheckpoint", wire.CheckpointReport, wire.Empty, False, learner),
        ("LearnerReport", wire.LearnerReport, wire.Empty, False, learner),
    ]
    return {row[0]: Method(*row) for row in rows}


METHODS: Mapping[str, Method] = _methods()


class Link(Protocol):
    """The calling end of a connection to the head."""

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        """One request, one reply.

        Raises:
            LinkError: the head is away, or did not answer in time.
            PeerError: it refused.
        """

    def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """One request, replies until the head ends the stream. Leaving the iteration ends the stream.

        Raises:
            LinkError: the connection broke.
            PeerError: the head refused.
        """

    async def close(self) -> None:
        """End the connection and everything under way on it."""


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
