"""Runs a command until it ends or the lifeline does (`core/child.py`), and kills all processes that it started.

For programs that know of no lifeline. Run it by its path, with only the standard library: `python guard.py COMMAND...`.
Exits with the command's status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

#: As in `core/child.py`.
LIFELINE_VARIABLE = "ECHO2_LIFELINE_FD"


def main(command: list[str]) -> int:
    """Run the command. Returns its status, negative if a signal ended it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with, args=(int(os.environ[LIFELINE_VARIABLE]), child.pid), daemon=True).start()
    status = child.wait()
    _kill_group(child.pid)
    return status


def _end_with(lifeline: int, group: int) -> None:
    while os.read(lifeline, 1):
        pass
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) % 256)
