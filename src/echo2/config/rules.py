"""Checks settings together: each may be valid, but not their combination."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from echo2.config.sections import (
    DistillConfig,
    EvalConfig,
    FleetConfig,
    HeadConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    TasksConfig,
    WorkersConfig,
)
from echo2.config.values import (
    CHECKED_FORMS,
    LLAMACPP_FORMS,
    LOG_PACKAGES,
    SERVERS,
    endpoint_and_model,
    loss_params,
    weighted,
)
from echo2.core.errors import UserError
from echo2.core.types import DEFAULT_LOGGED_ROLLOUTS, SamplingParams


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    def __post_init__(self) -> None:
        check_together(self)

    @property
    def sampling_params(self) -> SamplingParams:
        """How training rollouts are drawn."""
        sampling = self.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            min_p=sampling.min_p,
            stop=tuple(sampling.stop),
            routes=self.learner.routing_replay,
        )

    @property
    def eval_params(self) -> SamplingParams:
        """Of evaluation: from the whole distribution, as the policy is."""
        return SamplingParams(max_tokens=self.sampling.max_tokens, stop=tuple(self.sampling.stop))

    def swap_of(self, *, is_own: bool, draws: bool) -> Literal["between", "apart", "during"]:
        """When a worker takes a new snapshot: between two generations, or also during one. Then rollouts under way go
        on with it, or, those of strangers whose tokens are checked, with the weights that they began with: else the
        place of the swap is theirs to choose (docs/security.md).

        "between" where a rollout has one version, on-policy, and in deterministic mode, where its tokens may not depend
        on when a snapshot comes (docs/staleness.md).
        """
        if self.run.deterministic or self.schedule.max_staleness == 0:
            return "between"
        return "during" if is_own or not draws else "apart"


def _check_deterministic(config: Config) -> None:
    """Options of the schedule with which the same seed would not give the same weights."""
    schedule = config.schedule
    by_time = {
        'schedule.order = "frontier"': schedule.order == "frontier",
        "schedule.dynamic_sampling = true": schedule.dynamic_sampling,
    }
    excluded = [setting for setting, is_set in by_time.items() if is_set]
    if config.run.deterministic and excluded:
        raise UserError(
            f"run.deterministic = true cannot be combined with {' and '.join(excluded)}, which "
            "depends on measured times. Leave one of them out."
        )
    if config.run.deterministic and config.workers.engine in {*SERVERS, *LLAMACPP_FORMS}:
        raise UserError(
            f"run.deterministic = true, and workers.engine = {config.workers.engine!r}, which makes its own batches, "
            "on which the last bits depend. Take another engine, or leave run.deterministic out."
        )


def _check_forms(config: Config) -> None:
    """Forms that strangers may use are those that a check tells from others."""
    for form in config.workers.forms:
        if form not in CHECKED_FORMS:
            known = ", ".join(CHECKED_FORMS)
            raise UserError(
                f"workers.forms has {form!r}: expected forms whose rollouts a check tells from others: {known}. "
                "Machines of your own may use any engine."
            )


def _check_min_group(config: Config) -> None:
    """A group can't be larger than the whole one, and a rollout alone is compared with none."""
    smallest, size = config.sampling.min_group, config.sampling.group_size
    if smallest == 1 or smallest > size:
        raise UserError(
            f"sampling.min_group = {smallest} with sampling.group_size = {size}: rollouts are compared with each "
            f"other. Set 2 to {size}, or 0 for half of the group."
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


def _check_routes(config: Config) -> None:
    """Routes are a mixture's, and come with sampled rollouts."""
    if not config.learner.routing_replay:
        return
    if any(source.startswith("logs:") for source in config.tasks.sources):
        raise UserError(
            f"learner.routing_replay = true with tasks.source = {config.tasks.source!r}: a log does not say which "
            "experts were chosen. Leave it out."
        )
    if config.workers.engine == "compact":
        raise UserError(
            'learner.routing_replay = true with workers.engine = "compact", which knows no mixtures of experts. Leave '
            "one of them out."
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


def _check_quantised(config: Config) -> None:
    learner, rank = config.learner, config.lora.rank
    setting = f"learner.quantised = {learner.quantised!r}"
    if learner.quantised == "base" and not rank:
        raise UserError(f"{setting}, and lora.rank = 0 trains the whole model. Set lora.rank, or quantise the moments.")
    if learner.quantised == "moments" and rank:
        raise UserError(f"{setting}, and an adapter's moments are small (lora.rank = {rank}). Leave it out.")
    if learner.quantised != "none" and learner.ranks > 1:
        raise UserError(
            f"{setting} with learner.ranks = {learner.ranks}: what is quantised is not cut over ranks. Set "
            "learner.ranks = 1, or leave learner.quantised out: ranks share the weights and moments instead."
        )


def _check_distill(config: Config) -> None:
    """A teacher is there to be learned from, and what it says of a token is that token's alone."""
    teachers, learner = config.distill.teachers, config.learner
    if not teachers and learner.advantage == "none" and not learner.reference_kl:
        raise UserError(
            'learner.advantage = "none" leaves nothing to learn: rewards are not trained on, and distill.teacher is '
            "empty. Name a teacher, or another advantage."
        )
    in_loss = config.distill.in_loss  # wrong ones are refused here
    if not teachers:
        return
    if in_loss is not None and config.sampling_params.is_narrow:
        sampling = config.sampling
        raise UserError(
            f"distill.divergence = {config.distill.divergence} with sampling.top_k = {sampling.top_k}, top_p = "
            f"{sampling.top_p} and min_p = {sampling.min_p}: the divergence is over the whole vocabulary. Set 0, 1 and "
            "0, or leave distill.divergence out."
        )
    _check_endpoints(config)
    if config.schedule.dynamic_sampling and (learner.advantage == "none" or not config.reward.functions):
        raise UserError(
            "schedule.dynamic_sampling = true replaces groups whose rewards are all equal, and rewards are not trained "
            f"on: learner.advantage = {learner.advantage!r}, reward.functions = {config.reward.functions}. Leave it "
            "out."
        )
    if config.eval.sets and not config.reward.functions:
        raise UserError(
            f"eval.source = {config.eval.source!r} without reward.functions: nothing scores the answers. "
            'Name some; learner.advantage = "none" keeps them out of training.'
        )


def _check_endpoints(config: Config) -> None:
    """Teachers behind endpoints say how likely a token is at temperature 1 among all tokens, and nothing else."""
    sampling = config.sampling
    for teacher in config.distill.endpoints.values():
        endpoint_and_model(teacher)
        if sampling.temperature != 1.0 or config.sampling_params.is_narrow:
            raise UserError(
                f"distill.teacher = {teacher!r} with sampling.temperature = {sampling.temperature}, top_k = "
                f"{sampling.top_k}, top_p = {sampling.top_p} and min_p = {sampling.min_p}: a server gives logprobs at "
                "temperature 1 over all tokens. Set 1, 0, 1 and 0, or let the learner hold the teacher: name the "
                "model's directory."
            )


def _check_judge(config: Config) -> None:
    """A judge is asked, and scores what is not only compared."""
    functions, judge = config.reward.functions, config.reward.judge_config
    if any(weighted(entry)[1] == "judge" for entry in functions) != (judge is not None):
        raise UserError(
            f'reward.functions = {functions} with reward.judge = {config.reward.judge}: the reward "judge" and its '
            "table belong together. Write both, or neither."
        )
    if judge is not None and judge.form != "rubric" and config.eval.sets and len(functions) == 1:
        raise UserError(
            f"reward.judge.form = {judge.form!r} with eval.source = {config.eval.source!r}: answers that are compared "
            "with each other win half of the time, however good the policy is. Add a reward, or leave eval.source out."
        )


def check_together(config: Config) -> None:
    """Refuse settings that are each fine and impossible together.

    Raises:
        UserError: with both keys, both values and what to do.
    """
    schedule, parts = config.schedule, config.learner.updates_per_step
    loss_params(config.learner.loss, config.learner.loss_params)
    _check_deterministic(config)
    _check_forms(config)
    _check_logs(config)
    _check_min_group(config)
    _check_routes(config)
    _check_stop(config)
    _check_lora(config)
    _check_quantised(config)
    _check_distill(config)
    _check_judge(config)
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
    if schedule.max_staleness < schedule.publish_every - 1:
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
    config.head.advertised(0), config.head.store_place
