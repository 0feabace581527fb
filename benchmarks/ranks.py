"""The demo with a learner of one process and of two: what is learned, and what two cost on the CPU.

    nice python benchmarks/ranks.py --steps 20 --out results.json

In deterministic mode both see the same tasks in the same order; what they sample parts when the last bits of a sum of
two halves have changed a token. Two ranks on one machine's cores are no faster: the time shows what gloo and FSDP cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from recording import HERE, save

CONFIG = HERE.parent / "src" / "echo2" / "demo" / "sort.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path, help="that the demo has built (default: built for this)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if options.model is None:
            subprocess.run([sys.executable, "-m", "echo2.demo.digit_sorting", "--out", str(model)], check=True)
        runs = {ranks: train(Path(folder) / f"of_{ranks}", model, ranks, options.steps) for ranks in (1, 2)}
    for ranks, run in runs.items():
        print(f"{ranks} ranks: reward {run['reward_first']:.3f} -> {run['reward_last']:.3f}, accuracy", end=" ")
        print(
            f"{run['accuracy_first']:.3f} -> {run['accuracy_last']:.3f}, {run['train_seconds']:.2f} s/step of training"
        )
    ratio = runs[2]["train_seconds"] / runs[1]["train_seconds"]
    print(f"training of a step, two over one: {ratio:.2f}; saved in", end=" ")
    print(save("ranks", {"steps": options.steps, "train_ratio": ratio, "runs": runs}, options.out))


def train(out: Path, model: Path, ranks: int, steps: int) -> dict[str, Any]:
    """One run: rewards of the first and the last five steps, held-out accuracies, the median step's training."""
    settings = {
        "model.path": model,
        "run.max_steps": steps,
        "run.deterministic": "true",
        "eval.every": 0,
        "learner.ranks": ranks,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "echo2", "run", str(CONFIG), "--out", str(out), "--json", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=HERE.parent, env=environment, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    rewards, times = [row["reward/mean"] for row in trained], [row["time/train"] for row in trained]
    return {
        "reward_first": fmean(rewards[:5]),
        "reward_last": fmean(rewards[-5:]),
        "accuracy_first": accuracies[0],
        "accuracy_last": accuracies[-1],
        "train_seconds": median(times),
        "train_seconds_all": times,
        "rewards": rewards,
        "grad_norms": [row["optim/grad_norm"] for row in trained],
    }


if __name__ == "__main__":
    main()
