"""The command line: help, exit statuses, flags in any place, and nothing started where nothing should be."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echo2 import __version__
from echo2.cli import build_parser, main
from echo2.config import all_fields, build
from echo2.config.rundir import RunDir, create
from echo2.launch.start import resolve
from echo2.learner.core import checkpoint
from echo2.transport.identity import RunIdentity
from echo2.worker import joining
from model_cases import model_directory

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


def test_a_mistake_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["status", str(tmp_path)], ["worker", "no ticket"], ["run", str(tmp_path / "no.toml")]):
        plain = mistake(capsys, *command)
        assert main([*command, "--json"]) == 2
        told = json.loads(capsys.readouterr().err)
        assert told["status"] == 2
        assert told["error"] in plain


def test_a_demo_whose_model_cannot_be_built_says_why(tmp_path: Path) -> None:
    """In the words of the process that builds it, and without its traceback."""
    (tmp_path / "outputs/models/digit_sorting").mkdir(parents=True)
    (tmp_path / "outputs/models/digit_sorting/notes.txt").write_text("not a model\n")
    command = [sys.executable, "-m", "echo2", "demo"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(SOURCE)}
    )
    *_, why, what = done.stderr.splitlines()
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert why == "error: outputs/models/digit_sorting exists and is not a model directory. Name another, or remove it."
    assert what == "error: The demo's model was not built in outputs/models/digit_sorting. The lines above say why."


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration that passes every check made before a process starts."""
    model = model_directory(tmp_path / "model")
    path = tmp_path / "my.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[tasks]\nsource = "digit_sorting"\n[reward]\nfunctions = ["exact_match"]\n'
        "[sampling]\nmax_tokens = 8\n"
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
    assert all(f"--{section}.{name} " in text for section, name, *_ in all_fields())
    assert '--schedule.order any | frontier ("any")' in text


