"""Turns Python arguments into the configuration and data files that `echo2 run` reads; nothing stays in memory only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from echo2 import config as configuration
from echo2.api.own_code import named_code
from echo2.config.rundir import RunDir, write_atomically
from echo2.core.errors import UserError, did_you_mean, write_failed
from echo2.core.printable import shown
from echo2.tasks.base import task_from_row


class Saves(Protocol):
    """A transformers model or tokenizer: only its `save_pretrained` is used here."""

    def save_pretrained(self, directory: str, /) -> Any: ...


#: A directory or hub id, or a model and its tokenizer.
Model: TypeAlias = str | Path | tuple[Saves, Saves]
#: A value of `tasks.source`, or an iterable of rows: a list of mappings, a Hugging Face Dataset, a generator.
Tasks: TypeAlias = str | Path | Sequence[str] | Iterable[Mapping[str, Any]]
Reward: TypeAlias = str | Callable[..., Any]
#: One reward function, several whose values are added, or several with weights.
Rewards: TypeAlias = Reward | Sequence[Reward] | Mapping[Reward, float]


def sections(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings grouped by section. A keyword names a section with its keys (`eval={"every": 20}`), or a key
    that exists in only one section (`lr=1e-5`).

    Raises:
        UserError: there is no such section or key, or several sections have the key.
    """
    owners: dict[str, list[str]] = {}
    for section, key, *_ in configuration.all_fields():
        owners.setdefault(key, []).append(section)
    names = {section for having in owners.values() for section in having}
    found: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name in names:
            if not isinstance(value, Mapping):
                raise UserError(f"{name}={shown(value)}: {name} is a section: give its keys, {name}={{...}}.")
            found.setdefault(name, {}).update(value)
            continue
        having = owners.get(name, [])
        if len(having) != 1:
            choices = " or ".join(f'{section}={{"{name}": ...}}' for section in having)
            hint = f" Write {choices}." if having else did_you_mean(name, [*owners, *names])
            raise UserError(f"There is no setting {name!r} of its own.{hint} `echo2 run --help` lists all settings.")
        found.setdefault(having[0], {})[name] = value
    return found


def write_run(
    folder: Path,
    model: Model,
    tasks: Tasks,
    reward: Rewards,
    heldout: Tasks | Mapping[str, Tasks] | None,
    environment: str | type | None,
    settings: Mapping[str, Any],
) -> Path:
    """Write the configuration file of a run and return its path. Arguments given as Python objects are saved beside the
    file in `folder`.

    Raises:
        UserError: an argument has the wrong type; a setting is wrong; the folder cannot be written.
    """
    tables = sections(settings)

    def put(section: str, key: str, value: Any) -> None:
        if key in tables.setdefault(section, {}):
            raise UserError(f"{section}.{key} is given twice: as an argument and among the settings. Leave one out.")
        tables[section][key] = value

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        put("model", "path", _model(model, folder / "model"))
        if isinstance((distill := tables.get("distill", {})).get("teacher"), Path | tuple):
            distill["teacher"] = _model(distill["teacher"], folder / "teacher")
        put("tasks", "source", _source("tasks", tasks, folder / "rows.jsonl"))
        if environment is not None:
            put("tasks", "environment", named_code(environment, folder))
        put("reward", "functions", _functions(reward, folder) or (["environment"] if environment is not None else []))
        if isinstance(heldout, Mapping):
            paths = {name: folder / f"heldout-{number}.jsonl" for number, name in enumerate(heldout)}
            sets = {name: _source(f"heldout[{name!r}]", each, paths[name]) for name, each in heldout.items()}
            put("eval", "source", sets)
        elif heldout is not None:
            put("eval", "source", _source("heldout", heldout, folder / "heldout.jsonl"))
        configuration.build(tables, "echo2")
        path = folder / "run.json"
        path.write_text(json.dumps(tables, indent=2), encoding="utf-8")
    except OSError as error:
        raise write_failed(error, f"Cannot write {folder}: {error.strerror}.") from error
    return path


def write_resumed(rundir: RunDir, settings: Mapping[str, Any]) -> Path:
    """Write the configuration file of a resumed run and return its path: the run's own configuration with these
    settings changed.

    Raises:
        UserError: this is no run directory, or a setting is wrong.
    """
    tables = asdict(rundir.read_config())
    for section, keys in sections(settings).items():
        tables[section] |= keys
    configuration.build(tables, "echo2")
    rundir.inputs.mkdir(mode=0o700, exist_ok=True)
    path = rundir.inputs / "resumed.json"
    write_atomically(path, json.dumps(tables, indent=2))
    return path


def _model(model: Any, directory: Path) -> str:
    if isinstance(model, str | Path):
        return str(model)
    if not isinstance(model, tuple) or len(model) != 2 or not all(hasattr(one, "save_pretrained") for one in model):
        raise UserError(
            f"model = {shown(model)}: give a directory, a hub id, or a model of transformers with its tokenizer: "
            "model=(model, tokenizer)."
        )
    for one in model:
        one.save_pretrained(str(directory))
    return str(directory)


def _source(name: str, tasks: Any, path: Path) -> str | list[str]:
    """Return the value of `tasks.source`: the given text unchanged, or the path of the file that the rows go to.
    `name`: the argument's name, for errors.
    """
    if isinstance(tasks, str | Path):
        return str(tasks)
    if isinstance(tasks, list | tuple) and tasks and all(isinstance(each, str) for each in tasks):
        return list(tasks)
    if not isinstance(tasks, Iterable) or isinstance(tasks, Mapping):
        raise UserError(f"{name} = {shown(tasks)}: give rows, a list of {{'prompt': ...}}, or the name of a source.")
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(tasks):
            where = f"Row {number} of {name}"
            if not isinstance(row, Mapping):
                raise UserError(f"{where} is {shown(row)}: it must be a mapping with a 'prompt'.")
            if "prompt" in row:  # else `tasks.params` may make it, and `echo2 run` checks it
                task_from_row(row, number, where)
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise UserError(f"{where} is no JSON: {error}. {shown(row)}") from error
    return str(path)


def _functions(reward: Rewards, folder: Path) -> list[str]:
    if isinstance(reward, Mapping):
        return [f"{weight!r} * {named_code(one, folder)}" for one, weight in reward.items()]
    several = reward if isinstance(reward, list | tuple) else [reward]
    return [named_code(one, folder) for one in several]
