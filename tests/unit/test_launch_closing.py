"""The supervisor of a run ends all its processes, whatever fails in it: at any moment its children die, refuse or do
not listen, signals come, and a call of the system fails (`random_faults.py`). Whoever started the run hears of it.

More seeds than `make test-all` tries:

    PYTHONPATH=src:tests:tests/unit python -c "import test_launch_closing as t; t.search(range(1000))"
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import psutil
import pytest

from echo2.config import Config
from echo2.config.rundir import create, read_json
from echo2.core import disk, logs
from echo2.core.child import ChildProcess
from echo2.core.errors import UserError
from echo2.launch import supervisor
from echo2.launch.supervisor import ProcessFailed, Supervisor
from random_faults import WORDS, Faults, is_heard

#: A process of the run, in place of Python: `python -m echo2 ROLE ...`. Each start takes the next of its fates.
CHILD = """#!/bin/sh
cd {folder} || exit 9
echo x >> starts-$3
fate=$(sed -n "$(wc -l < starts-$3)p" fates-$3)
case $fate in
    dies) echo "error: it fails" >&2; exit 1;;
    refuses) echo "error: a mistake" >&2; exit {refuses};;
    deaf) trap "" TERM;;
    *) trap 'told=yes' TERM;;
esac
[ $3 = head ] && echo '{{"version": 0, "head": {{"pid": '$$'}}, "workers": []}}' > part && mv part run/status.json
left=60
while [ $left -gt 0 ]; do
    [ $3 != head ] && [ -f run/outcome.json ] && exit 0
    [ -n "$told" ] && [ $3 != head ] && exit 0
    [ -n "$told" ] && echo '{{"kind": "stopped", "reason": "told"}}' > part && mv part run/outcome.json && exit 0
    [ "$fate" = finishes ] && [ $left -lt 50 ] && echo '{{"kind": "finished", "reason": "done"}}' > part \\
        && mv part run/outcome.json && exit 0
    [ "$fate" = fades ] && [ $left -lt 55 ] && exit 1
    left=$((left - 1))
    sleep 0.01
done
"""
FATES = ("lives",) * 4 + ("dies", "deaf", "fades")
#: What fails before it does anything, and what when it is done.
BEFORE = [(supervisor, "write_atomically"), (supervisor, "read_json"), (ChildProcess, "__init__")]
BEFORE += [(logs, "cut_log"), (disk, "free_bytes")]
AFTER = [(ChildProcess, "signal"), (ChildProcess, "wait"), (ChildProcess, "kill")]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def quick(patch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"END": 0.3, "STRAGGLER": 0.1, "KILL": 0.1, "POLL": 0.002, "PATIENCE": 0.01}.items():
        patch.setattr(supervisor, f"{name}_SECONDS", seconds, raising=False)


def children() -> set[psutil.Process]:
    return {one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


def run(seed: int, folder: Path) -> None:
    """A run of this seed."""
    draw, others = random.Random(seed), children()  # of earlier tests in this process
    faults, rundir = Faults(draw), create(folder / "run", Config(), resume=False)
    for role in ("head", "learner", "worker"):
        fates = [draw.choice((*FATES, *(["finishes"] if role == "head" else ["refuses"]))) for _ in range(60)]
        (folder / f"fates-{role}").write_text("\n".join(fates) + "\n")
    child = folder / "child"
    child.write_text(CHILD.format(folder=folder, refuses=UserError.exit_status))
    child.chmod(0o755)
    polls_left, before, raised = draw.randrange(40), [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))], None

    def on_poll() -> None:
        nonlocal polls_left
        polls_left -= 1
        if polls_left < 0:
            os.kill(os.getpid(), draw.choice((signal.SIGINT, signal.SIGTERM)))
        elif draw.random() < 0.01:
            faults.made.append("on_poll")
            raise RuntimeError(WORDS)

    made, told = Supervisor(rundir, draw.randrange(3), [], has_learner=draw.random() < 0.8), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(told):
        patch.setattr(sys, "executable", str(child))
        with faults.in_calls(BEFORE, before=True), faults.in_calls(AFTER, before=False):
            try:
                made.run(on_poll)
            except (Exception, KeyboardInterrupt) as error:
                raised = error
    _, left = psutil.wait_procs(children() - others, timeout=30.0)  # those that are killed are about to be gone
    assert not left, left
    assert [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))] == before
    assert isinstance(raised, UserError | ProcessFailed | KeyboardInterrupt | None) or is_heard([raised]), repr(raised)
    outcome = read_json(rundir.outcome) or {}
    heard = is_heard([] if raised is None else [raised]) or WORDS in told.getvalue() + json.dumps(outcome)
    assert not faults.made or heard, faults.made
    assert outcome or WORDS in repr(raised), raised
    assert "without an error message" not in outcome.get("reason", "") or not isinstance(raised, Exception), outcome


def search(seeds: Iterable[int]) -> None:
    """Runs of these seeds. Raises AssertionError at the first that fails."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run(seed, Path(folder))
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}: {error}") from error


def test_whatever_fails_in_the_supervisor_its_processes_end_and_somebody_hears() -> None:
    search(range(6))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_with_more_seeds() -> None:
    search(range(6, 306))
