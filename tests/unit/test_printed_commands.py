"""The commands that echo2 prints can be pasted into a shell, whatever the run directory is called."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from echo2.config import build
from echo2.config.rundir import RunDir, claimed
from echo2.core.errors import UserError
from echo2.launch.start import joining
from echo2.views.display import next_steps


def test_the_end_of_a_run_names_an_adapter_as_one_and_what_to_do_next(tmp_path: Path) -> None:
    step = tmp_path / "my runs" / "checkpoints" / "step_40"
    step.mkdir(parents=True)
    told = {"directory": str(tmp_path / "my runs"), "checkpoint": 40, "steps": 40}
    assert f"is in {step}, a Hugging Face directory." in next_steps(told)[0]
    (step / "adapter_config.json").write_text("{}")
    lines = next_steps(told)
    assert f"is in {step}, a PEFT adapter." in lines[0]
    commands = [command for line in lines[1:] for command in re.findall(r"echo2 [^:]*?(?=   |$)", line)]
    assert [shlex.split(command)[2] for command in commands] == [told["directory"]] * 4


def test_a_start_says_how_machines_join_a_run_whose_name_has_spaces(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "my run")
    _, own, others = joining(rundir, build({"head": {"listen": "0.0.0.0:7341"}}, "my.toml"))
    assert shlex.split(own.partition(": ")[2]) == ["echo2", "worker", f"@{rundir.ticket}"]
    assert shlex.split(others.partition(": ")[2]) == ["echo2", "invite", str(rundir.path)]


def test_the_error_about_a_directory_in_use_names_a_command_to_inspect_it(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    with claimed(path, "run"), pytest.raises(UserError) as refused, claimed(path, "run"):
        pass
    assert shlex.split(re.findall(r"see `([^`]+)`", str(refused.value))[0]) == ["echo2", "status", str(path)]
