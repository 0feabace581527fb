"""Checks settings together: each may be valid, but not their combination."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from echo2.config.engines import SERVERS
from echo2.errors import UserError, did_you_mean
from echo2.types import DEFAULT_LOGGED_ROLLOUTS

if TYPE_CHECKING:
    from echo2.config.sections import Config

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
#: What every loss takes beside its own; 0: off. docs/losses.md.
SHARED_LOSS_PARAMS: Mapping[str, float] = {"score_centering": 0.0, "max_binary_kl": 0.0}
#: Most of `score_centering`: 6 KiB a token.
TOP_LOGPROBS_MAX = 1024
#: Targets of run.log_to, and the package that each needs.
LOG_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "wandb+rollouts": "wandb", "trackio": "trackio"}
#: Hosts by which a machine calls itself.


def loss_params(loss: str, given: Mapping[str, float]) -> dict[str, float]:
    """The parameters of a loss, `given` in place of its defaults.

    Raises:
        UserError: no such loss or parameter, a value out of bounds, or bounds the wrong way round.
    """
    if loss not in LOSS_PARAMS:
        raise UserError(f"learner.loss = {loss!r}: expected one of {', '.join(LOSS_PARAMS)}.")
    known = {**LOSS_PARAMS[loss], **SHARED_LOSS_PARAMS}
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"learner.loss_params.{name}: the loss {loss!r} takes {', '.join(known)}.{hint}")
        if not math.isfinite(value) or value < 0.0:
            raise UserError(f"learner.loss_params.{name} = {value}: expected a number >= 0.")
    values = {**known, **given}
    for low, high in (("low", "high"), ("floor", "cap")):
        if values.get(low, 0.0) > values.get(high, math.inf):
            raise UserError(f"learner.loss_params: {low} = {values[low]} is above {high} = {values[high]}.")
    top = values["score_centering"]
    if top % 1 or top > TOP_LOGPROBS_MAX:
        raise UserError(
            f"learner.loss_params.score_centering = {top}: expected how many of the sampler's most likely tokens it "
            f"looks at, a whole number up to {TOP_LOGPROBS_MAX}; more than the vocabulary has is all of it."
        )
    if top and loss == "gspo":
        raise UserError(
            'learner.loss_params.score_centering: loss = "gspo" has one weight a sequence, and the correction needs '
            "one for every token that could have come. Take another loss, or leave it out."
        )
    return values


def _check_deterministic(config: Config) -> None:
    """Options of the schedule by which the same seed would not give the same weights."""
    schedule = config.schedule
    by_time = {
        'schedule.order = "frontier"': schedule.order == "frontier",
        "schedule.dynamic_sampling = true": schedule.dynamic_sampling,
        'schedule.publish_every = "auto"': schedule.publish_every == "auto" and schedule.max_staleness > 0,
    }
    excluded = [setting for setting, is_set in by_time.items() if is_set]
    if config.run.deterministic and excluded:
        raise UserError(
            f"run.deterministic = true cannot be combined with {' and '.join(excluded)}, which "
            "depends on measured times. Leave one of them out."
        )
    if config.run.deterministic and config.workers.engine in SERVERS:
        raise UserError(
            f"run.deterministic = true, and workers.engine = {config.workers.engine!r}: a token server makes its own "
            "batches, on which the last bits depend. Take another engine, or leave run.deterministic out."
        )


def _check_logs(config: Config) -> None:
    """Rollouts from a log (`tasks/logs.py`) are trained on as they are: nothing about them can be set."""
    if any(source.startswith("logs:") for source in config.eval.sets.values()):
        raise UserError(
            f"eval.source = {config.eval.source!r}: a log cannot show what the policy does. Name tasks instead."
        )
    if not any(source.startswith("logs:") for source in config.tasks.sources):
        return
    if len(config.tasks.sources) > 1:
        raise UserError(f"tasks.source = {config.tasks.source}: a log cannot be mixed with other sources.")
    rollouts = config.tasks.params.get("rollouts", DEFAULT_LOGGED_ROLLOUTS)
    if rollouts != config.sampling.group_size:
        raise UserError(
            f"sampling.group_size = {config.sampling.group_size} with tasks.params.rollouts = {rollouts}: a row of a "
            "log is one group. Set both to the same number."
        )
    if config.tasks.environment:
        raise UserError(f"tasks.environment = {config.tasks.environment!r} cannot answer rollouts from a log.")


def _check_centering(config: Config) -> None:
    """`score_centering` needs the sampler's own distribution, over the whole vocabulary."""
    if not config.sampling_params.top_logprobs:
        return
    sampling = config.sampling
    if config.sampling_params.is_narrow:
        raise UserError(
            f"learner.loss_params.score_centering with sampling.top_k = {sampling.top_k}, top_p = {sampling.top_p} and "
            f"min_p = {sampling.min_p}: its tail is modelled over the whole vocabulary. Set 0, 1 and 0."
        )
    if any(source.startswith("logs:") for source in config.tasks.sources):
        raise UserError(
            f"learner.loss_params.score_centering with tasks.source = {config.tasks.source!r}: a log says nothing of "
            "the tokens that were not drawn. Leave it out."
        )


