"""A worker's state machine for fetching one payload: which chunks to ask which source for, and when to drop a source.

The origin names the source of each stripe (`RoutesSet`); each source is asked at once for every missing chunk of its
stripes. A source that fails is reported, and its stripes wait a few seconds for new routes. If none arrive, the stripes
go to the origin, or to the other sources while the origin is away. All other stripes continue meanwhile.

First its events, facts in the past tense, and its commands to its driver. A source is a peer's id, or "" for the
origin.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.core.decide.machine import Command as Command  # part of this module's vocabulary, too
from echo2.core.decide.machine import Event as _Event
from echo2.core.decide.machine import StateMachine
from echo2.core.decide.machine import Tick as Tick  # part of this module's vocabulary, too
from echo2.core.decide.machine import WakeAt as WakeAt
from echo2.core.types import Backoff, PayloadId
from echo2.weights.broadcast.decide.origin_messages import ORIGIN, Tally


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


#: A source may be silent for this many seconds, or for this many times the usual gap between chunks if that is longer.
PATIENCE_SECONDS = 3.0
PATIENCE_GAPS = 4.0
#: Minimum patience while no source sends anything: the fault may be this worker's own link.
QUIET_SECONDS = 10.0
MAX_PATIENCE_SECONDS = 60.0
#: Stripes of a failed source wait this long for new routes, plus a jitter of up to the second value, fixed per worker.
REROUTE_SECONDS = 3.0
REROUTE_JITTER_SECONDS = 2.0
#: A new download waits this long for its first routes before it asks the origin.
FIRST_ROUTES_SECONDS = 5.0
#: A source is slow when the chunks it still owes need, at its rate so far, more than SLOW_SECONDS + SLOW_TIMES x (the
#: time that all missing chunks need at the combined rate of all sources). SLOW_PAUSE_SECONDS pass between two reports,
#: because new routes change the rates of the other sources.
SLOW_SECONDS = 5.0
SLOW_TIMES = 3.0
SLOW_PAUSE_SECONDS = 5.0
#: A source that reported within STARVED_SECONDS that it has nothing to send yet is not slow; its own source is. Its
#: limit is MAX_STARVED_SECONDS instead of SLOW_SECONDS, so that a source that always reports this is given up, too.
STARVED_SECONDS = 1.5
MAX_STARVED_SECONDS = 60.0
#: A source that sends no chunk for so long is reported as slow, whatever its rate was before: a relay that withholds
#: the last chunks says for ever that it has nothing to send yet. Not while the head is away: whole trees starve then.
STUCK_SECONDS = 120.0
#: A slow source that is still asked, because the report changed nothing, is reported again after this many seconds.
SLOW_AGAIN_SECONDS = 30.0
#: Failures of one source for one payload after which routes that name it are ignored.
MAX_FAILURES = 3
#: Seconds before the origin is asked again after a failure: first value, doubled at each failure up to the second.
RETRY_SECONDS = Backoff(0.5, 8.0)
#: Seconds between two checks of the sources.
CHECK_SECONDS = 0.5
#: Routes kept for payloads that are not wanted yet.
MAX_EARLY_ROUTES = 8


@dataclass(slots=True)
class ChunkSource:
    """A source of chunks: a peer or the origin. Times in seconds of the worker's clock.

    requested     chunks requested and not received yet
    requested_at  when chunks were first requested after a pause
    heard_at      when it last sent anything, or chunks were first requested after a pause
    alive_at      when it last reported that it waits for its own source
    gap_seconds   the longest recent time between two of its chunks
    """

    requested: dict[bytes, None] = field(default_factory=dict)
    begun_at: float = 0.0
    requested_at: float = 0.0
    heard_at: float = 0.0
    chunk_at: float = 0.0
    alive_at: float = float("-inf")
    gap_seconds: float = 0.0
    num_chunks: int = 0
    num_bytes: int = 0
    failures: int = 0
    is_barred: bool = False
    slow_again_at: float = float("-inf")

    def got(self, num_bytes: int, now: float) -> None:
        """Record a chunk of this many bytes, received at `now`."""
        gap = now - self.heard_at if self.num_chunks else 0.0
        self.gap_seconds = max(0.8 * self.gap_seconds, gap)
        self.num_chunks, self.num_bytes = self.num_chunks + 1, self.num_bytes + num_bytes
        self.heard_at = self.chunk_at = now

    def seconds_left(self, now: float) -> float:
        """Return the seconds until all requested chunks are received, at the source's rate so far."""
        if not self.requested:
            return 0.0
        elapsed = now - self.begun_at
        return len(self.requested) * elapsed / self.num_chunks if self.num_chunks else float("inf")


