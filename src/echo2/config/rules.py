"""Settings that are each fine and impossible together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from echo2.errors import UserError, did_you_mean
from echo2.types import DEFAULT_LOGGED_ATTEMPTS

if TYPE_CHECKING:
    from echo2.config import Config

_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
#: What each loss takes in learner.loss_params, with its defaults; the losses themselves are in learner/losses.py.
LOSS_PARAMS: Mapping[str, Mapping[str, float]] = {
    "dppo": {"tv_low": 0.2, "tv_high": 0.2, "cap": 10.0, "veto": 1e-4, "square": 1e-3},
    "ppo": _CLIP,
    "decoupled": {**_CLIP, "cap": 5.0},
    "tis": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "cispo": {"floor": 0.0, "cap": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "m2po": {"second_moment": 0.04, "clip_low": 0.3, "clip_high": 0.5},
    "none": {},
}


def loss_params(loss: str, given: Mapping[str, float]) -> dict[str, float]:
    """The parameters of a loss, `given` in place of its defaults.

    Raises:
        UserError: no such loss or parameter, a value out of bounds, or bounds the wrong way round.
    """
    if loss not in LOSS_PARAMS:
        raise UserError(f"learner.loss = {loss!r}: expected one of {', '.join(LOSS_PARAMS)}.")
    known = LOSS_PARAMS[loss]
    for name, value in given.items():
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no parameters"
            hint = did_you_mean(name, known)
            raise UserError(f"learner.loss_params.{name}: the loss {loss!r} {takes}.{hint}")
        if not math.isfinite(value) or value < 0.0:
            raise UserError(f"learner.loss_params.{name} = {value}: expected a number >= 0.")
    values = {**known, **given}
    for low, high in (("low", "high"), ("floor", "cap")):
        if values.get(low, 0.0) > values.get(high, math.inf):
            raise UserError(f"learner.loss_params: {low} = {values[low]} is above {high} = {values[high]}.")
    return values


def _check_order(config: Config) -> None:
    schedule = config.schedule
    if schedule.order == "frontier" and schedule.hand_over == "step":
        raise UserError(
            'schedule.order = "frontier" with schedule.hand_over = "step" has no use: the first groups would be '
            'hurried and then wait for the last. Use hand_over = "group" or order = "any".'
        )
    if config.run.deterministic and schedule.order == "frontier":
        raise UserError(
            'run.deterministic = true needs schedule.order = "any": "frontier" makes batches by measured times, and '
            "their shape is part of what is fixed."
        )
    if config.run.deterministic and schedule.workers_per_group > 1:
        raise UserError(
            f"run.deterministic = true excludes schedule.workers_per_group = {schedule.workers_per_group}: a batch's "
            "shape is part of what is fixed. Set it to 1."
        )
    if schedule.workers_per_group > 1 and schedule.order != "frontier":
        raise UserError(
            f"schedule.workers_per_group = {schedule.workers_per_group} is of the groups that a step begins with: set "
            'schedule.order = "frontier".'
        )
    size = config.sampling.group_size
    if schedule.workers_per_group > 1 and all(size % n for n in range(2, schedule.workers_per_group + 1)):
        raise UserError(
            f"schedule.workers_per_group = {schedule.workers_per_group}: groups of sampling.group_size = {size} cannot "
            "be cut into so many equal portions, nor into fewer. Set it to 1, or change the size."
        )
    if schedule.workers_per_group > 1 and config.tasks.source.startswith("logs:"):
        raise UserError(
            f"schedule.workers_per_group = {schedule.workers_per_group} would split attempts that are not sampled: "
            "set it to 1 where tasks come from a log."
        )
    if config.run.deterministic and schedule.second_lease_after:
        raise UserError(
            f"run.deterministic = true excludes schedule.second_lease_after = {schedule.second_lease_after}: a second "
            "lease is of one group, and a batch's shape is part of what is fixed. Set it to 0."
        )
    if 0.0 < schedule.second_lease_after < 1.0:
        raise UserError(
            f"schedule.second_lease_after = {schedule.second_lease_after} would lease most groups twice: set it "
            "above 1 (2 is twice the usual time), or to 0 for never."
        )


def _check_dials(config: Config) -> None:
    """Options of the schedule that need others, or exclude them."""
    schedule, parts = config.schedule, config.learner.minibatches_per_round
    for name in ("dynamic_sampling", "ess_floor"):
        if config.run.deterministic and getattr(schedule, name):
            raise UserError(
                f"run.deterministic = true excludes schedule.{name} = {getattr(schedule, name)!r}: which groups a step "
                "gets would depend on when a result comes in. Leave one of them out."
            )
    least = 0 if schedule.publish_every == "auto" else schedule.publish_every - 1
    if schedule.ess_floor and schedule.max_staleness <= least:
        raise UserError(
            f"schedule.ess_floor = {schedule.ess_floor} has nothing to tighten: schedule.max_staleness = "
            f"{schedule.max_staleness} is the least that publish_every = {schedule.publish_every} allows. Raise "
            "max_staleness or leave ess_floor out."
        )
    if schedule.groups_per_step % parts:
        raise UserError(
            f"learner.minibatches_per_round = {parts} does not divide schedule.groups_per_step = "
            f"{schedule.groups_per_step}: every update takes as many groups. Use a divisor."
        )


def _check_logs(config: Config) -> None:
    """Attempts from a log (`tasks/logs.py`) are trained on as they are: nothing about them can be set."""
    if config.eval.source.startswith("logs:"):
        raise UserError(
            f"eval.source = {config.eval.source!r}: a log says what was done and not what the policy does. Name tasks."
        )
    if not config.tasks.source.startswith("logs:"):
        return
    attempts = config.tasks.params.get("attempts", DEFAULT_LOGGED_ATTEMPTS)
    if attempts != config.sampling.group_size:
        raise UserError(
            f"sampling.group_size = {config.sampling.group_size} with tasks.params.attempts = {attempts}: a row of a "
            "log is one group. Set both to the same number."
        )
    if config.schedule.ess_floor:
        raise UserError(
            f"schedule.ess_floor = {config.schedule.ess_floor} with tasks from a log has no effect: sampling less far "
            "ahead makes a log no younger. Leave it out."
        )
    if config.tasks.environment:
        raise UserError(f"tasks.environment = {config.tasks.environment!r} cannot answer attempts from a log.")


def check_together(config: Config) -> None:
    """Refuse settings that are each fine and impossible together.

    Raises:
        UserError: with both keys, both values and what to do.
    """
    schedule, sampling = config.schedule, config.sampling
    loss_params(config.learner.loss, config.learner.loss_params)
    _check_dials(config)
    _check_order(config)
    _check_logs(config)
    for section in fields(config):
        for setting in fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), setting.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{section.name}.{setting.name} = {value} is not a finite number.")
    if schedule.publish_every == "auto":
        if config.run.deterministic and schedule.max_staleness:
            raise UserError(
                'run.deterministic = true needs a number for schedule.publish_every: "auto" follows from measured '
                "times, which are never the same twice."
            )
    elif schedule.max_staleness < schedule.publish_every - 1:
        raise UserError(
            f"schedule.max_staleness = {schedule.max_staleness} with schedule.publish_every = {schedule.publish_every} "
            f"would wait for ever: step {schedule.publish_every - 1} has no snapshot young enough. Set max_staleness "
            f">= {schedule.publish_every - 1} or publish_every <= {schedule.max_staleness + 1}."
        )
    if config.fleet.offers and not config.fleet.activation:
        raise UserError(
            f"fleet.offers = {config.fleet.offers!r} does nothing with fleet.activation = false: set that to true."
        )
    if config.reward.weights and len(config.reward.weights) != len(config.reward.functions):
        raise UserError(
            f"reward.weights has {len(config.reward.weights)} entries for {len(config.reward.functions)} "
            "reward.functions: give one weight each, or none."
        )
    if config.run.deterministic and sampling.swap == "during":
        raise UserError(
            'run.deterministic = true needs sampling.swap = "between": a swap during a generation happens when the '
            "network pleases, so the tokens would depend on it."
        )
    if schedule.lost_after_seconds <= schedule.heartbeat_seconds:
        raise UserError(
            f"schedule.lost_after_seconds = {schedule.lost_after_seconds} must exceed schedule.heartbeat_seconds = "
            f"{schedule.heartbeat_seconds}, or healthy workers count as lost."
        )
