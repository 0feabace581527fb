"""A scenario as data: the run's settings, the machines, and how often each of them fails.

A scenario is a TOML file: the fields of `Scenario` at the top, `[learner]`, `[head]`, `[broadcast]`, one `[[workers]]`
for each kind of worker, one `[[outages]]` for each disaster. Names as in `config/`. Durations are medians in seconds
of log-normal distributions; `*_every_seconds` and `life_seconds` are means of exponential ones, 0 = never. A file may
describe many runs that differ in a few fields, as for figures and tables:

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
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from echo2.core.documents import read_tables, refuse_unknown
from echo2.core.errors import UserError, did_you_mean
from echo2.core.types import SnapshotRef
from echo2.head.decide.state import PlannerOptions, RentableOffer
from echo2.head.fleet.decide.forecast import longest_of
from echo2.head.fleet.decide.formulas import chain_seconds, star_seconds

#: Bounds of the values in a file. Infinity is not allowed: its simulation would not end.
Count = Annotated[int, Meta(ge=0, le=100_000)]
Positive = Annotated[int, Meta(ge=1, le=100_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Duration = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]
Share = Annotated[float, Meta(ge=0, le=1)]
Spread = Annotated[float, Meta(ge=0, le=5)]
Usd = Annotated[float, Meta(ge=0, le=1e6)]
#: Runs that one file may ask for.
MAX_RUNS = 1000


@dataclass(frozen=True, slots=True)
class WorkersSpec:
    """`count` workers of one kind. Failure rates are probabilities: per message, group, batch or snapshot.

    `lies`: share of wrong chunks among those given to other workers; `mute`: the worker takes their requests and never
    answers. `rollout_failures`: of single rollouts, whose environment raises. `draws`: its engine draws from the head's
    random numbers, and can check other workers; `forges`: none of its groups were drawn from these numbers.
    `rollouts_per_second`: of one worker, batches back to back; it replaces `rollout_seconds` if it is not 0.
    `full_groups`: with more groups at once each takes longer, in proportion, as where arithmetic limits an engine; with
    fewer none is quicker; 0: each takes as long beside any number. `answer_spread`: of the durations, what is the
    answer's and not the machine's: a group's second lease takes as long again. `ticket`: the ticket with which
    strangers joined; empty for machines of the run's owner. `zone`: workers that `[[outages]]` strike together.
    `offer`: these workers exist only when the planner rents them, one `restart_seconds` after each request; the planner
    knows their `Scenario.worker_rate`.
    """

    count: Count = 1
    capacity_groups: Positive = 4
    rollout_seconds: Duration = 1.0
    rollouts_per_second: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    full_groups: Count = 0
    spread: Spread = 0.3
    answer_spread: Spread = 0.0
    straggler_chance: Share = 0.0
    straggler_factor: Annotated[float, Meta(ge=1, le=1e6)] = 20.0
    install_seconds: Seconds = 0.2
    latency_seconds: Seconds = 0.05
    bytes_per_second: Rate = 12.5e6
    loss: Share = 0.0
    joins_at_seconds: Seconds = 0.0
    life_seconds: Seconds = 0.0
    restart_seconds: Seconds = 5.0
    cut_every_seconds: Seconds = 0.0
    cut_seconds: Seconds = 3.0
    engine_failures: Share = 0.0
    corrupt_snapshots: Share = 0.0
    malformed_results: Share = 0.0
    task_failures: Share = 0.0
    rollout_failures: Share = 0.0
    is_dialable: bool = True
    lies: Share = 0.0
    mute: bool = False
    draws: bool = False
    forges: bool = False
    price_usd_per_hour: Usd = 0.3
    ticket: str = ""
    zone: str = ""
    offer: str = ""


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The learner."""

    train_seconds: Duration = 2.0
    spread: Spread = 0.1
    publish_seconds: Seconds = 0.3
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2
    life_seconds: Seconds = 0.0
    restart_seconds: Seconds = 5.0
    price_usd_per_hour: Usd = 0.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The head. `pass_seconds`: how long reports and scores wait, to share a transaction with later ones.
    `reward_failures`: share of the rollouts whose rewards fail; `stalled_rewards`: share of the groups for which a
    judge hangs and is asked again after `stall_seconds`, when it hangs as often.
    """

    score_seconds: Seconds = 0.002
    reward_failures: Share = 0.0
    stalled_rewards: Annotated[float, Meta(ge=0, le=0.9)] = 0.0
    stall_seconds: Seconds = 60.0
    pass_seconds: Seconds = 0.0
    life_seconds: Seconds = 0.0
    restart_seconds: Seconds = 3.0


@dataclass(frozen=True, slots=True)
class BroadcastSpec:
    """How a snapshot reaches the workers.

    chunks  each worker fetches its chunks (`snapshot_chunks`, `chunk_bytes`) from the head and, as `peers` says, from
            other workers, as in a real run; `delta_chance`: how often a snapshot also comes as a small delta
    fixed   every worker has it `seconds` after it was announced
    star    the head sends it whole to each worker
    chain   chains of workers that relay, as many as the head's link feeds

    For the last two, head/fleet/decide/formulas.py has the formulas: G = snapshot_bytes, c = relay_bytes, B0 =
    uplink_bytes_per_second of the head, Bw = worker_bytes_per_second.
    """

    scheme: Literal["chunks", "fixed", "star", "chain"] = "chunks"
    seconds: Seconds = 0.0
    snapshot_bytes: Rate = 1e9
    relay_bytes: Rate = 4e6
    uplink_bytes_per_second: Rate = 125e6
    worker_bytes_per_second: Rate = 12.5e6

    def arrival_seconds(self, index: int, num_workers: int) -> float:
        """Return when the `index`-th of `num_workers` workers has the snapshot, in seconds from its announcement."""
        head_bps, worker_bps = 8 * self.uplink_bytes_per_second, 8 * self.worker_bytes_per_second
        match self.scheme:
            case "star":
                return star_seconds(self.snapshot_bytes, num_workers, head_bps, worker_bps)
            case "chain":
                return chain_seconds(self.snapshot_bytes, index + 1, worker_bps, head_bps, self.relay_bytes)
        return self.seconds


@dataclass(frozen=True, slots=True)
class OutageSpec:
    """Strikes all workers of a zone at once, for `seconds`: they lose their machine (`death`) or link (`partition`)."""

    zone: str
    at_seconds: Seconds
    seconds: Seconds = 60.0
    kind: Literal["death", "partition"] = "death"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run and its world. No process dies and no connection is cut after `faults_until_seconds`; shares of messages,
    groups and rollouts that fail stay as they are. A run that has not ended at `time_limit_seconds` is reported as not
    finished. `generate_during_broadcast = false` is ECHO-2's model: a worker stops sampling from the publication until
    it has the snapshot. `activation`: workers stand by until they are needed, and are paid for only while they are
    active. `flat_share`: share of the groups whose rewards are all equal. `base_model`: number of the base model that
    snapshots are adapters over, with `base_chunks` chunks; 0: whole models. `check_seed`: as in `PlannerOptions`.
    """

    name: str = ""
    max_steps: Positive = 20
    groups_per_step: Positive = 16
    group_size: Positive = 8
    min_group: Positive = 2
    max_staleness: Count = 1
    publish_every: Positive = 1
    dynamic_sampling: bool = False
    flat_share: Share = 0.0
    deterministic: bool = False
    groups_per_batch: Positive = 4
    swap: Literal["auto", "between", "during"] = "auto"
    order: Literal["any", "frontier"] = "any"
    lease_seconds: Duration = 60.0
    heartbeat_seconds: Duration = 2.0
    max_failures: Positive = 8
    eval_size: Count = 0
    eval_every: Count = 0
    check_seed: int | None = None
    snapshot_chunks: Positive = 8
    chunk_bytes: Positive = 1 << 20
    delta_chance: Share = 0.0
    base_model: Count = 0
    base_chunks: Positive = 8
    peers: Literal["star", "trees"] = "star"
    fan_out: Positive = 8
    tokens_per_group: Positive = 2000
    bytes_per_token: Positive = 9
    generate_during_broadcast: bool = True
    activation: bool = False
    faults_until_seconds: Seconds = 600.0
    time_limit_seconds: Duration = 36_000.0
    workers: tuple[WorkersSpec, ...] = (WorkersSpec(),)
    learner: LearnerSpec = field(default_factory=LearnerSpec)
    head: HeadSpec = field(default_factory=HeadSpec)
    broadcast: BroadcastSpec = field(default_factory=BroadcastSpec)
    outages: tuple[OutageSpec, ...] = ()

    def planner_options(self, seed: int) -> PlannerOptions:
        alike = {entry.name for entry in fields(PlannerOptions)} & {entry.name for entry in fields(self)}
        offers = (
            RentableOffer(spec.offer, self.worker_rate(spec), spec.price_usd_per_hour, spec.count)
            for spec in self.workers
            if spec.offer
        )
        settings = {name: getattr(self, name) for name in alike}
        return PlannerOptions(seed=seed, offers=tuple(offers), **settings)

    @property
    def base_ref(self) -> SnapshotRef | None:
        """The base model of the run's snapshots; None if they are whole models."""
        return SnapshotRef(f"base-{self.base_model:016x}", 0, 0) if self.base_model else None

    def base_of(self, ref: SnapshotRef) -> SnapshotRef | None:
        """Return the base model of this snapshot; None if it is a whole model."""
        return None if ref.is_base_model else self.base_ref

    def is_flat(self, rollouts: bytes) -> bool:
        """Whether all rewards of the group with these rollouts are equal: pseudo-random, but fixed by the rollouts."""
        return int.from_bytes(rollouts[:4], "big") < self.flat_share * (1 << 32)

    def swap_of(self, spec: WorkersSpec) -> Literal["between", "apart", "during"]:
        """Return when a worker of this kind installs new weights; "auto": as in a run (`Config.swap_of`)."""
        is_between = self.max_staleness == 0 or self.deterministic
        if self.swap == "between" or (self.swap == "auto" and is_between):
            return "between"
        return "apart" if spec.ticket and spec.draws else "during"

    def group_seconds(self, spec: WorkersSpec) -> float:
        """Return the median duration of one group on this kind of worker, with all slots taken."""
        if not spec.rollouts_per_second:
            return spec.rollout_seconds
        return self._rollouts_per_median(spec) / spec.rollouts_per_second

    def worker_rate(self, spec: WorkersSpec) -> float:
        """Return the rollouts per second of one worker of this kind that always has work, without stragglers."""
        return self._rollouts_per_median(spec) / self.group_seconds(spec)

    def _rollouts_per_median(self, spec: WorkersSpec) -> float:
        """Return the rollouts of one worker in the median duration of a group. A group's slots go to the next group as
        soon as it ends; in deterministic mode, when the longest group of its unit ends.
        """
        num_groups = min(spec.capacity_groups, self.groups_per_batch, spec.full_groups or spec.capacity_groups)
        spread = math.hypot(spec.spread, spec.answer_spread)
        mean = longest_of(num_groups, spread) if self.deterministic else math.exp(spread**2 / 2)
        return num_groups * self.group_size / mean


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
    if not scenario.generate_during_broadcast and any(spec.full_groups for spec in scenario.workers):
        raise UserError(f"{path}: generate_during_broadcast = false excludes workers.full_groups.")
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
