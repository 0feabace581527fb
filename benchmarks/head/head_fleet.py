"""What one head needs for a fleet: thousands of workers over real links, each as slow as one with a real model.

    make bench-head_fleet ARGS='--workers 100 1000'

As `head_load.py`, with workers that sample one group of eight in 27 s (.3 rollouts a second, an 8B model on one GPU),
that hold one more, and that reconnect, deliver again and report as real ones do. A step has half a group for each, and
every second step a snapshot is announced to all: twice in the 54 seconds that are measured. Their connections are in
processes of 1,500 each, whose CPU time and memory are told apart. Measured of the head's process: its CPU seconds per
second, its memory and descriptors, at rest and while

    join      all workers connect within `--join-seconds`
    restart   the head is killed and started again while they sample

and of the workers, between both: seconds from a delivery to its answer, and to the next lease where none waited. All
come from one address, so the head takes each connection's for another one. The workers' processes are nicer than the
head, which would else have a small share of a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import head_load
import recording

from echo2.config.rundir import RunDir
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import RUN_POLICY
from echo2.transport import certificates
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcLink, attended
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.transport.tickets import Credentials, Ticket

WORKERS_PER_PROCESS = 1500
#: Steps between two snapshots.
head_load.PUBLISH_STEPS = 2
CALL_SECONDS = 60.0
GROUPS_PER_STEP_MIN = 32
#: Flags that the record names.
CHOICES = ("seconds", "join_seconds", "settle_seconds", "samples", "tokens", "batch", "sampling_seconds", "restart")
#: Until a process of workers has imported what it needs and made its links.
READY_SECONDS = 60.0
#: What Python runs first in the head and its gates, to which each connection comes from an address of its own.
FIRST = """
import itertools
from echo2.transport import door
door.network = lambda host, numbers=itertools.count(): f"{host} {next(numbers)}"
"""
#: Of the workers' processes, above the head's.
NICE = 5


# ---- the workers' side -----------------------------------------------------------------------------------------------


class FakeWorker:
    """Attends, reports, and answers each lease after a while. `notes`: (unix time, kind, seconds)."""

    def __init__(
        self, credentials: Credentials, options: argparse.Namespace, seed: int, notes: list[tuple[float, str, float]]
    ) -> None:
        self._link, self._options, self._notes = GrpcLink(options.address, credentials), options, notes
        self._random = random.Random(seed)
        self._leases: asyncio.Queue[wire.Lease] = asyncio.Queue()
        self._held: dict[int, None] = {}
        self._installed = wire.SnapshotId(policy=RUN_POLICY, lineage=1, version=0)
        self._samples = head_load.rollouts(options.samples, options.tokens, 0)
        self._seconds = head_load.HEARTBEAT_SECONDS
        self._idle_since = 0.0

    async def run(self, start_at: float) -> None:
        await asyncio.sleep(start_at - time.time() + self._random.uniform(0, self._options.join_seconds))
        sampling = asyncio.ensure_future(self._sample())
        beating = asyncio.ensure_future(self._beat())
        try:
            async for order in attended(self._link, self._hello, 600.0, lambda: self._note("disconnected")):
                await self._obey(order)
        finally:
            sampling.cancel()
            beating.cancel()

    def _note(self, kind: str, seconds: float = 0.0) -> None:
        self._notes.append((time.time(), kind, seconds))

    def _hello(self) -> wire.WorkerHello:
        self._note("dialled")
        held, slots = list(self._held), self._options.batch * self._options.samples
        return wire.WorkerHello(
            protocol=PROTOCOL_VERSION, slots=slots, installed=self._installed, held_leases=held, engine="compact"
        )

    async def _obey(self, order: wire.Order) -> None:
        if order.HasField("settings"):
            self._seconds = order.settings.heartbeat_seconds
            self._note("attends")
        elif order.HasField("snapshot"):
            self._installed.version = order.snapshot.version
            self._samples = head_load.rollouts(self._options.samples, self._options.tokens, self._installed.version)
            await self._report()
        elif order.HasField("leases"):
            if self._idle_since:
                self._note("lease", time.time() - self._idle_since)
                self._idle_since = 0.0
            for lease in order.leases.leases:
                self._held[lease.lease_id] = None
                self._leases.put_nowait(lease)
        elif order.HasField("revoked"):
            self._held.pop(order.revoked.lease_id, None)
            self._note("revoked")

    async def _report(self) -> None:
        with suppress(LinkError, PeerError):
            reply = await self._link.call("Report", wire.WorkerReport(installed=self._installed), CALL_SECONDS)
            self._seconds = getattr(reply, "heartbeat_seconds", 0.0) or self._seconds
        self._note("report")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            await self._report()

    async def _sample(self) -> None:
        while True:
            lease = await self._leases.get()
            await asyncio.sleep(self._options.sampling_seconds * self._random.uniform(0.5, 1.5))
            delivery = wire.Delivery(
                lease_id=lease.lease_id,
                group={
                    "policy": lease.policy,
                    "kind": lease.kind,
                    "number": lease.number,
                    "lineage": 1,
                    "rollouts": self._samples,
                    "generate_seconds": self._options.sampling_seconds,
                },
            )
            while lease.lease_id in self._held:
                began = time.time()
                try:
                    replies = await self._link.call("Deliver", wire.Deliveries(items=[delivery]), CALL_SECONDS)
                except (LinkError, PeerError):
                    self._note("undelivered")
                    await asyncio.sleep(1.0)
                    continue
                self._held.pop(lease.lease_id, None)
                is_accepted = replies.items[0].accepted
                self._note("accepted" if is_accepted else "refused", time.time() - began)
                if is_accepted:
                    self._note("acknowledged", lease.lease_id)
                if self._leases.empty():
                    self._idle_since = began


async def workers(options: argparse.Namespace) -> None:
    """All workers of one process; writes their notes when it is told to end."""
    first, last = options.range
    made = json.loads((options.directory / "members.json").read_text())
    ca, key = made["ca"].encode(), made["key"].encode()
    notes = list[tuple[float, str, float]]()
    fleet = [
        FakeWorker(Credentials(ca, made["certificates"][index].encode(), key), options, index, notes)
        for index in range(first, last)
    ]
    (options.directory / f"ready-{first}").touch()
    go = options.directory / "go"
    while not go.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    running = asyncio.gather(*(worker.run(float(go.read_text())) for worker in fleet), return_exceptions=True)
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set_result, None)
    await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    temporary = options.directory / f"notes-{first}.tmp"
    temporary.write_text(json.dumps(notes))
    temporary.rename(options.directory / f"notes-{first}")
    os._exit(0)


def give_addresses(directory: Path) -> None:
    """Let each connection to the heads that are started from now on come from an address of its own."""
    (directory / "sitecustomize.py").write_text(FIRST)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])


def enrol(directory: Path, count: int) -> None:
    """Make so many members in one write, with one key: enrolling over the wire is another benchmark."""
    identity = RunIdentity.create_or_load(RunDir(directory / "run").identity)
    ticket_text = identity.make_ticket("worker", "127.0.0.1:1", count + 1, 24.0, is_own=True)
    ticket = Ticket.parse(ticket_text)
    key = certificates.make_key()
    members: dict[str, Any] = dict(identity.members)
    issued = []
    for index in range(count):
        peer_id = f"w-{index:010x}"
        members[peer_id] = {"role": "worker", "key": f"{index:064x}", "ticket": ticket.ticket_id, "since": time.time()}
        certificate = certificates.issue(
            f"worker:{peer_id}", key.public_key(), identity._ca.subject, identity._ca_key, f"{peer_id}.echo2"
        )
        issued.append(certificates.certificate_pem(certificate).decode())
    plain = json.dumps({"members": members}).encode()
    certificates.write_private(RunDir(directory / "run").identity / "members.json", plain)
    made = {"ca": ticket.credentials.ca_pem.decode(), "key": certificates.key_pem(key).decode(), "certificates": issued}
    (directory / "members.json").write_text(json.dumps(made))


# ---- measuring -------------------------------------------------------------------------------------------------------


class Fleet:
    """The processes of all workers of one measurement."""

    def __init__(self, head: head_load.RealHead, count: int, options: argparse.Namespace) -> None:
        self._directory, self._firsts = head.directory, range(0, count, WORKERS_PER_PROCESS)
        self._processes = []
        for first in self._firsts:
            last = min(count, first + WORKERS_PER_PROCESS)
            words = ["--directory", str(head.directory), "--address", head.address, "--range", str(first), str(last)]
            for name in ("samples", "tokens", "batch", "sampling_seconds", "join_seconds"):
                words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
            self._processes.append(subprocess.Popen(["nice", "-n", str(NICE), sys.executable, __file__, *words]))
        until = time.time() + READY_SECONDS + count / 100
        while any(not (self._directory / f"ready-{first}").exists() for first in self._firsts):
            if time.time() > until:
                raise SystemExit("the workers' processes did not start")
            time.sleep(0.2)

    def go(self) -> float:
        """Let all connect. Return when they begin."""
        at = time.time() + 1.0
        temporary = self._directory / "go.tmp"
        temporary.write_text(str(at))
        temporary.rename(self._directory / "go")
        return at

    def end(self) -> list[tuple[float, str, float]]:
        """End all processes. Return the notes of all workers."""
        for process in self._processes:
            process.terminate()
        notes = []
        for process, first in zip(self._processes, self._firsts, strict=True):
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            path = self._directory / f"notes-{first}"
            notes += [tuple(note) for note in json.loads(path.read_text())] if path.exists() else []
        return sorted(notes)

    def cpu_seconds(self) -> float:
        return sum(head_load.cpu_seconds(process.pid) for process in self._processes)

    def mebibytes(self) -> float:
        return sum(head_load.mebibytes(process.pid) for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def gates(head: head_load.RealHead) -> list[int]:
    """The process ids of the head's gates."""
    children = Path(f"/proc/{head.process.pid}/task/{head.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"gate_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def attending(head: head_load.RealHead) -> int:
    with suppress(OSError, ValueError):
        return sum(one["attends"] for one in json.loads((head.run / "status.json").read_text())["workers"])
    return 0


async def all_attend(head: head_load.RealHead, count: int, seconds: float) -> None:
    until = time.time() + seconds
    while attending(head) < count and time.time() < until:
        if head.process.poll() is not None:
            raise SystemExit((head.directory / "head.log").read_text()[-2000:])
        await asyncio.sleep(1.0)


def restart(head: head_load.RealHead) -> None:
    """Kill the head, and start it again on its port."""
    head.process.kill()
    head.process.wait()
    (head.run / "status.json").unlink()
    command = head.process.args
    assert isinstance(command, list)
    head.process = subprocess.Popen([*command, "--resume"], stderr=head._log)


def outcomes(run: Path) -> dict[str, int]:
    with sqlite3.connect(f"file:{RunDir(run).ledger}?mode=ro", uri=True) as ledger:
        return dict(ledger.execute("SELECT coalesce(outcome, 'open'), count(*) FROM leases GROUP BY 1").fetchall())


async def measure(head: head_load.RealHead, count: int, options: argparse.Namespace) -> dict[str, Any]:
    marks, ready = list[tuple[int, float]](), asyncio.Event()
    learning = asyncio.ensure_future(head_load.learner(head.directory, ready, marks))
    fleet = None
    found: dict[str, Any] = {"workers": count}
    try:
        await asyncio.wait([learning, waiting := asyncio.ensure_future(ready.wait())], return_when="FIRST_COMPLETED")
        waiting.cancel()
        fleet = Fleet(head, count, options)
        cpu, began = head_load.cpu_seconds(head.process.pid), fleet.go()
        await all_attend(head, count, options.join_seconds + options.patience_seconds)
        found |= {"attending": attending(head), "join_cpu_seconds": head_load.cpu_seconds(head.process.pid) - cpu}
        await asyncio.sleep(options.settle_seconds)
        pid, then, num_marks = head.process.pid, time.time(), len(marks)
        cpu, events = head_load.cpu_seconds(pid), head_load.num_events(head.run)
        of_workers, of_gates = fleet.cpu_seconds(), sum(map(head_load.cpu_seconds, gates(head)))
        await asyncio.sleep(options.seconds)
        until = time.time()
        cpu, of_workers = head_load.cpu_seconds(pid) - cpu, fleet.cpu_seconds() - of_workers
        of_gates = sum(map(head_load.cpu_seconds, gates(head))) - of_gates
        groups = sum(number for number, _ in marks[num_marks:])
        found |= {
            "head_cpu_share": cpu / (until - then),
            "groups_per_second": groups / (until - then),
            "events_per_second": (head_load.num_events(head.run) - events) / (until - then),
            "mebibytes": head_load.mebibytes(pid),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "gates": len(gates(head)),
            "gates_cpu_share": of_gates / (until - then),
            "gates_mebibytes": sum(map(head_load.mebibytes, gates(head))),
            "gates_descriptors": [len(os.listdir(f"/proc/{gate}/fd")) for gate in gates(head)],
            "workers_cpu_share": of_workers / (until - then),
            "workers_mebibytes": fleet.mebibytes(),
            "load": os.getloadavg()[0],
        }
        killed_at = time.time()
        if options.restart:
            restart(head)
            up_at = time.time()
            await all_attend(head, count, options.patience_seconds)
            await asyncio.sleep(5.0)
            found |= {
                "restart_cpu_seconds": head_load.cpu_seconds(head.process.pid),
                "attending_after": attending(head),
                "restart_mebibytes": head_load.mebibytes(head.process.pid),
                "outcomes": outcomes(head.run),
            }
        if learning.done():
            learning.result()
        notes = fleet.end()
        joined = [at - began for at, kind, _ in notes if kind == "attends" and at < then]
        found["join_seconds"] = max(joined, default=0.0)
        found["dialled_to_join"] = sum(kind == "dialled" and at < then for at, kind, _ in notes)
        if options.restart:
            back = [at for at, kind, _ in notes if kind == "attends" and at > killed_at]
            found["restart_seconds"] = max(back, default=up_at) - up_at
            found["dialled_to_return"] = sum(kind == "dialled" and at > killed_at for at, kind, _ in notes)
            found["refused_after"] = sum(kind == "refused" and at > killed_at for at, kind, _ in notes)
        for kind, name in (("accepted", "deliver"), ("lease", "lease"), ("report", "report")):
            seconds = [value for at, each, value in notes if each == kind and then < at < until]
            found[f"{name}s_per_second"] = len(seconds) / (until - then)
            if seconds and kind != "report":
                found[f"{name}_ms"] = [1000 * recording.quantile(seconds, share) for share in (0.5, 0.99)]
        found["groups_per_cpu_second"] = found["delivers_per_second"] / found["head_cpu_share"]
    finally:
        learning.cancel()
        if fleet is not None:
            fleet.kill()
    return {name: rounded(value) for name, value in found.items()}


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--seconds", type=float, default=54.0)
    parser.add_argument("--join-seconds", type=float, default=10.0, help="in which all workers begin to connect")
    parser.add_argument("--settle-seconds", type=float, default=45.0, help="from the last one's arrival to measuring")
    parser.add_argument("--patience-seconds", type=float, default=120.0, help="for all workers to be there")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1, help="groups that a worker samples at once")
    parser.add_argument("--sampling-seconds", type=float, default=27.0, help="of a group, on average")
    parser.add_argument("--step", type=int, default=0, help="groups a step; 0: by workers")
    parser.add_argument("--restart", action="store_true", help="kill the head at the end, and start it again")
    parser.add_argument("--out", type=Path, help="file for the figures (default: in results/)")
    parser.add_argument("--profile", default="", help="write the head's cProfile there; its times are not real ones")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--range", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.range:
        asyncio.run(workers(options))
        return
    step, rows = options.step, []
    for count in options.workers:
        options.step = step or max(GROUPS_PER_STEP_MIN, count // 2)  # steps in advance shall not limit the workers
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            enrol(Path(folder), count)
            give_addresses(Path(folder))
            head = head_load.RealHead(Path(folder), 0, options)
            try:
                found = asyncio.run(measure(head, count, options))
            finally:
                head.close()
        print(json.dumps(found), flush=True)
        rows.append(found)
    chosen = {name: value for name, value in vars(options).items() if name in CHOICES}
    print(recording.save("head_fleet", {"options": chosen, "rows": rows}, options.out))


if __name__ == "__main__":
    main()
