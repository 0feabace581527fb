"""What overlap buys: one job, one fleet, real processes.

    make bench-staleness_time                    # max_staleness 0, 1, 2, 4, 8, on this machine alone
    make bench-staleness_time ARGS='--paced'            # as if workers and learner had machines of their own

Without `--paced` all processes compute on this machine's cores, and what one does the others wait for. With it, they
have set speeds (`staleness_nodes.py`): a step's training takes `--train-seconds`, a version is with the workers
`--broadcast-seconds` after it, and a decoding step takes `--token-seconds`.

Seconds until held-out accuracy reaches the threshold, by staleness bound. Seeds are interleaved with the variants, each
seed begins with another variant. Clock, saved weights and the judge of them are those of
`time_to_accuracy.py`: from the first lease, nothing is evaluated inside the clock.

Figures a step are means over the second half of a run. Staleness is of a rollout's oldest token; the mismatch is a mean
over tokens, so it is what shows the newer tokens of a generation that was swapped into.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recording import save
from staleness_nodes import Pace, run_job
from time_to_accuracy import REPOSITORY, Run, judge, judged, read_run, run_echo2, run_flags, time_to, write_problems

from echo2.config import Config, load
from echo2.core.errors import UserError

BOUNDS = (0, 1, 2, 4, 8)
METRICS = {
    "staleness": "off_policy/mean",
    "abs_log_ratio": "mismatch/abs_log_ratio",
    "ess": "ess",
    "idle": "learner/idle_ratio",
    "tokens_per_s": "perf/tokens_per_s",
    "dropped": "clip_ratio/mean",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the job: flags on top of the config's and the caller's."""

    name: str
    flags: tuple[str, ...]


#: What is compared, in the order of the table.
VARIANTS = [Variant(f"S = {bound}", ("--schedule.max_staleness", str(bound))) for bound in BOUNDS]


def late_means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the second half of a run's steps had on average."""
    steps = [row for row in rows if METRICS["idle"] in row]
    late = steps[len(steps) // 2 :]
    return {name: statistics.fmean(row[key] for row in late) for name, key in METRICS.items()}


def all_runs(options: argparse.Namespace, config: Config, work: Path) -> list[tuple[Variant, Run, dict[str, float]]]:
    """Every variant on every seed."""
    found = []
    given = list(options.echo2_flags)
    for index, seed in enumerate(options.seeds):
        turn = index % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            out = work / f"{variant.name.replace(' ', '')}-{seed}"
            options.echo2_flags = [*variant.flags, *given]
            print(f"{variant.name}, seed {seed}: {options.steps} steps ...", end=" ", flush=True)
            if options.paced:
                run, out = run_elsewhere(options, config, seed, out), out / "run"
            else:
                run = run_echo2(options, config, seed, out)
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            means = late_means(rows)
            print(f"{run.points[-1].seconds:.1f} s ({run.seconds_per_step:.3f} s a step, idle {means['idle']:.0%})")
            found.append((variant, run, means))
    options.echo2_flags = given
    return found


def pace(options: argparse.Namespace) -> Pace:
    """Speeds that were asked for, or such that the fleet is a tenth faster than the learner in batches of 8."""
    return Pace(options.num_workers, options.token_seconds, options.train_seconds, options.broadcast_seconds)


def run_elsewhere(options: argparse.Namespace, config: Config, seed: int, directory: Path) -> Run:
    """One run whose processes have set speeds."""
    text = Path(options.config).read_text(encoding="utf-8")
    launched = time.time()
    share = run_job(text, config.schedule.groups_per_step, pace(options), directory, run_flags(options, seed))
    print(f"({share:.0%} of all cores busy)", end=" ", flush=True)
    return read_run(options, seed, directory / "run", launched, float("nan"))


def table(
    runs: Sequence[tuple[Variant, Run, dict[str, float]]], start_accuracy: float, threshold: float
) -> list[dict[str, Any]]:
    """One row a variant: time and accuracy by seed, everything else as a mean over seeds."""
    rows = []
    for name in dict.fromkeys(variant.name for variant, _, _ in runs):
        mine = [(run, means) for variant, run, means in runs if variant.name == name]
        rows.append(
            {
                "variant": name,
                "seconds_to_threshold": [time_to(run, start_accuracy, threshold) for run, _ in mine],
                "seconds_per_step": [run.seconds_per_step for run, _ in mine],
                "accuracy_end": [run.points[-1].accuracy for run, _ in mine],
                **{key: statistics.fmean(means[key] for _, means in mine) for key in METRICS},
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]], threshold: float) -> None:
    """As Markdown."""
    print(f"\n| | seconds to {threshold:.2f} (each seed) | s a step | staleness | abs log ratio | ESS | idle |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        seconds = ", ".join("never" if value is None else f"{value:.1f}" for value in row["seconds_to_threshold"])
        step = statistics.fmean(row["seconds_per_step"])
        print(
            f"| {row['variant']} | {seconds} | {step:.3f} | {row['staleness']:.2f} "
            f"| {row['abs_log_ratio']:.4f} | {row['ess']:.2f} | {row['idle']:.0%} |"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(REPOSITORY / "src" / "echo2" / "demo" / "sort.toml"))
    parser.add_argument("--model", help="model directory (default: the config's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--threshold", type=float, default=0.70)
    parser.add_argument("--paced", action="store_true", help="processes with set speeds, as on machines of their own")
    parser.add_argument("--num-workers", type=int, default=4, help="with --paced (4)")
    parser.add_argument("--train-seconds", type=float, default=0.8, help="with --paced: of a step (0.8)")
    parser.add_argument("--broadcast-seconds", type=float, default=0.4, help="with --paced: of a version (0.4)")
    parser.add_argument("--token-seconds", type=float, default=0.028, help="with --paced: of a decoding step (0.028)")
    parser.add_argument("--work", type=Path, help="where the runs are written (default: outputs/staleness-<time>)")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("echo2_flags", nargs="*", help="after --: flags for `echo2 run`, e.g. --workers.count 1")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    config = load(Path(options.config))
    work = (options.work or REPOSITORY / "outputs" / f"staleness-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    work.mkdir(parents=True)
    options.model = str(Path(options.model or config.model.path).resolve())
    held_out = work / "held_out.jsonl"
    write_problems(config, options.seeds[0], options.steps, work / "train.jsonl", held_out)
    found = all_runs(options, config, work)
    accuracy = judge(config, [options.model, *(point.weights for _, run, _ in found for point in run.points)], held_out)
    start = accuracy[options.model]
    runs = [(variant, judged(run, accuracy), means) for variant, run, means in found]
    rows = table(runs, start, options.threshold)
    show(rows, options.threshold)
    figures = {
        "flags": options.echo2_flags,
        "pace": asdict(pace(options)) if options.paced else None,
        "steps": options.steps,
        "seeds": options.seeds,
        "start_accuracy": start,
        "threshold": options.threshold,
        "rows": rows,
        "curves": [
            {"variant": variant.name, "seed": run.seed, "points": [(p.step, p.seconds, p.accuracy) for p in run.points]}
            for variant, run, _ in runs
        ],
    }
    name = "staleness_time-staleness" + ("-paced" if options.paced else "")
    print(f"Written to {save(name, figures, options.out).name}.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
