"""Finds the staleness bound S, publication period kappa and machines that keep the learner busy at the least cost.

For each (S, kappa) that the bound on staleness allows, the planner computes the needed rate
(`head/fleet/decide/formulas.py`), the cheapest machines that reach gamma times this rate
(`head/fleet/decide/activation.py`), the time of a broadcast to these machines (`head/fleet/decide/formulas.py`; a
longer broadcast may need a larger rate, so this is repeated until stable), and a forecast of the run with them
(`head/fleet/decide/forecast.py`). If the forecast shows waiting that the fluid formulas miss, the rate is raised. The
cheapest plan wins; among plans of about equal cost, the one with the freshest data.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from echo2.config.offers import Offer
from echo2.core.errors import UserError
from echo2.head.fleet.decide import activation, formulas
from echo2.head.fleet.decide.forecast import Prediction, WorkerKind, forecast, longest_of
from echo2.head.fleet.decide.formulas import Demand
from echo2.planning.plan_inputs import PlanInputs

#: Costs within this relative difference count as equal; then the plan with fresher data wins.
SAME_COST = 0.005
#: Factor between successive rates that are tried.
RATE_STEP = 1.06
#: Smallest share of the learner's pace for which fleets are tried under a budget or on-policy.
FRUGAL_FACTOR = 0.1
#: If half the rate made the learner idle at most this many times as long, a higher rate does not help.
HARDLY_LESS = 1.1
#: Forecasts of a run with the same machines, each with its own seed.
WALKS = 3
#: Forecasts of a search at most: then the best plan so far is taken.
FORECASTS_MAX = 16
#: Rates that are tried for one (S, kappa) lie between the needed one and this power of `RATE_STEP` of it.
_MAX_TRIES = 50
#: Rewards count as late beyond this share of their times.
LATE_SHARE = 0.9
#: Staleness bounds and periods are tried one by one up to this, then in steps of a third to a half.
_ONE_BY_ONE = 8


@dataclass(slots=True)
class SearchLimit:
    """How many forecasts may still be made: `forecasts` in all, `each` by one search, `search` by the present one."""

    forecasts: int = 2 * FORECASTS_MAX
    each: int = FORECASTS_MAX
    search: int = 0

    def begin(self) -> None:
        self.search = min(self.forecasts, self.each)

    def spend(self) -> None:
        self.forecasts -= 1
        self.search -= 1


class NoPlanError(UserError):
    """These inputs are valid, and have no plan; `planning/remedies.py` finds others that have one. `missing`: the
    shortfall in rollouts per second, if that is why; `idle`: the least idle ratio found. Where a budget is: `plan`, the
    cheapest, and `steps`, as many as the budget pays for.
    """

    missing, idle, steps = 0.0, 0.0, 0
    plan: Plan | None = None
    inputs: PlanInputs | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`machines`: number by offer. `needed_rate`: without the safety factor; below it the learner waits. `binds`: what
    limits the pace of the run; `fleet_set_by`: what determines the number of machines. `floor_usd_per_step`: cost of
    the learner alone.
    """

    machines: dict[str, int]
    max_staleness: int
    publish_every: int
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
        plain = asdict(self)
        plain["prediction"]["mean_staleness"] = self.prediction.mean_staleness
        plain["prediction"]["max_staleness"] = self.prediction.max_staleness
        return plain


def make_plan(inputs: PlanInputs, limit: SearchLimit | None = None) -> Plan:
    """Return the cheapest plan that keeps the learner busy, of those found within `limit`.

    Raises:
        NoPlanError: there is none; the message has the missing number.
        UserError: an input is wrong.
    """
    try:
        return _make_plan(inputs, limit or SearchLimit())
    except NoPlanError as error:
        error.inputs = inputs
        raise


