"""Whole runs: `echo2 run` with head, learner and a worker that share the device, as anybody starts one.

Two models: the demo's, which learns to sort digits, and one of Qwen3-0.6B's shape with random weights, whose rewards
are of the hash of a text, so that groups teach something. Idle share and staleness: of the run's own summary.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from gpu_sections.bench import Bench, Row

REPOSITORY = Path(__file__).resolve().parents[2]
#: Width of the demo's model.
HEADS = {"full": "15", "smoke": "3", "tiny": "3"}
REWARD = """import zlib


def reward(completions, **_):
    return [float(zlib.crc32(text.encode()) & 1) for text in completions]
"""
CONFIG = """[run]
max_steps = {steps}
[model]
path = "{model}"
snapshot_dtype = "bfloat16"
[tasks]
source = "digit_sorting"
params = {{ split = "train", min_digits = 5, max_digits = 10 }}
[reward]
functions = ["{reward}:reward"]
[sampling]
group_size = 8
max_tokens = {max_tokens}
groups_per_batch = {groups}
[schedule]
groups_per_step = {groups}
max_staleness = 2
[learner]
lr = 1e-6
checkpoint_every = 1000
[workers]
count = 1
"""


#: With less time left, the random model has real widths and two layers.
ALL_LAYERS_SECONDS = 180.0
#: Lines of the logs that end a stage of the start.
STAGES = (
    ("head.log", "listening on"),
    ("learner.log", "fresh at version"),
    ("worker-*.log", "joined as"),
    ("worker-*.log", "installed;"),
)
_building: tuple[subprocess.Popen[bytes], Path] | None = None


def begin(heads: str) -> None:
    """Begin to make the demo's model, on one core, while other sections use the device."""
    global _building
    out = Path(tempfile.mkdtemp(prefix="echo2-gpu-")) / "digit_sorting"
    command = [sys.executable, "-m", "echo2.demo.digit_sorting", "--out", str(out), "--heads", heads]
    env = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    _building = subprocess.Popen(command, env=env, **quiet), out  # type: ignore[call-overload]


def run(bench: Bench) -> None:
    """Run both models."""
    with tempfile.TemporaryDirectory() as name:
        for one in bench.pick((hashing, sorting), (hashing, sorting), (hashing,)):
            if bench.left() < bench.pick(30.0, 15.0, 0.0):
                bench.record({"model": one.__name__, "not_run": f"{bench.left():.0f} s were left"})
            else:
                one(bench, Path(name))


def sorting(bench: Bench, folder: Path) -> None:
    """Run the demo, with its model."""
    if _building is None:
        begin(HEADS[bench.size])
    assert _building is not None
    process, made = _building
    process.wait(timeout=max(1.0, bench.left() - 25.0))
    sort = REPOSITORY / "src" / "echo2" / "demo" / "sort.toml"
    flags = ["--run.max_steps", bench.pick("60", "4", "2"), "--model.path", str(made), "--eval.limit", "128"]
    if not bench.is_full:
        flags += ["--schedule.groups_per_step", "8", "--sampling.groups_per_batch", "8", "--eval.source", ""]
    bench.record({"model": f"digit sorting, {HEADS[bench.size]} heads"} | started(bench, sort, folder / "sort", flags))
    shutil.rmtree(made.parent, ignore_errors=True)


def hashing(bench: Bench, folder: Path) -> None:
    """Run random weights, whose rewards are random, too."""
    layers = bench.values("0.6B")["num_hidden_layers"] if bench.left() > ALL_LAYERS_SECONDS else 2
    config = random_model(bench, folder, layers)
    bench.record({"model": "0.6B, random", "layers": layers} | started(bench, config, folder / "random", []))


def random_model(bench: Bench, folder: Path, layers: int) -> Path:
    """Write a model of Qwen3-0.6B's shape, with the demo's tokenizer, and the configuration of a run of it."""
    from transformers.utils.logging import disable_progress_bar

    from echo2.demo.digit_sorting import CHARACTERS
    from echo2.demo.small_models import character_tokenizer

    model = folder / "model"
    policy = bench.policy("0.6B", "bfloat16", num_hidden_layers=layers)
    character_tokenizer(CHARACTERS, unknown="<unk>").save_pretrained(model)
    disable_progress_bar()
    policy.module.save_pretrained(model)
    (folder / "reward.py").write_text(REWARD)
    steps, max_tokens, groups = bench.pick((6, 128, 8), (2, 16, 4), (2, 4, 2))
    config = folder / "random.toml"
    values = {"steps": steps, "max_tokens": max_tokens, "groups": groups}
    config.write_text(CONFIG.format(model=model, reward=folder / "reward.py", **values))
    return config


def environment() -> dict[str, str]:
    """Return this environment with our sources in the path."""
    paths = [str(REPOSITORY / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def started(bench: Bench, config: Path, out: Path, flags: list[str]) -> Row:
    """Run `echo2 run` to its end, or to that of the section; return what it says of itself."""
    command = [sys.executable, "-m", "echo2", "run", str(config), "--out", str(out), "--json", *flags]
    began, clock = time.monotonic(), time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=REPOSITORY
    ) as process:
        try:
            told, errors = process.communicate(timeout=max(5.0, bench.left() - 8.0))
            status: int | str = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            told, errors = process.communicate(timeout=30.0)
            status = "not over when the time was"
    row: Row = {"status": status, "seconds": time.monotonic() - began, **_summary(told), **_rows(out)}
    row["stages"] = _stages(out, clock)
    if status != 0:
        row["said"] = errors[-1500:]
        row["logs"] = {path.name: path.read_text()[-1500:] for path in sorted(out.glob("logs/*.log"))}
    return row


def _summary(told: str) -> dict[str, Any]:
    lines = [line for line in told.splitlines() if line.startswith("{")]
    summary: dict[str, Any] = json.loads(lines[0]) if lines else {}
    names = ("steps", "eval_before", "eval_after", "learner_idle_ratio", "staleness_mean", "staleness_max")
    return {name: summary[name] for name in names if summary.get(name) is not None}


def _rows(out: Path) -> dict[str, Any]:
    """Return what came before the first step, and medians of the steps behind it: seconds of a step's parts, and the
    share of its time that the learner waited.
    """
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if "time/since_start" in row]
    if not rows:
        return {}
    found: dict[str, Any] = {"to_first_step_seconds": rows[0]["time/since_start"]}
    later = rows[1:]
    for name in sorted({name for row in later for name in row if name.startswith("time/")} | {"learner/idle_ratio"}):
        values = sorted(row[name] for row in later if isinstance(row.get(name), int | float))
        if values and name not in ("time/since_start", "time/unix"):
            found[f"later {name}"] = values[len(values) // 2]
    waited = sum(row.get("time/wait_for_batch", 0.0) for row in later)
    if took := sum(row.get("time/step", 0.0) for row in later):
        found["later_idle"] = waited / took
    return found


def _stages(out: Path, began: float) -> dict[str, float]:
    """Return the seconds from the command to the first line of each kind in the logs: where the start goes."""
    found: dict[str, float] = {}
    for log, words in STAGES:
        for path in sorted((out / "logs").glob(log)):
            for line in path.read_text().splitlines():
                if words in line and words not in found:
                    at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    found[words] = round(at - began, 1)
    return found
