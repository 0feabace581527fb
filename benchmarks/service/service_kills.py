"""Kill what serves, again and again, under load from a real SDK: the front, the learner, its own sampler, machines.

    make test-foreign                                 # once: the SDKs' environments
    make bench-service_kills ARGS='[--kills 200] [--seed 0] [--out FILE]'

Two clients train, save and sample in a loop (tests/sdk/training.py). After the last kill what they printed is compared
with an undisturbed run of as many steps, line by line: losses in hexadecimal and tokens. A line that is missing is a
request that was lost, one too many was answered twice, and one that differs is a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import recording

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from served import Served  # noqa: E402 (a service and a machine, as the tests start them)

NUM_CLIENTS = 2
#: From a client's step after a kill to the next kill.
PAUSE_SECONDS_MAX = 2.0


class Client:
    """A training loop whose lines are collected until it is told to end."""

    def __init__(self, served: Served, num_steps: int) -> None:
        self.process = served.client("tinker-038", "training.py", str(num_steps))
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def end(self) -> list[str]:
        """What it printed, whole lines."""
        self.process.send_signal(signal.SIGKILL)
        self._reading.join()
        self.process.wait()
        return [line for line in self.lines if line.endswith("]\n")]

    def finished(self) -> list[str]:
        """Likewise, when it has done all its steps."""
        self.process.wait()
        self._reading.join()
        return self.lines


def children(process_id: int) -> dict[str, int]:
    """The service's processes by what they do."""
    listed = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    found = {}
    for child in map(int, listed):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        for name in ("learner", "sampler"):
            if f"echo2_service.{name}.process".encode() in words:
                found[name] = child
    return found


def kill_one(served: Served, rng: random.Random) -> str:
    """Kill something that runs; what ends for good is started again."""
    processes = children(served.process.pid)
    victim = rng.choice(["front", "machine", *sorted(processes)])
    if victim == "front":
        served.kill()
        served.start()
    elif victim == "machine":
        served.machine.kill()
        served.machine.communicate()
        served.start_machine()
    else:
        subprocess.run(["kill", "-9", str(processes[victim])], check=False)
    return victim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng, killed = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder))
        clients = [Client(served, 1_000_000) for _ in range(NUM_CLIENTS)]
        began = time.perf_counter()
        for number in range(options.kills):
            _wait_for_progress(clients, 1, any)
            time.sleep(rng.uniform(0.0, PAUSE_SECONDS_MAX))
            killed[kill_one(served, rng)] += 1
            print(f"\r{number + 1} kills, {[len(client.lines) for client in clients]} steps", end="", flush=True)
        _wait_for_progress(clients, 2, all)
        seconds = time.perf_counter() - began
        printed = [client.end() for client in clients]
        undisturbed = Client(served, max(map(len, printed))).finished()
        served.machine.terminate()
        served.process.terminate()
        served.process.communicate()
        served.machine.communicate()
    wrong = sum(line != expected for lines in printed for line, expected in zip(lines, undisturbed, strict=False))
    lost = sum(len(set(range(len(lines))) - {_step(line) for line in lines}) for lines in printed)
    doubled = sum(len(lines) - len({_step(line) for line in lines}) for lines in printed)
    found = {
        "kills": dict(killed),
        "seconds": round(seconds, 1),
        "steps": [len(lines) for lines in printed],
        "lost": lost,
        "answered_twice": doubled,
        "wrong": wrong,
    }
    print("\n" + json.dumps(found))
    print(recording.save("service_kills", found, options.out))


def _wait_for_progress(clients: list[Client], num_steps: int, enough: Callable[[Iterable[bool]], bool]) -> None:
    before = [len(client.lines) for client in clients]
    while not enough(len(client.lines) >= told + num_steps for client, told in zip(clients, before, strict=True)):
        time.sleep(0.05)
        assert all(client.process.poll() is None for client in clients), "a client gave up"


def _step(line: str) -> int:
    """Its number, as the name of its checkpoint says it."""
    return int(line.split()[1].removeprefix("step_"))


if __name__ == "__main__":
    main()
