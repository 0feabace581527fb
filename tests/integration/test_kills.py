"""``kill -9`` of everything, and a disk that is lost, in real runs: nothing is lost, nothing is doubled, and in
deterministic mode the weights come out as if nobody had been killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mixture_cases import mixture
from real_runs import STUCK_SECONDS, Run, is_running, pause
from rollout_cases import tokenizer_files

pytestmark = pytest.mark.timeout(1200)
#: So many that the last kills find a run that goes on: the status that tells of a step may be half a second old.
STEPS = 32


@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "updates"),
    [(0, 1, 1), pytest.param(2, 1, 4, marks=pytest.mark.slow), pytest.param(3, 2, 1, marks=pytest.mark.slow)],
)
def test_killed_runs_end_with_the_weights_of_unkilled_ones(
    tmp_path: Path, sort_model: Path, max_staleness: int, publish_every: int, updates: int
) -> None:
    settings = ("--run.max_steps", str(STEPS), "--run.deterministic", "true")
    settings += ("--schedule.max_staleness", str(max_staleness))
    settings += ("--schedule.publish_every", str(publish_every), "--learner.updates_per_step", str(updates))
    calm = Run(tmp_path / "calm", sort_model, *settings).start()
    calm.finish()

    store = tmp_path / "store"
    killed = Run(tmp_path / "killed", sort_model, *settings, "--head.store", str(store)).start()
    killed.wait_version(3)
    killed.kill("worker-0")
    killed.wait_version(6)
    killed.kill("learner")
    killed.wait_version(9)
    killed.kill("head")
    killed.wait_version(12)
    for name in ("worker-1", "learner", "head"):
        killed.kill(name)
    killed.wait_version(14)
    _kill_supervisor(killed)
    assert killed.command("audit")["lost"] == 0
    killed.start("--resume").wait_version(18)
    killed.burn()
    killed.start_from(store, tmp_path / "elsewhere").finish()

    assert killed.weights() == calm.weights()
    _check_books(killed, STEPS * 16, max_staleness)
    assert [row["step"] for row in killed.rows() if "reward/mean" in row] == list(range(1, STEPS + 1))
    calm_rewards = [row["reward/mean"] for row in calm.rows() if "reward/mean" in row]
    assert [row["reward/mean"] for row in killed.rows() if "reward/mean" in row] == calm_rewards


def test_gates_that_are_killed_lose_nothing(tmp_path: Path, sort_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that opens its gates for the first of its connections: the learner or a worker has it, others a gate."""
    (tmp_path / "sitecustomize.py").write_text("from echo2.transport import gates\ngates.CROWD = 1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    run = Run(tmp_path / "run", sort_model, "--run.max_steps", "20").start()
    for version in (2, 5):
        run.wait_version(version)
        os.kill(_gates(run)[0], signal.SIGKILL)
    run.wait_version(8)
    orphans = _gates(run)
    run.kill("head")
    run.wait_version(11)
    for pid in _gates(run):
        os.kill(pid, signal.SIGKILL)
    run.finish()
    assert not any(map(is_running, orphans))
    _check_books(run, 20 * 16, 1)


def _gates(run: Run) -> list[int]:
    """The head's gates, as soon as there are two."""
    gates: list[int] = []
    deadline = time.monotonic() + STUCK_SECONDS
    while len(gates) < 2:
        assert time.monotonic() < deadline, run.logs()
        pause()
        with suppress(OSError, KeyError):  # a head that was killed, or a child that ended meanwhile
            head = run.pids()["head"]
            children = Path(f"/proc/{head}/task/{head}/children").read_text().split()
            gates = [int(pid) for pid in children if b"gate_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return gates


def _kill_supervisor(run: Run) -> None:
    """Its children must end by themselves."""
    pids = run.pids()
    run.kill("run")
    assert run.process is not None
    run.process.wait()
    run.process.communicate()
    children = [pid for name, pid in pids.items() if name != "run"]
    deadline = time.monotonic() + STUCK_SECONDS
    while running := [pid for pid in children if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        pause()


def _check_books(run: Run, num_groups: int, max_staleness: int) -> None:
    audit = run.command("audit")
    assert audit["trained"] == num_groups
    assert audit["lost"] == audit["doubled"] == 0
    assert audit["issued"] == audit["trained"] + sum(audit["retired"].values()) + audit["open"] + audit["lost"]
    assert audit["max_staleness"] <= max_staleness
    replay = run.command("replay")
    assert replay["num_different"] == 0, replay["first_difference"]
    assert replay["num_events"] > 100


@pytest.mark.slow
def test_a_free_running_run_survives_kills_within_its_bound(tmp_path: Path, sort_model: Path) -> None:
    """With groups that are replaced: the head must know how many."""
    settings = ("--schedule.max_staleness", "1", "--schedule.order", "frontier")
    settings += ("--schedule.dynamic_sampling", "true")
    run = Run(tmp_path / "run", sort_model, *settings).start()
    run.wait_version(4)
    run.kill("head")
    run.wait_version(9)
    run.kill("learner")
    run.kill("worker-1")
    summary = run.finish()
    _check_books(run, 24 * 16, 1)
    assert summary["groups"]["trained"] == 24 * 16
    assert 0 < summary["groups"]["retired"]["uninformative"] <= 24 * 32
    assert summary["staleness_max"] <= 1
    rows = [row for row in run.rows() if "schedule/resampled" in row]
    assert sum(row["schedule/resampled"] for row in rows) == summary["groups"]["retired"]["uninformative"]
    assert all(row["schedule/resampled"] == 32 for row in rows if row["schedule/uninformative_kept"])


@pytest.mark.slow
def test_a_learner_that_is_killed_goes_on_with_the_routes_of_every_rollout(tmp_path: Path) -> None:
    """In bfloat16, where a learner without them chooses other experts. The reward is any that differs in a group."""
    model, reward = tmp_path / "model", tmp_path / "any.py"
    mixture().to(torch.bfloat16).save_pretrained(model)
    for name, data in tokenizer_files().items():
        (model / name).write_bytes(data)
    reward.write_text("def score(completions, **columns):\n    return [len(text) % 2 for text in completions]\n")
    settings = {"learner.routing_replay": "true", "model.snapshot_dtype": "bfloat16", "model.compute_dtype": "bfloat16"}
    settings |= {"run.max_steps": "12", "schedule.groups_per_step": "8", "learner.checkpoint_every": "4"}
    settings |= {"reward.functions": f'["{reward}:score"]', "workers.count": "1"}
    run = Run(tmp_path / "run", model, *(f"--{name}={value}" for name, value in settings.items())).start()
    run.wait_version(3)
    run.kill("learner")
    run.wait_version(6)
    _kill_supervisor(run)
    run.start("--resume").wait_version(8)
    run.kill("head")
    run.finish()
    _check_books(run, 12 * 8, 1)
    steps = {row["step"]: row["routes/replayed_share"] for row in run.rows() if "routes/replayed_share" in row}
    assert steps == dict.fromkeys(range(1, 13), 1.0)
