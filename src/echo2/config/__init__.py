"""Every setting of a run, with its meaning, bounds and default. One TOML file; dotted flags mirror it.

Order: defaults < file < flags (``--learner.lr 1e-5``). An unknown key fails with its path and the nearest known name.
The resolved configuration is written to ``config.json`` in the run directory and is what every process of the run
reads. Users state intent (a staleness bound, a batch, a budget); what follows from it is a derived property.

The settings are in `sections`, what excludes what in `rules`; here they are put together, read and written.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from echo2.config.rules import check_together
from echo2.config.sections import (
    BroadcastConfig,
    EvalConfig,
    FleetConfig,
    HeadConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    TasksConfig,
    WorkersConfig,
)
from echo2.documents import parse_json, parse_toml
from echo2.errors import UserError
from echo2.types import SamplingParams


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
    except UnicodeError as error:
        raise UserError(f"{where}: a text holds half a character: {error}.") from error


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
    elif get_origin(plain) is Union:
        expected = 'expected a whole number >= 1, or "auto"'
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
        raw = parse_json(data) if path.suffix == ".json" else parse_toml(data.decode("utf-8"))
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
        if get_origin(plain) is Union:
            return value if value == "auto" else int(value)
        if get_origin(plain) in (list, dict, tuple):
            return parse_toml(f"value = {value}")["value"]
        return plain(value)
    except (KeyError, ValueError) as error:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            plain, "a whole number or auto" if get_origin(plain) is Union else f"{plain}, written as in TOML"
        )
        raise UserError(f"--{dotted} {value}: expected {wanted}.") from error


def to_json(config: Config) -> str:
    """The resolved configuration, as written to config.json."""
    return json.dumps(asdict(config), indent=2)
