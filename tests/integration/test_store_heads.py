"""Heads that are started alone: they hold no torch; of two of one run, the one that took it over goes on, and the other
one ends and is refused, as is another run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from real_runs import CONFIG, free_port, pause, read

pytestmark = pytest.mark.timeout(600)


@contextmanager
def head(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "echo2", "head", *arguments, "--head.listen", f"127.0.0.1:{free_port()}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with process:  # closes its pipe
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def until_up(process: subprocess.Popen[str], out: Path) -> int:
    """Wait until a head serves, and its store has what there is. Return the number of its turn."""
    told = None
    while told is None or told["head"]["pid"] != process.pid or told["store"]["behind_records"]:
        assert process.poll() is None, process.communicate()[1]
        pause()
        told = read(out / "status.json")
    turn: int = told["store"]["head"]
    return turn


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process holds is read from /proc")
@pytest.mark.parametrize("reward", ["exact_match", "{folder}/own.py:score"])
def test_a_head_that_checked_its_configuration_holds_no_torch(tmp_path: Path, sort_model: Path, reward: str) -> None:
    (tmp_path / "own.py").write_text("import torch\n\n\ndef score(completions, **columns):\n    return [1.0]\n")
    config, out = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(CONFIG.format(model=sort_model).replace("exact_match", reward.format(folder=tmp_path)))
    with head(str(config), "--out", str(out)) as started:
        while (read(out / "status.json") or {}).get("head", {}).get("pid") != started.pid:
            assert started.poll() is None, started.communicate()[1]
            pause()
        held = Path(f"/proc/{started.pid}/maps").read_text()
    assert "/torch/" not in held


def test_a_head_that_another_has_followed_ends_and_another_run_is_refused(tmp_path: Path, sort_model: Path) -> None:
    config, store = tmp_path / "run.toml", tmp_path / "store"
    config.write_text(f'{CONFIG.format(model=sort_model)}[head]\nstore = "{store}"\n')
    a, b = tmp_path / "a", tmp_path / "b"
    with head(str(config), "--out", str(a)) as first:
        assert until_up(first, a) == 1
        ticket = (a / "identity" / "ca.pem").read_text()
        first.send_signal(signal.SIGSTOP)
        with head("--resume-from", str(store), "--out", str(b)) as second:
            assert until_up(second, b) == 2
            first.send_signal(signal.SIGCONT)  # it wakes up, and knows nothing
            _, errors = first.communicate()
            assert first.returncode == 2
            assert "Another head has taken this run over (head 2" in errors.splitlines()[-1]
            assert second.poll() is None
        assert (b / "identity" / "ca.pem").read_text() == ticket
        assert json.loads((b / "identity" / "members.json").read_text()) == {"members": {}}
    with head(str(config), "--out", str(a), "--resume") as again:
        _, errors = again.communicate()
        assert again.returncode == 2
        assert "another head has it" in errors.splitlines()[-1]
    with head(str(config), "--out", str(tmp_path / "c")) as other:  # for a run of its own
        _, errors = other.communicate()
        assert other.returncode == 2
        assert "For another run, choose another URL" in errors.splitlines()[-1]
