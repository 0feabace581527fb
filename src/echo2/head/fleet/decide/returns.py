"""How long the head waits for workers that are away: their connections closed, or the head began anew.

A worker that only lost its link is back within one or two heartbeats. Where a large fleet lost the head together, its
workers spread their dials (`transport.grpc_link.dial_pauses`) and take turns at the head's door, which lets so many
handshakes a second begin. The last of them are back after minutes, and none of them is at fault. So in such a mass
absence nobody counts as lost while others come back, for as long as all of them take at a slow pace. That is counted by
the most that were away together: when the last few are waited for, few are away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Heartbeats after its connection closed: a worker that only lost its link is back within one or two. And heartbeats
#: after the head began, for a worker that held leases of an earlier one.
GRACE_HEARTBEATS, RESTART_HEARTBEATS = 3, 5
#: More than so many workers that are away together are a mass absence. So many a second come back at least, or they are
#: not waited for: a sixth of those that the door admits, for a head that others leave little of its processor.
RETURNS_AT_ONCE, RETURNS_PER_SECOND = 100, 20.0
#: How long none of them may come before the others count as lost: a worker dials again after at most so many seconds,
#: pause and attempt together, and in a large fleet after such a share of the time that all of them have.
DIAL_SECONDS, DIAL_SHARE = 15.0, 0.25


@dataclass(slots=True)
class Returns:
    """`most_away`: workers that were away together, at most, in the mass absence that began at `began_at`; 0: there is
    none. `returned_at`: when one last came back, or the head began.
    """

    heartbeat_seconds: float
    most_away: int = 0
    began_at: float = -math.inf
    returned_at: float = -math.inf

    @property
    def grace_seconds(self) -> float:
        return GRACE_HEARTBEATS * self.heartbeat_seconds

    def _seconds_of(self, num_away: int) -> float:
        return max(DIAL_SECONDS, num_away / RETURNS_PER_SECOND) if num_away > RETURNS_AT_ONCE else 0.0

    def seconds_after_restart(self, num_away: int) -> float:
        """Return for how long a head that begins waits for so many workers."""
        return max(RESTART_HEARTBEATS * self.heartbeat_seconds, self._seconds_of(num_away) + self.grace_seconds)

    def begin(self, now: float) -> None:
        """The head begins: nobody could come back before."""
        self.returned_at = now

    def leave(self, num_away: int, now: float) -> None:
        """A worker is away, and so many are in all."""
        if now >= self.began_at + self._seconds_of(self.most_away) + self.grace_seconds:
            self.most_away = 0
        if num_away > RETURNS_AT_ONCE:
            self.began_at = self.began_at if self.most_away else now
            self.most_away = max(self.most_away, num_away)

    def come(self, num_away: int, now: float) -> None:
        """A worker came back; so many are still away."""
        self.returned_at = now
        self.most_away = self.most_away if num_away else 0

    def until(self, away_since: float) -> float:
        """Return until when a worker is waited for that has been away since then."""
        if not self.most_away:
            return away_since + self.grace_seconds
        whole = self._seconds_of(self.most_away)
        none_since = self.returned_at + max(DIAL_SECONDS, DIAL_SHARE * whole)
        return max(away_since, min(none_since, away_since + whole)) + self.grace_seconds
