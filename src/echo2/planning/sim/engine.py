"""A simulated engine that arithmetic limits: the groups that it decodes at once share its pace."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field


@dataclass(slots=True)
class FullEngine:
    """An engine that makes no more tokens a second with more than `full_groups` at once. `ends`: by lease, the value of
    `work` at which it is done; `work` grows by a second in each second, and slower where the engine is full.
    """

    full_groups: int
    ends: dict[int, float] = field(default_factory=dict)
    number: int = 0
    _timed: set[int] = field(default_factory=set)
    _work: float = 0.0
    _at: float = 0.0

    def advance(self, now: float) -> None:
        """Let the groups go on until now."""
        self._work += (now - self._at) * self._pace
        self._at = now

    def begin(self, lease_id: int, seconds: float) -> None:
        """Add a group that takes so long where the engine is not full."""
        self.ends[lease_id] = self._work + seconds

    def keep(self, lease_ids: Container[int]) -> float | None:
        """Forget all other leases. Return the seconds until the next of these is done; None: unchanged."""
        self.ends = {lease_id: end for lease_id, end in self.ends.items() if lease_id in lease_ids}
        if self._timed == self.ends.keys():
            return None
        self.number, self._timed = self.number + 1, set(self.ends)
        return (min(self.ends.values()) - self._work) / self._pace if self.ends else None

    def pop_first(self) -> int:
        """Remove the lease that is done first, and return it."""
        first = min(self.ends, key=self.ends.__getitem__)
        del self.ends[first]
        return first

    @property
    def _pace(self) -> float:
        return min(1.0, self.full_groups / max(1, len(self.ends)))
