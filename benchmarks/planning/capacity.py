"""What a step costs: verl's bills, ECHO-2's published runs, and what `echo2 plan` chooses, beside the floor.

Rows marked `bill` are arithmetic (prices times step time). All others are simulated with the real control code, and
count steps once the run is under way, as the paper's do. Assumptions, none of which the paper prints: R = 128 x 16
rollouts a step; an RTX 5090 makes 0.3125 rollouts/s (fitted: eight of them then just meet gamma mu_min, and cost what
the paper's headline says); the pool of Table 2 (see simulations/table2.toml). Ours: the same learner, step time, cards,
prices and 100 Mbit/s links; a head with 1 Gbit/s; deltas of 1/32 of a snapshot a step (public reports for full
fine-tuning say 1/32 to 1/100), and of other sizes for comparison; 10 s to load one.

    make bench-capacity                    # two minutes; writes benchmarks/results/
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from recording import save
from rich.console import Console
from rich.table import Table

from echo2.config.offers import Offer
from echo2.planning.plan import BroadcastInputs, PlanInputs, make_plan
from echo2.planning.sim.run import run_scenario
from echo2.planning.sim.study import load_study
from echo2.planning.simulate import rehearse

SIMULATIONS = Path(__file__).resolve().parents[2] / "simulations"
A100_USD, CARD_USD = 3.06, 0.35
VERL_SYNC, VERL_ASYNC = 8 * A100_USD * 1508.2 / 3600, 8 * A100_USD * 1582.3 / 3600
TRAIN_SECONDS = 1631.2
FLOOR = 4 * A100_USD * TRAIN_SECONDS / 3600
SNAPSHOT_BYTES = 16.4e9  # Qwen3-8B in bfloat16
CARD = Offer("RTX 5090", CARD_USD, 0.3125, spread=0.2, count=40)
#: What the paper prints for the rows of its studies: (dollars a step, seconds waited a period).
PAPER = {
    ("table2", "full"): (8.098, 0.0),
    ("table2", "no relays, 9"): (8.432, 131.9),
    ("table2", "no relays, 10"): (8.630, 84.1),
    ("table2", "no cost"): (9.339, 0.0),
    ("fig3a_cost", "verl sync"): (10.26, None),
    ("fig3a_cost", "verl async"): (10.76, None),
    ("fig3a_cost", "ECHO-2, S = 3"): (6.82, None),
    ("fig3a_cost", "ECHO-2, S = 4"): (6.89, None),
}


def published() -> list[dict[str, Any]]:
    """The paper's rows, simulated."""
    rows = []
    for name in ("fig3a_cost", "table2"):
        for case in load_study(SIMULATIONS / f"{name}.toml").cases:
            scenario = case.scenario
            found = run_scenario(scenario, seed=1, keeps_events=False)
            train, kappa = scenario.learner.train_seconds, scenario.publish_every
            step_seconds = train / (1 - found.steady_idle_ratio)
            hourly = scenario.learner.price_usd_per_hour
            hourly += sum(spec.count * spec.price_usd_per_hour for spec in scenario.workers)
            rows.append(
                {
                    "study": name,
                    "label": case.label,
                    "usd_per_step": hourly * step_seconds / 3600,
                    "wait_seconds": kappa * (step_seconds - train),
                    "max_staleness": found.max_staleness,
                    "paper": PAPER.get((name, case.label)),
                }
            )
    return rows


