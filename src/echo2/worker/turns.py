"""A worker's turns on a card that it shares with the run's learner (`core/decide/turns.py`). A worker that shares none
has its card always.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from echo2.core.decide.turns import Act, worker_act
from echo2.core.turns import CARD, LOOK_SECONDS, WISH, FileLock
from echo2.engines.engine import Engine

log = logging.getLogger(__name__)


class WorkerTurns:
    """Keeps an engine's tensors on the card, but for the learner's turns. `directory`: of the locks; empty: the card is
    not shared. `engine`: the worker's, None before there is one."""

    def __init__(self, directory: str, engine: Callable[[], Engine | None]) -> None:
        self._locks = (FileLock(Path(directory) / WISH), FileLock(Path(directory) / CARD)) if directory else None
        self._engine = engine
        self._is_here, self._moving = asyncio.Event(), asyncio.Lock()
        if self._locks is None:
            self._is_here.set()

    @property
    def doing(self) -> str:
        """One line for people while the learner has the card, else empty."""
        return "" if self._is_here.is_set() else "waiting for the card, which the learner has"

    async def keep(self) -> None:
        """Take turns, until it is cancelled."""
        if self._locks is None:
            return
        wish, card = self._locks
        while True:
            match worker_act(wish.is_taken(), card.is_held):
                case Act.TAKE if card.take(shared=True):
                    if wish.is_taken():
                        card.give_back()  # the learner came first
                    else:
                        await self._come()
                case Act.LEAVE:
                    await self._leave()
                    card.give_back()
            await asyncio.sleep(LOOK_SECONDS)

    async def _come(self) -> None:
        started = time.monotonic()
        if (engine := self._engine()) is not None:
            await engine.wake_up()
            log.info("the worker has the card: %.2f s to fetch its tensors", time.monotonic() - started)
        self._is_here.set()

    async def _leave(self) -> None:
        async with self._moving:
            self._is_here.clear()
            started = time.monotonic()
            if (engine := self._engine()) is not None:
                await engine.sleep()
                log.info("the learner gets the card: %.2f s to put tensors away", time.monotonic() - started)

    @asynccontextmanager
    async def staying(self) -> AsyncIterator[None]:
        """Wait for the card. Inside, the worker keeps it."""
        while True:
            await self._is_here.wait()
            async with self._moving:
                if self._is_here.is_set():
                    yield
                    return
