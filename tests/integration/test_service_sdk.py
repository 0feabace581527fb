"""Real SDKs drive a real `echo2 serve`. Each has an environment of its own, which `make test-sdk` makes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import house
from echo2.service.access import Doorkeeper
from echo2.service.serve import open_database

SDKS = {"tinker-038": "tinker", "logits": "logits", "tinker-025": "tinker", "tinker-029": "tinker"}
SCRIPTS = house.REPOSITORY / "tests" / "sdk"
NUM_STEPS = 24
#: Steps of the client after which the service is killed.
KILL_AFTER = (3, 9, 15)


def python_of(sdk: str) -> Path:
    return house.REPOSITORY / f".venv-{sdk}" / "bin" / "python"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Served:
    """`echo2 serve` in a directory, on ports that stay, and a machine that samples for it: `echo2 worker`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        settings = f'port = {self.port}\n[bases]\n"echo2/tiny" = ""\n[fleet]\nlisten = "127.0.0.1:{free_port()}"\n'
        (folder / "serve.toml").write_text(settings)
        self.start()
        self.start_machine()

    def start(self) -> None:
        self.process = self.echo2("serve", str(self.folder / "serve.toml"), "--out", str(self.folder))
        assert self.process.stdout is not None
        while "serving at" not in (line := self.process.stdout.readline()):
            assert line, "the service does not start"

    def start_machine(self) -> None:
        ticket = f"@{self.folder / 'ticket'}"
        self.machine = self.echo2("worker", ticket, "--state", str(self.folder / "state"), "--device", "cpu")

    def echo2(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(house.SOURCE), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "echo2", *arguments]
        with (self.folder / f"{arguments[0]}.log").open("a") as log_file:
            return subprocess.Popen(
                command, cwd=house.REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=log_file, text=True
            )

    def num_sampled(self) -> int:
        """By the machine, as the service says it."""
        status, _ = self.echo2("serve", "status", "--out", str(self.folder), "--json").communicate()
        return sum(machine["sampled"] for machine in json.loads(status)["machines"].values())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def key(self) -> str:
        return (self.folder / "api-key").read_text().strip()

    def client(self, sdk: str, script: str, *arguments: str) -> subprocess.Popen[str]:
        """A client where the SDK finds the tokenizer of the base model."""
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(
            [python_of(sdk), SCRIPTS / script, SDKS[sdk], self.url, self.key, *arguments],
            cwd=self.folder / "models",
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )


pytestmark = pytest.mark.slow


@pytest.fixture
def sdk(request: pytest.FixtureRequest) -> str:
    """Asked for before anything is started: an SDK whose Python is missing costs nothing."""
    name: str = request.param
    if not (installed := house.REPOSITORY / f".venv-{name}" / ".installed").exists():
        pytest.skip(f"{installed.parent} is not there or not whole; `make test-sdk` makes it")
    return name


@pytest.fixture
def served(sdk: str, tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    try:
        yield made
    finally:
        made.machine.terminate()
        made.process.terminate()
        made.machine.communicate(timeout=30)
        made.process.communicate(timeout=30)
    assert (made.machine.returncode, made.process.returncode) in ((0, 0), (0, -15))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sdk", SDKS, indirect=True)
def test_what_clients_count_on(served: Served, sdk: str) -> None:
    database = open_database(served.folder)
    other = Doorkeeper(database, time.time).add_key("other")
    database.close()
    text, _ = served.client(sdk, "conformance.py", other).communicate()
    lines = [line for line in text.splitlines() if line.startswith("ok ")]
    assert "FAIL" not in text, text
    assert len(lines) == 18, text
    assert served.num_sampled() > 0, "the machine that joined sampled nothing"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sdk", ["tinker-038", "logits"], indirect=True)
def test_a_client_does_not_notice_that_the_service_was_killed(served: Served, sdk: str) -> None:
    undisturbed, _ = served.client(sdk, "training.py", str(NUM_STEPS)).communicate()
    lines = []
    with served.client(sdk, "training.py", str(NUM_STEPS)) as client:
        assert client.stdout is not None
        for line in client.stdout:
            lines.append(line)
            if len(lines) in KILL_AFTER:
                served.kill()
                served.machine.kill()
                served.machine.communicate()
                served.start()
                served.start_machine()
    assert client.returncode == 0
    assert len(lines) == NUM_STEPS
    assert lines == undisturbed.splitlines(keepends=True)
