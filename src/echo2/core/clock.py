"""Time for the planner: seconds since the epoch that never run backwards, so that deadlines survive a restart of the
head.
"""

from __future__ import annotations

import time


class Clock:
    """Wall time at start plus monotonic time since then: a corrected system clock does not expire leases."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
