"""The learner's idle ratio against the size of the fleet, for S in {1, 2, 3, 4, 6, 11}: predicted, simulated, measured.

For each staleness bound, with kappa = S - 1 (1 where S is 1): the fleet that `echo2 plan` chooses, the largest fleet
below the minimum (`formulas.mu_needed` of the mode), and smaller ones. Two things are to be seen: at the
planner's choice the learner waits at most 2 % of the time; below the minimum it visibly waits.

Predicted batch by batch (`head/fleet/decide/forecast.py`) and as a fluid (`head/fleet/decide/formulas.py`); simulated
with the real planner and worker scheduler, with workers that generate during a broadcast and with workers that stand
still, as the paper's do. With `--real` the fleets are small, and are measured as well: head, learner and workers are
processes (`idle_nodes.py`).
All idle ratios are of the second half of the steps.

    make bench-idle_ratio                # simulated, up to 140 workers; ten minutes
    make bench-idle_ratio ARGS='--real'         # up to 13 workers, three runs at a time; a quarter of an hour
    make bench-idle_ratio ARGS='--faults --bounds 3'    # so, with environments and a judge of which 15 % fail
    make bench-idle_ratio ARGS='--draw docs/idle_ratio.svg benchmarks/results/idle_ratio*.json'
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from idle_nodes import Dying, Fleet, measure
from plots import COLOURS, INK, require_matplotlib
from recording import HERE, save, there

from echo2.config.offers import Offer
from echo2.head.fleet.decide import formulas
from echo2.head.fleet.decide.forecast import WorkerKind, forecast
from echo2.planning.plan import make_plan
from echo2.planning.plan_inputs import BroadcastInputs, PlanInputs
from echo2.planning.sim.scenario import BroadcastSpec, HeadSpec, LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import run_scenario

BOUNDS = (1, 2, 3, 4, 6, 11)
TARGET_IDLE = 0.02
MODEL = HERE.parent / "outputs" / "models" / "digit_sorting"
MODES = {True: "workers generate during the broadcast", False: "workers stand still during the broadcast"}
CURVE_POINTS = 12
FAILING_SEEDS = 32
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """`rate`: rollouts a second of one worker; `spread`: of the logarithm of a group's duration."""

    groups_per_step: int
    group_size: int
    rate: float
    spread: float
    train_seconds: float
    broadcast_seconds: float
    steps: int
    overlaps: bool = True
    has_faults: bool = False

    def publish_every(self, max_staleness: int) -> int:
        """ECHO-2's rule."""
        return max(1, max_staleness - 1)

    def inputs(self, max_staleness: int) -> PlanInputs:
        return PlanInputs(
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            steps=self.steps,
            max_staleness=max_staleness,
            train_seconds=self.train_seconds,
            offers=(Offer("machine", 0.3, self.rate, spread=self.spread, count=1000),),
            broadcast=BroadcastInputs(at_least_seconds=self.broadcast_seconds),
            learner_usd_per_hour=12.24,
            groups_per_batch=1,
            publish_every=self.publish_every(max_staleness),
            generate_during_broadcast=self.overlaps,
            max_idle=TARGET_IDLE,
        )

    def demand(self, max_staleness: int) -> formulas.Demand:
        return self.inputs(max_staleness).demand(
            max_staleness, self.publish_every(max_staleness), self.broadcast_seconds
        )

    def scenario(self, max_staleness: int, workers: int) -> Scenario:
        spec = WorkersSpec(
            count=workers,
            capacity_groups=1,
            rollouts_per_second=self.rate,
            spread=self.spread,
            install_seconds=0.0,
            latency_seconds=0.001,
            rollout_failures=Dying.share if self.has_faults else 0.0,
        )
        return Scenario(
            name=f"S = {max_staleness}, {workers} workers",
            max_steps=self.steps,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_staleness=max_staleness,
            publish_every=self.publish_every(max_staleness),
            groups_per_batch=1,
            swap="during",
            generate_during_broadcast=self.overlaps,
            lease_seconds=10_000.0,
            heartbeat_seconds=20.0,
            faults_until_seconds=0.0,
            workers=(spec,),
            learner=LearnerSpec(train_seconds=self.train_seconds, spread=0.0, publish_seconds=0.01),
            broadcast=BroadcastSpec(scheme="fixed", seconds=self.broadcast_seconds),
        )

    def fleet(self, max_staleness: int, workers: int) -> Fleet:
        return Fleet(
            workers=workers,
            rate=self.rate,
            max_staleness=max_staleness,
            publish_every=self.publish_every(max_staleness),
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            train_seconds=self.train_seconds,
            broadcast_seconds=self.broadcast_seconds,
            steps=self.steps,
            has_faults=self.has_faults,
        )


