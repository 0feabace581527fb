"""Reads the user's task source on a separate thread, so that a slow row delays its lease but no heartbeat."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from queue import SimpleQueue

from echo2.errors import UserError
from echo2.tasks.streams import Tasks
from echo2.types import GroupRef, Task

#: A row that takes longer counts as unfit.
ROW_SECONDS = 60.0
#: Tasks that are read ahead of the one that is wanted, and tasks that are kept: a result wants its lease's again.
AHEAD = 32
KEPT = 4096


@dataclass(slots=True)
class _Job:
    """A row to read. `found`: the task, or why there is none."""

    stream: Tasks
    cursor: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Event = field(default_factory=asyncio.Event)
    found: Task | UserError | None = None

    def end(self, found: Task | UserError) -> None:
        """On the event loop. The first end counts."""
        if self.found is None:
            self.found = found
            self.done.set()


class TaskReader:
    """Tasks by group. `evaluation`: held-out tasks, if the run has any."""

    def __init__(self, train: Tasks, evaluation: Tasks | None) -> None:
        self._streams = {"train": train, "eval": evaluation}
        self._jobs: OrderedDict[tuple[str, int], _Job] = OrderedDict()
        self._thread = _ReadingThread()

    async def task(self, group: GroupRef, cursor: int) -> Task:
        """The task of this group.

        Raises:
            UserError: its row is unfit, or took longer than `ROW_SECONDS`; the message names the row.
        """
        if (group.kind, cursor + AHEAD - 1) not in self._jobs:
            for ahead in range(cursor, cursor + AHEAD):
                self._begin(group.kind, ahead)
        job = self._begin(group.kind, cursor)
        while job.found is None:
            try:
                await asyncio.wait_for(job.done.wait(), ROW_SECONDS)
            except TimeoutError:
                self._give_up_hung()
        if isinstance(job.found, UserError):
            raise job.found
        return job.found

    def close(self) -> None:
        """Read no more. A row that hangs is left behind; it does not keep the process."""
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
        """Where the row in hand takes too long, leave its thread behind and go on with another."""
        thread = self._thread
        job, since = thread.job, thread.since
        if job is not None and time.monotonic() - since >= ROW_SECONDS:
            self._thread = _ReadingThread(thread.jobs)
            thread.is_left = True
            reason = f"Task {job.cursor}: reading its row took longer than {ROW_SECONDS:g} s."
            job.end(UserError(f"{reason} Make the task source's __getitem__ faster, or prepare the rows beforehand."))


class _ReadingThread:
    """Reads rows in the order in which they were asked for. A daemon: it never keeps a process that wants to end."""

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
            if not job.loop.is_closed():
                job.loop.call_soon_threadsafe(job.end, found)
