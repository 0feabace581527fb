"""How old a group's tokens may be (staleness), and how many groups a worker decodes at once (its width).

Staleness: ECHO-2 sections 3.2 and 4.1; `docs/staleness.md` derives the rule. Symbols: t = the step that a group is
bound to when it is issued (it trains version t into t + 1), x = the policy version of its *oldest* token,
S = max_staleness, kappa = publish_every. The rule:  t - x <= S.

The rule is enforced by *pacing at admission*: a group is bound to its step before it is sampled, and leased only to a
worker whose installed version v satisfies t - v <= S. Installed versions only grow within a lineage, so every token
has x >= v, and the rule holds however long the group is queued afterwards. It is checked when a result arrives, when a
group is fed, and by the learner. A limit of groups in flight alone would not bound the age of a straggler; the binding
does, because the straggler's step waits for it.

Width: a large one takes less time per group but finishes the first group late, and the learner waits for it. The width
that ends a step soonest depends on the engines (whose time may or may not grow with it), the fleet and the learner. So
it is found by trial: from the largest width downwards until the two below the best were no better, and from then on
occasionally a neighbour of the best.

Snapshots: a smaller kappa gives workers more time for the first step that needs a new version, and a larger one sends
fewer bytes. The setting is where a run begins: where the learner waits, and the forecast with the measured times says
that it would wait less with a smaller one, kappa falls to a divisor of the setting, so that all versions that were to
be published still are. If it waits more with it than it did before, kappa rises again, and stays.

Workers that begin a step together would also finish their first groups together, and the learner would get groups in
bursts. So workers begin with different numbers of groups, the fewest first, until one of these is delivered.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Weight of a new measurement of a width in its running mean.
NEW_SECONDS = 0.5
#: Steps between two trials of other widths, once the best is found.
TRIAL_EVERY = 12
#: Steps, at least, between two looks at the number of steps between snapshots.
LOOK_STEPS = 3
#: A smaller number of steps between snapshots is taken where the forecast idle ratio falls by this much, and given up
#: where the measured one is this much above what it was, or was forecast to be, before.
LEAST_GAIN, WORSE = 0.02, 0.1


def staleness(step: int, oldest_version: int) -> int:
    """Age, in policy versions, of a group's oldest token when step `step` trains on it."""
    return step - oldest_version


def min_version(step: int, max_staleness: int) -> int:
    """The oldest version that may still contribute a token to this step."""
    return max(0, step - max_staleness)


def last_step(installed_version: int, max_staleness: int) -> int:
    """The last step that a worker with this version may sample for."""
    return installed_version + max_staleness


def may_train(step: int, oldest_version: int, max_staleness: int) -> bool:
    """Whether a group may be trained on: the check when it is fed."""
    return staleness(step, oldest_version) <= max_staleness


