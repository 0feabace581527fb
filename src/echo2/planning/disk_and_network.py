"""What a run keeps on disks and sends over the network, from the sizes of a plan: a snapshot, a step's delta, tokens.

The run's directory has checkpoints (weights in float32, and moments), the newest whole snapshot with the deltas up to
the newest version, and records. While the run goes on, a checkpoint and a whole snapshot are written before older ones
are deleted, and the learner has a file of what it published last. A worker has its content, the chunks that lead to it,
and, under adapters, the base model as chunks and as a file (`weights/store/`).

Of each version the head sends a payload about once, and workers pass it on; where they cannot reach each other, the
head sends it to each. Rollouts come back as tokens, logprobs and masks, and with the routes of a mixture
(`transport/wire.proto`, `transport/routes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.table import Table

from echo2.config import Config
from echo2.core.decide.model_config import num_chosen, num_experts, routed_layers
from echo2.core.errors import counted
from echo2.core.printable import size
from echo2.engines.model_values import text_values
from echo2.head.ledger.eventlog import PART_BYTES_MAX, PARTS_KEPT
from echo2.head.ledger.rollout_log import KEPT_EVERY, KEPT_STEPS
from echo2.learner.core.fitting import PROMPT_TOKENS, known_config
from echo2.learner.decide.memory import BYTES_PER_VALUE, moments_bytes
from echo2.planning.plan_inputs import BroadcastInputs
from echo2.transport.limits import LOGGED_GROUPS, LOGGED_TOKENS
from echo2.transport.routes import RouteShape
from echo2.weights.format.manifest import MAX_DELTAS

#: Of a sampled token: its id, its logprob, its mask; of a token of a prompt: its id.
TOKEN_BYTES, PROMPT_BYTES = 9, 4
#: Of a rollout besides its tokens, with its score, and of a group's lease.
ROLLOUT_BYTES, LEASE_BYTES = 50, 200
#: Bytes of a group in the ledger, without its rollouts, and in the event log; bytes of a token in files for people.
#: Measured in runs of the demo and of SmolLM2 (docs/capacity.md).
LEDGER_BYTES, EVENT_BYTES, SAMPLED_BYTES = 500, 2600, 40


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes on one disk: what stays, by part, and what is there `meanwhile` while the run goes on."""

    parts: dict[str, int]
    meanwhile: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """Bytes over the network. `first`: to each worker that joins; `version`: to each worker; of a step: `weights` to
    all workers together, `prompts` to them, `rollouts` back, of which `routes`; of the run: `to_workers`, of which the
    head sends `by_head` if workers reach each other, and `to_head`, the rollouts."""

    workers: int
    first: int
    version: int
    weights: int
    prompts: int
    rollouts: int
    routes: int
    to_workers: int
    by_head: int
    to_head: int


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """`workers`: machines that sample; `joins`: how many join in the run, with those that take the place of lost ones;
    `publish_every` and `max_staleness`: of the plan; `engine`: what they sample with."""

    workers: int
    joins: float
    publish_every: int
    max_staleness: int
    engine: str = ""


@dataclass(frozen=True, slots=True)
class DiskAndNetwork:
    """What is kept and sent: on the disk of the run's directory, of a worker, and over the network."""

    run: DiskNeed
    worker: DiskNeed
    sent: NetworkUse

    def to_dict(self) -> dict[str, object]:
        """Return plain values, in bytes, for `--json`."""
        disks = {"run": self.run, "worker": self.worker}
        by_name = {name: {**asdict(one), "bytes": one.total} for name, one in disks.items()}
        return {"disk": by_name, "network": asdict(self.sent)}


def kept_and_sent(
    config: Config, weights: BroadcastInputs, fleet: PlannedFleet, answer_tokens: float
) -> DiskAndNetwork:
    """Return what the run keeps and sends. `weights.full_bytes` is known."""
    versions = math.ceil(config.run.max_steps / fleet.publish_every)
    worker = _worker_disk(weights, fleet, versions)
    run = _run_disk(config, weights, fleet, versions, answer_tokens)
    if config.workers.count:
        run.parts["workers on this machine"] = config.workers.count * worker.total
    return DiskAndNetwork(run, worker, _sent(config, weights, fleet, versions, answer_tokens))


# ---- disks -----------------------------------------------------------------------------------------------------------


def _run_disk(
    config: Config, weights: BroadcastInputs, fleet: PlannedFleet, versions: int, answer_tokens: float
) -> DiskNeed:
    checkpoint = checkpoint_bytes(config, weights)
    steps, groups = config.run.max_steps, config.schedule.groups_per_step
    each = _group_bytes(config, answer_tokens) + _routes_bytes(config, answer_tokens)
    # Rollouts stay until the oldest of the newest checkpoints covers them; the ledger's file does not shrink.
    uncovered = config.learner.keep_checkpoints * config.learner.checkpoint_every + fleet.max_staleness + 1
    ledger = steps * groups * LEDGER_BYTES + min(steps, uncovered) * groups * each
    logged = min(LOGGED_TOKENS, LOGGED_GROUPS * config.sampling.group_size * answer_tokens)
    samples = (min(steps, KEPT_STEPS) + max(0, steps - KEPT_STEPS) / KEPT_EVERY) * logged * SAMPLED_BYTES
    parts = {
        "checkpoints": num_checkpoints(config) * checkpoint,
        "snapshots": weights.base_bytes + weights.full_bytes + _deltas_bytes(weights, fleet, versions),
        "ledger": ledger,
        "event log": min((PARTS_KEPT + 1) * PART_BYTES_MAX, steps * groups * EVENT_BYTES),
        "samples for people": samples,
    }
    meanwhile = {
        "the next checkpoint": checkpoint,
        "the next whole snapshot": weights.full_bytes,
        "what the learner published last": weights.full_bytes,
    }
    return DiskNeed(_whole(parts), _whole(meanwhile))


