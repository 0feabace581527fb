"""Mistakes of the user that show only while a run goes on: one clear error, exit status 2, and `--resume` goes on."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import REPOSITORY, Run, free_port

SMALL = ("--run.max_steps=6", "--learner.checkpoint_every=2", "--workers.count=1")


def assert_whole(run: Run, num_groups: int) -> None:
    """Every group of the finished run is accounted for once, and its decisions can be replayed."""
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"], audit["open"]) == (0, 0, 0)
    assert audit["issued"] == audit["trained"] + sum(audit["retired"].values())
    assert audit["trained"] == num_groups
    assert run.command("replay")["num_different"] == 0


def test_a_reward_that_raises_stops_the_run_and_a_repaired_one_goes_on(sort_model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "my_reward.py"
    reward.write_text("def score(completions, **columns):\n    raise ValueError('two\\nlines')\n")
    run = Run(tmp_path / "run", sort_model, *SMALL, f'--reward.functions=["{reward}:score"]').start()
    error = run.refused()
    assert f"{reward}:2 in score: ValueError: two lines" in error
    assert "8 groups failed in a row" in error
    reward.write_text("def score(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    summary = run.start("--resume").finish()
    assert summary["steps"] == 6
    assert_whole(run, summary["groups"]["trained"])


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_loses_nothing(sort_model: Path, tmp_path: Path) -> None:
    """No file of the run may grow beyond what a few steps need, as on a disk that fills up."""
    run = Run(tmp_path / "run", sort_model, *SMALL)
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old_limits[1]))  # for the children; nothing here writes as much
    try:
        run.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
    assert any(word in run.refused() for word in ("Cannot write", "was not saved", "too large", "full"))
    summary = run.start("--resume").finish()
    assert summary["steps"] == 6
    assert_whole(run, 6 * 16)


@pytest.mark.slow
def test_a_disk_that_fills_up_after_some_steps_loses_no_group(sort_model: Path, tmp_path: Path) -> None:
    """The metrics of the first step can't be written: `metrics.jsonl` is a device without room."""
    run = Run(tmp_path / "run", sort_model, *SMALL)
    run.out.mkdir()
    (run.out / "metrics.jsonl").symlink_to("/dev/full")
    error = run.start().refused()
    assert "metrics.jsonl: No space left on device. Free some space, then --resume." in error
    (run.out / "metrics.jsonl").unlink()
    summary = run.start("--resume").finish()
    assert summary["steps"] == 6
    assert_whole(run, 6 * 16)


@pytest.mark.slow
def test_the_error_names_a_port_in_use_and_another_port_works(sort_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", port := free_port())):
        run = Run(tmp_path / "run", sort_model, *SMALL, f"--head.listen=127.0.0.1:{port}").start()
        error = run.refused()
    assert f"head.listen = '127.0.0.1:{port}' cannot be used" in error
    assert "Choose another port" in error
    assert run.start().finish()["steps"] == 6, "the port is free again, and nothing is in the way"


@pytest.mark.slow
def test_echo2_head_reports_the_same_mistakes_as_echo2_run(sort_model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", sort_model, *SMALL)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["head", str(run.config), "--out", str(run.out), f"--head.listen=127.0.0.1:{port}"]
        done = subprocess.run(
            [sys.executable, "-m", "echo2", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == done.stderr.splitlines()[-1:]


@pytest.mark.slow
def test_fewer_steps_than_were_trained_are_refused(sort_model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", sort_model, *SMALL)
    assert run.start().finish()["steps"] == 6
    assert "run.max_steps = 3, but 6 steps are trained already" in run.start("--resume", "--run.max_steps=3").refused()
    assert run.start("--resume").finish()["steps"] == 6, "a finished run has nothing left to do, and says so"
    assert_whole(run, 6 * 16)
    assert run.command("status")["state"] == "finished: all steps are trained"


@pytest.mark.slow
def test_an_export_is_a_model_and_is_never_written_over(sort_model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--run.max_steps=1")
    run.start().finish()
    target = tmp_path / "model"
    export = [sys.executable, "-m", "echo2", "export", str(run.out), "--to", str(target)]
    done = subprocess.run(export, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == f"exported step_1 to {target}\n"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in target.iterdir()}
    assert not (target / "optimizer.safetensors").exists()
    again = subprocess.run(export, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith(f"error: {target} exists already.")
