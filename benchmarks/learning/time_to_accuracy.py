"""Wall time to a held-out accuracy: `echo2 run` against TRL's GRPOTrainer, on this machine, in one sitting.

    make bench-time_to_accuracy                              # makes .venv-trl for TRL when there is none
    make bench-time_to_accuracy ARGS='--trl-python ~/trl/bin/python --seeds 0 1 2 -- --workers.count 1'

Both sides start from the same model directory and take the same prompts in the same order, with the same group size,
batch, learning rate and number of tokens, all read from one echo2 config. Sides and seeds are interleaved, so that a
machine that slows down slows all of them.

**The clock.** TRL: from the begin of the first training step, with saving weights taken out. echo2: from the first
lease granted to a worker (its first sampling), with saving checkpoints left in. Start-up (imports, loading, joining)
is reported apart. Neither side evaluates inside the clock: weights are saved every few steps and judged after it by
`held_out.py`, the same for both. The time to the threshold is where the line between two saved points crosses it.

**The baseline** is TRL with the number of threads (1 or 2) that gets there sooner, with the micro-batching that was
fastest for it on two cores. A ratio is TRL's seconds over echo2's, per seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from recording import output_of, save

from echo2.config import Config, load
from echo2.core.errors import UserError
from echo2.core.types import Message

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RUN_LIMIT_SECONDS = 7200.0  # of one run of one side; longer means hung
TRL_REQUIREMENTS = ("trl==1.16.0", "datasets")
TRL_MICROBATCHES = (
    4  # measured on two cores, 64 x 8: 1 -> 0.50, 2 -> 0.42, 4 -> 0.42, 8 -> 0.46 s a step with two threads
)
ECHO2 = "echo2"


@dataclass(frozen=True, slots=True)
class Point:
    """Saved weights: after `step` steps and `seconds` on the clock."""

    step: int
    seconds: float
    weights: str
    accuracy: float = float("nan")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of one side."""

    side: str
    seed: int
    startup_seconds: float
    cpu_seconds: float
    points: tuple[Point, ...]
    versions: dict[str, str]

    @property
    def seconds_per_step(self) -> float:
        """Mean over the second half: the first steps are slower on both sides."""
        first, last = self.points[len(self.points) // 2 - 1], self.points[-1]
        return (last.seconds - first.seconds) / (last.step - first.step)


def crossing(points: Sequence[tuple[float, float]], threshold: float) -> float | None:
    """Seconds at which the line through (seconds, accuracy) first reaches `threshold`; None if it never does."""
    if points and points[0][1] >= threshold:
        return points[0][0]
    for (before, low), (after, high) in pairwise(points):
        if high >= threshold:
            return before + (after - before) * (threshold - low) / (high - low)
    return None


def time_to(run: Run, start_accuracy: float, threshold: float) -> float | None:
    """Seconds on the clock until held-out accuracy reaches the threshold."""
    return crossing([(0.0, start_accuracy), *((p.seconds, p.accuracy) for p in run.points)], threshold)


def compare(times: dict[str, dict[int, float | None]]) -> dict[str, Any]:
    """The baseline (TRL's better side over all seeds), the ratio per seed, its median and range.

    `times`: side -> seed -> seconds. Missing the threshold counts as infinitely long.
    """

    def total(side: str) -> float:
        return sum(float("inf") if seconds is None else seconds for seconds in times[side].values())

    baseline = min((side for side in times if side != ECHO2), key=total)
    ratios = {
        seed: times[baseline][seed] / ours  # type: ignore[operator]
        for seed, ours in times[ECHO2].items()
        if ours is not None and times[baseline].get(seed) is not None
    }
    missed = [f"{side} seed {seed}" for side in times for seed, seconds in times[side].items() if seconds is None]
    spread = list(ratios.values())
    return {
        "baseline": baseline,
        "ratio_by_seed": ratios,
        "ratio_median": statistics.median(spread) if spread else None,
        "ratio_min": min(spread, default=None),
        "ratio_max": max(spread, default=None),
        "missed_threshold": missed,
    }


# ---- the job, the same for both ------------------------------------------------------------------------------------


def write_problems(config: Config, seed: int, steps: int, train: Path, held_out: Path) -> None:
    """The prompts of a run in the order in which echo2 takes them, and the held-out problems, as JSONL."""
    from echo2.tasks.streams import Tasks, held_out_tasks, training_tasks

    def as_json(prompt: str | tuple[Message, ...]) -> Any:
        return prompt if isinstance(prompt, str) else [asdict(message) for message in prompt]

    def dump(path: Path, stream: Tasks, count: int) -> None:
        tasks = [stream.task(cursor) for cursor in range(count)]
        rows = [{"prompt": as_json(task.prompt), "answer": task.columns["answer"]} for task in tasks]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    dump(train, training_tasks(config.tasks, seed), steps * config.schedule.groups_per_step)
    judged = held_out_tasks(config.eval, seed=0)
    assert judged is not None, "the config names no held-out problems"
    dump(held_out, judged, len(judged))


def run_echo2(options: argparse.Namespace, config: Config, seed: int, out: Path) -> Run:
    """One `echo2 run` with its own processes; evaluation off, weights kept every `save_every` steps."""
    command = [sys.executable, "-m", "echo2", "run", options.config, "--out", str(out), *run_flags(options, seed)]
    launched = time.time()
    cpu_seconds = watch(command, out.with_suffix(".log"), threads=1)
    return read_run(options, seed, out, launched, cpu_seconds)


def run_flags(options: argparse.Namespace, seed: int) -> list[str]:
    """What is set on top of the config: the caller's flags, and what the clock and the judge need."""
    flags = {
        "run.seed": seed,
        "run.max_steps": options.steps,
        "eval.source": "",
        "model.path": options.model,
        "learner.checkpoint_every": options.save_every,
        "learner.keep_checkpoints": options.steps,
    }
    return [*options.echo2_flags, *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]


def read_run(options: argparse.Namespace, seed: int, out: Path, launched: float, cpu_seconds: float) -> Run:
    """What a finished run directory says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    unix_of_step = {row["step"]: row["time/unix"] for row in rows if "time/unix" in row}
    started = first_lease(out / "events.jsonl")
    steps = range(options.save_every, options.steps + 1, options.save_every)
    points = tuple(Point(n, unix_of_step[n] - started, str(out / "checkpoints" / f"step_{n}")) for n in steps)
    return Run(ECHO2, seed, started - launched, cpu_seconds, points, {"torch": version("torch")})


def first_lease(events: Path) -> float:
    """When the head first leased a training group, in unix seconds: nothing is sampled for training before that."""
    with events.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            for command in record.get("commands", ()):
                if command["type"] == "GrantLeases" and command["leases"][0]["group"]["kind"] == "train":
                    return float(record["now"])
    raise UserError(f"{events} shows no lease of a training group: the run did not start.")


def trl_command(
    options: argparse.Namespace, config: Config, seed: int, prompts: Path, out: Path, threads: int
) -> list[str]:
    """One GRPOTrainer run in TRL's own environment."""
    microbatches = TRL_MICROBATCHES if options.device == "cpu" else 1
    command = [options.trl_python, HERE / "trl_grpo.py", "--model", options.model, "--out", out]
    command += ["--prompts-file", prompts, "--seed", seed, "--threads", threads, "--device", options.device]
    command += ["--steps", options.steps, "--save-every", options.save_every, "--accumulate", microbatches]
    command += ["--prompts", config.schedule.groups_per_step, "--group", config.sampling.group_size]
    command += ["--max-tokens", config.sampling.max_tokens]
    command += ["--lr", config.learner.lr, "--warmup-steps", config.learner.warmup_steps]
    command += ["--reward", reward_of(config)]
    command += ["--scale-rewards", "group" if config.learner.advantage == "grpo" else "none"]
    return [str(part) for part in command]


def run_trl(options: argparse.Namespace, config: Config, seed: int, out: Path, threads: int) -> Run:
    """The run of `trl_command`, with so many threads."""
    prompts = out.parent / f"train-{seed}.jsonl"
    cpu_seconds = watch(trl_command(options, config, seed, prompts, out, threads), out.with_suffix(".log"), threads)
    return read_trl(out, seed, threads, cpu_seconds)


def read_trl(out: Path, seed: int, threads: int, cpu_seconds: float) -> Run:
    """What TRL's side has written."""
    start = json.loads((out / "start.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (out / "clock.jsonl").read_text(encoding="utf-8").splitlines()]
    points = tuple(Point(r["step"], r["seconds"], str(out / "weights" / f"step_{r['step']}")) for r in rows)
    return Run(f"trl-{threads}", seed, start["startup_seconds"], cpu_seconds, points, start["versions"])


def watch(command: list[str], log: Path, threads: int) -> float:
    """Run to the end, output to `log`; the CPU seconds of the process and all the children it waited for.

    Raises:
        UserError: it failed or ran past RUN_LIMIT_SECONDS.
    """
    paths = {"PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": str(threads)}
    before = os.times()
    try:
        with log.open("wb") as file:
            subprocess.run(
                command,
                stdout=file,
                stderr=file,
                env=environment,
                check=True,
                cwd=REPOSITORY,
                timeout=RUN_LIMIT_SECONDS,
            )
    except subprocess.SubprocessError as error:
        raise UserError(f"{error}\nThe end of {log}:\n{log.read_text(errors='replace')[-2000:]}") from error
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def reward_of(config: Config) -> str:
    """The run's reward function, which both sides and the judge can call.

    Raises:
        UserError: it is neither `exact_match` nor a function in a file.
    """
    (name,) = config.reward.functions
    if name != "exact_match" and ".py:" not in name:
        raise UserError(f"reward.functions = {[name]}: TRL's side knows exact_match, and file.py:function.")
    return name


def judge_command(
    config: Config, directories: Sequence[str], held_out: Path, samples: int, device: str = "cpu"
) -> list[str]:
    """Prints the held-out reward of the weights in these directories."""
    command = [sys.executable, str(HERE / "held_out.py"), "--problems", str(held_out), "--reward", reward_of(config)]
    command += ["--max-tokens", str(config.sampling.max_tokens), "--samples", str(samples), "--device", device]
    return [*command, *directories]


def judge(
    config: Config, directories: Sequence[str], held_out: Path, samples: int = 4, device: str = "cpu"
) -> dict[str, float]:
    """Held-out reward of the weights in these directories."""
    command = judge_command(config, directories, held_out, samples, device)
    accuracy: dict[str, float] = json.loads(output_of(command, cwd=REPOSITORY))
    return accuracy


def judged(run: Run, accuracy: dict[str, float]) -> Run:
    """The run with the held-out reward of every point."""
    return replace(run, points=tuple(replace(point, accuracy=accuracy[point.weights]) for point in run.points))


# ---- the sitting ---------------------------------------------------------------------------------------------------


def all_runs(options: argparse.Namespace, config: Config, work: Path) -> list[Run]:
    """Every side on every seed, interleaved; each seed starts with another side."""
    sides = [ECHO2, *(f"trl-{threads}" for threads in options.trl_threads)]
    runs = []
    for index, seed in enumerate(options.seeds):
        write_problems(config, seed, options.steps, work / f"train-{seed}.jsonl", work / "held_out.jsonl")
        turn = index % len(sides)
        for side in sides[turn:] + sides[:turn]:
            out = work / f"{side}-{seed}"
            print(f"{side}, seed {seed}: {options.steps} steps ...", end=" ", flush=True)
            if side == ECHO2:
                run = run_echo2(options, config, seed, out)
            else:
                run = run_trl(options, config, seed, out, int(side.removeprefix("trl-")))
            print(f"{run.points[-1].seconds:.1f} s ({run.seconds_per_step:.3f} s a step, {run.cpu_seconds:.0f} cpu-s)")
            weights = [point.weights for point in run.points]
            runs.append(judged(run, judge(config, weights, work / "held_out.jsonl", options.samples, options.device)))
            for directory in weights:  # those of a larger model fill a disk
                shutil.rmtree(directory)
    return runs


def trl_python(given: str | None) -> str:
    """TRL's Python: the one that was given, or that of .venv-trl, made when it is not there."""
    if given:
        return given
    python = REPOSITORY / ".venv-trl" / "bin" / "python"
    installed = python.parent.parent / ".installed"
    if not installed.exists():
        print("Making .venv-trl for TRL (once; a few minutes) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", python.parent.parent], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={version('torch').partition('+')[0]}"], check=True)  # alone: see the Makefile
        subprocess.run([*pip, *TRL_REQUIREMENTS], check=True)
        installed.touch()
    return str(python)


def processes(config: Config, flags: Sequence[str]) -> dict[str, str]:
    """What runs on each side, in words."""
    workers = config.workers.count
    return {
        ECHO2: f"{workers + 2} processes (head, learner, {workers} worker{'s' * (workers != 1)}), one thread each"
        + (f"; flags {' '.join(flags)}" if flags else ""),
        "trl-1": f"1 process, 1 thread, {TRL_MICROBATCHES} micro-batches",
        "trl-2": f"1 process, 2 threads, {TRL_MICROBATCHES} micro-batches",
    }


def report(options: argparse.Namespace, config: Config, start: float, runs: list[Run]) -> dict[str, Any]:
    """Everything that is written down."""
    times: dict[str, dict[int, float | None]] = {}
    for run in runs:
        times.setdefault(run.side, {})[run.seed] = time_to(run, start, options.threshold)
    return {
        "processes": processes(config, options.echo2_flags),
        "threshold": options.threshold,
        "start_accuracy": start,
        "seconds_to_threshold": times,
        **compare(times),
        "config": {**asdict(config), "model": {"path": Path(config.model.path).name}},
        "runs": [{**asdict(r), "points": [(p.step, round(p.seconds, 3), p.accuracy) for p in r.points]} for r in runs],
    }


def show(result: dict[str, Any], runs: list[Run]) -> None:
    print(f"\nHeld-out accuracy {result['start_accuracy']:.2f} at the start; seconds until {result['threshold']:.2f}:")
    for side, by_seed in result["seconds_to_threshold"].items():
        mine = [run for run in runs if run.side == side]
        seconds = "  ".join("never" if s is None else f"{s:5.1f}" for s in by_seed.values())
        step = statistics.median(run.seconds_per_step for run in mine)
        startup = statistics.median(run.startup_seconds for run in mine)
        print(
            f"  {side:6} {seconds}   ({step:.3f} s a step, start-up {startup:.1f} s; {result['processes'].get(side)})"
        )
    if result["ratio_median"] is None:
        print("No ratio: a side never got there.")
    else:
        print(
            f"echo2 is {result['ratio_median']:.2f} times as fast as {result['baseline']} (median of "
            f"{len(result['ratio_by_seed'])} seeds; {result['ratio_min']:.2f} to {result['ratio_max']:.2f})."
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(REPOSITORY / "src" / "echo2" / "demo" / "sort.toml"))
    parser.add_argument("--model", help="model directory both sides start from (default: the config's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--threshold", type=float, default=0.70)
    parser.add_argument("--samples", type=int, default=4, help="of each held-out problem, for the judge")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of TRL and of the judge")
    parser.add_argument("--trl-python", help="Python of an environment with TRL; default: .venv-trl, made when missing")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", type=Path, help="where the runs are written (default: outputs/benchmark-<time>)")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("echo2_flags", nargs="*", help="after --: flags for `echo2 run`, e.g. --workers.count 1")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], name: str = "time_to_accuracy") -> None:
    """Run, judge, print, and write the figures under this name."""
    options = parse(arguments)
    pairs = dict(zip(options.echo2_flags[::2], options.echo2_flags[1::2], strict=True))
    config = load(Path(options.config), {flag.removeprefix("--"): value for flag, value in pairs.items()})
    stamp = time.strftime("%Y%m%d-%H%M%S")
    work = (options.work or REPOSITORY / "outputs" / f"benchmark-{stamp}").resolve()
    work.mkdir(parents=True)
    options.model = str(Path(options.model or config.model.path).resolve())
    options.trl_python = trl_python(options.trl_python)
    runs = all_runs(options, config, work)
    (start,) = judge(config, [options.model], work / "held_out.jsonl", options.samples, options.device).values()
    result = report(options, config, start, runs)
    show(result, runs)
    print(f"Written to {save(name, result, options.out).name}.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
