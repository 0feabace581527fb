"""Two policies that share a fleet, against each with half of it: seconds until the last step begins, in the simulator.

python benchmarks/sharing.py [SEEDS]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import mean

from echo2.sim import Report, Scenario
from echo2.sim.run import run_policies
from echo2.sim.scenario import LearnerSpec, PolicySpec, WorkersSpec

ON_POLICY = PolicySpec("on-policy", 30, 8, max_staleness=0, learner=LearnerSpec(train_seconds=6.0))
STALE = PolicySpec("stale", 30, 8, max_staleness=4, publish_every=2, learner=LearnerSpec(train_seconds=2.0))
SHARED = Scenario(
    groups_per_batch=2,
    group_size=4,
    lease_seconds=20.0,
    swap="during",
    faults_until_seconds=0.0,
    workers=(WorkersSpec(count=6, rollout_seconds=4.0),),
    policies=(ON_POLICY, STALE),
)
HALF = (WorkersSpec(count=3, rollout_seconds=4.0),)


def last_step_at(report: Report) -> float:
    """When the learner began its last step, in seconds."""
    return report.history.steps[-1].at_seconds


def main() -> None:
    """Print the means over the seeds."""
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
    shared = [run_policies(SHARED, seed, keeps_events=False) for seed in seeds]
    for spec in SHARED.policies:
        alone = replace(SHARED, workers=HALF, policies=(spec,))
        halves = [run_policies(alone, seed, keeps_events=False)[spec.policy] for seed in seeds]
        together = mean(last_step_at(reports[spec.policy]) for reports in shared)
        apart = mean(map(last_step_at, halves))
        print(f"{spec.policy:<10} 6 shared workers {together:6.0f} s   3 of its own {apart:6.0f} s")


if __name__ == "__main__":
    main()
