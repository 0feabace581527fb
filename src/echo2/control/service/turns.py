"""Decides which tenant of a shared learner comes next: the waiting one that has used the fewest seconds.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with pieces of work for packets. Tenants that wait without a gap get
equal shares of the seconds, whatever the size of their pieces; a returning tenant gets no credit for its absence; and
no tenant waits longer than one piece of each other tenant takes.
"""

from __future__ import annotations


class Turns:
    """Owners of work and the seconds that each has used. An owner is charged whether it is waiting or not."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._now = 0.0  # virtual time: the seconds used by the owner chosen last, at that moment

    def wait(self, owner: str) -> None:
        """The owner has work from now on."""
        if owner not in self._waiting:
            self._used[owner] = max(self._used.get(owner, 0.0), self._now)
            self._waiting.add(owner)

    def rest(self, owner: str) -> None:
        """The owner has no more work. Seconds that it used beyond the virtual time are remembered."""
        self._waiting.discard(owner)
        self._used = {name: used for name, used in self._used.items() if name in self._waiting or used > self._now}

    def charge(self, owner: str, seconds: float) -> None:
        """Charge the owner for these seconds."""
        self._used[owner] = self._used.get(owner, 0.0) + seconds

    def next(self) -> str | None:
        """Choose the waiting owner that has used the fewest seconds; None if no owner waits."""
        chosen = min(self._waiting, key=lambda owner: (self._used[owner], owner), default=None)
        if chosen is not None:
            self._now = self._used[chosen]
        return chosen
