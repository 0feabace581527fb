"""Runs as they go on, told to every page that is open. They are read while somebody looks, once for all who do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from echo2.views.page_data import chart_data, cost_data, run_data
from echo2.views.run_view import RunView

log = logging.getLogger(__name__)

#: How often the run directories are looked at.
LOOK_SECONDS = 0.5
#: How often a bill is made, if a step has ended since: it reads the ledger.
BILL_SECONDS = 5.0
#: After so much silence the connection says that it lives.
ALIVE_SECONDS = 15.0


class Watch:
    """The newest message of each kind about each run. A page that is slow gets the newest, not all."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.views = [RunView.read(directory) for directory in directories]
        self._asked = self.views
        self._messages: dict[tuple[str, int], tuple[int, bytes]] = {}  # of a kind and a run: its number, and the event
        self._number = 0
        self._billed_at = [float("-inf")] * len(self.views)
        self._is_unbilled = [True] * len(self.views)  # a step has ended since
        self._news = asyncio.Condition()
        self.num_listeners = 0  # pages that are open
        self._looking: asyncio.Task[None] | None = None
        self._is_over = False

    def stop(self) -> None:
        """End the events of all pages, within `LOOK_SECONDS`. Also for signal handlers."""
        self._is_over = True

    def newest(self) -> list[RunView]:
        """The runs as they are now, for who asks now and then. Not for two threads at once."""
        self._asked = [view.newer() for view in self._asked]
        return self._asked

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: how all stands, then each change."""
        self.num_listeners += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        seen = 0
        try:
            while not self._is_over:
                newer = [message for number, message in self._messages.values() if number > seen]
                seen = self._number
                yield b"".join(newer) or b": alive\n\n"
                await self._wait(seen)
        finally:
            self.num_listeners -= 1
            if not self.num_listeners and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _wait(self, seen: int) -> None:
        """Until there is something newer, or nothing for too long a time."""
        async with self._news:
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._news.wait_for(lambda: self._is_over or self._number > seen)
            except TimeoutError:
                pass  # whoever listens hears that the connection lives

    async def _look(self) -> None:
        while True:
            try:
                changed = await asyncio.to_thread(self._read)
            except Exception:  # a page that is open shall say what it knows; the log has why there is no more
                log.exception("the run directories could not be read")
                changed = []
            for kind, index, message in changed:
                self._number += 1
                self._messages[kind, index] = self._number, message
            if changed or self._is_over:
                async with self._news:
                    self._news.notify_all()
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> list[tuple[str, int, bytes]]:
        """The messages that differ from those before."""
        found: list[tuple[str, int, Any]] = []
        for index, before in enumerate(self.views):
            view = self.views[index] = before.newer()
            found.append(("run", index, run_data(view)))
            is_known = ("steps", index) in self._messages
            if not is_known or view.rows is not before.rows:
                found.append(("steps", index, chart_data(view.rows)))
                self._is_unbilled[index] = True
            if self._is_unbilled[index] and time.monotonic() - self._billed_at[index] > BILL_SECONDS:
                self._is_unbilled[index] = False
                self._billed_at[index] = time.monotonic()
                found.append(("cost", index, cost_data(view)))
        messages = [(kind, index, _event(kind, index, data)) for kind, index, data in found]
        known = {key: message for key, (_, message) in self._messages.items()}
        return [(kind, index, message) for kind, index, message in messages if known.get((kind, index)) != message]


def _event(kind: str, index: int, data: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"run": index, **data}) + b"\n\n"
