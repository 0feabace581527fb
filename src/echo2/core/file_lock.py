"""Locks that the processes of one machine see. They are the system's: whatever kills a process, its locks are free."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """A lock that other processes on this machine see. Several may share it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_held = False

    def take(self, shared: bool = False) -> bool:
        """Try to take it; return whether it is held now."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_held = False  # the system lets go of a shared lock before it finds that it can't be held alone
        else:
            self.is_held = True
        return self.is_held

    def give_back(self) -> None:
        """Let others have it."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.is_held = False

    def is_taken(self) -> bool:
        """Whether another process holds it alone."""
        if self.take(shared=True):
            self.give_back()
            return False
        return True

    def close(self) -> None:
        """Give it back for good."""
        os.close(self._file)
        self.is_held = False
