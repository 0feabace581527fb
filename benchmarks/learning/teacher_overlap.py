"""What the learner waits for a teacher behind an endpoint, and what a slow judge adds: a real run of the demo's model
beside stand-ins that answer each request after a set time.

    make bench-teacher_overlap
    make bench-teacher_overlap ARGS='--tree OTHER_CHECKOUT'      # the code of another commit, to compare with

The teacher finds all tokens equally likely, so nothing is learned; the times are the figures.
Medians of the steps after the first two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from recording import last, save

from http_standin import served
from judge_standin import JudgeStandIn
from teacher_standin import Reply, TeacherStandIn

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "outputs" / "models" / "digit_sorting"
RUBRIC = "Digits in order. Right is {answer}."
#: A step has 16 rollouts: as many as a judge is asked about at once, and less than a teacher.
GROUPS, ROLLOUTS = 4, 4
COLUMNS = ("time/step", "time/wait_for_batch", "time/teacher_wait", "time/teacher", "time/train")
WARM_UP_STEPS = 2


class SlowTeacher(TeacherStandIn):
    """Needs a time for each row, and answers as many as are asked at once. It finds all tokens equally likely."""

    def __init__(self, seconds: float) -> None:
        vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
        super().__init__(torch.nn.Identity(), sorted(vocabulary, key=vocabulary.get))
        self.seconds = seconds

    def answer(self, path: str, data: bytes, headers: Mapping[str, str]) -> Reply:
        if path == "/v1/completions":
            time.sleep(self.seconds)
        return super().answer(path, data, headers)

    def _positions(self, read: list[int], top_k: int) -> list[dict[str, dict[str, Any]] | None]:
        same = {"logprob": -math.log(len(self.texts)), "rank": 1, "decoded_token": "x"}
        return [None, *({str(token): same} for token in read[1:])]


class SlowJudge(JudgeStandIn):
    """Needs a time for each answer, and reads as many as it is asked about at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def judged(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        """Answer a request."""
        time.sleep(self.seconds)
        return self.answer(json.loads(body), "")


def one_run(options: argparse.Namespace, judge_seconds: float, bound: int, work: Path) -> dict[str, Any]:
    """Run, and return the medians of a step's seconds."""

    settings: dict[str, Any] = {
        "model": {"path": str(MODEL)},
        "run": {"max_steps": options.steps},
        "tasks": {"source": "digit_sorting"},
        "reward": {"functions": ["exact_match"]},
        "sampling": {"group_size": ROLLOUTS, "max_tokens": 12, "groups_per_batch": GROUPS},
        "schedule": {"groups_per_step": GROUPS, "max_staleness": bound},
        "head": {"listen": "127.0.0.1:0"},
        "learner": {"lr": 1e-6, "tokens_per_microbatch": 65_536, "checkpoint_every": 1000},
    }
    with ExitStack() as stack:
        teacher = stack.enter_context(served(SlowTeacher(options.teacher_seconds).answer))
        settings["distill"] = {"teacher": f"{teacher}/v1"}
        if judge_seconds:
            url = stack.enter_context(served(SlowJudge(judge_seconds).judged))
            judge = {"model": "m", "base_url": f"{url}/v1", "rubric": RUBRIC}
            settings["reward"] = {"functions": ["judge"], "judge": judge}
        toml = work / "run.toml"
        toml.write_text(as_toml(settings))
        environment = {**os.environ, "PYTHONPATH": str(options.tree / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "echo2", "run", str(toml), "--out", str(work / "out"), "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=work, check=False)
    if done.returncode:
        raise SystemExit(f"the run ended with status {done.returncode}: {last(done.stderr)}")
    rows = [json.loads(line) for line in (work / "out" / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row.get("step", 0) > WARM_UP_STEPS]
    return {name: round(statistics.median(row.get(name, 0.0) for row in kept), 3) for name in COLUMNS}


def as_toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Settings as a file: JSON's values are TOML's, but tables."""

    def value(one: Any) -> str:
        if isinstance(one, Mapping):
            return "{" + ", ".join(f"{name} = {value(part)}" for name, part in one.items()) + "}"
        return json.dumps(one)

    lines = []
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{name} = {value(one)}" for name, one in values.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--teacher-seconds", type=float, default=6.0, help="of a row; all of a step are asked at once")
    parser.add_argument("--judge-seconds", type=float, nargs="+", default=[0.0, 3.0], help="of an answer; all at once")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1], help="of staleness")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="the checkout whose code runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"teacher_seconds": options.teacher_seconds, "steps": options.steps, "runs": []}
    for bound in options.bounds:
        for seconds in options.judge_seconds:
            with TemporaryDirectory() as work:
                found = one_run(options, seconds, bound, Path(work))
            figures["runs"].append({"S": bound, "judge_seconds": seconds, **found})
            print(save("teacher_overlap", figures, options.out), figures["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
