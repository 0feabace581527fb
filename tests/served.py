"""A real `echo2 serve` with a machine that samples for it, and clients of the real SDKs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import house
from real_runs import free_port

SDKS = {"tinker-038": "tinker", "logits": "logits", "tinker-025": "tinker", "tinker-029": "tinker"}
SCRIPTS = house.REPOSITORY / "tests" / "sdk"


def python_of(sdk: str) -> Path:
    return house.REPOSITORY / f".venv-{sdk}" / "bin" / "python"


class Served:
    """`echo2 serve` in a directory, on ports that stay, and a machine that samples for it: `echo2 worker`."""

    def __init__(
        self, folder: Path, bases: Sequence[str] = ("echo2/tiny",), bills: str = "", with_machine: bool = True
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        models = "".join(f'"{base}" = ""\n' for base in bases)
        settings = f"port = {self.port}\n[bases]\n{models}[bills]\n{bills}\n"
        if with_machine:
            settings += f'[fleet]\nlisten = "127.0.0.1:{free_port()}"\n'
        (folder / "serve.toml").write_text(settings)
        self.start()
        if with_machine:
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
