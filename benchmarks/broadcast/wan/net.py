"""An emulated wide-area network for real processes: every node a network namespace behind its own access link.

Needs root, a C compiler, /dev/net/tun, util-linux (`nsenter`, `setpriv`); `ip` only to choose a congestion control that
host does not let namespaces choose by sysctl. The packets pass through `emulator.c`, which also makes the namespaces:
when it ends, for whatever reason, they and everything in them are gone from the machine's view.

    round trip of a and b = 2 (delay_a + delay_b)        a sends to b at most at min(up_a, down_b)

Rates count IP packets, headers included: at an MTU of 1500 TCP carries at most 96.5 % of them as payload.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ADDRESSES = "10.77.{}.{}"
MTU = 1500
REPLY_LIMIT_SECONDS = 5.0


class WanError(Exception):
    """The network can't be emulated here."""


@dataclass(frozen=True, slots=True)
class AccessLink:
    """What lies between one node and the middle of the network. `queue_ms`: what each FIFO holds at most."""

    up_mbit: float = 100.0
    down_mbit: float = 100.0
    delay_ms: float = 25.0
    loss_percent: float = 0.0
    queue_ms: float = 200.0
    is_dead: bool = False  # a black hole
    is_closed: bool = False  # nobody can begin a connection to it

    def words(self) -> str:
        """As the emulator is told."""
        numbers = (self.up_mbit, self.down_mbit, self.delay_ms, self.loss_percent, self.queue_ms)
        return " ".join([*(f"{number:.6g}" for number in numbers), str(int(self.is_dead)), str(int(self.is_closed))])


def build() -> Path:
    """The compiled emulator; compiled anew whenever its source changed."""
    source = HERE / "emulator.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"echo2-wan-{os.getuid()}" / f"emulator-{digest}"
    if not program.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise WanError("no C compiler (cc, gcc or clang) on this machine")
        program.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = program.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", str(unfinished), str(source)], check=True)
        unfinished.rename(program)
    return program


