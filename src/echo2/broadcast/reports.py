"""A worker's reports to the origin on its fetches. While the head is away, news is queued and progress is dropped."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from echo2.background import spawn
from echo2.broadcast.payloads import encode_payload
from echo2.control.broadcast.origin_events import Tally
from echo2.errors import LinkError, PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.types import PayloadId

CALL_SECONDS = 10.0
RETRY_SECONDS = 1.0
#: Maximum number of reports queued while the head is away; the oldest is dropped first.
NEWS_MAX = 1000


class Reports:
    """Sends reports one after the other, so that the origin receives them in order."""

    def __init__(self, link: Link, on_error: Callable[[Exception], object]) -> None:
        self._link = link
        self._news: deque[wire.FetchReport] = deque(maxlen=NEWS_MAX)
        self._is_connected = False
        self._sending: asyncio.Task[None] | None = None
        self._on_error = on_error

    def failed(self, payload: PayloadId, source: str, failure: str) -> None:
        """Report that a source was given up."""
        self._put(wire.FetchReport(payload=encode_payload(payload), failed_source=source, failure=failure))

    def whole(self, payload: PayloadId, num_bytes: int, tallies: Sequence[Tally]) -> None:
        """Report that every chunk is stored, and how much each source sent."""
        given = [wire.Tally(source=t.source, num_bytes=t.num_bytes, seconds=t.seconds) for t in tallies]
        report = wire.FetchReport(
            payload=encode_payload(payload), bytes_stored=num_bytes, bytes_total=num_bytes, whole=True, tallies=given
        )
        self._put(report)

    def measured(self, up: float, down: float) -> None:
        """Report the measured rates of the worker's own link."""
        self._put(wire.FetchReport(up=up, down=down))

    def progress(self, payload: PayloadId, bytes_stored: int, bytes_total: int) -> None:
        """Report the progress of a fetch. Dropped if other reports are queued."""
        if self._is_connected and not self._news:
            encoded = encode_payload(payload)
            self._put(wire.FetchReport(payload=encoded, bytes_stored=bytes_stored, bytes_total=bytes_total))

    def connected(self) -> None:
        """Send the queued reports: the head is connected."""
        self._is_connected = True
        self._start()

    def disconnected(self) -> None:
        """Queue reports from now on: the head is away."""
        self._is_connected = False

    def _put(self, report: wire.FetchReport) -> None:
        self._news.append(report)
        self._start()

    def _start(self) -> None:
        if self._is_connected and (self._sending is None or self._sending.done()):
            self._sending = spawn(self._send(), self._on_error)

    async def _send(self) -> None:
        while self._news and self._is_connected:
            report = self._news[0]
            try:
                await self._link.call("ReportFetch", report, CALL_SECONDS)
            except PeerError:
                pass  # the head refuses this report; sending it again would not help
            except LinkError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if self._news and self._news[0] is report:
                self._news.popleft()

    async def close(self) -> None:
        """Stop sending; queued reports are dropped."""
        self._is_connected = False
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
