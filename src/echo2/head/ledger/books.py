"""What the head keeps of a run for people: metrics and rollouts in files, costs and failures in the ledger, evaluations
and the times of broadcasts in memory.

A publication starts when the learner has its copy of the weights. `t_bcast` is ECHO-2's: the time until 1/1.1 of the
workers that attended at publication have installed the snapshot, reload included. A worker that skips a version counts
when it has installed a newer one. Workers that joined after the publication, or left, do not count.

Failures are kept for display: a count per kind, and the first failure in full; so are the newest decisions of each kind
about the fleet, of which events.jsonl has all.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echo2.config import Config
from echo2.config.rundir import RunDir
from echo2.core.clock import Clock
from echo2.core.errors import UserError, counted
from echo2.core.printable import printable, printable_lines
from echo2.core.types import RolloutGroup, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.planner import Planner
from echo2.head.fleet.decide.formulas import GAMMA
from echo2.head.fleet.decide.standby import predicted_idle_ratio
from echo2.head.ledger.costs import CostBook
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.metrics import Metrics, Sink, TensorBoardSink, TrackioSink, WandbSink
from echo2.head.ledger.rollout_log import RolloutLog
from echo2.sandbox.plugins import TRACEBACK_CHARS
from echo2.tasks.streams import Tasks
from echo2.weights.broadcast.origin import OriginNode

log = logging.getLogger(__name__)

#: Number of versions whose times are remembered.
VERSIONS_MAX = 16
#: Maximum characters of a message.
MESSAGE_CHARS = 1000
#: Maximum number of refused snapshots counted and logged per worker, which chooses the text of the message.
REFUSALS_PER_WORKER = 10
#: Minimum reward of a rollout that counts as solved in pass@k.
SOLVED = 1.0
#: Prefix of the metrics that count failed tasks, before the reason.
FAILED_BECAUSE = "eval/num_failed/"
#: Maximum age of the prediction of the learner's idle time.
PREDICTED_SECONDS = 5.0
#: Number of decisions of each kind that are kept, and maximum characters of a reason.
DECISIONS_KEPT, REASON_CHARS = 5, 300
#: Maximum number of workers turned away for their price or engine that `echo2 status` names.
TURNED_AWAY_MAX = 20


@dataclass(slots=True)
class Publication:
    """The broadcast of one version. `waits_for`: workers that attended at publication and have not installed it yet.
    `seconds`: times of those that have; `late_seconds`: times of workers that joined later."""

    started_at: float
    waits_for: set[str]
    seconds: dict[str, float] = field(default_factory=dict)
    late_seconds: dict[str, float] = field(default_factory=dict)

    def t_bcast(self) -> float | None:
        """Return the seconds until enough workers had installed the version; None while too few have."""
        needed = math.ceil((len(self.seconds) + len(self.waits_for)) / GAMMA)
        if needed == 0 or len(self.seconds) < needed:
            return None
        return sorted(self.seconds.values())[needed - 1]


class BroadcastTimes:
    """Seconds from publication until each worker reported the snapshot installed."""

    def __init__(self) -> None:
        self._publications: dict[SnapshotRef, Publication] = {}
        self._delta_ratio = 1.0
        self.snapshot_bytes = 0  # size of the newest snapshot's whole content

    def published(self, ref: SnapshotRef, started_at: float, attending: Collection[str]) -> None:
        """Start timing a version. One that is published again (whole, after its delta proved wrong) keeps its start."""
        self._publications.setdefault(ref, Publication(started_at, set(attending)))
        while len(self._publications) > VERSIONS_MAX:
            del self._publications[next(iter(self._publications))]

    def sized(self, sent_bytes: int, whole_bytes: int) -> None:
        self._delta_ratio = sent_bytes / max(1, whole_bytes)
        self.snapshot_bytes = whole_bytes

    def installed(self, worker_id: str, ref: SnapshotRef, now: float) -> None:
        for other, publication in self._publications.items():
            if other.history != ref.history or other.version > ref.version:
                continue
            if worker_id in publication.waits_for:
                publication.waits_for.discard(worker_id)
                publication.seconds[worker_id] = now - publication.started_at
            elif other == ref and worker_id not in publication.seconds:
                publication.late_seconds.setdefault(worker_id, now - publication.started_at)

    def gone(self, worker_id: str) -> None:
        for publication in self._publications.values():
            publication.waits_for.discard(worker_id)

    def metrics(self) -> dict[str, Any]:
        """Return quantiles of the latency over workers, for the newest version that any worker has installed, and
        T_bcast of the newest version that enough workers have installed."""
        row: dict[str, Any] = {"broadcast/t_bcast": None, "broadcast/delta_ratio": self._delta_ratio}
        for publication in self._publications.values():
            seconds = sorted([*publication.seconds.values(), *publication.late_seconds.values()])
            if seconds:
                row["broadcast/latency_p50"] = seconds[len(seconds) // 2]
                row["broadcast/latency_p95"] = seconds[min(len(seconds) - 1, int(len(seconds) * 0.95))]
            t_bcast = publication.t_bcast()
            row["broadcast/t_bcast"] = row["broadcast/t_bcast"] if t_bcast is None else t_bcast
        return row


@dataclass(slots=True)
class Failure:
    """Number of failures of one kind, with message and traceback of the first since the head was started: what was
    mended meanwhile is not what fails now. `num_before`: failures under earlier heads; if there are no others, message
    and traceback are of those."""

    kind: str
    count: int
    message: str
    traceback: str = ""
    num_before: int = 0


class Failures:
    """The failures of one run. `plain`: the result of an earlier head's `to_plain`."""

    def __init__(self, plain: list[dict[str, Any]] | None = None) -> None:
        before = [Failure(**entry) for entry in plain or []]
        self._by_kind = {one.kind: replace(one, num_before=one.count) for one in before}
        self._refusals: dict[str, int] = {}

    def see(self, event: ev.Event, commands: Sequence[do.Command]) -> None:
        """Count the failure that an event reports, if any. `commands`: the planner's answer. A worker's report on a
        lease that it does not hold closes no lease, and is not counted.
        """
        for command in commands:
            if isinstance(command, do.AcceptDelivery | do.KeepScores | do.TopUpGroup):
                for lost in command.lost:
                    self.add(lost.cause, lost.detail)
        if isinstance(event, ev.GroupUnfit):
            self.add(event.reason, event.detail, event.traceback)
        elif isinstance(event, ev.LeaseFailed) and event.reason != "snapshot_gone" and _has_closed(event, commands):
            self.add(event.reason, f"{event.worker_id}: {event.detail}", event.traceback)

    def refused(self, worker_id: str, what: str) -> None:
        """Count a snapshot that a worker refused to install. `what`: which, and why. Only the first few per worker
        count."""
        count = self._refusals.get(worker_id, 0)
        if count < REFUSALS_PER_WORKER:
            self._refusals[worker_id] = count + 1
            self.add("snapshot_refused", f"{worker_id} refused snapshot {what}")

    def add(self, kind: str, message: str, traceback: str = "") -> None:
        """Count one more failure of a kind; keep the message and traceback of the first."""
        log.warning("%s: %s", kind, message)  # the log handler collapses repetitions
        num_before = num = 0
        if (old := self._by_kind.get(kind)) is not None:
            num_before, num = old.num_before, old.count
            old.count += 1
        if num == num_before:
            first = printable(message, MESSAGE_CHARS), printable_lines(traceback, TRACEBACK_CHARS)
            self._by_kind[kind] = Failure(kind, num + 1, *first, num_before)

    def count(self, kind: str) -> int:
        return self._by_kind[kind].count if kind in self._by_kind else 0

    def to_plain(self) -> list[dict[str, Any]]:
        """Return plain values for the ledger, status.json and the summary; the most frequent kind first."""
        return [asdict(one) for one in sorted(self._by_kind.values(), key=lambda one: -one.count)]