def num_checkpoints(config: Config) -> int:
    """Return how many checkpoints stay at the end: the newest, the best, and those of every so many steps."""
    learner, steps = config.learner, config.run.max_steps
    saved = math.ceil(steps / learner.checkpoint_every)
    num_kept = min(saved, learner.keep_checkpoints)
    oldest = (saved - num_kept + 1) * learner.checkpoint_every  # of the newest ones
    if learner.keep_every:
        num_kept += (oldest - 1) // math.lcm(learner.keep_every, learner.checkpoint_every)
    has_best = config.eval.source and saved > learner.keep_checkpoints
    return min(saved, num_kept + bool(has_best))


def checkpoint_bytes(config: Config, weights: BroadcastInputs) -> float:
    """Return the size of a checkpoint: trained weights in float32, and their moments."""
    trained = int(weights.full_bytes / BYTES_PER_VALUE[config.model.snapshot_dtype])
    return 4 * trained + moments_bytes(config.learner.quantised, trained)


def _deltas_bytes(weights: BroadcastInputs, fleet: PlannedFleet, versions: int) -> float:
    """Return the bytes of the deltas since the last whole content: it is sent again when they are as large."""
    one = weights.num_bytes(fleet.publish_every)
    return min(weights.full_bytes, min(MAX_DELTAS, versions - 1) * one)


def _worker_disk(weights: BroadcastInputs, fleet: PlannedFleet, versions: int) -> DiskNeed:
    parts = {
        "weights": weights.full_bytes,
        "chunks that lead to them": weights.full_bytes + _deltas_bytes(weights, fleet, versions),
        "base model": 2 * weights.base_bytes,
    }
    meanwhile = {"the next whole content": weights.full_bytes}
    if fleet.engine == "vllm":
        parts["directories of the token server"] = weights.base_bytes + weights.full_bytes
        meanwhile["directory of the next version"] = weights.full_bytes
    return DiskNeed(_whole(parts), _whole(meanwhile))


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    return {name: int(num_bytes) for name, num_bytes in parts.items() if num_bytes >= 1}


# ---- network ---------------------------------------------------------------------------------------------------------


def _group_bytes(config: Config, answer_tokens: float) -> float:
    """Return the bytes of a group's rollouts, without routes. `top_k` adds the tokens to choose from; what `top_p` and
    `min_p` add depends on the policy, and is not counted."""
    sampling = config.sampling
    token = TOKEN_BYTES + (4 * (sampling.top_k + 1) if sampling.top_k else 0)
    return sampling.group_size * (ROLLOUT_BYTES + token * answer_tokens) + PROMPT_BYTES * PROMPT_TOKENS


def _routes_bytes(config: Config, answer_tokens: float) -> float:
    """Return the bytes of a group's routes, of which a prompt counts once, before they are compressed; 0: none are
    sent."""
    values = text_values(known_config(config.model.path) or {}) if config.learner.routing_replay else {}
    experts, chosen, layers = num_experts(values), num_chosen(values), len(routed_layers(values))
    shape = RouteShape(layers, chosen, experts)
    return shape.token_bytes * (PROMPT_TOKENS + config.sampling.group_size * answer_tokens)


def _sent(
    config: Config, weights: BroadcastInputs, fleet: PlannedFleet, versions: int, answer_tokens: float
) -> NetworkUse:
    steps, groups = config.run.max_steps, config.schedule.groups_per_step
    first, version = weights.base_bytes + weights.full_bytes, weights.num_bytes(fleet.publish_every)
    routes = groups * _routes_bytes(config, answer_tokens)
    rollouts = groups * _group_bytes(config, answer_tokens) + routes
    prompts = groups * (LEASE_BYTES + PROMPT_BYTES * PROMPT_TOKENS)
    all_prompts, later = steps * prompts, (versions - 1) * version
    to_workers = fleet.joins * first + fleet.workers * later + all_prompts
    by_head = first + later + all_prompts if fleet.workers else 0.0
    sizes = {
        "first": first,
        "version": version,
        "weights": fleet.workers * version / fleet.publish_every,
        "prompts": prompts,
        "rollouts": rollouts,
        "routes": routes,
        "to_workers": to_workers,
        "by_head": by_head,
        "to_head": steps * rollouts,
    }
    return NetworkUse(fleet.workers, **{name: int(value) for name, value in sizes.items()})


# ---- for people ------------------------------------------------------------------------------------------------------


def disk_and_network_table(needs: DiskAndNetwork) -> Table:
    """Return both as a table for people."""
    table = Table(title="Disk and network", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name, one in (("run's directory", needs.run), ("each worker", needs.worker)):
        more = f"; while it runs {size(sum(one.meanwhile.values()))} more"
        table.add_row(name, f"[bold]{size(one.total)}[/bold]: {_by_size(one.parts)}{more}")
    sent = needs.sent
    table.add_row("to each worker", f"{size(sent.first)} at first, then {size(sent.version)} a version")
    routes = f", of it {size(sent.routes)} of routes before compression" if sent.routes else ""
    workers = counted(sent.workers, "worker")
    traffic = f"{size(sent.weights)} of weights to {workers}, {size(sent.rollouts)} of rollouts back{routes}"
    table.add_row("each step", traffic)
    head = f" ({size(sent.by_head)} of it from the head if they reach each other, else all)" if sent.workers > 1 else ""
    table.add_row("the run", f"[bold]{size(sent.to_workers)}[/bold] to {workers}{head}, {size(sent.to_head)} back")
    return table


def _by_size(parts: Mapping[str, int]) -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in largest if num_bytes * 100 >= largest[0][1])