def _make_plan(inputs: PlanInputs, limit: SearchLimit) -> Plan:
    check_inputs(inputs)
    limit.begin()
    best = _frugal(inputs, None, limit) if inputs.max_staleness == 0 else _search(inputs, limit)
    if inputs.budget_usd is None or best.usd <= inputs.budget_usd:
        return best
    limit.begin()
    frugal = _frugal(inputs, best, limit)
    if frugal.usd > inputs.budget_usd:
        start_usd = frugal.usd - inputs.steps * frugal.usd_per_step
        error = NoPlanError(
            f"A budget of ${_usd(inputs.budget_usd)} is too small: the cheapest plan costs ${_usd(frugal.usd)} for "
            f"{inputs.steps} steps, ${_usd(frugal.usd - inputs.budget_usd)} more; keeping the learner busy costs "
            f"${_usd(best.usd)}."
        )
        error.plan = replace(frugal, binds="budget")
        error.steps = max(0, math.floor((inputs.budget_usd - start_usd) / frugal.usd_per_step - 1e-9))
        raise error
    return replace(frugal, binds="budget")


def _usd(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def may_have_plan(inputs: PlanInputs) -> bool:
    """Whether these inputs could have a plan with the whole staleness bound, by the formulas alone, and with machines
    that would be outrun among the others.
    """
    for pair in _pairs(inputs):
        if pair[0] != inputs.max_staleness:  # a smaller bound allows no more
            continue
        try:
            _draft(inputs, *pair, inputs.gamma, ())
        except UserError:
            continue
        if least_idle(inputs, *pair) <= inputs.max_idle:
            return True
    return not inputs.max_staleness


def by_staleness(inputs: PlanInputs) -> list[Plan]:
    """Return the best plan for each S up to the bound, to show the price of fresher data. S without a plan are left
    out, and the search ends when a larger S no longer pays off.
    """
    plans, limit = list[Plan](), SearchLimit()
    for max_staleness in _grid(inputs.max_staleness):
        if limit.forecasts <= 0 or (plans and plans[-1].max_staleness < max_staleness - 2):
            break
        try:
            fresher = replace(inputs, max_staleness=max_staleness, budget_usd=None)
            plan = make_plan(fresher, limit)
        except UserError:
            continue
        if not plans or plan.max_staleness > plans[-1].max_staleness:
            plans.append(plan)
    return plans


def check_inputs(inputs: PlanInputs) -> None:
    """Refuse what no plan can be made from.

    Raises:
        NoPlanError: there is a budget, and nothing has a price.
        UserError: an input is wrong, or a rate is not known.
    """
    if not inputs.offers:
        raise UserError("There are no machines on offer: add [[offers]] to the offers file.")
    for offer in inputs.offers:
        _ = offer.effective_rate
    if inputs.budget_usd is not None and not inputs.budget_usd > 0:
        raise UserError(f"--budget {inputs.budget_usd} must be above 0.")
    if inputs.learner_usd_per_hour < 0:
        raise UserError(f"learner.price_usd_per_hour = {inputs.learner_usd_per_hour} must not be negative.")
    if not 0 < inputs.max_idle < 1:
        raise UserError(f"--max-idle {inputs.max_idle} must lie between 0 and 1.")
    if inputs.budget_usd is not None and inputs.is_free:
        raise NoPlanError(
            f"--budget {inputs.budget_usd:g} cannot be planned: neither the learner (learner.price_usd_per_hour) "
            "nor any offer has a price."
        )


def _pairs(inputs: PlanInputs) -> Iterator[tuple[int, int]]:
    """Yield the (S, kappa) pairs that may be planned, freshest data first."""
    for max_staleness in _grid(inputs.max_staleness) or [0]:
        periods = _grid(max(1, max_staleness)) if inputs.publish_every is None else [inputs.publish_every]
        yield from ((max_staleness, period) for period in periods if period <= max(1, max_staleness))


def _grid(most: int) -> list[int]:
    """Return the numbers from 1 to `most` that are tried: each small one, and some of the others."""
    numbers = list(range(1, min(_ONE_BY_ONE, most) + 1))
    while numbers and numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + (1 << numbers[-1].bit_length() - 2)))
    return numbers


