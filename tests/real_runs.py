"""Real runs for tests: `echo2 run` as a user starts it, on the demo's model, small enough for two cores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from random import SystemRandom
from typing import Any

from echo2.cli import main
from echo2.sandbox import containers

REPOSITORY = Path(__file__).parents[1]
#: A run without progress for this long is stuck. Imports are no progress, and may take a minute on a busy machine.
STUCK_SECONDS = 150.0
#: The settings of a run that goes on, however fast the machine, until the test stops it.
ENDLESS = ("--run.max_steps", "100000")

CONFIG = """
[run]
max_steps = 24
[model]
path = "{model}"
[tasks]
source = "digit_sorting"
params = {{split = "train"}}
[reward]
functions = ["exact_match"]
[sampling]
group_size = 4
max_tokens = 12
groups_per_batch = 4
[schedule]
groups_per_step = 16
lease_seconds = 20.0
[learner]
lr = 2e-4
tokens_per_microbatch = 640
checkpoint_every = 5
[workers]
count = 2
price_usd_per_hour = 0.36
"""


#: Settings of a run that is about its being one.
SMALL = {
    "run.max_steps": "2",
    "schedule.groups_per_step": "4",
    "sampling.groups_per_batch": "4",
    "eval.limit": "8",
    "workers.count": "1",
}


def odd_tasks(own: Path) -> tuple[str, ...]:
    """Settings of a run on the rows and the environment of a test's own file, whose classes are `Rows` and `Odd`."""
    return (
        f"--tasks.source={own}:Rows",
        "--tasks.params={}",
        f"--tasks.environment={own}:Odd",
        "--sampling.max_turns=4",
        "--sampling.max_tokens=20",
    )


def free_port() -> int:
    """For a process that is to have the same port when it starts again: below the ports that the system gives to other
    tests' sockets meanwhile.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def echo2(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of ours in a directory."""
    runtime = "landlock" if containers._unusable("bubblewrap") else "bubblewrap"  # images would have to be pulled
    environment = {containers.VARIABLE: runtime, **os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "echo2", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment)


@contextmanager
def run_without_workers(out: Path, model: Path) -> Iterator[tuple[Run, ExitStack]]:
    """A run that waits for workers, has its ticket, and ends after what the stack calls."""
    run = Run(out, model, "--workers.count", "0", *ENDLESS).start()
    assert run.process is not None
    with ExitStack() as crew:
        crew.callback(run.process.communicate)
        crew.callback(run.process.terminate)
        run.wait(lambda: (run.out / "ticket").exists(), "ticket")
        yield run, crew


class Run:
    """One run directory, and the `echo2 run` that works on it."""

    def __init__(self, out: Path, model: Path, *settings: str) -> None:
        self.out, self.settings = out, (f"--head.listen=127.0.0.1:{free_port()}", *settings)
        self.config = out.with_suffix(".toml")
        self.config.write_text(CONFIG.format(model=model), encoding="utf-8")
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> Run:
        return self._run(str(self.config), *self.settings, *more)

    def start_from(self, store: Path, out: Path, *settings: str) -> Run:
        """Go on from the store, in another directory, with these settings changed."""
        self.out = out
        return self._run("--resume-from", str(store), *settings)

    def _run(self, *arguments: str) -> Run:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "echo2", "run", *arguments, "--out", str(self.out), "--json"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def finish(self, seconds: float = 500.0) -> dict[str, Any]:
        """Wait for a good end; the summary. A machine may be slow: a test's own limit is what ends a hang."""
        assert self.process is not None
        output, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, f"{errors}\n{self.logs()}"
        summary: dict[str, Any] = json.loads(output)
        return summary

    def refused(self) -> str:
        """The one error of a run that ends with status 2."""
        assert self.process is not None
        _, errors = self.process.communicate(timeout=180)
        assert self.process.returncode == 2, f"{errors}\n{self.logs()}"
        lines = [line for line in errors.splitlines() if line.startswith('{"error": ')]
        assert len(lines) == 1, errors
        assert errors.splitlines()[-1] == lines[0]
        assert "Traceback" not in errors
        told = json.loads(lines[0])
        assert told["status"] == 2
        error: str = told["error"]
        return error

    def stop(self) -> int:
        """End a run that would go on; how many steps it has trained."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=150.0)
        assert self.process.returncode == 130, f"{errors}\n{self.logs()}"
        version: int = self.status()["version"]
        return version

    def command(self, *arguments: str) -> Any:
        """The JSON that an `echo2` command prints about this run. It is called in this process: a new one would spend
        most of its time on imports.
        """
        with redirect_stdout(StringIO()) as printed:
            status = main([*arguments, str(self.out), "--json"])
        assert printed.getvalue(), f"echo2 {arguments[0]} ended with status {status}"
        return json.loads(printed.getvalue())

    def status(self) -> dict[str, Any]:
        return read(self.out / "status.json") or {}

    def pids(self) -> dict[str, int]:
        return {entry["name"]: entry["pid"] for entry in read(self.out / "processes.json") or []}

    def kill(self, name: str) -> None:
        os.kill(self.pids()[name], signal.SIGKILL)

    def burn(self) -> None:
        """Kill every process, as a burning machine would, and delete the disk."""
        for _, pid in sorted(self.pids().items(), key=lambda entry: entry[0] != "run"):  # first what would start others
            os.kill(pid, signal.SIGKILL)
        assert self.process is not None
        self.process.communicate()
        shutil.rmtree(self.out)

    def wait_version(self, version: int) -> None:
        """Until this many steps are trained."""
        self.wait(lambda: self.status().get("version", -1) >= version, f"version {version}")

    def wait_step(self, step: int) -> None:
        """Until this step is trained, by the metrics: the status says it up to half a second later, which are many
        steps on a fast machine.
        """
        self.wait(lambda: self._last_step() >= step, f"step {step}")

    def _last_step(self) -> int:
        path = self.out / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline, seen = 0.0, None
        while not holds():
            if (now := self._progress()) != seen:
                deadline, seen = time.monotonic() + STUCK_SECONDS, now
            assert time.monotonic() < deadline, f"no {what}: {self.status().get('waits')}\n{self.logs()}"
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended before {what}\n{self.logs()}"
            pause()

    def _progress(self) -> object:
        """Differs after anything has happened: a step, another reason to wait, a line of a log."""
        status = self.status()
        waits = [(wait["waiter"], wait["reason"]) for wait in status.get("waits", ())]
        return status.get("version"), waits, [path.stat().st_size for path in sorted(self.out.glob("logs/*.log"))]

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.out.glob("logs/*.log")))

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def weights(self) -> dict[str, bytes]:
        """Model and optimizer of the newest checkpoint."""
        newest = max((self.out / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
        return {name: (newest / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def is_running(pid: int) -> bool:
    """Running, not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pause() -> None:
    """Between two looks at other processes; nothing is assumed about how long anything takes."""
    time.sleep(0.02)
