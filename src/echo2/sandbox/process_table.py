"""The processes of this machine, read from /proc: how many a command has started, and how much memory they use.

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
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Row:
    """One process: of its parent, its group and its resident pages."""

    parent: int
    group: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Used:
    """A process, all that descends from it, and all of its group. `inner`: its children."""

    pids: frozenset[int]
    inner: tuple[int, ...]
    resident_bytes: int

    def exceeds(self, memory_bytes: int) -> bool:
        """Whether they use more memory. What several share counts once, where the kernel says how much that is."""
        return self.resident_bytes > memory_bytes < sum(map(_own_bytes, self.pids))


_table: tuple[float, dict[int, _Row]] = (-1.0, {})


def usage(pid: int) -> Used:
    """Return what a process and those that it started use; nothing, where there is no /proc."""
    global _table
    if time.monotonic() - _table[0] > FRESH_SECONDS:
        _table = (time.monotonic(), _read())
    rows = _table[1]
    children: dict[int, list[int]] = {}
    for one, row in rows.items():
        children.setdefault(row.parent, []).append(one)
    pids, waiting = set[int](), [pid, *(one for one, row in rows.items() if row.group == pid)]
    while waiting:
        one = waiting.pop()
        if one not in pids and one in rows:
            pids.add(one)
            waiting += children.get(one, [])
    resident = sum(rows[one].num_pages for one in pids) * PAGE_BYTES
    return Used(frozenset(pids), tuple(children.get(pid, ())), resident)


def num_threads(user: int) -> int:
    """Return how many threads a user has, over all processes; 0, where there is no /proc."""
    total = 0
    for place in _processes():
        with suppress(OSError):  # it has ended
            total += len(os.listdir(place / "task")) if place.stat().st_uid == user else 0
    return total


def _read() -> dict[int, _Row]:
    rows = {}
    for place in _processes():
        with suppress(OSError):  # it has ended
            fields = (place / "stat").read_bytes().rpartition(b")")[2].split()  # a name may have anything in it
            rows[int(place.name)] = _Row(int(fields[1]), int(fields[2]), int(fields[21]))
    return rows


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
