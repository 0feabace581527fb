"""Strictly on-policy rounds: how much of the learner's wait each way of handing groups over saves, in real processes.

    sequential        the learner begins when the round's last group is complete (one micro-batch is the whole round)
    complete groups   it gets each group once it is complete (RolloutPipe's complete-group pipelining)
    + frontier        and the first groups are hurried: workers sample fewer at once (schedule.order = "frontier")

Rounds of 32, 64 and 96 groups of 8, micro-batches of 2 groups, 4 workers whose engines 8 rollouts saturate. As in
RolloutPipe (arXiv 2606.26997) rollouts take 0.9 of the training time (in whole batches), and one group alone about a
tenth of a round of 96 (its first dispatch: after 52-61 of 509-543 s). So it is with `--workers 8 --full-rows 4`, too.
Engines and training take set times (see `overlap_nodes.py`). The gradient of a round is the same, whichever way it was
handed over, up to the order of sums; only the time differs.

**Metrics.** A round's *window* lasts from its first lease to the recorded step (rollout-to-train-end time). *Wait* is
the window less the time in which the learner trained; the *waiting ratio* is wait over window. *Dispatch*: until the
first micro-batch is with the learner. The *optimum* is max(rollouts + last micro-batch, first group + training), with
the first group as long as one takes at a worker that does nothing else (the mean over the round's groups). *Gain* is
what a way saves of the sequential window, over what the optimum would save. Before the rounds that count, each run has
had one (frontier: seven, in which it finds its batch) for which that is not so.

    make bench-overlap ARGS='--model outputs/models/digit_sorting'      # about half an hour; writes results/
    make bench-overlap ARGS='--predict'     # at once, no processes: the gain at each batch if messages took no time
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from overlap_nodes import (
    GROUPS_PER_BATCH,
    Case,
    Fleet,
    Round,
    alone_seconds,
    fleet_seconds,
    group_ends,
    mean_and_sd,
    run_case,
    window_seconds,
)
from recording import save, there
from rich.console import Console
from rich.table import Table

from echo2.head.decide.pacing import WidthSearch

#: Rollout over training time.
PROPORTION = 0.9
MICROBATCH = 2
#: Name, groups of a micro-batch (None: all of a round), schedule.order, rounds that do not count.
VARIANTS = (
    ("sequential", None, "any", 1),
    ("complete groups", MICROBATCH, "any", 1),
    ("+ frontier", MICROBATCH, "frontier", 7),
)


def measure(
    groups: int, seed: int, variant: tuple[str, int | None, str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """One run; what it took in the mean, and what would be the least."""
    name, microbatch, order, skipped = variant
    train_seconds = groups * options.group_seconds
    fleet = Fleet(options.workers, options.full_rows)
    fleet = replace(fleet, token_rate=fleet_seconds(seed, groups, fleet) / (PROPORTION * train_seconds))
    case = Case(groups, skipped + options.rounds, seed, order, microbatch or groups, train_seconds, fleet)
    with tempfile.TemporaryDirectory() as directory:
        rounds: list[Round] = run_case(case, options.model, Path(directory) / "case")[skipped - 1 :]
    means = {key: mean_and_sd([asdict(one)[key] for one in rounds])[0] for key in asdict(rounds[0])}
    alone = alone_seconds(seed, groups, fleet)
    trained = means["train_seconds"]
    last = trained * MICROBATCH / groups
    first = sum(alone) / len(alone)
    return {
        "variant": name,
        "groups": groups,
        "seed": seed,
        **means,
        "wait_seconds": means["window_seconds"] - trained,
        "waiting_ratio": 1.0 - trained / means["window_seconds"],
        "optimum_seconds": max(PROPORTION * train_seconds + last, first + trained),
        "first_group_seconds": first,
        "quickest_group_seconds": min(alone),
        "rounds": [asdict(one) for one in rounds],
    }


def predict(options: argparse.Namespace) -> None:
    """The gain of whole batches and of each frontier, as far as batches and lengths decide it."""
    widths = WidthSearch(GROUPS_PER_BATCH).widths
    table = Table(
        title=f"{options.workers} workers, full at {options.full_rows} rollouts: gain if messages took no time"
    )
    for column in ("groups", "complete groups", *(f"+ frontier of {width}" for width in widths)):
        table.add_column(column, justify="right")
    for groups in options.groups:
        gains: dict[int | None, list[float]] = {}
        for seed in options.seeds:
            fleet = Fleet(options.workers, options.full_rows)
            rollouts = fleet_seconds(seed, groups, fleet)
            trained = rollouts / PROPORTION
            first = mean_and_sd(alone_seconds(seed, groups, fleet))[0]
            best = max(rollouts + trained * MICROBATCH / groups, first + trained)
            for width in (None, *widths):
                window = window_seconds(group_ends(seed, groups, fleet, width), trained, MICROBATCH)
                gains.setdefault(width, []).append((rollouts + trained - window) / (rollouts + trained - best))
        table.add_row(str(groups), *(f"{mean:.1%} ({sd:.1%})" for mean, sd in map(mean_and_sd, gains.values())))
    Console(width=150).print(table)


def compare(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per size and way: means over seeds, their spread, and the gain, each against the same seed's sequential run."""
    sequential = {(run["groups"], run["seed"]): run for run in runs if run["variant"] == VARIANTS[0][0]}
    rows = []
    for groups in sorted({run["groups"] for run in runs}):
        for name, *_ in VARIANTS:
            mine = [run for run in runs if (run["groups"], run["variant"]) == (groups, name)]
            if not mine:
                continue
            row: dict[str, Any] = {"groups": groups, "variant": name, "seeds": len(mine)}
            for key in ("window_seconds", "wait_seconds", "waiting_ratio", "dispatch_seconds", "rollout_seconds"):
                row[key] = mean_and_sd([run[key] for run in mine])
            row["batch_groups"] = mean_and_sd([run["batch_groups"] for run in mine])[0]
            row["optimum_seconds"] = mean_and_sd([run["optimum_seconds"] for run in mine])[0]
            pairs = [(run, sequential[groups, run["seed"]]) for run in mine if (groups, run["seed"]) in sequential]
            row["saved"] = mean_and_sd([1.0 - run["window_seconds"] / base["window_seconds"] for run, base in pairs])
            row["gain"] = mean_and_sd([gain(run, base) for run, base in pairs])
            rows.append(row)
    return rows