class Wan:
    """A running network. Use as a context manager; `congestion` is set for all nodes, "" leaves the host's default.

    Where no link loses packets, those that TCP sends together travel together (`emulator.c` says how): this costs the
    machine a fraction of the time, of which a benchmark on few cores has little. Loss that is set later loses them as
    one; so give some link its loss at the start, or say `bundles=False`.
    """

    def __init__(self, links: Mapping[str, AccessLink], congestion: str = "", *, bundles: bool = True) -> None:
        for needed in ("/dev/net/tun", "/proc/self/ns/net"):
            if not os.path.exists(needed):
                raise WanError(f"{needed} is missing")
        if os.geteuid() != 0:
            raise WanError("making network namespaces needs root")
        self.addresses = {name: ADDRESSES.format(at // 250, at % 250 + 1) for at, name in enumerate(links)}
        self._links: dict[str, AccessLink] = {}
        self._inside: dict[str, int] = {}
        self._processes: list[subprocess.Popen[Any]] = []
        self._unread = b""
        pipe = subprocess.PIPE
        joined = int(bundles and not any(link.loss_percent for link in links.values()))
        self._emulator = subprocess.Popen([str(build())], stdin=pipe, stdout=pipe, bufsize=0)
        try:
            self.is_realtime = self._reply("the start") == "realtime"
            for name, link in links.items():
                self._inside[name] = int(self._tell(f"node {name} {self.addresses[name]} {MTU} {joined}"))
                self.set_link(name, link)
            self.congestion = self._choose_congestion(congestion)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Wan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def emulator_pid(self) -> int:
        return self._emulator.pid

    def link(self, name: str) -> AccessLink:
        return self._links[name]

    def set_link(self, name: str, link: AccessLink) -> None:
        """Change a node's link, also in flight. Packets under way keep the delay they were given."""
        self._tell(f"link {name} {link.words()}")
        self._links[name] = link

    def change(self, name: str, **changes: Any) -> None:
        """Change some of a node's link: `wan.change("w2", is_dead=True)`."""
        self.set_link(name, replace(self._links[name], **changes))

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in a node."""
        enter = ["nsenter", f"--net=/proc/{self._emulator.pid}/fd/{self._inside[name]}", "--"]
        return [*enter, "setpriv", "--pdeathsig", "KILL", "--", *command]  # nobody outlives the benchmark

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process in a node, in a process group of its own. It is killed when the network closes."""
        process = subprocess.Popen(self.inside(name, command), start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(self, name: str, command: Sequence[str]) -> str:
        """Run a short command in a node; its output."""
        done = subprocess.run(self.inside(name, command), capture_output=True, text=True, check=False)
        if done.returncode:
            raise WanError(f"{' '.join(command)} in {name}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def stats(self) -> dict[str, Any]:
        """Counters since the start for each node, and how late packets were delivered since the last call.

        A packet counts as late when it came more than 5 ms after its time: the machine did not keep up.
        """
        counted: dict[str, Any] = json.loads(self._tell("stats"))
        return counted

    def kill(self, process: subprocess.Popen[Any]) -> None:
        """SIGKILL to a process started here and all it started."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what was started in the nodes and end the network."""
        for process in self._processes:
            self.kill(process)
        for process in self._processes:
            process.wait()
        self._processes.clear()
        if self._emulator.stdin is not None:
            self._emulator.stdin.close()
        try:
            self._emulator.wait(REPLY_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._emulator.kill()
            self._emulator.wait()

    def _tell(self, command: str) -> str:
        assert self._emulator.stdin is not None
        self._emulator.stdin.write(command.encode() + b"\n")
        return self._reply(command)

    def _reply(self, to: str) -> str:
        assert self._emulator.stdout is not None
        deadline = time.monotonic() + REPLY_LIMIT_SECONDS
        while b"\n" not in self._unread:
            if not select.select([self._emulator.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WanError(f"the emulator does not answer to {to!r}")
            more = self._emulator.stdout.read(1 << 16)
            if not more:
                raise WanError(f"the emulator ended at {to!r}")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        word, _, rest = line.decode().partition(" ")
        if word != "ok":
            raise WanError(f"{to!r}: {rest}")
        return rest

    def _choose_congestion(self, wanted: str) -> str:
        """Set it in every node and see what a connection there really gets: the name of it.

        By sysctl where the host allows that; else as an attribute of the namespace's own route, which any root may set.
        """
        if wanted:
            available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            if wanted not in available:
                raise WanError(f"this kernel has no {wanted} (it has {', '.join(available)})")
        for name in self._inside:
            if wanted and self._congestion_in(name) != wanted:
                self.run(name, ["ip", "route", "replace", "default", "dev", "wan0", "congctl", wanted])
                self.run(name, ["ip", "route", "flush", "cache"])
        return wanted or self._congestion_in(next(iter(self._inside)))

    def _congestion_in(self, name: str) -> str:
        return self.run(name, ["sysctl", "-n", "net.ipv4.tcp_congestion_control"]).strip()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its ended children so far; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> tuple[float, float]:
    """(busy, total) seconds of all cores of this machine since it started, whoever used them."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second


_SINK = """
import socket, sys, time
listener = socket.create_server(("", 5000)); print("up", flush=True)
while True:
    link, _ = listener.accept(); begun = time.monotonic(); got, first, last = 0, 0.0, 0.0
    while data := link.recv(1 << 18):
        last = time.monotonic(); got += len(data) * bool(first)
        first = first or (last if last > begun + 1.5 else 0.0)  # after the slow start
    print(got * 8e-6 / max(last - first, 1e-9), flush=True)
"""
_SOURCE = """
import socket, sys
link = socket.create_connection((sys.argv[1], 5000), timeout=10)
print(link.getsockopt(socket.IPPROTO_TCP, 13, 16).rstrip(b"\\0").decode())
link.sendall(bytes(int(float(sys.argv[2]) * (1 << 20)))); link.close()
"""
_ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("", 5001)); print("up", flush=True)
while True:
    data, who = s.recvfrom(2048); s.sendto(data, who)
"""
_PING = """
import socket, statistics, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.5); trips = []; count = int(sys.argv[2])
s.connect((sys.argv[1], 5001))
for _ in range(int(sys.argv[3])):
    start = time.monotonic()
    for _ in range(count): s.send(b"x" * 100)
    try:
        for _ in range(count): s.recv(2048); trips.append(time.monotonic() - start)
    except OSError: pass
print(len(trips), statistics.median(trips) * 1000 if trips else 0.0)
"""


_DIAL = """
import socket, sys
try: socket.create_connection((sys.argv[1], 5000), timeout=1); print(1)
except OSError: print(0)
"""


def self_test(mbit: float = 100.0, mib: float = 32.0) -> list[str]:
    """Complaints; empty where the network is what was asked for."""
    python, complaints = [sys.executable, "-c"], []

    def check(what: str, value: float, low: float, high: float) -> None:
        verdict = "ok" if low <= value <= high else "WRONG"
        print(f"{what:48} {value:9.2f}   [{low:g}, {high:g}]  {verdict}")
        if verdict != "ok":
            complaints.append(what)

    links = {name: AccessLink(mbit, mbit) for name in ("a", "b", "c")}
    with Wan(links) as wan:
        sink = wan.popen("b", [*python, _SINK], stdout=subprocess.PIPE, text=True)
        echo = wan.popen("b", [*python, _ECHO], stdout=subprocess.PIPE, text=True)
        assert sink.stdout is not None
        assert echo.stdout is not None
        sink.stdout.readline(), echo.stdout.readline()
        to_b = wan.addresses["b"]

        def ping(count: int, rounds: int) -> tuple[int, float]:
            words = wan.run("a", [*python, _PING, to_b, str(count), str(rounds)]).split()
            return int(words[0]), float(words[1])

        check("round trip, ms (100)", ping(1, 10)[1], 99.5, 103.0)
        used = wan.run("a", [*python, _SOURCE, to_b, str(mib)]).strip()
        check(f"TCP, Mbit/s of {mbit:g} ({used})", float(sink.stdout.readline()), 0.88 * mbit, 0.97 * mbit)
        wan.change("a", up_mbit=mbit / 10)
        wan.run("a", [*python, _SOURCE, to_b, str(mib / 10)])
        check(f"TCP after a change to {mbit / 10:g}, Mbit/s", float(sink.stdout.readline()), 0.06 * mbit, 0.097 * mbit)
        wan.set_link("a", replace(links["a"], loss_percent=5.0))
        check("UDP datagrams back of 2000, 5 % loss each way", ping(100, 20)[0], 1740, 1870)
        wan.set_link("a", links["a"])
        wan.change("b", is_dead=True)
        check("UDP datagrams back from a black hole", ping(1, 2)[0], 0, 0)
        wan.set_link("b", replace(links["b"], is_closed=True))
        check("UDP datagrams back from a closed node", ping(1, 2)[0], 0, 0)
        refused = wan.run("a", [*python, _DIAL, to_b]).strip()
        check("TCP into a closed node", float(refused), 0, 0)
        for congestion in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
            with Wan({"a": links["a"], "b": links["b"]}, congestion) as other:
                peer = other.popen("b", [*python, _SINK], stdout=subprocess.PIPE, text=True)
                assert peer.stdout is not None
                peer.stdout.readline()
                used = other.run("a", [*python, _SOURCE, other.addresses["b"], "1"]).strip()
                check(f"congestion control {congestion} is used", float(used == congestion), 1, 1)
        stats = wan.stats()
        check("packets more than 5 ms late, percent", 100 * stats["late"] / max(stats["delivered"], 1), 0, 1)
    return complaints
