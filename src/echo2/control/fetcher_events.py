"""What can happen to a worker's fetcher. Facts, in the past tense. A source is a peer's id, or "" for the origin."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control.events import Tick as Tick  # part of this module's vocabulary, too
from echo2.types import PayloadId


@dataclass(frozen=True, slots=True)
class PayloadWanted:
    """Fetch this payload. `chunks`: the hashes of all its distinct chunks in stream order; `missing`: those not stored
    here. It takes the place of another one under way; chunks both share are stored already.
    """

    payload: PayloadId
    chunks: tuple[bytes, ...]
    missing: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class PayloadUnwanted:
    """Stop fetching this payload."""

    payload: PayloadId


@dataclass(frozen=True, slots=True)
class RoutesSet:
    """The origin says where to take each stripe from. `sources` as in `broadcast_commands`; may come before
    `PayloadWanted`."""

    payload: PayloadId
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """A chunk from this source was verified and stored."""

    source: str
    chunk: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SourceAlive:
    """A source said that it is there and has nothing to send yet: it waits for its own source."""

    source: str


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """The request to a source ended before all its chunks came. `reason`: one of `broadcast_events.SOURCE_FAILURES`."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class OriginLost:
    """The link to the head broke; peers may go on."""


@dataclass(frozen=True, slots=True)
class OriginBack:
    """The head has taken us in again."""


Event = (
    PayloadWanted
    | PayloadUnwanted
    | RoutesSet
    | ChunkStored
    | SourceAlive
    | SourceFailed
    | OriginLost
    | OriginBack
    | Tick
)
