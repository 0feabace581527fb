"""A real run with three strangers: the owner's worker checks the honest one and believes it, checks a liar and finds
it; of one that names weights which nobody has nothing is taken. One whose engine nobody can check does not get in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import ENDLESS, REPOSITORY, Run

pytestmark = pytest.mark.timeout(600)
#: A worker whose tokens are drawn from the right weights with other random numbers, as the best of many would be.
LIAR = """
import sys
from dataclasses import replace
from echo2.cli import main
from echo2.rollouts import generate

def lying(prompt, seed, *others, made=generate.SampleRequest, **named):
    return made(prompt, seed + 1, *others, **named)

generate.SampleRequest = lying
sys.exit(main(sys.argv[1:]))
"""
#: A worker that names weights of a lineage that nobody has. (Another version may be published: that is the planner's.)
MISNAMES = """
import sys
from echo2.cli import main
from echo2.worker import joining, worker_process

class Misnaming(worker_process.WorkerProcess):
    async def _send(self, batch):
        for delivery in batch.items:
            delivery.group.lineage += 1
        await super()._send(batch)

joining.WorkerProcess = Misnaming
sys.exit(main(sys.argv[1:]))
"""


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_the_honest_stranger_is_believed_and_of_liars_one_is_expelled_and_one_supplies_nothing(
    tmp_path: Path, sort_model: Path
) -> None:
    settings = ("--schedule.max_staleness", "2", "--schedule.groups_per_step", "64", *ENDLESS)
    run = Run(tmp_path / "run", sort_model, "--workers.count", "1", *settings).start()  # ended below
    run.wait(lambda: (run.out / "ticket").exists(), "ticket")
    workers, tickets = [], {}
    try:
        for name, program in (("honest", ["-m", "echo2"]), ("liar", ["-c", LIAR]), ("misnames", ["-c", MISNAMES])):
            invited = run.command("invite")
            tickets[name] = invited["id"]
            join = [sys.executable, *program, "worker", invited["ticket"], "--state", str(tmp_path / name)]
            workers.append(subprocess.Popen(join, cwd=REPOSITORY, env=ENVIRONMENT, stderr=subprocess.DEVNULL))

        def told() -> dict[str, dict[str, int]]:
            return {row["ticket"]: row for row in run.command("trust")}

        events = run.out / "events.jsonl"  # the newest events only, so this comes first
        run.wait(lambda: b"; the run is in 1" in events.read_bytes(), "a result of weights that nobody has")
        turned_away(run, tmp_path / "state")
        run.wait(lambda: told().get(tickets["honest"], {}).get("num_passed", 0) > 0, "a check of the honest worker")
        run.wait(lambda: told().get(tickets["liar"], {}).get("num_failed", 0) > 1, "two checks of the liar")
        run.stop()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert told()[tickets["honest"]]["num_failed"] == 0
    assert b"a stranger's group has one" not in (run.out / "events.jsonl").read_bytes()
    assert told()[tickets["liar"]]["is_quarantined"]
    assert tickets["misnames"] not in told()  # none of its groups was taken
    audit = run.command("audit")
    assert audit["trained"] == 64 * run.status()["version"]
    assert (audit["lost"], audit["doubled"]) == (0, 0)
    assert run.command("replay")["num_different"] == 0


def turned_away(run: Run, state: Path) -> None:
    """A stranger whose engine nobody can check does not get in, and is told why."""
    run.wait_version(0)
    ticket = run.command("invite")["ticket"]
    join = [sys.executable, "-m", "echo2", "worker", ticket, "--engine", "vllm", "--state", str(state)]
    joined = subprocess.run(
        join, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )
    assert joined.returncode != 0
    for words in ("its engine is 'vllm'", "--engine compact", "workers.require_checks = false"):
        assert words in joined.stderr
    run.wait(lambda: "vllm" in str(run.status().get("turned_away")), "status that says so")
