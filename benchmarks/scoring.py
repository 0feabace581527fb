"""What it costs to score completions in a process without rights, beside scoring them where one is.

    python benchmarks/scoring.py [--groups 60] [--out FILE]

Both sides score the same groups with the same scorers, in turn, in one go; the model is no part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recording import quantile, save

from echo2.reward.sandbox import Sandbox
from echo2.reward.text_scorers import make_scorer
from echo2.tasks.gym import ReasoningGymRows

GROUP_SIZE = 8
TEXTS = ["so it is <answer>12</answer>", "\\boxed{72}"] * (GROUP_SIZE // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = ReasoningGymRows("chain_sum", {}, 0)
    columns: dict[str, Callable[[int], Any]] = {
        "reasoning_gym": lambda i: rows[i]["reasoning_gym"],
        "math": lambda i: str(72 + i),
    }
    figures = {scorer: compare(scorer, column, arguments.groups) for scorer, column in columns.items()}
    print(f"figures are in {save('scoring', {'group_size': GROUP_SIZE, 'scorers': figures}, arguments.out)}")


def compare(scorer: str, column: Callable[[int], Any], groups: int) -> dict[str, float]:
    sandbox = Sandbox()
    here: list[float] = []
    confined: list[float] = []
    for i in range(-1, groups):  # the first, which imports the library on both sides, is not counted
        began = time.perf_counter()
        score = make_scorer(scorer, column(i + 1))
        scores = [score(text) for text in TEXTS]
        between = time.perf_counter()
        assert sandbox.score(scorer, column(i + 1), TEXTS) == scores
        if i >= 0:
            here.append(between - began)
            confined.append(time.perf_counter() - between)
    sandbox.close()
    ratio = statistics.median(confined) / statistics.median(here)
    print(
        f"{scorer}: here {statistics.median(here) * 1e3:.2f} ms a group of {GROUP_SIZE}, "
        f"in the sandbox {statistics.median(confined) * 1e3:.2f} ms ({ratio:.1f} times)"
    )
    return {
        "here_ms": statistics.median(here) * 1e3,
        "here_ms_q90": quantile(here, 0.9) * 1e3,
        "sandbox_ms": statistics.median(confined) * 1e3,
        "sandbox_ms_q90": quantile(confined, 0.9) * 1e3,
        "ratio": ratio,
    }


if __name__ == "__main__":
    main()
