"""The settings, section by section: meaning, bounds and default of each. See the package's docstring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from echo2.config.judge import JudgeConfig, read_judge
from echo2.config.values import (
    AUTO,
    CHECKED_FORMS,
    ENGINES,
    SELF,
    Advantage,
    Divergence,
    Normalisation,
    is_endpoint,
    read_divergence,
    weighted,
)
from echo2.core.addresses import host_and_port, is_loopback, join_all
from echo2.core.errors import UserError
from echo2.core.types import STOP_CHARS_MAX, STOP_STRINGS_MAX


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What is run and where it is logged."""

    seed: Annotated[int, _doc("Seed of the task order, of sampling and of initialisation.", ge=0)] = 0
    max_steps: Annotated[int, _doc("Total number of training steps.", ge=1)] = 100
    deterministic: Annotated[
        bool,
        _doc("Same seed, same weights: fix versions, batch shapes and the order of sums."),
    ] = False
    log_to: Annotated[
        list[str],
        _doc(
            "Also send metrics to: tensorboard | wandb:<project of Weights & Biases> | wandb+rollouts:<project> | "
            "trackio:<project>."
        ),
    ] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy."""

    path: Annotated[str, _doc("Hugging Face model directory or hub id of the policy to train.")] = ""
    chat_template_args: Annotated[
        dict[str, bool | int | float | str],
        _doc("Arguments of the model's chat template, e.g. {enable_thinking = false}."),
    ] = field(default_factory=dict)
    snapshot_dtype: Annotated[
        Literal["float32", "bfloat16"],
        _doc(
            "Precision of the weights that workers receive. What is trained stays float32 at the learner; a frozen "
            "model under adapters is rounded there, too."
        ),
    ] = "float32"
    compute_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _doc('Precision of the learner\'s matrix products. "auto": bfloat16 on a GPU that supports it, else float32.'),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """An adapter that is trained in place of the model."""

    rank: Annotated[int, _doc("Rank of the LoRA adapter. 0: no adapter, all weights are trained.", ge=0, le=4096)] = 0
    alpha: Annotated[int, _doc("The adapter is scaled by alpha / rank. 0: alpha is twice the rank.", ge=0)] = 0
    targets: Annotated[
        list[str],
        _doc(
            'Linear layers with an adapter, by the ends of their names; "all-linear": all but the output and those '
            'that PEFT does not adapt. "experts": the experts of a mixture, for example ["all-linear", "experts"].'
        ),
    ] = field(default_factory=lambda: ["all-linear"])
    path: Annotated[
        str,
        _doc(
            "PEFT adapter that training begins with, for example one that `echo2 sft` wrote. Its rank, alpha and "
            "targets must be those of the run. Empty: a new adapter, drawn with run.seed."
        ),
    ] = ""

    @property
    def scaled_alpha(self) -> int:
        return self.alpha or 2 * self.rank


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """What to solve."""

    source: Annotated[
        str | list[str],
        _doc(
            "Training tasks: rows.jsonl | rows.parquet | a Hugging Face dataset directory or hub:owner/name (#split at "
            "its end) | reasoning_gym:<name> | verifiers:<taskset> | logs:rollouts.jsonl | digit_sorting | "
            'file.py:Class | package.module:Class. Mixtures: ["0.7 * rows.jsonl", "0.3 * digit_sorting"].'
        ),
    ] = ""
    params: Annotated[
        dict[str, Any], _doc('Arguments of each source; for rows from a file, e.g. {prompt = "{question}"}.')
    ] = field(default_factory=dict)
    environment: Annotated[
        str,
        _doc(
            "For tasks of several turns. An environment that answers the policy: file.py:Class | package.module:Class "
            "| openenv:http://HOST:PORT. Or a harness that calls the policy: harness:file.py:Class | verifiers."
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
        _doc("Held-out tasks, written like tasks.source, or several sets by name. Empty: no evaluation."),
    ] = ""
    params: Annotated[dict[str, Any], _doc("Like tasks.params, for eval.source.")] = field(default_factory=dict)
    samples: Annotated[int, _doc("Rollouts for each task. More than 1 also measures pass@k.", ge=1, le=1024)] = 1
    every: Annotated[int, _doc("Steps between evaluations. 0: only before and after training.", ge=0)] = 0
    limit: Annotated[int, _doc("Most tasks of each set in one evaluation.", ge=1)] = 256

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
            "Reward functions: exact_match | numeric_match | math | reasoning_gym | environment | logged | judge | "
            'file.py:function | package.module:function. Several are summed; "0.2 * math" gives one a weight.'
        ),
    ] = field(default_factory=list)
    timeout_seconds: Annotated[
        float, _doc("Time limit for scoring one group, and for one request to a judge.", gt=0)
    ] = 60.0
    judge: Annotated[
        dict[str, Any],
        _doc(
            "The judge behind the reward `judge`, a table with model, base_url and rubric; form, api_key_env, params, "
            "max_concurrency, requests_per_minute, tokens_per_minute, usd_per_mtok, budget_usd. See docs/own-things.md."
        ),
    ] = field(default_factory=dict)

    @property
    def judge_config(self) -> JudgeConfig | None:
        """The judge; None: there is none."""
        return read_judge(self.judge) if self.judge else None

    @property
    def scored_by(self) -> str:
        """Whom those wait for who wait for rewards. Functions of echo2 take no time beside a judge."""
        has_own = not self.judge or any(":" in function for function in self.functions)
        return " or ".join(["the judge"] * bool(self.judge) + ["your reward function"] * has_own)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How rollouts are drawn."""

    group_size: Annotated[int, _doc("Rollouts in a group, which all answer the same task (K).", ge=2, le=1024)] = 8
    min_group: Annotated[
        int,
        _doc("Rollouts with which a group trains when the others failed; with fewer it gets more. 0: half.", ge=0),
    ] = 0
    temperature: Annotated[float, _doc("Sampling temperature.", gt=0.0)] = 1.0
    top_p: Annotated[
        float, _doc("Sample from the smallest set with this probability. 1: all tokens.", gt=0.0, le=1.0)
    ] = 1.0
    top_k: Annotated[int, _doc("Sample from this many of the most likely tokens. 0: all tokens.", ge=0)] = 0
    min_p: Annotated[
        float, _doc("Drop tokens below this share of the probability of the most likely token.", ge=0.0, lt=1.0)
    ] = 0.0
    max_tokens: Annotated[int, _doc("Most tokens in a completion.", ge=1, le=1_048_576)] = 256
    stop: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]],
        _doc("Strings that end a rollout, like the end token. For tasks of one turn.", max_length=STOP_STRINGS_MAX),
    ] = field(default_factory=list)
    max_turns: Annotated[int, _doc("Most turns of a rollout in an environment.", ge=1, le=10_000)] = 16
    groups_per_batch: Annotated[
        int, _doc("Groups that a worker decodes at once, to begin with. `worker --slots`: the most.", ge=1, le=4096)
    ] = 8


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How far sampling may run ahead of training."""

    groups_per_step: Annotated[int, _doc("Groups in one training step (P).", ge=1)] = 64
    max_staleness: Annotated[
        int, _doc("S: no step trains on a token older than S policy versions. 0: strictly on-policy.", ge=0)
    ] = 1
    publish_every: Annotated[int, _doc("Most steps between snapshots (kappa): at most max_staleness + 1.", ge=1)] = 1
    dynamic_sampling: Annotated[
        bool, _doc("Replace groups whose rewards are all equal, so that every group in a step has a gradient.")
    ] = False
    order: Annotated[
        Literal["any", "frontier"],
        _doc("any: workers sample full batches. frontier: the number of groups at once that completes steps soonest."),
    ] = "any"
    lease_seconds: Annotated[float, _doc("How long a worker may hold a group before another gets it.", gt=0)] = 120.0


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """How the policy is trained."""

    lr: Annotated[float, _doc("Peak learning rate.", ge=0.0)] = 1e-6
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _doc("Shape after the warm-up.")] = "constant"
    warmup_steps: Annotated[int, _doc("Steps over which the learning rate rises linearly.", ge=0)] = 0
    weight_decay: Annotated[float, _doc("AdamW weight decay.", ge=0.0)] = 0.0
    grad_clip: Annotated[float, _doc("Gradients are clipped to this norm.", gt=0.0)] = 1.0
    loss: Annotated[
        Literal["dppo", "ppo", "decoupled", "tis", "icepop", "cispo", "gspo", "none"],
        _doc("Policy loss. See docs/losses.md."),
    ] = "dppo"
    loss_params: Annotated[
        dict[str, float], _doc("Parameters of the loss that differ from its defaults, e.g. {clip_high = 0.2}.")
    ] = field(default_factory=dict)
    normalisation: Annotated[
        Normalisation,
        _doc("Mean over all tokens, mean over rollouts of their means, or sum over rollouts times max_tokens."),
    ] = "token"
    reference_kl: Annotated[float, _doc("Weight of the KL penalty towards the initial policy. 0: none.", ge=0.0)] = 0.0
    advantage: Annotated[
        Advantage,
        _doc(
            "Reward minus the group's mean, over its std (grpo) or not; rloo: minus the others' mean. none: 0, rewards "
            "are only shown."
        ),
    ] = "dr_grpo"
    routing_replay: Annotated[
        bool, _doc("Of a mixture of experts: train each token with the experts that sampled it. See docs/losses.md.")
    ] = False
    tokens_per_microbatch: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        _doc('Tokens in one forward and backward pass. "auto": as many as fit in memory; `echo2 plan` tells how many.'),
    ] = "auto"
    quantised: Annotated[
        Literal["none", "base", "moments"],
        _doc(
            "What the learner holds in few bits, with bitsandbytes: base: a frozen model under adapters, in 4 bits "
            "(nf4), and workers receive the values that it then has. moments: AdamW's, in 8 bits. See docs/capacity.md."
        ),
    ] = "none"
    ranks: Annotated[
        int, _doc("Processes that share the model, one GPU each. Under torchrun: as many as it starts.", ge=1)
    ] = 1
    updates_per_step: Annotated[
        int, _doc("Optimizer updates in a step, each on a part of its groups. Above 1: not on-policy.", ge=1)
    ] = 1
    checkpoint_every: Annotated[int, _doc("Steps between checkpoints.", ge=1)] = 10
    keep_checkpoints: Annotated[int, _doc("Newest checkpoints kept, besides the best one.", ge=1)] = 2
    keep_every: Annotated[int, _doc("Also keep the checkpoint of every Nth step. 0: none.", ge=0)] = 0
    price_usd_per_hour: Annotated[float, _doc("Price of the learner's machine.", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """A teacher that the learner holds or asks, and that scores the tokens which the policy sampled."""

    teacher: Annotated[
        str | dict[str, str],
        _doc(
            "Model directory or hub id with the policy's tokenizer, or the address of a server of vLLM that has one, "
            "as http://HOST:8000/v1, or several by name, one of which each row's column `teacher` gives; "
            '"self": the policy itself. A row\'s column `teacher_prompt` is what the teacher reads in place of '
            "`prompt`. Empty: none."
        ),
    ] = ""
    weight: Annotated[float, _doc("Weight of the divergence from the teacher, beside the reward.", gt=0.0)] = 1.0
    divergence: Annotated[
        dict[str, int | float],
        _doc(
            "Empty: the advantage of each token has the teacher's logprob less the policy's. {top_k = 64, beta = 1.0}: "
            "the loss has the divergence over so many of the teacher's likely tokens, and the rest as one. beta: 1 "
            "reverse KL (default), 0 forward KL, between them Jensen-Shannon, as in TRL."
        ),
    ] = field(default_factory=dict)

    @property
    def in_loss(self) -> Divergence | None:
        """The divergence that the loss has; None: the teacher's part is in the advantages."""
        return read_divergence(self.divergence) if self.divergence else None

    @property
    def num_likely(self) -> int:
        """How many of a teacher's likely tokens are compared one by one."""
        return 0 if self.in_loss is None else self.in_loss.top_k

    @property
    def teachers(self) -> Mapping[str, str]:
        """Paths by name; of a single teacher the name is empty."""
        named = {"": self.teacher} if isinstance(self.teacher, str) else self.teacher
        return {name: path for name, path in named.items() if path}

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Those of `teachers` that are addresses."""
        return {name: path for name, path in self.teachers.items() if is_endpoint(path)}

    @property
    def loaded(self) -> list[str]:
        """The models that the learner holds as teachers, beside the policy."""
        return [path for path in self.teachers.values() if path != SELF and not is_endpoint(path)]


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The workers that `echo2 run` starts itself. Others join with the ticket."""

    count: Annotated[int, _doc("Workers on this machine. Others join with the ticket.", ge=0, le=256)] = 1
    engine: Annotated[str, _doc(f"Software that samples tokens: {' | '.join(ENGINES)} (see docs/engines.md).")] = AUTO
    require_checks: Annotated[
        bool,
        _doc(
            "Strangers must be checkable: their engine draws tokens from the head's random stream (compact, "
            "transformers), and until they are trusted they work only while a machine of yours can check them. false: "
            "also other engines, whose best of many tries no check sees, and unchecked groups while nobody can check."
        ),
    ] = True
    forms: Annotated[
        list[str],
        _doc(
            f"Forms to which strangers may round the weights that they sample with: {' | '.join(CHECKED_FORMS)} (see "
            "docs/engines.md). Your own machines may use any."
        ),
    ] = field(default_factory=list)
    price_usd_per_hour: Annotated[float, _doc("Price of one local worker.", ge=0.0)] = 0.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Which workers are paid for; see docs/capacity.md."""

    offers: Annotated[
        str,
        _doc(
            "File of machines on offer. The cheapest workers that keep the learner busy work, the others stand by, and "
            "machines with a `rent` command are rented when workers are missing. Empty: all workers work."
        ),
    ] = ""
    budget_usd: Annotated[float, _doc("Stop the run at this cost. 0: no limit.", ge=0.0)] = 0.0


def place_and_lag(store: str) -> tuple[str, float]:
    """Split URL?lag_seconds=N; without the end, the lag is 0.

    Raises:
        UserError: N is not a number from 0 on.
    """
    url, mark, lag = store.partition("?lag_seconds=")
    try:
        seconds = float(lag) if mark else 0.0
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise UserError(
            f"head.store = {store!r}: lag_seconds is {lag!r}, not a number. Write ?lag_seconds=30, or leave it out."
        )
    return url, seconds


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The control plane's address."""

    listen: Annotated[
        str,
        _doc(
            "HOST:PORT to listen on. Host 0.0.0.0: other machines may join. Port 0: any free one, kept over restarts."
        ),
    ] = "127.0.0.1:0"
    advertise: Annotated[
        str,
        _doc(
            "Host name or address in tickets. Several, separated by commas, each with or without a port: machines try "
            "them in turn, so name a standby's, too. Empty: the host of head.listen."
        ),
    ] = ""

    store: Annotated[
        str,
        _doc(
            "Where the run is kept besides this machine: a directory, or a URL of fsspec (s3://...). Nothing is "
            "acknowledged before it is there; with ?lag_seconds=N behind it, at most N seconds of results are. "
            "`--resume-from` continues a run from it. Empty: nowhere. See docs/operations.md."
        ),
    ] = ""

    def advertised(self, port: int) -> str:
        """Return the addresses in tickets, as of `join_all`. `port`: of those without one.

        Raises:
            UserError: as `join_all`, and as `address`.
        """
        return join_all(self.advertise or self.address[0], port, "head.advertise")

    @property
    def is_reachable(self) -> bool:
        """Whether other machines can join."""
        return bool(self.advertise) or not is_loopback(self.address[0])

    @property
    def store_place(self) -> tuple[str, float]:
        """URL of `store`, and its lag in seconds.

        Raises:
            UserError: the lag is not a number.
        """
        return place_and_lag(self.store)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`.

        Raises:
            UserError: it is not HOST:PORT.
        """
        return host_and_port(self.listen, "head.listen", "0.0.0.0:7341")
