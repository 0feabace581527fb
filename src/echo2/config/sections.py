"""The settings, section by section: meaning, bounds and default of each. See the package's docstring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from echo2.errors import InvariantError


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What is run and where it is written."""

    out: Annotated[str, _doc("Run directory. Empty: outputs/<name of the config file>.")] = ""
    seed: Annotated[int, _doc("Seed of task order, sampling and initialisation.", ge=0)] = 0
    max_steps: Annotated[int, _doc("Training steps to do in all.", ge=1)] = 100
    deterministic: Annotated[
        bool,
        _doc("Fix which version samples a group, the batch shapes and the order of sums: same seed, same weights."),
    ] = False
    tensorboard: Annotated[bool, _doc("Also write TensorBoard files to <out>/tensorboard.")] = False
    wandb_project: Annotated[str, _doc("Also log to this Weights & Biases project. Empty: off.")] = ""
    log_rollouts: Annotated[int, _doc("Groups a step written as text to <out>/rollouts/.", ge=0)] = 4


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy."""

    path: Annotated[str, _doc("A Hugging Face model directory or hub id.")] = ""
    dtype: Annotated[Literal["float32", "bfloat16"], _doc("Precision of the learner's master weights.")] = "float32"
    snapshot_dtype: Annotated[Literal["float32", "bfloat16"], _doc("Precision of the weights that workers get.")] = (
        "float32"
    )


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """What to solve."""

    source: Annotated[
        str,
        _doc(
            "rows.jsonl | rows.parquet | a Hugging Face dataset directory | hub:owner/name, #split at the end | "
            "reasoning_gym:<name> | logs:attempts.jsonl | sokoban | digit_sorting | file.py:Class | "
            "package.module:Class."
        ),
    ] = ""
    params: Annotated[
        dict[str, Any], _doc("Arguments of a generated source, or {prompt = ...} of columns that are read.")
    ] = field(default_factory=dict)
    shuffle: Annotated[bool, _doc("Draw tasks in a seeded random order, a new one every epoch.")] = True
    environment: Annotated[
        str, _doc("What answers the policy's turns: sokoban | file.py:Class | package.module:Class. Empty: nobody.")
    ] = ""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Held-out evaluation, done by the workers with published snapshots."""

    source: Annotated[str, _doc("Held-out tasks, written like tasks.source. Empty: no evaluation.")] = ""
    params: Annotated[dict[str, Any], _doc("Arguments of a generated source.")] = field(default_factory=dict)
    every: Annotated[int, _doc("Evaluate every so many steps (0: only before and after).", ge=0)] = 0
    limit: Annotated[int, _doc("Tasks per evaluation.", ge=1)] = 256
    temperature: Annotated[float, _doc("Temperature of evaluation (0: greedy).", ge=0.0)] = 1.0


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """How an attempt is scored."""

    functions: Annotated[
        list[str],
        _doc(
            "Each exact_match | numeric_match | math | reasoning_gym | environment | logged | file.py:function | "
            "package.module:function."
        ),
    ] = field(default_factory=list)
    weights: Annotated[list[float], _doc("Weight of each function. Empty: 1.0 each.")] = field(default_factory=list)
    timeout_seconds: Annotated[float, _doc("Limit for scoring one group.", gt=0)] = 60.0


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How rollouts are drawn."""

    group_size: Annotated[int, _doc("Attempts at each task (K).", ge=2, le=1024)] = 8
    temperature: Annotated[float, _doc("Sampling temperature.", gt=0.0)] = 1.0
    top_p: Annotated[float, _doc("Nucleus: smallest set of tokens with this mass (1: all).", gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, _doc("Most likely tokens kept (0: all).", ge=0)] = 0
    max_tokens: Annotated[int, _doc("Longest completion in tokens.", ge=1, le=1_048_576)] = 256
    max_turns: Annotated[int, _doc("Turns of an attempt in an environment, at most.", ge=1, le=10_000)] = 16
    groups_per_batch: Annotated[int, _doc("Groups that a worker samples together in one batch.", ge=1, le=4096)] = 8
    swap: Annotated[
        Literal["between", "during"],
        _doc("Take a new snapshot between generations, or during one, between two tokens."),
    ] = "between"


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How far sampling may run ahead of training."""

    groups_per_step: Annotated[int, _doc("Groups that one training step consumes (P).", ge=1)] = 64
    max_staleness: Annotated[
        int, _doc("S: a step never trains on a token older than S policy versions. 0: strictly on-policy.", ge=0)
    ] = 1
    publish_every: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        _doc('Publish a snapshot every so many steps (kappa). "auto": as many as max_staleness allows; see echo2 run.'),
    ] = 1
    ess_floor: Annotated[
        float,
        _doc("Sample less far ahead while ESS / rollouts of a step is below this (0: off).", ge=0.0, lt=1.0),
    ] = 0.0
    dynamic_sampling: Annotated[
        bool, _doc("Replace groups whose rewards are all equal, so that every group of a step has a gradient.")
    ] = False
    max_resampled: Annotated[
        float, _doc("Groups that a step may replace so, as a multiple of groups_per_step.", gt=0.0, le=1000.0)
    ] = 2.0
    hand_over: Annotated[
        Literal["group", "step"],
        _doc("The learner gets each group once it is complete, or none before the step's last one is."),
    ] = "group"
    order: Annotated[
        Literal["any", "frontier"],
        _doc("Workers sample whole batches, or as few groups at once as end a step soonest, found by trial."),
    ] = "any"
    second_lease_after: Annotated[
        float,
        _doc("An idle worker gets a second lease on a group out so many times longer than usual (0: never).", ge=0.0),
    ] = 0.0
    workers_per_group: Annotated[
        int,
        _doc('With order = "frontier": workers that sample the groups which a step begins with together.', ge=1, le=8),
    ] = 1
    lease_seconds: Annotated[float, _doc("How long a worker may hold a group before another gets it.", gt=0)] = 120.0
    heartbeat_seconds: Annotated[float, _doc("How often workers report.", gt=0)] = 2.0
    lost_after_seconds: Annotated[float, _doc("Silence after which a worker counts as lost.", gt=0)] = 10.0
    max_failures: Annotated[int, _doc("Groups failing in a row before the run stops with the error.", ge=1)] = 8

    @property
    def kappa(self) -> int:
        """`publish_every` of a run that has begun: "auto" has become a number before (`runtime/publish_every.py`)."""
        if self.publish_every == "auto":
            raise InvariantError('schedule.publish_every = "auto" was not settled before the run began')
        return self.publish_every


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How the policy is trained."""

    lr: Annotated[float, _doc("Peak learning rate.", ge=0.0)] = 1e-6
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _doc("Shape after the warm-up.")] = "constant"
    warmup_steps: Annotated[int, _doc("Steps over which the rate rises linearly.", ge=0)] = 0
    betas: Annotated[tuple[float, float], _doc("AdamW betas.")] = (0.9, 0.95)
    weight_decay: Annotated[float, _doc("AdamW weight decay.", ge=0.0)] = 0.0
    grad_clip: Annotated[float, _doc("Largest gradient norm.", gt=0.0)] = 1.0
    loss: Annotated[
        Literal["dppo", "ppo", "decoupled", "tis", "icepop", "cispo", "gspo", "m2po", "none"],
        _doc("Policy loss; see docs/losses.md."),
    ] = "dppo"
    loss_params: Annotated[
        dict[str, float], _doc("Parameters of the loss other than its defaults, e.g. {clip_high = 0.2}.")
    ] = field(default_factory=dict)
    normalisation: Annotated[
        Literal["token", "sequence", "constant"],
        _doc("Mean over tokens, over attempts of their means, or sum over attempts times max_tokens."),
    ] = "token"
    reference_kl: Annotated[
        float, _doc("Weight of the divergence from the initial policy (0: no copy of it is kept).", ge=0.0)
    ] = 0.0
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "rloo"], _doc("Group baseline: mean and std, mean only, leave-one-out mean.")
    ] = "dr_grpo"
    ess_scaling: Annotated[bool, _doc("Scale the rate by sqrt(effective sample size / samples).")] = True
    mask_truncated: Annotated[bool, _doc("Leave rollouts cut off at max_tokens out of the loss.")] = False
    groups_per_microbatch: Annotated[int, _doc("Groups in one forward and backward pass.", ge=1)] = 16
    minibatches_per_round: Annotated[
        int, _doc("Updates a step makes, each with an equal part of its groups. Above 1 it is not on-policy.", ge=1)
    ] = 1
    checkpoint_every: Annotated[int, _doc("Steps between checkpoints.", ge=1)] = 10
    keep_checkpoints: Annotated[int, _doc("Newest checkpoints kept.", ge=1)] = 2
    device: Annotated[str, _doc("cpu | cuda | cuda:0 ... | auto.")] = "auto"
    price_usd_per_hour: Annotated[float, _doc("What the learner's machine costs.", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The workers that `echo2 run` starts itself. Others join with the ticket."""

    count: Annotated[int, _doc("Local workers.", ge=0, le=256)] = 1
    engine: Annotated[Literal["compact", "transformers", "fake"], _doc("What samples tokens.")] = "compact"
    device: Annotated[str, _doc("cpu | cuda | cuda:0 ... | auto.")] = "auto"
    price_usd_per_hour: Annotated[float, _doc("What one local worker costs.", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Which workers are paid for; see docs/capacity.md."""

    activation: Annotated[
        bool, _doc("Let the cheapest workers that keep the learner busy work, and the others stand by.")
    ] = False
    offers: Annotated[
        str, _doc("Offers file: machines with a `rent` command are rented when workers are short. Empty: none.")
    ] = ""
    budget_usd: Annotated[float, _doc("End the run when it has cost so much (0: no limit).", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class BroadcastConfig:
    """How new weights reach the workers; see docs/broadcast.md."""

    scheme: Annotated[
        Literal["trees", "chain", "star"],
        _doc("Who sends to whom: striped trees of workers, a striped chain of them, or the head to everybody."),
    ] = "trees"
    fan_out: Annotated[int, _doc("Workers that one worker sends to, at most.", ge=1, le=64)] = 8
    deltas: Annotated[bool, _doc("Send what changed since the last published version, where that is smaller.")] = True
    anchor_every: Annotated[
        int, _doc("Publications between those whose whole content the learner sends as well.", ge=1, le=10_000)
    ] = 25


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The control plane's address."""

    host: Annotated[str, _doc("Address to listen on. 0.0.0.0 to let other machines join.")] = "127.0.0.1"
    port: Annotated[int, _doc("Port to listen on (0: any free one, kept over restarts).", ge=0, le=65535)] = 0
    advertise: Annotated[str, _doc("Address that tickets name. Empty: host.")] = ""
