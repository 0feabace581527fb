"""Every setting of a run, with its meaning, bounds and default. One TOML file; dotted flags mirror it.

Order: defaults < file < flags (``--learner.lr 1e-5``). An unknown key fails with its path and the nearest known name.
The resolved configuration is written to ``config.json`` in the run directory and is what every process of the run
reads. Users state intent (a staleness bound, a batch, a budget); what follows from it is a derived property.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from echo2.errors import UserError
from echo2.types import SamplingParams


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
            "reasoning_gym:<name> | file.py:Class | package.module:Class | digit_sorting."
        ),
    ] = ""
    params: Annotated[dict[str, Any], _doc("Arguments of a generated source, e.g. {min_numbers = 3}.")] = field(
        default_factory=dict
    )
    shuffle: Annotated[bool, _doc("Draw tasks in a seeded random order, a new one every epoch.")] = True


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
        _doc("Each exact_match | numeric_match | math | reasoning_gym | file.py:function | package.module:function."),
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
    publish_every: Annotated[int, _doc("Publish a snapshot every so many steps (kappa).", ge=1)] = 1
    lease_seconds: Annotated[float, _doc("How long a worker may hold a group before another gets it.", gt=0)] = 120.0
    heartbeat_seconds: Annotated[float, _doc("How often workers report.", gt=0)] = 2.0
    lost_after_seconds: Annotated[float, _doc("Silence after which a worker counts as lost.", gt=0)] = 10.0
    max_failures: Annotated[int, _doc("Groups failing in a row before the run stops with the error.", ge=1)] = 8


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


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    broadcast: BroadcastConfig = field(default_factory=BroadcastConfig)
    head: HeadConfig = field(default_factory=HeadConfig)

    def __post_init__(self) -> None:
        check_together(self)

    @property
    def sampling_params(self) -> SamplingParams:
        sampling = self.sampling
        return SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens)

    @property
    def eval_params(self) -> SamplingParams:
        return SamplingParams(self.eval.temperature, 1.0, 0, self.sampling.max_tokens)


#: What each loss takes in learner.loss_params; the losses themselves are in learner/losses.py.
LOSS_PARAMS: Mapping[str, tuple[str, ...]] = {
    "dppo": ("tv_low", "tv_high", "cap", "veto", "square"),
    "ppo": ("clip_low", "clip_high"),
    "decoupled": ("clip_low", "clip_high", "cap"),
    "tis": ("cap",),
    "icepop": ("low", "high"),
    "cispo": ("floor", "cap"),
    "gspo": ("clip_low", "clip_high"),
    "m2po": ("second_moment", "clip_low", "clip_high"),
    "none": (),
}


def _check_loss(learner: LearnerConfig) -> None:
    known = LOSS_PARAMS[learner.loss]
    for name, value in learner.loss_params.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            takes = f"takes {', '.join(known)}" if known else "takes no parameters"
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(f"learner.loss_params.{name}: the loss {learner.loss!r} {takes}.{hint}")
        if not math.isfinite(value) or value < 0.0:
            raise UserError(f"learner.loss_params.{name} = {value}: expected a number >= 0.")


def check_together(config: Config) -> None:
    """Refuse settings that are each fine and impossible together.

    Raises:
        UserError: with both keys, both values and what to do.
    """
    schedule, sampling = config.schedule, config.sampling
    _check_loss(config.learner)
    for section, name, *_ in all_fields():
        value = getattr(getattr(config, section), name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{section}.{name} = {value} is not a finite number.")
    if schedule.max_staleness < schedule.publish_every - 1:
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


def _section_fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def all_fields() -> Iterator[tuple[str, str, Any, Any, str]]:
    """Every setting as (section, name, type without its bounds, default, description), in file order."""
    for section in fields(Config):
        kind = _section_fields(Config)[section.name]
        defaults = kind()
        for name, annotated in _section_fields(kind).items():
            plain, meta = get_args(annotated)
            yield section.name, name, plain, getattr(defaults, name), meta.description or ""


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys, naming their path and the nearest known name.

    Raises:
        UserError: on the first unknown key.
    """
    known: dict[str, set[str]] = {}
    for section, name, *_ in all_fields():
        known.setdefault(section, set()).add(name)
    for section, body in raw.items():
        if section not in known:
            owners = [f"{owner}.{section}" for owner, names in known.items() if section in names]
            near = owners or difflib.get_close_matches(section, list(known), n=1, cutoff=0.5)
            raise UserError(f"{where}: unknown section or key {section!r}.{_did_you_mean(near)}")
        if not isinstance(body, Mapping):
            raise UserError(
                f"{where}: {section!r} is a section, but holds {body!r}. Write [{section}] and its keys below."
            )
        for name in body:
            if name not in known[section]:
                paths = [f"{owner}.{key}" for owner, names in known.items() for key in names]
                near = difflib.get_close_matches(name, sorted(known[section]), n=1, cutoff=0.6)
                near = [f"{section}.{near[0]}"] if near else [p for p in sorted(paths) if p.endswith("." + name)]
                near = near or difflib.get_close_matches(f"{section}.{name}", sorted(paths), n=1, cutoff=0.5)
                raise UserError(f"{where}: unknown key {section}.{name}.{_did_you_mean(near)}")


