"""A run that goes on for hours while everything happens to it that may: what is lost, what grows, what waits.

    make demo                                               # once: the model
    make bench-soak ARGS='[--minutes 120] [--out FILE]'

Real processes. One machine of the owner is beside the head; another one, and all strangers, are behind a proxy that
stands for a wide-area link: it delays, loses (as a stall of a retransmission) and is cut for 60 s now and then.
Strangers are killed and come back every few seconds, liars of `hostile_worker.py` among them. Every minute somebody
floods the door with connections. Once the disk, a file system of its own, is full for a minute. The learner's steps
take a set time, so that all needs a modest share of a machine. Linux only, and root for the disk.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_worker
import recording

from echo2.transport.tickets import TICKET_PREFIX, Ticket
from echo2.worker import joining
from echo2.worker import worker_process as worker

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "outputs" / "models" / "digit_sorting"
ECHO2 = (sys.executable, "-m", "echo2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
DISK_BYTES = 1 << 30
#: Left when it is filled; a run pauses below 256 MiB.
LEFT_BYTES = 100 << 20
FULL_SECONDS = 60.0
DELAY_SECONDS, LOSS, RETRANSMISSION_SECONDS = 0.05, 0.01, 0.3
PARTITION_SECONDS, BETWEEN_PARTITIONS_SECONDS = 60.0, 300.0
#: Between two deaths or returns of strangers.
CHURN_SECONDS = 5.0
BETWEEN_FLOODS_SECONDS, FLOOD_CONNECTIONS = 60.0, 300
SAMPLE_SECONDS = 10.0
TRAIN_SECONDS, GROUPS_PER_STEP = 4.0, 16
#: The first share of the samples in which a head is still warming up.
WARM_SHARE = 0.2
LIES = (
    "half the tokens random",
    "copies",
    "a version of tomorrow",
    "empty groups",
    "logprob -99",
    *hostile_worker.IDLE,
)
NUM_HONEST = 3

CONFIG = """
[run]
max_steps = 1_000_000
[model]
path = "{model}"
[tasks]
source = "digit_sorting"
params = {{split = "train", min_digits = 5, max_digits = 10}}
[reward]
functions = ["exact_match"]
[sampling]
group_size = 4
max_tokens = 12
[schedule]
groups_per_step = {groups}
max_staleness = 2
lease_seconds = 20.0
[learner]
lr = 1e-5
checkpoint_every = 20
[workers]
count = 0
"""


# ---- the wide-area link ----------------------------------------------------------------------------------------------


def proxy(port: int, target: int, cut: Path) -> None:
    """Forward to `target`, late, with stalls, and nothing at all while the file `cut` is there."""

    def pipe(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(DELAY_SECONDS + RETRANSMISSION_SECONDS * (random.random() < LOSS))
                while cut.exists():
                    time.sleep(1.0)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            near, _ = server.accept()
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", target))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pipe, args=ends, daemon=True).start()


def through(ticket: str, port: int) -> str:
    """The same ticket, with another address."""
    plain = json.loads(base64.urlsafe_b64decode(ticket.removeprefix(TICKET_PREFIX)))
    plain["addr"] = f"127.0.0.1:{port}"
    return TICKET_PREFIX + base64.urlsafe_b64encode(json.dumps(plain, separators=(",", ":")).encode()).decode()


def flood(port: int) -> None:
    """Connections that say nothing, or begin TLS and say no more."""
    with contextlib.ExitStack() as kept:
        for number in range(FLOOD_CONNECTIONS):
            one = kept.enter_context(socket.socket())
            one.settimeout(1.0)
            with contextlib.suppress(OSError):
                one.connect(("127.0.0.1", port))
                one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" if number % 2 else b"")
        time.sleep(5.0)


# ---- processes -------------------------------------------------------------------------------------------------------


def forked(what: Callable[[], object], log: Path) -> int:
    """A process of its own that begins with what is imported here: cheaper than a new one."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        what()
    finally:
        os._exit(0)


def works(ticket: str, state: Path, lie: str, seed: int, relays: bool) -> None:
    if lie:
        joining.WorkerProcess = hostile_worker.lying(lie, seed)  # type: ignore[attr-defined]
    joining.run_worker(ticket, state, worker.WorkerOptions(relays=relays, price_usd_per_hour=0.1))


