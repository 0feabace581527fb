"""Reports for people: the step's row of metrics, and status.json."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

import msgspec

from echo2.config.rundir import newest_checkpoint, read_metrics, write_atomically
from echo2.core.types import SnapshotRef
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.fleet.decide.measurements import CAUSES, NUM_REMEMBERED
from echo2.head.fleet.decide.standby import fleet_need
from echo2.head.ledger.books import FAILED_BECAUSE
from echo2.head.serve.head import Head
from echo2.weights.broadcast.origin import Progress

#: Workers whose rows of status.json are made in one go; calls are answered in between.
ROWS_AT_ONCE = 100


def step_row(head: Head, version: int, learner_metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the row of metrics of the recorded step that made `version`: the learner's metrics and the head's."""
    now = head.clock.now()
    active = head.planner.fleet.active()
    idle = sum(1 for worker in active if worker.idle_since is not None)
    cum_usd, counts = head.books.costs.cum_usd(now), head.ledger.counts()
    before = head.books.metrics.recent[-1].get("cost/cum_usd", 0.0) if head.books.metrics.recent else 0.0
    tokens = counts["trained_tokens"]
    return {
        "policy": head.options.policy,
        "step": version,
        "time/unix": time.time(),
        "time/since_start": now - head.books.started_at,
        **learner_metrics,
        **{f"reward/source/{name}": mean(rewards) for name, rewards in sorted(head.books.take_rewards().items())},
        **{f"time/reward/{name}": seconds for name, seconds in sorted(head.reward.take_seconds().items())},
        "time/reward": head.planner.measurements.rewards.mean or 0.0,
        **({"cost/judge_usd": head.reward.judge.spent_usd} if head.reward.judge else {}),
        "reward/retried": head.books.failures.count("reward_retried"),
        "off_policy/dropped": counts["retired"].get("stale", 0),
        "off_policy/bound": head.options.max_staleness,
        **_waits(head, version - 1),
        **({} if (search := head.planner.width_search) is None else {"schedule/batch_groups": search.width}),
        **resampling_metrics(head, version - 1),
        "groups/issued": counts["issued"],
        "groups/trained": counts["trained"],
        "groups/retired": sum(counts["retired"].values()),
        "groups/refused": sum(counts["refused"].values()),
        "rollouts/lost": sum(counts["lost"].values()),
        **{f"rollouts/lost/{cause}": count for cause, count in sorted(counts["lost"].items())},
        "workers/active": len(active),
        "workers/idle": idle,
        "workers/lost": head.books.num_lost,
        **fleet_metrics(head),
        **head.books.broadcast_times.metrics(),
        **{f"broadcast/{name}": num_bytes for name, num_bytes in head.books.traffic(head.distribution.origin).items()},
        "broadcast/pause_seconds": _pause_seconds(head),
        **(head.mirror.metrics() if head.mirror is not None else {}),
        "cost/step_usd": max(0.0, cum_usd - before),
        "cost/cum_usd": cum_usd,
        "cost/usd_per_mtok": cum_usd / tokens * 1e6 if tokens else 0.0,
        "cost/wasted_usd": head.books.costs.wasted_usd(now),
    }


def _waits(head: Head, step: int) -> dict[str, Any]:
    """Return the learner's waits before this step: seconds by cause, and the last worker."""
    wait = next((one for one in head.planner.measurements.waits if one.step == step), None)
    if wait is None:
        return {}
    return {f"wait/{cause}": seconds for cause, seconds in wait.seconds.items()} | {"wait/last_worker": wait.worker_id}


def resampling_metrics(head: Head, step: int) -> dict[str, Any]:
    """Return a step's number of flat groups that dynamic sampling replaced, and of those that it kept because its limit
    was reached."""
    if not head.options.dynamic_sampling:
        return {}
    groups = head.planner.groups
    num_kept = sum(record.is_flat for record in groups.of_step(step) if record.state != "retired")
    return {"schedule/resampled": groups.num_uninformative(step), "schedule/uninformative_kept": num_kept}


def fleet_metrics(head: Head) -> dict[str, Any]:
    """Return the fleet's rates and the learner's predicted idle ratio. Unknown and infinite values are left out."""
    now = head.clock.now()
    need = fleet_need(head.planner, now)
    values = {
        "fleet/active": need.active,
        "fleet/standby": need.standby,
        "fleet/rate": need.rate,
        "fleet/rate_sd": need.rate_sd,
        "fleet/needed_rate": need.needed_rate,
        "fleet/short": need.short,
        "fleet/rented": len(head.machines.names()),
        "learner/idle_predicted": head.books.idle_predicted(head.planner),
    }
    return {name: value for name, value in values.items() if value is not None and value < math.inf}


