"""What single settings may be: engines (also `--engine`), advantages, the losses' parameters, targets of logs, weighted
names.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from echo2.core.errors import UserError, did_you_mean

#: Token servers, which run beside the worker.
SERVERS: Mapping[str, str] = {"vllm": "echo2.engines.servers.engine"}
#: The engine that is chosen by the model and the machine (`engines/registry.py`).
AUTO = "auto"
#: Engines that round the published weights, and to which form (`engines/forms.py`). The most bits first, and of equal
#: bits Macs' own.
FORMS: Mapping[str, str] = {"mlx-q8": "mlx-q8", "llamacpp-q8_0": "q8_0", "mlx-q4": "mlx-q4", "llamacpp-q4_0": "q4_0"}
MLX_FORMS, LLAMACPP_FORMS = (
    tuple(engine for engine in FORMS if engine.startswith(maker)) for maker in ("mlx", "llamacpp")
)
#: What `echo2 export --gguf` and `--mlx` write, the default first.
GGUF_FORMS, MLX_BITS = ("q8_0", "q4_0", "f16"), ("8", "4")
#: The forms that a check reads closely enough for strangers (`make bench-rounded_weights`, docs/engines.md).
CHECKED_FORMS = ("q8_0",)
#: The module of each; `engines/registry.py` calls its `make_engine(device, slots)`, with the form of one of `FORMS`, or
#: the `ServerPlace` of one of `SERVERS`, as third argument.
ENGINES: Mapping[str, str] = {
    AUTO: "echo2.engines.registry",
    "compact": "echo2.engines.compact",
    "transformers": "echo2.engines.hf_engine",
    **dict.fromkeys(LLAMACPP_FORMS, "echo2.engines.llamacpp"),
    **dict.fromkeys(("mlx", *MLX_FORMS), "echo2.engines.mlx"),
    "fake": "echo2.engines.fake_engine",
    **SERVERS,
}
#: Those whose tokens are drawn with the head's random numbers (`engines/sampler.py`). Those that do not round
#: weights can check the others; `ROUNDING_ENGINES` can check rounded weights, too.
STREAM_ENGINES = frozenset({AUTO, "compact", "transformers", "mlx", *FORMS})
ROUNDING_ENGINES = frozenset({AUTO, "compact"})
#: The teacher that is the policy itself.
SELF = "self"
#: Slots that a worker says it has if its owner sets no limit: any number.
NO_SLOT_LIMIT = 1 << 16
#: How rewards become advantages, and what a step's losses are divided by; the formulas are in `learner/grpo/data.py`.
Advantage = Literal["grpo", "dr_grpo", "rloo", "none"]
Normalisation = Literal["token", "sequence", "constant"]

_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
#: What each loss takes in learner.loss_params, with its defaults; the losses themselves are in learner/core/losses.py.
LOSS_PARAMS: Mapping[str, Mapping[str, float]] = {
    "dppo": {"tv_low": 0.2, "tv_high": 0.2, "cap": 10.0, "veto": 1e-4, "square": 1e-3},
    "ppo": _CLIP,
    "decoupled": {**_CLIP, "cap": 5.0},
    "tis": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "cispo": {"floor": 0.0, "cap": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "none": {},
}
#: Most of `distill.divergence.top_k`.
TOP_LOGPROBS_MAX = 1024
#: Targets of run.log_to, and the package that each needs.
LOG_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "wandb+rollouts": "wandb", "trackio": "trackio"}


def is_endpoint(teacher: str) -> bool:
    """Whether a teacher is an address, not a model."""
    return teacher.startswith(("http://", "https://"))


def endpoint_and_model(teacher: str) -> tuple[str, str]:
    """Return of a teacher's address "URL/v1#NAME" the URL, and the name of the model there; empty: its only one.

    Raises:
        UserError: it is no such address.
    """
    url, _, model = teacher.partition("#")
    try:
        parts = urlsplit(url)
        is_url = bool(parts.hostname) and parts.port != 0 and not parts.query and "@" not in parts.netloc
    except ValueError:
        is_url = False
    root = url.rstrip("/").removesuffix("/v1")
    if not (is_url and root != url.rstrip("/") and teacher.isascii() and teacher.isprintable() and " " not in teacher):
        raise UserError(
            f"distill.teacher = {teacher!r}: expected the address of a server of vLLM, as http://127.0.0.1:8000/v1; "
            "where it serves several models, with #NAME behind it. A key belongs into the environment variable "
            "ECHO2_TEACHER_KEY."
        )
    return root, model


class Divergence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table distill.divergence. `top_k`: the teacher's likely tokens that are compared one by one. `beta`: TRL's; 1
    is the reverse divergence KL(policy, teacher), 0 the forward one, and between them are Jensen-Shannon divergences.
    """

    top_k: Annotated[int, Meta(ge=1, le=TOP_LOGPROBS_MAX)]
    beta: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0