def test_every_argument_is_explained_in_lines_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (commands,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert set(COMMANDS) < set(commands.choices)
    for name, parser in commands.choices.items():
        assert all(action.help for action in parser._actions), name
        assert max(map(len, parser.format_help().splitlines())) <= 80, name


def test_help_is_there_within_a_second_and_without_torch() -> None:
    """CPU time, since the machine is shared; by its own account, since other children may end meanwhile."""
    code = """if True:
        import resource, sys, echo2.cli
        try:
            echo2.cli.main(["--help"])
        except SystemExit:
            used = resource.getrusage(resource.RUSAGE_SELF)
            print(used.ru_utime + used.ru_stime, file=sys.stderr)
            sys.exit("torch" in sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert float(done.stderr) < 1.0


TORCHLESS = {
    "chat": ["nowhere"],
    "eval": ["{examples}/jsonl.toml"],
    "learner": ["nowhere"],
    "probe": ["{examples}/jsonl.toml"],
    "run": ["{examples}/jsonl.toml", "--dry-run"],
    "serve": ["{examples}/serve.toml", "--out", "{out}"],
    "sft": ["{examples}/jsonl.toml", "--to", "{out}", "--steps", "1", "--column", "answer"],
}


def test_commands_that_compute_report_that_torch_is_missing(tmp_path: Path) -> None:
    """One command after the other, in one process without torch."""
    code = """if True:
        import json, sys
        sys.modules["torch"] = None
        from echo2.cli import main
        for words in json.loads(sys.argv[1]):
            print(main(words), flush=True)
    """
    places = {"examples": SOURCE.parent / "examples", "out": tmp_path / "out"}
    words = [[command, *(word.format(**places) for word in more)] for command, more in TORCHLESS.items()]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(words)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[1::2] == ["2"] * len(TORCHLESS), done.stdout
    for command, said in zip(TORCHLESS, done.stdout.splitlines()[::2], strict=True):
        assert "pip install 'echo2[train]'" in said, command
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize(("output", "status"), [("/dev/full", 3), ("closed pipe", 0)])
def test_an_output_that_takes_nothing_ends_a_command_without_a_traceback(output: str, status: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if output == "/dev/full" else writer, "w", encoding="utf-8") as file:
        command = [
            sys.executable,
            "-m",
            "echo2",
            "simulate",
            str(SOURCE.parent / "simulations" / "steady.toml"),
            "--json",
        ]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(command, check=False, stdout=file, stderr=subprocess.PIPE, text=True, env=environment)
    full = (
        "error: Cannot write a file or the standard output: No space left on device. Free some space, and repeat it.\n"
    )
    assert (done.returncode, done.stderr) == (status, full if status else "")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"echo2 {__version__}\n"


def test_an_unknown_command_or_flag_is_refused(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    assert "invalid choice: 'rnu'" in usage_error(capsys, "rnu")
    assert "unrecognized arguments: --jsn" in usage_error(capsys, "status", "--jsn")
    assert "unrecognized arguments: --learner.lr" in usage_error(capsys, "status", "--learner.lr", "1")
    said = usage_error(capsys, "worker", "TICKET", "--statee", "x")
    assert said.startswith("usage: echo2 worker ")
    assert said.endswith("error: unrecognized arguments: --statee x. Did you mean --state?\n")
    assert "Did you mean --json?" in usage_error(capsys, "status", "--jsn=1")
    assert "Did you mean --resume?" in usage_error(capsys, "run", str(config_file), "--resum")
    assert "Did you mean" not in usage_error(capsys, "status", "--learner.lr", "1")
    assert "unrecognized arguments: more" in usage_error(capsys, "run", str(config_file), "more")
    assert mistake(capsys, "run", str(config_file), "--lr", "1").endswith("Did you mean learner.lr?")
    assert mistake(capsys, "run", str(config_file), "--learner.lrr=1").endswith("Did you mean learner.lr?")
    assert mistake(capsys, "run", "--lerner.lr", "1", str(config_file)).endswith("Did you mean learner?")
    assert mistake(capsys, "run", str(config_file), "--run.max-steps=1").endswith("Did you mean run.max_steps?")


def test_dotted_flags_go_anywhere_and_the_last_one_counts(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    words = ["run", "--learner.lr", "1e-5", str(config_file), "--tasks.source=a=b", "--out", "./x.y", "--run.seed", "1"]
    options = build_parser().parse_args([*words, "--run.seed", "2"])
    assert (options.config, options.out) == (config_file, Path("x.y"))
    given = {name: value for name, value in vars(options).items() if "." in name}
    assert given == {"learner.lr": "1e-5", "tasks.source": "a=b", "run.seed": "2"}
    assert "argument --run.seed: expected one argument" in usage_error(capsys, *words[:-1])


def test_a_dry_run_prints_the_resolved_configuration_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["run", "--learner.lr", "1e-3", str(config_file), "--out", str(out), "--dry-run"]) == 0
    resolved = json.loads(capsys.readouterr().out)
    assert build(resolved, "config.json").learner.lr == 1e-3
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
def test_the_error_names_the_missing_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    nowhere = str(tmp_path / "nowhere")
    said = mistake(capsys, *(argument.replace("NOWHERE", nowhere) for argument in arguments))
    assert said.startswith(f"error: {words.replace('NOWHERE', nowhere)}")


def test_a_process_ends_with_the_status_of_its_command_and_one_line(tmp_path: Path) -> None:
    """Of one that loads torch, which may print something of its own."""
    command = [sys.executable, "-m", "echo2", "learner", str(tmp_path / "nowhere")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'nowhere'} is not a run directory: it has no config.json.\n"


def test_a_standby_needs_the_store_of_a_run(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    for command in ("run", "head"):
        assert "--standby needs --resume-from URL" in mistake(capsys, command, str(config_file), "--standby")
        assert "needs --out DIR" in mistake(capsys, command, "--resume-from", "s3://bucket/a", "--standby")


def test_a_run_without_a_checkpoint_has_nothing_to_evaluate_or_export(
    capsys: pytest.CaptureFixture[str], empty_run: RunDir, tmp_path: Path
) -> None:
    message = f"error: {empty_run.path} has no checkpoint; there are: none yet."
    assert mistake(capsys, "eval", str(empty_run.path)) == message
    assert mistake(capsys, "export", str(empty_run.path), "--to", str(tmp_path / "model")) == message
    assert "no checkpoint step_3" in mistake(capsys, "eval", str(empty_run.path), "--step", "3")


def test_the_best_checkpoint_is_of_the_most_accurate_version_that_has_one(
    capsys: pytest.CaptureFixture[str], empty_run: RunDir, tmp_path: Path
) -> None:
    for version in (20, 30):
        checkpoint.write_checkpoint(checkpoint.step_directory(empty_run.checkpoints, version), {}, {}, {})
    export = ("export", str(empty_run.path), "--to", str(tmp_path / "model"), "--step")
    assert "no checkpoint of a version that was evaluated" in mistake(capsys, *export, "best")
    rows = [{"step": 10, "eval/accuracy": 0.9}, {"step": 20, "eval/accuracy": 0.5}, {"step": 30, "eval/accuracy": 0.4}]
    empty_run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*export, "best"]) == 0
    assert capsys.readouterr().out == f"exported step_20 to {tmp_path / 'model'}\n"


def test_the_error_says_that_an_export_was_not_trained(
    capsys: pytest.CaptureFixture[str], empty_run: RunDir, tmp_path: Path
) -> None:
    checkpoint.write_checkpoint(checkpoint.step_directory(empty_run.checkpoints, 0), {}, {}, {})
    assert main(["export", str(empty_run.path), "--to", str(tmp_path / "model")]) == 0
    told = ": the weights that the run began with, not trained\n"
    assert capsys.readouterr().out == f"exported step_0 to {tmp_path / 'model'}{told}"


@pytest.mark.parametrize(
    ("flags", "from_python", "told"),
    [
        (["--out", "my runs/a"], False, "; continue the run with: echo2 run ALL --resume"),
        (["--learner.lr=1e-5", "--resume"], False, "; continue the run with: echo2 run ALL"),
        ([], True, "; continue the run with --resume"),
        (["--dry-run"], False, ""),
        (["--out", "not begun"], False, "; the run had not begun"),
    ],
)
def test_a_run_that_is_interrupted_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    from_python: bool,
    told: str,
) -> None:
    """The configuration's task class does what Ctrl-C does."""
    (tmp_path / "own.py").write_text("class Own:\n    def __init__(self):\n        raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()  # open while the test lasts: the supervisor lives
    if from_python:
        monkeypatch.setenv("ECHO2_LIFELINE_FD", str(reading))
    given = [str(config_file), "--tasks.source", "own.py:Own", *flags]
    if "ALL" in told or from_python:
        config, where = resolve(
            config_file, {"tasks.source": "own.py:Own"}, Path(flags[1]) if "--out" in flags else None
        )
        create(where, config, resume=False)
    assert main(["run", *given]) == 130
    typed = " ".join(given).replace("my runs/a", "'my runs/a'")
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted" + told.replace("ALL", typed)
    assert writing


def test_a_worker_with_the_learners_ticket_does_not_call_the_head(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ticket = RunIdentity.create_or_load(tmp_path).make_ticket("learner", "127.0.0.1:1", 1, 1.0)
    assert main(["worker", ticket, "--state", str(tmp_path / "state")]) == 2
    assert "This is the ticket of the run's learner" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_status_takes_the_newest_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "No run found below outputs/" in mistake(capsys, "status")
    create(Path("outputs/a"), build({}, "my.toml"), resume=False)
    assert "outputs/a has no status yet" in mistake(capsys, "status")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_worker_leaves_in_order_on_sigterm(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    status: int,
    as_json: bool,
) -> None:
    ticket = RunIdentity.create_or_load(tmp_path).make_ticket("worker", "127.0.0.1:1", 1, 1.0)

    def run_worker(*_: object) -> str:
        signal.raise_signal(number)
        raise AssertionError("it goes on")

    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a script runs the tests with "&"
    monkeypatch.setattr("echo2.cli.running.begin_process", lambda name: None)
    monkeypatch.setattr(joining, "run_worker", run_worker)
    try:
        assert main(["worker", ticket, *(["--json"] if as_json else [])]) == status
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    printed, words = capsys.readouterr(), "left the run; its leases go to other workers"
    if not as_json:
        assert (printed.out, printed.err) == ("", f"{words}\n")
    elif status:
        assert (printed.out, json.loads(printed.err)) == ("", {"error": words, "status": 130})
    else:
        assert (json.loads(printed.out), printed.err) == ({"ended": words}, "")


def test_a_worker_says_where_it_listens_and_whether_it_gives_weights_on() -> None:
    parse = build_parser().parse_args
    options = parse(["worker", "TICKET", "--listen", "0.0.0.0:7342", "--advertise", "198.51.100.7", "--no-relay"])
    assert (options.listen, options.advertise, options.relays) == ("0.0.0.0:7342", "198.51.100.7", False)
    options = parse(["worker", "TICKET"])
    assert (options.listen, options.advertise, options.relays) == ("", "", True)


@pytest.mark.parametrize("slots", ["-1", "65537", "many"])
def test_slots_that_no_worker_can_have_are_refused(capsys: pytest.CaptureFixture[str], slots: str) -> None:
    said = usage_error(capsys, "worker", "TICKET", f"--slots={slots}")
    assert slots in said
    assert "0 to 65536" in said
    assert build_parser().parse_args(["worker", "TICKET", "--slots", "65536"]).slots == 65536


@pytest.mark.parametrize(("given", "expected"), [("", "1"), ("6", "6")])
def test_a_worker_uses_one_thread_by_default(given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other work, threads that wait for each other make it many times slower (docs/log.md, 24 November)."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert main(["worker", "no ticket"]) == 2
    assert os.environ["OMP_NUM_THREADS"] == expected


SIGNALLED = """
import asyncio, os, signal, sys
from echo2.cli.running import leaving_on_sigterm

signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[1] == "ignored" else signal.default_int_handler)

async def main():
    other = asyncio.create_task(asyncio.Event().wait())  # as those of gRPC's server
    if sys.argv[1] == "ignored":
        os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.Event().wait()
    finally:
        print("others cancelled:", other.cancelling())

def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ())

before = state()
try:
    with leaving_on_sigterm() as ended:
        asyncio.run(main())
except KeyboardInterrupt:
    print("ended by", ended, "and as before" if state() == before else state())
"""


@pytest.mark.parametrize("interrupts", ["taken", "ignored"])
def test_sigterm_cancels_the_main_task_of_a_worker_alone(interrupts: str) -> None:
    """Also where a script started it with "&", so that Ctrl-C is not for it."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED, interrupts], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["others cancelled: 0", "ended by [15] and as before"]