def _check_stop(config: Config) -> None:
    """Where a turn ends is an environment's to say; in a log rollouts have ended."""
    is_logged = any(source.startswith("logs:") for source in config.tasks.sources)
    if config.sampling.stop and (config.tasks.environment or is_logged):
        what = f"tasks.{'source' if is_logged else 'environment'}"
        other = config.tasks.source if is_logged else config.tasks.environment
        raise UserError(
            f"sampling.stop = {config.sampling.stop} with {what} = {other!r}: it ends rollouts of one turn that are "
            "sampled. Leave it out; an environment's class may have a `stop` of its own."
        )


def _check_lora(config: Config) -> None:
    lora = config.lora
    if not lora.targets:
        raise UserError('lora.targets is empty: name linear layers, or write ["all-linear"].')
    if not lora.rank and (lora.alpha or lora.path or lora.targets != ["all-linear"]):
        raise UserError("lora.rank = 0 trains the whole model: set lora.rank, or leave out the rest of [lora].")


def check_together(config: Config) -> None:
    """Refuse settings that are each fine and impossible together.

    Raises:
        UserError: with both keys, both values and what to do.
    """
    schedule, parts = config.schedule, config.learner.updates_per_step
    loss_params(config.learner.loss, config.learner.loss_params)
    _check_deterministic(config)
    _check_logs(config)
    _check_centering(config)
    _check_stop(config)
    _check_lora(config)
    for section in fields(config):
        for setting in fields(getattr(config, section.name)):
            value = getattr(getattr(config, section.name), setting.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{section.name}.{setting.name} = {value} is not a finite number.")
    rollouts = schedule.groups_per_step * config.sampling.group_size
    if config.learner.ranks > rollouts:
        raise UserError(
            f"learner.ranks = {config.learner.ranks}: a step has {rollouts} rollouts (schedule.groups_per_step times "
            f"sampling.group_size), so some ranks would have nothing to do. Set learner.ranks = {rollouts} or less."
        )
    if schedule.groups_per_step % parts:
        raise UserError(
            f"learner.updates_per_step = {parts} does not divide schedule.groups_per_step = "
            f"{schedule.groups_per_step}: every update must have the same number of groups. Use a divisor."
        )
    if schedule.publish_every != "auto" and schedule.max_staleness < schedule.publish_every - 1:
        raise UserError(
            f"schedule.max_staleness = {schedule.max_staleness} with schedule.publish_every = {schedule.publish_every} "
            f"would wait for ever: step {schedule.publish_every - 1} has no snapshot young enough. Set max_staleness "
            f">= {schedule.publish_every - 1} or publish_every <= {schedule.max_staleness + 1}."
        )
    for target in config.run.log_to:
        kind, _, project = target.partition(":")
        if kind not in LOG_PACKAGES or bool(project) == (kind == "tensorboard"):
            raise UserError(
                f"run.log_to has {target!r}: expected tensorboard, wandb:<project>, wandb+rollouts:<project> or "
                "trackio:<project>."
            )
    config.head.address  # noqa: B018  it is checked when it is read


def host_and_port(text: str, setting: str, example: str) -> tuple[str, int]:
    """HOST:PORT to listen on; an IPv6 address may stand in brackets.

    Raises:
        UserError: it is not.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{setting} = {text!r}: expected HOST:PORT, for example {example}.")
    return host.strip("[]"), int(port)


def weighted(entry: str, setting: str = "reward.functions") -> tuple[float, str]:
    """(weight, name) of an entry of a list in which each may have a weight: "name" has 1, "0.2 * name" has 0.2.

    Raises:
        UserError: what stands before the * is no finite number.
    """
    number, star, name = entry.rpartition("*")
    try:
        weight = float(number) if star else 1.0
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"{setting} has {entry!r}: expected a name, or a weight and a name as in '0.2 * math'.")
    return weight, name.strip()
