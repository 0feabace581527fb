"""Chooses which workers to pay for: a covering knapsack (ECHO-2 equation 3), and the loop that updates the choice.

    min  sum of prices of the chosen   such that   sum of their rates >= target

`choose` tries every worker as the last one, drops workers that are not needed, and then runs a branch-and-bound search
with a node limit. (docs/capacity.md compares it with the paper's rule, cheapest per rollout first.)
`ActivationLoop` adds what a live fleet needs: delays before a change, and a band of rates in which nothing changes.
`Rentals` are the machines that the run rents; `standby` decides on them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echo2.core.errors import UserError
from echo2.core.types import Backoff

#: Nodes the search may visit before it returns the best set found so far.
MAX_NODES = 5000
#: Searches for a cheaper set per SURPLUS_SECONDS, the time for which the set must stay cheaper.
LOOKS = 4
#: Nothing changes between the needed rate and this share above it.
BAND = 0.15
#: Seconds that a deficit and a surplus must last before the loop reacts. A lost worker is replaced at once. A deficit
#: above BAND is no noise: the larger it is, the less time it must last.
DEFICIT_SECONDS, SURPLUS_SECONDS = 30.0, 120.0
#: A machine replaces another only if it is cheaper by this share, and a set another only if the whole bill is. After an
#: exchange there is none for EXCHANGE_SECONDS.
LEAST_SAVING, EXCHANGE_SECONDS = 0.1, 1200.0
_SLACK = 1e-9
#: A linked list, last kind first: (counts of the earlier kinds, count of this kind). Nodes share common prefixes.
_Counts = tuple[Any, int] | None
#: Seconds between two reviews of the fleet: the cost of each grows with the fleet.
LOOK_SECONDS = 5.0
#: Seconds after which a rented machine that has not joined is given up.
RENT_SECONDS = 900.0
#: Seconds that a rented machine is on standby, or without its worker, before it is returned.
RETURN_SECONDS = 300.0
#: Seconds between two tries of an offer whose hook fails: the first value, doubled at each failure up to the second.
RETRY_SECONDS = Backoff(15.0, 900.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that is active or could be. `rate`: rewarded rollouts per second. `is_rented`: by this run, which can
    return it.
    """

    worker_id: str
    rate: float
    price_usd_per_hour: float
    is_active: bool = False
    is_rented: bool = False

    @property
    def usd_per_rollout(self) -> float:
        """Cost of one rollout in dollars; infinite if the rate is 0."""
        return self.price_usd_per_hour / self.rate / 3600 if self.rate > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Kind:
    """`count` equal machines."""

    rate: float
    price_usd_per_hour: float
    count: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen machines, in order of activation. `missing_rate` > 0: even the whole pool is too slow."""

    worker_ids: tuple[str, ...]
    rate: float
    usd_per_hour: float
    missing_rate: float = 0.0


def by_unit_cost(pool: Sequence[Candidate]) -> list[Candidate]:
    """Sort machines, cheapest per rollout first; ties by the larger rate, then by name. Omit those with rate 0."""
    able = [one for one in pool if one.rate > 0]
    return sorted(able, key=lambda one: (one.price_usd_per_hour / one.rate, -one.rate, one.worker_id))


def choose(pool: Sequence[Candidate], target_rate: float, max_nodes: int = MAX_NODES) -> Selection:
    """Return the cheapest set found that reaches the target. The same pool gives the same set.

    Raises:
        UserError: the pool is empty, or a price is negative.
    """
    if not pool:
        raise UserError("There are no machines to choose from: the list of offers is empty.")
    for one in pool:
        if one.price_usd_per_hour < 0 or not math.isfinite(one.price_usd_per_hour):
            raise UserError(f"{one.worker_id}: price_usd_per_hour = {one.price_usd_per_hour} must not be negative.")
    items = by_unit_cost(pool)
    groups = [list(group) for _, group in itertools.groupby(items, key=lambda one: (one.rate, one.price_usd_per_hour))]
    kinds = [Kind(group[0].rate, group[0].price_usd_per_hour, len(group)) for group in groups]
    counts = choose_counts(kinds, target_rate, max_nodes)
    chosen = [one for group, count in zip(groups, counts, strict=True) for one in group[:count]]
    return _selection(chosen, target_rate)


def choose_counts(kinds: Sequence[Kind], target_rate: float, max_nodes: int = MAX_NODES) -> list[int]:
    """Return how many of each kind make the cheapest set found that reaches the target; all, if these are too slow.
    `kinds`: cheapest per rollout first.
    """
    if not reaches(sum(one.count * one.rate for one in kinds), target_rate):
        return [one.count for one in kinds]
    return _search(kinds, _trim(kinds, _close_gap(kinds, target_rate), target_rate), target_rate, max_nodes)


def reaches(rate: float, target_rate: float) -> bool:
    """Return whether a rate reaches the target, up to rounding. Rollouts per second."""
    return rate >= target_rate * (1 - _SLACK)


def _selection(chosen: Sequence[Candidate], target_rate: float) -> Selection:
    rate = math.fsum(one.rate for one in chosen)
    missing = 0.0 if reaches(rate, target_rate) else target_rate - rate
    usd = math.fsum(one.price_usd_per_hour for one in chosen)
    return Selection(tuple(one.worker_id for one in chosen), rate, usd, missing)


def _usd(chosen: Sequence[Candidate]) -> float:
    return math.fsum(one.price_usd_per_hour for one in chosen)


def _close_gap(kinds: Sequence[Kind], target_rate: float) -> list[int]:
    """Add machines, cheapest per rollout first. A machine that would reach the target is not added, only noted as one
    possible last machine; the cheapest such ending wins. Costs at most twice the optimum (Gens and Levner 1979); greedy
    alone can cost any multiple of it.
    """
    begun, best = list[int](), [one.count for one in kinds]
    gap, usd, best_usd = target_rate * (1 - _SLACK), 0.0, math.inf
    for one in kinds:
        fitting = min(one.count, max(0, math.ceil(gap / one.rate) - 1))
        gap -= fitting * one.rate
        usd += fitting * one.price_usd_per_hour
        if fitting < one.count and usd + one.price_usd_per_hour < best_usd:
            best_usd, best = usd + one.price_usd_per_hour, [*begun, fitting + 1]
        begun.append(fitting)
    return best + [0] * (len(kinds) - len(best))


def _trim(kinds: Sequence[Kind], counts: list[int], target_rate: float) -> list[int]:
    """Drop machines that the target does not need, most expensive first."""
    needed_counts = list(counts)
    spare = sum(count * one.rate for one, count in zip(kinds, needed_counts, strict=True)) - target_rate * (1 - _SLACK)
    for at in sorted(range(len(kinds)), key=lambda at: (-kinds[at].price_usd_per_hour, kinds[at].rate)):
        dropped = min(needed_counts[at], max(0, math.floor(spare / kinds[at].rate)))
        needed_counts[at] -= dropped
        spare -= dropped * kinds[at].rate
    return needed_counts


def _search(kinds: Sequence[Kind], initial_counts: list[int], target_rate: float, max_nodes: int) -> list[int]:
    """Branch and bound, depth first. Each level decides how many of a kind of equal machines to take, the most of the
    cheapest kind first. A branch ends where its bound, with divisible machines, is no cheaper than the best set found.
    For real offers that is a handful of nodes.
    """
    sums = _Sums(kinds)
    best_usd = sum(count * one.price_usd_per_hour for one, count in zip(kinds, initial_counts, strict=True))
    best, nodes = initial_counts, 0
    stack: list[tuple[int, float, float, _Counts]] = [(0, target_rate, 0.0, None)]
    while stack and nodes < max_nodes:
        at, gap, usd, counts = stack.pop()
        nodes += 1
        if gap <= target_rate * _SLACK:
            if usd < best_usd - _SLACK:
                best_usd, best = usd, _listed(counts)
            continue
        if at == len(kinds) or usd + sums.least_usd(at, gap) >= best_usd - _SLACK:
            continue
        one, children = kinds[at], list[tuple[int, float, float, _Counts]]()
        most = min(one.count, math.ceil(gap / one.rate - _SLACK))
        for count in range(most, -1, -1):
            remaining_gap, spent = gap - count * one.rate, usd + count * one.price_usd_per_hour
            if count < most and spent + sums.least_usd(at + 1, remaining_gap) >= best_usd - _SLACK:
                break  # with still fewer of the cheapest kind, the rest costs no less
            children.append((at + 1, remaining_gap, spent, (counts, count)))
        stack.extend(reversed(children))
    return best + [0] * (len(kinds) - len(best))


def _listed(counts: _Counts) -> list[int]:
    counts_by_kind = []
    while counts is not None:
        counts, count = counts
        counts_by_kind.append(count)
    return counts_by_kind[::-1]


class _Sums:
    """Prefix sums of rates and prices over the kinds, cheapest per rollout first."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.rates, self.prices = [0.0], [0.0]
        for one in kinds:
            self.rates.append(self.rates[-1] + one.count * one.rate)
            self.prices.append(self.prices[-1] + one.count * one.price_usd_per_hour)

    def least_usd(self, at: int, gap: float) -> float:
        """Lower bound of the cost of closing the gap with kinds from `at` on, as if machines were divisible; infinite
        if they can't close it."""
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
    """Return how many more workers like these the rate needs; if negative, how many could be released."""
    able = by_unit_cost(active)
    rate = math.fsum(one.rate for one in able)
    if not reaches(rate, needed_rate):
        return math.ceil((needed_rate - rate) * len(able) / rate - 1e-9) if able else 1
    over = 0
    for one in reversed(able):
        if reaches(rate - one.rate, needed_rate):
            rate, over = rate - one.rate, over + 1
    return -over