@dataclass(slots=True)
class Download:
    """The payload being fetched. `sources`: of each stripe; None: it waits for routes until `orphaned_until`."""

    payload: PayloadId
    chunks: tuple[bytes, ...]
    missing: dict[bytes, None]
    begun_at: float
    sources: list[str | None]
    orphaned_until: float
    stripe_of: dict[bytes, int]

    def route(self, sources: Iterable[str | None]) -> None:
        """Take each stripe from these sources, in the order of the stripes."""
        self.sources = list(sources)
        self.stripe_of = {chunk: at % len(self.sources) for at, chunk in enumerate(self.chunks)}


class Fetcher(StateMachine):
    """The fetcher's state, and one method per kind of event."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self.worker_id = worker_id
        self.download: Download | None = None
        self.sources: dict[str, ChunkSource] = {}
        self.has_origin = True
        self._early: dict[PayloadId, tuple[str, ...]] = {}
        self._retry_at = 0.0
        self._origin_failures = 0
        self._chunk_at = 0.0
        self._slow_after = 0.0
        self._unsettled: dict[str, str] = {}

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle one event at time `now` (seconds of the worker's clock) and return the commands, in order."""
        self.begin(event)
        match event:
            case ChunkStored():
                if not self._stored(event, now):
                    return self.out
            case SourceAlive():
                source = self.sources.get(event.source)
                if source is not None:
                    source.heard_at = source.alive_at = now
                return self.out
            case PayloadWanted():
                self._wanted(event, now)
            case PayloadUnwanted():
                if self.download is not None and self.download.payload == event.payload:
                    self._end("it is not wanted any more")
            case RoutesSet():
                self._routed(event, now)
            case RequestFailed():
                self._failed(event.source, event.reason, now)
            case OriginLost():
                self.has_origin = False
                self._drop_requests(ORIGIN)
            case OriginBack():
                self._origin_back()
            case Tick():
                self._look(now)
        self._ask(now)
        if self.download is not None:
            self.wake_at(now + CHECK_SECONDS, "to look at the sources")
        return self.out

    # ---- payloads ----------------------------------------------------------------------------------------------------

    def _wanted(self, event: PayloadWanted, now: float) -> None:
        old = self.download
        missing = dict.fromkeys(chunk for chunk in event.chunks if chunk in event.missing)
        if old is not None and old.payload == event.payload:
            old.missing = missing
            for source in self.sources.values():
                source.requested = {chunk: None for chunk in source.requested if chunk in missing}
        else:
            self._end(f"{event.payload} takes its place")
            until = now + FIRST_ROUTES_SECONDS
            self.download = Download(event.payload, event.chunks, missing, now, [], until, {})
            self._chunk_at, self._retry_at, self._slow_after = now, now, now
            self.download.route(self._early.pop(event.payload, (None,)))
        if not missing:
            self._whole()

    def _end(self, reason: str) -> None:
        """End the current download, if any, and cancel its requests."""
        for name in list(self.sources):
            self._cancel(name, reason)
        self.download, self.sources, self._unsettled = None, {}, {}
        self._origin_failures = 0

    def _whole(self) -> None:
        assert self.download is not None
        payload, begun_at = self.download.payload, self.download.begun_at
        tallies = tuple(
            Tally(name, source.num_bytes, source.chunk_at - begun_at)
            for name, source in self.sources.items()
            if source.num_bytes
        )
        self._end("everything is here")
        self.emit(PayloadWhole, f"every chunk of {payload} is stored", payload=payload, tallies=tallies)

    def _stored(self, event: ChunkStored, now: float) -> bool:
        """Record a chunk. Return True if it completed the payload."""
        source = self.sources.get(event.source)
        if self.download is None or source is None:
            return False
        self._chunk_at = now
        if source.requested.pop(event.chunk, self) is self:  # requested from another source meanwhile
            for other in self.sources.values():
                other.requested.pop(event.chunk, None)
        source.got(event.num_bytes, now)
        if event.source == ORIGIN:
            self._origin_failures = 0
        if self.download.missing.pop(event.chunk, self) is self:  # it was stored already
            return False
        if self.download.missing:
            return False
        self._whole()
        return True

    # ---- routes ------------------------------------------------------------------------------------------------------

    def _routed(self, event: RoutesSet, now: float) -> None:
        if not event.sources:
            return
        download = self.download
        if download is None or download.payload != event.payload:
            self._early.pop(event.payload, None)
            self._early[event.payload] = event.sources
            if len(self._early) > MAX_EARLY_ROUTES:
                del self._early[next(iter(self._early))]
            return
        self._unsettled = {}
        barred = {name for name, source in self.sources.items() if source.is_barred}
        download.route(None if source in barred else source for source in event.sources)
        download.orphaned_until = now
        for name, source in self.sources.items():
            stays = {chunk: None for chunk in source.requested if self._source_of(chunk) == name}
            if len(stays) != len(source.requested):  # another source now serves some of its chunks
                self._cancel(name, "other routes")

    def _source_of(self, chunk: bytes) -> str | None:
        assert self.download is not None
        return self.download.sources[self.download.stripe_of[chunk]]

    def _cancel(self, name: str, reason: str) -> None:
        if self.sources[name].requested:
            self.emit(CancelRequests, reason, source=name)
        self._drop_requests(name)

    def _drop_requests(self, name: str) -> None:
        if name in self.sources:
            self.sources[name].requested = {}

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Ask each source for the missing chunks of its stripes that were not requested yet."""
        download = self.download
        if download is None:
            return
        if None in download.sources and now >= download.orphaned_until:
            self._adopt(download)
        if sum(len(source.requested) for source in self.sources.values()) == len(download.missing):
            return
        requested = {chunk for source in self.sources.values() for chunk in source.requested}
        by_source: dict[str, list[bytes]] = {}
        for chunk in download.missing:
            if chunk not in requested and (name := self._source_of(chunk)) is not None:
                by_source.setdefault(name, []).append(chunk)
        for name, chunks in by_source.items():
            if name == ORIGIN and (not self.has_origin or now < self._retry_at):
                continue
            chunks.sort(key=download.stripe_of.__getitem__)  # peers relay the first stripes
            source = self.sources.setdefault(name, ChunkSource(begun_at=now))
            if not source.requested:
                source.requested_at = source.heard_at = now
            source.requested.update(dict.fromkeys(chunks))
            reason = f"{len(chunks)} chunks of {download.payload} are missing"
            self.emit(RequestChunks, reason, source=name, payload=download.payload, chunks=tuple(chunks))

    def _adopt(self, download: Download) -> None:
        """No routes came: give the waiting stripes to the origin, or if it is away, to the sources that still work."""
        named = [name for name in dict.fromkeys(download.sources) if name]
        living = [name for name in named if name not in self.sources or not self.sources[name].is_barred]
        if self.has_origin or not living:
            download.sources = [ORIGIN if source is None else source for source in download.sources]
        else:
            download.sources = [
                living[stripe % len(living)] if source is None else source
                for stripe, source in enumerate(download.sources)
            ]

    # ---- failures ----------------------------------------------------------------------------------------------------

    def _failed(self, name: str, reason: str, now: float) -> None:
        download, source = self.download, self.sources.get(name)
        if download is None or source is None or not (source.requested or name in download.sources):
            return
        source.requested = {}
        if name == ORIGIN:
            if reason == "missing":
                payload = download.payload
                self._end("the origin does not have it")
                self.emit(PayloadGone, "the origin does not have it", payload=payload)
            else:
                self._origin_failures += 1
                self._retry_at = now + RETRY_SECONDS.after(self._origin_failures)
            return
        source.failures += 1
        source.is_barred = reason == "corrupt" or source.failures >= MAX_FAILURES
        self._report(name, reason)
        if name in download.sources:
            jitter = REROUTE_JITTER_SECONDS * (zlib.crc32(f"{self.worker_id} {name}".encode()) % 1000) / 1000
            download.orphaned_until = now + REROUTE_SECONDS + jitter
            download.sources = [None if source == name else source for source in download.sources]

    def _report(self, name: str, reason: str) -> None:
        assert self.download is not None
        self._unsettled[name] = reason
        self.emit(ReportSource, reason, payload=self.download.payload, source=name, failure=reason)

    def _origin_back(self) -> None:
        self.has_origin, self._retry_at = True, 0.0
        for name, reason in list(self._unsettled.items()):
            self._report(name, reason)

    def _look(self, now: float) -> None:
        """Give up sources that are silent for too long, and report one that is much slower than the others."""
        if self.download is None:
            return
        busy = {name: source for name, source in self.sources.items() if source.requested}
        gaps = sorted(source.gap_seconds for source in self.sources.values() if source.num_chunks > 1)
        usual_gap = gaps[len(gaps) // 2] if gaps else 0.0
        for name, source in busy.items():
            patience = PATIENCE_GAPS * max(source.gap_seconds, usual_gap)
            patience = min(MAX_PATIENCE_SECONDS, max(PATIENCE_SECONDS if gaps else QUIET_SECONDS, patience))
            if self._chunk_at <= source.heard_at + 1.0:  # the others are silent, too: perhaps our own link
                patience = max(patience, QUIET_SECONDS)
            if now - source.heard_at >= patience:
                self._cancel(name, f"silent for {now - source.heard_at:.1f} s")
                self._failed(name, "stalled", now)
        self._look_for_slow(now)

    def _look_for_slow(self, now: float) -> None:
        peers = {name: source for name, source in self.sources.items() if name != ORIGIN}
        lefts = {
            name: each.seconds_left(now) for name, each in peers.items() if each.requested and now >= each.slow_again_at
        }
        if now < self._slow_after or not lefts:
            return
        assert self.download is not None
        name = max(lefts, key=lambda name: lefts[name])
        source = self.sources[name]
        is_sending = source.alive_at < now - STARVED_SECONDS and source.num_chunks > 2 and len(self.sources) > 1
        patience = SLOW_SECONDS if is_sending else MAX_STARVED_SECONDS
        num_chunks = sum(other.num_chunks for other in self.sources.values())
        even = len(self.download.missing) * (now - self.download.begun_at) / num_chunks if num_chunks else 0.0
        # Connections that begin together share a link unevenly for seconds (BBR): a long download is watched longer.
        since = max(source.begun_at, source.requested_at)
        is_slow = now - since >= max(patience, even / 2) and lefts[name] > patience + SLOW_TIMES * even
        is_stuck = self.has_origin and now - max(since, source.chunk_at) >= STUCK_SECONDS
        if is_slow or is_stuck:
            source.slow_again_at = now + SLOW_AGAIN_SECONDS
            self._slow_after = now + SLOW_PAUSE_SECONDS
            self._report(name, "slow")
