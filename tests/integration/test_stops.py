"""A run that is stopped leaves a checkpoint of its last step or says why not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from real_runs import ENDLESS, Run, read
from rollout_cases import tiny_directory

pytestmark = pytest.mark.timeout(600)


def assert_stopped(run: Run, signum: signal.Signals) -> None:
    """It left a checkpoint of its last step, and said what stopped it."""
    assert run.process is not None
    _, errors = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Cancel" not in errors  # uvicorn's word for answers that it breaks off
    version = run.status()["version"]
    assert (run.out / "checkpoints" / f"step_{version}" / "state.json").is_file(), errors + run.logs()
    outcome = read(run.out / "outcome.json")
    assert outcome["kind"] == "stopped"
    assert signum.name in outcome["reason"]
    assert "checkpoint" not in outcome


def stop_while_viewed(run: Run, address: str) -> int:
    """The page shows the run, and ends with it. Return the version that it showed."""
    with httpx2.Client(follow_redirects=True, timeout=100.0) as browser:  # by default it gives up after five seconds
        assert "<html" in browser.get(address).text
        with browser.stream("GET", f"{address.partition('?')[0]}events") as events:
            lines = events.iter_lines()
            data = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
            told = next(one for one in data if "version" in one)
            assert run.process is not None
            run.process.send_signal(signal.SIGINT)
            for _ in lines:  # until the page lets go
                pass
    version: int = told["version"]
    return version


def stop_while_it_saves(run: Run, learner: subprocess.Popen[bytes]) -> None:
    """A learner that somebody else started is waited for."""
    assert run.process is not None
    assert run.process.stderr is not None
    learner.send_signal(signal.SIGSTOP)  # it saves, but not yet
    try:
        run.process.send_signal(signal.SIGTERM)
        while "stopping: the learner saves" not in (line := run.process.stderr.readline()):
            assert line, f"the run did not wait\n{run.logs()}"
    finally:
        learner.send_signal(signal.SIGCONT)


def test_a_stop_leaves_a_checkpoint_of_the_last_step(tmp_path: Path, sort_model: Path) -> None:
    """Two stops of one run, each at another moment of a step; no step ends by `checkpoint_every`."""
    run = Run(tmp_path / "run", sort_model, "--learner.checkpoint_every", "1000", "--workers.count", "1", *ENDLESS)
    run.start("--no-learner")
    run.wait((run.out / "identity" / "learner-ticket").is_file, "learner's ticket")
    with subprocess.Popen([sys.executable, "-m", "echo2", "learner", run.out]) as learner:
        run.wait_version(2)
        assert run.process is not None
        maps = Path(f"/proc/{run.process.pid}/maps")  # what it holds, where the kernel says so
        assert not maps.exists() or "/torch/" not in maps.read_text()
        stop_while_it_saves(run, learner)
        assert_stopped(run, signal.SIGTERM)
    before = run.status()["version"]  # it may have come far beyond its two steps
    run.start("--resume", "--view")
    assert run.process is not None
    assert run.process.stderr is not None
    address = next(line.split()[1] for line in run.process.stderr if line.startswith("open http"))
    run.wait_version(before + 3)
    assert stop_while_viewed(run, address) >= before
    assert_stopped(run, signal.SIGINT)
    assert "not recorded" not in (run.out / "logs" / "learner.log").read_text()
    audit = run.command("audit")
    assert audit["lost"] == audit["doubled"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_outcome_says_which_signal_stopped_a_run(tmp_path: Path, signum: signal.Signals) -> None:
    """Whoever looks later sees whether a person pressed Ctrl-C or a machine manager ended it."""
    run = Run(tmp_path / "run", tiny_directory(tmp_path / "model"), "--workers.count", "0").start("--no-learner")
    run.wait((run.out / "identity" / "learner-ticket").is_file, "learner's ticket")
    assert run.process is not None
    run.process.send_signal(signum)
    _, errors = run.process.communicate(timeout=100)
    assert run.process.returncode == 130, errors
    outcome = read(run.out / "outcome.json")
    assert (outcome["kind"], signum.name in outcome["reason"]) == ("stopped", True)
    assert ("Ctrl-C" in outcome["reason"]) == (signum == signal.SIGINT)


@pytest.mark.slow
def test_the_outcome_says_that_the_learner_was_killed_while_saving(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--learner.checkpoint_every", "1000", "--run.max_steps", "1000")
    run.start()
    run.wait_version(2)
    assert run.process is not None
    (run.out / "checkpoints").chmod(0o500)
    (run.out / "checkpoints").rename(run.out / "elsewhere")
    (run.out / "checkpoints").write_text("no directory")
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=100)
    said = read(run.out / "outcome.json")["checkpoint"]
    assert "there is none" in said
    assert "--resume trains the rest again" in said
