"""The figures of a pretrained model, SmolLM2-135M-Instruct, on a CPU or on one GPU: what staleness costs, what overlap
within a step saves, how much of the weights changes, how far engines are from the learner, what processes take of the
memory, three workloads after a warm-up, an adapter, strangers, what few bits cost at the learner and at workers,
engines side by side, a teacher, and TRL beside it.

    make outputs/models/smollm2/config.json                                                     # once
    make bench-real_model ARGS='--only staleness --at-once 6 --budget-seconds 240'
    make bench-real_model ARGS='--only trl --seeds 0 --steps 2 --budget-seconds 600'            # a try, on a CPU

Every part is a list of jobs, one for each variant and seed, and the first seed of all comes first: what is cut off
costs spread before it costs variants. Jobs that run at once share the machine, so the file says how many there were:
seconds and idle shares depend on that, the reward after so many steps does through the staleness alone. A job that
fails, or that the time cuts off, is written down with its last words; the file is written anew after each.

Seconds count from the first training lease to the step that made a version. The memory of each process is its peak as
the system tells, on a GPU what the driver tells every few seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import distillation
import joining
import real_model_figures as figures
import time_to_accuracy as beside
from crew import ECHO2, Found, Job, last_json, run_jobs, words
from recording import save, there

from echo2.config import load
from echo2.core.devices import NVIDIA_DRIVER
from echo2.core.errors import UserError

REPOSITORY = beside.REPOSITORY
EXAMPLES = REPOSITORY / "examples" / "smollm"
HERE = Path(__file__).resolve().parent
STALENESS = (0, 1, 2, 4, 8, 16)
RATES = ("1e-6", "1e-5", "1e-4")
THREE_PEOPLE = "{ people = 3 }"
#: Name -> the file of settings, and others on top.
WORKLOADS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "arithmetic": ("arithmetic.toml", {}),
    "knights": ("knights.toml", {}),
    "knights-3": ("knights.toml", {"tasks.params": THREE_PEOPLE, "eval.params": THREE_PEOPLE}),
    "sokoban": ("sokoban.toml", {}),
}
ENGINES = ("compact", "transformers")
#: Name -> precision of the snapshots, and of the learner's products.
PRECISIONS = {
    "float32": ("float32", "float32"),
    "bfloat16-weights": ("bfloat16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
#: Of part forms: the engine, and the precision of the snapshots that it may round.
FORMS = {
    "float32": ("compact", "float32"),
    "bfloat16": ("compact", "bfloat16"),
    "q8_0": ("llamacpp-q8_0", "float32"),
    "q4_0": ("llamacpp-q4_0", "float32"),
}
#: Of part overlap: staleness bound, tokens of a micro-batch (one holds all of a step, one two or three groups), order.
OVERLAP = {
    "sequential": (0, "65536", "any"),
    "complete-groups": (0, "1024", "any"),
    "frontier": (0, "1024", "frontier"),
    "one-ahead": (1, "1024", "any"),
}
FORMS_STALENESS = (1, 4)
#: Of part low-memory: the file of settings, and `learner.quantised`.
LOW_MEMORY = {
    "adapter": ("lora.toml", "none"),
    "adapter-nf4": ("lora.toml", "base"),
    "all": ("json.toml", "none"),
    "all-8-bit": ("json.toml", "moments"),
}
#: Steps of jobs that measure something of each step, and not what was learned.
FEW_STEPS = 4
#: Of a workload, warm-up and training, for each step of the others.
WORKLOAD_STEPS = 2
#: Of part trl: 12 of 20.
BESIDE_SHARE = 0.6
ECHO2_SIDE = beside.ECHO2
#: The jobs of part trl that judge what the others have trained.
JUDGED = "trl"

Flags = Mapping[str, object]


class Bench:
    """What all parts need: the options, the rows, and how a run is written as a job."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        facts = work / "facts"
        subprocess.run([sys.executable, EXAMPLES / "facts.py", "--out", facts], check=True)
        self.facts: Flags = {
            "tasks.source": facts / "train.jsonl",
            "eval.source": facts / "heldout.jsonl",
            "model.path": options.model,
        }

    def run_words(self, config: str, out: Path, flags: Flags) -> list[str]:
        """`echo2 run` with these settings, on top of which come those of the command line."""
        common: Flags = {"head.listen": "127.0.0.1:0", "learner.checkpoint_every": 10_000, "eval.every": 5}
        own = dict(
            zip((flag.removeprefix("--") for flag in self.options.flags[::2]), self.options.flags[1::2], strict=True)
        )
        return [*ECHO2, "run", str(EXAMPLES / config), "--out", str(out), *words({**common, **flags, **own})]

    def facts_job(self, part: str, name: str, told: Found, flags: Flags, config: str = "json.toml") -> Job:
        """One run on the facts."""
        out = self.work / name / "run"
        command = self.run_words(config, out, {**self.facts, "run.max_steps": self.options.steps, **flags})
        return Job(name, part, {"run": command}, read_run, told)

    # ---- the parts ---------------------------------------------------------------------------------------------------

    def staleness(self) -> Iterable[Job]:
        for seed in self.options.seeds:
            for bound in STALENESS:
                flags = {"schedule.max_staleness": bound, "run.seed": seed}
                yield self.facts_job("staleness", f"staleness-{bound}-{seed}", {"S": bound, "seed": seed}, flags)

    def overlap(self) -> Iterable[Job]:
        """What a learner waits, by how much of a step's sampling and training may overlap."""
        for seed in self.options.seeds:
            for variant, (bound, tokens, order) in OVERLAP.items():
                flags: Flags = {
                    "run.seed": seed,
                    "schedule.max_staleness": bound,
                    "schedule.order": order,
                    "schedule.groups_per_step": 12,
                    "sampling.groups_per_batch": 12,
                    "learner.tokens_per_microbatch": tokens,
                    "eval.source": "",
                }
                yield self.facts_job("overlap", f"overlap-{variant}-{seed}", {"variant": variant, "seed": seed}, flags)

    def workloads(self) -> Iterable[Job]:
        for seed in self.options.seeds:
            for name in WORKLOADS:
                yield self._workload(name, seed)

    def _workload(self, name: str, seed: int) -> Job:
        """The held-out reward of the untrained model (with the first seed), a warm-up, and a run."""
        file, own = WORKLOADS[name]
        config, steps = str(EXAMPLES / file), WORKLOAD_STEPS * self.options.steps
        directory = self.work / f"{name}-{seed}"
        warm, base = directory / "warm", {"model.path": self.options.model, **own}
        chain: dict[str, list[str]] = {}
        if seed == self.options.seeds[0]:
            chain["before"] = [*ECHO2, "eval", config, "--json", *words(base)]
        chain["warm-up"] = [*ECHO2, "sft", config, "--to", str(warm), "--column", "answer", "--json"]
        chain["warm-up"] += ["--steps", str(steps), "--rows-per-step", "8"]
        chain["warm-up"] += words({**base, "run.seed": seed, "learner.lr": "2e-5"})
        flags = {**own, "model.path": warm, "run.seed": seed, "run.max_steps": steps, "eval.every": 10}
        chain["run"] = self.run_words(file, directory / "run", flags)

        def read(directory: Path) -> Found:
            told = {step: last_json(directory / f"{step}.out") for step in ("before", "warm-up")}
            warmed = {key: value for key, value in (told["warm-up"] or {}).items() if key != "model"}  # a path
            found = {"untrained": (told["before"] or {}).get("eval/accuracy"), "warm-up": warmed or None}
            return {**{key: value for key, value in found.items() if value is not None}, **read_run(directory)}

        return Job(f"{name}-{seed}", "workloads", chain, read, {"workload": name, "seed": seed})

    def trl(self) -> Iterable[Job]:
        """All sides with the same seeds: one job after the other interleaves them, several at once run one side's
        seeds beside each other and then the next side's. What they saved is judged when all have been trained."""
        sides = [ECHO2_SIDE, *(f"trl-{threads}" for threads in self.options.trl_threads)]
        pairs = [(side, seed) for seed in self.options.seeds for side in sides]
        if self.options.at_once > 1:
            pairs.sort(key=lambda pair: sides.index(pair[0]))
        for side, seed in pairs:
            yield from self._beside(side, seed)

    def _beside(self, side: str, seed: int) -> tuple[Job, Job]:
        """One run of one side, saved every few steps, and the judge of what it saved, outside the clock."""
        given, directory = self.options, self.work / f"beside-{side}-{seed}"
        steps = max(2, round(BESIDE_SHARE * given.steps))
        options = beside.parse(["--config", str(EXAMPLES / "json.toml"), "--steps", str(steps)])
        options.model, options.save_every, options.device = str(given.model), given.save_every, given.device
        options.trl_python = given.trl_python or beside.trl_python(None)
        options.echo2_flags = words({"tasks.source": self.facts["tasks.source"], "head.listen": "127.0.0.1:0"})
        options.echo2_flags += given.flags
        config = load(EXAMPLES / "json.toml", {name: str(value) for name, value in self.facts.items()})
        rows, held_out = self.work / f"train-{seed}.jsonl", self.work / "held_out.jsonl"
        beside.write_problems(config, seed, steps, rows, held_out)
        out = directory / "run"
        if side == ECHO2_SIDE:
            command = [*ECHO2, "run", options.config, "--out", str(out), *map(str, beside.run_flags(options, seed))]
        else:
            threads = int(side.removeprefix("trl-"))
            command = beside.trl_command(options, config, seed, rows, out, threads)
        kept = out / ("checkpoints" if side == ECHO2_SIDE else "weights")
        saved = range(given.save_every, steps + 1, given.save_every)
        weights = [options.model, *(str(kept / f"step_{step}") for step in saved)]
        judged = beside.judge_command(config, weights, held_out, given.samples, given.device)

        def trained(directory: Path) -> Found:
            return {"run": figures.run_figures(out)} if side == ECHO2_SIDE else {}

        def read(directory: Path) -> Found:
            is_ours = side == ECHO2_SIDE
            run = beside.read_run(options, seed, out, 0.0, 0.0) if is_ours else beside.read_trl(out, seed, 1, 0.0)
            found = judged_figures(run, options.model, last_json(directory / "judge.out"))
            figures.clean(out.parent)
            return found

        told, name = {"side": side, "seed": seed}, directory.name
        train = Job(name, "trl-train", {"train": command}, trained, told, beside=f"{side} of trl")
        return train, Job(f"judge-{name}", JUDGED, {"judge": judged}, read, told)

    def lora(self) -> Iterable[Job]:
        for seed in self.options.seeds:
            yield self.facts_job("lora", f"lora-{seed}", {"seed": seed}, {"run.seed": seed}, "lora.toml")

    def low_memory(self) -> Iterable[Job]:
        """What few bits cost in learning: an adapter over the model and over its 4 bits, all weights with moments of 32
        bits and of 8."""
        for seed in self.options.seeds:
            for variant, (config, quantised) in LOW_MEMORY.items():
                flags = {"run.seed": seed, "learner.quantised": quantised}
                told = {"variant": variant, "seed": seed}
                yield self.facts_job("low-memory", f"low-memory-{variant}-{seed}", told, flags, config)

    def forms(self) -> Iterable[Job]:
        """What weights of few bits at the workers cost in learning. `q4_0` may be too coarse for the bound of mismatch:
        its record then says with what figure the worker was turned away."""
        for seed in self.options.seeds:
            for variant, (engine, snapshot) in FORMS.items():
                for bound in FORMS_STALENESS:
                    flags = {"run.seed": seed, "schedule.max_staleness": bound, "workers.engine": engine}
                    flags |= {"model.snapshot_dtype": snapshot}
                    told = {"variant": variant, "S": bound, "seed": seed}
                    yield self.facts_job("forms", f"forms-{variant}-{bound}-{seed}", told, flags)

    def strangers(self) -> Iterable[Job]:
        """The run beside which a stranger works, and what the checks said of it."""
        for seed in self.options.seeds:
            job = self.facts_job("strangers", f"strangers-{seed}", {"seed": seed}, {"run.seed": seed}, "strangers.toml")
            run = self.work / job.name / "run"
            chain = {"run": [sys.executable, joining.__file__, "stranger", str(run), "--", *job.steps["run"]]}

            def read(directory: Path) -> Found:
                return {"trust": last_json(directory / "trust.json"), **read_run(directory)}

            yield Job(job.name, job.part, chain, read, job.told)

    def rates(self) -> Iterable[Job]:
        """Which share of the weights a step changes, by learning rate."""
        steps = min(FEW_STEPS, self.options.steps)
        for rate in RATES:
            name = f"rate-{rate}"
            flags = {"learner.lr": rate, "learner.warmup_steps": 0, "learner.checkpoint_every": 1, "eval.source": ""}
            flags |= {"learner.keep_checkpoints": steps, "run.max_steps": steps}
            job = self.facts_job("rates", name, {"lr": float(rate)}, flags)
            kept = [str(self.work / name / "run" / "checkpoints" / f"step_{step + 1}") for step in range(steps)]
            models = [str(self.options.model), *kept]
            chain = {**job.steps, "changed": [sys.executable, figures.__file__, *models]}
            chain["forms"] = [sys.executable, figures.__file__, "--forms", *models]

            def read(directory: Path) -> Found:
                changed = last_json(directory / "changed.out") or []
                later = {"changed_later": statistics.median(changed[1:])} if changed[1:] else {}
                forms = {"changed_forms": last_json(directory / "forms.out")}
                return {"changed": changed, **forms, **later, **read_run(directory)}

            yield Job(name, job.part, chain, read, job.told)

    def mismatch(self) -> Iterable[Job]:
        """How far a worker's logprobs are from the learner's with the same weights."""
        for precision, (snapshot, compute) in PRECISIONS.items():
            for engine in ENGINES:
                flags: dict[str, object] = {"model.snapshot_dtype": snapshot, "model.compute_dtype": compute}
                flags |= {"schedule.max_staleness": 0, "eval.source": "", "workers.engine": engine}
                flags |= {"run.max_steps": min(FEW_STEPS, self.options.steps)}
                told = {"precision": precision, "engine": engine}
                yield self.facts_job("mismatch", f"mismatch-{precision}-{engine}", told, flags)


