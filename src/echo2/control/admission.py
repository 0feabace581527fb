"""How far ahead sampling may run at present: at most the staleness bound S, and less while the data is too far from the
policy.

What is measured is ESS / B of each step: the effective sample size of its importance weights over its number of
rollouts, 1 on-policy. The rule:

    below the floor                        the room above the least bound is halved
    CALM_STEPS in a row well above it      one version more is allowed
    within the steps that were let in under the bound before      nothing: they do not show yet what the change does

So it is left quickly where learning suffers and come back to slowly, one version at a time. The bound never falls below
publish_every - 1, where the newest snapshot can always sample the next step (`staleness`), and never exceeds S: what it
changes is who is leased what, never what is accepted. It follows from the steps' ESS alone: after a restart, or a
fall-back of the learner, it is what it was.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Steps in a row whose ESS is well above the floor before one more version is allowed.
CALM_STEPS = 4
#: Of the way from the floor to 1: above this, ESS is well above the floor.
MARGIN = 0.25


class Admission:
    """`bound` is the staleness that a lease may have now; `floor` 0: always `highest`."""

    def __init__(self, floor: float, lowest: int, highest: int) -> None:
        self.floor, self.lowest, self.highest = floor, lowest, highest
        self._seen: dict[int, float] = {}
        self._begin()

    def _begin(self) -> None:
        self.bound = self.highest
        self._shows_from, self._num_calm = 0, 0

    def step_trained(self, step: int, ess: float | None) -> None:
        """A step was trained, with this ESS / B (None: not known)."""
        if self.floor <= 0.0 or ess is None:
            return
        self._seen[step] = ess
        if step < self._shows_from:
            return
        self._num_calm = self._num_calm + 1 if ess >= self.floor + MARGIN * (1.0 - self.floor) else 0
        if ess < self.floor:
            self._change(step, self.lowest + (self.bound - self.lowest) // 2)
        elif self._num_calm >= CALM_STEPS:
            self._change(step, min(self.highest, self.bound + 1))

    def _change(self, step: int, bound: int) -> None:
        if bound != self.bound:
            # Workers have version `step` at most, and the bound let them sample so far ahead of it.
            self._shows_from = step + self.bound + 1
            self.bound, self._num_calm = bound, 0

    def recover(self, seen: Iterable[tuple[int, float]]) -> None:
        """Stand where these steps have led, and no others."""
        self._seen = {}
        self._begin()
        for step, ess in sorted(seen):
            self.step_trained(step, ess)

    def forget_from(self, version: int) -> None:
        """The steps from `version` on are trained again."""
        if self._seen:
            self.recover([(step, ess) for step, ess in self._seen.items() if step < version])
