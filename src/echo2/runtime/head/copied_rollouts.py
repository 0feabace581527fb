"""Finds rollouts that strangers deliver a second time. Copying is the cheapest way to cheat and is found without a
check: judged by its own logprobs, an honest engine does not draw the same long rollout twice.
"""

from __future__ import annotations

import numpy as np

from echo2.errors import PeerError
from echo2.types import RolloutGroup

#: Rollouts that are remembered, the newest.
KEPT = 1 << 16
#: A rollout less likely than e to the minus this is not drawn again: with so many remembered, one honest rollout in
#: 3 x 10^10 is like one of them.
CHANCE_NATS = 36.0


class CopiedRollouts:
    """What strangers delivered since the head started, by a hash of the tokens that nobody outside can compute."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def check(self, group: RolloutGroup) -> None:
        """Remember the rollouts of a group. The same group may come again: its random numbers are the same.

        Raises:
            PeerError: "malformed", a rollout is one of another group, or another one of this group.
        """
        found: dict[int, tuple[int, int]] = {}
        for sample, rollout in enumerate(group.rollouts):
            nats = -float(np.frombuffer(rollout.logprobs, dtype=np.float32).sum(dtype=np.float64))
            if nats < CHANCE_NATS:
                continue
            key, place = hash(rollout.tokens.tobytes()), (group.group.number, sample)
            first = self._seen.get(key) or found.setdefault(key, place)
            if first != place:
                raise PeerError(
                    "malformed",
                    f"rollout {sample} of group {place[0]} is a copy of rollout {first[1]} of group {first[0]}: by its "
                    f"own logprobs it is drawn once in e^{nats:.0f}",
                )
        self._seen |= found
        while len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]
