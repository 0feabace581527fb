"""Parts `distillation`, `self-distillation` and `divergences` of `real_model.py`: a pretrained student learns from a
teacher that RL trained, beside rewards alone and beside SFT on what the teacher writes; from itself; and with each form
of the divergence. And the command that makes rows of the teacher's rollouts.

    make bench-real_model ARGS='--only distillation --seeds 0 1 2'
    make bench-real_model ARGS='--only self-distillation'       # the policy is its own teacher
    make bench-real_model ARGS='--only divergences --seeds 0 1 2'
    make bench-real_model ARGS='--only divergences --distill-config examples/distillation.toml \
        --model outputs/models/digit_sorting --teacher outputs/models/digit_sorting_teacher'    # a try: minutes
    make bench-distillation ARGS='ROLLOUTS ROWS'                # or: ARGS='--answered ROWS ROWS'

Each seed is one job. Its teacher is the model that the run with rewards alone ends with, and its students begin as that
run began. Curves have points (rollouts used, seconds, held-out reward): the teacher's training counts for no student.
SFT uses the teacher's rollouts, each once; what it took is under `seconds`, by command, with the start of the process.

Of the divergences each form and seed is one job, and all have one teacher: the model that `--teacher` names, or else
one that is trained first, with rewards. Forms over 1,024 likely tokens are those over the whole vocabulary but for a
hundredth (docs/losses.md); of a smaller vocabulary they are the whole ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import real_model_figures as figures
from crew import ECHO2, Found, Job, last_json, words

from echo2.core.errors import UserError

if TYPE_CHECKING:
    from real_model import Bench

JSON_TOML = str(Path(__file__).resolve().parents[2] / "examples" / "smollm" / "json.toml")
#: Of examples/smollm: rollouts of a step, and of a task.
STEP_ROLLOUTS, TASK_ROLLOUTS = 48, 8
RATE = "2e-5"
#: Taught runs, and their settings beside those of distill.toml.
TAUGHT = {"advantage": {}, "divergence": {"distill.divergence": "{top_k = 16}"}}
#: Forms of part divergences: the first is an advantage of the sampled tokens, the others are losses.
ADVANTAGE = "reverse-advantage"
BETAS = {"reverse": 1.0, "jensen-shannon": 0.5, "forward": 0.0}
TOP_K = (16, 1024)
DIVERGENCES = {ADVANTAGE: ""} | {
    f"{name}-{top_k}": f"{{top_k = {top_k}, beta = {beta}}}" for name, beta in BETAS.items() for top_k in TOP_K
}
#: Steps of SFT after which a student is evaluated, in shares of the others' steps: each is a training of its own, for
#: the rate falls to nothing at the end of one.
SFT_SHARES = (0.25, 0.5, 1.0)


def jobs(bench: Bench) -> Iterable[Job]:
    for seed in bench.options.seeds:
        yield _job(bench, seed)


def _job(bench: Bench, seed: int) -> Job:
    steps, name = bench.options.steps, f"distillation-{seed}"
    directory = bench.work / name
    teacher, rollouts, rows = directory / "teacher", directory / "rollouts.jsonl", directory / "rows.jsonl"
    common = {**bench.facts, "run.max_steps": steps, "run.seed": seed, "learner.checkpoint_every": steps}
    chain = {"run": bench.run_words("json.toml", directory / "rewards" / "run", common)}
    chain["export"] = [*ECHO2, "export", str(directory / "rewards" / "run"), "--to", str(teacher)]
    for taught, own in TAUGHT.items():
        flags = {**common, "distill.teacher": teacher, **own}
        chain[taught] = bench.run_words("distill.toml", directory / taught / "run", flags)
    tasks = steps * STEP_ROLLOUTS // TASK_ROLLOUTS
    sampled = {"eval.source": bench.facts["tasks.source"], "eval.limit": tasks, "eval.samples": TASK_ROLLOUTS}
    told = ["--model", str(teacher), "--to", str(rollouts), "--json", *words(sampled)]
    chain["sample"] = [*ECHO2, "eval", JSON_TOML, *told]
    chain["rows"] = [sys.executable, __file__, str(rollouts), str(rows)]
    for length in _sft_steps(steps):
        student = directory / f"sft-{length}"
        flags = {**bench.facts, "tasks.source": rows, "learner.lr": RATE, "run.seed": seed}
        chain[student.name] = [*ECHO2, "sft", JSON_TOML, "--to", str(student), "--column", "answer", "--json"]
        chain[student.name] += ["--steps", str(length), "--rows-per-step", str(STEP_ROLLOUTS), *words(flags)]
        held_out = words({"eval.source": bench.facts["eval.source"]})
        chain[f"eval-{length}"] = [*ECHO2, "eval", JSON_TOML, "--model", str(student), "--json", *held_out]

    return Job(name, "distillation", chain, lambda directory: read(directory, steps), {"seed": seed}, run="rewards/run")


def self_jobs(bench: Bench) -> Iterable[Job]:
    """The policy teaches itself from a prompt that has the answer; no reward is trained on."""
    for seed in bench.options.seeds:
        name = f"self-distillation-{seed}"
        rows = bench.work / name / "rows.jsonl"
        flags = {"tasks.source": rows, "run.seed": seed, "distill.teacher": "self"}
        job = bench.facts_job("self-distillation", name, {"seed": seed}, flags, "distill.toml")
        made = [sys.executable, __file__, "--answered", str(bench.facts["tasks.source"]), str(rows)]
        yield replace(job, steps={"rows": made, **job.steps})


def divergence_jobs(bench: Bench) -> Iterable[Job]:
    """The teacher, if none is named, and then a run of each form.

    Raises:
        UserError: the runs would begin before their teacher is there.
    """
    options, teacher = bench.options, bench.options.teacher
    config = str(options.distill_config or "distill.toml")
    given = {"model.path": bench.facts["model.path"]} if options.distill_config else bench.facts
    common = {**given, "run.max_steps": options.steps}
    if teacher is None:
        if options.at_once > 1:
            raise UserError("Part divergences trains its teacher first: name one with --teacher, or take --at-once 1.")
        job = bench.facts_job("divergences", name := "divergences-teacher", {"variant": "teacher"}, {})
        teacher, run = bench.work / name / "teacher", str(bench.work / name / "run")
        # The checkpoint of the last step is exported before the figures are read, which removes it.
        yield replace(job, steps={**job.steps, "export": [*ECHO2, "export", run, "--to", str(teacher)]})
    for seed in options.seeds:
        for form, divergence in DIVERGENCES.items():
            name, told = f"divergences-{form}-{seed}", {"variant": form, "seed": seed}
            flags = {**common, "run.seed": seed, "distill.teacher": teacher}
            flags |= {"distill.divergence": divergence} if divergence else {}
            steps = {"run": bench.run_words(config, bench.work / name / "run", flags)}
            yield Job(name, "divergences", steps, read_taught, told)


def read_taught(directory: Path) -> Found:
    """The figures of a run with a teacher, and how far it was from that at each step."""
    run = directory / "run"
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    distances = [row.get("distill/reverse_kl/mean") for row in rows]
    found = {**figures.run_figures(run), "reverse_kl": [round(one, 4) for one in distances if one is not None]}
    figures.clean(directory)
    return found


def _sft_steps(steps: int) -> list[int]:
    return sorted({max(1, round(share * steps)) for share in SFT_SHARES})


def read(directory: Path, steps: int) -> Found:
    """The curve of each student, and its last point; what was not reached is left out."""
    curves: dict[str, list[list[float | None]]] = {}
    found: Found = {}
    for arm in ("rewards", *TAUGHT):
        if (directory / arm / "run" / "metrics.jsonl").is_file():
            run = figures.run_figures(directory / arm / "run")
            curves[arm] = [[step * STEP_ROLLOUTS, seconds, reward] for step, seconds, reward in run["held_out"]]
            found[f"{arm}_run"] = run
            figures.clean(directory / arm)
    held_out = {length: last_json(directory / f"eval-{length}.out") for length in _sft_steps(steps)}
    curves["sft"] = [
        [length * STEP_ROLLOUTS, None, round(told["eval/accuracy"], 4)] for length, told in held_out.items() if told
    ]
    after = {f"{arm}_after": curve[-1][-1] for arm, curve in curves.items() if curve}
    if sampled := last_json(directory / "sample.out"):
        after["teacher_on_training_tasks"] = round(sampled["eval/accuracy"], 4)
    return {"curves": curves, **after, **found}


def answered_rows(records: Iterable[str]) -> Iterable[str]:
    """Rows for `echo2 sft`, one for each rollout of the file of `echo2 eval --to`, in an order that mixes the tasks:
    first one rollout of every task, then another."""
    groups = [json.loads(record) for record in records]
    for number in range(max((len(group["rollouts"]) for group in groups), default=0)):
        for group in groups:
            if number < len(group["rollouts"]):
                prompt = [{"role": role, "content": content} for role, content in group["prompt"]]
                yield json.dumps({"prompt": prompt, "answer": group["rollouts"][number]["text"]})


def told_rows(rows: Iterable[str]) -> Iterable[str]:
    """Rows whose column `teacher_prompt` is their prompt, the answer as if it had been given, and the question again. A
    small model repeats what it said; told "the right answer is ..." it does not say it."""
    for row in map(json.loads, rows):
        said = {"role": "assistant", "content": row["answer"]}
        yield json.dumps({**row, "teacher_prompt": [*row["prompt"], said, row["prompt"][-1]]})


def main(arguments: Sequence[str]) -> None:
    make = told_rows if arguments[0] == "--answered" else answered_rows
    source, to = map(Path, arguments[-2:])
    with source.open(encoding="utf-8") as records, to.open("w", encoding="utf-8") as rows:
        for row in make(records):
            rows.write(row + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
