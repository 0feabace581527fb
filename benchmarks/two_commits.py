"""The same jobs at two commits of this repository, in turn, on one machine in one sitting: is it still as good?

    make bench-two_commits ARGS=0cf4962                   # against the commit that is checked out; half an hour
    make bench-two_commits ARGS='0cf4962 --only demo --rounds 5'

    demo        `echo2 run` of the demo: seconds from the first step to the last, held-out accuracy at the end,
                seconds until `THRESHOLD` is reached, the learner's idle ratio, CPU seconds of all processes
    probe       rollouts a second of one worker (`echo2 probe --json`)
    idle        `idle_ratio.py --real --bounds 3`: measured idle ratio at the planner's choice
    overlap     `overlap.py --groups 32`: waiting ratio of each way to hand groups over
    broadcast   `broadcast.py --only even-4`: seconds until the last of four workers has the weights (needs root)

Each side runs its own code and its own benchmark, from a checkout of its commit, with this interpreter. Sides take
turns and change places each round, so that a machine that slows down slows both. A ratio is the new side over the old
one within a round; what is written down is the median of the ratios with their range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from recording import HERE, save

REPOSITORY = HERE.parent
MODEL = REPOSITORY / "outputs" / "models" / "digit_sorting"
THRESHOLD = 0.6
Figures = dict[str, float]


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours with the code in `tree`; its output is shown where it fails.

    Raises:
        CalledProcessError: it failed.
    """
    folders = [tree / "src", tree / "benchmarks", *(tree / "benchmarks").iterdir(), tree / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    done.check_returncode()
    return done


def demo(tree: Path, work: Path) -> Figures:
    places = ("src/echo2/demo/sort.toml", "examples/sort.toml")  # now, and before 0.2
    config = next(place for place in places if (tree / place).is_file())
    before = os.times()
    run(tree, "-m", "echo2", "run", config, "--out", str(work / "run"), "--model.path", str(MODEL))
    after = os.times()
    rows = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    at = {row["step"]: row["time/unix"] for row in rows if "time/unix" in row}
    first = min(at)
    scores = [(at.get(row["step"], at[first]), row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    idle = [row["learner/idle_ratio"] for row in rows if "learner/idle_ratio" in row]
    return {
        "seconds": at[max(at)] - at[first],
        "accuracy": scores[-1][1],
        "seconds_to_threshold": crossing(scores) - at[first],
        "idle_ratio": statistics.fmean(idle[len(idle) // 2 :]) if idle else float("nan"),
        "cpu_seconds": after.children_user + after.children_system - before.children_user - before.children_system,
    }


def crossing(points: Sequence[tuple[float, float]]) -> float:
    """The time at which the line through (time, accuracy) first reaches the threshold; NaN if it never does."""
    for (before, low), (after, high) in pairwise(points):
        if high >= THRESHOLD:
            return before + (after - before) * (THRESHOLD - low) / (high - low)
    return float("nan")


def probe(tree: Path, work: Path) -> Figures:
    done = run(tree, "-m", "echo2", "probe", str(MODEL), "--json", "--seconds", "20")
    return {"rollouts_per_second": float(json.loads(done.stdout)["rollouts_per_second"])}


def idle(tree: Path, work: Path) -> Figures:
    found = benchmark(tree, work, "idle_ratio.py", "--real", "--bounds", "3", "--jobs", "1", "--model", str(MODEL))
    return {"idle_ratio_at_choice": next(row["measured"] for row in found["rows"] if row["is_choice"])}


def overlap(tree: Path, work: Path) -> Figures:
    found = benchmark(tree, work, "overlap.py", "--groups", "32", "--seeds", "0", "--model", str(MODEL))
    return {f"waiting_ratio, {row['variant']}": row["waiting_ratio"][0] for row in found["rows"]}


def broadcast(tree: Path, work: Path) -> Figures:
    words = ("--only", "even-4", "--size-mib", "64", "--repeats", "1", "--schemes", "trees")
    found = benchmark(tree, work, "broadcast.py", *words)
    return {f"seconds, {one['scenario']}": max(one["seconds"].values()) for one in found["trials"]}


def benchmark(tree: Path, work: Path, name: str, *words: str) -> dict[str, Any]:
    """The figures that one of the commit's own benchmarks writes down."""
    out = work / "figures.json"
    run(tree, str(next((tree / "benchmarks").rglob(name))), *words, "--out", str(out))
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


JOBS: dict[str, Callable[[Path, Path], Figures]] = {
    "demo": demo,
    "probe": probe,
    "idle": idle,
    "overlap": overlap,
    "broadcast": broadcast,
}


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A tree of this commit, as long as it is needed."""
    git = ("git", "-C", str(REPOSITORY), "worktree")
    subprocess.run([*git, "add", "--detach", "--quiet", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare(old: Sequence[Figures], new: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """By figure: medians of both sides, and of the ratios within a round, with their range."""
    found: dict[str, dict[str, float]] = {}
    for key in sorted(old[0].keys() & new[0].keys()):
        befores, afters = [one[key] for one in old], [one[key] for one in new]
        ratios = sorted(b / a for a, b in zip(befores, afters, strict=True) if a)
        found[key] = {"old": statistics.median(befores), "new": statistics.median(afters)}
        if ratios:
            found[key] |= {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return found


def to_text(job: str, compared: dict[str, dict[str, float]]) -> Iterator[str]:
    for key, one in compared.items():
        ratio = f"  ratio {one['ratio']:.3f} [{one['least']:.3f}, {one['most']:.3f}]" if "ratio" in one else ""
        yield f"{job:9}  {key:28}  old {one['old']:9.3f}  new {one['new']:9.3f}{ratio}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit to compare with")
    parser.add_argument("--new", default="HEAD", help="commit that is judged (HEAD)")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    with TemporaryDirectory(prefix="echo2-two-") as folder:
        base = Path(folder)
        with checked_out(options.old, base / "old") as old, checked_out(options.new, base / "new") as new:
            for job in options.only:
                sides: dict[Path, list[Figures]] = {old: [], new: []}
                for index in range(options.rounds):
                    for tree in (old, new) if index % 2 == 0 else (new, old):
                        work = base / f"{job}-{tree.name}-{index}"
                        work.mkdir()
                        sides[tree].append(JOBS[job](tree, work))
                results[job] = {"compared": compare(sides[old], sides[new]), "old": sides[old], "new": sides[new]}
                print("\n".join(to_text(job, results[job]["compared"])), flush=True)
    settings = {"old": options.old, "new": options.new, "rounds": options.rounds}
    print(f"written to {save('two_commits', {**settings, 'jobs': results}, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
