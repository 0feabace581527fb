"""`echo2 serve` beside SkyRL's server of the same protocol: one client, one model, the same requests, in turn.

    make .venv-tinker-025/.installed                     # the client: the newest SDK that skyrl 0.4.0 takes
    python3.12 -m venv .venv-skyrl && .venv-skyrl/bin/python -m pip install 'skyrl[jax,tinker]==0.4.0'
    make bench-service_beside_skyrl ARGS='[--rounds 9] [--out FILE]'

Both servers run all the time, on loopback, each with its defaults but for one thread a process and, for SkyRL, the JAX
backend and 4 adapters of rank 8. Each round does everything once on each side, whose turn comes first alternates, and
the first round is not counted (JAX compiles a program for each shape). A figure is the median of the rounds' ratios,
SkyRL's seconds over ours, with quartiles, and the CPU seconds that each side's processes took. At the end the SDKs'
conformance suite (tests/sdk) is asked of SkyRL, and the cases that fail are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import recording
import service as shapes

from echo2_service import tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = "echo2/tiny"
#: SkyRL starts its engine by `uv run`; this runs it with the Python that has it.
UV = """#!/bin/bash
while [ "$1" != -m ]; do shift; done
"{python}" "$@"
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{process.args!r} ended with {process.returncode}:\n{log.read_text()[-3000:]}")


class Server:
    """A server in a session of its own. `key`: what clients say."""

    def __init__(self, name: str, url: str, command: list[str], folder: Path, **environment: str) -> None:
        self.name, self.url = name, url
        given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        path = folder / f"{name}.log"
        with path.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder / "models", env=given, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_until_healthy(url, self.process, path)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def make_base(folder: Path, size: str) -> int:
    """The base model that servers find in a folder; its parameters."""
    directory = folder / "models" / BASE
    tiny_model.make(directory)  # its tokenizer stays
    return shapes.make_model(directory, shapes.SIZES[size])


def start_ours(folder: Path, tree: Path = REPOSITORY) -> Server:
    port = free_port()
    (folder / "serve.toml").write_text(f'port = {port}\n[bases]\n"{BASE}" = "{folder / "models" / BASE}"\n')
    command = [sys.executable, "-m", "echo2", "serve", str(folder / "serve.toml"), "--out", str(folder / "service")]
    return Server("echo2", f"http://127.0.0.1:{port}", command, folder, PYTHONPATH=str(tree / "src"))


def start_skyrl(folder: Path, python: Path) -> Server:
    port = free_port()
    uv = folder / "uv"
    uv.write_text(UV.format(python=python))
    uv.chmod(0o755)
    flags = {
        "--base-model": BASE,
        "--backend": "jax",
        "--backend-config": json.dumps({"max_lora_adapters": 4, "max_lora_rank": 8}),
        "--checkpoints-base": str(folder / "skyrl"),
        "--database-url": f"sqlite:///{folder}/skyrl.sqlite",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    command = [str(uv), "run", "-m", "skyrl.tinker.api", *(word for flag in flags.items() for word in flag)]
    path = f"{folder}:{os.environ['PATH']}"
    return Server("skyrl", f"http://127.0.0.1:{port}", command, folder, PATH=path, JAX_PLATFORMS="cpu")


def measure(size: str, folder: Path, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    parameters = make_base(folder, size)
    servers = [start_ours(folder)]
    try:
        servers.append(start_skyrl(folder, options.skyrl_python))
        key = (folder / "service" / "api-key").read_text().strip()
        sides = [f"{server.name}={server.url}={server.process.pid}" for server in servers]
        client = [str(options.client_python), str(Path(__file__).with_name("service_client.py"))]
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        words = [key, str(rounds), str(shapes.SIZES[size][2]), *sides]
        told = subprocess.run([*client, *words], cwd=folder / "models", env=environment, stdout=subprocess.PIPE)
        found = {"parameters": parameters, **compared([json.loads(line) for line in told.stdout.splitlines()])}
        if options.conformance and size == next(iter(shapes.SIZES)):
            found["fails_at_skyrl"] = failures(options.client_python, servers[1].url, folder, environment)
    finally:
        for server in servers:
            server.end()
    return found


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind: ratios of the two sides in each round, and each side's own seconds and CPU seconds."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_side = {
            side: [row for row in rows if (row["kind"], row["side"]) == (kind, side) and row["round"]]
            for side in ("echo2", "skyrl")
        }
        pairs = list(zip(of_side["skyrl"], of_side["echo2"], strict=False))
        found[kind] = {
            "skyrl_over_echo2": shapes.spread([theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]),
            "cpu_skyrl_over_echo2": shapes.spread([theirs["cpu"] / max(0.01, ours["cpu"]) for theirs, ours in pairs]),
        }
        for side, own in of_side.items():
            found[kind][f"{side}_seconds"] = round(statistics.median(row["seconds"] for row in own), 4)
    return found


def failures(python: Path, url: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Cases of the SDKs' suite that fail at a server, each with the last line of why."""
    suite = REPOSITORY / "tests" / "sdk" / "conformance.py"
    command = [str(python), str(suite), "tinker", url, "tml-one", "tml-other"]
    try:
        told = subprocess.run(
            command, cwd=folder / "models", env=environment, stdout=subprocess.PIPE, text=True, timeout=900
        ).stdout
    except subprocess.TimeoutExpired as error:
        told = (error.stdout or b"").decode() + "\nFAIL did not end in 900 s"
    cases = re.split(r"^(?=ok   |FAIL )", told, flags=re.MULTILINE)
    return [f"{case.split()[1]}: {case.strip().splitlines()[-1][:200]}" for case in cases if case.startswith("FAIL ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", default=list(shapes.SIZES))
    parser.add_argument("--skyrl-python", type=Path, default=REPOSITORY / ".venv-skyrl" / "bin" / "python")
    parser.add_argument("--client-python", type=Path, default=REPOSITORY / ".venv-tinker-025" / "bin" / "python")
    parser.add_argument("--no-conformance", dest="conformance", action="store_false")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            figures[size] = measure(size, Path(folder), options.rounds, options)
        print(size, json.dumps(figures[size], indent=1), flush=True)
    print(recording.save("service_beside_skyrl", figures, options.out))


if __name__ == "__main__":
    main()
