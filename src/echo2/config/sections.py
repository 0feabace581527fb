"""The settings, section by section: meaning, bounds and default of each. See the package's docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from echo2.config.engines import ENGINES
from echo2.config.rules import LOOPBACK, check_together, host_and_port, weighted
from echo2.errors import InvariantError
from echo2.types import STOP_CHARS_MAX, STOP_STRINGS_MAX, SamplingParams


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What is run and where it is logged."""

    seed: Annotated[int, _doc("Seed of task order, sampling and initialisation.", ge=0)] = 0
    max_steps: Annotated[int, _doc("Training steps to do in all.", ge=1)] = 100
    deterministic: Annotated[
        bool,
        _doc("Fix which version samples a group, the batch shapes and the order of sums: same seed, same weights."),
    ] = False
    log_to: Annotated[
        list[str],
        _doc("Where metrics go as well: tensorboard | wandb:<project of Weights & Biases> | wandb+rollouts:<project>."),
    ] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy."""

    path: Annotated[str, _doc("A Hugging Face model directory or hub id.")] = ""
    chat_template_args: Annotated[
        dict[str, bool | int | float | str],
        _doc("Arguments of the model's chat template, e.g. {enable_thinking = false}."),
    ] = field(default_factory=dict)
    snapshot_dtype: Annotated[
        Literal["float32", "bfloat16"],
        _doc("Precision of the weights that workers get. The learner keeps its own in float32."),
    ] = "float32"
    compute_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _doc('Precision of the learner\'s matrix products. "auto": bfloat16 on a GPU that has it, else float32.'),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """An adapter that is trained in place of the model."""

    rank: Annotated[int, _doc("Rank of the adapter (0: there is none, the whole model is trained).", ge=0, le=4096)] = 0
    alpha: Annotated[int, _doc("Its product is scaled by alpha / rank (0: alpha is twice the rank).", ge=0)] = 0
    targets: Annotated[
        list[str], _doc('Linear layers that have one, by the end of their names; ["all-linear"]: all but the head.')
    ] = field(default_factory=lambda: ["all-linear"])

    @property
    def scaled_alpha(self) -> int:
        """`alpha`, or its default."""
        return self.alpha or 2 * self.rank


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """What to solve."""

    source: Annotated[
        str | list[str],
        _doc(
            "rows.jsonl | rows.parquet | a Hugging Face dataset directory | hub:owner/name, #split at the end | "
            "reasoning_gym:<name> | verifiers:<taskset> | logs:rollouts.jsonl | digit_sorting | file.py:Class | "
            'package.module:Class. Or several, in shares: ["0.7 * rows.jsonl", "0.3 * digit_sorting"].'
        ),
    ] = ""
    params: Annotated[
        dict[str, Any], _doc("Arguments of a generated source, or {prompt = ...} of columns that are read; of each.")
    ] = field(default_factory=dict)
    environment: Annotated[
        str,
        _doc(
            "What answers the policy's turns: file.py:Class | package.module:Class; or what plays by itself: "
            "harness:file.py:Class | verifiers | openenv:http://HOST:PORT."
        ),
    ] = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that are named, without their weights."""
        if isinstance(self.source, str):
            return (self.source,) if self.source else ()
        return tuple(weighted(entry, "tasks.source")[1] for entry in self.source)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Held-out evaluation, done by the workers with published snapshots."""

    source: Annotated[
        str | dict[str, str],
        _doc("Held-out tasks, written like tasks.source; or several sets by name. Empty: no evaluation."),
    ] = ""
    params: Annotated[dict[str, Any], _doc("Arguments of a generated source.")] = field(default_factory=dict)
    samples: Annotated[int, _doc("Rollouts of each task: above 1 also pass@k.", ge=1, le=1024)] = 1
    every: Annotated[int, _doc("Evaluate every so many steps (0: only before and after).", ge=0)] = 0
    limit: Annotated[int, _doc("Tasks of each set per evaluation.", ge=1)] = 256

    @property
    def sets(self) -> Mapping[str, str]:
        """The source of each held-out set by name; of a single one the name is empty."""
        named = {"": self.source} if isinstance(self.source, str) else self.source
        return {name: source for name, source in named.items() if source}


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """How a rollout is scored."""

    functions: Annotated[
        list[str],
        _doc(
            "Each exact_match | numeric_match | math | reasoning_gym | environment | logged | file.py:function | "
            'package.module:function. The reward is their sum, weighted where a weight is given: "0.2 * math".'
        ),
    ] = field(default_factory=list)
    timeout_seconds: Annotated[float, _doc("Limit for scoring one group.", gt=0)] = 60.0


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How rollouts are drawn."""

    group_size: Annotated[int, _doc("Rollouts of each task (K).", ge=2, le=1024)] = 8
    temperature: Annotated[float, _doc("Sampling temperature.", gt=0.0)] = 1.0
    top_p: Annotated[float, _doc("Nucleus: smallest set of tokens with this mass (1: all).", gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, _doc("Most likely tokens kept (0: all).", ge=0)] = 0
    min_p: Annotated[
        float, _doc("Least probability of a token that is kept, as a share of the most likely one's.", ge=0.0, lt=1.0)
    ] = 0.0
    max_tokens: Annotated[int, _doc("Longest completion in tokens.", ge=1, le=1_048_576)] = 256
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]],
        _doc("Strings that end a rollout of one turn, as the end token does.", max_length=STOP_STRINGS_MAX),
    ] = field(default_factory=list)
    max_turns: Annotated[int, _doc("Turns of a rollout in an environment, at most.", ge=1, le=10_000)] = 16
    groups_per_batch: Annotated[
        int, _doc("Groups that a worker decodes at once, unless it offers fewer slots.", ge=1, le=4096)
    ] = 8


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
    dynamic_sampling: Annotated[
        bool, _doc("Replace groups whose rewards are all equal, so that every group of a step has a gradient.")
    ] = False
    order: Annotated[
        Literal["any", "frontier"],
        _doc("Workers sample whole batches, or as few groups at once as end a step soonest, found by trial."),
    ] = "any"
    lease_seconds: Annotated[float, _doc("How long a worker may hold a group before another gets it.", gt=0)] = 120.0

    @property
    def kappa(self) -> int:
        """`publish_every` of a run that has begun: "auto" has become a number before the start."""
        if self.publish_every == "auto":
            raise InvariantError('schedule.publish_every = "auto" was not settled before the run began')
        return self.publish_every


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How the policy is trained."""

    lr: Annotated[float, _doc("Peak learning rate.", ge=0.0)] = 1e-6
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _doc("Shape after the warm-up.")] = "constant"
    warmup_steps: Annotated[int, _doc("Steps over which the rate rises linearly.", ge=0)] = 0
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
        _doc("Mean over tokens, over rollouts of their means, or sum over rollouts times max_tokens."),
    ] = "token"
    reference_kl: Annotated[
        float, _doc("Weight of the divergence from the initial policy (0: no copy of it is kept).", ge=0.0)
    ] = 0.0
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "rloo"], _doc("Group baseline: mean and std, mean only, leave-one-out mean.")
    ] = "dr_grpo"
    tokens_per_microbatch: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        _doc('Tokens in one forward and backward pass. "auto": as many as fit the machine; echo2 plan says how many.'),
    ] = "auto"
    ranks: Annotated[
        int, _doc("Processes that hold the model in shares, a GPU each. Under torchrun: as many as it starts.", ge=1)
    ] = 1
    updates_per_step: Annotated[
        int, _doc("Updates a step makes, each with an equal part of its groups. Above 1 it is not on-policy.", ge=1)
    ] = 1
    checkpoint_every: Annotated[int, _doc("Steps between checkpoints.", ge=1)] = 10
    keep_checkpoints: Annotated[int, _doc("Newest checkpoints kept, beside the best one that was evaluated.", ge=1)] = 2
    keep_every: Annotated[int, _doc("Checkpoints of each Nth step are kept for good (0: none).", ge=0)] = 0
    price_usd_per_hour: Annotated[float, _doc("What the learner's machine costs.", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The workers that `echo2 run` starts itself. Others join with the ticket."""

    count: Annotated[int, _doc("Local workers.", ge=0, le=256)] = 1
    engine: Annotated[str, _doc(f"What samples tokens: {' | '.join(ENGINES)}.")] = "compact"
    price_usd_per_hour: Annotated[float, _doc("What one local worker costs.", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Which workers are paid for; see docs/capacity.md."""

    offers: Annotated[
        str,
        _doc(
            "Offers file. The cheapest workers that keep the learner busy work, the others stand by, and machines with "
            "a `rent` command are rented when workers are short. Empty: all workers work."
        ),
    ] = ""
    budget_usd: Annotated[float, _doc("End the run when it has cost so much (0: no limit).", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The control plane's address."""

    listen: Annotated[
        str,
        _doc(
            "HOST:PORT to listen on; host 0.0.0.0 lets other machines join, port 0 is any free one, kept over restarts."
        ),
    ] = "127.0.0.1:0"
    advertise: Annotated[str, _doc("Host that tickets name. Empty: that of head.listen.")] = ""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`.

        Raises:
            UserError: it is not HOST:PORT.
        """
        return host_and_port(self.listen, "head.listen", "0.0.0.0:7341")

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine can call it."""
        return not self.advertise and self.address[0] in LOOPBACK


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
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    def __post_init__(self) -> None:
        check_together(self)

    @property
    def sampling_params(self) -> SamplingParams:
        """How training rollouts are drawn."""
        sampling = self.sampling
        top_logprobs = int(self.learner.loss_params.get("score_centering", 0))
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            top_logprobs=top_logprobs,
            min_p=sampling.min_p,
            stop=tuple(sampling.stop),
        )

    @property
    def eval_params(self) -> SamplingParams:
        """Of evaluation: from the whole distribution, as the policy is."""
        return SamplingParams(max_tokens=self.sampling.max_tokens, stop=tuple(self.sampling.stop))

    @property
    def swap(self) -> Literal["between", "during"]:
        """When a worker takes a new snapshot: between two generations, or also during one, between two tokens.

        "during" where that may be: not on-policy, where a rollout has one version, and not in deterministic mode, where
        its tokens may not depend on when a snapshot comes (docs/staleness.md).
        """
        return "between" if self.run.deterministic or self.schedule.max_staleness == 0 else "during"
