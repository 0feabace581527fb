"""Finds rollouts that a stranger's ticket delivers twice, without a check.

Copying is the cheapest way to cheat, and by the rollout's own logprobs, an honest engine does not draw the same long
rollout twice. Rollouts of different tickets are not compared. Whoever knows the run's seed and a task can sample what
an honest worker will deliver for it, and could deliver that first, for another group.
"""

from __future__ import annotations

import secrets

import numpy as np
from blake3 import blake3

from echo2.core.errors import PeerError
from echo2.core.types import RolloutGroup

#: Number of rollouts remembered, the newest ones.
COPIES_KEPT = 1 << 16
#: Rollouts less likely than exp(-CHANCE_NATS) are compared. With `COPIES_KEPT` remembered, one honest rollout in
#: 3 x 10^10 equals one of them by chance.
CHANCE_NATS = 36.0


class CopiedRollouts:
    """Rollouts that strangers delivered since the head started, by a hash of their ticket and tokens that only this
    process can compute: nobody can make another rollout with that hash."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._seen: dict[bytes, tuple[int, int]] = {}

    def check(self, group: RolloutGroup, ticket: str) -> None:
        """Remember the rollouts of a group of this ticket. The same group may be delivered again: its random numbers
        are the same.

        Raises:
            PeerError: "malformed": a rollout equals one of another group of the ticket, or another one of this group.
        """
        new_places: dict[bytes, tuple[int, int]] = {}
        for sample, rollout in enumerate(group.rollouts):
            nats = -float(np.frombuffer(rollout.logprobs, dtype=np.float32).sum(dtype=np.float64))
            if nats < CHANCE_NATS:
                continue
            key = blake3(rollout.tokens.tobytes() + ticket.encode(), key=self._key).digest(16)
            place = (group.group.number, sample)
            first = self._seen.get(key) or new_places.setdefault(key, place)
            if first != place:
                raise PeerError(
                    "malformed",
                    f"rollout {sample} of group {place[0]} is a copy of rollout {first[1]} of group {first[0]}: by its "
                    f"own logprobs it is drawn once in e^{nats:.0f}",
                )
        self._seen |= new_places
        while len(self._seen) > COPIES_KEPT:
            del self._seen[next(iter(self._seen))]
