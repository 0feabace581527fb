"""A scenario file as one run, or as many runs that differ in a few fields, as for figures and tables.

    [sweep]                               one run for each value; several keys: all combinations
    "workers.count" = [4, 6, 8]

    [[variants]]                          one run (or sweep) for each; `label` is what people see
    label = "without relays"
    "broadcast.scheme" = "star"

A key is a path in the file: `max_staleness`, `learner.train_seconds`, `workers.count` (the first kind of worker) or
`workers.1.count` (the second).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from echo2.core.documents import read_tables, refuse_unknown
from echo2.core.errors import UserError, did_you_mean
from echo2.planning.sim.scenario import BroadcastSpec, HeadSpec, LearnerSpec, OutageSpec, Scenario, WorkersSpec

#: Runs that one file may ask for.
MAX_RUNS = 1000
_SECTIONS: dict[str, type[Any]] = {"learner": LearnerSpec, "head": HeadSpec, "broadcast": BroadcastSpec}
_LISTS: dict[str, type[Any]] = {"workers": WorkersSpec, "outages": OutageSpec}


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a study. `label`: of its variant; `values`: of the swept keys, in the order of the file."""

    label: str
    values: tuple[tuple[str, Any], ...]
    scenario: Scenario

    def __str__(self) -> str:
        words = [self.label] if self.label else []
        return ", ".join([*words, *(f"{key.rpartition('.')[2]} {value}" for key, value in self.values)])


@dataclass(frozen=True, slots=True)
class Study:
    """All runs of one file. `about`: its first comment, for people."""

    name: str
    about: str
    cases: tuple[Case, ...]


def load_study(path: Path) -> Study:
    """Read a scenario file.

    Raises:
        UserError: the file is missing, is not TOML, or holds a key or value that is not allowed.
    """
    raw = read_tables(path, "the scenario")
    sweep, variants = raw.pop("sweep", {}), raw.pop("variants", [{}])
    _check_tables(raw, str(path))
    sweep = _flatten(sweep) if isinstance(sweep, dict) else sweep
    if not isinstance(sweep, dict) or any(not isinstance(values, list) or not values for values in sweep.values()):
        raise UserError(f'{path}: [sweep] takes lists of values, as in "workers.count" = [4, 6, 8].')
    if not isinstance(variants, list) or not all(isinstance(variant, dict) for variant in variants):
        raise UserError(f"{path}: variants are tables: [[variants]].")
    cases = []
    for variant in variants:
        label = str(variant.get("label", ""))
        changes = _flatten({key: value for key, value in variant.items() if key != "label"})
        for values in itertools.product(*sweep.values()):
            swept = tuple(zip(sweep, values, strict=True))
            cases.append(Case(label, swept, _scenario(raw, {**changes, **dict(swept)}, path)))
            if len(cases) > MAX_RUNS:
                raise UserError(f"{path} asks for more than {MAX_RUNS} runs.")
    comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    about = " ".join(line.lstrip("# ") for line in comment)
    return Study(path.stem, about, tuple(cases))


def _scenario(raw: dict[str, Any], changes: Mapping[str, Any], path: Path) -> Scenario:
    changed = copy.deepcopy(raw)
    for key, value in changes.items():
        _change(changed, key, value, path)
    _check_tables(changed, str(path))
    try:
        scenario = msgspec.convert({"name": path.stem, **changed}, type=Scenario)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from error
    _check_sense(scenario, path)
    return scenario


def _check_sense(scenario: Scenario, path: Path) -> None:
    if scenario.max_staleness < scenario.publish_every - 1:
        raise UserError(
            f"{path}: max_staleness = {scenario.max_staleness} with publish_every = {scenario.publish_every} waits for "
            f"ever; max_staleness must be {scenario.publish_every - 1} or more."
        )
    set_so = ["dynamic_sampling"] if scenario.deterministic and scenario.dynamic_sampling else []
    set_so += ['order = "frontier"'] if scenario.deterministic and scenario.order == "frontier" else []
    if set_so:
        raise UserError(f"{path}: deterministic = true excludes {' and '.join(set_so)}, as in a run.")
    if not any(spec.count for spec in scenario.workers):
        raise UserError(f"{path}: there is no worker: set workers.count.")
    offers = [spec.offer for spec in scenario.workers if spec.offer]
    if offers and (not scenario.activation or len(set(offers)) != len(offers)):
        raise UserError(f"{path}: offers need activation = true and a name each.")
    if not scenario.generate_during_broadcast and scenario.broadcast.scheme == "chunks":
        raise UserError(f"{path}: generate_during_broadcast = false needs broadcast.scheme = fixed, star or chain.")
    zones = {spec.zone for spec in scenario.workers}
    for outage in scenario.outages:
        if outage.zone not in zones:
            raise UserError(f"{path}: no worker is in zone {outage.zone!r}.{did_you_mean(outage.zone, zones)}")


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turn {"a": {"b": 1}} into {"a.b": 1}: a dotted key may be written with quotes or without."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        nested = _flatten(value) if isinstance(value, dict) else None
        flat.update({key: value} if nested is None else {f"{key}.{name}": inner for name, inner in nested.items()})
    return flat


def _change(raw: dict[str, Any], key: str, value: Any, path: Path) -> None:
    """Set the field that a dotted key names."""
    *tables, name = key.split(".")
    target: Any = raw
    if tables:
        target = raw.setdefault(tables[0], [{}] if tables[0] in _LISTS else {})
        if isinstance(target, list):
            at = tables[1] if len(tables) > 1 else "0"
            if not at.isdigit() or int(at) >= len(target):
                raise UserError(f"{path}: {key!r}: there are {len(target)} [[{tables[0]}]], numbered from 0.")
            target = target[int(at)]
        elif len(tables) > 1:
            raise UserError(f"{path}: {key!r} names no field.")
    if not isinstance(target, dict):
        raise UserError(f"{path}: {key!r} names no field.")
    target[name] = value


def _check_tables(raw: Mapping[str, Any], where: str) -> None:
    tables = [(raw, Scenario, where)]
    tables += [(raw.get(section, {}), kind, f"{where}: [{section}]") for section, kind in _SECTIONS.items()]
    for section, kind in _LISTS.items():
        entries = raw.get(section, ())
        tables += [(spec, kind, f"{where}: [[{section}]]") for spec in (entries if isinstance(entries, list) else ())]
    for table, kind, place in tables:
        refuse_unknown(table if isinstance(table, dict) else (), [entry.name for entry in fields(kind)], place)
