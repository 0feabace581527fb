"""Is what the planner prints true? Predictions against the simulator, which runs the real control code.

Sets of random cases, all drawn from a seed:

  any fleet      far too small to twice too large, of one or two kinds, S from 0 to 6, both ways to broadcast
  planned        random offers, links and snapshots, S from 0 to 6: what `echo2 plan` chooses, rehearsed
  lossy          the same with machines that are lost and replaced, and results that do not count
  needed         a fleet of many small workers at 0.9 and 1.1 times the needed rate: does the learner wait, and not?

Every number that a plan prints is in one of them, but for T_bcast, which simulations of plans take as given: that is
compared in benchmarks/broadcast/broadcast.py. "Steady" is the second half of the steps.

    make bench-predictions                  # 150 of each; about twenty minutes; writes benchmarks/results/
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recording import quantile, save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from echo2.config.offers import Offer
from echo2.core.errors import UserError
from echo2.head.fleet.decide import formulas
from echo2.head.fleet.decide.forecast import WorkerKind, forecast
from echo2.head.fleet.decide.formulas import Demand
from echo2.planning.plan import BroadcastInputs, PlanInputs, make_plan
from echo2.planning.sim.run import run_scenario
from echo2.planning.sim.scenario import BroadcastSpec, LearnerSpec, Scenario, WorkersSpec
from echo2.planning.simulate import rehearse

STEPS = 40
TRAIN_SPREAD = 0.05
#: From the end of a step to the announcement of its snapshot, in these scenarios.
ANNOUNCE_SECONDS = 0.1
#: What is compared, and what of it in shares of the simulated value.
QUANTITIES = ("idle", "steady idle", "mean staleness", "max staleness", "step", "seconds", "usd a step", "usd")
RELATIVE = ("step", "seconds", "usd a step", "usd")
Row = dict[str, Any]


def any_fleet(seed: int) -> Row:
    """One random fleet: predicted and simulated."""
    rng = random.Random(f"fleet {seed}")
    bound = rng.choice([0, 1, 1, 2, 2, 3, 4, 6])
    kappa = rng.randint(1, max(1, bound))
    groups, train = rng.choice([16, 32, 64]), rng.uniform(2.0, 30.0)
    overlaps, travels = rng.random() < 0.6, rng.uniform(0.02, 0.8) * train
    install = 0.1 * rng.random() * train * 0.3
    needed = groups * 8 / train
    paces, specs = [], []
    for _ in range(rng.choice([1, 1, 2])):
        batch, count, spread = rng.choice([1, 2, 4]), rng.randint(2, 24), rng.choice([0.0, 0.1, 0.3])
        paces.append(WorkerKind(needed * rng.uniform(0.5, 2.0) / count, count, batch, spread))
    share = 1 / len(paces)
    paces = [replace(pace, rate=pace.rate * share) for pace in paces]
    specs = [
        WorkersSpec(
            count=pace.count,
            capacity_groups=pace.groups_per_batch,
            rollouts_per_second=pace.rate,
            spread=pace.spread,
            install_seconds=install,
            latency_seconds=0.01,
            bytes_per_second=1e12,
        )
        for pace in paces
    ]
    scenario = Scenario(
        max_steps=STEPS,
        groups_per_step=groups,
        group_size=8,
        max_staleness=bound,
        publish_every=kappa,
        groups_per_batch=max(pace.groups_per_batch for pace in paces),
        lease_seconds=1e5,
        heartbeat_seconds=5.0,
        generate_during_broadcast=overlaps,
        broadcast=BroadcastSpec(scheme="fixed", seconds=travels),
        workers=tuple(specs),
        learner=LearnerSpec(train_seconds=train, spread=TRAIN_SPREAD, publish_seconds=0.05, checkpoint_every=1000),
        time_limit_seconds=1e6,
    )
    demand = Demand(groups, 8, kappa, bound, train, travels + install + ANNOUNCE_SECONDS, overlaps, install)
    predicted = forecast(demand, paces, STEPS)
    found = run_scenario(scenario, seed, keeps_events=False)
    return {
        "seed": seed,
        "S": bound,
        "kappa": kappa,
        "overlaps": overlaps,
        "idle": (predicted.idle_ratio, found.idle_ratio),
        "mean staleness": (predicted.mean_staleness, found.mean_staleness),
        "max staleness": (predicted.max_staleness, found.max_staleness),
        "seconds": (predicted.run_seconds, found.seconds),
        "shares": distance(predicted.staleness, found.staleness),
    }


def planned(seed: int, lossy: bool = False) -> Row | None:
    """One random plan: predicted and rehearsed; None where there is no plan."""
    rng = random.Random(f"plan {seed}")
    trouble = random.Random(f"trouble {seed}")
    train = 10 ** rng.uniform(1.0, 3.3)
    groups, batch = rng.choice([32, 64, 128]), rng.choice([2, 4, 8])
    base = groups * 8 / train / rng.uniform(4, 25)
    offers = tuple(
        Offer(
            name=f"kind{at}",
            price_usd_per_hour=round(rng.uniform(0.2, 2.0), 2),
            rollouts_per_second=base * rng.uniform(0.4, 1.6),
            spread=rng.choice([0.0, 0.1, 0.3]),
            down_mbps=rng.choice([50.0, 100.0, 500.0]),
            count=rng.randint(4, 40),
            reliability=trouble.uniform(0.9, 1.0) if lossy else 1.0,
            mean_life_hours=train * trouble.uniform(20, 100) / 3600 if lossy else 0.0,
            replace_seconds=train * trouble.uniform(0.2, 2.0),
        )
        for at in range(rng.randint(1, 3))
    )
    size = train * 100e6 / 8 * rng.uniform(0.05, 0.7)
    inputs = PlanInputs(
        groups_per_step=groups,
        group_size=8,
        steps=STEPS,
        max_staleness=rng.randint(0, 6),
        train_seconds=train,
        offers=offers,
        broadcast=BroadcastInputs(size, rng.choice([None, size / 30]), reload_seconds=0.01 * train),
        learner_usd_per_hour=rng.choice([0.0, 3.06, 12.24]),
        groups_per_batch=batch,
        generate_during_broadcast=rng.random() < 0.7,
    )
    try:
        plan = make_plan(inputs)
    except UserError:
        return None
    found = rehearse(plan, inputs, seed)
    predicted = plan.prediction
    return {
        "seed": seed,
        "S": plan.max_staleness,
        "kappa": plan.publish_every,
        "overlaps": inputs.generate_during_broadcast,
        "workers": sum(plan.machines.values()),
        "idle": (predicted.idle_ratio, found.idle_ratio),
        "steady idle": (predicted.steady_idle_ratio, found.steady_idle_ratio),
        "mean staleness": (predicted.mean_staleness, found.mean_staleness),
        "max staleness": (predicted.max_staleness, found.max_staleness),
        "step": (predicted.step_seconds, found.step_seconds),
        "seconds": (predicted.run_seconds, found.seconds),
        "usd a step": (plan.usd_per_step, found.usd_per_step),
        "usd": (plan.usd / STEPS, (found.usd + found.learner_usd) / STEPS),
        "shares": distance(predicted.staleness, found.staleness),
    }


def needed(seed: int) -> Row:
    """One random demand, and how long the learner waits, once under way, with 0.9 and 1.1 times the needed rate."""
    rng = random.Random(f"needed {seed}")
    bound, count = rng.choice([1, 2, 3, 4, 6]), rng.randint(32, 64)
    kappa, train, overlaps = rng.randint(1, bound), rng.uniform(10.0, 30.0), rng.random() < 0.6
    travels = rng.uniform(0.02, 0.8) * train
    demand = Demand(4 * count, 8, kappa, bound, train, travels + ANNOUNCE_SECONDS, overlaps)
    row: Row = {"seed": seed, "S": bound, "kappa": kappa, "overlaps": overlaps}
    for factor in (0.9, 1.1):
        rate = factor * formulas.mu_needed(demand)
        scenario = Scenario(
            max_steps=STEPS,
            groups_per_step=demand.groups_per_step,
            group_size=demand.group_size,
            max_staleness=bound,
            publish_every=kappa,
            groups_per_batch=1,
            swap="during",
            lease_seconds=1e5,
            heartbeat_seconds=5.0,
            generate_during_broadcast=overlaps,
            broadcast=BroadcastSpec(scheme="fixed", seconds=travels),
            workers=(
                WorkersSpec(
                    count=count,
                    capacity_groups=1,
                    rollouts_per_second=rate / count,
                    spread=0.1,
                    install_seconds=0.0,
                    latency_seconds=0.01,
                    bytes_per_second=1e12,
                ),
            ),
            learner=LearnerSpec(train_seconds=train, spread=0.0, publish_seconds=0.05, checkpoint_every=1000),
            time_limit_seconds=1e6,
        )
        found = run_scenario(scenario, seed, keeps_events=False)
        row[f"idle at {factor}"] = (formulas.idle_ratio(demand, rate), found.steady_idle_ratio)
    return row


def show_needed(console: Console, rows: Sequence[Row]) -> dict[str, float]:
    """How often the needed rate is the threshold that it is said to be."""
    below = [row["idle at 0.9"][1] for row in rows]
    above = [row["idle at 1.1"][1] for row in rows]
    figures = {
        "waits over 0.5 % at 0.9": sum(idle > 0.005 for idle in below) / len(below),
        "waits at most 2 % at 1.1": sum(idle <= 0.02 for idle in above) / len(above),
        "median idle at 0.9": statistics.median(below),
        "median idle at 1.1": statistics.median(above),
        "largest idle at 1.1": max(above),
    }
    console.print(
        f"needed rate, {len(rows)} cases: {', '.join(f'{key} {value:.1%}' for key, value in figures.items())}"
    )
    return figures


def distance(shares: dict[int, float], counts: dict[int, int]) -> float:
    """Share of the groups that have another age than predicted (total variation)."""
    total = max(1, sum(counts.values()))
    return sum(abs(shares.get(age, 0.0) - counts.get(age, 0) / total) for age in sorted({*shares, *counts})) / 2


def errors(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Predicted minus simulated: absolute for ratios and ages, relative for seconds and dollars."""
    figures = {}
    for name in QUANTITIES:
        pairs = [row[name] for row in rows if name in row]
        if not pairs:
            continue
        relative = name in RELATIVE
        off = [(said - was) / was if relative else said - was for said, was in pairs if not relative or was > 0]
        sizes = [abs(value) for value in off]
        figures[name] = {
            "mean": statistics.fmean(off),
            "p50": quantile(sizes, 0.5),
            "p95": quantile(sizes, 0.95),
            "max": max(sizes),
        }
    shares = [row["shares"] for row in rows]
    figures["distribution"] = {
        "mean": statistics.fmean(shares),
        "p50": quantile(shares, 0.5),
        "p95": quantile(shares, 0.95),
        "max": max(shares),
    }
    return figures