#: In the order in which they are made when none is named.
PARTS: dict[str, Callable[[Bench], Iterable[Job]]] = {
    "staleness": Bench.staleness,
    "overlap": Bench.overlap,
    "workloads": Bench.workloads,
    "trl": Bench.trl,
    "mismatch": Bench.mismatch,
    "rates": Bench.rates,
    "lora": Bench.lora,
    "strangers": Bench.strangers,
    "low-memory": Bench.low_memory,
    "forms": Bench.forms,
    "mixed": joining.jobs,
    "distillation": distillation.jobs,
    "self-distillation": distillation.self_jobs,
    "divergences": distillation.divergence_jobs,
}


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """The first seed of every part before the second of any; jobs that must not run beside others later, and the
    judges of what these saved last."""
    last = {job.name: 2 if job.part == JUDGED else bool(job.beside) for job in jobs}
    return sorted(jobs, key=lambda job: (last[job.name], 0 if job.beside else job.told.get("seed", 0)))


def judged_figures(run: beside.Run, model: str, rewards: Mapping[str, float] | None) -> Found:
    """Of one side: the rewards of what it saved, by its own clock.

    Raises:
        UserError: the judge has not said them.
    """
    if rewards is None:
        raise UserError("the judge of the saved weights has said nothing")
    points = [(0.0, rewards[model]), *((point.seconds, rewards[point.weights]) for point in run.points)]
    return {
        "points": [(round(seconds, 2), round(reward, 4)) for seconds, reward in points],
        "seconds_to_threshold": beside.crossing(points, figures.THRESHOLD),
        "step_seconds": run.seconds_per_step,
        "held_out_after": points[-1][1],
        "versions": run.versions,
    }


