"""What a lying worker does to a run: the demo with honest workers and liars, once for each way of lying.

For each: how the run ended, how long it took, how much it wrote, what became of its groups, and the accuracy of its
last checkpoint on held-out tasks, measured here (`echo2 eval`), all beside an honest run of the same size. The liars
join as strangers do, by `echo2 invite`.

    make bench-hostile                     # every lie, one honest worker beside one liar
    make bench-hostile ARGS='--only "logprob -1e15" --honest 3'
    make bench-hostile ARGS='--search 8'          # eight lies whose every field is drawn at random
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import recording
from hostile_worker import IDLE, LIES, SEARCHED

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ECHO2 = (sys.executable, "-m", "echo2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
#: An honest run takes half a minute; one that waits for leases to expire, some minutes.
RUN_SECONDS = 600.0
POLL_SECONDS = 0.2


def trial(folder: Path, lie: str, num_honest: int, num_liars: int, steps: int, seed: int) -> dict[str, Any]:
    """One run. An empty `lie`: the others are honest too."""
    out = folder / "run"
    settings = {"run.max_steps": steps, "run.seed": seed, "workers.count": num_honest, "schedule.lease_seconds": 10}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [*ECHO2, "run", "src/echo2/demo/sort.toml", "--out", str(out), "--json", *flags]
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        run = _start(stack, folder / "run.log", command)
        while not (out / "ticket").exists() and run.poll() is None:
            time.sleep(POLL_SECONDS)
        if not (out / "ticket").exists():
            said = recording.last((folder / "run.log").read_text(errors="replace"))
            raise SystemExit(f"the run did not start (status {run.returncode}): {said}")
        ticket = recording.output_of([*ECHO2, "invite", str(out)], cwd=REPOSITORY, env=ENVIRONMENT)
        for number in range(num_liars):
            state = ("--state", str(folder / f"liar{number}"))
            own = (str(HERE / "hostile_worker.py"), ticket, lie)
            honest = ("-m", "echo2", "worker", ticket)
            _start(stack, folder / f"liar{number}.log", [sys.executable, *(own if lie else honest), *state])
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(RUN_SECONDS)
        seconds = time.perf_counter() - began
    liars = {path.name for path in folder.glob("liar*/*") if path.is_dir()}
    return {**_outcome(out, folder / "run.log"), "seconds": round(seconds, 1), "trained_of_liars": _trained(out, liars)}


def _start(stack: contextlib.ExitStack, log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    file = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=file, stderr=file)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
    process.kill()
    process.wait()


def _outcome(out: Path, log: Path) -> dict[str, Any]:
    outcome = json.loads((out / "outcome.json").read_text()) if (out / "outcome.json").exists() else {}
    summary = json.loads((out / "summary.json").read_text()) if (out / "summary.json").exists() else {}
    judged = subprocess.run(
        [*ECHO2, "eval", str(out), "--json"],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    files = sum(path.stat().st_size for path in out.glob("*.jsonl*"))
    return {
        "ended": outcome.get("kind", "did not end"),
        "reason": outcome["reason"] if outcome else recording.last(log.read_text(errors="replace"), 1),
        "groups": summary.get("groups", {}),
        "accuracy": json.loads(judged.stdout)["eval/accuracy"] if judged.returncode == 0 else None,
        "log_bytes": files,
        "faults": _faults(out),
    }


def _trained(out: Path, workers: set[str]) -> int:
    """How many groups of these workers were trained."""
    with contextlib.closing(sqlite3.connect(out / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT worker_id, count(*) FROM groups WHERE state = 'trained' GROUP BY worker_id")
        return sum(count for worker_id, count in rows if worker_id in workers)


def _faults(out: Path) -> list[dict[str, Any]]:
    """The first fault that a check found, of each ticket of strangers: how many steps were trained before it."""
    told = subprocess.run([*ECHO2, "trust", str(out), "--json"], env=ENVIRONMENT, capture_output=True, text=True)
    if told.returncode:
        return []
    lines = (out / "metrics.jsonl").read_text().splitlines()
    written = (out / "status.json").stat().st_mtime
    steps = [at for line in lines if (at := json.loads(line).get("time/unix"))]
    found = []
    for row in json.loads(told.stdout):
        counts = {name: row[name] for name in ("num_groups", "num_passed", "num_failed")}
        for first in row["history"][:1]:
            num_steps = sum(at < written - first["seconds_ago"] for at in steps)
            found.append({"steps_before": num_steps, "what": first["what"], **counts})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*LIES, *IDLE], nargs="+", help="these lies")
    parser.add_argument("--search", type=int, default=0, help="so many lies drawn at random, in place of the listed")
    parser.add_argument("--honest", type=int, default=1, help="honest workers, of the run's owner")
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    searched = [f"{SEARCHED}{number}" for number in range(options.search)]
    for lie in ("", *(options.only or searched or (*LIES, *IDLE))):
        with tempfile.TemporaryDirectory() as folder:
            row = trial(Path(folder), lie, options.honest, options.liars, options.steps, options.seed)
        rows[lie or "honest"] = row
        ratio = row["seconds"] / rows["honest"]["seconds"]
        accuracy = "no checkpoint" if row["accuracy"] is None else f"{row['accuracy']:.3f}"
        print(
            f"{lie or 'honest':24} {row['ended']:10} accuracy {accuracy}   {row['seconds']:6.1f} s"
            f" ({ratio:.2f} of honest)   {row['trained_of_liars']} groups of liars trained"
            f"   logs {row['log_bytes'] / 1e6:.1f} MB   {row['reason'][:90]}",
            *(f"{fault['steps_before']} steps before: {fault['what'][:80]}" for fault in row["faults"]),
            sep="\n    ",
            flush=True,
        )
    sizes = {"honest": options.honest, "liars": options.liars, "steps": options.steps, "seed": options.seed}
    print(f"saved in {recording.save('hostile', {**sizes, 'rows': rows}, options.out)}")


if __name__ == "__main__":
    main()