LARGE = Job(512, 4, rate=0.5, spread=0.3, train_seconds=60.0, broadcast_seconds=20.0, steps=40)
#: The spread is that of two lengths drawn evenly from 1 to 12 tokens.
SMALL = Job(48, 2, rate=2.0, spread=0.4, train_seconds=6.0, broadcast_seconds=1.0, steps=20)
#: As many rollouts, in groups that still train when one or two of them are lost; of fewer, quicker workers.
FAILING = Job(24, 4, rate=5.0, spread=0.28, train_seconds=6.0, broadcast_seconds=1.0, steps=20, has_faults=True)


def predicted(job: Job, max_staleness: int, shares: Sequence[float]) -> list[Row]:
    """The planner's choice, the largest fleet below the minimum, and these shares of the minimum."""
    demand = job.demand(max_staleness)
    least = math.ceil(formulas.mu_needed(demand) / job.rate - 1e-9)
    chosen = sum(make_plan(job.inputs(max_staleness)).machines.values())
    return [
        {
            "max_staleness": max_staleness,
            "publish_every": demand.publish_every,
            "overlaps": job.overlaps,
            "workers": count,
            "is_choice": count == chosen,
            "is_below": count == least - 1,
            "fluid": formulas.idle_ratio(demand, count * job.rate),
            "forecast": forecast(demand, [WorkerKind(job.rate, count, 1, job.spread)], job.steps).steady_idle_ratio,
        }
        for count in sorted({*(max(1, round(least * share)) for share in shares), least - 1, chosen})
    ]


def curve(job: Job, max_staleness: int, most: int) -> Row:
    """What is predicted for other numbers of workers, up to so many: a line to draw."""
    demand = job.demand(max_staleness)
    counts = sorted({round(most * (0.4 + 0.6 * part / CURVE_POINTS)) for part in range(CURVE_POINTS + 1)})
    walks = [forecast(demand, [WorkerKind(job.rate, count, 1, job.spread)], job.steps) for count in counts]
    points = [(count, walk.steady_idle_ratio) for count, walk in zip(counts, walks, strict=True)]
    return {"max_staleness": max_staleness, "overlaps": job.overlaps, "points": points}


def simulate(job: Job, rows: Sequence[Row], seed: int) -> None:
    """With faults, the mean of several seeds: stalls are few, and each is long."""
    for row in rows:
        scenario = job.scenario(row["max_staleness"], row["workers"])
        if job.has_faults:
            scenario = replace(scenario, head=_head_of(row["measured_in_full"]["rewards"]))
        seeds = range(seed, seed + (FAILING_SEEDS if job.has_faults else 1))
        reports = [run_scenario(scenario, each, keeps_events=False) for each in seeds]
        if unfinished := [report for report in reports if not report.finished]:
            raise RuntimeError(f"{unfinished[0].name}, seed {unfinished[0].seed}: not finished")
        found = sorted(report.steady_idle_ratio for report in reports)
        row |= {"simulated": statistics.fmean(found), "simulated_range": [found[0], found[-1]]}
        row |= {"simulated_max_staleness": max(report.max_staleness for report in reports)}
        if "measured" not in row or job.has_faults:
            print(to_text(row), flush=True)


def _head_of(rewards: Row) -> HeadSpec:
    """Return a head at which groups wait for their rewards as they did in a run."""
    share = rewards["late_share"]
    stall_seconds = rewards["late_seconds"] * (1.0 - share)  # a group that is late has 1 / (1 - share) stalls
    return HeadSpec(rewards["usual_seconds"], stalled_rewards=share, stall_seconds=stall_seconds)


def measure_all(job: Job, rows: Sequence[Row], model: Path, jobs: int) -> None:
    """Several runs at a time: their processes sleep most of the time."""
    with tempfile.TemporaryDirectory(prefix="echo2-idle-") as folder, ThreadPoolExecutor(jobs) as pool:

        def one(row: Row) -> None:
            name = f"S{row['max_staleness']}-{row['workers']}"
            found = measure(job.fleet(row["max_staleness"], row["workers"]), model, Path(folder) / name)
            row |= {"measured": found.idle_ratio, "measured_in_full": asdict(found)}
            print(to_text(row), flush=True)

        for _ in pool.map(one, rows):
            pass


def to_text(row: Row) -> str:
    note = " <- the planner's choice" if row["is_choice"] else " <- below the minimum" if row["is_below"] else ""
    kinds = ("forecast", "fluid", "simulated", "measured")
    figures = "  ".join(f"{kind} {row[kind]:>6.1%}" for kind in kinds if kind in row)
    return (
        f"S {row['max_staleness']:>2}  kappa {row['publish_every']:>2}  {'' if row['overlaps'] else 'standing still  '}"
        f"{row['workers']:>4} workers  {figures}{note}"
    )


