"""Decides which workers are active and which on standby: the capacity model and the activation loop, fed with
measurements.

A worker on standby is connected, gets no leases and need not fetch snapshots. Before the first trained step nothing is
known, and all workers are active. Machines on offer are rented when the connected workers are too few, and returned
when they have not been needed for a while.

`fleet_need` compares the fleet with the need, for `echo2 status` and the metrics, by the same model that plans a run
(`formulas`, `forecast`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from echo2.core.errors import UserError, counted
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.activation import RENT_SECONDS, RETURN_SECONDS, Candidate, Rentals, aim, choose, num_short
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.decide.forecast import WorkerKind, forecast
from echo2.head.fleet.decide.formulas import GAMMA, Demand, mu_target, window_limit
from echo2.head.fleet.decide.workers import announce_newest, stand_by
from echo2.head.strangers.decide import strangers

#: Seconds that the learner waits without any worker before the first machine is rented.
ALONE_SECONDS = 60.0
#: A target above this multiple of R / T counts as infinite: the staleness window is too narrow, and renting machines
#: does not widen it.
MOST_FACTOR = 10.0
#: Rollouts per second to rent when no worker is connected and nothing is known: selects the cheapest machine.
LEAST_RATE = 1e-9
#: Steps of a forecast: enough to forget the start, few enough to cost the head only milliseconds.
STEPS = 40
#: By so much the learner's idle ratio may be larger with fewer machines than the needed rate asks for.
LITTLE_MORE = 0.02


def recover(state: PlannerState, machines: Iterable[ev.RecoveredMachine], now: float) -> None:
    """Restore machines that an earlier head rented. A machine without a worker is still waited for. A known worker
    counts as away until it returns; if it does not, its machine is returned.
    """
    if state.rentals is None:
        return
    for machine in machines:
        if machine.worker_id:
            state.rentals.lose(machine.worker_id, machine.offer, now)
        else:
            state.rentals.rent(machine.offer, now)


def look(state: PlannerState, now: float) -> None:
    """Activate, release, rent and return machines, if a review of the fleet is due."""
    rentals, training = state.rentals, state.training
    if rentals is None or now < rentals.next_at or not (len(state.fleet) or state.options.offers):
        return
    rentals.reviewed(now)
    if state.options.offers:
        _return_unneeded(state, rentals, now)
    if not len(state.fleet):
        since = training.wanted_since
        if training.wanted_step is not None and since is not None and now - since >= ALONE_SECONDS:
            _rent(state, rentals, rentals.needed_rate or LEAST_RATE, now)
        return
    needed, candidates = needed_rate(state), list_candidates(state, now)
    if needed is None or not any(one.rate > 0 for one in candidates):
        return
    if rentals.need(needed):
        _release_unneeded(state, candidates, needed, now)
        candidates = list_candidates(state, now)
    change = rentals.change(needed, candidates, now)
    for worker_id in change.activate:
        activate(state, worker_id, change.reason)
    for worker_id in change.release:
        release(state, worker_id, change.reason, now)
    if change.activate:
        announce_newest(state, "newest when the workers were activated", change.activate)
    if state.options.offers and change.short_rate > 0 and state.measurements.bottleneck() != "rewards":
        _rent(state, rentals, change.short_rate, now)


def _release_unneeded(state: PlannerState, candidates: list[Candidate], rate: float, now: float) -> None:
    """At the first measurement, switch from all workers to the cheapest sufficient set."""
    selection = choose(candidates, aim(rate))
    chosen = set(selection.worker_ids)
    for one in candidates:
        if one.is_active and one.worker_id not in chosen:
            release(
                state, one.worker_id, f"{rate:.4g} rollouts/s are needed; cheaper ones have {selection.rate:.4g}", now
            )


def live_demand(state: PlannerState, publish_every: int | None = None) -> Demand | None:
    """Return the learner's demand by measurements; None until a step is trained. `publish_every`: if not as now."""
    options, measurements = state.options, state.measurements
    train_seconds = measurements.typical_train_seconds()
    if not train_seconds:
        return None
    return Demand(
        groups_per_step=options.groups_per_step + math.ceil(statistics.mean(measurements.replaced or (0,))),
        group_size=options.group_size,
        publish_every=publish_every or state.publish_every,
        max_staleness=state.options.max_staleness,
        train_seconds=train_seconds,
        broadcast_seconds=measurements.typical_broadcast_seconds(),
        rollout_seconds=measurements.batch_seconds,
    )


def needed_rate(state: PlannerState) -> float | None:
    """Return 1.1 times the rate at which the learner never waits, in rollouts per second, or less if it hardly waits
    longer with it; None until it is known.
    """
    demand = live_demand(state)
    if demand is None:
        return None
    try:
        target = mu_target(demand)
    except UserError:
        return math.inf  # on-policy, or the broadcast cannot be hidden: every worker helps
    plain = demand.rollouts_per_step / demand.train_seconds
    if target > MOST_FACTOR * plain:
        return math.inf
    if (kind := _typical_worker(state)) is None:
        return target
    demand = replace(
        demand,
        train_seconds=_rounded(demand.train_seconds),
        broadcast_seconds=_rounded(demand.broadcast_seconds),
        rollout_seconds=0.0,
    )
    return min(target, GAMMA * kind.rate * _fewest(demand, kind, math.ceil(target / kind.rate)))


