"""Forecast against measurement of a run on this machine: seconds of a step, rollouts a second, memory, idle ratio.

As a user would: `echo2 plan CONFIG --here`, which measures a core for a second; `echo2 probe` and the same plan with
what it measured; then `echo2 run`, some steps of it. The pretrained model unless told otherwise (`make smollm` fetches
it, or --model names where it is).

    make bench-forecast                               # eight steps: four minutes on two quiet cores
    make bench-forecast ARGS='--model DIR --steps 4'
    make bench-forecast ARGS='--parts'                # seconds of a core, estimated and measured, for other models

Where other programs use the cores, seconds that pass say little. So the table also has seconds of a core, by
/proc/PID/stat, and the step without the time for which the learner's thread waited for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microbatch import SMALL
from recording import child_environment, output_of, save, there

from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef
from echo2.engines.compact import build_compact
from echo2.engines.engine import SampleRequest
from echo2.engines.processor import this_processor
from echo2.engines.torch_engine import TorchDecoder
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.decide.model_shape import read_shape
from echo2.planning.on_cores import Lengths, decoding_seconds, training_seconds

CONFIG = Path("examples/smollm/json.toml")
POLL_SECONDS = 0.2
#: Models of random weights, by which the constants of `planning/on_cores.py` were chosen.
SHAPES = {
    "60M, 12 layers of 512": {},
    "80M, 4 layers of 1024": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4},
    "6M, 6 layers of 256": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 8192},
}
#: Tokens of a prompt and of an answer, groups of the learner, and rollouts of a group.
PROMPT, ANSWER, GROUPS, GROUP_SIZE = 43, 24, 2, 8


@dataclass(slots=True)
class Watched:
    """A process of the run: seconds of a core that it had, and for which its first thread waited for one, by time."""

    role: str
    times: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def look(self, pid: int) -> None:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (OSError, IndexError):  # it has ended
            return
        peak = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")]
        self.peak_bytes = max([self.peak_bytes, *peak])
        self.times.append(time.time())
        self.computed.append((int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"))
        self.waited.append(waited)

    def during(self, values: Sequence[float], begin: float, end: float) -> float:
        """What was added to values from one time to another."""
        return self._at(values, end) - self._at(values, begin)

    def _at(self, values: Sequence[float], when: float) -> float:
        place = bisect_left(self.times, when)
        if not 0 < place < len(self.times):
            return values[min(place, len(values) - 1)]
        share = (when - self.times[place - 1]) / (self.times[place] - self.times[place - 1])
        return values[place - 1] + share * (values[place] - values[place - 1])


def watched_run(words: Sequence[str], directory: Path) -> dict[int, Watched]:
    """Run to the end, and return what its processes used, by process id."""
    found: dict[int, Watched] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            try:
                listed = json.loads((directory / "processes.json").read_text())
            except (OSError, ValueError):
                continue
            for one in listed:
                found.setdefault(one["pid"], Watched(one["role"])).look(one["pid"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        output_of(words, env=child_environment())
    finally:
        is_over.set()
        thread.join()
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def measured(directory: Path, processes: Mapping[int, Watched]) -> dict[str, float]:
    """The quantities of the forecast, in the run that this directory has."""
    steps = [row for row in lines_of(directory / "metrics.jsonl") if "time/step" in row]
    deliveries = [row for row in lines_of(directory / "events.jsonl")[1:] if row["event"]["type"] == "GroupDelivered"]
    learner = next(one for one in processes.values() if one.role == "learner")
    first, last = steps[0]["time/unix"] - steps[0]["time/step"], steps[-1]["time/unix"]
    passed, count = sum(row["time/step"] for row in steps), len(steps)
    workers = {one["id"]: one["pid"] for one in json.loads((directory / "status.json").read_text())["workers"]}
    made = computed = 0.0
    for worker_id, pid in workers.items():
        own = [row for row in deliveries if row["event"]["worker_id"] == worker_id]
        made += sum(row["event"]["num_samples"] for row in own)
        busy = union((row["now"] - row["event"]["seconds"], row["now"]) for row in own)
        computed += sum(processes[pid].during(processes[pid].computed, *one) for one in busy)
    trained = steps[-1]["groups/trained"]
    options = lines_of(directory / "events.jsonl")[0]["options"]
    return {
        "step": passed / count,
        "step, less waits for a core": (passed - learner.during(learner.waited, first, last)) / count,
        "learner's core seconds a step": learner.during(learner.computed, first, last) / count,
        "rollouts a second": trained * options["group_size"] / passed,
        "rollouts a core second of a worker": made / computed,
        "learner's memory, GB": learner.peak_bytes / 1e9,
        "worker's memory, GB": max(processes[pid].peak_bytes for pid in workers.values()) / 1e9,
        "learner idle": sum(row["time/wait_for_batch"] for row in steps) / passed,
        "answer, tokens": sum(row["completions/mean_length"] for row in steps) / count,
    }


def forecast_of(plan: Mapping[str, Any]) -> dict[str, float]:
    """The same quantities, of `echo2 plan --here --json`."""
    return {
        "step": plan["step_seconds"],
        "step, less waits for a core": plan["step_seconds"],
        "learner's core seconds a step": plan["train_seconds"],
        "rollouts a second": plan["rollouts_per_second"],
        "rollouts a core second of a worker": plan["worker_rollouts_per_second"],
        "learner's memory, GB": plan["memory"]["learner"]["bytes"] / 1e9,
        "worker's memory, GB": plan["memory"]["worker"]["bytes"] / 1e9,
        "learner idle": plan["idle_ratio"],
        "answer, tokens": plan["lengths"]["answer"],
    }


def show(sheet: Mapping[str, float], probed: Mapping[str, float], found: Mapping[str, float]) -> None:
    print(f"{'':36}{'data sheet':>12}{'error':>8}{'after probe':>13}{'error':>8}{'measured':>10}")
    for name, value in found.items():
        errors = [f"{one[name] / value - 1:+.0%}" if value else "" for one in (sheet, probed)]
        print(f"{name:36}{sheet[name]:12.3g}{errors[0]:>8}{probed[name]:13.3g}{errors[1]:>8}{value:10.3g}")


def whole(options: argparse.Namespace) -> None:
    echo2 = [sys.executable, "-m", "echo2"]
    settings = ["--run.max_steps", str(options.steps)]
    settings += ["--model.path", str(options.model)] if options.model else []
    with tempfile.TemporaryDirectory() as folder:
        plan = [*echo2, "plan", str(options.config), *settings, "--json", "--here"]
        probe = Path(folder) / "probe.json"
        environment = child_environment() | {"OMP_NUM_THREADS": "1"}  # as `echo2 run` starts its workers
        sheet = json.loads(output_of(plan, env=environment))
        words = [*echo2, "probe", str(options.config), *settings, "--json", "--seconds", str(options.probe_seconds)]
        probe.write_text(output_of(words, env=environment))
        probed = json.loads(output_of([*plan, str(probe)], env=environment))
        directory = Path(folder) / "run"
        processes = watched_run([*echo2, "run", str(options.config), *settings, "--out", str(directory)], directory)
        found = measured(directory, processes)
        rows = [row for row in lines_of(directory / "metrics.jsonl") if "time/step" in row]
        core = {one.role: one.computed[-1] for one in processes.values() if one.computed}
        kept = ("time/step", "time/train", "time/wait_for_batch", "completions/mean_length", "broadcast/t_bcast")
        figures = {
            "config": str(options.config),
            "steps": options.steps,
            "load_at_end": os.getloadavg()[0],
            "data_sheet": forecast_of(sheet),
            "after_probe": forecast_of(probed),
            "measured": found,
            "by_step": [{name: row[name] for name in kept} for row in rows],
            "core_seconds": core,
            "plans": {"data_sheet": sheet, "after_probe": probed},
            "probe": json.loads(probe.read_text()),
        }
    show(forecast_of(sheet), forecast_of(probed), found)
    print(save("forecast", figures, options.out))


def parts(options: argparse.Namespace) -> None:
    """Seconds of a core that the learner takes for a step, and the engine `compact` for a token of 8 and 48 rows."""
    import torch

    torch.set_num_threads(1)
    rows = []
    for name, changes in SHAPES.items():
        for what, value, guess in part(SMALL | changes):
            rows.append({"model": name, "what": what, "measured": value, "estimated": guess})
            print(f"{name:24}{what:24}{value:10.4f} s, estimated {guess:8.4f} s, {guess / value:.2f} x", flush=True)
    print(save("forecast_parts", {"rows": rows}, options.out))


def part(sizes: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield what, the seconds measured, and those estimated, for a model of these sizes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**sizes)
    module = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    policy = Policy(module, {"config.json": json.dumps(settings.to_dict()).encode()}, torch.device("cpu"))
    shape, rng, core = read_shape(sizes), random.Random(0), this_processor(2)
    assert shape is not None

    def tokens(count: int) -> array[int]:
        return array("i", [rng.randrange(sizes["vocab_size"]) for _ in range(count)])

    decoder = TorchDecoder(build_compact, "cpu")
    decoder.load(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), policy.tensors(torch.bfloat16), policy.files))
    params = SamplingParams(max_tokens=200)
    for groups in (1, 6):
        prompts = [tokens(PROMPT) for _ in range(groups)]
        first = 1000 * groups
        added = {first + row: SampleRequest(prompts[row // 8], 7, row, params) for row in range(8 * groups)}
        decoder.clear()
        decoder.step(added, [])
        least = min(timed(lambda: decoder.step({}, [])) for _ in range(12))
        yield f"a token of {8 * groups} rows", least, decoding_seconds(shape, PROMPT + 6, 8 * groups, 2, core)
    trainer = Trainer(4096)
    trainer.add("it", policy, True)

    def step() -> None:
        families = [(tokens(PROMPT), [tokens(ANSWER) for _ in range(GROUP_SIZE)]) for _ in range(GROUPS)]
        data = [Datum(prompt, one, b"\x01" * ANSWER) for prompt, answers in families for one in answers]
        trainer.forward_backward("it", data, lambda logp_n, _: (-logp_n, None))
        trainer.optim_step("it", AdamParams(1e-6, grad_clip=1.0))

    least = min(timed(step) for _ in range(3))
    lengths = Lengths(PROMPT, ANSWER, ANSWER - 1, ANSWER)
    yield "a step of 2 groups", least, training_seconds(shape, lengths, GROUPS, GROUP_SIZE, core)


def timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=there, default=CONFIG)
    parser.add_argument("--model", type=there, help="model directory (default: the configuration's)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--probe-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("--parts", action="store_true", help="the estimates of parts, for models of random weights")
    options = parser.parse_args()
    (parts if options.parts else whole)(options)


if __name__ == "__main__":
    main()
