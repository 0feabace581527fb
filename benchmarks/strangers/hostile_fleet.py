"""What strangers that mean harm cost a run, by simulation: each way of harm at 1 of 2, 3 of 8 and 20 of 22 workers of
one ticket, and at 4 of 7 with a ticket each, beside the same run with the honest workers alone.

The honest ones are machines of the run's owner. `ratio` is of the run's time; `wait` what the learner waits longer, in
lease deadlines; `share` the largest that the strangers supplied of a step.

    make bench-hostile_fleet ARGS='[--seeds 3]'      # writes benchmarks/results/hostile_fleet-*.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hostile_workers import HostileSpec, make_worker
from recording import save

from echo2.head.decide import commands as do
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import run_scenario

LEASE_SECONDS = 120.0
#: Honest workers, hostile ones, and the tickets of the latter.
FLEETS = ((1, 1, 1), (5, 3, 1), (2, 20, 1), (3, 4, 4))
WAYS: tuple[Any, ...] = ("", "holds", "holds_some", "fails", "malformed", "junk", "claims")


def simulate(name: str, workers: tuple[WorkersSpec, ...], seed: int, max_staleness: int, steps: int) -> Report:
    return run_scenario(
        Scenario(
            name=name,
            max_steps=steps,
            groups_per_step=16,
            max_staleness=max_staleness,
            lease_seconds=LEASE_SECONDS,
            faults_until_seconds=0.0,
            learner=LearnerSpec(train_seconds=2.0),
            workers=workers,
        ),
        seed,
        make_worker=make_worker,
    )


def largest_share(report: Report) -> float:
    """Of a step's groups, the most that came from others than the first kind of workers."""
    commands = [command for life in report.history.lives for _, _, answer in life for command in answer]
    accepted = {c.group.number: c.worker_id for c in commands if isinstance(c, do.AcceptDelivery)}
    steps = [done.numbers for done in report.history.trained]
    return max(sum(not accepted[number].startswith("w0-") for number in numbers) / len(numbers) for numbers in steps)


def measure(
    honest: int, hostile: int, tickets: int, way: Any, max_staleness: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One row, with the run of the honest workers alone in the same go. `way` empty: honest strangers."""
    own = WorkersSpec(count=honest)
    rows = []
    for seed in range(options.seeds):
        alone = simulate("alone", (own,), seed, max_staleness, options.steps)
        kind = partial(HostileSpec, hostile=way) if way else WorkersSpec
        liars = [kind(count=hostile // tickets, ticket=f"t{at}") for at in range(tickets)]
        beside = simulate(way or "honest strangers", (own, *liars), seed, max_staleness, options.steps)
        waited = beside.history.wait_seconds - alone.history.wait_seconds
        rows.append(
            {
                "finished": float(beside.finished),
                "ratio": beside.seconds / alone.seconds,
                "steps_per_second": beside.steps / beside.seconds,
                "idle_ratio": beside.idle_ratio,
                "wait_leases": waited / LEASE_SECONDS,
                "share": largest_share(beside),
                "refused": float(sum(beside.refused.values())),
            }
        )
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0]} | {
        "worst_ratio": max(row["ratio"] for row in rows)
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    rows = []
    print("  S  fleet                   way          ratio  worst  steps/s  idle  wait/lease  share  refused")
    for max_staleness in (1, 0):
        for honest, hostile, tickets in FLEETS:
            for way in WAYS:
                row = measure(honest, hostile, tickets, way, max_staleness, options)
                which = {"max_staleness": max_staleness, "honest": honest, "hostile": hostile, "tickets": tickets}
                rows.append({**which, "way": way, **row})
                fleet = f"{hostile} of {honest + hostile}, tickets: {tickets}"
                end = "" if row["finished"] == 1.0 else "  NOT FINISHED"
                print(
                    f"  {max_staleness}  {fleet:22s}  {way or 'honest':11s}  {row['ratio']:5.2f}"
                    f"  {row['worst_ratio']:5.2f}  {row['steps_per_second']:7.3f}  {row['idle_ratio']:4.2f}"
                    f"  {row['wait_leases']:10.2f}  {row['share']:5.2f}  {row['refused']:7.0f}{end}",
                    flush=True,
                )
    print(save("hostile_fleet", {"rows": rows, "lease_seconds": LEASE_SECONDS}, options.out))


if __name__ == "__main__":
    main(sys.argv[1:])