def _has_closed(event: ev.LeaseFailed, commands: Iterable[do.Command]) -> bool:
    return any(isinstance(one, do.CloseLease) and one.lease_id == event.lease_id for one in commands)


@dataclass(slots=True)
class Decision:
    """A decision of the planner about the fleet. `count`: of its kind, for the same reason at the same moment."""

    at: float
    kind: str
    what: str
    reason: str
    count: int = 1


class Decisions:
    """The newest decisions of each kind. `plain`: the result of an earlier head's `to_plain`."""

    def __init__(self, plain: list[dict[str, Any]] | None = None) -> None:
        self._by_kind: dict[str, deque[Decision]] = {}
        for entry in reversed(plain or []):
            self._add(Decision(**entry))

    def see(self, commands: Iterable[do.Command], now: float) -> None:
        """Keep those of the planner's commands that change what workers there are, or what they get."""
        for command in commands:
            if what := _decided(command):
                self._add(
                    Decision(now, type(command).__name__, printable(what), printable(command.reason, REASON_CHARS))
                )

    def _add(self, new: Decision) -> None:
        of_kind = self._by_kind.setdefault(new.kind, deque(maxlen=DECISIONS_KEPT))
        if of_kind and (of_kind[-1].at, of_kind[-1].reason) == (new.at, new.reason):
            of_kind[-1].count += 1  # a fleet of thousands may be released at once
        else:
            of_kind.append(new)

    def to_plain(self) -> list[dict[str, Any]]:
        """Return plain values for the ledger and status.json, the newest first."""
        decisions = [one for of_kind in self._by_kind.values() for one in reversed(of_kind)]
        return [asdict(one) for one in sorted(decisions, key=lambda one: -one.at)]


