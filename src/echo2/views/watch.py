"""Sends the state of runs to all open pages. Runs are read only while a page is open, once for all pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from echo2.background import spawn
from echo2.views.chart_points import ChartPoints
from echo2.views.page_data import cost_data, run_data
from echo2.views.run_view import RunView

log = logging.getLogger(__name__)

#: Seconds between two reads of the run directories; longer if reading would take more than this share of a core.
LOOK_SECONDS, LOOK_SHARE = 0.5, 0.1
#: Minimum seconds between two bills, which read the ledger. A bill is only made if a step has ended since the last.
BILL_SECONDS = 5.0
#: Seconds without an event after which a keep-alive is sent.
ALIVE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class PageEvent:
    """A server-sent event. `whole`: complete, for any page; `news`: shorter, for a page that got number `since`."""

    number: int
    whole: bytes
    news: bytes
    since: int

    def after(self, number: int) -> bytes:
        """Return what to send to a page that got all events up to this number."""
        return self.news if number >= self.since else self.whole


class Watch:
    """The newest event of each kind about each run. A slow page skips superseded events."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.views = [RunView.read(directory) for directory in directories]
        self._asked = self.views
        self._points = [ChartPoints() for _ in self.views]
        self._messages: dict[tuple[str, int], PageEvent] = {}  # by kind and run
        self._number = 0
        self._billed_at = [float("-inf")] * len(self.views)
        self._is_unbilled = [True] * len(self.views)  # a step has ended since
        self._news = asyncio.Condition()
        self.num_listeners = 0  # pages that are open
        self._looking: asyncio.Task[None] | None = None
        self._is_over = False

    def stop(self) -> None:
        """End the event streams of all pages, within `LOOK_SECONDS`. Safe in a signal handler."""
        self._is_over = True

    def newest(self) -> list[RunView]:
        """Return the current state of the runs, for occasional requests. Not for two threads at once."""
        self._asked = [view.newer() for view in self._asked]
        return self._asked

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: the current state of all runs, then each change."""
        self.num_listeners += 1
        if self._looking is None:
            self._looking = spawn(self._look(), self._looking_failed)
        seen = 0
        try:
            while not self._is_over and self._looking is not None:
                newer = [message.after(seen) for message in self._messages.values() if message.number > seen]
                seen = self._number
                yield b"".join(newer) or b": alive\n\n"
                await self._wait(seen)
        finally:
            self.num_listeners -= 1

    async def _wait(self, seen: int) -> None:
        """Wait for an event after number `seen`, but at most `ALIVE_SECONDS`."""
        async with self._news:
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._news.wait_for(lambda: self._is_over or self._number > seen)
            except TimeoutError:
                pass  # the caller sends a keep-alive

    def _looking_failed(self, error: Exception) -> None:
        """End the streams of all pages: each asks again, and that reads the runs again."""
        log.error("the run directories are no longer read", exc_info=error)
        self._looking = None

    async def _look(self) -> None:
        """Read the runs again and again while a page is open. The result of every read is published, because the next
        read reports only what differs from it."""
        while self.num_listeners:
            try:
                seconds, changed = await asyncio.to_thread(self._read)
            except Exception:  # open pages keep showing the last state; the reason is in the log
                log.exception("the run directories could not be read")
                seconds, changed = 0.0, []
                self._messages.clear()  # the next read sends everything again, in full
                self._points = [ChartPoints() for _ in self.views]
            for kind, index, whole, news in changed:
                self._number += 1
                before = self._messages.get((kind, index))
                since = self._number if before is None else before.number
                self._messages[kind, index] = PageEvent(self._number, whole, news, since)
            if changed or self._is_over:
                async with self._news:
                    self._news.notify_all()
            await asyncio.sleep(max(LOOK_SECONDS, seconds / LOOK_SHARE))
        self._looking = None  # no await since `num_listeners` was 0: no page is missed

    def _read(self) -> tuple[float, list[tuple[str, int, bytes, bytes]]]:
        """Return the CPU seconds used, and (kind, run, whole, news) of each event that has changed."""
        began, found = time.thread_time(), []
        for index, before in enumerate(self.views):
            view = self.views[index] = before.newer()
            has_steps = view.rows is not before.rows or ("steps", index) not in self._messages
            if has_steps:
                found.append(self._steps(index, view))
                self._is_unbilled[index] = True
            if has_steps or view.status is not before.status or view.problem != before.problem:
                found.append(_message("run", index, run_data(view)))
            if self._is_unbilled[index] and time.monotonic() - self._billed_at[index] > BILL_SECONDS:
                self._is_unbilled[index] = False
                self._billed_at[index] = time.monotonic()
                found.append(_message("cost", index, cost_data(view)))
        known = {key: message.whole for key, message in self._messages.items()}
        changed = [one for one in found if known.get(one[:2]) != one[2]]
        return time.thread_time() - began, changed

    def _steps(self, index: int, view: RunView) -> tuple[str, int, bytes, bytes]:
        points = self._points[index]
        kept = points.take(view.rows)
        whole = _event("steps", index, points.tail(0))
        return "steps", index, whole, _event("steps", index, points.tail(kept)) if kept else whole


def _message(kind: str, index: int, data: Any) -> tuple[str, int, bytes, bytes]:
    whole = _event(kind, index, data)
    return kind, index, whole, whole


def _event(kind: str, index: int, data: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"run": index, **data}) + b"\n\n"
