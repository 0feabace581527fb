"""Time for the planner: seconds since the epoch that never run backwards, so that deadlines survive a restart of the
head.
"""

from __future__ import annotations

import time


class Clock:
    """Wall time at start plus monotonic time since then: a corrected system clock does not expire leases. `not_before`:
    the last time that an earlier head recorded, where the system's clock was set back since."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset
