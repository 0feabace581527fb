"""A run that is stopped leaves a checkpoint of its last step or says why not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import Run, read
from rollout_cases import tiny_directory

pytestmark = pytest.mark.timeout(300)


def test_a_stop_leaves_a_checkpoint_of_the_last_step(tmp_path: Path, sort_model: Path) -> None:
    """Several stops of one run, each at another moment of a step; no step ends by `checkpoint_every`."""
    run = Run(tmp_path / "run", sort_model, "--learner.checkpoint_every", "1000", "--run.max_steps", "1000")
    for flags, num_more, signum in (((), 2, signal.SIGINT), (("--resume",), 3, signal.SIGTERM)):
        before = run.status().get("version", 0)  # of the run before: it may have come far beyond its two steps
        run.start(*flags)
        run.wait_version(before + num_more)
        assert run.process is not None
        run.process.send_signal(signum)
        _, errors = run.process.communicate(timeout=100)
        assert run.process.returncode == 130, errors
        version = run.status()["version"]
        assert (run.out / "checkpoints" / f"step_{version}" / "state.json").is_file(), errors + run.logs()
        outcome = read(run.out / "outcome.json")
        assert outcome["kind"] == "stopped"
        assert signum.name in outcome["reason"]
        assert "checkpoint" not in outcome
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


def test_a_learner_that_somebody_else_started_is_waited_for(tmp_path: Path, sort_model: Path) -> None:
    run = Run(tmp_path / "run", sort_model, "--learner.checkpoint_every", "1000", "--run.max_steps", "1000")
    run.start("--no-learner")
    run.wait((run.out / "identity" / "learner-ticket").is_file, "learner's ticket")
    with subprocess.Popen([sys.executable, "-m", "echo2", "learner", run.out]) as learner:
        run.wait_version(2)
        assert run.process is not None
        assert run.process.stderr is not None
        learner.send_signal(signal.SIGSTOP)  # it saves, but not yet
        try:
            run.process.send_signal(signal.SIGINT)
            while "stopping: the learner saves" not in (line := run.process.stderr.readline()):
                assert line, f"the run did not wait\n{run.logs()}"
        finally:
            learner.send_signal(signal.SIGCONT)
        run.process.communicate(timeout=100)
    version = run.status()["version"]
    assert (run.out / "checkpoints" / f"step_{version}" / "state.json").is_file(), run.logs()


@pytest.mark.slow
def test_a_learner_that_was_killed_while_it_saved_is_said_in_the_outcome(tmp_path: Path, sort_model: Path) -> None:
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