def ratio(records: Sequence[Found]) -> Found:
    """TRL's seconds to the threshold over echo2's, by seed, if both sides have been measured."""
    times: dict[str, dict[int, float | None]] = {}
    for record in records:
        if record["part"] == JUDGED and "points" in record:
            times.setdefault(record["side"], {})[record["seed"]] = record["seconds_to_threshold"]
    return beside.compare(times) if ECHO2_SIDE in times and len(times) > 1 else {}


def read_run(directory: Path) -> Found:
    found = figures.run_figures(directory / "run")
    figures.clean(directory)
    return found


def table(records: Sequence[Found]) -> list[Found]:
    """For each variant of a part, least, median and most over its seeds of every figure that is one number."""
    told = ("S", "workload", "side", "lr", "precision", "engine", "variant")
    variants: dict[str, list[Found]] = {}
    for record in records:
        if "failed" not in record:
            key = json.dumps({"part": record["part"], **{name: record[name] for name in told if name in record}})
            variants.setdefault(key, []).append(record)
    rows = []
    for key, found in variants.items():
        row: Found = {**json.loads(key), "runs": len(found)}
        for name in dict.fromkeys(name for record in found for name in record):
            values = [one[name] for one in found if isinstance(one.get(name), int | float)]
            if name not in row and name != "seed" and values:
                row[name] = [round(value, 6) for value in (min(values), statistics.median(values), max(values))]
        rows.append(row)
    return rows


