"""The events of a worker's fetcher, as facts in the past tense. A source is a peer's id, or "" for the origin."""

from __future__ import annotations

from echo2.control.machine import Event as _Event
from echo2.control.machine import Tick as Tick  # part of this module's vocabulary, too
from echo2.types import PayloadId


class FetcherEvent(_Event):
    """Base of everything that can happen to the fetcher."""


class PayloadWanted(FetcherEvent):
    """Fetch this payload. `chunks`: the hashes of all its distinct chunks in stream order; `missing`: those not stored
    here. It takes the place of another one under way; chunks both share are stored already.
    """

    payload: PayloadId
    chunks: tuple[bytes, ...]
    missing: frozenset[bytes]


class PayloadUnwanted(FetcherEvent):
    """Stop fetching this payload."""

    payload: PayloadId


class RoutesSet(FetcherEvent):
    """The origin says where to take each share from. `sources` as in `origin_commands`; may come before
    `PayloadWanted`."""

    payload: PayloadId
    sources: tuple[str, ...]


class ChunkStored(FetcherEvent):
    """A chunk from this source was verified and stored."""

    source: str
    chunk: bytes
    num_bytes: int


class SourceAlive(FetcherEvent):
    """A source said that it is there and has nothing to send yet: it waits for its own source."""

    source: str


class RequestFailed(FetcherEvent):
    """The request to a source ended before all its chunks came. `reason`: one of `origin_events.SOURCE_FAILURES`."""

    source: str
    reason: str


class OriginLost(FetcherEvent):
    """The link to the head broke; peers may go on."""


class OriginBack(FetcherEvent):
    """The head has taken us in again."""


Event = FetcherEvent | Tick
