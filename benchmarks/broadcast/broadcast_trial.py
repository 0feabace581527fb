"""One broadcast from an origin to n workers over an emulated network, timed. Used by `broadcast.py` and others.

The nodes are real processes (`wan/lines.py` says how they talk). The origin says "ready", workers say "joined"; after a
pause the origin is told to "publish", and says when it did; every worker says "whole" once it has everything, checked
by its own means. When all have, each must show the digest of what it holds: only then does its time count.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wan.lines import content, digest, seed_of
from wan.net import AccessLink, Wan, WanError, cpu_seconds, machine_cpu_seconds

ORIGIN = "origin"
SCRATCH = "echo2-broadcast"
JOIN_LIMIT_SECONDS = 180.0
#: Where the cores of the machine were busier than this, the times are the machine's, not the network's.
BUSY_SHARE_MAX = 0.85
LATE_SHARE_MAX = 0.01


class TrialError(Exception):
    """A broadcast that did not end as it should."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured: the command of a node, and what it is told beside its role."""

    name: str
    command: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    joins_in_turn: bool = False
    pulls: bool = False  # workers are told to begin, too: nothing in it tells them
    settle_seconds: float = 3.0  # from the last join to the publication: probes of links end meanwhile


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls the busiest relay after this share of the time G / B_w. `kind`: kill or hole."""

    kind: str
    at_share: float = 0.4


@dataclass(frozen=True, slots=True)
class Scenario:
    """The network: the origin's link and each worker's. `slow`: workers that are not expected to keep up."""

    name: str
    links: Mapping[str, AccessLink]
    congestion: str = ""
    fault: Fault | None = None
    slow: frozenset[str] = frozenset()
    alone: str = ""  # the scenario of one worker alone that this one is held against
    undisturbed: str = ""  # the same without the fault

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name in self.links if name != ORIGIN)

    def floor_seconds(self, num_bytes: int) -> float:
        """G / B_w: the content over the link of the fastest worker, headers not counted."""
        return num_bytes * 8e-6 / max(self.links[name].down_mbit for name in self.workers)

    def bound_seconds(self, num_bytes: int) -> float:
        """No scheme is faster for those that are not slow: a bit leaves the origin and is sent and received n times."""
        kept = [self.links[name] for name in self.workers if name not in self.slow]
        origin = self.links[ORIGIN].up_mbit
        sent = (origin + sum(link.up_mbit for link in kept)) / len(kept)
        return num_bytes * 8e-6 / min(origin, min(link.down_mbit for link in kept), sent)


@dataclass(frozen=True, slots=True)
class Result:
    """What one trial gave. Times are seconds since the publication."""

    scenario: str
    setup: str
    num_workers: int
    num_bytes: int
    seconds: dict[str, float]  # of every worker that got it
    slow: tuple[str, ...]
    victim: str | None
    fault_seconds: float | None
    noticed_seconds: float | None  # when a worker first gave up a source after the fault
    floor_seconds: float
    bound_seconds: float
    origin_sent_ratio: float  # bytes the origin sent, over the content's
    peers_sent_ratio: float  # bytes all workers sent, over the content's
    cpu_seconds: dict[str, float]  # of the origin, of all workers, of the emulator
    machine_busy_share: float  # of all cores, whoever used them, from publication to the last finish
    late_share: float  # packets delivered more than 5 ms late by the emulator
    queue_drops: int
    bundle_packets: float  # mean number of packets that travelled together
    notes: list[dict[str, Any]]
    nth: int = 1  # of the trial's broadcasts, the later ones over connections that are open
    predicted_seconds: float | None = None  # by the simulator

    @property
    def last(self) -> float:
        """When the last worker was done that was neither slow nor hit."""
        return max(self._counted())

    @property
    def quantile(self) -> float:
        """When a share of 1/1.1 of them was done (nearest rank)."""
        counted = sorted(self._counted())
        return counted[math.ceil(len(counted) / 1.1) - 1]

    @property
    def is_network_bound(self) -> bool:
        return self.machine_busy_share <= BUSY_SHARE_MAX and self.late_share <= LATE_SHARE_MAX

    def _counted(self) -> list[float]:
        return [seconds for name, seconds in self.seconds.items() if name not in self.slow]


class _Node:
    """One process: what it says lands in `said`, with its name."""

    def __init__(self, wan: Wan, name: str, command: list[str], said: queue.Queue[Any], directory: Path) -> None:
        self.name = name
        self._errors = directory / f"{name}.err"
        pipe = subprocess.PIPE
        with self._errors.open("wb") as errors:
            self.process = wan.popen(name, command, stdin=pipe, stdout=pipe, stderr=errors, text=True, bufsize=1)
        self._said = said
        threading.Thread(target=self._listen, name=name, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print, too
                self._said.put((self.name, json.loads(line)))
        self._said.put((self.name, {"event": "ended", "at": time.monotonic()}))

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise TrialError(f"{self.name} takes no orders: {error}; {self.errors()}") from error

    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._errors.read_text(errors="replace")[-1500:].strip()


def scratch() -> Path:
    """A directory of this process in memory, where there is such; those that killed processes left are removed."""
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for left in parent.glob(f"{SCRATCH}-*-*"):
        if not Path("/proc", left.name.split("-")[-2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{SCRATCH}-{os.getpid()}-", dir=parent))


def stop_on_sigterm() -> None:
    """So that `finally` is heeded then, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: terminated"))


