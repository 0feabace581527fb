"""Every setting of a run, with its meaning, bounds and default. One TOML file; dotted flags mirror it.

Order: defaults < file < flags (``--learner.lr 1e-5``). An unknown key fails with its path and the nearest known name.
The resolved configuration is written to ``config.json`` in the run directory and is what every process of the run
reads. Users state intent (a staleness bound, a batch, a budget); what follows from it is a derived property.

The settings are in `sections`, what excludes what in `rules`; here they are read and written.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from echo2.config.rules import Config as Config
from echo2.core.documents import parse_toml, read_tables
from echo2.core.errors import UserError, did_you_mean


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


def settings_help() -> str:
    """Return the help text that lists every setting of the configuration file as a flag, for 80 columns."""
    filled = partial(textwrap.fill, width=80, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    lines, last = ["settings (keys of the configuration file, section by section):"], ""
    for section, name, kind, default, description in all_fields():
        if section != last:
            lines.append(f"\n  [{section}]")
            last = section
        shown = json.dumps(default)
        choices = f" {' | '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
        lines += [filled(f"  --{section}.{name}{choices} ({shown})"), filled(" " * 8 + description)]
    return "\n".join(lines)


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys, naming their path and the nearest known name.

    Raises:
        UserError: on the first unknown key.
    """
    paths = [f"{section}.{name}" for section, name, *_ in all_fields()]
    sections = {path.partition(".")[0] for path in paths}
    for section, body in raw.items():
        if section not in sections:
            raise UserError(f"{where}: unknown section or key {section!r}.{_hint(section, sections, paths)}")
        if not isinstance(body, Mapping):
            raise UserError(
                f"{where}: {section!r} is a section, but holds {body!r}. Write [{section}] and its keys below."
            )
        for name in body:
            path = f"{section}.{name}"
            if path not in paths:
                raise UserError(f"{where}: unknown key {path}.{_hint(path, paths, paths)}")


def _hint(word: str, known: Iterable[str], paths: Iterable[str]) -> str:
    """Which setting was meant: the one of that name in another section, or the nearest of the known."""
    name = word.rpartition(".")[2]
    table = next((path for path in paths if word.startswith(f"{path}.")), "")
    if table:
        return f" {table} is one setting: write [{table}] with this key into the file, or all of --{table} as in TOML."
    owners = [path for path in paths if path.endswith(f".{name}")]
    near = did_you_mean(word, known) or " `echo2 run --help` lists them all."
    return f" Did you mean {owners[0]}?" if owners else near


def build(raw: Mapping[str, Any], where: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Typed configuration from nested plain values, and dotted overrides as text (``{"learner.lr": "1e-5"}``).

    Raises:
        UserError: on an unknown key, a wrong type or a value out of bounds, with its path.
    """
    check_keys(raw, where)
    tables = {section: dict(body) for section, body in raw.items()}
    for dotted, text in (overrides or {}).items():
        section, _, name = dotted.partition(".")
        check_keys({section: {name: text}}, f"--{dotted}")
        tables.setdefault(section, {})[name] = parse_flag(dotted, text)
        where += f" --{dotted} {text}"
    try:
        return msgspec.convert(tables, type=Config, strict=True)
    except msgspec.ValidationError as error:
        complaint, at, path = str(error).partition(" - at `$.")
        if not at:
            raise UserError(f"{where}: {complaint}") from error  # of `check_together`
        section, _, key = path.rstrip("`").partition(".")
        name = key.partition("[")[0]
        value = tables[section].get(name)
        expected = _expected(complaint, _type_of(section, name)[0], value)
        raise UserError(f"{where}: {section}.{key} = {value!r}: {expected}.") from error
    except UnicodeError as error:
        raise UserError(f"{where}: a text has an incomplete character: {error}.") from error


def _expected(complaint: str, plain: Any, value: Any) -> str:
    """What is expected of a setting in place of `value`, from what msgspec says: ``Expected `int` >= 1``."""
    if get_origin(plain) is Literal:
        owners = [f"{section}.{name}" for section, name, kind, *_ in all_fields() if value in get_args(kind)]
        hint = f" ({value!r} is one of {owners[0]})" if owners else ""
        return f"expected one of {', '.join(get_args(plain))}{hint}"
    if get_origin(plain) is Union:
        return 'expected a whole number >= 1, or "auto"'
    return f"{complaint[0].lower()}{complaint[1:]}"


def _type_of(section: str, name: str) -> tuple[Any, Any]:
    """The type of a setting, without its bounds and with them."""
    annotated = _section_fields(_section_fields(Config)[section])[name]
    return get_args(annotated)[0], annotated


def load(path: Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a TOML file (or a resolved config.json) and apply dotted overrides.

    Relative paths inside the file stay as written: they are relative to the directory the command is run in.

    Raises:
        UserError: the file is missing, is not TOML, or holds a key or value that is not allowed.
    """
    return build(read_tables(path, "the config file"), str(path), overrides)


def parse_flag(dotted: str, value: str) -> Any:
    """One flag's text as a value of the setting's type.

    Raises:
        UserError: when the text is not such a value, or it is out of bounds.
    """
    section, _, name = dotted.partition(".")
    plain, annotated = _type_of(section, name)
    holds = _container(plain, value)
    try:
        typed = parse_toml(f"value = {value}")["value"] if holds is not None else value
        return msgspec.convert(typed, annotated, strict=False)
    except msgspec.ValidationError as error:
        complaint = str(error).partition(" - at ")[0].removesuffix(", got `str`")  # every flag is text
        raise UserError(f"--{dotted} {value}: {_expected(complaint, plain, value)}.") from error
    except ValueError as error:
        raise UserError(f"--{dotted} {value}: expected a {holds and holds.__name__}, written as in TOML.") from error


def _container(plain: Any, value: str) -> type | None:
    """Return list or dict where a flag's text is one, written as in TOML. If the setting may also be text, the value is
    a table only if it opens like one."""
    opens: dict[type, str] = {list: "[", dict: "{"}
    for kind, sign in opens.items():
        may_be = value.lstrip().startswith(sign) and kind in [get_origin(each) for each in get_args(plain)]
        if may_be or get_origin(plain) is kind:
            return kind
    return None


def to_json(config: Config) -> str:
    """The resolved configuration, as written to config.json."""
    return json.dumps(asdict(config), indent=2)
