"""Reads the user's task source on a separate thread, so that a slow row delays its lease but not the heartbeats."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from queue import SimpleQueue

from echo2.errors import UserError
from echo2.loop_thread import call_in
from echo2.tasks.streams import Tasks
from echo2.types import GroupRef, Task

#: Timeout for reading a row; a slower row is unfit.
ROW_SECONDS = 60.0
#: Number of tasks read ahead, and of tasks kept: a delivery needs the task of its lease again.
AHEAD = 32
KEPT = 4096


@dataclass(slots=True)
class _Job:
    """A row to read. `found`: the task, or the error."""

    stream: Tasks
    cursor: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Event = field(default_factory=asyncio.Event)
    found: Task | UserError | None = None

    def end(self, found: Task | UserError) -> None:
        """Set the result, on the event loop. Only the first call counts."""
        if self.found is None:
            self.found = found
            self.done.set()


class TaskReader:
    """Returns the task of a group. `evaluation`: held-out tasks, if the run has any."""

    def __init__(self, train: Tasks, evaluation: Tasks | None) -> None:
        self._streams = {"train": train, "eval": evaluation}
        self._jobs: OrderedDict[tuple[str, int], _Job] = OrderedDict()
        self._thread = _ReadingThread()

    async def task(self, group: GroupRef, cursor: int) -> Task:
        """Return the task of this group.

        Raises:
            UserError: its row is unfit, or took longer than `ROW_SECONDS`; the message names the row.
        """
        if (group.kind, cursor + AHEAD - 1) not in self._jobs:
            for ahead in range(cursor, cursor + AHEAD):
                self._begin(group.kind, ahead)
        job = self._begin(group.kind, cursor)
        while job.found is None:
            try:
                async with asyncio.timeout(ROW_SECONDS):
                    await job.done.wait()
            except TimeoutError:
                self._give_up_hung()
        if isinstance(job.found, UserError):
            raise job.found
        return job.found

    def close(self) -> None:
        """Stop reading. A hanging row is abandoned; its daemon thread does not keep the process alive."""
        self._thread.jobs.put(None)

    def _begin(self, kind: str, cursor: int) -> _Job:
        job = self._jobs.get((kind, cursor))
        if job is None:
            stream = self._streams[kind]
            if stream is None:
                raise UserError(f"There are no {kind} tasks any more; the run had some when group {cursor} was leased.")
            job = self._jobs[kind, cursor] = _Job(stream, cursor, asyncio.get_running_loop())
            self._thread.jobs.put(job)
            while len(self._jobs) > KEPT:
                self._jobs.popitem(last=False)
        return job

    def _give_up_hung(self) -> None:
        """If the row being read takes too long, fail it, abandon its thread, and start another."""
        thread = self._thread
        job, since = thread.job, thread.since
        if job is not None and time.monotonic() - since >= ROW_SECONDS:
            self._thread = _ReadingThread(thread.jobs)
            thread.is_left = True
            reason = f"Task {job.cursor}: reading its row took longer than {ROW_SECONDS:g} s."
            job.end(UserError(f"{reason} Make the task source's __getitem__ faster, or prepare the rows beforehand."))


class _ReadingThread:
    """Reads rows in order of request, on a daemon thread, which does not keep the process alive."""

    def __init__(self, jobs: SimpleQueue[_Job | None] | None = None) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue() if jobs is None else jobs
        self.job: _Job | None = None
        self.since = 0.0
        self.is_left = False
        threading.Thread(target=self._run, name="tasks", daemon=True).start()

    def _run(self) -> None:
        while not self.is_left and (job := self.jobs.get()) is not None:
            self.since, self.job = time.monotonic(), job
            found: Task | UserError
            try:
                found = job.stream.task(job.cursor)
            except UserError as error:
                found = error
            self.job = None
            call_in(job.loop, job.end, found)
