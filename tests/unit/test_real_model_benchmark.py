"""The pretrained model's benchmark: which jobs there are and in what order, what a job that fails or is cut off leaves,
and what is read of a run directory."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import distillation
import pytest
import real_model as bench
import real_model_figures as figures
from crew import Job, resident_peak, run_jobs
from time_to_accuracy import Point, Run

from echo2.config import build, to_json
from echo2.core.errors import UserError


def job(name: str, *scripts: str, beside: str = "", read: Any = lambda directory: {"files": 1}) -> Job:
    steps = {f"step{number}": [sys.executable, "-c", script] for number, script in enumerate(scripts)}
    return Job(name, "part", steps, read, {"seed": 0}, beside)


def run(tmp_path: Path, jobs: list[Job], at_once: int = 2, budget_seconds: float = 1000.0) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    run_jobs(
        jobs, tmp_path / "work", at_once, budget_seconds, {"TOLD": "yes"}, lambda one: found.update({one["name"]: one})
    )
    return found


def test_a_job_that_fails_is_written_down_and_the_others_go_on(tmp_path: Path) -> None:
    def unreadable(directory: Path) -> dict[str, Any]:
        raise FileNotFoundError(directory.name)

    found = run(
        tmp_path,
        [
            job("good", "import os; print(os.environ['TOLD'])", "print('second')"),
            job("bad", "import sys; sys.exit('these are the last words')", "print('never')"),
            job("silent", "print('out')", read=unreadable),
        ],
    )
    assert "failed" not in found["good"]
    assert (found["good"]["files"], found["good"]["seed"], set(found["good"]["seconds"])) == (1, 0, {"step0", "step1"})
    assert (tmp_path / "work" / "good" / "step0.out").read_text() == "yes\n"
    assert "ended with status 1: these are the last words" in found["bad"]["failed"]
    assert not (tmp_path / "work" / "bad" / "step1.out").exists()
    assert found["silent"]["failed"] == "its figures could not be read: FileNotFoundError: silent"


def test_a_run_cut_off_by_its_time_limit_is_marked_and_still_read(tmp_path: Path) -> None:
    wait = "import time\nopen({!r}, 'w').close()\nwhile True: time.sleep(0.01)"
    began = tmp_path / "began"
    found: dict[str, dict[str, Any]] = {}
    now = 0

    def clock() -> float:
        """Time goes on, by itself, once the first job is at work."""
        nonlocal now
        now += began.exists()
        return float(now)

    jobs = [job("cut", wait.format(str(began))), job("late", "print('never')")]
    run_jobs(jobs, tmp_path / "work", 1, 5.0, {}, lambda one: found.update({one["name"]: one}), clock)
    assert found["cut"]["failed"] == "interrupted in its step 'step0': the time was over"
    assert found["cut"]["files"] == 1
    assert found["late"]["failed"] == "not begun: the time was over"


def test_sides_of_a_comparison_do_not_run_beside_each_other(tmp_path: Path) -> None:
    """A job's directory is made as it begins: those that are there as each ends are of the jobs that had begun."""
    names, begun = ("a1", "a2", "b1", "b2"), list[list[str]]()
    jobs = [job(name, "", beside=name[0]) for name in names]
    run_jobs(jobs, tmp_path, 4, 1000.0, {}, lambda one: begun.append(sorted(path.name for path in tmp_path.iterdir())))
    assert begun == [["a1", "a2"], ["a1", "a2"], list(names), list(names)]


def test_the_peak_memory_of_a_living_and_of_an_ended_process() -> None:
    assert resident_peak(1 << 30) == 0
    if sys.platform == "linux":
        assert resident_peak(os.getpid()) > 1_000_000


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def all_jobs(tmp_path: Path) -> list[Job]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = bench.parse(["--model", str(model), "--device", "cpu", "--trl-python", "python", "--steps", "2"])
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(bench.REPOSITORY)
        made = bench.Bench(options, tmp_path)
        return [one for part in bench.PARTS.values() for one in part(made)]


