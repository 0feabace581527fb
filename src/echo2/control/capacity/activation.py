"""Chooses which workers to pay for: a covering knapsack (ECHO-2 equation 3), and the loop that updates the choice.

    min  sum of prices of the chosen   such that   sum of their rates >= target

`choose` tries every worker as the last one, drops who is not needed, and then searches with bounds, for so many nodes.
(The paper's rule, cheapest per rollout first, is in benchmarks/activation.py.)
`ActivationLoop` adds what a live fleet needs: patience, and a band in which nothing happens.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echo2.errors import UserError

#: Nodes the search may visit before it settles for the best found.
MAX_NODES = 5000
#: How often a cheaper set is looked for while it must last to count.
LOOKS = 4
#: Nothing happens between the rate that is needed and this share more.
BAND = 0.15
#: Seconds that a deficit lasts before it counts, and a surplus. A worker that is lost is replaced at once.
DEFICIT_SECONDS, SURPLUS_SECONDS = 30.0, 120.0
#: A machine takes the place of another only if it is cheaper by this share, and a set only if the whole bill is; then
#: not again for so many seconds.
LEAST_SAVING, EXCHANGE_SECONDS = 0.1, 1200.0
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that works or could: `rate` in rewarded rollouts per second."""

    worker_id: str
    rate: float
    price_usd_per_hour: float
    is_active: bool = False

    @property
    def usd_per_rollout(self) -> float:
        """Dollars that it costs for each rollout; infinite where it makes none."""
        return self.price_usd_per_hour / self.rate / 3600 if self.rate > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen machines, in order of activation. `missing_rate` > 0: all of the pool is here, and too slow."""

    worker_ids: tuple[str, ...]
    rate: float
    usd_per_hour: float
    missing_rate: float = 0.0


def by_unit_cost(pool: Sequence[Candidate]) -> list[Candidate]:
    """Cheapest per rollout first; ties by the larger rate, then by name. Machines that do nothing are left out."""
    able = [one for one in pool if one.rate > 0]
    return sorted(able, key=lambda one: (one.price_usd_per_hour / one.rate, -one.rate, one.worker_id))


def choose(pool: Sequence[Candidate], target_rate: float, max_nodes: int = MAX_NODES) -> Selection:
    """A set that reaches the target, as cheap as can be found. The same pool gives the same set.

    Raises:
        UserError: the pool is empty, or a price is negative.
    """
    if not pool:
        raise UserError("There are no machines to choose from: the list of offers is empty.")
    for one in pool:
        if one.price_usd_per_hour < 0 or not math.isfinite(one.price_usd_per_hour):
            raise UserError(f"{one.worker_id}: price_usd_per_hour = {one.price_usd_per_hour} must not be negative.")
    items = by_unit_cost(pool)
    if not reaches(sum(one.rate for one in items), target_rate):
        return _selection(items, target_rate)
    return _search(items, _trim(_close_gap(items, target_rate), target_rate), target_rate, max_nodes)


def reaches(rate: float, target_rate: float) -> bool:
    """Whether a rate counts as the target, up to rounding. Rollouts per second."""
    return rate >= target_rate * (1 - _SLACK)


def _selection(chosen: Sequence[Candidate], target_rate: float) -> Selection:
    rate = math.fsum(one.rate for one in chosen)
    missing = 0.0 if reaches(rate, target_rate) else target_rate - rate
    usd = math.fsum(one.price_usd_per_hour for one in chosen)
    return Selection(tuple(one.worker_id for one in chosen), rate, usd, missing)


def _usd(chosen: Sequence[Candidate]) -> float:
    return math.fsum(one.price_usd_per_hour for one in chosen)


def _close_gap(items: Sequence[Candidate], target_rate: float) -> list[Candidate]:
    """Cheapest per rollout first, but a machine that would reach the target is only noted as one way to end, and the
    others go on without it; the cheapest end counts. At most twice the optimum (Gens and Levner 1979); greedy alone can
    cost any multiple of it.
    """
    begun: list[Candidate] = []
    rate, usd, best_usd, best = 0.0, 0.0, math.inf, (0, -1)
    for at, one in enumerate(items):
        if not reaches(rate + one.rate, target_rate):
            begun.append(one)
            rate += one.rate
            usd += one.price_usd_per_hour
        elif usd + one.price_usd_per_hour < best_usd:
            best_usd, best = usd + one.price_usd_per_hour, (len(begun), at)
    return [*begun[: best[0]], items[best[1]]] if items else []


def _trim(chosen: Sequence[Candidate], target_rate: float) -> list[Candidate]:
    """Without those whom the others do not need, dearest first."""
    rate, dropped = sum(one.rate for one in chosen), set()
    for one in sorted(chosen, key=lambda one: (-one.price_usd_per_hour, one.rate, one.worker_id)):
        if reaches(rate - one.rate, target_rate):
            rate -= one.rate
            dropped.add(one.worker_id)
    return [one for one in chosen if one.worker_id not in dropped]


def _search(items: list[Candidate], found: list[Candidate], target_rate: float, max_nodes: int) -> Selection:
    """Depth first over equal machines at once, most of the cheapest first, cut off where even a fraction of a machine
    at the next best price per rollout costs as much as what is found. For offers, that is a handful of nodes.
    """
    kinds = [list(group) for _, group in itertools.groupby(items, key=lambda one: (one.rate, one.price_usd_per_hour))]
    sums = _Sums(kinds)
    best_usd, best, nodes = _usd(found), None, 0
    stack: list[tuple[int, float, float, _Counts]] = [(0, target_rate, 0.0, None)]
    while stack and nodes < max_nodes:
        at, gap, usd, counts = stack.pop()
        nodes += 1
        if gap <= target_rate * _SLACK:
            if usd < best_usd - _SLACK:
                best_usd, best = usd, counts
            continue
        if at == len(kinds) or usd + sums.least_usd(at, gap) >= best_usd - _SLACK:
            continue
        one = kinds[at][0]
        most = min(len(kinds[at]), math.ceil(gap / one.rate - _SLACK))
        stack.extend(
            (at + 1, gap - count * one.rate, usd + count * one.price_usd_per_hour, (counts, count))
            for count in range(most + 1)
        )
    chosen = found
    if best is not None:
        chosen = [one for group, count in zip(kinds, _listed(best), strict=False) for one in group[:count]]
    return _selection(chosen, target_rate)


#: How many of the last kind, and before it those of the kinds before: nodes share what they have in common.
_Counts = tuple[Any, int] | None


def _listed(counts: _Counts) -> list[int]:
    found = []
    while counts is not None:
        counts, count = counts
        found.append(count)
    return found[::-1]


class _Sums:
    """Rates and prices of the first so many kinds, cheapest per rollout first."""

    def __init__(self, kinds: list[list[Candidate]]) -> None:
        self.rates, self.prices = [0.0], [0.0]
        for group in kinds:
            self.rates.append(self.rates[-1] + len(group) * group[0].rate)
            self.prices.append(self.prices[-1] + len(group) * group[0].price_usd_per_hour)

    def least_usd(self, at: int, gap: float) -> float:
        """What closing the gap from kind `at` on costs at least, were machines divisible; infinity: they can't."""
        reach = self.rates[at] + gap
        end = bisect.bisect_left(self.rates, reach * (1 - _SLACK), lo=at)
        if end == len(self.rates):
            return math.inf
        if end == at:
            return 0.0
        share = (reach - self.rates[end - 1]) / (self.rates[end] - self.rates[end - 1])
        last = self.prices[end] - self.prices[end - 1]
        return self.prices[end - 1] - self.prices[at] + min(1.0, share) * last


