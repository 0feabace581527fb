"""An event loop in a thread of its own, for an object that other threads use.

A thread that calls `call_soon_threadsafe` or `run_coroutine_threadsafe` of a loop can come after the end of that loop,
however it checks before. Here such a call is an expected outcome: nothing begins, and a future is cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
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
