"""Finds what to change where no plan exists: the nearest inputs of each kind with a plan. Each is tried."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from echo2.core.errors import UserError
from echo2.planning.plan import NoPlanError, Plan, PlanInputs, make_plan, may_have_plan

#: The largest staleness bound that is tried; data older than that are of little use.
STALENESS_MAX = 64
#: By how much it is raised: each try looks at all pairs of it and a publication period, so a larger one is coarser.
STALER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
#: Steps are made up to 2 to this power times as large.
DOUBLINGS_MAX = 10
#: Inputs of a kind whose run is forecast, which takes seconds with many machines.
TRIES_MAX = 4
#: Machines of one offer that are tried at most. Thousands take long to forecast, and nobody rents them for a start.
MACHINES_MAX = 512
#: Idle ratios that are tried, where no fleet keeps to the one that was asked for.
IDLE_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Inputs with a plan. `flags`: of `echo2 plan`, by name, that lead to them; "" takes a flag away. `counts`: of
    offers, by name, to be set in the offers file.
    """

    flags: dict[str, str]
    counts: dict[str, int]
    inputs: PlanInputs
    plan: Plan


def remedies(refusal: NoPlanError) -> list[Remedy]:
    """Return at most one remedy of each kind for the inputs that have no plan, those that only need flags first."""
    inputs = refusal.inputs
    assert inputs is not None  # `make_plan` raised it
    others = [_period, _staler, _larger_steps, _smaller_batches, _idler, _more_machines]
    kinds = [_fewer_steps, _dearer] if refusal.usd else others
    found = [one for kind in kinds if (one := _first(inputs, kind(inputs, refusal))) is not None]
    if not found and (both := _first(inputs, _more_of_both(inputs, refusal))) is not None:
        return [both]
    return found


@dataclass(frozen=True, slots=True)
class _Try:
    inputs: PlanInputs
    flags: dict[str, str]


def _first(inputs: PlanInputs, tries: Iterable[_Try]) -> Remedy | None:
    """Return the first of these inputs that have a plan."""
    forecast = 0
    for one in tries:
        if not may_have_plan(one.inputs):
            continue
        forecast += 1
        if (plan := _plan(one.inputs)) is not None:
            return _trimmed(inputs, one, plan)
        if forecast == TRIES_MAX:
            break
    return None


def _plan(inputs: PlanInputs) -> Plan | None:
    try:
        return make_plan(inputs)
    except NoPlanError:
        return None
    except UserError:  # a change led out of bounds
        return None


def _trimmed(inputs: PlanInputs, one: _Try, plan: Plan) -> Remedy:
    """Offers that were made larger are cut to what the plan uses."""
    counts = {
        offer.name: plan.machines[offer.name]
        for before, offer in zip(inputs.offers, one.inputs.offers, strict=True)
        if offer.count > before.count and offer.name in plan.machines
    }
    return Remedy(one.flags, counts, one.inputs, plan)


def _fewer_steps(inputs: PlanInputs, refusal: NoPlanError) -> Iterator[_Try]:
    if refusal.steps:
        yield _Try(replace(inputs, steps=refusal.steps), {"--run.max_steps": str(refusal.steps)})


def _dearer(inputs: PlanInputs, refusal: NoPlanError) -> Iterator[_Try]:
    digits = max(2, 2 - math.floor(math.log10(refusal.usd)))
    enough = math.ceil(refusal.usd * 10**digits) / 10**digits
    yield _Try(replace(inputs, budget_usd=enough), {"--budget": f"{enough:.{digits}f}"})


def _period(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    if inputs.publish_every is not None:
        yield _Try(replace(inputs, publish_every=None), {"--publish-every": ""})


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
        yield _Try(replace(inputs, groups_per_step=groups, train_seconds=max(seconds, trains)), flags)


def _smaller_batches(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    for size in (inputs.groups_per_batch // 2, inputs.groups_per_batch // 4, 1):
        if 1 <= size < inputs.groups_per_batch:
            yield _Try(replace(inputs, groups_per_batch=size), {"--sampling.groups_per_batch": str(size)})


def _idler(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    for ratio in IDLE_RATIOS:
        if ratio > inputs.max_idle:
            yield _Try(replace(inputs, max_idle=ratio), {"--max-idle": f"{ratio:g}"})


def _more_machines(inputs: PlanInputs, _: NoPlanError) -> Iterator[_Try]:
    """More of one offer, the cheapest for a rollout first."""
    for offer in sorted(inputs.offers, key=lambda one: one.effective_usd_per_hour / one.effective_rate):
        count = offer.count
        while count < MACHINES_MAX:
            count = min(MACHINES_MAX, 2 * count)
            others = (replace(one, count=count) if one is offer else one for one in inputs.offers)
            yield _Try(replace(inputs, offers=tuple(others)), {})


def _more_of_both(inputs: PlanInputs, refusal: NoPlanError) -> Iterator[_Try]:
    """More machines, and staler data or larger steps."""
    for change in (*_staler(inputs, refusal), *_larger_steps(inputs, refusal)):
        for more in _more_machines(change.inputs, refusal):
            yield _Try(more.inputs, change.flags)