class Trial:
    """Runs broadcasts, one after the other. Everything it started or wrote is gone afterwards, whatever happens."""

    def __init__(self, scenario: Scenario, setup: Setup, num_bytes: int, seed: int, num_broadcasts: int = 1) -> None:
        self._scenario, self._setup, self._num_bytes, self._seed = scenario, setup, num_bytes, seed
        self._num_broadcasts = num_broadcasts if scenario.fault is None else 1
        self._said: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._nodes: dict[str, _Node] = {}
        self._whole: dict[str, float] = {}
        self._notes: list[dict[str, Any]] = []
        self._victim: str | None = None
        self._fault_at: float | None = None

    def run(self) -> list[Result]:
        """The times of each broadcast.

        Raises:
            TrialError: somebody did not get it, or got something else.
            WanError: the network can't be made.
        """
        self._directory = scratch()
        try:
            with Wan(self._scenario.links, self._scenario.congestion) as wan:
                self._wan = wan
                self._join()
                return [self._broadcast(nth) for nth in range(1, self._num_broadcasts + 1)]
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _join(self) -> None:
        self._start(ORIGIN, {})
        ready = self._hear(ORIGIN, "ready", JOIN_LIMIT_SECONDS)
        for name in self._scenario.workers:
            self._start(name, {"origin": ready})
            if self._setup.joins_in_turn:
                self._joined(name)
        if not self._setup.joins_in_turn:
            for name in self._scenario.workers:
                self._joined(name)
        time.sleep(self._setup.settle_seconds)

    def _joined(self, name: str) -> None:
        said = self._hear(name, "joined", JOIN_LIMIT_SECONDS)
        self._notes.append({"who": name, "kind": "joined", "at": said["at"], "rates": said.get("rates")})

    def _start(self, name: str, more: Mapping[str, Any]) -> None:
        directory = self._directory / name
        directory.mkdir()
        description = {
            "role": ORIGIN if name == ORIGIN else "worker",
            "name": name,
            "addresses": self._wan.addresses,
            "directory": str(directory),
            "num_bytes": self._num_bytes,
            "seed": self._seed,
            "num_broadcasts": self._num_broadcasts,
            "congestion": self._wan.congestion,
            **self._setup.options,
            **more,
        }
        command = [*self._setup.command, json.dumps(description)]
        self._nodes[name] = _Node(self._wan, name, command, self._said, self._directory)

    def _hear(self, who: str, event: str, limit_seconds: float) -> dict[str, Any]:
        """Wait until `who` says `event`; what others say meanwhile is kept in mind."""
        deadline = time.monotonic() + limit_seconds
        kept: list[tuple[str, dict[str, Any]]] = []
        try:
            while True:
                name, said = self._next(deadline, f"{who} to say {event!r}")
                if (name, said["event"]) == (who, event):
                    return said
                if said["event"] == "note":
                    self._notes.append({"who": name, **said})
                else:
                    kept.append((name, said))
        finally:
            for item in kept:
                self._said.put(item)

    def _next(self, deadline: float, waited_for: str) -> tuple[str, dict[str, Any]]:
        heard = self._poll(deadline)
        if heard is None:
            unfinished = [name for name in self._nodes if name not in self._whole]
            errors = "; ".join(f"{name}: {text}" for name in unfinished if (text := self._nodes[name].errors()))
            raise TrialError(f"waited too long for {waited_for}; not whole: {unfinished}; {errors}")
        return heard

    def _poll(self, deadline: float) -> tuple[str, dict[str, Any]] | None:
        """The next word of a node; None when the time is up."""
        try:
            name, said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if said["event"] in ("ended", "failed") and name != self._victim:
            raise TrialError(f"{name} {said['event']}: {said.get('detail', '')} {self._nodes[name].errors()}")
        return name, said

    def _broadcast(self, nth: int) -> Result:
        self._whole.clear()
        if nth > 1:
            self._notes.clear()
        before, busy = self._cpu(), machine_cpu_seconds()
        sent = self._wan.stats()
        for name in (ORIGIN, *self._scenario.workers) if self._setup.pulls else (ORIGIN,):
            self._nodes[name].tell("publish")
        started = self._hear(ORIGIN, "published", JOIN_LIMIT_SECONDS)["at"]
        self._receive(started)
        after, busy_after = self._cpu(), machine_cpu_seconds()
        stats = self._wan.stats()
        self._verify(seed_of(self._seed, nth))
        seconds = {name: at - started for name, at in sorted(self._whole.items())}

        def node_sum(names: tuple[str, ...], key: str) -> int:
            return sum(stats["nodes"][name][key] - sent["nodes"][name][key] for name in names)

        workers, fault_at = self._scenario.workers, self._fault_at
        gave_up = [note["at"] for note in self._notes if note.get("kind") == "gave up"]
        noticed = [at - fault_at for at in gave_up if fault_at is not None and at > fault_at]
        return Result(
            scenario=self._scenario.name,
            setup=self._setup.name,
            num_workers=len(workers),
            num_bytes=self._num_bytes,
            seconds=seconds,
            slow=tuple(sorted(self._scenario.slow)),
            victim=self._victim,
            fault_seconds=None if fault_at is None else fault_at - started,
            noticed_seconds=min(noticed, default=None),
            floor_seconds=self._scenario.floor_seconds(self._num_bytes),
            bound_seconds=self._scenario.bound_seconds(self._num_bytes),
            origin_sent_ratio=node_sum((ORIGIN,), "sent_bytes") / self._num_bytes,
            peers_sent_ratio=node_sum(workers, "sent_bytes") / self._num_bytes,
            cpu_seconds={
                "origin": after[ORIGIN] - before[ORIGIN],
                "workers": sum(max(0.0, after[name] - before[name]) for name in workers),  # none of a killed one
                "emulator": after["emulator"] - before["emulator"],
            },
            machine_busy_share=(busy_after[0] - busy[0]) / max(busy_after[1] - busy[1], 1e-9),
            late_share=stats["late"] / max(stats["delivered"], 1),
            bundle_packets=stats["delivered"] / max(stats["deliveries"], 1),
            queue_drops=node_sum((ORIGIN, *workers), "queue_drops"),
            notes=[{**note, "at": note["at"] - started} for note in self._notes],
            nth=nth,
        )

    def _receive(self, started: float) -> None:
        """Until everybody has it who can, with the fault at its time."""
        fault, floor = self._scenario.fault, self._scenario.floor_seconds(self._num_bytes)
        slowest = min(self._scenario.links[name].down_mbit for name in self._scenario.workers)
        alone = self._num_bytes * 8e-6 / slowest
        deadline = started + 60.0 + 4.0 * max(alone, floor * len(self._scenario.workers))
        heard: tuple[str, dict[str, Any]] | None
        while any(name not in self._whole and name != self._victim for name in self._scenario.workers):
            if fault is None or self._victim is not None:
                heard = self._next(deadline, "the rest")
            elif (heard := self._poll(started + fault.at_share * floor)) is None:
                self._strike(fault)
                continue
            name, said = heard
            if said["event"] == "whole":
                self._whole[name] = said["at"]
            elif said["event"] == "note":
                self._notes.append({"who": name, **said})

    def _strike(self, fault: Fault) -> None:
        self._nodes[ORIGIN].tell("busiest")
        self._victim = str(self._hear(ORIGIN, "busiest", JOIN_LIMIT_SECONDS)["worker"])
        if fault.kind == "kill":
            self._wan.kill(self._nodes[self._victim].process)
        else:
            self._wan.change(self._victim, is_dead=True)
        self._fault_at = time.monotonic()

    def _verify(self, seed: int) -> None:
        wanted = digest([content(self._num_bytes, seed)])
        for name in self._whole:
            if name != self._victim:
                self._nodes[name].tell("verify")
        for name in list(self._whole):
            if name != self._victim:
                found = self._hear(name, "digest", JOIN_LIMIT_SECONDS)["digest"]
                if found != wanted:
                    raise TrialError(f"{name} has other bytes: {found}, not {wanted}")
        if self._victim is not None:
            self._whole.pop(self._victim, None)

    def _cpu(self) -> dict[str, float]:
        used = {name: cpu_seconds(node.process.pid) for name, node in self._nodes.items()}
        return {**used, "emulator": cpu_seconds(self._wan.emulator_pid)}


__all__ = ["ORIGIN", "Fault", "Result", "Scenario", "Setup", "Trial", "TrialError", "WanError", "stop_on_sigterm"]
