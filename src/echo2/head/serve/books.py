"""What the head keeps of a run for people: metrics and rollouts in files, costs and failures in the ledger, evaluations
and the times of broadcasts in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict

from echo2.config import Config
from echo2.config.rundir import RunDir
from echo2.core.clock import Clock
from echo2.core.errors import UserError
from echo2.head.decide.planner import Planner
from echo2.head.fleet.accounts import CostBook
from echo2.head.fleet.decide.fleet_need import predicted_idle_ratio
from echo2.head.ledger.books import BroadcastTimes, Evals, Failures
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.metrics import Metrics, Sink, TensorBoardSink, TrackioSink, WandbSink
from echo2.head.ledger.rollout_log import RolloutLog
from echo2.tasks.streams import Tasks
from echo2.weights.broadcast.origin import OriginNode

log = logging.getLogger(__name__)

#: Maximum age of the prediction of the learner's idle time.
PREDICTED_SECONDS = 5.0
#: Maximum number of workers turned away for their price or engine that `echo2 status` names.
TURNED_AWAY_MAX = 20


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
        """Count a lost worker."""
        self.num_lost += 1

    def turn_away(self, worker_id: str, reason: str) -> None:
        """Keep why a worker may not join; empty: it may."""
        self.turned_away.pop(worker_id, None)
        if reason:
            self.turned_away[worker_id] = reason
        if len(self.turned_away) > TURNED_AWAY_MAX:
            del self.turned_away[next(iter(self.turned_away))]

    def add_rewards(self, source: str, rewards: Iterable[float]) -> None:
        """Add the rewards of a group whose task comes from this source."""
        self._source_rewards.setdefault(source, []).extend(rewards)

    def take_rewards(self) -> dict[str, list[float]]:
        """Return the rewards by source since the last call."""
        found, self._source_rewards = self._source_rewards, {}
        return found

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
        self._ledger.set_meta("seconds", now - self.started_at)

    def close(self, origin: OriginNode) -> None:
        """Save, and close the files."""
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