def num_short(active: Sequence[Candidate], needed_rate: float) -> int:
    """How many more workers like these are missing for the rate; negative: how many could be released."""
    able = by_unit_cost(active)
    rate = math.fsum(one.rate for one in able)
    if not reaches(rate, needed_rate):
        return math.ceil((needed_rate - rate) * len(able) / rate - 1e-9) if able else 1
    over = 0
    for one in reversed(able):
        if reaches(rate - one.rate, needed_rate):
            rate, over = rate - one.rate, over + 1
    return -over


# ---- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """What to do now. `short_rate`: what is missing although every worker is active: rent, if there are offers."""

    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    reason: str = ""
    short_rate: float = 0.0


def aim(needed_rate: float) -> float:
    """The middle of the band, in rollouts a second."""
    return needed_rate * (1 + BAND / 2)


@dataclass(slots=True)
class ActivationLoop:
    """Closed loop over `choose`. Pure: time comes in. `update` is to be called every few seconds, and when a worker
    was lost. What can wait, releases and exchanges, goes by each worker's mean rate over `SURPLUS_SECONDS`; a deficit
    by the rates of the moment.
    """

    _deficit_since: float | None = None
    _surplus_since: float | None = None
    _dear_since: float | None = None
    _look_at: float = -math.inf
    _active: frozenset[str] = frozenset()
    _leaving: frozenset[str] = frozenset()
    _means: dict[str, tuple[float, float]] = field(default_factory=dict)
    _updated_at: float | None = None

    def update(self, now: float, needed_rate: float, workers: Sequence[Candidate]) -> Change:
        """What to change, given the rate that is needed and everybody who attends, with the rates of the moment."""
        active = [one for one in workers if one.is_active]
        smooth = self._smooth(now, workers)
        calm = [one for one in smooth if one.is_active]
        lost = not self._active <= {one.worker_id for one in active}
        rate, mean_rate = _rate(active), _rate(calm)
        deficit = not reaches(rate, needed_rate)
        spare = [] if deficit else self._spare(calm, mean_rate, needed_rate)
        self._deficit_since = _since(self._deficit_since, deficit, now)
        self._surplus_since = _since(self._surplus_since, bool(spare), now)
        change = Change()
        if deficit and (lost or not active or _lasts(self._deficit_since, now, DEFICIT_SECONDS)):
            change = self._add(rate, needed_rate, smooth)
        elif spare and _lasts(self._surplus_since, now, SURPLUS_SECONDS):
            self._surplus_since = now
            released = self._some_of(spare, mean_rate, needed_rate)
            change = Change(release=released, reason=_reason(mean_rate, needed_rate))
        elif not deficit and not spare:
            change = self._cheaper(now, calm, needed_rate, smooth)
        ids = {one.worker_id for one in active} | set(change.activate)
        self._active = frozenset(ids - set(change.release))
        self._leaving &= self._active
        return change

    def _smooth(self, now: float, workers: Sequence[Candidate]) -> list[Candidate]:
        """The same workers with their mean rates: of all that was seen of each, older values fading."""
        seconds = 0.0 if self._updated_at is None else now - self._updated_at
        self._updated_at = now
        kept = math.exp(-seconds / SURPLUS_SECONDS)
        means: dict[str, tuple[float, float]] = {}
        for one in workers:
            weight, mean = self._means.get(one.worker_id, (0.0, 0.0))
            weight = weight * kept + 1.0
            means[one.worker_id] = (weight, mean + (one.rate - mean) / weight)
        self._means = means
        return [replace(one, rate=means[one.worker_id][1] if one.rate > 0 else 0.0) for one in workers]

    def _floor(self, one: Candidate, needed_rate: float) -> float:
        """What the others must do for this one to go."""
        top = needed_rate * (1 + BAND)
        return aim(needed_rate) if one.worker_id in self._leaving else top

    def _spare(self, active: Sequence[Candidate], rate: float, needed_rate: float) -> list[Candidate]:
        """Active workers that could go: those that a cheaper set took the place of, then the dearest per rollout."""
        spare = [one for one in active if reaches(rate - one.rate, self._floor(one, needed_rate))]
        spare.sort(key=lambda one: (one.worker_id not in self._leaving, -one.usd_per_rollout, one.rate, one.worker_id))
        return spare

    def _some_of(self, spare: Sequence[Candidate], rate: float, needed_rate: float) -> tuple[str, ...]:
        """The first, and more of them up to half of the surplus: what is left shrinks fast and is never overshot."""
        released, left = [spare[0].worker_id], rate - spare[0].rate
        half = rate - (rate - aim(needed_rate)) / 2
        for one in spare[1:]:
            if left - one.rate >= half and reaches(left - one.rate, self._floor(one, needed_rate)):
                released.append(one.worker_id)
                left -= one.rate
        return tuple(released)

    def _add(self, rate: float, needed_rate: float, workers: Sequence[Candidate]) -> Change:
        self._deficit_since, self._leaving = None, frozenset()
        standby = [one for one in workers if not one.is_active and one.rate > 0]
        gap = aim(needed_rate) - rate
        if not standby:
            return Change(reason=_reason(rate, needed_rate), short_rate=gap)
        found = choose(standby, gap)
        return Change(activate=found.worker_ids, reason=_reason(rate, needed_rate), short_rate=found.missing_rate)

    def _cheaper(
        self, now: float, active: Sequence[Candidate], needed_rate: float, workers: Sequence[Candidate]
    ) -> Change:
        """Activate what a clearly cheaper set has more; those it has not are released afterwards."""
        if now < self._look_at:
            return Change()
        self._look_at = now + SURPLUS_SECONDS / LOOKS
        handicap, bill = 1 / (1 - LEAST_SAVING), _usd(active)
        pool = [
            one if one.is_active else replace(one, price_usd_per_hour=one.price_usd_per_hour * handicap)
            for one in workers
        ]
        found = choose(pool, aim(needed_rate))
        chosen = set(found.worker_ids)
        usd = _usd([one for one in workers if one.worker_id in chosen])
        pays = not found.missing_rate and usd < bill * (1 - LEAST_SAVING)
        self._dear_since = _since(self._dear_since, pays, now)
        if not _lasts(self._dear_since, now, SURPLUS_SECONDS):
            return Change()
        self._dear_since, self._look_at = None, now + EXCHANGE_SECONDS
        there = {one.worker_id for one in active}
        self._leaving = frozenset(there - chosen)
        more = tuple(worker_id for worker_id in found.worker_ids if worker_id not in there)
        return Change(activate=more, reason=f"${usd:.4g} an hour do what ${bill:.4g} do now")


def _rate(workers: Sequence[Candidate]) -> float:
    return math.fsum(one.rate for one in workers)


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return (now if since is None else since) if holds else None


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds


def _reason(rate: float, needed_rate: float) -> str:
    return f"{rate:.4g} rollouts/s active, {needed_rate:.4g} needed"
