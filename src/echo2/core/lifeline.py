"""Ends child processes when their supervisor dies, whatever killed it.

The supervisor holds the writing end of a pipe and hands the reading end to each child. When the supervisor dies, even
by ``kill -9``, the kernel closes its end and every child reads end-of-file. Works on every system with pipes.
"""

from __future__ import annotations

import os
import signal
import threading

#: Environment variable that carries the reading end's file descriptor.
LIFELINE_VARIABLE = "ECHO2_LIFELINE_FD"


def end_with_supervisor(may_save: bool = False) -> None:
    """End this process when its supervisor dies: at once, or by SIGTERM if `may_save`. No effect without supervisor."""
    text = os.environ.pop(LIFELINE_VARIABLE, "")
    if text:
        threading.Thread(target=_wait_for_end, args=(int(text), may_save), daemon=True, name="lifeline").start()


def _wait_for_end(descriptor: int, may_save: bool) -> None:
    while os.read(descriptor, 1):
        pass
    if may_save:
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        os._exit(143)