def show(console: Console, title: str, rows: Sequence[Row], figures: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"{title}: {len(rows)} cases, predicted - simulated")
    for heading in ("", "mean", "median size", "p95 size", "largest"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, found in figures.items():
        scale = "{:.2%}" if name in (*RELATIVE, "distribution") else "{:.4f}"
        table.add_row(name, *(scale.format(found[key]) for key in ("mean", "p50", "p95", "max")))
    console.print(table)
    worst = sorted(rows, key=lambda row: -abs(row["idle"][0] - row["idle"][1]))[:3]
    for row in worst:
        said, was = row["idle"]
        console.print(
            f"  worst idle: seed {row['seed']}, S {row['S']}, kappa {row['kappa']}: {said:.3f}, was {was:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=150, help="cases of each set")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    console = Console()
    fleets = [any_fleet(seed) for seed in track(range(options.cases), "any fleet", transient=True)]
    tried = [planned(seed) for seed in track(range(options.cases), "planned", transient=True)]
    plans = [row for row in tried if row is not None]
    lossy = [planned(seed, lossy=True) for seed in track(range(options.cases), "lossy", transient=True)]
    losing = [row for row in lossy if row is not None]
    thresholds = [needed(seed) for seed in track(range(options.cases), "needed", transient=True)]
    figures: dict[str, Any] = {"cases": options.cases, "refused": len(tried) - len(plans)}
    figures["needed"] = {"figures": show_needed(console, thresholds), "rows": thresholds}
    for title, rows in (("any fleet", fleets), ("planned", plans), ("lossy", losing)):
        found = errors(rows)
        figures[title] = {"errors": found, "rows": rows}
        show(console, title, rows, found)
    idles = [row["steady idle"][1] for row in plans if row["S"]]
    figures["planned idle"] = {"p50": quantile(idles, 0.5), "p95": quantile(idles, 0.95), "max": max(idles)}
    kept = sum(idle <= 0.02 for idle in idles) / len(idles)
    console.print(f"simulated idle of planned fleets, once under way: at most 2 % in {kept:.0%}, max {max(idles):.1%}")
    print(f"written to {save('predictions', figures, options.out)}")


if __name__ == "__main__":
    main()