def _typical_worker(state: PlannerState) -> WorkerKind | None:
    """Return the median worker of those whose rate is measured; None: there are none."""
    rated = [worker for worker in state.fleet.active() if worker.speed.rate > 0]
    if not rated:
        return None
    rate = _rounded(statistics.median(worker.speed.rate for worker in rated))
    groups = statistics.median_low(map(state.fleet.at_once, rated))
    return WorkerKind(rate, 1, groups, round(statistics.median(map(_spread, rated)), 1))


def _rounded(value: float) -> float:
    """Return two digits of a value, so that what is computed from it is not computed again after each batch."""
    return float(f"{value:.2g}")


@lru_cache(maxsize=64)
def _fewest(demand: Demand, kind: WorkerKind, most: int) -> int:
    """Return the fewest such workers with which the learner hardly waits longer than with `most`: the formula takes
    rollouts for a fluid, and where the staleness bound is narrow it asks for a rate that gains nothing, for the learner
    then waits for the last group and not for more of them.
    """

    def idle_ratio(count: int) -> float:
        return forecast(demand, [replace(kind, count=count)], STEPS).steady_idle_ratio

    few = max(1, math.ceil(demand.rollouts_per_step / demand.train_seconds / kind.rate))
    many = max(few, most)
    allowed = idle_ratio(many) + LITTLE_MORE
    while few < many:
        middle = (few + many) // 2
        if idle_ratio(middle) <= allowed:
            many = middle
        else:
            few = middle + 1
    return many


def list_candidates(state: PlannerState, now: float) -> list[Candidate]:
    """Return all connected workers, and active ones that may return. A rate not yet measured is estimated from the
    other workers, in proportion to slots.
    """
    slot_rates = [worker.speed.rate / worker.slots for worker in state.fleet if worker.speed.rate]
    each = statistics.median(slot_rates) if slot_rates else 0.0
    return [
        Candidate(
            worker.worker_id,
            worker.speed.current(each * worker.slots, state.fleet.at_once(worker) * state.options.group_size, now),
            worker.price_usd_per_hour,
            not worker.standby,
            bool(worker.offer),
        )
        for worker in state.fleet
        if not (worker.returned or (worker.detached and worker.standby))
    ]


def activate(state: PlannerState, worker_id: str, reason: str) -> None:
    """Activate a worker on standby."""
    worker = state.fleet.get(worker_id)
    if worker is not None and worker.standby:
        state.fleet.activate(worker)
        state.emit(do.ActivateWorker, reason, worker_id=worker_id)


def release(state: PlannerState, worker_id: str, reason: str, now: float) -> None:
    """Let a worker finish its leases and then stand by, unless strangers need it."""
    worker = state.fleet.get(worker_id)
    if worker is not None and not worker.standby and not _is_last(state, worker):
        stand_by(state, worker, now)
        state.emit(do.ReleaseWorker, reason, worker_id=worker_id)


def keep_last(state: PlannerState) -> None:
    """Beside strangers, keep a machine of the owner active, and one that can check them: only such a machine can
    evaluate, and strangers are limited and checked only beside it.
    """
    if state.rentals is None or len(state.fleet) == len(state.fleet.own()) or any(strangers.checkers(state)):
        return  # usually by the first machine: this runs at every event
    for pool in _kinds(state):
        if pool and all(one.standby for one in pool):
            chosen = max(pool, key=lambda one: (one.can_check(), -one.price_usd_per_hour)).worker_id
            activate(state, chosen, "strangers work only beside a machine of the owner")
            announce_newest(state, "newest when the worker was activated", (chosen,))


def _is_last(state: PlannerState, worker: Worker) -> bool:
    return len(state.fleet) > len(state.fleet.own()) and any(
        [one for one in pool if not (one.standby or one.detached)] == [worker] for pool in _kinds(state)
    )


def _kinds(state: PlannerState) -> tuple[list[Worker], list[Worker]]:
    """Return the owner's machines that are connected and stay, and those of them that can check strangers."""
    own = [one for one in state.fleet.own() if not (one.returned or (one.detached and one.standby))]
    return own, [one for one in own if one.can_check()]


def _rent(state: PlannerState, rentals: Rentals, short_rate: float, now: float) -> None:
    """Rent the cheapest machines on offer that close the gap, less those already rented but not joined. If no rate is
    enough, rents one machine if there are no workers, and otherwise none.
    """
    if short_rate == math.inf and len(state.fleet):
        return
    present = [worker.offer for worker in state.fleet]
    pool, coming = [], 0.0
    for offer in state.options.offers:
        coming += offer.rate * rentals.num_coming(offer.name)
        num_left = 0 if rentals.is_skipped(offer.name, now) else offer.count - rentals.num_out(offer.name, present)
        pool += [Candidate(f"{offer.name}/{n}", offer.rate, offer.price_usd_per_hour) for n in range(num_left)]
    missing = LEAST_RATE if short_rate == math.inf else short_rate
    if missing <= coming or not pool:
        return
    for machine in choose(pool, missing - coming).worker_ids:
        name = machine.rpartition("/")[0]
        rentals.rent(name, now)
        reason = f"the connected workers are {missing:.4g} rollouts/s short" if present else "no worker is connected"
        state.emit(do.RentMachine, reason, offer=name)