def _decided(command: do.Command) -> str:
    """Say what a command changes of the fleet; empty: nothing."""
    match command:
        case do.ActivateWorker():
            return f"{command.worker_id} is activated"
        case do.ReleaseWorker():
            return f"{command.worker_id} stands by"
        case do.RestWorker():
            return f"{command.worker_id} rests for {command.seconds:.0f} s"
        case do.ExpelWorker():
            return f"{command.worker_id} is expelled for {command.seconds:.0f} s"
        case do.GrantLeases() if command.is_second:
            return f"{command.worker_id} samples it, too"
        case do.LimitGroups():
            return f"{counted(command.num_groups, 'group')} at once"
        case do.SetWidth():
            return f"{command.worker_id} decodes {counted(command.num_groups, 'group')} at once"
        case do.SpaceSnapshots():
            return f"a snapshot after every {counted(command.publish_every, 'step')}"
        case do.RentMachine():
            return f"a machine is rented: {command.offer}"
        case do.ReturnMachine():
            whose = command.worker_id or "a worker that did not join"
            return f"the machine of {whose} is returned: {command.offer}"
    return ""


class Evals:
    """Scored eval groups by version, and the reasons for versions that were not evaluated. In memory only: a restarted
    head evaluates again. `set_of`: held-out position -> name of its set; "" if there is only one set.
    """

    def __init__(self, set_of: Callable[[int], str] = lambda position: "") -> None:
        self._set_of = set_of
        self._groups: dict[int, list[RolloutGroup]] = {}
        self.not_evaluated: dict[int, str] = {}

    def start(self, version: int) -> None:
        self._groups[version] = []

    def keep(self, group: RolloutGroup) -> None:
        """Keep a scored group if its version is being evaluated."""
        if group.step in self._groups:
            self._groups[group.step].append(group)

    def skip(self, version: int, reason: str) -> dict[str, Any]:
        """Drop an evaluation that is given up. Return its metrics, which have no accuracy."""
        self._groups.pop(version, None)
        self.not_evaluated[version] = reason
        return {"eval/version": version, "eval/num_tasks": 0}

    def finish(self, version: int, failed: Mapping[str, int]) -> dict[str, Any]:
        """Return the metrics of a finished evaluation. `failed`: by reason, how many tasks have no result."""
        metrics = eval_metrics(self._groups.pop(version, []), sum(failed.values()), self._set_of)
        by_reason = {f"{FAILED_BECAUSE}{reason}": count for reason, count in sorted(failed.items())}
        return {"eval/version": version, **metrics, **by_reason}


