"""Between threads and event loops: a loop in a thread of its own, for an object that other threads use, and threads of
their own for what would block a loop.

A thread that calls `call_soon_threadsafe` or `run_coroutine_threadsafe` of a loop can come after the end of that loop,
however it checks before. Here such a call is an expected outcome: nothing begins, and a future is cancelled. Where
asyncio itself makes the call, which only checks, the threads end before their loop does. So these functions, and
`run_in_executor`, are called here alone (`tests/house.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from echo2.core.background import awaited

T = TypeVar("T")


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Call a function in another thread's event loop soon. Return False if that loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Begin `work` in a thread of the running loop, whose end waits for it. Unlike the task of a coroutine, what is
    returned is cancelled by nobody but those who have it."""
    return asyncio.get_running_loop().run_in_executor(None, work)


class BlockingThreads:
    """Threads for the work that would block the event loop of an owner, who calls all methods in that loop.

    The end of a piece of work is told to the loop even if nobody awaits it any more. The loop's default threads are
    joined at the loop's end; these are joined by `close`, so close them before.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in one of the threads. Raises: what it raises; CancelledError: `close` came before it began."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def close(self) -> None:
        """Cancel the work that has not begun, and wait for the end of the rest."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._threads.shutdown)


class LoopThread:
    """Runs coroutines in a daemon thread until `close`. Any thread may call any method at any time; only `close` may
    not be called from the loop itself."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._over = asyncio.Event()
        self._works: set[asyncio.Task[Any]] = set()  # used in the loop only
        self._guard = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a function in the loop soon. Return False if the loop is closed: then it is not called."""
        with self._guard:  # the loop takes calls until `close` has this guard
            if not self._is_closed:
                self._loop.call_soon_threadsafe(function, *args)
            return not self._is_closed

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the loop. Cancelling the future cancels it. The future is cancelled if the loop is closed
        before `work` has ended; in a closed loop, `work` does not begin."""
        future: Future[T] = Future()
        if not self.call(self._begin, work, future):
            work.close()
            _cancel(future)
        return future

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel all work, wait until it has ended, run `last`, and end the thread. A second call waits for the first.

        Raises: what `last` raised.
        """
        ending: Future[None] = Future()
        with self._guard:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._begin, self._end(last), ending)
            else:
                ending.set_result(None)
        try:
            ending.result()
        finally:
            self._thread.join()

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._runner:  # at its end: tasks that are left are cancelled, threads of the loop joined
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        await self._over.wait()

    def _begin(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = awaited(work)
        self._works.add(task)
        task.add_done_callback(partial(self._ended, future))
        future.add_done_callback(lambda done: self.call(task.cancel) if done.cancelled() else None)

    def _ended(self, future: Future[T], task: asyncio.Task[T]) -> None:
        self._works.discard(task)
        if task.cancelled():
            _cancel(future)
        elif (error := task.exception()) is not None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        elif future.set_running_or_notify_cancel():
            future.set_result(task.result())

    async def _end(self, last: Callable[[], Awaitable[None]] | None) -> None:
        works = self._works - {asyncio.current_task()}
        for work in works:
            work.cancel()
        try:
            await asyncio.gather(*works, return_exceptions=True)
            if last is not None:
                await last()
        finally:
            self._over.set()


def _cancel(future: Future[Any]) -> None:
    future.cancel()
    future.set_running_or_notify_cancel()  # for those that wait for it