def read_divergence(table: Mapping[str, int | float]) -> Divergence:
    """Return the settings in a table.

    Raises:
        UserError: one is missing, unknown or out of bounds.
    """
    try:
        return msgspec.convert(table, Divergence)
    except msgspec.ValidationError as error:
        complaint, _, key = str(error).partition(" - at `$.")
        name = "distill.divergence" + f".{key}".rstrip(".`")
        setting = f"{name} = {table.get(key.rstrip('`'), dict(table))!r}"
        raise UserError(
            f"{setting}: {complaint[0].lower()}{complaint[1:]}. Write {{top_k = 64, beta = 1.0}}."
        ) from error


def loss_params(loss: str, params: Mapping[str, float]) -> dict[str, float]:
    """The parameters of a loss, `params` in place of its defaults.

    Raises:
        UserError: no such loss or parameter, a value out of bounds, or bounds the wrong way round.
    """
    if loss not in LOSS_PARAMS:
        raise UserError(f"learner.loss = {loss!r}: expected one of {', '.join(LOSS_PARAMS)}.")
    defaults = LOSS_PARAMS[loss]
    for name, value in params.items():
        if name not in defaults:
            hint = did_you_mean(name, defaults)
            raise UserError(
                f"learner.loss_params.{name}: the loss {loss!r} takes {', '.join(defaults) or 'none'}.{hint}"
            )
        if not math.isfinite(value) or value < 0.0:
            raise UserError(f"learner.loss_params.{name} = {value}: expected a number >= 0.")
    values = {**defaults, **params}
    for low, high in (("low", "high"), ("floor", "cap")):
        if values.get(low, 0.0) > values.get(high, math.inf):
            raise UserError(f"learner.loss_params: {low} = {values[low]} is above {high} = {values[high]}.")
    return values


def weighted(entry: str, setting: str = "reward.functions") -> tuple[float, str]:
    """(weight, name) of an entry of a list in which each may have a weight: "name" has 1, "0.2 * name" has 0.2.

    Raises:
        UserError: the part before the * is not a finite number.
    """
    number, star, name = entry.rpartition("*")
    try:
        weight = float(number) if star else 1.0
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"{setting} has {entry!r}: expected a name, or a weight and a name as in '0.2 * math'.")
    return weight, name.strip()


def template_pieces(template: str, what: str = "The prompt") -> list[tuple[str, str | None]]:
    """Split a template into pieces of text, each with the column that follows it (None: no column).

    Raises:
        UserError: it is not a template; `what` names it.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{what} {template!r} is not a template: {error}. Write {{{{ for a brace.") from error
    for _, name, form, conversion in pieces:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise UserError(f"{what} {template!r} may have plain column names in braces only, not {name!r}.")
    return [(literal, name) for literal, name, _, _ in pieces]


def refuse_unknown_engine(name: str) -> None:
    """Raises UserError if there is no engine of this name; the message names those that there are."""
    if name not in ENGINES:
        raise UserError(f"There is no engine {name!r}.{did_you_mean(name, ENGINES)} Use {', '.join(ENGINES)}.")


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """Where a token server is. `python`: of the environment that has its package (empty: this one); `arguments`: more
    of its own; `url`: of one that runs already, which then is not started. `directory` takes its model, socket and log;
    None: a temporary one. The server sees it too: it reads weights from there. `routes`: whether it is to return the
    experts that a mixture chooses; `takes_turns`: whether it shares its GPU with the run's learner."""

    python: str = ""
    url: str = ""
    arguments: tuple[str, ...] = ()
    directory: Path | None = None
    routes: bool = False
    takes_turns: bool = False