def fixed_version(step: int, max_staleness: int, publish_every: int) -> int:
    """The version that samples this step in deterministic mode: the oldest published one that the bound allows.

    max(0, kappa * ceil((t - S) / kappa)). It never exceeds t if kappa <= S + 1, so waiting for it can't deadlock.
    """
    return max(0, publish_every * -(-(step - max_staleness) // publish_every))


class WidthSearch:
    """The search for the best `width`, and the start of each step."""

    def __init__(self, most_groups: int) -> None:
        self.widths = [most_groups]
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

    def why(self) -> str:
        """Say why the width is what it is."""
        if not self._seconds:
            return "no step was measured yet"
        best = min(self._seconds, key=self._seconds.__getitem__)
        measurement = f"with {self.widths[best]} a step takes {self._seconds[best]:.3g} s"
        return f"the best that was tried: {measurement}" if self._at == best else f"a trial: {measurement}"

    def begin(self, step: int, num_workers: int) -> int | None:
        """Return with how many groups an idle worker begins this step; None if `num_workers` have begun it already."""
        num_begun = self._num_begun[step] = self._num_begun.get(step, 0) + 1
        return max(1, -(-self.width * num_begun // num_workers)) if num_begun <= num_workers else None

    def leased(self, step: int, now: float) -> None:
        self._began.setdefault(step, now)

    def step_trained(self, step: int, now: float) -> None:
        """Measure a step, from its first lease (or the end of the previous step, if later) until now. The first step
        does not count, because its workers were still starting.
        """
        began, before, self._ended = self._began.pop(step, None), self._ended, now
        self._began = {later: at for later, at in self._began.items() if later > step}
        self._num_begun = {later: count for later, count in self._num_begun.items() if later > step}
        if began is None or before is None:
            return
        seconds, average = now - max(began, before), self._seconds.get(self._at)
        self._seconds[self._at] = seconds if average is None else average + NEW_SECONDS * (seconds - average)
        self._choose()

    def interrupted(self) -> None:
        """Exclude the current step from the measurements."""
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


class Cadence:
    """How many steps lie between two snapshots: `publish_every`, at first the setting. `max_staleness`: steps that were
    open when it changed, so that only later ones show what the change brought.
    """

    def __init__(self, setting: int, max_staleness: int) -> None:
        self.publish_every = setting
        self._settles = max_staleness + 1
        self._choices = [count for count in range(setting, 0, -1) if setting % count == 0]
        self._before: tuple[int, float] | None = None
        self._num_steps = 0
        self._began: float | None = None
        self._has_looked = False
        self._why = ""

    def why(self) -> str:
        """Say why there are as many steps between two snapshots as there are."""
        return self._why or "as set"

    def choices(self) -> list[int]:
        """Return the numbers of steps that may be chosen, the present one and fewer."""
        return self._choices[self._choices.index(self.publish_every) :]

    def interrupted(self) -> None:
        """Exclude what was measured since the last move."""
        self._num_steps, self._began = 0, None

    def step_trained(self, now: float) -> None:
        """Count a step. Those that were open at the last move are not measured."""
        self._num_steps += 1
        if self._num_steps == self._settles:
            self._began = now

    def is_due(self) -> bool:
        """Whether it is time to look: once there is a forecast, and then whenever enough steps are measured."""
        is_time = not self._has_looked or self._num_measured >= max(LOOK_STEPS, self.publish_every)
        return len(self._choices) > 1 and is_time

    @property
    def _num_measured(self) -> int:
        return self._num_steps - self._settles if self._began is not None else 0

    def look(self, now: float, train_seconds: float, forecast: Mapping[int, float]) -> bool:
        """Change the number of steps, if the learner waits, and its idle ratio by the `forecast` for each of `choices`
        says that it would wait less. Return whether it changed.
        """
        count, idle = self._num_measured, None
        self._has_looked |= bool(forecast)
        if count and self._began is not None:
            idle = max(0.0, 1 - count * train_seconds / (now - self._began))
            self._num_steps, self._began = self._settles, now
        before = self._before
        if before is not None and idle is not None:
            self._before = None
            if idle > before[1] + WORSE:
                self._choices = [one for one in self._choices if one >= before[0]]
                self._move(
                    before[0], f"with {self.publish_every} the learner waits {idle:.0%} of the time: it was no help"
                )
                return True
        waits, fewer = forecast.get(self.publish_every), [one for one in self.choices()[1:] if one in forecast]
        if waits is None or not fewer or (idle is not None and idle < LEAST_GAIN):
            return False
        least = min(forecast[one] for one in fewer)
        if waits - least < LEAST_GAIN:
            return False
        best = next(one for one in fewer if forecast[one] <= least + LEAST_GAIN / 2)
        self._before = self.publish_every, waits if idle is None else max(idle, waits)
        self._move(best, f"the learner would wait {waits:.0%} of the time, and {forecast[best]:.0%} with {best}")
        return True

    def _move(self, publish_every: int, why: str) -> None:
        self.publish_every, self._why = publish_every, why
        self.interrupted()