def _search(inputs: PlanInputs, limit: SearchLimit) -> Plan:
    """Return the cheapest plan. Pairs are forecast in order of their cost by the formulas, until no other pair can be
    cheaper.
    """
    drafts, refusals = [], []
    for pair in _pairs(inputs):
        try:
            draft = _draft(inputs, *pair, inputs.gamma, inputs.outrun(*pair))
        except UserError as error:
            refusals.append(error)
            continue
        drafts.append((inputs.usd_per_step(draft.usd_per_hour, inputs.train_seconds), pair))
    if not drafts:
        raise _nearest(refusals)
    least = min(usd for usd, _ in drafts)
    drafts.sort(key=lambda item: (math.floor((item[0] / least - 1) / SAME_COST) if least else 0, item[1]))
    best: Plan | None = None
    least_found = 1.0
    for usd, pair in drafts:
        if limit.search <= 0 or (best is not None and usd >= best.usd_per_step * (1 - SAME_COST)):
            break
        if (least := least_idle(inputs, *pair)) > inputs.max_idle:
            least_found = min(least_found, least)
            continue
        plan = _least_fleet(inputs, *pair, limit)
        idle = plan.prediction.steady_idle_ratio
        least_found = min(least_found, idle)
        if idle <= inputs.max_idle and (best is None or plan.usd_per_step < best.usd_per_step * (1 - SAME_COST)):
            best = plan
    if best is None:
        cause = f"batches of {inputs.groups_per_batch} groups take"
        if inputs.delays is not None and inputs.delays.at(LATE_SHARE) > inputs.train_seconds * inputs.max_idle:
            late = f"more than {inputs.delays.at(LATE_SHARE):.3g} s for its rewards"
            cause += f", and one of {1 / (1 - LATE_SHARE):.0f} groups {late},"
        refused = NoPlanError(
            f"All the offers together reach the rate, and the learner would still wait {least_found:.1%} of the time, "
            f"more than {inputs.max_idle:.1%}: {cause} too long beside {inputs.train_seconds:.4g} s of training."
        )
        refused.idle = least_found
        raise refused
    return best


def _least_fleet(inputs: PlanInputs, max_staleness: int, publish_every: int, limit: SearchLimit) -> Plan:
    """Return the plan for the least rate at which the learner is busy, or the last one tried. The rate is raised by
    ever larger steps; then the last of them is halved.
    """
    fails, works, step = -1, _MAX_TRIES, 0
    late = inputs.outrun(max_staleness, publish_every)
    best: Plan | None = None
    tried: dict[tuple[tuple[str, int], ...], Plan] = {}
    while works - fails > 1:
        try:
            draft = _draft(inputs, max_staleness, publish_every, inputs.gamma * RATE_STEP**step, late)
        except UserError:
            works = step
        else:
            machines = tuple(draft.machines.items())
            plan = tried[machines] = tried.get(machines) or _walked(inputs, draft, limit, inputs.max_idle)
            idle = plan.prediction.steady_idle_ratio
            if idle <= inputs.max_idle:
                works, best = step, plan
            else:
                fails = step
                rates = ((one.rate, one.prediction.steady_idle_ratio) for one in tried.values())
                if any(2 * rate <= plan.rate and other <= HARDLY_LESS * idle for rate, other in rates):
                    break
        if limit.search <= 0:
            break
        step = min(2 * fails + 1, works - 1) if works == _MAX_TRIES and fails >= 0 else (fails + works) // 2
    return best or list(tried.values())[-1]


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
    """Machines for one (S, kappa), before the forecast. `rate`: of all, in rollouts per second."""

    machines: dict[str, int]
    rate: float
    usd_per_hour: float
    demand: Demand
    needed_rate: float


