"""The learner's idle ratio against the size of the fleet, for S in {1, 2, 3, 4, 6, 11}: predicted and simulated.

For each staleness bound: the rate that the capacity model asks for (1.1 x mu_needed), the fleet that has it, and fleets
around it. Predicted by the fluid model (`control/capacity.py`) and batch by batch (`control/forecast.py`); simulated
with the real planner and relays. Idle ratios are of the second half of the steps. Two things are to be seen: at the
planner's choice the learner waits at most 2 % of the time; with the largest fleet below the minimum it visibly waits.
(One worker less is visible where a worker is a large part of the fleet: try --worker-rate 0.2 for large ones.)

    python benchmarks/idle_ratio.py [--plot docs/idle_ratio.svg]       # writes benchmarks/results/idle_ratio-*.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echo2.control import capacity
from echo2.control.forecast import Pace, forecast
from echo2.sim import Scenario, run_scenario
from echo2.sim.scenario import BroadcastSpec, LearnerSpec, WorkersSpec

HERE = Path(__file__).resolve().parent
BOUNDS = (1, 2, 3, 4, 6, 11)
TRAIN_SECONDS = 60.0
#: Less than a step, or S = 1 could not hide it.
BROADCAST_SECONDS = 10.0
SPREAD = 0.3
STEPS = 60
TARGET_IDLE = 0.02
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#7f7f7f"


def scenario(max_staleness: int, count: int, groups_per_step: int, worker_rate: float) -> Scenario:
    publish_every = capacity.choose_publish_every(max_staleness, TRAIN_SECONDS, BROADCAST_SECONDS)
    return Scenario(
        name=f"S = {max_staleness}, {count} workers",
        max_steps=STEPS,
        groups_per_step=groups_per_step,
        group_size=8,
        max_staleness=max_staleness,
        publish_every=publish_every,
        groups_per_batch=1,
        swap="during",
        lease_seconds=10_000.0,
        heartbeat_seconds=20.0,
        lost_after_seconds=100.0,
        faults_until_seconds=0.0,
        workers=(
            WorkersSpec(
                count=count,
                capacity_groups=1,
                rollouts_per_second=worker_rate,
                spread=SPREAD,
                install_seconds=0.0,
                latency_seconds=0.02,
            ),
        ),
        learner=LearnerSpec(train_seconds=TRAIN_SECONDS, spread=0.0, publish_seconds=0.01),
        broadcast=BroadcastSpec(scheme="fixed", seconds=BROADCAST_SECONDS),
    )


def demand_of(run: Scenario) -> capacity.Demand:
    group_seconds = run.group_size / run.workers[0].rollouts_per_second
    return capacity.Demand(
        groups_per_step=run.groups_per_step,
        group_size=run.group_size,
        publish_every=run.publish_every,
        max_staleness=run.max_staleness,
        train_seconds=TRAIN_SECONDS,
        broadcast_seconds=BROADCAST_SECONDS,
        rollout_seconds=group_seconds,
    )


def measure(max_staleness: int, groups_per_step: int, rate: float, seed: int) -> list[dict[str, Any]]:
    """The planner's choice, the largest fleet below the minimum, and some around them."""
    demand = demand_of(scenario(max_staleness, 1, groups_per_step, rate))
    least = math.ceil(capacity.mu_needed(demand) / rate)
    chosen = math.ceil(capacity.mu_target(demand) / rate)
    below = math.ceil(capacity.mu_min(demand) / rate) - 1
    counts = sorted({*(max(1, round(least * share)) for share in (0.6, 0.8, 0.9, 1.0, 1.25)), below, chosen})
    rows = []
    for count in counts:
        run = scenario(max_staleness, count, groups_per_step, rate)
        report = run_scenario(run, seed, keeps_events=False)
        paces = [Pace(rate, count, 1, SPREAD)]
        rows.append(
            {
                "max_staleness": max_staleness,
                "publish_every": run.publish_every,
                "groups_per_step": groups_per_step,
                "workers": count,
                "is_choice": count == chosen,
                "is_below": count == below,
                "simulated": report.steady_idle_ratio,
                "fluid": capacity.idle_ratio(demand, count * rate),
                "forecast": forecast(demand, paces, STEPS, seed=seed).steady_idle_ratio,
                "max_observed_staleness": report.max_staleness,
                "finished": report.finished,
            }
        )
        note = " <- the planner's choice" if count == chosen else " <- below mu_min" if count == below else ""
        row = rows[-1]
        print(
            f"S {max_staleness:>2}  kappa {run.publish_every:>2}  {count:>5} workers"
            f"  simulated {row['simulated']:>6.1%}  forecast {row['forecast']:>6.1%}  fluid {row['fluid']:>6.1%}{note}",
            flush=True,
        )
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    for number, bound in enumerate(BOUNDS):
        mine = [row for row in rows if row["max_staleness"] == bound]
        counts = [row["workers"] for row in mine]
        colour = COLOURS[number]
        axes.plot(counts, [100 * row["forecast"] for row in mine], "-", color=colour, linewidth=1.2)
        axes.plot(
            counts, [100 * row["simulated"] for row in mine], "o", color=colour, markersize=5, label=f"S = {bound}"
        )
        chosen = [row for row in mine if row["is_choice"]]
        axes.plot([row["workers"] for row in chosen], [0] * len(chosen), "^", color=colour, markersize=9)
    axes.set_title("Learner idle against fleet size: lines predicted, dots simulated, ▲ chosen", color=INK, fontsize=10)
    axes.set_xlabel("workers", color=INK)
    axes.set_ylabel("learner idle, % of its time", color=INK)
    axes.set_ylim(bottom=-1.5)
    axes.axhline(100 * TARGET_IDLE, color=INK, linewidth=0.6, linestyle=":")
    axes.tick_params(colors=INK)
    axes.grid(color=INK, alpha=0.25, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups-per-step", type=int, default=128, help="the size of the fleet follows from it (128)")
    parser.add_argument("--worker-rate", type=float, default=2.0, help="rollouts a second of each worker (2.0)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    rows = [
        row for bound in BOUNDS for row in measure(bound, options.groups_per_step, options.worker_rate, options.seed)
    ]
    worst = max(row["simulated"] for row in rows if row["is_choice"])
    least = min(row["simulated"] for row in rows if row["is_below"])
    error = max(abs(row["simulated"] - row["forecast"]) for row in rows)
    print(f"idle at the planner's choice: {worst:.2%} at most; below mu_min: {least:.2%} at least")
    print(f"forecast against simulation: {error:.2%} of the learner's time at most")
    when = datetime.now(UTC)
    result = {
        "benchmark": "idle_ratio",
        "when": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seed": options.seed,
        "rows": rows,
    }
    out = options.out or HERE / "results" / f"idle_ratio-{when:%Y%m%d}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
