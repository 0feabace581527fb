"""A run whose head's machine is lost again and again, at random instants: workers and learner, on other machines, find
the head that took over by themselves. Nothing acknowledged is lost, nothing is doubled, and the policy is that of a run
that nobody has disturbed.

ECHO2_TEST_STORE names another store than a directory, such as s3://bucket/run; ECHO2_TEST_INSTANTS and ECHO2_TEST_SEED
are how many instants, and which. ECHO2_TEST_FIGURES is a file for what was counted.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from echo2.core.objects import open_objects
from real_runs import CONFIG, ENDLESS, REPOSITORY, STUCK_SECONDS, Run, echo2, pause, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
INSTANTS = int(os.environ.get("ECHO2_TEST_INSTANTS", "20"))
SEED = int(os.environ.get("ECHO2_TEST_SEED", "0"))
DETERMINISTIC = ("--run.deterministic", "true", "--schedule.max_staleness", "2")
#: Steps after the last instant, by a status that is half a second old.
STEPS_AFTER = 10


class Machines:
    """The processes of one run, each on a machine of its own, as it were: a head at one of two addresses, a learner and
    two workers that outlive it."""

    def __init__(self, root: Path, model: Path, store: str) -> None:
        self.root, self.store, self._crew = root, store, ExitStack()
        self.ports = (_free_port(), _free_port())
        self.config = root / "run.toml"
        self.config.write_text(CONFIG.format(model=model), encoding="utf-8")
        self.num_heads = 0
        self.head = self._head(str(self.config), "--head.store", store, *ENDLESS, *DETERMINISTIC)
        self.wait(lambda: (self.out / "ticket").exists() and (self.out / "identity/learner-ticket").exists(), "tickets")
        (root / "learner").mkdir()
        for name in ("config.json", "ticket", "identity/learner-ticket"):
            shutil.copy(self.out / name, root / "learner")
        tickets = [f"@{root / 'learner' / name}" for name in ("learner-ticket", "ticket")]
        self.learner = self._start("learner", "learner", str(root / "learner"), "--ticket", tickets[0])
        names = ("worker-0", "worker-1")
        self.workers = [self._start(name, "worker", tickets[1], "--state", str(root / name)) for name in names]

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.close()

    @property
    def out(self) -> Path:
        return self.root / f"head-{self.num_heads}"

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "echo2", *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, env=environment)
        self._crew.callback(process.wait)
        self._crew.callback(process.kill)
        return process

    def _head(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a head on the machine that has none."""
        self.num_heads += 1
        listen = f"127.0.0.1:{self.ports[self.num_heads % 2]}"
        at = ("--head.listen", listen, "--head.advertise", ", ".join(f"127.0.0.1:{port}" for port in self.ports))
        return self._start(f"head-{self.num_heads}", "head", *arguments, "--out", str(self.out), *at)

    def resume(self, *settings: str) -> None:
        """Go on from the store in an empty directory."""
        self.head = self._head("--resume-from", self.store, *settings)

    def stand_by(self) -> subprocess.Popen[bytes]:
        """Start a standby, and wait until it waits."""
        found = self._head("--resume-from", self.store, "--standby")
        said = self.root / f"head-{self.num_heads}.log"
        self.wait(lambda: "standing by" in said.read_text(), "standby")
        return found

    def version(self) -> int:
        status = read(self.out / "status.json") or {}
        return int(status.get("version", -1)) if status.get("head", {}).get("pid") == self.head.pid else -1

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 4 * STUCK_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"no {what}\n{self.logs()}"
            assert self.head.poll() is None, f"the head ended before {what}\n{self.logs()}"
            pause()

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.root.glob("*.log")))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _position(store: str) -> int:
    """How far the log in the store is."""
    return max((int(Path(key).name) for key in open_objects(store).keys("log")), default=0)


def _store(tmp_path: Path) -> str:
    return os.environ.get("ECHO2_TEST_STORE", str(tmp_path / "store"))


def _deliveries(machines: Machines) -> int:
    """Groups that were acknowledged to workers, as they counted themselves."""
    told = [re.findall(r"delivered (\d+) groups", path.read_text()) for path in machines.root.glob("worker-*.log")]
    return sum(int(numbers[-1]) for numbers in told)


def _figures(**counted: Any) -> None:
    print(json.dumps(counted))
    if "ECHO2_TEST_FIGURES" in os.environ:
        Path(os.environ["ECHO2_TEST_FIGURES"]).write_text(json.dumps(counted), encoding="utf-8")


