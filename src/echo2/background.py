"""Work in the background of an event loop, whose failure always reaches somebody.

A bare task that fails says so only when it is collected, if at all, and whoever waits for its work waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

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
