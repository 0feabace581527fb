"""The events of a worker's fetcher, facts in the past tense, and its commands to its driver. A source is a peer's id,
or "" for the origin.
"""

from __future__ import annotations

from echo2.core.decide.machine import Command as Command  # part of this module's vocabulary, too
from echo2.core.decide.machine import Event as _Event
from echo2.core.decide.machine import Tick as Tick  # part of this module's vocabulary, too
from echo2.core.decide.machine import WakeAt as WakeAt
from echo2.core.types import PayloadId
from echo2.weights.broadcast.decide.origin_messages import Tally


class FetcherEvent(_Event):
    """Base of everything that can happen to the fetcher."""


class PayloadWanted(FetcherEvent):
    """Fetch this payload. `chunks`: the hashes of all its distinct chunks in stream order; `missing`: those not stored
    here. It replaces a download under way; chunks that both share are stored already.
    """

    payload: PayloadId
    chunks: tuple[bytes, ...]
    missing: frozenset[bytes]


class PayloadUnwanted(FetcherEvent):
    """Stop fetching this payload."""

    payload: PayloadId


class RoutesSet(FetcherEvent):
    """The origin named the source of each stripe (see `origin_messages`); may come before `PayloadWanted`."""

    payload: PayloadId
    sources: tuple[str, ...]


class ChunkStored(FetcherEvent):
    """A chunk from this source was verified and stored."""

    source: str
    chunk: bytes
    num_bytes: int


class SourceAlive(FetcherEvent):
    """A source reported that it works but has nothing to send yet, because it waits for its own source."""

    source: str


class RequestFailed(FetcherEvent):
    """The request to a source ended before all its chunks came. `reason`: one of `origin_messages.SOURCE_FAILURES`."""

    source: str
    reason: str


class OriginLost(FetcherEvent):
    """The link to the head broke; downloads from peers may go on."""


class OriginBack(FetcherEvent):
    """The head accepted this worker again."""


Event = FetcherEvent | Tick


class RequestChunks(Command):
    """Ask this source for these chunks, in this order, in addition to earlier requests. The source sends each chunk as
    soon as it has it."""

    source: str
    payload: PayloadId
    chunks: tuple[bytes, ...]


class CancelRequests(Command):
    """Cancel all open requests to this source."""

    source: str


class ReportSource(Command):
    """Tell the origin that this worker gave up this source for this payload."""

    payload: PayloadId
    source: str
    failure: str


class PayloadWhole(Command):
    """Every chunk is stored: tell the worker, and send the origin the tally of each source."""

    payload: PayloadId
    tallies: tuple[Tally, ...]


class PayloadGone(Command):
    """The origin no longer has this payload."""

    payload: PayloadId
