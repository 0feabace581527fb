"""Work in the background of an event loop, whose failure always reaches somebody.

A bare task reports its failure only when it is garbage-collected, if at all, and its callers wait for ever. So
`asyncio.create_task` and `ensure_future` are called here alone (`tests/house.py`):

    spawn(work, on_error)   work that nobody awaits: its owner learns of an error that the work does not handle itself
    Background(on_error)    all such work of one owner, which ends with it
    awaited(work)           work whose starter awaits the outcome, so that errors are raised there
    to_its_end(work)        work that a cancelled caller still awaits
    close_all(*closes)      several closes, one after the other, of which a failing one prevents no other
    together()              several such works, of which the first error ends the others
    Shared(make)            values that are made once, for all that ask for them
    Ending(log, doing)      the first result or failure of a process, which ends it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeVar

from echo2.core.errors import Echo2Error

T = TypeVar("T")
K = TypeVar("K")

log = logging.getLogger(__name__)

#: An event loop itself refers to its tasks only weakly.
_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, T], on_error: Callable[[Exception], object]) -> asyncio.Task[T]:
    """Run a coroutine as a task of the running event loop. An exception that it does not handle itself is passed to
    `on_error`, once; a cancellation is not.
    """

    def ended(task: asyncio.Task[T]) -> None:
        _running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            on_error(error)

    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(ended)
    return task


def awaited(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine as a task that its starter awaits or shields: errors are raised there, and nowhere else."""
    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Do work of bounded time that must not be left half done, such as a close: if the caller is cancelled meanwhile,
    however often, that is raised once the work has ended. Raises: what the work raises; it comes before the
    cancellation."""
    task, cancelled = awaited(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def close_all(*closes: Callable[[], Awaitable[object]]) -> None:
    """Close several things in this order. Each of them closes, whatever becomes of the others. Raises: what the last
    that failed raises."""
    async with AsyncExitStack() as closing:
        for close in reversed(closes):
            closing.push_async_callback(close)


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a group whose tasks end with the block. The first error ends the others, and is raised as it is.

    Until Python 3.13, a `TaskGroup` that fails while its block waits for it leaves the task marked as `cancelling`, and
    later code would take the end of a connection for the end of the task.
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task is not None else 0
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        if task is not None and task.cancelling() > num_before:
            task.uncancel()
        raise errors.exceptions[0] from None


def unforeseen(log: logging.Logger, doing: str) -> Callable[[BaseException], None]:
    """Return an `on_error` for work that callers await as long as they are there: what nobody may hear is logged,
    unless it is one of echo2's own errors, which callers expect.
    """

    def log_error(error: BaseException) -> None:
        if not isinstance(error, Echo2Error):
            log.error("%s failed", doing, exc_info=error)

    return log_error


class Shared(Generic[K, T]):
    """Values that are made once by key. Those who ask for one meanwhile wait for the same work, and get its error. A
    failure is forgotten: memory may have been short, and the next one who asks has the value made again.
    """

    def __init__(self, make: Callable[[K], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._works: dict[K, asyncio.Task[T]] = {}

    async def get(self, key: K) -> T:
        """Return the value, made now or before. Raises: what `make` raises."""
        work = self._works.pop(key, None) or self._begun(key)
        self._works[key] = work  # behind those that were asked for before
        try:
            return await asyncio.shield(work)
        except Exception:
            if self._works.get(key) is work:
                del self._works[key]
            raise

    def _begun(self, key: K) -> asyncio.Task[T]:
        work = awaited(self._make(key))
        log_error = unforeseen(log, "what several asked for")

        def ended(_: asyncio.Task[T]) -> None:  # all who asked may have given up before it fails
            if not work.cancelled() and (error := work.exception()) is not None:
                log_error(error)

        work.add_done_callback(ended)
        return work

    def made(self) -> dict[K, T]:
        """Return the values that there are, the most recently asked for last."""
        done = {key: work for key, work in self._works.items() if work.done() and not work.cancelled()}
        return {key: work.result() for key, work in done.items() if not work.exception()}

    def drop(self, key: K) -> None:
        """Forget a value."""
        self._works.pop(key, None)


class Ending(Generic[T]):
    """What ends a process: the first result or failure that it is told, the value of `outcome`. What fails later is
    logged, and so is that first failure if the block ends with something else: Ctrl-C, or a close that fails, came
    while the process ended for it. For one event loop.
    """

    def __init__(self, log: logging.Logger, doing: str) -> None:
        self.outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._log_failure = unforeseen(log, doing)

    def tell(self, result: T) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.outcome.done():
            self._log_failure(error)
        else:
            self.outcome.set_exception(error)

    def __enter__(self) -> Ending[T]:
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        if self.outcome.cancel() or self.outcome.cancelled():
            return
        failure = self.outcome.exception()
        if failure is not None and failure is not raised:
            self._log_failure(failure)


class Background:
    """The background work of one owner. `on_error` is called with each exception that the work does not handle
    itself."""

    def __init__(self, on_error: Callable[[Exception], object]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Iterate over what is under way."""
        return iter(tuple(self._tasks))

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine, see `spawn`."""
        task = spawn(work, self._on_error)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel what is under way, apart from the caller's own task."""
        try:
            own = asyncio.current_task()
        except RuntimeError:  # called by a timer or another callback
            own = None
        for task in self:
            if task is not own:
                task.cancel()

    async def close(self) -> None:
        """Cancel what is under way, and wait for its end."""
        self.cancel()
        await asyncio.gather(*(task for task in self if task is not asyncio.current_task()), return_exceptions=True)