def _draft(
    inputs: PlanInputs, max_staleness: int, publish_every: int, factor: float, without: Container[str]
) -> _Draft:
    """Return the cheapest machines for `factor` times the needed rate, `without` some offers. More machines may need a
    longer broadcast, and a longer broadcast a larger rate, so this iterates until T_bcast is stable.

    Raises:
        UserError: the pair is impossible, or the pool is too slow.
    """
    pool = inputs.pool(max_staleness, without)
    kinds = [kind for _, kind in pool]
    seconds = inputs.least_broadcast_seconds(publish_every)
    while True:
        target = factor * _needed(inputs.demand(max_staleness, publish_every, seconds))
        counts = activation.choose_counts(kinds, target)
        draft = _drafted(inputs, pool, counts, max_staleness, publish_every, seconds)
        if not activation.reaches(draft.rate, target):
            raise _too_slow(inputs, draft.rate, counts, target, (max_staleness, publish_every), pool)
        longer = inputs.broadcast_seconds(draft.machines, publish_every)
        if longer <= seconds * (1 + 1e-6):
            return draft
        seconds = longer


def _needed(demand: Demand) -> float:
    """Return the rate below which the learner waits; on-policy it always does."""
    return formulas.mu_needed(demand) if demand.max_staleness else demand.rollouts_per_step / demand.train_seconds


_Pool = Sequence[tuple[Offer, activation.Kind]]


def _drafted(
    inputs: PlanInputs, pool: _Pool, counts: Sequence[int], max_staleness: int, publish_every: int, seconds: float
) -> _Draft:
    """Return these machines as a draft with T_bcast = `seconds`. Raises: as `_draft`."""
    demand = inputs.demand(max_staleness, publish_every, seconds)
    chosen = [(offer, kind, count) for (offer, kind), count in zip(pool, counts, strict=True) if count]
    rate = math.fsum(count * kind.rate for _, kind, count in chosen)
    usd = math.fsum(count * kind.price_usd_per_hour for _, kind, count in chosen)
    return _Draft({offer.name: count for offer, _, count in chosen}, rate, usd, demand, _needed(demand))


def _frugal(inputs: PlanInputs, best: Plan | None, limit: SearchLimit) -> Plan:
    """Return the plan with the least cost per step, however long the learner waits. The formulas give a lower bound on
    the cost; drafts whose bound is too high are not forecast.
    """
    drafts = list[tuple[float, _Draft]]()
    for max_staleness, pairs in itertools.groupby(_pairs(inputs), key=lambda pair: pair[0]):
        pool, periods = inputs.pool(max_staleness), [period for _, period in pairs]
        for counts in _fleets(inputs, pool):
            machines = {offer.name: count for (offer, _), count in zip(pool, counts, strict=True) if count}
            for period in periods:
                seconds = inputs.broadcast_seconds(machines, period)
                with contextlib.suppress(UserError):  # this pair is impossible
                    draft = _drafted(inputs, pool, counts, max_staleness, period, seconds)
                    pace = formulas.step_seconds(draft.demand, draft.rate)
                    drafts.append((inputs.usd_per_step(draft.usd_per_hour, pace), draft))
    for least_usd, draft in sorted(drafts, key=lambda one: one[0]):
        if best is not None and (limit.search <= 0 or least_usd >= best.usd_per_step):
            break
        plan = _walked(inputs, draft, limit)
        if best is None or plan.usd_per_step < best.usd_per_step:
            best = plan
    if best is None:
        raise NoPlanError("Whatever the fleet, weights travel too long for this staleness bound.")
    return best


def _fleets(inputs: PlanInputs, pool: _Pool) -> list[tuple[int, ...]]:
    """Return the cheapest machines for rates from a tenth of the learner's pace on, and at last all of them."""
    kinds = [kind for _, kind in pool]
    whole = sum(kind.count * kind.rate for kind in kinds)
    pace = inputs.groups_per_step * inputs.group_size / inputs.train_seconds
    targets = (FRUGAL_FACTOR * RATE_STEP**step * pace for step in range(_MAX_TRIES))
    counts = (activation.choose_counts(kinds, target) for target in targets if target < whole)
    return list(dict.fromkeys(map(tuple, [*counts, [kind.count for kind in kinds]])))


