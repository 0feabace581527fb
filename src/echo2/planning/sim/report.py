"""The report of a simulated run: idle ratio, staleness, wasted work and its causes. First numbers, then text."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from echo2.planning.sim.history import History, StepTimes
from echo2.planning.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Report:
    """`staleness`: surviving trained groups by age of their oldest token. `idle_ratio`: the learner's waiting /
    (waiting + training), over the whole run; `steady_idle_ratio` and `step_seconds` over the second half of its steps,
    without the cold start. `usd` is the cost of workers, `learner_usd` of the learner, both over the whole run.
    `usd_per_step`: the run's mean cost per second times `step_seconds`. `broadcast_seconds`: the median time from a
    publication until 1 / 1.1 of the active workers had it (0: no broadcast got so far). `idle_workers`: share of the
    active workers' time without a lease. `history`: the counts behind the numbers.
    """

    name: str
    seed: int
    finished: bool
    seconds: float
    num_events: int
    steps: int
    idle_ratio: float
    steady_idle_ratio: float
    step_seconds: float
    staleness: dict[int, int]
    refused: dict[str, int]
    leases: dict[str, int]
    retired: dict[str, int]
    killed: dict[str, int]
    fallbacks: int
    usd: float
    learner_usd: float
    usd_per_step: float
    broadcast_seconds: float
    idle_workers: float
    max_workers: int
    origin_bytes: int
    history: History

    @property
    def max_staleness(self) -> int:
        """Largest age of the oldest token of a group, in versions."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """Mean age of the oldest token of a group, in versions."""
        total = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(1, total)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, without the history."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "history"}

    def to_text(self) -> str:
        """Return a summary of a dozen lines."""
        steps, groups = max(1, self.steps), max(1, sum(self.staleness.values()))
        state = "finished" if self.finished else "NOT FINISHED"
        dollars = f"${self.usd:.2f} for workers, ${self.learner_usd:.2f} for the learner"
        lines = [
            f"{self.name}, seed {self.seed}: {state} after {self.seconds:.0f} s ({self.num_events} events)",
            f"  steps       {self.steps} trained, {self.seconds / steps:.2f} s each, {self.fallbacks} fall-backs",
            f"  learner     idle ratio {self.idle_ratio:.3f}; {self.steady_idle_ratio:.3f} in the second half, "
            f"with {self.step_seconds:.2f} s a step",
            f"  workers     {self.max_workers} at most, without work {self.idle_workers:.1%} of the time",
            f"  staleness   mean {self.mean_staleness:.2f}, max {self.max_staleness}   {_bars(self.staleness, groups)}",
            f"  broadcast   {self.broadcast_seconds:.1f} s until 91 % of the workers had it (median)",
            f"  leases      {_counts(self.leases)}",
            f"  refused     {_counts(self.refused)}",
            f"  retired     {_counts(self.retired)}",
            f"  killed      {_counts(self.killed)}",
            f"  shipped     {self.origin_bytes / 1e9:.2f} GB of snapshots from the head",
            f"  cost        {dollars}, ${self.usd_per_step:.4f} a step",
        ]
        return "\n".join(lines)


def make_report(scenario: Scenario, seed: int, history: History, seconds: float, num_events: int) -> Report:
    """Compute the report from the history of a run."""
    surviving = history.surviving()
    staleness = Counter(done.step - version for done in surviving.values() for version in done.versions)
    busy = history.wait_seconds + history.train_seconds
    steady_idle, step_seconds = _steady(history.steps)
    return Report(
        name=scenario.name,
        seed=seed,
        finished=history.ended == "all steps are trained",
        seconds=seconds,
        num_events=num_events,
        steps=len(surviving),
        idle_ratio=history.wait_seconds / busy if busy else 0.0,
        steady_idle_ratio=steady_idle,
        step_seconds=step_seconds,
        staleness=dict(sorted(staleness.items())),
        refused=dict(history.refused),
        leases=dict(history.closed),
        retired=dict(history.retired),
        killed=dict(history.killed),
        fallbacks=history.fallbacks,
        usd=history.usd,
        learner_usd=history.learner_usd,
        usd_per_step=(history.usd + history.learner_usd) / seconds * step_seconds if seconds else 0.0,
        broadcast_seconds=statistics.median(history.broadcasts) if history.broadcasts else 0.0,
        idle_workers=history.idle_worker_seconds / history.worker_seconds if history.worker_seconds else 0.0,
        max_workers=max((attending for _, attending, _ in history.fleet), default=0),
        origin_bytes=history.origin_bytes,
        history=history,
    )


def _steady(steps: list[StepTimes]) -> tuple[float, float]:
    """Return the idle ratio and the seconds per step, over the second half of the steps."""
    later = steps[len(steps) // 2 :]
    if not later:
        return 0.0, 0.0
    waited, trained = sum(one.wait_seconds for one in later), sum(one.train_seconds for one in later)
    return waited / (waited + trained), (waited + trained) / len(later)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _bars(histogram: dict[int, int], total: int) -> str:
    return "  ".join(f"{age}: {100 * count / total:.0f}%" for age, count in sorted(histogram.items()))
