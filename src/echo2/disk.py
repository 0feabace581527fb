"""Checks the free room on a run's disk. Without enough, the run pauses while there is still room for what is under way:
results of open leases, two snapshots, one more checkpoint.

A disk that fills up all the same (somebody else's file) ends a process with `NoRoomError`, between two transactions or
within one that is undone; the supervisor starts it again when there is room.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: Kept for ledger, logs, metrics and the results of open leases.
FLOOR_BYTES = 256 << 20
#: Snapshots that may be on their way when it gets tight.
SNAPSHOTS_RESERVED = 2
#: Free bytes over the needed ones at which a paused run goes on: a disk at the limit must not start and stop it.
RESUME_FACTOR = 1.25


def free_bytes(path: Path) -> int:
    """What this user may still write on the disk of `path`."""
    return shutil.disk_usage(path).free


def checkpoint_bytes(checkpoints: Path) -> int:
    """The size of the largest checkpoint that is there; 0 without one."""
    largest = 0
    for step in checkpoints.glob("step_*"):
        with suppress(OSError):  # the learner deletes old ones meanwhile
            largest = max(largest, sum(file.stat().st_size for file in step.iterdir()))
    return largest


class DiskWatch:
    """Says when a run is to pause and when it may go on. `free` is asked for the free bytes."""

    def __init__(self, directory: Path, free: Callable[[Path], int] = free_bytes) -> None:
        self._directory, self._free = directory, free
        self.reason = ""

    def look(self, snapshot_bytes: int = 0, checkpoint_bytes: int = 0) -> bool:
        """Whether `reason` has changed: why the run is to pause, empty while there is room."""
        needed = FLOOR_BYTES + SNAPSHOTS_RESERVED * snapshot_bytes + checkpoint_bytes
        free = self._free(self._directory)
        was_paused = bool(self.reason)
        if free >= needed * (RESUME_FACTOR if was_paused else 1.0):
            self.reason = ""
        elif not was_paused:
            self.reason = f"no room on the disk that holds {self._directory}: {_mb(free)} free, {_mb(needed)} needed"
        return bool(self.reason) != was_paused


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