def ours(label: str, max_staleness: int, broadcast: BroadcastInputs, gamma: float = 1.1) -> dict[str, Any]:
    """One plan, rehearsed."""
    inputs = PlanInputs(
        groups_per_step=128,
        group_size=16,
        steps=60,
        max_staleness=max_staleness,
        train_seconds=TRAIN_SECONDS,
        offers=(CARD,),
        broadcast=broadcast,
        learner_usd_per_hour=4 * A100_USD,
        groups_per_batch=4,
        gamma=gamma,
    )
    plan = make_plan(inputs)
    found = rehearse(plan, inputs, seed=1)
    usd = plan.usd_per_hour * TRAIN_SECONDS / (1 - found.steady_idle_ratio) / 3600
    return {
        "label": label,
        "machines": plan.machines,
        "S": plan.max_staleness,
        "kappa": plan.publish_every,
        "broadcast_seconds": plan.broadcast_seconds,
        "usd_per_step": usd,
        "predicted_usd_per_step": plan.usd_per_step,
        "below_sync": 1 - usd / VERL_SYNC,
        "below_async": 1 - usd / VERL_ASYNC,
        "idle": found.steady_idle_ratio,
        "predicted_idle": plan.prediction.steady_idle_ratio,
        "mean_staleness": found.mean_staleness,
        "max_staleness": found.max_staleness,
        "rehearsal": found.to_dict(),
    }


def all_ours() -> list[dict[str, Any]]:
    whole = BroadcastInputs(SNAPSHOT_BYTES, None, 1e9, reload_seconds=10.0)
    deltas = replace(whole, delta_bytes=SNAPSHOT_BYTES / 32)
    return [
        ours("deltas 1/32, S <= 3", 3, deltas),
        ours("deltas 1/32, S <= 1", 1, deltas),
        ours("deltas 1/100, S <= 3", 3, replace(whole, delta_bytes=SNAPSHOT_BYTES / 100)),
        ours("deltas 1/10, S <= 3", 3, replace(whole, delta_bytes=SNAPSHOT_BYTES / 10)),
        ours("no deltas, S <= 3", 3, whole),
        ours("deltas 1/32, S <= 3, gamma 1.25", 3, deltas, gamma=1.25),
    ]


def show(console: Console, studies: list[dict[str, Any]], plans: list[dict[str, Any]]) -> None:
    table = Table(title="The paper's rows: simulated | published")
    for heading in ("row", "$/step", "published", "wait", "published", "- sync", "- async"):
        table.add_column(heading, justify="left" if heading == "row" else "right")
    for row in studies:
        usd, wait = row["paper"] or (None, None)
        shares = [f"{1 - row['usd_per_step'] / bill:.1%}" for bill in (VERL_SYNC, VERL_ASYNC)]
        cells = [f"{row['usd_per_step']:.3f}", "" if usd is None else f"{usd:.3f}"]
        cells += [f"{row['wait_seconds']:.1f} s", "" if wait is None else f"{wait:.1f} s"]
        table.add_row(f"{row['study']}: {row['label']}", *cells, *shares)
    console.print(table)
    table = Table(title="echo2 plan, simulated; same learner, step time, cards and prices")
    for heading in ("", "machines", "S", "kappa", "T_bcast", "$/step", "- sync", "- async", "idle", "age"):
        table.add_column(heading, justify="left" if heading in ("", "machines") else "right")
    for row in plans:
        machines = ", ".join(f"{count} x {name}" for name, count in row["machines"].items())
        cells = [f"{row['broadcast_seconds']:.0f} s", f"{row['usd_per_step']:.3f}", f"{row['below_sync']:.1%}"]
        cells += [f"{row['below_async']:.1%}", f"{row['idle']:.1%}", f"{row['mean_staleness']:.2f}"]
        table.add_row(row["label"], machines, str(row["S"]), str(row["kappa"]), *cells)
    shares = [f"{1 - FLOOR / bill:.1%}" for bill in (VERL_SYNC, VERL_ASYNC)]
    table.add_row("floor: the learner alone (bill)", "", "", "", "", f"{FLOOR:.3f}", *shares, "", "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    studies, plans = published(), all_ours()
    show(Console(), studies, plans)
    bills = {"verl_sync": VERL_SYNC, "verl_async": VERL_ASYNC, "floor": FLOOR}
    print(f"written to {save('capacity', {'bills': bills, 'published': studies, 'ours': plans}, options.out)}")


if __name__ == "__main__":
    main()
