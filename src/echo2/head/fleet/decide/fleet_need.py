"""Compares the fleet with the need: the rate needed, the current rate, and the predicted wait of the learner.

These are the numbers of `echo2 status` and of the metrics. They come from the same model that plans a run (`formulas`,
`forecast`) and that chooses workers (`standby`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo2.core.errors import UserError
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.activation import num_short
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.decide.forecast import WorkerKind, forecast
from echo2.head.fleet.decide.formulas import window_limit
from echo2.head.fleet.decide.standby import list_candidates, live_demand, needed_rate

#: Steps of a forecast: enough to forget the start, few enough to cost the head only milliseconds.
STEPS = 40


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
        """What is missing, as a sentence for the operator."""
        if self.needed_rate is None:
            return "how many workers are needed is known after the first step"
        if self.reward_seconds is not None:
            each = f"{self.reward_seconds:.3g} s a group"
            return f"the learner waits for your reward function ({each}): more workers would not help"
        if self.short is None:
            return self.limit or "the rate of these workers is not known yet"
        workers = f"{abs(self.short)} worker{'s' if abs(self.short) > 1 else ''}"
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


def predicted_idle_ratio(state: PlannerState, now: float) -> float | None:
    """Return the predicted share of time that the learner waits with these workers, in the steady state. None while it
    is unknown, or if the learner waits for rewards, which workers do not compute.
    """
    demand = live_demand(state) if state.measurements.bottleneck() != "rewards" else None
    rates = {one.worker_id: one.rate for one in list_candidates(state, now) if one.is_active and one.rate > 0}
    workers = [worker for worker in state.fleet.active() if worker.worker_id in rates]
    if demand is None or not workers:
        return None
    most = state.options.groups_per_batch
    paces = [
        WorkerKind(rates[worker.worker_id], 1, min(state.fleet.at_once(worker), most), _spread(worker))
        for worker in workers
    ]
    return forecast(demand, paces, max(STEPS, 4 * demand.publish_every)).steady_idle_ratio


def _spread(worker: Worker) -> float:
    """Estimate the standard deviation of the logarithm of the worker's durations from its rate and variance."""
    return min(1.0, math.sqrt(worker.speed.variance) / worker.speed.rate) if worker.speed.rate > 0 else 0.0
