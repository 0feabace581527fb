"""The processes of this machine, read from /proc: how many a command has started, what they use, and whether they wait
for a processor.

For commands that no control group limits (`containers.py`). Reading the table takes milliseconds, so that those who
ask within a tenth of a second get the same one.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: How long a table is taken for the present.
FRESH_SECONDS = 0.1
COUNTS = Path("/proc/vmstat")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
READY = b"R"  # the state of what computes, or waits for a processor


@dataclass(frozen=True, slots=True)
class _Row:
    """One process: of its parent, its group, its threads, its resident pages, and the processor time of itself and of
    its children that have ended."""

    is_ready: bool
    parent: int
    group: int
    num_threads: int
    num_pages: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Used:
    """A process, all that descends from it, and all of its group. `inner`: its children; `is_ready`: whether one of
    them computes, or waits for a processor; `at`: when they were looked at."""

    pids: frozenset[int] = frozenset()
    inner: tuple[int, ...] = ()
    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    is_ready: bool = False
    at: float = 0.0

    def exceeds(self, memory_bytes: int) -> bool:
        """Whether they use more memory. What several share counts once, where the kernel says how much that is."""
        return self.resident_bytes > memory_bytes < sum(map(_own_bytes, self.pids))


_table: tuple[float, dict[int, _Row]] = (-1.0, {})
_groups: dict[int, str] = {}  # by process of the table, once they were asked for


def usage(pid: int) -> Used:
    """Return what a process and those that it started use; nothing, where there is no /proc."""
    rows = _rows()
    children: dict[int, list[int]] = {}
    for one, row in rows.items():
        children.setdefault(row.parent, []).append(one)
    pids, waiting = set[int](), [pid, *(one for one, row in rows.items() if row.group == pid)]
    while waiting:
        one = waiting.pop()
        if one not in pids and one in rows:
            pids.add(one)
            waiting += children.get(one, [])
    return _used({one: rows[one] for one in pids}, tuple(children.get(pid, ())))


def usage_in(group: str) -> Used:
    """Return what the processes use whose control group's name has a part, such as a container's id; nothing, where
    there is none."""
    rows = _rows()
    for pid in rows.keys() - _groups.keys():  # of a new table all, and of one that others have used none
        with suppress(OSError):  # it has ended
            _groups[pid] = Path("/proc", str(pid), "cgroup").read_text()
    return _used({pid: rows[pid] for pid, name in _groups.items() if group in name})


def _used(found: dict[int, _Row], inner: tuple[int, ...] = ()) -> Used:
    return Used(
        frozenset(found),
        inner,
        sum(row.num_pages for row in found.values()) * PAGE_BYTES,
        sum(row.cpu_seconds for row in found.values()),
        any(row.is_ready or (row.num_threads > 1 and _has_ready_thread(one)) for one, row in found.items()),
        _table[0],
    )


def num_ended_for_memory() -> int:
    """Return how many processes the kernel has ended because memory ran out; 0, where it does not say so."""
    with suppress(OSError):
        return next((int(line.split()[1]) for line in COUNTS.read_text().splitlines() if "oom_kill " in line), 0)
    return 0


def num_threads(user: int) -> int:
    """Return how many threads a user has, over all processes; 0, where there is no /proc."""
    total = 0
    for place in _processes():
        with suppress(OSError):  # it has ended
            total += len(os.listdir(place / "task")) if place.stat().st_uid == user else 0
    return total


def _rows() -> dict[int, _Row]:
    global _table
    if time.monotonic() - _table[0] > FRESH_SECONDS:
        _table = (time.monotonic(), _read())
        _groups.clear()
    return _table[1]


def _read() -> dict[int, _Row]:
    rows = {}
    for place in _processes():
        with suppress(OSError):  # it has ended
            fields = (place / "stat").read_bytes().rpartition(b")")[2].split()  # a name may have anything in it
            parent, group, num_threads, num_pages = (int(fields[at]) for at in (1, 2, 17, 21))
            cpu_seconds = sum(map(int, fields[11:15])) * TICK_SECONDS
            rows[int(place.name)] = _Row(fields[0] == READY, parent, group, num_threads, num_pages, cpu_seconds)
    return rows


def _has_ready_thread(pid: int) -> bool:
    """Whether one of its threads computes: the process's own state is that of its first one."""
    for place in Path("/proc", str(pid), "task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if place.read_bytes().rpartition(b")")[2].split()[0] == READY:
                return True
    return False


def _processes() -> list[Path]:
    return [Path("/proc", name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def _own_bytes(pid: int) -> int:
    """Return the process's part of the memory that it uses; all of it, if the kernel does not say what is shared."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, ValueError):
        row = _table[1].get(pid)
        return row.num_pages * PAGE_BYTES if row is not None else 0
