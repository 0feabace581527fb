"""Waiting between the tries of something that failed."""

from __future__ import annotations

import asyncio
import math
import random
import time

from echo2.core.types import Backoff


class Retries:
    """The tries of one thing in a row: the pauses between them grow, and may be given up after `patience_seconds`
    without success. `spread`: up to this share of each pause is left out at random, so that many do not try at once.
    """

    def __init__(self, backoff: Backoff, patience_seconds: float = math.inf, spread: float = 0.0) -> None:
        self._backoff, self._patience_seconds, self._spread = backoff, patience_seconds, spread
        self._num_pauses, self._failing_since = 0, math.inf

    def succeeded(self) -> None:
        """Begin again with the first pause, and with all patience."""
        self._num_pauses, self._failing_since = 0, math.inf

    def failed(self) -> bool:
        """Whether the patience is used up, after a failure. Callers that never give up need not ask."""
        now = time.monotonic()
        self._failing_since = min(now, self._failing_since)
        return now - self._failing_since >= self._patience_seconds

    async def pause(self, at_least_seconds: float = 0.0) -> None:
        """Wait before the next try."""
        self._num_pauses += 1
        seconds = max(at_least_seconds, self._backoff.after(self._num_pauses))
        await asyncio.sleep(seconds * random.uniform(1.0 - self._spread, 1.0))