# ---- activation loop -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """What to do now. `short_rate`: the rate still missing with all workers active; rent it if there are offers."""

    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    reason: str = ""
    short_rate: float = 0.0


def aim(needed_rate: float) -> float:
    """Return the middle of the band, in rollouts per second."""
    return needed_rate * (1 + BAND / 2)


@dataclass(slots=True)
class ActivationLoop:
    """Closed loop over `choose`. Pure: time is an argument. Call `update` every few seconds, and when a worker is lost.
    Releases and exchanges, which can wait, use each worker's mean rate over `SURPLUS_SECONDS`; a deficit uses the
    current rates.
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
        """Return what to change. `workers`: all workers of the fleet with their current rates, active or not."""
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
        patience = DEFICIT_SECONDS * min(1.0, BAND / max(BAND, 1 - rate / needed_rate)) if deficit else 0.0
        if deficit and (lost or not active or _lasts(self._deficit_since, now, patience)):
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
        """Return the same workers with their mean rates, in which older values fade exponentially."""
        seconds = 0.0 if self._updated_at is None else now - self._updated_at
        self._updated_at = now
        decay = math.exp(-seconds / SURPLUS_SECONDS)
        means: dict[str, tuple[float, float]] = {}
        for one in workers:
            weight, mean = self._means.get(one.worker_id, (0.0, 0.0))
            weight = weight * decay + 1.0
            means[one.worker_id] = (weight, mean + (one.rate - mean) / weight)
        self._means = means
        return [replace(one, rate=means[one.worker_id][1] if one.rate > 0 else 0.0) for one in workers]

    def _floor(self, one: Candidate, needed_rate: float) -> float:
        """Return the rate that the others must reach before this worker may be released."""
        top = needed_rate * (1 + BAND)
        return aim(needed_rate) if one.worker_id in self._leaving else top

    def _spare(self, active: Sequence[Candidate], rate: float, needed_rate: float) -> list[Candidate]:
        """Return active workers that could be released: those replaced by an exchange, then rented ones, for the others
        cost as much on standby, then the dearest per rollout.
        """
        spare = [one for one in active if reaches(rate - one.rate, self._floor(one, needed_rate))]
        spare.sort(
            key=lambda one: (
                one.worker_id not in self._leaving,
                not one.is_rented,
                -one.usd_per_rollout,
                one.rate,
                one.worker_id,
            )
        )
        return spare

    def _some_of(self, spare: Sequence[Candidate], rate: float, needed_rate: float) -> tuple[str, ...]:
        """Return the first worker, and more up to half of the surplus, so that it shrinks fast without overshooting."""
        released, remaining_rate = [spare[0].worker_id], rate - spare[0].rate
        half = rate - (rate - aim(needed_rate)) / 2
        for one in spare[1:]:
            if remaining_rate - one.rate >= half and reaches(remaining_rate - one.rate, self._floor(one, needed_rate)):
                released.append(one.worker_id)
                remaining_rate -= one.rate
        return tuple(released)

    def _add(self, rate: float, needed_rate: float, workers: Sequence[Candidate]) -> Change:
        self._deficit_since, self._leaving = None, frozenset()
        standby = [one for one in workers if not one.is_active and one.rate > 0]
        gap = aim(needed_rate) - rate
        if not standby:
            return Change(reason=_reason(rate, needed_rate), short_rate=gap)
        selection = choose(standby, gap)
        return Change(
            activate=selection.worker_ids, reason=_reason(rate, needed_rate), short_rate=selection.missing_rate
        )

    def _cheaper(
        self, now: float, active: Sequence[Candidate], needed_rate: float, workers: Sequence[Candidate]
    ) -> Change:
        """If a clearly cheaper set exists, activate its new workers; those outside the set are released later."""
        if now < self._look_at:
            return Change()
        self._look_at = now + SURPLUS_SECONDS / LOOKS
        handicap, bill = 1 / (1 - LEAST_SAVING), _usd(active)
        pool = [
            one if one.is_active else replace(one, price_usd_per_hour=one.price_usd_per_hour * handicap)
            for one in workers
        ]
        selection = choose(pool, aim(needed_rate))
        chosen = set(selection.worker_ids)
        usd = _usd([one for one in workers if one.worker_id in chosen])
        pays = not selection.missing_rate and usd < bill * (1 - LEAST_SAVING)
        self._dear_since = _since(self._dear_since, pays, now)
        if not _lasts(self._dear_since, now, SURPLUS_SECONDS):
            return Change()
        self._dear_since, self._look_at = None, now + EXCHANGE_SECONDS
        there = {one.worker_id for one in active}
        self._leaving = frozenset(there - chosen)
        more = tuple(worker_id for worker_id in selection.worker_ids if worker_id not in there)
        return Change(activate=more, reason=f"${usd:.4g} an hour do what ${bill:.4g} do now")


def _rate(workers: Sequence[Candidate]) -> float:
    return math.fsum(one.rate for one in workers)


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return (now if since is None else since) if holds else None


def _lasts(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since >= seconds


def _reason(rate: float, needed_rate: float) -> str:
    return f"{rate:.4g} rollouts/s active, {needed_rate:.4g} needed"


@dataclass(slots=True)
class Rentals:
    """`needed_rate`: rollouts per second, None while it is unknown, infinite if no rate is enough. By offer: when each
    machine was rented that has not joined yet; the hook's failures in a row, and until when the offer is skipped. By
    worker that is lost: the offer of its machine, and the time of the loss.
    """

    next_at: float = 0.0
    needed_rate: float | None = None
    _loop: ActivationLoop = field(default_factory=ActivationLoop)
    _rented: dict[str, list[float]] = field(default_factory=dict)
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)
    _lost: dict[str, tuple[str, float]] = field(default_factory=dict)

    def reviewed(self, now: float) -> None:
        self.next_at = now + LOOK_SECONDS

    def need(self, rate: float) -> bool:
        """Set the needed rate. Return whether it is the first one."""
        is_first, self.needed_rate = self.needed_rate is None, rate
        return is_first

    def change(self, rate: float, candidates: Sequence[Candidate], now: float) -> Change:
        """Return whom to activate and to release, with this needed rate."""
        return self._loop.update(now, rate, candidates)

    def rent(self, offer: str, now: float) -> None:
        self._rented.setdefault(offer, []).append(now)

    def join(self, worker_id: str, offer: str, is_known: bool) -> bool:
        """A worker joined. Return whether its machine was just rented. `is_known`: the worker is in the fleet."""
        was_lost = self._lost.pop(worker_id, None) is not None
        if is_known or was_lost or not (rented := self._rented.get(offer)):
            return False
        rented.pop(0)
        self._failures.pop(offer, None)
        return True

    def lose(self, worker_id: str, offer: str, now: float) -> None:
        self._lost[worker_id] = (offer, now)

    def fail(self, offer: str, now: float) -> None:
        """The offer's hook failed: skip it for a while, longer after each failure in a row."""
        if rented := self._rented.get(offer):
            rented.pop()
        num_failures = self._failures.get(offer, (0, 0.0))[0] + 1
        seconds = RETRY_SECONDS.after(num_failures)
        self._failures[offer] = (num_failures, now + seconds)

    def is_skipped(self, offer: str, now: float) -> bool:
        return now < self._failures.get(offer, (0, 0.0))[1]

    def num_coming(self, offer: str) -> int:
        """Return how many machines of this offer are rented and have not joined yet."""
        return len(self._rented.get(offer, ()))

    def num_out(self, offer: str, present: Iterable[str]) -> int:
        """Return how many machines of this offer are rented. `present`: the offer of each worker in the fleet."""
        lost = (name for name, _ in self._lost.values())
        return self.num_coming(offer) + sum(name == offer for name in (*present, *lost))

    def pop_overdue(self, now: float) -> list[str]:
        """Give up the machines that have not joined in time. Return the offer of each."""
        overdue = [name for name, at in self._rented.items() for since in at if now - since >= RENT_SECONDS]
        for name in overdue:
            del self._rented[name][0]
        return overdue

    def pop_lost(self, now: float) -> list[tuple[str, str]]:
        """Forget the workers that were lost long ago. Return (worker, offer) of each."""
        lost = self._lost.items()
        gone = [(worker_id, offer) for worker_id, (offer, since) in lost if now - since >= RETURN_SECONDS]
        for worker_id, _ in gone:
            del self._lost[worker_id]
        return gone