def fleet_status(head: Head) -> dict[str, Any]:
    """Return the fleet's state for `echo2 status`, with the newest predicted idle ratio and the ratio measured over the
    steps that the prediction is based on."""
    need = fleet_need(head.planner, head.clock.now())
    last = head.books.metrics.recent[-1] if head.books.metrics.recent else {}
    recent = [row for row in head.books.metrics.recent[-NUM_REMEMBERED:] if "time/wait_for_batch" in row]
    waited, whole = (sum(row.get(f"time/{name}", 0.0) for row in recent) for name in ("wait_for_batch", "step"))
    is_finite = need.needed_rate is not None and need.needed_rate < math.inf
    return {
        "activation": head.options.activation,
        "active": need.active,
        "standby": need.standby,
        "rate": need.rate,
        "needed_rate": need.needed_rate if is_finite else None,
        "short": need.short,
        "text": need.text,
        "idle_predicted": last.get("learner/idle_predicted"),
        "idle_ratio": waited / whole if whole > 0 else None,
        "idle_steps": len(recent),
        "rented": head.machines.names(),
        "publish_every": head.planner.publish_every,
    }


def status(head: Head) -> dict[str, Any]:
    """Return everything that `echo2 status` shows, as plain values."""
    return _status(head, _worker_rows(head, head.planner.fleet))


def _worker_rows(head: Head, workers: Iterable[Worker]) -> list[dict[str, Any]]:
    planner, origin = head.planner, head.distribution.origin
    rows, progress, suspects = [], origin.progress(), origin.suspects
    for worker in workers:
        connection = head.connections.workers.get(worker.worker_id)
        report = connection.report if connection is not None else None
        rows.append(
            {
                "id": worker.worker_id,
                "pid": connection.pid if connection else None,
                "host": connection.host if connection else None,
                "engine": (report.engine if report else "") or (connection.engine if connection else None),
                "device": connection.device if connection else None,
                "doing": report.doing if report else "",
                "installed": str(worker.installed) if worker.installed else None,
                "leases": len(planner.leases.of_worker(worker.worker_id)),
                "attends": not worker.detached,
                "standby": worker.standby,
                "offer": worker.offer,
                "rate": worker.speed.rate,
                "useful_groups": head.books.costs.useful_groups(worker.worker_id),
                "price_usd_per_hour": worker.price_usd_per_hour,
                "is_own": worker.is_own,
                "pause_seconds": report.pause_seconds if report else 0.0,
                "fetching": _fetching(progress.get(worker.worker_id), worker.installed),
                "sources": origin.sources.get(worker.worker_id, []),
                "bytes_received": report.bytes_received if report else 0,
                "bytes_sent": report.bytes_sent if report else 0,
                "suspected": suspects.get(worker.worker_id),
                "mismatch": planner.penalties.mismatch(worker.worker_id),
            }
        )
    return rows


def _status(head: Head, workers: list[dict[str, Any]]) -> dict[str, Any]:
    now = head.clock.now()
    planner, learner, judge = head.planner, head.connections.learner, head.reward.judge
    training = planner.training
    return {
        "time": now,
        "head": {"pid": os.getpid(), "host": socket.gethostname()},
        "learner": None
        if learner is None
        else {"pid": learner.pid, "host": learner.host, "device": learner.device, "doing": learner.doing},
        "workers": workers,
        "policy": planner.options.policy,
        "version": training.version,
        "lineage": training.lineage,
        "max_steps": planner.options.max_steps,
        "max_staleness": planner.options.max_staleness,
        "published": max(planner.snapshots.published, default=None),
        "checkpoint": training.checkpoint_version if training.checkpoint_version >= 0 else None,
        "groups": _group_counts(head),
        "broadcast": {
            **head.books.broadcast_times.metrics(),
            **head.books.traffic(head.distribution.origin),
            "suspects": dict(head.distribution.origin.suspects),
        },
        "paused": planner.health.paused.reason if planner.health.paused else judge.trouble if judge else "",
        "judge": {"answers": judge.num_answers, "usd": judge.spent_usd} if judge else None,
        "waits": [_shown_wait(head, msgspec.to_builtins(wait)) for wait in planner.waits(now)],
        "fleet": fleet_status(head),
        "decisions": head.books.decisions.to_plain(),
        "cost_usd": head.books.costs.cum_usd(now),
        "store": head.mirror.status() if head.mirror is not None else None,
        "not_evaluated": head.books.evals.not_evaluated,
        "turned_away": head.books.turned_away,
        "trust": {ticket: trust.to_plain() for ticket, trust in planner.trust.all().items()},
        "failures": head.books.failures.to_plain(),
        "outcome": head.ending.outcome,
    }


def _shown_wait(head: Head, wait: dict[str, Any]) -> dict[str, Any]:
    """Return a wait for display. If the worker refused the snapshot that it waits for, the reason says so."""
    connection = head.connections.workers.get(wait["waiter"])
    if connection is not None and connection.report.refused and connection.installed is None:
        wait["reason"] = f"it refused snapshot {connection.report.refused}; it tries again"
    return wait


