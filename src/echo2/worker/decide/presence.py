"""Decides when a machine at home samples: not while its owner's programs need the processors, nor on battery.

It stops when that lasts, at once on battery, and begins again only after a while of calm, below a lower threshold. So
it never changes more often than twice in `CALM_SECONDS`, whatever the measurements do.
"""

from __future__ import annotations

#: Shares of all processors that other programs use: from the first on the machine is busy, below the second it is calm.
BUSY_SHARE, CALM_SHARE = 0.5, 0.25
#: How long it must be busy before sampling stops, and calm before it begins again.
BUSY_SECONDS, CALM_SECONDS = 10.0, 60.0


class Presence:
    """`paused`: why the machine does not sample; empty: it does."""

    def __init__(self) -> None:
        self.paused = ""
        self._since: float | None = None  # since when each measurement has spoken for a change

    def measured(self, others_share: float, on_battery: bool, now: float) -> None:
        """Take a measurement: the share of all processors that other programs use, and whether there is no mains."""
        if not self.paused and on_battery:
            self._change("the machine is on battery")
            return
        is_for_change = not on_battery and others_share < CALM_SHARE if self.paused else others_share >= BUSY_SHARE
        if not is_for_change:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= (CALM_SECONDS if self.paused else BUSY_SECONDS):
            self._change("" if self.paused else f"other programs use {others_share:.0%} of the processors")

    def _change(self, paused: str) -> None:
        self.paused, self._since = paused, None