def test_a_run_whose_heads_disk_is_lost_at_random_instants(tmp_path: Path, sort_model: Path) -> None:
    """Half of the heads are killed; the others sleep, wake up behind the next one, and end."""
    chance, store = random.Random(SEED), _store(tmp_path)
    print(f"seed {SEED}, {INSTANTS} instants")
    seconds, positions, num_woken = list[float](), list[int](), 0
    with Machines(tmp_path, sort_model, store) as machines:
        machines.wait(lambda: machines.version() >= 1, "a step")
        for number in range(INSTANTS):
            until = _position(store) + chance.randint(1, 60)
            machines.wait(lambda until=until: _position(store) >= until, f"position {until}")  # type: ignore[misc]
            old, burnt, began = machines.head, machines.out, time.monotonic()
            positions.append(_position(store))
            sleeps = chance.random() < 0.5
            old.send_signal(signal.SIGSTOP if sleeps else signal.SIGKILL)
            last = number == INSTANTS - 1
            reached = json.loads((burnt / "status.json").read_text())["version"] + STEPS_AFTER
            machines.resume(*(("--run.max_steps", str(reached)) if last else ()))
            said = tmp_path / f"{machines.out.name}.log"
            machines.wait(lambda said=said: "this is head" in said.read_text(), "head")  # type: ignore[misc]
            if sleeps:
                old.send_signal(signal.SIGCONT)
                assert old.wait(STUCK_SECONDS) == 2, machines.logs()
                assert "Another head has taken this run over" in (tmp_path / f"{burnt.name}.log").read_text()
                num_woken += 1
            old.wait(STUCK_SECONDS)
            shutil.rmtree(burnt)
            if not last:
                until = _position(store) + 2
                machines.wait(lambda until=until: _position(store) >= until, "progress")  # type: ignore[misc]
            seconds.append(time.monotonic() - began)
        assert machines.head.wait(10 * STUCK_SECONDS) == 0, machines.logs()
        for process in (machines.learner, *machines.workers):
            assert process.wait(STUCK_SECONDS) == 0, machines.logs()
        audit = json.loads(echo2(tmp_path, "audit", str(machines.out), "--json").stdout)
        acknowledged = _deliveries(machines)
        figures = {"seed": SEED, "instants": INSTANTS, "positions": positions, "woken": num_woken, "steps": reached}
        _figures(**figures, seconds=seconds, acknowledged=acknowledged, audit=audit)
    assert audit["lost"] == audit["doubled"] == 0
    assert audit["trained"] == 16 * reached
    assert audit["leases"]["accepted"] >= acknowledged > 0
    settings = (*DETERMINISTIC, "--run.max_steps", str(reached))
    calm = Run(tmp_path / "calm", sort_model, *settings).start()
    calm.finish(10 * STUCK_SECONDS)
    after = Run(tmp_path / "learner", sort_model)
    assert after.weights() == calm.weights()


def test_a_standby_takes_over_by_itself_and_the_next_one_ends_with_the_run(tmp_path: Path, sort_model: Path) -> None:
    with Machines(tmp_path, sort_model, _store(tmp_path)) as machines:
        machines.wait(lambda: machines.version() >= 1, "a step")
        burnt, standby = machines.out, machines.stand_by()
        machines.head.kill()
        machines.head.wait()
        began = time.monotonic()
        shutil.rmtree(burnt)
        machines.head, second = standby, machines.out
        machines.wait(lambda: machines.version() >= 0, "head")
        seconds = time.monotonic() - began
        reached = machines.version()
        machines.wait(lambda: machines.version() > reached + 1, "progress")
        third = machines.stand_by()
        machines.head.send_signal(signal.SIGTERM)
        assert machines.head.wait(STUCK_SECONDS) == 0, machines.logs()
        for process in (third, machines.learner, *machines.workers):
            assert process.wait(STUCK_SECONDS) == 0, machines.logs()
        assert "the run is over, and this standby is not needed: told to end (SIGTERM)" in machines.logs()
        assert not (machines.out / "config.json").exists()
        audit = json.loads(echo2(tmp_path, "audit", str(second), "--json").stdout)
        _figures(seconds=seconds, acknowledged=_deliveries(machines), audit=audit)
    assert audit["lost"] == audit["doubled"] == 0
    assert audit["leases"]["accepted"] >= _deliveries(machines) > 0
