"""Receives chunks from one source: the origin, a peer that this node dials, or (`edges.py`) a peer that dials this
node.

A source can have several requests under way. Its first failure ends all of them, and is reported once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

from echo2.core.background import Background
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import PayloadId
from echo2.transport import codecs
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.weights.broadcast.payloads import REQUEST_CHUNKS_MAX, encode_payload

log = logging.getLogger(__name__)

#: Timeout for connecting to a source.
DIAL_SECONDS = 5.0
#: Reason of a PeerError in handling a source's message -> failure reported to the fetcher. Other reasons: "broken".
FAILURE_OF = {"corrupt": "corrupt", "oversized": "corrupt", "malformed": "corrupt", "missing": "missing"}


class Intake(Protocol):
    """Receives the chunks and the state changes of a source."""

    async def keep(self, source: str, hash_: bytes, message: bytes, data: memoryview) -> None:
        """Verify a chunk, and store it later. Raises PeerError("corrupt")."""

    def alive(self, source: str) -> None:
        """Handle a keep-alive message: the source has nothing to send yet."""

    def failed(self, source: str, reason: str) -> None:
        """Handle a failure: the requests under way at this source have ended."""


class Source:
    """The common part of both kinds of sources: the chunks still awaited from it."""

    def __init__(self, source: str, intake: Intake) -> None:
        self.source, self.intake = source, intake
        self.awaited: dict[bytes, None] = {}

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """Request these chunks of a payload, in addition to earlier requests."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel the requests under way; the source stays usable."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel the requests under way, and close the connections."""
        raise NotImplementedError

    async def take(self, message: bytes, awaited: dict[bytes, None]) -> None:
        """Handle one message of the source.

        Raises:
            PeerError: "corrupt", "missing" or "malformed": it is not a requested chunk.
        """
        hash_, data = codecs.unpack(message)
        if not hash_:
            if not data:
                self.intake.alive(self.source)
            return
        if hash_ not in awaited:
            raise PeerError("corrupt", f"chunk {hash_.hex()} was not asked for")
        if not data:
            raise PeerError("missing", f"chunk {hash_.hex()}")
        await self.intake.keep(self.source, hash_, message, data)
        awaited.pop(hash_, None)

    def fail(self, reason: str) -> None:
        """Cancel the requests under way, and report the reason."""
        self.cancel()
        self.intake.failed(self.source, reason)


class DialledSource(Source):
    """A source that this node dials, over one or several connections. Each request is split among them."""

    def __init__(self, source: str, address: str, intake: Intake, links: Sequence[Link]) -> None:
        super().__init__(source, intake)
        self.address = address
        self._links = links
        self._tasks = Background(self._fetching_failed)
        self._was_reached = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def stripes(self) -> int:
        """Number of connections."""
        return len(self._links)

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._tasks)

    def open(self) -> None:
        """Connect now, ahead of the first request."""
        for link in self._links:
            link.open()

    def ask(self, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        """As `Source.ask`; the chunks are split among the connections."""
        for number, link in enumerate(self._links):
            dealt = hashes[number :: self.stripes]
            for start in range(0, len(dealt), REQUEST_CHUNKS_MAX):
                part = dealt[start : start + REQUEST_CHUNKS_MAX]
                self._tasks.spawn(self._fetch(link, payload, part))
        if not self._was_reached and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(DIAL_SECONDS, self._was_not_reached)

    def _was_not_reached(self) -> None:
        self._patience = None
        if not self._was_reached and self._tasks:
            self.fail("unreachable")

    async def _fetch(self, link: Link, payload: PayloadId, hashes: Sequence[bytes]) -> None:
        awaited = dict.fromkeys(hashes)
        request = wire.ChunkRequest(hashes=hashes, payload=encode_payload(payload))
        try:
            async with aclosing(link.frames("FetchChunks", request)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    if (self._was_reached or message != codecs.ALIVE) and not await self._is_good(message, awaited):
                        return
                    self._was_reached = True  # a server sends ALIVE at once
                    if not awaited:
                        return
            self.fail("broken")
        except PeerError as error:
            self._was_reached = True
            self.fail("missing" if error.reason == "missing" else "broken")  # a refusal is never "corrupt"
        except LinkError:
            self.fail("broken" if self._was_reached else "unreachable")

    def _fetching_failed(self, error: Exception) -> None:
        log.error("a request to %s failed", self.source, exc_info=error)
        self.fail("broken")

    async def _is_good(self, message: bytes, awaited: dict[bytes, None]) -> bool:
        try:
            await self.take(message, awaited)
        except PeerError as error:
            self._was_reached = True
            self.fail(FAILURE_OF.get(error.reason, "broken"))
            return False
        return True

    def cancel(self) -> None:
        """As `Source.cancel`."""
        self._tasks.cancel()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    async def close(self) -> None:
        """As `Source.close`."""
        self.cancel()
        await self._tasks.close()
        for link in self._links:
            await link.close()
