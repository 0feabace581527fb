"""Finds what to change where no plan exists: the nearest inputs of each kind with a plan. Each is tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from echo2.config.offers import COUNT_MAX
from echo2.core.errors import UserError
from echo2.planning.plan import NoPlanError, Plan, SearchLimit, make_plan, may_have_plan
from echo2.planning.plan_inputs import PlanInputs

#: The largest staleness bound that is tried; data older than that are of little use.
STALENESS_MAX = 64
#: By how much it is raised: each try looks at all pairs of it and a publication period, so a larger one is coarser.
STALER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
#: Steps are made up to 2 to this power times as large.
DOUBLINGS_MAX = 4
#: Forecasts for remedies of one kind, and for one of them. Inputs that have no plan by the formulas are not forecast.
FORECASTS_MAX, FORECASTS_EACH = 12, 6
#: Idle ratios that are tried, where no fleet keeps to the one that was asked for.
IDLE_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Inputs with a plan. `flags`: of `echo2 plan`, by name, that lead to them; "" takes a flag away. `counts`: of
    offers, by name, to be set in the offers file.
    """

    flags: dict[str, str]
    counts: dict[str, int]
    inputs: PlanInputs
    plan: Plan


def remedies(refusal: NoPlanError, rates_are_estimated: bool = False) -> list[Remedy]:
    """Return one remedy at least, and at most one of each kind, for the inputs that have no plan, those that only need
    flags first. Smaller batches leave measured rates as they are, but not estimated ones.
    """
    inputs = refusal.inputs
    assert inputs is not None  # `make_plan` raised it
    if refusal.plan is not None:
        fewer = _first(inputs, _fewer_steps(inputs, refusal))
        return [*([fewer] if fewer else []), _dearer(inputs, refusal.plan)]
    batches: list[_Kind] = [] if rates_are_estimated else [_smaller_batches]
    free = [_without_budget] if inputs.is_free else []
    kinds = (*free, _staler, _larger_steps, *batches, _idler, _more_machines)
    if possible := [one for kind in kinds if (one := _first(inputs, kind(inputs, refusal))) is not None]:
        return possible
    both = (_first(inputs, tries) for tries in _more_of_both(inputs, refusal, batches))
    return [next((one for one in both if one is not None), None) or _on_policy(inputs)]


def _on_policy(inputs: PlanInputs) -> Remedy:
    """Without staleness the learner may wait for as long as it takes, so there always is a plan."""
    on_policy = replace(inputs, max_staleness=0, budget_usd=None)
    flags = {"--schedule.max_staleness": "0", "--schedule.publish_every": "1"}
    return Remedy(flags | _no_budget(inputs), {}, on_policy, make_plan(on_policy))


@dataclass(frozen=True, slots=True)
class _Try:
    inputs: PlanInputs
    flags: dict[str, str]


_Kind = Callable[[PlanInputs, NoPlanError], Iterator[_Try]]


def _first(inputs: PlanInputs, tries: Iterable[_Try]) -> Remedy | None:
    """Return the first of these inputs that have a plan."""
    limit = SearchLimit(FORECASTS_MAX, each=FORECASTS_EACH)
    for one in tries:
        if limit.forecasts <= 0:
            break
        try:
            if may_have_plan(one.inputs):
                return _trimmed(inputs, one, make_plan(one.inputs, limit), limit)
        except UserError:  # no plan, or a change led out of bounds
            continue
    return None


def _trimmed(inputs: PlanInputs, one: _Try, plan: Plan, limit: SearchLimit) -> Remedy:
    """Offers that were made larger are cut to what the plan uses, and that is planned.

    Raises:
        UserError: it has no plan.
    """
    counts = {
        before.name: count for before in inputs.offers if (count := plan.machines.get(before.name, 0)) > before.count
    }
    offers = tuple(replace(before, count=counts.get(before.name, before.count)) for before in inputs.offers)
    if offers == one.inputs.offers:
        return Remedy(one.flags, {}, one.inputs, plan)
    trimmed = replace(one.inputs, offers=offers)
    return Remedy(one.flags, counts, trimmed, make_plan(trimmed, limit))


def _fewer_steps(inputs: PlanInputs, refusal: NoPlanError) -> Iterator[_Try]:
    if refusal.steps:
        yield _Try(replace(inputs, steps=refusal.steps), {"--run.max_steps": str(refusal.steps)})


def _dearer(inputs: PlanInputs, cheapest: Plan) -> Remedy:
    digits = max(2, 2 - math.floor(math.log10(cheapest.usd)))
    enough = math.ceil(cheapest.usd * 10**digits) / 10**digits
    return Remedy({"--budget": f"{enough:.{digits}f}"}, {}, replace(inputs, budget_usd=enough), cheapest)


def _staler(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    bounds = {min(STALENESS_MAX, inputs.max_staleness + more) for more in STALER}
    for bound in sorted(bounds - set(range(inputs.max_staleness + 1))):
        yield _Try(replace(inputs, max_staleness=bound), {"--schedule.max_staleness": str(bound)})


def _larger_steps(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    """A step with more groups trains longer, and weights travel as long as before."""
    for power in range(1, DOUBLINGS_MAX + 1):
        groups, seconds = inputs.groups_per_step << power, inputs.train_seconds * (1 << power)
        trains = float(f"{seconds * (1 - inputs.waits_for_rewards):.4g}")
        flags = {"--schedule.groups_per_step": str(groups), "--train-seconds": f"{trains:g}"}
        pace = max(seconds, trains) if inputs.waits_for_rewards else trains
        yield _Try(replace(inputs, groups_per_step=groups, train_seconds=pace), flags)


def _smaller_batches(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    for size in (inputs.groups_per_batch // 2, inputs.groups_per_batch // 4, 1):
        if 1 <= size < inputs.groups_per_batch:
            yield _Try(replace(inputs, groups_per_batch=size), {"--sampling.groups_per_batch": str(size)})


def _idler(inputs: PlanInputs, refusal: NoPlanError) -> Iterator[_Try]:
    for ratio in IDLE_RATIOS:
        if ratio > max(inputs.max_idle, refusal.idle):
            yield _Try(replace(inputs, max_idle=ratio), {"--max-idle": f"{ratio:g}"})


def _more_machines(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    """As many of each offer as the plan may want."""
    yield _Try(replace(inputs, offers=tuple(replace(one, count=COUNT_MAX) for one in inputs.offers)), {})


def _no_budget(inputs: PlanInputs) -> dict[str, str]:
    return {} if inputs.budget_usd is None else {"--budget": ""}


def _without_budget(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    if flags := _no_budget(inputs):
        yield _Try(replace(inputs, budget_usd=None), flags)


def _more_of_both(inputs: PlanInputs, refusal: NoPlanError, batches: list[_Kind]) -> Iterator[list[_Try]]:
    """More machines, with each or all of: no budget, smaller batches, staler data, larger steps, more waiting."""
    (one,) = _more_machines(inputs, refusal)
    for kind in (_without_budget, *batches, _staler, _larger_steps, _idler):
        if tries := [_Try(more.inputs, {**one.flags, **more.flags}) for more in kind(one.inputs, refusal)]:
            yield [*tries[len(tries) // 2 : -1][:1], tries[-1]]
            one = tries[-1]