def _did_you_mean(near: Sequence[str]) -> str:
    return f" Did you mean {near[0]}?" if near else " `echo2 run --help` lists them all."


def build(raw: Mapping[str, Any], where: str) -> Config:
    """Typed configuration from nested plain values.

    Raises:
        UserError: on an unknown key, a wrong type or a value out of bounds, with its path.
    """
    check_keys(raw, where)
    try:
        return msgspec.convert(dict(raw), type=Config, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {_explain(error, raw)}") from error


def _explain(error: msgspec.ValidationError, raw: Mapping[str, Any]) -> str:
    """msgspec's ``Expected `int` >= 1 - at `$.run.max_steps` ``, and the value found there."""
    expected, at, path = str(error).partition(" - at `$.")
    if not at:
        return expected
    section, _, name = path.rstrip("`").partition(".")
    value = raw[section].get(name.partition("[")[0])
    plain = next((plain for owner, key, plain, *_ in all_fields() if (owner, key) == (section, name)), None)
    if get_origin(plain) is Literal:
        expected = f"expected one of {', '.join(get_args(plain))}"
    return f"{section}.{name} = {value!r}: {expected[0].lower()}{expected[1:]}."


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a TOML file (or a resolved config.json) and apply dotted overrides (``{"learner.lr": "1e-5"}``).

    Relative paths inside the file stay as written: they are relative to the directory the command is run in.

    Raises:
        UserError: the file is missing, is not TOML, or holds a key or value that is not allowed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read the config file {path}: {error.strerror}.") from error
    try:
        raw = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}.") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold an object of sections, not {raw!r}.")
    check_keys(raw, str(path))
    for dotted, value in (overrides or {}).items():
        section, _, name = dotted.partition(".")
        check_keys({section: {name: value}}, f"--{dotted}")
        raw.setdefault(section, {})[name] = parse_flag(dotted, value)
    return build(raw, str(path))


def parse_flag(dotted: str, value: str) -> Any:
    """One flag's text as a value of the setting's type.

    Raises:
        UserError: when the text is not such a value.
    """
    plain = next(plain for section, name, plain, *_ in all_fields() if f"{section}.{name}" == dotted)
    try:
        if plain is str or get_origin(plain) is Literal:
            return value
        if plain is bool:
            return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
        if get_origin(plain) in (list, dict, tuple):
            return tomllib.loads(f"value = {value}")["value"]
        return plain(value)
    except (KeyError, ValueError) as error:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            plain, f"{plain}, written as in TOML"
        )
        raise UserError(f"--{dotted} {value}: expected {wanted}.") from error


def to_json(config: Config) -> str:
    """The resolved configuration, as written to config.json."""
    return json.dumps(asdict(config), indent=2)
