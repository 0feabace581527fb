"""What is simulated, as data: the run's settings, the machines, and how often each of them fails.

A scenario is a TOML file: the fields of `Scenario` at the top, `[learner]`, `[head]`, `[broadcast]`, one `[[workers]]`
for each kind of worker, one `[[outages]]` for each disaster. Names as in `config/`. Durations are medians in seconds
of log-normal distributions; `*_every_seconds` and `life_seconds` are means of exponential ones, 0 = never. A file may
hold many runs: see `study.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from echo2.control.activation import LoopOptions
from echo2.control.forecast import longest_of
from echo2.control.state import Offer, PlannerOptions

#: Bounds of what a file may say. Infinity is none of them: a simulation of it would not end.
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
    """`count` workers of one kind. Rates of trouble are probabilities: per message, group, batch or snapshot.

    `lies`: chunks given to other workers that are wrong; `mute`: it takes their requests and never answers.
    `rollouts_per_second` of one worker, batches back to back, takes the place of `rollout_seconds` where it is not 0.
    `ticket`: by which strangers joined; empty for machines of the run's owner. `hostile`: holds its leases, or some of
    them, to their deadline, fails them at once, delivers only what is malformed, sends junk for leases that it does not
    hold, or claims leases, a snapshot and a capacity that it does not have, and holds what it gets.
    `zone`: what `[[outages]]` strike together. `offer`: these are there only when the planner rents them, one after
    `restart_seconds`; it takes their rate from `rollouts_per_second`.
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
    is_dialable: bool = True
    lies: Share = 0.0
    mute: bool = False
    price_usd_per_hour: Usd = 0.3
    ticket: str = ""
    hostile: Literal["", "holds", "holds_some", "fails", "malformed", "junk", "claims"] = ""
    zone: str = ""
    offer: str = ""


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The learner. `ess`: ESS / B of each step, drawn evenly from `ess_spread` around it, and never above 1."""

    train_seconds: Duration = 2.0
    spread: Spread = 0.1
    publish_seconds: Seconds = 0.3
    checkpoint_every: Positive = 5
    keep_checkpoints: Positive = 2
    life_seconds: Seconds = 0.0
    restart_seconds: Seconds = 5.0
    price_usd_per_hour: Usd = 0.0
    ess: Share = 1.0
    ess_spread: Share = 0.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The head."""

    score_seconds: Seconds = 0.002
    life_seconds: Seconds = 0.0
    restart_seconds: Seconds = 3.0


