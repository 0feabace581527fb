"""Finds the staleness bound S, publication period kappa and machines that keep the learner busy at the least cost.

For each (S, kappa) that the bound on staleness allows, the planner computes the needed rate
(`head/fleet/decide/formulas.py`), the cheapest machines that reach gamma times this rate
(`head/fleet/decide/activation.py`), the time of a broadcast to these machines (`head/fleet/decide/formulas.py`; a
longer broadcast may need a larger rate, so this is repeated until stable), and a forecast of the run with them
(`head/fleet/decide/forecast.py`). If the forecast shows waiting that the fluid formulas miss, the rate is raised. The
cheapest plan wins; among plans of about equal cost, the one with the freshest data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echo2.config.offers import Offer
from echo2.core.errors import UserError
from echo2.head.fleet.decide import activation, formulas
from echo2.head.fleet.decide.forecast import Prediction, WorkerKind, forecast, longest_of
from echo2.head.fleet.decide.formulas import Demand

#: Costs within this relative difference count as equal; then the plan with fresher data wins.
SAME_COST = 0.005
#: Factor between successive rates that are tried.
RATE_STEP = 1.06
#: Smallest share of the needed rate for which fleets are tried under a budget or on-policy.
FRUGAL_FACTOR = 0.1
#: If half the rate made the learner idle at most this many times as long, a higher rate does not help.
HARDLY_LESS = 1.1
#: Forecasts of a run with the same machines, each with its own seed.
WALKS = 3
_MAX_TRIES = 50


class NoPlanError(UserError):
    """These inputs are valid, and have no plan; `planning/remedies.py` finds others that have one. `missing`: the
    shortfall in rollouts per second, if that is why. Where a budget is: `usd`, the price of the cheapest plan, and
    `steps`, as many as the budget pays for.
    """

    missing, usd, steps = 0.0, 0.0, 0
    inputs: PlanInputs | None = None


@dataclass(frozen=True, slots=True)
class BroadcastInputs:
    """Size and speed of a publication. `seconds`: measured time of transfer and reload, used instead of the formulas;
    `at_least_seconds`: measured in another run, a lower bound here. `delta_bytes`: size of one step's delta.
    """

    full_bytes: float = 0.0
    delta_bytes: float | None = None
    head_up_bps: float = 1e9
    reload_seconds: float = 0.0
    seconds: float | None = None
    at_least_seconds: float = 0.0

    def num_bytes(self, publish_every: int) -> float:
        """Return the bytes of a publication: kappa deltas of one step at most, and never more than a full snapshot."""
        full = self.full_bytes
        return full if self.delta_bytes is None else min(full, self.delta_bytes * publish_every)

    def seconds_to(self, links: Sequence[formulas.Links], publish_every: int) -> float:
        """Return T_bcast for workers behind these links."""
        if self.seconds is not None:
            return self.seconds
        travels = formulas.transfer_seconds(self.num_bytes(publish_every), links, self.head_up_bps)
        return max(self.at_least_seconds, travels + self.reload_seconds)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Inputs of a plan. `publish_every`: None lets the planner choose. `max_idle`: largest share of its time that the
    learner may wait for workers. `train_seconds`: from step to step; `waits_for_rewards`: share of that time in which
    the learner waits for reward functions, which more machines do not change.
    """

    groups_per_step: int
    group_size: int
    steps: int
    max_staleness: int
    train_seconds: float
    offers: tuple[Offer, ...]
    broadcast: BroadcastInputs = field(default_factory=BroadcastInputs)
    learner_usd_per_hour: float = 0.0
    groups_per_batch: int = 8
    publish_every: int | None = None
    generate_during_broadcast: bool = True
    gamma: float = formulas.GAMMA
    max_idle: float = 0.02
    budget_usd: float | None = None
    waits_for_rewards: float = 0.0

    def demand(self, max_staleness: int, publish_every: int, broadcast_seconds: float) -> Demand:
        """Return the learner's demand on the workers with this S, kappa and T_bcast (seconds)."""
        return Demand(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            publish_every=publish_every,
            max_staleness=max_staleness,
            train_seconds=self.train_seconds,
            broadcast_seconds=broadcast_seconds,
            generate_during_broadcast=self.generate_during_broadcast,
            reload_seconds=self.broadcast.reload_seconds,
        )

    def offer(self, name: str) -> Offer:
        """Return the offer of that name."""
        return next(offer for offer in self.offers if offer.name == name)

    def batch(self, offer: Offer) -> int:
        """Return the number of groups that a machine of this offer samples at once."""
        return offer.groups_per_batch or self.groups_per_batch

    def broadcast_seconds(self, machines: Mapping[str, int], publish_every: int) -> float:
        """Return T_bcast for these machines, given as a number by offer."""
        links = [
            formulas.Links(self.offer(name).up_mbps * 1e6, self.offer(name).down_mbps * 1e6, count)
            for name, count in machines.items()
        ]
        return self.broadcast.seconds_to(links, publish_every)

    def least_broadcast_seconds(self, publish_every: int) -> float:
        """Return T_bcast for a single machine, of the offer with the fastest broadcast."""
        return min(self.broadcast_seconds({offer.name: 1}, publish_every) for offer in self.offers)

    def usd_per_step(self, workers_usd_per_hour: float, step_seconds: float) -> float:
        """Return the cost of a step: learner and workers."""
        return (self.learner_usd_per_hour + workers_usd_per_hour) * step_seconds / 3600

    def candidates(self) -> list[activation.Candidate]:
        """Return every machine on offer."""
        return [
            activation.Candidate(f"{offer.name}#{number}", offer.effective_rate, offer.effective_usd_per_hour)
            for offer in self.offers
            for number in range(offer.count)
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """`machines`: number by offer. `needed_rate`: without the safety factor; below it the learner waits. `binds`: what
    limits the pace of the run; `fleet_set_by`: what determines the number of machines. `floor_usd_per_step`: cost of
    the learner alone. `auto_publish_every`: value of "auto" with this S and T_bcast; None if no value is possible.
    """

    machines: dict[str, int]
    max_staleness: int
    publish_every: int
    auto_publish_every: int | None
    broadcast_seconds: float
    broadcast_bytes: float
    needed_rate: float
    rate: float
    prediction: Prediction
    usd_per_hour: float
    usd_per_step: float
    usd: float
    floor_usd_per_step: float
    binds: str
    fleet_set_by: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `--json`."""
        plain = asdict(self)
        plain["prediction"]["mean_staleness"] = self.prediction.mean_staleness
        plain["prediction"]["max_staleness"] = self.prediction.max_staleness
        return plain


def make_plan(inputs: PlanInputs) -> Plan:
    """Return the cheapest plan that keeps the learner busy.

    Raises:
        NoPlanError: there is none; the message has the missing number.
        UserError: an input is wrong.
    """
    try:
        return _make_plan(inputs)
    except NoPlanError as error:
        error.inputs = inputs
        raise


def _make_plan(inputs: PlanInputs) -> Plan:
    _check(inputs)
    pool = inputs.candidates()
    best = _frugal(inputs, pool, None) if inputs.max_staleness == 0 else _search(inputs, pool)
    if inputs.budget_usd is None or best.usd <= inputs.budget_usd:
        return best
    frugal = _frugal(inputs, pool, best)
    if frugal.usd > inputs.budget_usd:
        start_usd = frugal.usd - inputs.steps * frugal.usd_per_step
        error = NoPlanError(
            f"A budget of ${_usd(inputs.budget_usd)} is too small: the cheapest plan costs ${_usd(frugal.usd)} for "
            f"{inputs.steps} steps, ${_usd(frugal.usd - inputs.budget_usd)} more; keeping the learner busy costs "
            f"${_usd(best.usd)}."
        )
        error.usd = frugal.usd
        error.steps = max(0, math.floor((inputs.budget_usd - start_usd) / frugal.usd_per_step - 1e-9))
        raise error
    return replace(frugal, binds="budget")


def _usd(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def may_have_plan(inputs: PlanInputs) -> bool:
    """Whether these inputs could have a plan with the whole staleness bound, by the formulas alone."""
    pool = inputs.candidates()
    for pair in _pairs(inputs):
        if pair[0] != inputs.max_staleness:  # a smaller bound allows no more
            continue
        try:
            _draft(inputs, *pair, pool, inputs.gamma)
        except UserError:
            continue
        if least_idle(inputs, *pair) <= inputs.max_idle:
            return True
    return not inputs.max_staleness


def by_staleness(inputs: PlanInputs) -> list[Plan]:
    """Return the best plan for each S up to the bound, to show the price of fresher data. S without a plan are left
    out, and the search ends when a larger S no longer pays off.
    """
    plans: list[Plan] = []
    for max_staleness in range(1, inputs.max_staleness + 1):
        if plans and plans[-1].max_staleness < max_staleness - 2:
            break
        try:
            plan = make_plan(replace(inputs, max_staleness=max_staleness, budget_usd=None))
        except UserError:
            continue
        if not plans or plan.max_staleness > plans[-1].max_staleness:
            plans.append(plan)
    return plans


def _check(inputs: PlanInputs) -> None:
    if not inputs.offers:
        raise UserError("There are no machines on offer: add [[offers]] to the offers file.")
    if inputs.budget_usd is not None and not inputs.budget_usd > 0:
        raise UserError(f"--budget {inputs.budget_usd} must be above 0.")
    if inputs.learner_usd_per_hour < 0:
        raise UserError(f"learner.price_usd_per_hour = {inputs.learner_usd_per_hour} must not be negative.")
    if not 0 < inputs.max_idle < 1:
        raise UserError(f"--max-idle {inputs.max_idle} must lie between 0 and 1.")
    prices = (inputs.learner_usd_per_hour, *(offer.price_usd_per_hour for offer in inputs.offers))
    if inputs.budget_usd is not None and not any(prices):
        raise UserError(
            f"--budget {inputs.budget_usd:g} cannot be planned: neither the learner (learner.price_usd_per_hour) "
            "nor any offer has a price."
        )
    most = max(1, inputs.max_staleness)
    if inputs.publish_every is not None and not 1 <= inputs.publish_every <= most:
        raise NoPlanError(
            f"--publish-every {inputs.publish_every} with max_staleness = {inputs.max_staleness} cannot be planned: "
            f"use 1 to {most}, or a larger max_staleness."
        )


def _pairs(inputs: PlanInputs) -> Iterator[tuple[int, int]]:
    """Yield the (S, kappa) pairs that may be planned, freshest data first."""
    for max_staleness in range(min(1, inputs.max_staleness), inputs.max_staleness + 1):
        for publish_every in range(1, max(1, max_staleness) + 1):
            if inputs.publish_every in (None, publish_every):
                yield max_staleness, publish_every


def _search(inputs: PlanInputs, pool: Sequence[activation.Candidate]) -> Plan:
    """Return the cheapest plan. Pairs are forecast in order of their cost by the formulas, until no other pair can be
    cheaper.
    """
    drafts, refusals = [], []
    for pair in _pairs(inputs):
        try:
            draft = _draft(inputs, *pair, pool, inputs.gamma)
        except UserError as error:
            refusals.append(error)
            continue
        drafts.append((inputs.usd_per_step(draft.selection.usd_per_hour, inputs.train_seconds), pair))
    if not drafts:
        raise _nearest(refusals)
    least = min(usd for usd, _ in drafts)
    drafts.sort(key=lambda item: (math.floor((item[0] / least - 1) / SAME_COST) if least else 0, item[1]))
    best: Plan | None = None
    idlest = 0.0
    for usd, pair in drafts:
        if best is not None and usd >= best.usd_per_step * (1 - SAME_COST):
            break
        if (least := least_idle(inputs, *pair)) > inputs.max_idle:
            idlest = least
            continue
        tried: list[tuple[float, float]] = []
        for draft in _ladder(inputs, *pair, pool, inputs.gamma):
            plan = _walked(inputs, draft, inputs.max_idle)
            idlest = plan.prediction.steady_idle_ratio
            if idlest <= inputs.max_idle:
                if best is None or plan.usd_per_step < best.usd_per_step * (1 - SAME_COST):
                    best = plan
                break
            if any(2 * rate <= plan.rate and idle <= HARDLY_LESS * idlest for rate, idle in tried):
                break
            tried.append((plan.rate, idlest))
    if best is None:
        raise NoPlanError(
            f"All the offers together reach the rate, and the learner would still wait {idlest:.1%} of the time, more "
            f"than {inputs.max_idle:.1%}: batches of {inputs.groups_per_batch} groups take too long beside "
            f"{inputs.train_seconds:.4g} s of training."
        )
    return best


def least_idle(inputs: PlanInputs, max_staleness: int, publish_every: int) -> float:
    """Return the learner's idle ratio with unlimited machines: the first batch of a new version still takes time."""
    seconds = inputs.least_broadcast_seconds(publish_every)
    batches = []
    for offer in inputs.offers:
        size = inputs.batch(offer)
        median = size * inputs.group_size / offer.effective_rate / longest_of(size, offer.spread)
        batches.append(median * math.exp(-3 * offer.spread))  # 3 standard deviations: the shortest of hundreds
    demand = replace(inputs.demand(max_staleness, publish_every, seconds), rollout_seconds=min(batches))
    return formulas.idle_ratio(demand, math.inf)


@dataclass(frozen=True, slots=True)
class _Draft:
    """Machines for one (S, kappa), before the forecast."""

    selection: activation.Selection
    machines: dict[str, int]
    demand: Demand
    needed_rate: float


def _draft(
    inputs: PlanInputs, max_staleness: int, publish_every: int, pool: Sequence[activation.Candidate], factor: float
) -> _Draft:
    """Return the cheapest machines for `factor` times the needed rate. More machines may need a longer broadcast, and
    a longer broadcast a larger rate, so this iterates until T_bcast is stable.

    Raises:
        UserError: the pair is impossible, or the pool is too slow.
    """
    seconds = inputs.least_broadcast_seconds(publish_every)
    while True:
        demand = inputs.demand(max_staleness, publish_every, seconds)
        needed = formulas.mu_needed(demand) if max_staleness else demand.rollouts_per_step / demand.train_seconds
        selection = activation.choose(pool, factor * needed)
        machines = Counter(worker_id.rpartition("#")[0] for worker_id in selection.worker_ids)
        if selection.missing_rate:
            raise _too_slow(pool, factor * needed, max_staleness, publish_every)
        longer = inputs.broadcast_seconds(machines, publish_every)
        if longer <= seconds * (1 + 1e-6):
            return _Draft(selection, dict(machines), demand, needed)
        seconds = longer


def _ladder(
    inputs: PlanInputs, max_staleness: int, publish_every: int, pool: Sequence[activation.Candidate], factor: float
) -> Iterator[_Draft]:
    """Yield ever larger sets of machines for one (S, kappa), from `factor` times the needed rate upwards."""
    seen: dict[str, int] = {}
    for _ in range(_MAX_TRIES):
        try:
            draft = _draft(inputs, max_staleness, publish_every, pool, factor)
        except UserError:
            return
        factor *= RATE_STEP
        if draft.machines != seen:
            seen = draft.machines
            yield draft


def _frugal(inputs: PlanInputs, pool: Sequence[activation.Candidate], best: Plan | None) -> Plan:
    """Return the plan with the least cost per step, however long the learner waits. The formulas give a lower bound on
    the cost; drafts whose bound is too high are not forecast.
    """
    drafts = [draft for pair in _pairs(inputs) for draft in _ladder(inputs, *pair, pool, FRUGAL_FACTOR)]

    def least_usd(draft: _Draft) -> float:
        pace = formulas.step_seconds(draft.demand, draft.selection.rate)
        return inputs.usd_per_step(draft.selection.usd_per_hour, pace)

    for draft in sorted(drafts, key=least_usd):
        if best is not None and least_usd(draft) >= best.usd_per_step:
            break
        plan = _walked(inputs, draft)
        if best is None or plan.usd_per_step < best.usd_per_step:
            best = plan
    if best is None:
        raise NoPlanError(
            "These machines are too slow for any plan: together they reach less than a tenth of the rate needed."
        )
    return best


def _walked(inputs: PlanInputs, draft: _Draft, most_idle: float = 1.0) -> Plan:
    """Return the draft as a plan. No more seeds are forecast once the idle ratio exceeds `most_idle`."""
    demand, machines = draft.demand, [(inputs.offer(name), count) for name, count in sorted(draft.machines.items())]
    kinds = [WorkerKind(one.effective_rate, count, inputs.batch(one), one.spread) for one, count in machines]
    # Which worker gets the last batch of a step is chance: the worst of a few forecasts counts.
    prediction = forecast(demand, kinds, inputs.steps)
    for seed in range(1, WALKS):
        if prediction.steady_idle_ratio <= most_idle:
            walk = forecast(demand, kinds, inputs.steps, seed=seed)
            prediction = max(prediction, walk, key=lambda one: one.steady_idle_ratio)
    hourly = inputs.learner_usd_per_hour + draft.selection.usd_per_hour
    return Plan(
        machines=dict(sorted(draft.machines.items())),
        max_staleness=demand.max_staleness,
        publish_every=demand.publish_every,
        auto_publish_every=_auto_publish_every(demand),
        broadcast_seconds=demand.broadcast_seconds,
        broadcast_bytes=inputs.broadcast.num_bytes(demand.publish_every),
        needed_rate=draft.needed_rate,
        rate=draft.selection.rate,
        prediction=prediction,
        usd_per_hour=hourly,
        usd_per_step=hourly * prediction.step_seconds / 3600,
        usd=hourly * prediction.run_seconds / 3600,
        floor_usd_per_step=inputs.learner_usd_per_hour * inputs.train_seconds / 3600,
        binds=_binds(demand, draft.selection.rate, prediction, inputs.max_idle),
        fleet_set_by=_fleet_set_by(demand),
    )


def _auto_publish_every(demand: Demand) -> int | None:
    try:
        return formulas.choose_publish_every(demand.max_staleness, demand.train_seconds, demand.broadcast_seconds)
    except UserError:
        return None


def _binds(demand: Demand, rate: float, prediction: Prediction, max_idle: float) -> str:
    if demand.max_staleness == 0:
        return "staleness"
    if prediction.steady_idle_ratio <= max_idle:
        return "learner"
    found = formulas.binding(demand, rate)
    return found if found != "learner" else "rollouts"


def _fleet_set_by(demand: Demand) -> str:
    if demand.max_staleness == 0:
        return "cost"
    plain = demand.rollouts_per_step / demand.train_seconds
    pausing = formulas.mu_min(demand)
    if formulas.mu_window(demand) > pausing * 1.02:
        return "staleness"
    return "broadcast" if pausing > plain * 1.02 else "rollouts"


# ---- refusals --------------------------------------------------------------------------------------------------------


def _too_slow(
    pool: Sequence[activation.Candidate], target: float, max_staleness: int, publish_every: int
) -> NoPlanError:
    have = math.fsum(one.rate for one in pool)
    all_of = f"all {len(pool)} machines together make" if len(pool) > 1 else "the one machine makes"
    error = NoPlanError(
        f"The offers cannot carry the rate: {all_of} {have:.4g} rollouts/s, "
        f"{target:.4g} are needed (max_staleness = {max_staleness}, publish_every = {publish_every}, safety factor "
        f"included); {target - have:.4g} are missing."
    )
    error.missing = target - have
    return error


def _nearest(refusals: Sequence[UserError]) -> NoPlanError:
    """Return the refusal that is closest to a plan."""
    slow = [error for error in refusals if isinstance(error, NoPlanError)]
    return min(slow, key=lambda error: error.missing) if slow else NoPlanError(str(refusals[-1]))