def gain(run: dict[str, Any], base: dict[str, Any]) -> float:
    saved = float(base["window_seconds"] - run["window_seconds"])
    return saved / float(base["window_seconds"] - run["optimum_seconds"])


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="one on-policy round: mean over seeds (standard deviation)")
    columns = ("groups", "", "window s", "wait s", "waiting", "dispatch s", "rollouts s", "batch", "saved", "optimum s")
    for column in (*columns, "gain"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        seconds = [f"{row[key][0]:.2f} ({row[key][1]:.2f})" for key in ("window_seconds", "wait_seconds")]
        more = [f"{row['dispatch_seconds'][0]:.2f}", f"{row['rollout_seconds'][0]:.2f}", f"{row['batch_groups']:.1f}"]
        shares = [f"{row[key][0]:.1%} ({row[key][1]:.1%})" for key in ("saved", "gain")]
        table.add_row(
            str(row["groups"]),
            row["variant"],
            *seconds,
            f"{row['waiting_ratio'][0]:.1%}",
            *more,
            shares[0],
            f"{row['optimum_seconds']:.2f}",
            shares[1],
        )
    console.print(table)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=there, default=Path("outputs/models/digit_sorting"))
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64, 96], help="groups of a round (32 64 96)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--full-rows", type=int, default=8, help="rollouts at which an engine is saturated (8)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds measured in each run (4)")
    parser.add_argument("--group-seconds", type=float, default=0.1, help="training time of one group (0.1)")
    parser.add_argument("--variants", nargs="+", default=[name for name, *_ in VARIANTS])
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("--predict", action="store_true", help="no processes: what the schedule alone would gain")
    options = parser.parse_args(arguments)
    if options.predict:
        predict(options)
        return
    runs: list[dict[str, Any]] = []
    chosen = [variant for variant in VARIANTS if variant[0] in options.variants]
    for turn, seed in enumerate(options.seeds):
        for groups in options.groups:
            at = turn % len(chosen)
            for variant in (*chosen[at:], *chosen[:at]):
                run = measure(groups, seed, variant, options)
                runs.append(run)
                waited = f"{run['wait_seconds']:.2f} of {run['window_seconds']:.2f} s waited"
                batches = ", ".join(str(one["batch_groups"]) for one in run["rounds"])
                print(f"seed {seed}  {groups} groups  {variant[0]:<16} {waited}; batches of {batches}", flush=True)
    rows = compare(runs)
    show(rows, Console(width=150))
    settings = {key: getattr(options, key) for key in ("workers", "full_rows", "rounds", "group_seconds")}
    settings["proportion"] = PROPORTION
    print(f"written to {save('overlap', {**settings, 'rows': rows, 'runs': runs}, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
