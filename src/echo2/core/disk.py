"""Checks the free space on a run's disk. The run pauses early enough to leave space for the work under way: results of
open leases, two snapshots, one more checkpoint.

If the disk nevertheless fills up (with other files), a process ends with `NoRoomError`, between two transactions or
within one that is rolled back; the supervisor restarts the process when there is space. Files that grow record by
record grow by `append_whole`, so that no half of a record is left for the next one to be glued to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

#: Reserved for ledger, logs, metrics and the results of open leases.
FLOOR_BYTES = 256 << 20
#: Snapshots that may be under way when space runs short.
SNAPSHOTS_RESERVED = 2
#: A paused run resumes at this multiple of the needed bytes, so that a disk at the limit does not start and stop it.
RESUME_FACTOR = 1.25


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write on the disk of `path`."""
    return shutil.disk_usage(path).free


def append_whole(file: FileIO, data: bytes) -> None:
    """Append `data` to a file without a buffer, opened for appending, or leave the file as it was. No other process may
    append to it meanwhile.

    Raises:
        OSError: it was not written.
    """
    end, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:  # a disk that fills up accepts part of a write before it refuses the next
            rest = rest[file.write(rest) :]
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def num_bytes(directory: Path) -> int:
    """Return the size of all files below a directory; 0 if it is gone."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def allocated_bytes(directory: Path) -> int:
    """Return the bytes that the files below a directory take on the disk; files that go meanwhile do not count."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += allocated_bytes(Path(entry.path))
                else:
                    stat = entry.stat(follow_symlinks=False)
                    total += max(stat.st_size, 512 * stat.st_blocks)
    except FileNotFoundError:
        pass
    return total


def checkpoint_bytes(checkpoints: Path) -> int:
    """Return the size of the largest existing checkpoint; 0 if there is none."""
    largest = 0
    for step in checkpoints.glob("step_*"):
        with suppress(OSError):  # the learner may be deleting old checkpoints
            largest = max(largest, sum(file.stat().st_size for file in step.iterdir()))
    return largest


class DiskWatch:
    """Decides when a run pauses for lack of disk space and when it resumes. `free` returns the free bytes."""

    def __init__(self, directory: Path, free: Callable[[Path], int] = free_bytes) -> None:
        self._directory, self._free = directory, free
        self.reason = ""

    def look(self, snapshot_bytes: int = 0, checkpoint_bytes: int = 0) -> bool:
        """Update `reason` (why the run must pause; empty while there is space). Return whether the run must now pause
        or resume.
        """
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
