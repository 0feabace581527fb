"""Starts a head, workers and a learner as processes of their own, and waits until the run is over.

The head is `echo2 head`; workers and learner are the calling script, started again with `worker` or `learner` and their
settings as JSON: there their speeds are set (`idle_nodes.py`, `overlap_nodes.py`), by parts of
their own that they put in place of those of the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from echo2.config.values import ServerPlace
    from echo2.engines.decode_loop import Decoder
    from echo2.engines.engine import Engine
    from echo2.worker.worker_process import WorkerOptions

P = ParamSpec("P")
R = TypeVar("R")

#: Without a step, or one worker more, for so long, a run counts as stuck.
STUCK_SECONDS = 300.0
POLL_SECONDS = 0.2


def run_paced(
    directory: Path,
    config: str,
    script: str,
    num_workers: int,
    settings: Mapping[str, Any],
    flags: Sequence[str] = (),
) -> float:
    """One run in `directory`, its run directory being `directory/run`; what share of all cores was busy meanwhile,
    whoever used them. Workers are there before the learner begins. `flags`: for the head, on top of the config.

    Raises:
        RuntimeError: a process died, or nothing went on; with its log.
    """
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(config, encoding="utf-8")
    out = directory / "run"
    with ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
            stack.callback(_end, process)
            processes[name] = process

        processes: dict[str, subprocess.Popen[bytes]] = {}
        start("head", sys.executable, "-m", "echo2", "head", str(directory / "run.toml"), "--out", str(out), *flags)
        _wait(directory, processes, lambda: (out / "status.json").is_file())
        for number in range(num_workers):
            mine = {**settings, "run": str(out), "state": str(directory / f"w{number}"), "number": number}
            start(f"w{number}", sys.executable, script, "worker", json.dumps(mine))
        _wait(directory, processes, lambda: _workers_there(out / "status.json") == num_workers)
        start("learner", sys.executable, script, "learner", json.dumps({**settings, "run": str(out)}))
        busy, began = _cpu_seconds(), time.monotonic()
        _wait(directory, processes, lambda: (out / "outcome.json").is_file())
        return (_cpu_seconds() - busy) / (time.monotonic() - began) / (os.cpu_count() or 1)


def run_worker(settings: Mapping[str, Any], make_decoder: Callable[[], Decoder], options: WorkerOptions) -> None:
    """A worker whose engine has this decoder, whatever engine is asked for."""
    from echo2.engines.decode_loop import DEFAULT_SLOTS, DecodeLoop
    from echo2.engines.registry import NO_PLACE, make_engine
    from echo2.worker import joining
    from echo2.worker import worker_process as worker

    @in_place_of(worker, make_engine)
    def make_paced_engine(
        name: str, device: str = "auto", slots: int = DEFAULT_SLOTS, place: ServerPlace = NO_PLACE
    ) -> Engine:
        return DecodeLoop(make_decoder(), slots)

    joining.run_worker(f"@{settings['run']}/ticket", Path(settings["state"]), options)


def in_place_of(module: ModuleType, original: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates the function or class that `module` is to use where it says `original`, which it imported by that name.
    Types are checked: what is put there takes all that the original takes, and gives what that gives.
    """

    def put(own: Callable[P, R]) -> Callable[P, R]:
        assert vars(module)[original.__name__] is original
        vars(module)[original.__name__] = own
        return own

    return put


def _workers_there(status: Path) -> int:
    return len(json.loads(status.read_text(encoding="utf-8"))["workers"]) if status.is_file() else 0


def _progress(run: Path) -> tuple[int, int]:
    """Return the size of the metrics, and how many workers there are: on a busy machine many take minutes to start."""
    metrics = run / "metrics.jsonl"
    return metrics.stat().st_size if metrics.is_file() else 0, _workers_there(run / "status.json")


def _wait(directory: Path, processes: Mapping[str, subprocess.Popen[bytes]], holds: Callable[[], bool]) -> None:
    seen, deadline = (-1, 0), 0.0
    while not holds():
        if (now := _progress(directory / "run")) != seen:
            seen, deadline = now, time.monotonic() + STUCK_SECONDS
        dead = [name for name, process in processes.items() if process.poll()]
        if dead or time.monotonic() > deadline:
            name = dead[0] if dead else "head"
            raise RuntimeError(f"{name}: " + (directory / f"{name}.log").read_text(errors="replace")[-2000:])
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cpu_seconds() -> float:
    """Of all cores, since the machine started."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