def end(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, how)
        os.waitpid(pid, 0)


def is_over(pid: int) -> bool:
    """Whether this child has ended; then it is reaped."""
    return os.waitpid(pid, os.WNOHANG)[0] != 0


class Soak:
    """The run in `out`, and all that happens to it."""

    def __init__(self, folder: Path, disk: Path, model: Path, seed: int) -> None:
        self.folder, self.disk, self.out, self.rng = folder, disk, disk / "run", random.Random(seed)
        self.counts = dict.fromkeys(("deaths", "returns", "floods", "partitions", "disk_full_seconds"), 0)
        self.memory: list[tuple[float, float]] = []
        self.cut = folder / "cut"
        (folder / "run.toml").write_text(CONFIG.format(model=model.resolve(), groups=GROUPS_PER_STEP))
        self.head = self._popen("head", *ECHO2, "head", str(folder / "run.toml"), "--out", str(self.out))
        while not (self.out / "ticket").exists():
            self.check()
            time.sleep(0.2)
        own = (self.out / "ticket").read_text().strip()
        self.port = int(Ticket.parse(own).address.rpartition(":")[2])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            far = free.getsockname()[1]
        tickets = {name: through(self._invite(), far) for name in ("honest", *LIES)}
        self.proxy = forked(lambda: proxy(far, self.port, self.cut), folder / "proxy.log")
        learner = {"run": str(self.out), "train_seconds": TRAIN_SECONDS, "groups_per_step": GROUPS_PER_STEP}
        self.learner = self._popen(
            "learner", sys.executable, str(HERE.parent / "overlap" / "idle_nodes.py"), "learner", json.dumps(learner)
        )
        self.own = [
            forked(lambda ticket=ticket, n=n: works(ticket, folder / f"own{n}", "", n, True), folder / f"own{n}.log")  # type: ignore[misc]
            for n, ticket in enumerate((own, through(own, far)))
        ]
        names = [("honest", "")] * NUM_HONEST + [(lie, lie) for lie in LIES]
        self.strangers = [(tickets[name], lie, folder / f"stranger{n}") for n, (name, lie) in enumerate(names)]
        self.running: dict[int, int] = {}

    def _popen(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=HERE.parents[1], env=ENVIRONMENT, stdout=log, stderr=log)

    def _invite(self) -> str:
        return recording.output_of([*ECHO2, "invite", str(self.out)], env=ENVIRONMENT)

    def check(self) -> None:
        """Raises RuntimeError where the head or the learner has ended."""
        if self.head.poll() is not None:
            raise RuntimeError("the head ended: " + (self.folder / "head.log").read_text()[-2000:])
        if hasattr(self, "learner") and self.learner.poll() is not None:
            raise RuntimeError("the learner ended: " + (self.folder / "learner.log").read_text()[-2000:])

    def churn(self) -> None:
        """One stranger dies without a word, or one comes back; one that was sent away comes back as well."""
        self.running = {place: pid for place, pid in self.running.items() if not is_over(pid)}
        place = self.rng.randrange(len(self.strangers))
        if place in self.running:
            end(self.running.pop(place))
            self.counts["deaths"] += 1
        else:
            ticket, lie, state = self.strangers[place]
            seed = self.rng.randrange(1 << 30)
            self.running[place] = forked(lambda: works(ticket, state, lie, seed, False), state.with_suffix(".log"))
            self.counts["returns"] += 1

    def sample(self, began: float) -> None:
        status = Path(f"/proc/{self.head.pid}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        self.memory.append((time.monotonic() - began, kib / 1024))

    def go_on(self, minutes: float) -> None:
        """All of it, until the time is over."""
        began = time.monotonic()
        ends_at, fills_at = began + 60.0 * minutes, began + 30.0 * minutes
        next_flood, next_cut, next_sample = began + 30.0, began + 120.0, began
        filler, empty_at, heals_at, floods = self.disk / "filler", 0.0, 0.0, list[int]()
        while (now := time.monotonic()) < ends_at:
            self.check()
            self.churn()
            if now >= next_sample:
                self.sample(began)
                next_sample = now + SAMPLE_SECONDS
            if now >= next_flood:
                floods = [pid for pid in floods if not is_over(pid)]
                floods.append(forked(lambda: flood(self.port), self.folder / "flood.log"))
                self.counts["floods"] += 1
                next_flood = now + BETWEEN_FLOODS_SECONDS
            if now >= next_cut:
                self.cut.touch()
                self.counts["partitions"] += 1
                heals_at, next_cut = now + PARTITION_SECONDS, now + BETWEEN_PARTITIONS_SECONDS
            if self.cut.exists() and now >= heals_at:
                self.cut.unlink()
            if fills_at and now >= fills_at:
                fill(self.disk, filler)
                fills_at, empty_at = 0.0, now + FULL_SECONDS
                self.counts["disk_full_seconds"] = int(FULL_SECONDS)
            if empty_at and now >= empty_at:
                filler.unlink()
                empty_at = 0.0
            time.sleep(CHURN_SECONDS)
        self.cut.unlink(missing_ok=True)

    def close(self) -> None:
        for pid in self.running.values():
            end(pid)
        if self.head.poll() is None:
            self.head.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.head.wait(60.0)
        for pid in (*self.own, self.proxy):
            end(pid)
        for process in (self.head, self.learner):
            process.kill()
            process.wait()

    def figures(self) -> dict[str, Any]:
        """What came out; the audit and the replay by our own commands."""
        found = {}
        for command in ("audit", "replay", "trust"):
            done = subprocess.run(
                [*ECHO2, command, str(self.out), "--json"], env=ENVIRONMENT, capture_output=True, text=True, check=False
            )
            found[command] = json.loads(done.stdout) if done.stdout else done.stderr[-500:]
        metrics = self.out / "metrics.jsonl"  # not there before the first step
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return {**found, **waits(rows), **slope(self.memory), **self.counts, "memory_mib": self.memory}


def fill(disk: Path, filler: Path) -> None:
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > LEFT_BYTES:
            file.write(bytes(min(1 << 20, free - LEFT_BYTES)))


def waits(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The learner's idle share, beside what the head said meanwhile that it should be; the causes of its waits."""
    steps = [row for row in rows if "time/step" in row]
    seconds = sum(row["time/step"] for row in steps)
    said = [row["learner/idle_predicted"] for row in steps if row.get("learner/idle_predicted") is not None]
    causes: Counter[str] = Counter()
    for row in steps:
        told = {name: value for name, value in row.items() if name.startswith("wait/")}
        causes.update({name: value for name, value in told.items() if isinstance(value, float)})
    return {
        "steps": len(steps),
        "idle": sum(row["time/wait_for_batch"] for row in steps) / seconds if steps else None,
        "idle_predicted": statistics.fmean(said) if said else None,
        "wait_seconds": {cause: round(seconds, 1) for cause, seconds in causes.most_common()},
    }


def slope(samples: list[tuple[float, float]]) -> dict[str, Any]:
    """Of the head's resident memory over time, by least squares, without its first part."""
    late = samples[int(len(samples) * WARM_SHARE) :]
    if len(late) < 3:
        return {}
    line = statistics.linear_regression([at for at, _ in late], [mib for _, mib in late])
    rest = [mib - line.intercept - line.slope * at for at, mib in late]
    return {
        "head_mib_per_hour": round(3600 * line.slope, 2),
        "head_mib_scatter": round(statistics.pstdev(rest), 2),
        "head_mib_first_last": (late[0][1], late[-1][1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--model", type=recording.there, default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="echo2-soak-") as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
        try:
            soak = Soak(Path(folder), disk, options.model, options.seed)
            failure = ""
            try:
                soak.go_on(options.minutes)
            except RuntimeError as error:
                failure = str(error)
            finally:
                soak.close()
            figures = {"minutes": options.minutes, "seed": options.seed, "failure": failure, **soak.figures()}
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
    shown = {name: value for name, value in figures.items() if name not in ("memory_mib", "trust")}
    print(json.dumps(shown, indent=1))
    print(f"saved in {recording.save('soak', figures, options.out)}")


if __name__ == "__main__":
    main()
