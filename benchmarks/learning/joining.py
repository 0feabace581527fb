"""A run, and workers that join it with a ticket: one of somebody else, or one for each of several engines.

    make bench-joining ARGS='stranger RUN -- echo2 run ... --out RUN'
    make bench-joining ARGS='engines RUN compact llamacpp-q8_0 -- echo2 run ... --workers.count 0 --out RUN'

`stranger` writes what the checks found to trust.json beside the run directory. With `engines` each worker is killed
(SIGKILL) once and started again, one after the other over the steps of the run; crew.json beside the run directory has
what the head said last of each engine, and the audit of the ledger. Both are commands of `real_model.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import real_model_figures as figures
from crew import ECHO2, Found, Job, last_json

from echo2.config.rundir import RunDir, read_json, read_metrics

if TYPE_CHECKING:
    from real_model import Bench

#: Workers of part mixed: in the learner's precision, in 8 bits, and vLLM in bfloat16 ($ECHO2_ENGINE_PYTHON has it).
MIXED = ("compact", "llamacpp-q8_0", "vllm")
POLL_SECONDS = 0.5
#: What is written of each worker.
SHOWN = ("mismatch", "useful_groups", "rate")


def jobs(bench: Bench) -> Iterable[Job]:
    """Part `mixed`: engines and forms side by side, each killed once."""
    for seed in bench.options.seeds:
        job = bench.facts_job("mixed", f"mixed-{seed}", {"seed": seed}, {"run.seed": seed, "workers.count": 0})
        run = bench.work / job.name / "run"
        chain = {"run": [sys.executable, __file__, "engines", str(run), *MIXED, "--", *job.steps["run"]]}
        yield Job(job.name, job.part, chain, _read, job.told)


def _read(directory: Path) -> Found:
    return {"crew": last_json(directory / "crew.json"), **figures.run_figures(directory / "run")}


def started(run: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a run, and wait until it can be joined or has ended."""
    training = subprocess.Popen(words)
    while training.poll() is None and not RunDir(run).ticket.exists():
        time.sleep(POLL_SECONDS)
    return training


def answer(*words: str) -> Found:
    """What a command says as JSON. Raises CalledProcessError: it failed."""
    told = subprocess.run([*ECHO2, *words, "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found: Found = json.loads(told)
    return found


def with_stranger(run: Path, training: subprocess.Popen[bytes]) -> int:
    """Invite a worker, and wait for the run; its exit status."""
    ticket = answer("invite", str(run))["ticket"]
    stranger = subprocess.Popen([*ECHO2, "worker", ticket, "--state", str(run.with_name("stranger"))])
    try:
        status = training.wait()
    finally:
        stranger.terminate()
        stranger.wait()
    run.with_name("trust.json").write_text(json.dumps(answer("trust", str(run))))
    return status


def with_engines(run: Path, training: subprocess.Popen[bytes], engines: Sequence[str], num_steps: int) -> int:
    """Start a worker for each engine, kill each once, and wait for the run; its exit status."""
    crew = {engine: _worker(run, engine) for engine in engines}
    due = {engine: num_steps * (place + 1) // (len(engines) + 1) for place, engine in enumerate(engines)}
    killed, seen = dict[str, int](), dict[str, Found]()
    try:
        while training.poll() is None:
            time.sleep(POLL_SECONDS)
            trained = sum("time/train" in row for row in read_metrics(RunDir(run).metrics))
            for row in (read_json(RunDir(run).status) or {}).get("workers", []):
                if row.get("engine") and row.get("useful_groups"):
                    seen[row["engine"]] = {name: row.get(name) for name in SHOWN}
            for engine in [one for one in engines if one not in killed and trained >= due[one]]:
                killed[engine] = trained
                _end(crew[engine], signal.SIGKILL)
                crew[engine] = _worker(run, engine)
    finally:
        for worker in crew.values():
            _end(worker, signal.SIGTERM)
    told = {"workers": seen, "killed_after_step": killed, "audit": answer("audit", str(run))}
    run.with_name("crew.json").write_text(json.dumps(told))
    return training.returncode


def _end(worker: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a worker and what it started, and wait until it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, number)
    worker.wait()


def _worker(run: Path, engine: str) -> subprocess.Popen[bytes]:
    """A worker of the owner, in a process group of its own."""
    words = ["worker", f"@{RunDir(run).ticket}", "--engine", engine, "--state", str(run.with_name(f"worker-{engine}"))]
    with run.with_name(f"worker-{engine}.log").open("ab") as log:
        return subprocess.Popen([*ECHO2, *words], stdout=log, stderr=log, start_new_session=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("stranger", "engines"))
    parser.add_argument("run", type=Path)
    parser.add_argument("engines", nargs="*")
    cut = arguments.index("--")
    options, words = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    training = started(options.run, words)
    try:
        if training.poll() is not None:
            return training.returncode
        if options.kind == "stranger":
            return with_stranger(options.run, training)
        num_steps = RunDir(options.run).read_config().run.max_steps
        return with_engines(options.run, training, options.engines, num_steps)
    except KeyboardInterrupt:  # the run has had the signal, too, if it came from a keyboard
        training.terminate()
        return training.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