def line(record: Found) -> str:
    """A record on one line, as it comes."""
    shown = ["untrained", "held_out_before", "held_out_after", "seconds_to_threshold", "step_seconds", "train_seconds"]
    shown += [
        "rewards_after",
        "advantage_after",
        "divergence_after",
        "sft_after",
        "idle_ratio",
        "staleness_mean",
        "mismatch_lag_0",
        "delta_ratio",
        "changed",
    ]
    said = [
        f"{name} {record[name]:.4g}" if isinstance(record[name], float) else f"{name} {record[name]}"
        for name in shown
        if record.get(name) is not None
    ]
    return f"{record['name']}: " + "  ".join(
        [*said, *([f"FAILED {record['failed'][-300:]}"] if "failed" in record else [])]
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts; which come first: see above"
    )
    parser.add_argument("--model", type=there, default=REPOSITORY / "outputs" / "models" / "smollm2")
    parser.add_argument("--match", default="", help="only jobs with this in their name, e.g. staleness-16-")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at the same time")
    parser.add_argument("--budget-seconds", type=float, default=4 * 3600.0)
    parser.add_argument("--teacher", type=there, help="of part divergences; without, it trains one first")
    parser.add_argument("--distill-config", type=there, help="of part divergences, in place of SmolLM2's")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1], help="of TRL's process: a side for each")
    parser.add_argument("--save-every", type=int, default=2, help="steps between the points of part trl")
    parser.add_argument("--samples", type=int, default=4, help="of each held-out problem, for the judge of part trl")
    parser.add_argument("--trl-python", help="Python of an environment with TRL; default: .venv-trl, made when missing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if NVIDIA_DRIVER.exists() else "cpu")
    parser.add_argument("--work", type=Path, help="where the runs are written (default: outputs/real-model-<time>)")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("flags", nargs="*", help="after --: settings of all runs, e.g. --workers.count 2")
    options = parser.parse_args(arguments)
    options.model = options.model.resolve()
    for name in ("teacher", "distill_config"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).resolve())
    if not (options.model / "config.json").is_file():
        raise UserError(f"--model {options.model} is no model directory. `make smollm` makes one.")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    work = (options.work or REPOSITORY / "outputs" / f"real-model-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    work.mkdir(parents=True)
    bench = Bench(options, work)
    jobs = in_order([job for part in options.only for job in PARTS[part](bench) if options.match in job.name])
    if not jobs:
        raise UserError(f"--match {options.match!r}: no job of {', '.join(options.only)} has that in its name.")
    records: list[Found] = []
    circumstances = {"at_once": options.at_once, "device": device_name(options.device), "steps": options.steps}
    circumstances |= {"flags": options.flags, "budget_seconds": options.budget_seconds, "versions": versions()}

    def record(found: Found) -> None:
        records.append(found)
        print(line(found), flush=True)
        save(
            "real_model",
            {**circumstances, "table": table(records), "beside": ratio(records), "runs": records},
            options.out,
        )

    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    inherited = os.environ.get("PYTHONPATH")
    ours = [REPOSITORY / "src", HERE, HERE.parent]
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, ours), *([inherited] if inherited else [])])
    os.chdir(REPOSITORY)  # the examples name their rows and rewards from here
    run_jobs(jobs, work, options.at_once, options.budget_seconds, environment, record)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers")}


def device_name(device: str) -> str:
    """The GPU as the driver calls it."""
    if device == "cpu":
        return device
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or device


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
