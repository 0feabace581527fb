"""What churn costs: the variants of `simulations/churn_spot.toml` against the first, where nothing fails.

Idle ratio and dollars are of the whole run, its cold start included: the losses do not wait for the second half.

    python benchmarks/churn.py [--seeds 3]             # writes benchmarks/results/churn-*.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echo2.control import commands as do
from echo2.sim import Report, load_study, run_scenario

HERE = Path(__file__).resolve().parent


def summary(report: Report) -> dict[str, Any]:
    commands = [command for life in report.history.lives for _, _, answer in life for command in answer]
    return {
        "finished": report.finished,
        "idle_ratio": report.idle_ratio,
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
            f"{case.label:<20} idle {row['idle_ratio']:>6.2%} ({more_idle:+.2f} points)"
            f"  ${row['usd']:.2f} ({row['usd'] / rows[0]['usd'] - 1:+.1%})  {row['killed']:.0f} killed,"
            f" {row['lost_leases']:.0f} leases lost,"
            f" {row['activations']:.0f} activations, {row['releases']:.0f} releases"
            + ("" if row["finished"] else "  NOT FINISHED"),
            flush=True,
        )
    when = datetime.now(UTC)
    result = {"benchmark": "churn", "when": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "seeds": options.seeds, "rows": rows}
    out = options.out or HERE / "results" / f"churn-{when:%Y%m%d}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
