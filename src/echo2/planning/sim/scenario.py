"""A scenario as data: the run's settings, the machines, and how often each of them fails.

A scenario is a TOML file: the fields of `Scenario` at the top, `[learner]`, `[head]`, `[broadcast]`, one `[[workers]]`
for each kind of worker, one `[[outages]]` for each disaster. Names as in `config/`. Durations are medians in seconds
of log-normal distributions; `*_every_seconds` and `life_seconds` are means of exponential ones, 0 = never. A file may
describe many runs: see `study.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from msgspec import Meta

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


@dataclass(frozen=True, slots=True)
class WorkersSpec:
    """`count` workers of one kind. Failure rates are probabilities: per message, group, batch or snapshot.

    `lies`: share of wrong chunks among those given to other workers; `mute`: the worker takes their requests and never
    answers. `rollout_failures`: of single rollouts, whose environment raises. `draws`: its engine draws from the head's
    random numbers, and can check other workers; `forges`: none of its groups were drawn from these numbers.
    `rollouts_per_second`: of one worker, batches back to back; it replaces `rollout_seconds` if it is not 0. `ticket`: the ticket with which strangers joined; empty for machines of the run's
    owner. `zone`: workers that `[[outages]]` strike together. `offer`: these workers exist only when the planner rents
    them, one `restart_seconds` after each request; the planner is told their `Scenario.worker_rate`.
    """

    count: Count = 1
    capacity_groups: Positive = 4
    rollout_seconds: Duration = 1.0
    rollouts_per_second: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    spread: Spread = 0.3
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
    `reward_failures`: share of the rollouts whose rewards fail.
    """

    score_seconds: Seconds = 0.002
    reward_failures: Share = 0.0
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
    """A run and its world. Nothing fails after `faults_until_seconds`; a run that has not ended at `time_limit_seconds`
    is reported as not finished. `generate_during_broadcast = false` is ECHO-2's model: a worker stops sampling from the
    publication until it has the snapshot. `activation`: workers stand by until they are needed, and are paid for only
    while they are active. `flat_share`: share of the groups whose rewards are all equal. `base_model`: number of the
    base model that snapshots are adapters over, with `base_chunks` chunks; 0: whole models. `check_seed`: as in
    `PlannerOptions`.
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
        """Return the options of the head's planner."""
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

    @property
    def swaps_during(self) -> bool:
        """Whether weights are swapped between two tokens; "auto": as in a run (`Config.swap`)."""
        if self.swap == "auto":
            return self.max_staleness > 0 and not self.deterministic
        return self.swap == "during"

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
        num_groups = min(spec.capacity_groups, self.groups_per_batch)
        mean = longest_of(num_groups, spec.spread) if self.deterministic else math.exp(spec.spread**2 / 2)
        return num_groups * self.group_size / mean