def summary(rows: Sequence[Row]) -> Row:
    """`error`: the forecast's, in the learner's time, against what was simulated and measured."""
    kinds = [kind for kind in ("simulated", "measured") if kind in rows[0]]
    return {
        kind: {
            "choice_most": max(row[kind] for row in rows if row["is_choice"]),
            "below_least": min(row[kind] for row in rows if row["is_below"]),
            "error_mean": sum(abs(row[kind] - row["forecast"]) for row in rows) / len(rows),
            "error_most": max(abs(row[kind] - row["forecast"]) for row in rows),
        }
        for kind in kinds
    }


def draw(results: Sequence[Row], path: Path) -> None:
    """One panel for each mode, and one for what was measured: idle over workers, a colour for each S."""
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "echo2"
    panels = []
    for result in results:
        kind = "measured" if "measured" in result["rows"][0] else "simulated"
        for mode in sorted({row["overlaps"] for row in result["rows"]}, reverse=True):
            title = f"Simulated; {MODES[mode]}" if kind == "simulated" else "Measured: processes on one machine"
            rows, curves = ([one for one in result[key] if one["overlaps"] is mode] for key in ("rows", "curves"))
            panels.append((title, kind, rows, curves))
    figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
    figure.patch.set_alpha(0.0)
    for number, (title, kind, rows, curves) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        axes.patch.set_alpha(0.0)
        for bound, colour in zip(BOUNDS, COLOURS, strict=True):
            for one in curves:
                if one["max_staleness"] == bound:
                    xs = [workers for workers, _ in one["points"]]
                    ys = [100 * share for _, share in one["points"]]
                    axes.plot(xs, ys, "-", color=colour, linewidth=1.2)
            mine = [row for row in rows if row["max_staleness"] == bound]
            xs, ys = [row["workers"] for row in mine], [100 * row[kind] for row in mine]
            if mine:
                axes.plot(xs, ys, "o", color=colour, markersize=5, label=f"S = {bound}")
            chosen = [row["workers"] for row in mine if row["is_choice"]]
            axes.plot(chosen, [-1.5] * len(chosen), "^", color=colour, markersize=7)
        axes.axhline(100 * TARGET_IDLE, color=INK, linewidth=0.6, linestyle=":")
        axes.set_ylim(-3.0, 42.0)
        axes.set_title(title, color=INK, fontsize=10)
        axes.set_xlabel("workers", color=INK)
        axes.set_ylabel("learner idle, % of its time" if number == 0 else "", color=INK)
        axes.tick_params(colors=INK)
        axes.grid(color=INK, alpha=0.25, linewidth=0.5)
        for side, spine in axes.spines.items():
            spine.set_color(INK)
            spine.set_visible(side in ("left", "bottom"))
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    figure.suptitle("Lines: predicted. Dots: what came out. Triangles: chosen by echo2 plan", color=INK, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=int, nargs="+", default=list(BOUNDS), help="staleness bounds")
    parser.add_argument("--real", action="store_true", help="small fleets, simulated and with processes")
    parser.add_argument("--faults", action="store_true", help="as --real, with environments and a judge that fail")
    parser.add_argument("--jobs", type=int, default=3, help="with --real: runs at a time")
    parser.add_argument("--model", type=there, default=MODEL, help="with --real: what examples/digit_sorting made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("--draw", type=there, metavar="FILE", help="draw what lies in these result files; run nothing")
    parser.add_argument("results", type=there, nargs="*")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.draw is not None:
        draw([json.loads(path.read_text(encoding="utf-8")) for path in options.results], options.draw)
        return
    if options.faults:
        jobs, shares, name = [FAILING], (0.6,), "faults_idle"
    elif options.real:
        jobs, shares, name = [SMALL], (0.6,), "idle_ratio_real"
    else:
        jobs, shares, name = [LARGE, Job(**{**asdict(LARGE), "overlaps": False})], (0.8,), "idle_ratio"
    rows: list[Row] = []
    curves: list[Row] = []
    for job in jobs:
        mine = [row for bound in options.bounds for row in predicted(job, bound, shares)]
        if options.real or options.faults:
            measure_all(job, mine, options.model, options.jobs)
        simulate(job, mine, options.seed)
        rows += mine
        most = {row["max_staleness"]: row["workers"] for row in mine}
        curves += [curve(job, bound, count) for bound, count in most.items()]
    figures = {"seed": options.seed, "jobs": [asdict(job) for job in jobs], "summary": summary(rows)}
    figures |= {"rows": rows, "curves": curves}
    for kind, found in figures["summary"].items():
        print(
            f"{kind}: idle at the planner's choice {found['choice_most']:.2%} at most, below the minimum "
            f"{found['below_least']:.2%} at least; the forecast errs by {found['error_mean']:.2%} on average, "
            f"{found['error_most']:.2%} at most"
        )
    print(f"written to {save(name, figures, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