def test_every_job_comes_once_and_the_first_seed_of_all_variants_first(all_jobs: list[Job]) -> None:
    assert len({one.name for one in all_jobs}) == len(all_jobs)
    assert Counter(one.part for one in all_jobs) == {
        "staleness": 18,
        "overlap": 12,
        "workloads": 12,
        "trl-train": 6,
        "trl": 6,
        "mismatch": 6,
        "rates": 3,
        "lora": 3,
        "strangers": 3,
        "low-memory": 12,
        "forms": 24,
        "mixed": 3,
        "distillation": 3,
        "self-distillation": 3,
        "divergences": 1 + 3 * 7,
    }
    ordered = bench.in_order(all_jobs)
    assert [one.told["S"] for one in ordered[:6]] == list(bench.STALENESS)
    assert [one.told.get("seed", 0) for one in ordered[:-12]] == [0] * 48 + [1] * 38 + [2] * 38
    assert [one.told["side"] for one in ordered[-12:]] == ["echo2", "trl-1"] * 6
    assert [one.part for one in ordered[-12:]] == ["trl-train"] * 6 + ["trl"] * 6  # judges come last


def test_every_generated_configuration_is_valid(all_jobs: list[Job]) -> None:
    """Settings that are misspelled, or out of bounds, would be found on the rented machine."""
    seen = 0
    for one in all_jobs:
        for command in one.steps.values():
            if "run" not in command or "echo2" not in command:
                continue
            words = list(command[command.index("run") + 1 :])
            config, flags = words[0], words[1:]
            pairs = {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
            assert pairs.pop("out").endswith("/run")
            bench.load(Path(config), pairs)
            seen += 1
    assert seen == 18 + 12 + 12 + 3 + 6 + 3 + 3 + 3 + 12 + 24 + 3 + 3 * 3 + 3 + 1 + 3 * 7


def test_rows_of_a_teacher_mix_its_tasks() -> None:
    records = [
        {"prompt": [["user", "one?"]], "rollouts": [{"text": "1"}, {"text": "2"}]},
        {"prompt": [["system", "short"], ["user", "two?"]], "rollouts": [{"text": "3"}]},
    ]
    rows = [json.loads(row) for row in distillation.answered_rows(map(json.dumps, records))]
    assert [row["answer"] for row in rows] == ["1", "3", "2"]
    assert rows[1]["prompt"] == [{"role": "system", "content": "short"}, {"role": "user", "content": "two?"}]


def test_a_policy_that_teaches_itself_reads_the_answer_before_the_question() -> None:
    row = {"prompt": [{"role": "system", "content": "short"}, {"role": "user", "content": "two?"}], "answer": "2"}
    (told,) = (json.loads(one) for one in distillation.told_rows([json.dumps(row)]))
    assert [one["content"] for one in told["teacher_prompt"]] == ["short", "two?", "2", "two?"]
    assert [one["role"] for one in told["teacher_prompt"]] == ["system", "user", "assistant", "user"]
    assert {name: told[name] for name in row} == row


def test_curves_of_students_have_what_was_reached(tmp_path: Path) -> None:
    (tmp_path / "eval-10.out").write_text('{"eval/accuracy": 0.52}\n')
    (tmp_path / "eval-20.out").write_text("")
    (tmp_path / "sample.out").write_text('{"eval/accuracy": 0.9}\n')
    found = distillation.read(tmp_path, 20)
    assert found == {"curves": {"sft": [[480, None, 0.52]]}, "sft_after": 0.52, "teacher_on_training_tasks": 0.9}


def test_the_forms_have_one_teacher_which_comes_first(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    words = ["--model", str(model), "--seeds", "0", "1"]
    first, *students = distillation.divergence_jobs(bench.Bench(bench.parse(words), tmp_path / "own"))
    teacher = first.steps["export"][-1]
    assert [one.steps["run"][one.steps["run"].index("--distill.teacher") + 1] for one in students] == [teacher] * 14
    assert len({tuple(one.steps["run"]) for one in students}) == 14
    with pytest.raises(UserError, match="name one with --teacher"):
        list(distillation.divergence_jobs(bench.Bench(bench.parse([*words, "--at-once", "2"]), tmp_path / "two")))
    given = [*words, "--teacher", str(model), "--at-once", "2", "--distill-config", "examples/distillation.toml"]
    jobs = list(distillation.divergence_jobs(bench.Bench(bench.parse(given), tmp_path / "given")))
    assert len(jobs) == 14
    assert all("--tasks.source" not in one.steps["run"] for one in jobs)


def test_flags_after_the_dashes_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = bench.parse(["--model", str(tmp_path), "--", "--workers.count", "3", "--eval.every", "7"])
    command = bench.Bench(options, tmp_path).run_words("json.toml", tmp_path, {"eval.every": 5})
    assert command[-4:] == ["--eval.every", "7", "--workers.count", "3"]
    assert command.count("--eval.every") == 1


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make smollm"):
        bench.parse(["--model", str(tmp_path)])


def test_the_table_is_over_seeds_and_without_what_failed() -> None:
    records = [
        {"name": "a", "part": "staleness", "S": 1, "seed": seed, "held_out_after": reward, "held_out": [[0, 0, 1]]}
        for seed, reward in enumerate((0.5, 0.7, 0.6))
    ]
    records += [{"name": "b", "part": "staleness", "S": 1, "seed": 3, "failed": "it did", "held_out_after": 0.0}]
    (row,) = bench.table(records)
    assert row == {"part": "staleness", "S": 1, "runs": 3, "held_out_after": [0.5, 0.6, 0.7]}


def test_a_side_is_judged_by_its_own_clock_and_the_ratio_is_trl_s_time_over_ours() -> None:
    run = Run("trl-1", 0, 0.0, 0.0, (Point(2, 10.0, "a"), Point(4, 20.0, "b")), {"trl": "1"})
    theirs = bench.judged_figures(run, "model", {"model": 0.1, "a": 0.6, "b": 0.8})
    assert theirs["points"] == [(0.0, 0.1), (10.0, 0.6), (20.0, 0.8)]
    assert theirs["seconds_to_threshold"] == pytest.approx(15.0)
    with pytest.raises(UserError, match="has said nothing"):
        bench.judged_figures(run, "model", None)
    records = [{"part": "trl", "side": "trl-1", "seed": 0, **theirs}]
    assert bench.ratio(records) == {}
    records += [{"part": "trl", "side": "echo2", "seed": 0, "points": [], "seconds_to_threshold": 5.0}]
    assert bench.ratio(records)["ratio_by_seed"] == {0: pytest.approx(3.0)}


# ---- what is read of a run -------------------------------------------------------------------------------------------


def test_figures_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(to_json(build({"model": {"path": "no/such-model-here"}}, "test")))
    lease = {"now": 100.0, "commands": [{"type": "GrantLeases", "leases": [{"group": {"kind": "train"}}]}]}
    (tmp_path / "events.jsonl").write_text(json.dumps(lease) + "\n")
    rows: list[dict[str, Any]] = [{"step": 0, "eval/version": 0, "eval/accuracy": 0.1}]
    for step in range(1, 5):
        row = {
            "step": step,
            "time/unix": 100.0 + 10 * step,
            "time/step": 10.0,
            "time/wait_for_batch": 9.0 if step < 3 else 2.0,
        }
        rows.append({**row, "time/train": 8.0, "off_policy/max": step % 3, "reward/mean": 0.2 * step})
    rows[2] |= {"eval/version": 2, "eval/accuracy": 0.6}
    rows[4] |= {"eval/version": 4, "eval/accuracy": 0.8}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures.run_figures(tmp_path)
    assert found["held_out"] == [(0, 0.0, 0.1), (2, 20.0, 0.6), (4, 40.0, 0.8)]
    assert found["seconds_to_threshold"] == pytest.approx(30.0)
    assert (found["idle_once_under_way"], found["staleness_max"], found["train_run_seconds"]) == (0.2, 2, 40.0)
    assert "idle_ratio" not in found  # the run did not end
    assert found["forecast"] == {}


def test_a_run_without_a_step_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has trained no step"):
        figures.run_figures(tmp_path)


def test_bytes_of_forms_that_a_step_changes_are_counted_by_published_dtype(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    name, weight = "model.layers.0.mlp.up_proj.weight", torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    changed = weight.clone()
    changed[0, 0] += 1.0  # an item of one of eight blocks
    models = [tmp_path / "before", tmp_path / "after"]
    for directory, values in zip(models, (weight, changed), strict=True):
        directory.mkdir()
        save_file({name: values, "model.norm.weight": torch.ones(64)}, directory / "model.safetensors")
    same, other = figures.changed_forms([models[0], *models])
    assert {one[name] for one in same.values() for name in ("bytes", "blocks")} == {0.0}
    assert all(same[kind]["packed"] <= other[kind]["packed"] for kind in same)
    assert {one["blocks"] for one in other.values()} == {0.125}
    assert 0.0 < other["q8_0 of bfloat16"]["bytes"] <= 0.125
    (less,) = figures.changed_forms(models, times=1e-6)
    assert less["q8_0 of bfloat16"]["bytes"] == 0.0
    assert set(other) == {f"{form} of {dtype}" for form in figures.PUBLISHED_FORMS for dtype in ("bfloat16", "float32")}
