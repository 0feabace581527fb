"""Runs a command until it ends or standard input closes, and then kills all processes that it started.

However the process at the other end of the pipe dies, the kernel closes the pipe. Run it by its path, with only the
standard library: `python guard.py COMMAND...`. Exits with the command's status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the command. Returns its status, negative if a signal ended it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_pipe, args=(child.pid,), daemon=True).start()
    status = child.wait()
    _kill_group(child.pid)
    return status


def _end_with_pipe(group: int) -> None:
    while os.read(0, 1):
        pass
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) % 256)
