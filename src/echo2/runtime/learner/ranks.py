"""Starts and watches a learner's other ranks on one machine, as `torchrun` would.

All ranks end together: the others by the lifeline of the first, and the first as soon as one of the others dies. The
supervisor then restarts the learner from its checkpoint.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo2.learner.mesh import Place
from echo2.rundir import RunDir
from echo2.runtime.lifeline import LIFELINE_VARIABLE

log = logging.getLogger(__name__)

#: Time for the other ranks to end by themselves after they were released.
FAREWELL_SECONDS = 10.0
#: Exit statuses with a meaning of their own, which are passed on; any other becomes 1.
TELLING_STATUSES = (2, 3)


@contextmanager
def started(rundir: RunDir, size: int) -> Iterator[Place]:
    """Run the other ranks, and yield the place of the first. The caller must release them before leaving the context
    (`LeadingClient.end`)."""
    is_over = threading.Event()
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="echo2-ranks-") as meeting:
        rendezvous = (Path(meeting) / "store").as_uri()
        processes = [_start(rundir, Place(rank, size, rank, rendezvous), reading) for rank in range(1, size)]
        watchers = [
            threading.Thread(target=_watch, args=(rank, process, is_over), name=f"rank-{rank}", daemon=True)
            for rank, process in enumerate(processes, 1)
        ]
        for watcher in watchers:
            watcher.start()
        try:
            yield Place(0, size, 0, rendezvous)
            is_over.set()
            for watcher in watchers:
                watcher.join(FAREWELL_SECONDS)
        finally:
            is_over.set()
            os.close(writing)  # ends the ranks that still run
            os.close(reading)
            for watcher in watchers:
                watcher.join(FAREWELL_SECONDS)


def _start(rundir: RunDir, place: Place, lifeline: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "echo2", "learner", str(rundir.path)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **place.environment(), LIFELINE_VARIABLE: str(lifeline)},
        pass_fds=(lifeline,),
    )
    log.info("rank %d of %d is process %d", place.rank, place.size, process.pid)
    return process


def _watch(rank: int, process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    status = process.wait()
    if status and not is_over.is_set():  # 0: it was released, perhaps before the first rank has left
        log.error("rank %d ended with status %d, and with it this learner", rank, status)
        os._exit(status if status in TELLING_STATUSES else 1)
