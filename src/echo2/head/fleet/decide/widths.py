"""How many groups a worker decodes at once: its width, which begins as `sampling.groups_per_batch` says.

An engine with few groups takes as long for one as beside others, until arithmetic limits it: it is *full*. With more
groups each takes longer, in proportion, so that no more come of it, and the step that the learner waits for comes
later. With fewer, work that would have cost no time is left undone. So the right width is the number at which the
engine is full, and it differs from machine to machine, and over a run, as answers grow longer.

It is found from the leases, without trials. A group's work, in seconds of an engine that is not full, is

    integral of min(1, f / n(t)) dt  over the life of its lease,  n(t): the groups that its worker decodes at t

if the engine is full at f. Groups differ in their work, but not by how many others there were. So of all f that one is
right with which the logarithm of the work varies least; all f above every n(t) are the same. What is known of one
worker is helped out by what is known of all machines of the owner.

Where groups were fewer than the engine can take, durations don't tell at how many it is full. Then the width is
doubled, if the learner waits. A width that was too large is never tried again, so that the width does not oscillate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Numbers of groups at which an engine may be full, and widths. The last: never full.
LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: Widths, at most, as a multiple of the setting: engine and worker are made for so many rollouts.
GROWTH = 8
#: Groups over which means and variances run, at least, and as a multiple of the width.
MEMORY, MEMORY_WIDTHS = 32, 4
#: Groups whose durations must be known: of all workers; of this one since its width last changed, at least, and as a
#: share of that.
KNOWN, KNOWN_SINCE, KNOWN_SHARE = 8, 2, 0.5
#: What is known of all workers counts as much as so many groups of a worker's own.
SHARED = 16
#: A level explains the durations as well as the best if its variance is larger by less than this share over the root of
#: the number of groups (for a larger width: by less than the second share), or by this much.
WORSE, WORSE_TO_WIDEN, WORSE_BY = 1.2, 0.05, 0.002
#: The logarithm of a group's work is taken as at most so far from the mean: a straggler is no evidence.
FAR = 1.0


@dataclass(slots=True)
class Spreads:
    """By level: the variance of the logarithm of a group's work, if the engine is full there. `count`: of groups."""

    count: int = 0
    variances: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))

    def add(self, distances: list[float], memory: int) -> None:
        """Add a group. `distances`: of the logarithm of its work from the mean, by level."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 / memory)
        for at, distance in enumerate(distances):
            self.variances[at] += weight * (distance * distance - self.variances[at])


@dataclass(slots=True)
class Width:
    """`groups`: that this worker decodes at once; `most`: that it has room for. Leases are held in the order in which
    they were granted: the first `groups` run, and the others wait.
    """

    groups: int
    most: int
    why: str = "as set"
    _too_many: int = 2 * LEVELS[-1]
    _leases: dict[int, tuple[float, list[float]] | None] = field(default_factory=dict)
    _resumed: set[int] = field(default_factory=set)
    _work: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))
    _at: float = 0.0
    _means: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))
    _own: Spreads = field(default_factory=Spreads)
    _num_since: int = 0
    _is_used: bool = False
    _moved_at: float = -math.inf

    def resize(self, most: int) -> None:
        """The worker came back, and has room for so many."""
        self.most = most
        self.groups = min(self.groups, most)

    def take(self, lease_id: int, now: float) -> None:
        """The worker got a lease."""
        self._advance(now)
        self._leases[lease_id] = None
        self._begin()

    def resume(self, lease_ids: Iterable[int], now: float) -> None:
        """The worker holds leases of an earlier head: they fill its engine, and when they began is not known."""
        self._advance(now)
        for lease_id in lease_ids:
            if lease_id not in self._leases:
                self._leases[lease_id] = None
                self._resumed.add(lease_id)
        self._begin()

    def end(self, lease_id: int, is_measured: bool, everybody: Spreads, now: float) -> None:
        """A lease is over. `is_measured`: it brought a whole group."""
        self._advance(now)
        begun, is_resumed = self._leases.pop(lease_id, None), lease_id in self._resumed
        self._resumed.discard(lease_id)
        if begun is not None and is_measured and not is_resumed:
            self._num_since += self._is_used and begun[0] >= self._moved_at
            self._measure(
                [max(1e-9, work - before) for work, before in zip(self._work, begun[1], strict=True)], everybody
            )
        self._begin()

    def _advance(self, now: float) -> None:
        count, seconds, self._at = min(len(self._leases), self.groups), now - self._at, now
        if count and seconds > 0:
            self._is_used |= count == self.groups
            for at, level in enumerate(LEVELS):
                self._work[at] += seconds * min(1.0, level / count)

    def _begin(self) -> None:
        for lease_id in itertools.islice(self._leases, self.groups):
            if self._leases[lease_id] is None:
                self._leases[lease_id] = self._at, list(self._work)

    def _measure(self, works: list[float], everybody: Spreads) -> None:
        logs = [math.log(work) for work in works]
        if not self._own.count and not any(self._means):
            self._means = logs
            return
        weight = max(1.0 / (self._own.count + 2), 1.0 / self._memory)
        distances = [max(-FAR, min(FAR, log - mean)) for log, mean in zip(logs, self._means, strict=True)]
        self._means = [mean + weight * distance for mean, distance in zip(self._means, distances, strict=True)]
        self._own.add(distances, self._memory)
        everybody.add(distances, self._memory)

    @property
    def _memory(self) -> int:
        return max(MEMORY, MEMORY_WIDTHS * self.groups)

    def look(self, everybody: Spreads, is_waited_for: bool) -> bool:
        """Change the width, if durations or the learner's waits say so. Return whether it changed."""
        if everybody.count < KNOWN or self._num_since < max(KNOWN_SINCE, KNOWN_SHARE * self.groups):
            return False
        if (full := self._full(everybody)) < self.groups:
            self._too_many = self.groups
            self._move(full, f"among more than {full} its groups take longer, and no more come of it")
            return True
        wider = max((level for level in LEVELS if level <= self._wider()), default=0)
        if not is_waited_for or wider <= self.groups or self._full(everybody, WORSE_TO_WIDEN) < wider:
            return False
        self._move(wider, f"the learner waits, and its groups take no longer among {self.groups}")
        return True

    def _wider(self) -> int:
        return min(2 * self.groups, self.most, self._too_many - 1)

    def _full(self, everybody: Spreads, worse: float | None = None) -> int:
        """Return the largest level that explains the durations as well as the best."""
        own, shared = min(self._own.count, MEMORY), min(SHARED, everybody.count)
        pairs = zip(self._own.variances, everybody.variances, strict=True)
        variances = [(own * own_variance + shared * all_) / (own + shared) for own_variance, all_ in pairs]
        worse = WORSE / math.sqrt(own + shared) if worse is None else worse
        enough = (1 + worse) * min(variances) + WORSE_BY
        return max(level for level, variance in zip(LEVELS, variances, strict=True) if variance <= enough)

    def _move(self, groups: int, why: str) -> None:
        self.groups, self.why, self._num_since, self._is_used = groups, why, 0, False
        self._moved_at = self._at
        self._begin()
