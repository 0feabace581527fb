"""Who works and who stands by in real runs: real processes, real commands that rent a machine, the fake engine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import real_runs
from real_runs import REPOSITORY, Run, is_running

pytestmark = pytest.mark.timeout(600)

ENDLESS = (*real_runs.ENDLESS, "--workers.count", "0")
#: A learner that takes its time (groups without a signal are run for the reference alone), and a window of versions in
#: which any broadcast hides: else everybody is needed.
PATIENT = ("--learner.reference_kl", "0.01", "--learner.tokens_per_microbatch", "32")
PATIENT += ("--schedule.groups_per_step", "64", "--schedule.max_staleness", "12", "--schedule.publish_every", "2")
#: The fake engine's logprobs are not the policy's: with 1,024 tokens at lag 0, a worker would be turned away.
PATIENT += ("--sampling.max_tokens", "3")


@pytest.fixture
def crew() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def join(run: Run, crew: ExitStack, name: str, usd_per_hour: float) -> subprocess.Popen[bytes]:
    """A worker of this price, killed at the end of the test if it still runs."""
    arguments = ["worker", f"@{run.out / 'ticket'}", "--engine", "fake", "--state", str(run.out.parent / name)]
    with open(run.out.parent / f"{name}.log", "wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "echo2", *arguments, "--price-usd-per-hour", str(usd_per_hour)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    crew.callback(worker.wait)
    crew.callback(worker.kill)
    return worker


def active(run: Run) -> list[float]:
    """Prices of the workers that work."""
    return working(run.status())


def working(status: dict[str, Any]) -> list[float]:
    workers = status.get("workers", [])
    return sorted(w["price_usd_per_hour"] for w in workers if w["attends"] and not w["standby"])


def fleet(status: dict[str, Any]) -> dict[str, Any]:
    return status.get("fleet") or {}


@pytest.mark.slow
def test_the_cheapest_works_and_a_standby_takes_over_when_it_is_killed(
    tmp_path: Path, sort_model: Path, crew: ExitStack
) -> None:
    offers = tmp_path / "offers.toml"
    offers.write_text('[[offers]]\nname = "volunteer"\nprice_usd_per_hour = 0.1\n')
    run = Run(tmp_path / "run", sort_model, *ENDLESS, *PATIENT, "--fleet.offers", str(offers)).start()
    assert run.process is not None
    crew.callback(run.process.communicate)
    crew.callback(run.process.terminate)
    run.wait(lambda: (run.out / "ticket").exists(), "ticket")
    run.wait(lambda: "learner" in run.pids(), "learner")
    learner = run.pids()["learner"]
    os.kill(learner, signal.SIGSTOP)  # so that nothing is known of the needed rate, and who comes late works, too
    try:
        workers = {price: join(run, crew, f"at-{price}", price) for price in (0.9, 0.1, 0.5)}
        run.wait(lambda: len(active(run)) == 3, "three workers")
    finally:
        os.kill(learner, signal.SIGCONT)
    told: list[dict[str, Any]] = []  # one status for all that is asked of it: the next one may have others at work

    def is_one_standing_by() -> bool:
        told[:] = [run.status()]
        return bool(fleet(told[0]).get("standby", 0) >= 1)

    run.wait(is_one_standing_by, "a worker that stands by")
    chosen = working(told[0])
    assert chosen == sorted(workers)[: len(chosen)]
    assert 1 <= len(chosen) <= 2
    version = run.status()["version"]
    run.wait_version(version + 3)
    workers[0.1].kill()
    run.wait(lambda: bool(active(run)) and 0.1 not in active(run), "a standby that takes over")
    run.wait_version(run.status()["version"] + 3)
    # Until a worker that took over is measured, its rate is not known.
    run.wait(lambda: "not known" not in fleet(run.status()).get("text", "not known"), "rates that are known")
    run.wait(lambda: fleet(run.status()).get("idle_predicted") is not None, "a predicted idle share")
    assert "idle_predicted" in run.command("status")["fleet"]
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=150)
    stood_by = {m["name"]: m["by_cause"].get("standby", 0.0) for m in run.command("cost")["machines"]}
    assert sum(usd > 0.0 for usd in stood_by.values()) >= 1
    rows = [row for row in run.rows() if "fleet/needed_rate" in row]
    assert all(row["fleet/active"] + row["fleet/standby"] <= 3 for row in rows)
    assert {"fleet/rate", "fleet/short", "learner/idle_predicted"} <= set(rows[-1])
    assert run.command("replay")["num_different"] == 0
    audit = run.command("audit")
    assert (audit["lost"], audit["doubled"]) == (0, 0)


@pytest.mark.slow
def test_a_run_without_workers_rents_a_machine_and_returns_it_when_the_budget_is_spent(
    tmp_path: Path, sort_model: Path
) -> None:
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    worker = f"{path} ECHO2_WORKER_ARGS=--engine=fake ECHO2_STATE={tmp_path}/{{name}} bash launch/worker.sh"
    rent = f"cd {REPOSITORY}; {worker} >{tmp_path}/{{name}}.log 2>&1 & echo $! >{tmp_path}/{{name}}.pid"
    release = f"kill $(cat {tmp_path}/{{name}}.pid) || true; touch {tmp_path}/{{name}}.back"
    offers = tmp_path / "offers.toml"
    offers.write_text(
        f"""[[offers]]
name = "here"
price_usd_per_hour = 720.0
rollouts_per_second = 100.0
rent = {f"sh -c {shlex.quote(rent)}"!r}
release = {f"sh -c {shlex.quote(release)}"!r}
"""
    )
    settings = ("--fleet.offers", str(offers), "--fleet.budget_usd", "5.0")
    run = Run(tmp_path / "run", sort_model, *ENDLESS, *settings).start()
    assert run.process is not None
    _, errors = run.process.communicate(timeout=200)
    assert run.process.returncode == 2, f"{errors}\n{run.logs()}"
    assert "the budget of $5 is spent" in errors
    pids = sorted(tmp_path.glob("*.pid"))
    assert pids, run.logs()
    for path in pids:
        assert path.with_suffix(".back").exists()
        assert not is_running(int(path.read_text()))
    assert run.status()["version"] > 0
    machines = run.command("cost")["machines"]
    [rented] = [machine for machine in machines if machine["usd"] > 0.0]
    assert 5.0 <= rented["usd"] < 10.0
    assert run.status()["fleet"]["rented"] == []
