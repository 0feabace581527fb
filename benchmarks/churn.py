"""What churn costs: the variants of `simulations/churn_spot.toml` against the first, where nothing fails.

Dollars are of the whole run, the cold start included. Idle ratios are of all but the first steps: while the cold start
lasts, every machine works in every variant.

    python benchmarks/churn.py [--seeds 3]             # writes benchmarks/results/churn-*.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recording import save

from echo2.head.decide import commands as do
from echo2.planning.sim.report import Report
from echo2.planning.sim.run import run_scenario
from echo2.planning.sim.study import load_study

HERE = Path(__file__).resolve().parent
COLD_STEPS = 5


def late_idle_ratio(report: Report) -> float:
    """The learner's, without the first steps."""
    late = [one for one in report.history.steps if one.step >= COLD_STEPS]
    waited = sum(one.wait_seconds for one in late)
    return waited / (waited + sum(one.train_seconds for one in late))


def summary(report: Report) -> dict[str, Any]:
    commands = [command for life in report.history.lives for _, _, answer in life for command in answer]
    return {
        "finished": report.finished,
        "idle_ratio": late_idle_ratio(report),
        "idle_ratio_of_all": report.idle_ratio,
        "usd": report.usd + report.learner_usd,
        "seconds": report.seconds,
        "killed": sum(report.killed.values()),
        "lost_leases": report.leases.get("lost", 0) + report.leases.get("expired", 0),
        "activations": sum(isinstance(command, do.ActivateWorker) for command in commands),
        "releases": sum(isinstance(command, do.ReleaseWorker) for command in commands),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", type=Path, default=HERE.parent / "simulations" / "churn_spot.toml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for case in load_study(options.scenario).cases:
        runs = [summary(run_scenario(case.scenario, seed)) for seed in range(options.seeds)]
        row = {"label": case.label, "finished": all(run["finished"] for run in runs), "runs": runs}
        row |= {key: statistics.mean(run[key] for run in runs) for key in runs[0] if key != "finished"}
        rows.append(row)
        more_idle = 100 * (row["idle_ratio"] - rows[0]["idle_ratio"])
        print(
            f"{case.label:<28} idle {row['idle_ratio']:>6.2%} ({more_idle:+.2f} points)"
            f"  ${row['usd']:.2f} ({row['usd'] / rows[0]['usd'] - 1:+.1%})  {row['killed']:.0f} killed,"
            f" {row['lost_leases']:.0f} leases lost,"
            f" {row['activations']:.0f} activations, {row['releases']:.0f} releases"
            + ("" if row["finished"] else "  NOT FINISHED"),
            flush=True,
        )
    print(f"written to {save('churn', {'seeds': options.seeds, 'rows': rows}, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