def eval_metrics(groups: Iterable[RolloutGroup], num_failed: int, set_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the metrics of an evaluation. Accuracy is the mean over the tasks of the mean reward of their n rollouts
    (avg@n); with rewards of 0 or 1, the share solved. A failed task is counted, and has no reward: what failed is not
    the policy. With n above 1 also pass@k for powers of two up to n. With several held-out sets also the accuracy of
    each.
    """
    scored_groups = list(groups)
    means = [statistics.fmean(group.rewards) for group in scored_groups]
    lengths = [sum(len(row.tokens) for row in rows) for group in scored_groups for rows in group.by_rollout]
    metrics: dict[str, Any] = {"eval/num_tasks": len(means), "eval/num_failed": num_failed}
    if not means:
        return metrics
    metrics |= {"eval/accuracy": statistics.fmean(means), "eval/mean_length": statistics.fmean(lengths)}
    num_samples = min(group.num_rollouts for group in scored_groups)
    for k in (1 << power for power in range(1, num_samples.bit_length())):
        solved = (
            pass_at_k(group.num_rollouts, sum(one >= SOLVED for one in group.rewards), k) for group in scored_groups
        )
        metrics[f"eval/pass@{k}"] = statistics.fmean(solved)
    by_set: dict[str, list[float]] = {}
    for group, mean in zip(scored_groups, means, strict=True):
        by_set.setdefault(set_of(group.cursor), []).append(mean)
    by_set.pop("", None)
    return metrics | {f"eval/accuracy/{name}": statistics.fmean(values) for name, values in sorted(by_set.items())}


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return an unbiased estimate of the probability that any of k samples is solved, from n samples of which c are
    solved: 1 - C(n - c, k) / C(n, k). 1 <= k <= n. (Chen et al. 2021, arXiv 2107.03374, equation 1.)
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


class RunBooks:
    """`num_lost`: workers lost; `turned_away`: workers that may not join, and why; `started_at`: earlier heads' time is
    included.
    """

    def __init__(
        self, rundir: RunDir, config: Config, run_id: str, ledger: Ledger, held_out: Tasks | None, clock: Clock
    ) -> None:
        self._ledger, self._clock = ledger, clock
        self.metrics = Metrics(rundir.metrics, _sinks(rundir, config, run_id))
        self.rollout_log = RolloutLog(rundir.rollouts, config.learner.advantage)
        self.costs, self.failures = CostBook(ledger.get_meta("costs")), Failures(ledger.get_meta("failures"))
        self.decisions = Decisions(ledger.get_meta("decisions"))
        self.evals = Evals() if held_out is None else Evals(held_out.source_of)
        self.broadcast_times = BroadcastTimes()
        counters = ledger.get_meta("counters", {})
        self.num_lost: int = counters.get("workers_lost", 0)
        self._traffic_before = {name: counters.get(name, 0) for name in ("origin_bytes", "peer_bytes")}
        self.turned_away: dict[str, str] = {}
        self._source_rewards: dict[str, list[float]] = {}  # of groups scored since the last row of metrics
        self._idle_predicted: tuple[float, float] | None = None  # when, and the ratio
        self.started_at = clock.now() - ledger.get_meta("seconds", 0.0)

    def lose_worker(self) -> None:
        self.num_lost += 1

    def turn_away(self, worker_id: str, reason: str) -> None:
        """Keep why a worker may not join; empty: it may."""
        self.turned_away.pop(worker_id, None)
        if reason:
            self.turned_away[worker_id] = reason
        if len(self.turned_away) > TURNED_AWAY_MAX:
            del self.turned_away[next(iter(self.turned_away))]

    def add_rewards(self, source: str, rewards: Iterable[float]) -> None:
        self._source_rewards.setdefault(source, []).extend(rewards)

    def take_rewards(self) -> dict[str, list[float]]:
        """Return the rewards by source since the last call."""
        rewards, self._source_rewards = self._source_rewards, {}
        return rewards

    def idle_predicted(self, planner: Planner) -> float | None:
        """Return the predicted idle ratio, at most `PREDICTED_SECONDS` old: simulating steps costs as much as handling
        dozens of groups, so that short steps share one prediction."""
        now = self._clock.now()
        if self._idle_predicted is None or now >= self._idle_predicted[0] + PREDICTED_SECONDS:
            ratio = predicted_idle_ratio(planner, now)
            self._idle_predicted = None if ratio is None else (now, ratio)
        return None if self._idle_predicted is None else self._idle_predicted[1]

    def traffic(self, origin: OriginNode) -> dict[str, int]:
        """Bytes of chunks since the run began: sent by the origin, and by workers to each other."""
        here = {"origin_bytes": origin.origin_bytes, "peer_bytes": origin.peer_bytes}
        return {name: self._traffic_before[name] + num_bytes for name, num_bytes in here.items()}

    def save(self, origin: OriginNode) -> None:
        """Keep in the ledger what outlives the head."""
        now = self._clock.now()
        self._ledger.set_meta("costs", self.costs.to_plain(now))
        self._ledger.set_meta("counters", {"workers_lost": self.num_lost, **self.traffic(origin)})
        self._ledger.set_meta("failures", self.failures.to_plain())
        self._ledger.set_meta("decisions", self.decisions.to_plain())
        self._ledger.set_meta("seconds", now - self.started_at)

    def close(self, origin: OriginNode) -> None:
        try:
            self.save(origin)
        except UserError:
            log.exception("the costs of the last step could not be saved")
        self.metrics.close()


def _sinks(rundir: RunDir, config: Config, run_id: str) -> list[Sink]:
    sinks: list[Sink] = []
    for target in config.run.log_to:
        kind, _, project = target.partition(":")
        if kind == "tensorboard":
            sinks.append(TensorBoardSink(rundir.path / "tensorboard"))
        elif kind == "trackio":
            sinks.append(TrackioSink(project, run_id, asdict(config)))
        else:
            rollouts = rundir.rollouts if kind == "wandb+rollouts" else None
            sinks.append(WandbSink(project, run_id, rundir.path, asdict(config), rollouts))
    return sinks
