"""How many groups a worker samples together, where the first groups of a step are wanted soon.

A large batch is quick per group and late with its first one; the learner waits for that. Which size ends a step soonest
depends on the engines (their time may grow with the batch, or not), on the fleet and on the learner. So it is found by
trial: from the largest size downwards until the two below the best were no better, and now and then a neighbour of the
best again.

Workers that begin a step together would also end their batches together, and the learner would be given groups in
bursts. So the batches they begin with have different sizes, the smallest first; and a step's last groups are shared
out.
"""

from __future__ import annotations

#: Weight of a new measurement against what was known of a width.
NEW_SECONDS = 0.5
#: Steps between two trials of another width, once the best is found.
TRIAL_EVERY = 12


class Frontier:
    """`width`: groups a worker is given at once now, at most."""

    def __init__(self, groups_per_batch: int) -> None:
        self.widths = [groups_per_batch]
        while self.widths[-1] > 1:
            self.widths.append((2 * self.widths[-1]) // 3)
        self._at = 0
        self._seconds: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._num_begun: dict[int, int] = {}
        self._ended: float | None = None
        self._num_choices = 0

    @property
    def width(self) -> int:
        return self.widths[self._at]

    def batch(self, step: int, num_left: int, num_workers: int, idle: bool) -> int:
        """Groups of the next batch, of which some are of `step`; `num_left`: that could still be leased; `idle`: its
        worker begins with it at once.
        """
        most = self.width
        if self.is_first(step, num_workers, idle):
            most = -(-self.width * (self._num_begun.get(step, 0) + 1) // num_workers)
        return max(1, min(most, -(-2 * num_left // num_workers)))

    def is_first(self, step: int, num_workers: int, idle: bool) -> bool:
        """Whether the next batch is one of those that the workers begin this step with."""
        return idle and self._num_begun.get(step, 0) < num_workers

    def leased(self, step: int, now: float, idle: bool) -> None:
        """A batch was leased that begins with a group of this step; `idle`: to a worker that had none."""
        self._began.setdefault(step, now)
        self._num_begun[step] = self._num_begun.get(step, 0) + idle

    def step_trained(self, step: int, now: float) -> None:
        """A step took from its first lease to here, or from the end of the step before where that is later. The first
        one is not measured: its workers were still starting.
        """
        began, before, self._ended = self._began.pop(step, None), self._ended, now
        self._began = {later: at for later, at in self._began.items() if later > step}
        self._num_begun = {later: count for later, count in self._num_begun.items() if later > step}
        if began is None or before is None:
            return
        seconds, known = now - max(began, before), self._seconds.get(self._at)
        self._seconds[self._at] = seconds if known is None else known + NEW_SECONDS * (seconds - known)
        self._choose()

    def interrupted(self) -> None:
        """The step under way does not show what its width is worth."""
        self._began.clear()
        self._num_begun.clear()
        self._ended = None

    def _choose(self) -> None:
        best = min(self._seconds, key=self._seconds.__getitem__)
        neighbours = [at for at in (best + 1, best - 1) if 0 <= at < len(self.widths)]
        self._num_choices += 1
        trial, is_due = divmod(self._num_choices, TRIAL_EVERY)
        below = [at for at in (best + 1, best + 2) if at < len(self.widths) and at not in self._seconds]
        self._at = best
        if below:
            self._at = below[0]
        elif is_due == 0 and neighbours:
            self._at = neighbours[trial % len(neighbours)]