def _walked(inputs: PlanInputs, draft: _Draft, limit: SearchLimit, most_idle: float = 1.0) -> Plan:
    """Return the draft as a plan. No more seeds are forecast once the idle ratio exceeds `most_idle`."""
    demand, machines = draft.demand, [(inputs.offer(name), count) for name, count in sorted(draft.machines.items())]
    kinds = [WorkerKind(one.effective_rate, count, inputs.batch(one), one.spread) for one, count in machines]
    # Which worker gets the last batch of a step is chance: the worst of a few forecasts counts.
    prediction = forecast(demand, kinds, inputs.steps, delays=inputs.delays)
    limit.spend()
    for seed in range(1, WALKS):
        if prediction.steady_idle_ratio <= most_idle:
            limit.spend()
            walk = forecast(demand, kinds, inputs.steps, seed=seed, delays=inputs.delays)
            prediction = max(prediction, walk, key=lambda one: one.steady_idle_ratio)
    hourly = inputs.learner_usd_per_hour + draft.usd_per_hour
    return Plan(
        machines=dict(sorted(draft.machines.items())),
        max_staleness=demand.max_staleness,
        publish_every=demand.publish_every,
        broadcast_seconds=demand.broadcast_seconds,
        broadcast_bytes=inputs.broadcast.num_bytes(demand.publish_every),
        needed_rate=draft.needed_rate,
        rate=draft.rate,
        prediction=prediction,
        usd_per_hour=hourly,
        usd_per_step=hourly * prediction.step_seconds / 3600,
        usd=hourly * prediction.run_seconds / 3600,
        floor_usd_per_step=inputs.learner_usd_per_hour * inputs.train_seconds / 3600,
        binds=_binds(demand, draft.rate, prediction, inputs.max_idle),
        fleet_set_by=_fleet_set_by(demand),
    )


def _binds(demand: Demand, rate: float, prediction: Prediction, max_idle: float) -> str:
    if demand.max_staleness == 0:
        return "staleness"
    if prediction.steady_idle_ratio <= max_idle:
        return "learner"
    bound = formulas.binding(demand, rate)
    return bound if bound != "learner" else "rollouts"


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
    inputs: PlanInputs, have: float, counts: Sequence[int], target: float, pair: tuple[int, int], pool: _Pool
) -> NoPlanError:
    count, names = sum(counts), {offer.name for offer, _ in pool}
    all_of = f"all {count} machines together make" if count > 1 else "the one machine makes"
    if count < sum(offer.count for offer, _ in pool):
        all_of = f"{count} machines, as many as {pair[0] + 1} steps have groups, make"
    words = left_out(inputs.outrun(*pair), names)
    error = NoPlanError(
        f"The offers cannot carry the rate: {all_of} {have:.4g} rollouts/s, "
        f"{target:.4g} are needed (max_staleness = {pair[0]}, publish_every = {pair[1]}, safety factor "
        f"included); {target - have:.4g} are missing.{words and f' Left out: {words}.'}"
    )
    error.missing = target - have
    return error


def left_out(outrun: Mapping[str, float], planned: Container[str]) -> str:
    """Say to which of the offers that are not `planned` weights travel for how many steps, and what would help; empty:
    there are none.
    """
    late = {name: steps for name, steps in outrun.items() if name not in planned}
    if not late:
        return ""
    names = ", ".join(f"{name} ({steps:.1f} steps)" for name, steps in late.items())
    return (
        f"{names}: new weights arrive after the steps that they may sample. max_staleness >= "
        f"{math.ceil(min(late.values()))}, larger steps (schedule.groups_per_step) or faster links help"
    )


def _nearest(refusals: Sequence[UserError]) -> NoPlanError:
    """Return the refusal that is closest to a plan."""
    slow = [error for error in refusals if isinstance(error, NoPlanError)]
    return min(slow, key=lambda error: error.missing) if slow else NoPlanError(str(refusals[-1]))
