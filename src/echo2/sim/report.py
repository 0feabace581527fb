"""What a simulated run came to: idle ratio, staleness, what was wasted and why. Numbers first, then text for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from echo2.sim.history import History
from echo2.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Report:
    """`staleness`: surviving trained groups by age of their oldest token; `idle_ratio`: of the learner, waiting /
    (waiting + training). `history` holds everything that the numbers were counted from.
    """

    name: str
    seed: int
    finished: bool
    seconds: float
    num_events: int
    steps: int
    idle_ratio: float
    staleness: dict[int, int]
    refused: dict[str, int]
    leases: dict[str, int]
    retired: dict[str, int]
    killed: dict[str, int]
    fallbacks: int
    usd: float
    origin_bytes: int
    history: History

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    def to_text(self) -> str:
        """A dozen lines."""
        steps, groups = max(1, self.steps), max(1, sum(self.staleness.values()))
        mean = sum(age * count for age, count in self.staleness.items()) / groups
        state = "finished" if self.finished else "NOT FINISHED"
        lines = [
            f"{self.name}, seed {self.seed}: {state} after {self.seconds:.0f} s ({self.num_events} events)",
            f"  steps       {self.steps} trained, {self.seconds / steps:.2f} s each, {self.fallbacks} fall-backs",
            f"  learner     idle ratio {self.idle_ratio:.3f}",
            f"  staleness   mean {mean:.2f}, max {self.max_staleness}   {_bars(self.staleness, groups)}",
            f"  leases      {_counts(self.leases)}",
            f"  refused     {_counts(self.refused)}",
            f"  retired     {_counts(self.retired)}",
            f"  killed      {_counts(self.killed)}",
            f"  shipped     {self.origin_bytes / 1e9:.2f} GB of snapshots",
            f"  cost        ${self.usd:.2f} for workers, ${self.usd / steps:.4f} a step",
        ]
        return "\n".join(lines)


def make_report(scenario: Scenario, seed: int, history: History, seconds: float, num_events: int) -> Report:
    """Count it all."""
    surviving = history.surviving()
    staleness = Counter(done.step - version for done in surviving.values() for version in done.versions)
    busy = history.wait_seconds + history.train_seconds
    return Report(
        name=scenario.name,
        seed=seed,
        finished=history.ended == "all steps are trained",
        seconds=seconds,
        num_events=num_events,
        steps=len(surviving),
        idle_ratio=history.wait_seconds / busy if busy else 0.0,
        staleness=dict(sorted(staleness.items())),
        refused=dict(history.refused),
        leases=dict(history.closed),
        retired=dict(history.retired),
        killed=dict(history.killed),
        fallbacks=history.fallbacks,
        usd=history.usd,
        origin_bytes=history.origin_bytes,
        history=history,
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _bars(histogram: dict[int, int], total: int) -> str:
    return "  ".join(f"{age}: {100 * count / total:.0f}%" for age, count in sorted(histogram.items()))