def _fetching(progress: Progress | None, installed: SnapshotRef | None) -> dict[str, Any] | None:
    """Return a worker's fetch and its progress; None if that snapshot or a newer one is installed."""
    if progress is None or (installed is not None and progress.payload.ref <= installed):
        return None
    base = progress.payload.base
    return {
        "version": progress.payload.ref.version,
        "base": base.version if base is not None else None,
        "bytes_stored": progress.bytes_stored,
        "bytes_total": progress.bytes_total,
    }


def _pause_seconds(head: Head) -> float:
    """Return the seconds that generation paused for weight swaps since the start, averaged over attending workers."""
    pauses = [connection.report.pause_seconds for connection in head.connections.workers.values()]
    return sum(pauses) / max(1, len(pauses))


def _group_counts(head: Head) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in head.planner.groups:
        if record.step >= head.planner.training.version:
            counts[record.state] = counts.get(record.state, 0) + 1
    return counts


def _failed_tasks(row: Mapping[str, Any]) -> dict[str, int]:
    """Return how many held-out tasks of an evaluation failed, by reason."""
    return {name.removeprefix(FAILED_BECAUSE): row[name] for name in row if name.startswith(FAILED_BECAUSE)}


def summary(head: Head) -> dict[str, Any]:
    """Return the summary of a run that ended, for the closing table and for scripts."""
    now = head.clock.now()
    written = read_metrics(head.rundir.metrics)
    rows = [row for row in written if "eval/accuracy" in row]
    steps = [row for row in written if "learner/idle_ratio" in row]
    wait = sum(row.get("time/wait_for_batch", 0.0) for row in steps)
    whole = sum(row.get("time/step", 0.0) for row in steps)
    means = [row["off_policy/mean"] for row in steps if "off_policy/mean" in row]
    counts = head.ledger.counts()
    return {
        "outcome": head.ending.outcome,
        "directory": str(head.rundir.path),
        "checkpoint": newest_checkpoint(head.rundir.checkpoints),
        "steps": head.planner.training.version,
        "eval_before": rows[0]["eval/accuracy"] if rows else None,
        "eval_after": rows[-1]["eval/accuracy"] if rows else None,
        "eval_failed": {row["step"]: by_reason for row in written if (by_reason := _failed_tasks(row))},
        "not_evaluated": head.books.evals.not_evaluated,
        "failures": head.books.failures.to_plain(),
        "learner_idle_ratio": wait / whole if whole else None,
        "learner_waits": {cause: sum(row.get(f"wait/{cause}", 0.0) for row in steps) for cause in CAUSES},
        "staleness_mean": sum(means) / len(means) if means else None,
        "staleness_max": max((row["off_policy/max"] for row in steps if "off_policy/max" in row), default=None),
        "staleness_bound": head.options.max_staleness,
        "all_logged": bool(steps) and all(row.get("off_policy/logged") == 1.0 for row in steps),
        "groups": counts,
        **head.books.traffic(head.distribution.origin),
        "seconds": now - head.books.started_at,
        "machines": {
            name: {
                "usd": machine.usd(now),
                "wasted_usd": machine.wasted_usd(now),
                "seconds": machine.seconds(now),
                "useful_seconds": machine.useful_seconds,
                "useful_groups": machine.useful_groups,
                "wasted_seconds": machine.wasted(now),
            }
            for name, machine in sorted(head.books.costs.machines.items())
        },
        "cost_usd": head.books.costs.cum_usd(now),
        "wasted_usd": head.books.costs.wasted_usd(now),
    }


def check_budget(head: Head) -> None:
    """Stop the run once its budget is spent."""
    budget = head.config.fleet.budget_usd
    if budget and head.books.costs.cum_usd(head.clock.now()) >= budget:
        head.ending.stop(f"the budget of ${budget:g} is spent; raise fleet.budget_usd and continue with --resume")


def write_status(head: Head) -> None:
    """Write status.json, which `echo2 status` reads."""
    _write(head, status(head))


async def write_status_in_turns(head: Head) -> float:
    """As `write_status`, but answer calls in between: with thousands of workers it takes long. Return the processor
    seconds that it took.
    """
    workers, rows, seconds = list(head.planner.fleet), list[dict[str, Any]](), 0.0
    for start in range(0, len(workers), ROWS_AT_ONCE):
        began = time.thread_time()
        rows += _worker_rows(head, workers[start : start + ROWS_AT_ONCE])
        seconds += time.thread_time() - began
        await asyncio.sleep(0)
    began = time.thread_time()
    _write(head, _status(head, rows))
    return seconds + time.thread_time() - began


def _write(head: Head, plain: dict[str, Any]) -> None:
    write_atomically(head.rundir.status, msgspec.json.encode(plain, enc_hook=float).decode())