def _return_unneeded(state: PlannerState, rentals: Rentals, now: float) -> None:
    for name in rentals.pop_overdue(now):
        state.emit(do.ReturnMachine, f"no worker joined within {RENT_SECONDS:.0f} s", offer=name, worker_id="")
    for worker in state.fleet:
        since = worker.standby_since
        if worker.offer and not worker.returned and since is not None and now - since >= RETURN_SECONDS:
            worker.return_machine()  # requested only once
            reason = f"it has stood by for {RETURN_SECONDS:.0f} s"
            state.emit(do.ReturnMachine, reason, offer=worker.offer, worker_id=worker.worker_id)
    for worker_id, offer in rentals.pop_lost(now):
        reason = f"its worker has been lost for {RETURN_SECONDS:.0f} s"
        state.emit(do.ReturnMachine, reason, offer=offer, worker_id=worker_id)


@dataclass(frozen=True, slots=True)
class FleetNeed:
    """Rates in rollouts per second. `needed_rate`: None until a step is trained, infinite if no rate is enough.
    `rate_sd`: standard deviation of the active rate, from the changes of each worker's rate between its batches.
    `short`: workers missing; if negative, workers that could be released; None if unknown. `reward_seconds`: scoring
    time of a group, if the learner waits for rewards more than for anything else; otherwise None. `limit`: why the
    staleness bound or the broadcast, and not the number of workers, is the limit; empty if it is not.
    """

    active: int
    standby: int
    rate: float
    rate_sd: float
    needed_rate: float | None
    short: int | None
    reward_seconds: float | None = None
    limit: str = ""

    @property
    def text(self) -> str:
        """The missing rate, as a sentence for the operator."""
        if self.needed_rate is None:
            return "how many workers are needed is known after the first step"
        if self.reward_seconds is not None:
            each = f"{self.reward_seconds:.3g} s a group"
            return f"the learner waits for rewards ({each}): more workers would not help"
        if self.short is None:
            return self.limit or "the rate of these workers is not known yet"
        workers = counted(abs(self.short), "worker")
        if self.short > 0 and self.limit:
            return f"{self.limit}; without that, {workers} short"
        return f"{workers} {'short' if self.short > 0 else 'over'}" if self.short else "enough workers"


def fleet_need(state: PlannerState, now: float) -> FleetNeed:
    """Compare the need with the fleet. Visits every worker."""
    active = [one for one in list_candidates(state, now) if one.is_active]
    needed = needed_rate(state)
    workers = state.fleet.active()
    rated = needed is not None and needed < math.inf and any(one.rate > 0 for one in active)
    return FleetNeed(
        active=len(workers),
        standby=state.fleet.num_attending - len(workers),
        rate=math.fsum(one.rate for one in active),
        rate_sd=math.sqrt(math.fsum(worker.speed.variance for worker in workers)),
        needed_rate=needed,
        short=num_short(active, needed) if rated and needed is not None else None,
        reward_seconds=state.measurements.rewards.mean if state.measurements.bottleneck() == "rewards" else None,
        limit=_limit(state),
    )


def _limit(state: PlannerState) -> str:
    """Return what the capacity model names as the limit, in the words of `echo2 plan`; empty if more workers help."""
    demand = live_demand(state)
    try:
        return window_limit(demand) if demand is not None else ""
    except UserError as error:
        return str(error).removesuffix(".")


def predicted_idle_ratio(state: PlannerState, now: float, publish_every: int | None = None) -> float | None:
    """Return the predicted share of time that the learner waits with these workers, in the steady state. None while it
    is unknown, or if the learner waits for rewards, which workers do not compute. `publish_every`: if not as now.
    Workers that were too slow are left out: no step waits for them, since others sample their groups again.
    """
    demand = live_demand(state, publish_every) if state.measurements.bottleneck() != "rewards" else None
    rates = {one.worker_id: one.rate for one in list_candidates(state, now) if one.is_active and one.rate > 0}
    workers = [worker for worker in state.fleet.active() if worker.worker_id in rates]
    workers = [worker for worker in workers if not state.fleet.is_on_trial(worker)] or workers
    if demand is None or not workers:
        return None
    paces = [WorkerKind(rates[worker.worker_id], 1, state.fleet.at_once(worker), _spread(worker)) for worker in workers]
    return forecast(demand, paces, max(STEPS, 4 * demand.publish_every)).steady_idle_ratio


def _spread(worker: Worker) -> float:
    """Estimate the standard deviation of the logarithm of the worker's durations from its rate and variance."""
    return min(1.0, math.sqrt(worker.speed.variance) / worker.speed.rate) if worker.speed.rate > 0 else 0.0
