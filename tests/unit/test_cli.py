"""The command line: help, exit statuses, flags in any place, and nothing started where nothing should be."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from echo2 import __version__
from echo2.cli import build_parser, main, settings_from_flags, split_settings
from echo2.config import all_fields, build
from echo2.errors import UserError
from echo2.runtime.rundir import RunDir, create

COMMANDS = ("run", "head", "learner", "worker", "status", "audit", "replay", "eval", "export")
SOURCE = Path(__file__).parents[2] / "src"


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What argparse prints before it exits with status 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a user's mistake gives."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration that passes every check made before a process starts."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = tmp_path / "my.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[tasks]\nsource = "digit_sorting"\n[reward]\nfunctions = ["exact_match"]\n'
    )
    return path


@pytest.fixture
def empty_run(tmp_path: Path) -> RunDir:
    return create(tmp_path / "run", build({}, "my.toml"), resume=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: echo2 {command}" in capsys.readouterr().out


def test_help_lists_every_command_and_run_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert all(f"--{section}.{name} (" in text for section, name, *_ in all_fields())


def test_help_is_there_within_a_second_and_without_torch() -> None:
    code = "import sys, echo2.cli\ntry: echo2.cli.main(['--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0  # CPU time: the machine is shared


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"echo2 {__version__}\n"


def test_an_unknown_command_or_flag_is_refused(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    assert "invalid choice: 'rnu'" in usage_error(capsys, "rnu")
    assert "unrecognized arguments: --jsn" in usage_error(capsys, "status", "--jsn")
    assert "unrecognized arguments: --learner.lr" in usage_error(capsys, "status", "--learner.lr", "1")
    assert "unrecognized arguments: more" in usage_error(capsys, "run", str(config_file), "more")
    assert mistake(capsys, "run", str(config_file), "--lr", "1").endswith("Did you mean learner.lr?")
    assert mistake(capsys, "run", str(config_file), "--learner.lrr=1").endswith("Did you mean learner.lr?")
    assert mistake(capsys, "run", str(config_file), "--learner.lr") == "error: --learner.lr needs a value."


def test_dotted_flags_go_anywhere_and_take_any_value() -> None:
    settings, others = split_settings(
        ["run", "--learner.lr", "-1e-5", "my.toml", "--run.out=a=b", "--json", "--out", "./x.y", "--run.seed"]
    )
    assert others == ["run", "my.toml", "--json", "--out", "./x.y"]
    assert settings == [("--learner.lr", "-1e-5"), ("--run.out", "a=b"), ("--run.seed", None)]
    assert settings_from_flags(settings[:2]) == {"learner.lr": "-1e-5", "run.out": "a=b"}
    assert settings_from_flags([("--run.max-steps", "1"), ("--run.max_steps", "2")]) == {"run.max_steps": "2"}
    with pytest.raises(UserError, match=r"--run\.seed needs a value"):
        settings_from_flags(settings)


def test_a_dry_run_prints_the_resolved_configuration_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["run", "--learner.lr", "1e-3", str(config_file), "--out", str(out), "--dry-run"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert build(resolved, "config.json").learner.lr == 1e-3
    assert resolved["run"]["out"] == str(out)
    assert not out.exists()


def test_a_dry_run_finds_mistakes(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    assert "exact_mach" in mistake(capsys, "run", str(config_file), "--dry-run", "--reward.functions", '["exact_mach"]')


def test_a_directory_in_use_is_left_alone(
    capsys: pytest.CaptureFixture[str], config_file: Path, empty_run: RunDir
) -> None:
    before = empty_run.config.read_text()
    assert "--resume" in mistake(capsys, "run", str(config_file), "--out", str(empty_run.path))
    assert empty_run.config.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "NOWHERE.toml"], "Cannot read the config file NOWHERE.toml"),
        (["head", "NOWHERE"], "Cannot read the config file NOWHERE"),
        (["learner", "NOWHERE"], "NOWHERE is not a run directory"),
        (["worker", "nonsense"], "'nonsense' is not a ticket"),
        (["status", "NOWHERE"], "NOWHERE has no status yet"),
        (["audit", "NOWHERE"], "There is no ledger NOWHERE/ledger.sqlite"),
        (["replay", "NOWHERE"], "Cannot read NOWHERE/events.jsonl"),
        (["eval", "NOWHERE"], "Cannot read the config file NOWHERE"),
        (["export", "NOWHERE", "--to", "x"], "NOWHERE is not a run directory"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, arguments: list[str], words: str) -> None:
    nowhere = str(tmp_path / "nowhere")
    done = subprocess.run(
        [sys.executable, "-m", "echo2", *(argument.replace("NOWHERE", nowhere) for argument in arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {words.replace('NOWHERE', nowhere)}")


def test_a_run_without_a_checkpoint_has_nothing_to_evaluate_or_export(
    capsys: pytest.CaptureFixture[str], empty_run: RunDir, tmp_path: Path
) -> None:
    message = f"error: {empty_run.path} has no checkpoint; there are: none yet."
    assert mistake(capsys, "eval", str(empty_run.path)) == message
    assert mistake(capsys, "export", str(empty_run.path), "--to", str(tmp_path / "model")) == message
    assert "no checkpoint step_3" in mistake(capsys, "eval", str(empty_run.path), "--step", "3")


def test_status_takes_the_newest_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "No run found below outputs/" in mistake(capsys, "status")
    create(Path("outputs/a"), build({}, "my.toml"), resume=False)
    assert "outputs/a has no status yet" in mistake(capsys, "status")


def test_an_interrupted_command_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config_file: Path
) -> None:
    """The configuration's task class does what Ctrl-C does."""
    interrupting = tmp_path / "interrupting.py"
    interrupting.write_text("class Tasks:\n    def __init__(self):\n        raise KeyboardInterrupt\n")
    assert main(["run", str(config_file), "--dry-run", "--tasks.source", f"{interrupting}:Tasks"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_a_worker_says_where_it_listens_and_whether_it_gives_weights_on() -> None:
    parse = build_parser().parse_args
    options = parse(["worker", "TICKET", "--listen", "0.0.0.0:7342", "--advertise", "198.51.100.7", "--no-relay"])
    assert (options.listen, options.advertise, options.no_relay) == ("0.0.0.0:7342", "198.51.100.7", True)
    options = parse(["worker", "TICKET"])
    assert (options.listen, options.advertise, options.no_relay) == ("", "", False)