@dataclass(frozen=True, slots=True)
class BroadcastSpec:
    """How a snapshot reaches the workers.

    chunks  each worker fetches its chunks (`snapshot_chunks`, `chunk_bytes`) from the head and, as `peers` says, from
            other workers, as in a real run; `delta_chance`: how often a snapshot also comes as a small delta
    fixed   every worker has it `seconds` after it was announced
    star    the head sends it whole to each of n workers: max(G / B_w, n G / B_0)
    chain   chains of workers that relay, as many as the head's link feeds: G / B_w + (depth - 1) c / B_w

    G = snapshot_bytes, c = relay_bytes, B_0 = uplink_bytes_per_second of the head, B_w = worker_bytes_per_second.
    """

    scheme: Literal["chunks", "fixed", "star", "chain"] = "chunks"
    seconds: Seconds = 0.0
    snapshot_bytes: Rate = 1e9
    relay_bytes: Rate = 4e6
    uplink_bytes_per_second: Rate = 125e6
    worker_bytes_per_second: Rate = 12.5e6

    def arrival_seconds(self, index: int, num_workers: int) -> float:
        """When the `index`-th of so many workers has the snapshot, in seconds from its announcement."""
        own_link = self.snapshot_bytes / self.worker_bytes_per_second
        match self.scheme:
            case "star":
                return max(own_link, num_workers * self.snapshot_bytes / self.uplink_bytes_per_second)
            case "chain":
                num_chains = max(1, int(self.uplink_bytes_per_second // self.worker_bytes_per_second))
                return own_link + index // num_chains * self.relay_bytes / self.worker_bytes_per_second
        return self.seconds


@dataclass(frozen=True, slots=True)
class OutageSpec:
    """Every worker of a zone at once: its machine is lost (`death`), or its link is (`partition`), for so long."""

    zone: str
    at_seconds: Seconds
    seconds: Seconds = 60.0
    kind: Literal["death", "partition"] = "death"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run and its world. Nothing fails after `faults_until_seconds`; a run that has not ended at `time_limit_seconds`
    is reported as not finished. `generate_during_broadcast = false` is ECHO-2's model: a worker stands still from the
    publication until it has the snapshot. `activation`: workers stand by until they are needed, and are paid for only
    while they are active. `flat_share`: of the groups, those whose rewards are all equal.
    """

    name: str = ""
    max_steps: Positive = 20
    groups_per_step: Positive = 16
    group_size: Positive = 8
    max_staleness: Count = 1
    publish_every: Positive = 1
    ess_floor: Share = 0.0
    dynamic_sampling: bool = False
    max_resampled: Annotated[float, Meta(gt=0, le=1000)] = 2.0
    flat_share: Share = 0.0
    deterministic: bool = False
    groups_per_batch: Positive = 4
    swap: Literal["between", "during"] = "between"
    order: Literal["any", "frontier"] = "any"
    hand_over: Literal["group", "step"] = "group"
    second_lease_after: float = 0.0
    workers_per_group: Positive = 1
    lease_seconds: Duration = 60.0
    heartbeat_seconds: Duration = 2.0
    lost_after_seconds: Duration = 10.0
    max_failures: Positive = 8
    eval_size: Count = 0
    eval_every: Count = 0
    snapshot_chunks: Positive = 8
    chunk_bytes: Positive = 1 << 20
    delta_chance: Share = 0.0
    peers: Literal["star", "chain", "trees"] = "star"
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
        return PlannerOptions(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_steps=self.max_steps,
            max_staleness=self.max_staleness,
            publish_every=self.publish_every,
            ess_floor=self.ess_floor,
            dynamic_sampling=self.dynamic_sampling,
            max_resampled=self.max_resampled,
            deterministic=self.deterministic,
            groups_per_batch=self.groups_per_batch,
            order=self.order,
            hand_over=self.hand_over,
            second_lease_after=self.second_lease_after,
            workers_per_group=self.workers_per_group,
            lease_seconds=self.lease_seconds,
            lost_after_seconds=self.lost_after_seconds,
            grace_seconds=min(self.heartbeat_seconds, self.lost_after_seconds),
            max_failures=self.max_failures,
            seed=seed,
            eval_size=self.eval_size,
            eval_every=self.eval_every,
            activation=LoopOptions() if self.activation else None,
            offers=tuple(
                Offer(spec.offer, self.worker_rate(spec), spec.price_usd_per_hour, spec.count)
                for spec in self.workers
                if spec.offer
            ),
        )

    def is_flat(self, payload: bytes) -> bool:
        """Whether all rewards of the group with this payload are equal: as good as chance, and always the same."""
        return int.from_bytes(payload[:4], "big") < self.flat_share * (1 << 32)

    def group_seconds(self, spec: WorkersSpec) -> float:
        """Median duration of one group in a batch at this kind of worker."""
        if not spec.rollouts_per_second:
            return spec.rollout_seconds
        num_groups = min(spec.capacity_groups, self.groups_per_batch)
        return num_groups * self.group_size / spec.rollouts_per_second / longest_of(num_groups, spec.spread)

    def worker_rate(self, spec: WorkersSpec) -> float:
        """Rollouts a second of one worker of this kind, batches back to back and without stragglers."""
        num_groups = min(spec.capacity_groups, self.groups_per_batch)
        return num_groups * self.group_size / self.group_seconds(spec) / longest_of(num_groups, spec.spread)
