"""The learner's GPUs where nobody named them: of those that hold it, the ones that train a step for the least money, at
the prices of the offers and of the market.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from echo2.config import Config
from echo2.core.errors import UserError
from echo2.learner.core.fitting import learner_need
from echo2.planning.first_plan import Basis, FirstPlan, fetched_shape
from echo2.planning.gpus import GPUS, several
from echo2.planning.market import known_prices
from echo2.planning.memory_needs import DoesNotFitError
from echo2.planning.plan import least_idle, may_have_plan
from echo2.planning.plan_inputs import PastRun, PlanInputs
from echo2.planning.plan_request import MARKET, configured, gather, learner_machine, offered, ready

#: GPUs of one learner, where the configuration does not say.
COUNTS = (1, 2, 4, 8)
#: How many of the cheapest are asked whether the offers could keep up with them.
ASKED_MAX = 24
#: A Mac has no learner on its GPU.
_NO_LEARNER = "M4"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`seconds`: of training in one step; `usd_per_hour`: of all its GPUs."""

    seconds: float
    count: int
    name: str
    usd_per_hour: float
    seller: str


def with_learner(options: argparse.Namespace, past: PastRun | None) -> tuple[argparse.Namespace, Basis | None]:
    """Return the flags with a learner, its price where the configuration has none, and how it was chosen. They are
    returned as they are where the learner is named, or its seconds are known.

    Raises:
        UserError: an input is wrong, or the model's sizes are not known.
    """
    if options.learner is not None or options.train_seconds is not None or past is not None:
        return options, None
    configs = _configs(options)
    candidates = list(_candidates(options, configs))
    if not candidates:  # the refusal says what would fit
        return _filled(options, {"--learner": f"{max(configs)}x{_largest()}"}), None
    fastest = _filled(options, _flags(options, min(candidates, key=lambda one: one.seconds)))
    inputs = _inputs(fastest)
    paced = {one: _paced(inputs, one) for one in candidates}
    candidates.sort(key=lambda one: (one.usd_per_hour * _step_seconds(paced[one]), one.seconds, one.count))
    one = next((one for one in candidates[:ASKED_MAX] if may_have_plan(paced[one])), candidates[0])
    filled = _filled(options, _flags(options, one))
    price = f"${one.usd_per_hour:.4g} an hour of {one.seller}"
    if (own := configured(filled).learner.price_usd_per_hour) != float(f"{one.usd_per_hour:.4g}"):
        price = f"${own:.4g} an hour by the configuration ({price})"
    why = "the cheapest for a step of those that hold the model; another: --learner 2xH100"
    return filled, Basis("learner", f"{one.count} x {one.name}, {price}", why)


def _inputs(options: argparse.Namespace) -> PlanInputs:
    """Return the inputs of the plan with the offers that hold a worker, or with all where none does: that is refused
    later."""
    config = configured(options)
    try:
        return ready(config, options, None)[0]
    except DoesNotFitError:
        return gather(config, options, None, FirstPlan(config, options.learner, options.answer_tokens))[0]


def _paced(inputs: PlanInputs, one: _Candidate) -> PlanInputs:
    """Return the inputs with this learner in place of the fastest."""
    rewards = inputs.train_seconds if inputs.waits_for_rewards else 0.0
    return replace(inputs, train_seconds=max(one.seconds, rewards))


def _step_seconds(inputs: PlanInputs) -> float:
    """Return the seconds of a step with as many machines as one likes: a learner may be too fast for the weights."""
    bound = inputs.max_staleness
    idle = min((least_idle(inputs, bound, every) for every in {1, bound}), default=0.0) if bound else 0.0
    return inputs.train_seconds / max(1e-9, 1.0 - idle)


def _configs(options: argparse.Namespace) -> dict[int, Config]:
    """Return the configuration for each number of GPUs to try: the one that it sets, or any that it allows.

    Raises:
        UserError: it allows none.
    """
    configs, refusal = dict[int, Config](), UserError()
    for count in COUNTS:
        try:
            config = configured(_filled(options, {"--learner": f"{count}x{_largest()}"}))
            configs[config.learner.ranks] = config
        except UserError as error:
            refusal = error
    if not configs:
        raise refusal
    return configs


def _candidates(options: argparse.Namespace, configs: Mapping[int, Config]) -> Iterator[_Candidate]:
    prices = _prices(options)
    for (count, config), (name, (usd_per_hour, seller)) in itertools.product(configs.items(), prices.items()):
        machine = learner_machine(config, options.learner_memory_gb or GPUS[name].memory_gb)
        need = learner_need(config, fetched_shape(config.model.path), machine)
        if need.total <= need.available:
            seconds = FirstPlan(config, f"{count}x{name}", options.answer_tokens).train_seconds()[0]
            yield _Candidate(seconds, count, name, usd_per_hour * count, seller)


def _prices(options: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """Return the dollars an hour of each GPU that stays until it is given back, and who has it: one of the file's
    offers, or a provider of the market."""
    prices = dict[str, tuple[float, str]]()

    def add(name: str, usd: float, seller: str) -> None:
        if not name.startswith(_NO_LEARNER) and (name not in prices or usd < prices[name][0]):
            prices[name] = usd, seller

    if options.offers not in (None, MARKET):
        for offer in offered(options)[0]:
            if offer.gpu and not offer.mean_life_hours:
                count, name, card = several(offer.gpu, f"offer {offer.name!r}: gpu =")
                name = next(name for name, one in GPUS.items() if one == card)
                add(name, offer.price_usd_per_hour / count, f"offer {offer.name!r}")
    for one in known_prices()[0]:
        if not one.spot:
            add(one.gpu, one.usd_per_hour, one.provider)
    return prices


def _flags(options: argparse.Namespace, one: _Candidate) -> dict[str, str]:
    flags, price = {"--learner": f"{one.count}x{one.name}"}, "learner.price_usd_per_hour"
    if price not in options.overrides and not configured(_filled(options, flags)).learner.price_usd_per_hour:
        flags[f"--{price}"] = f"{one.usd_per_hour:.4g}"
    return flags


def _filled(options: argparse.Namespace, flags: dict[str, str]) -> argparse.Namespace:
    """Return the flags with these, as if they had been given."""
    filled = argparse.Namespace(**vars(options))
    filled.learner = flags["--learner"]
    filled.overrides = {**options.overrides, **{name[2:]: value for name, value in flags.items() if "." in name}}
    filled.argv = [*options.argv, *(word for flag in flags.items() for word in flag)]
    return filled


def _largest() -> str:
    return max(GPUS, key=lambda name: GPUS[name].memory_gb)
