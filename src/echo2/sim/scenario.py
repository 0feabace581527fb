"""What is simulated, as data: the run's settings, the machines, and how often each of them fails.

A scenario is a TOML file: the fields of `Scenario` at the top, `[learner]`, `[head]`, and one `[[workers]]` for each
kind of worker. Names as in `config.py`. Durations are medians in seconds of log-normal distributions; `*_every_seconds`
and `life_seconds` are means of exponential ones, 0 = never.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from echo2.control.state import PlannerOptions
from echo2.errors import UserError


@dataclass(frozen=True, slots=True)
class WorkersSpec:
    """`count` workers of one kind. Rates of trouble are probabilities: per message, group, batch or snapshot."""

    count: int = 1
    capacity_groups: int = 4
    rollout_seconds: float = 1.0
    spread: float = 0.3
    straggler_chance: float = 0.0
    straggler_factor: float = 20.0
    install_seconds: float = 0.2
    latency_seconds: float = 0.05
    bytes_per_second: float = 12.5e6
    loss: float = 0.0
    joins_at_seconds: float = 0.0
    life_seconds: float = 0.0
    restart_seconds: float = 5.0
    cut_every_seconds: float = 0.0
    cut_seconds: float = 3.0
    engine_failures: float = 0.0
    corrupt_snapshots: float = 0.0
    malformed_results: float = 0.0
    reward_failures: float = 0.0
    scores: bool = True
    price_usd_per_hour: float = 0.3


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The learner."""

    train_seconds: float = 2.0
    spread: float = 0.1
    publish_seconds: float = 0.3
    checkpoint_every: int = 5
    keep_checkpoints: int = 2
    life_seconds: float = 0.0
    restart_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The head."""

    score_seconds: float = 0.2
    life_seconds: float = 0.0
    restart_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run and its world. Nothing fails after `faults_until_seconds`; a run that has not ended at `time_limit_seconds`
    is reported as not finished.
    """

    name: str = ""
    max_steps: int = 20
    groups_per_step: int = 16
    group_size: int = 8
    max_staleness: int = 1
    publish_every: int = 1
    deterministic: bool = False
    groups_per_batch: int = 4
    swap: str = "between"
    lease_seconds: float = 60.0
    heartbeat_seconds: float = 2.0
    lost_after_seconds: float = 10.0
    max_failures: int = 8
    eval_size: int = 0
    eval_every: int = 0
    snapshot_chunks: int = 8
    chunk_bytes: int = 1 << 20
    tokens_per_group: int = 2000
    bytes_per_token: int = 9
    faults_until_seconds: float = 600.0
    time_limit_seconds: float = 36_000.0
    workers: tuple[WorkersSpec, ...] = (WorkersSpec(),)
    learner: LearnerSpec = field(default_factory=LearnerSpec)
    head: HeadSpec = field(default_factory=HeadSpec)

    def planner_options(self, seed: int) -> PlannerOptions:
        return PlannerOptions(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_steps=self.max_steps,
            max_staleness=self.max_staleness,
            publish_every=self.publish_every,
            deterministic=self.deterministic,
            groups_per_batch=self.groups_per_batch,
            lease_seconds=self.lease_seconds,
            lost_after_seconds=self.lost_after_seconds,
            grace_seconds=min(self.heartbeat_seconds, self.lost_after_seconds),
            max_failures=self.max_failures,
            seed=seed,
            reward_functions=("reward",),
            eval_size=self.eval_size,
            eval_every=self.eval_every,
        )


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file.

    Raises:
        UserError: the file is missing, is not TOML, or holds a key or value that is not allowed.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the scenario {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    _check_keys(raw, Scenario, str(path))
    for section, kind in (("learner", LearnerSpec), ("head", HeadSpec)):
        _check_keys(raw.get(section, {}), kind, f"{path}: [{section}]")
    for spec in raw.get("workers", ()):
        _check_keys(spec, WorkersSpec, f"{path}: [[workers]]")
    try:
        return msgspec.convert({"name": path.stem, **raw}, type=Scenario)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from error


def _check_keys(raw: Mapping[str, Any], kind: type[Any], where: str) -> None:
    known = [entry.name for entry in fields(kind)]
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise UserError(f"{where}: unknown key {key!r}. Did you mean {near}?")
