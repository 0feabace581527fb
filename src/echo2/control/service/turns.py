"""Decides which tenant of a shared learner comes next: the one that has used least of it while waiting.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with pieces of work for packets. Whoever waits without a gap gets an
equal share of the seconds, whatever the size of the pieces; who comes anew gets no credit for the time away; and nobody
waits longer than one piece of each other takes.
"""

from __future__ import annotations


class Turns:
    """Owners of work and the seconds that each has used. A name is charged for what it used, waiting or not."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._now = 0.0  # what whoever was last chosen had used then

    def wait(self, owner: str) -> None:
        """The owner has work from now on."""
        if owner not in self._waiting:
            self._used[owner] = max(self._used.get(owner, 0.0), self._now)
            self._waiting.add(owner)

    def rest(self, owner: str) -> None:
        """The owner has no work any more. What it has used beyond the others is remembered."""
        self._waiting.discard(owner)
        self._used = {name: used for name, used in self._used.items() if name in self._waiting or used > self._now}

    def charge(self, owner: str, seconds: float) -> None:
        """The owner has used so much."""
        self._used[owner] = self._used.get(owner, 0.0) + seconds

    def next(self) -> str | None:
        """Who has used least of those that wait; None: nobody waits."""
        chosen = min(self._waiting, key=lambda owner: (self._used[owner], owner), default=None)
        if chosen is not None:
            self._now = self._used[chosen]
        return chosen
