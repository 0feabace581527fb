"""What runs in the background, and what closes something, fails where nobody foresaw it, or takes its time.

`Strike` lets one piece of background work fail at its first step. `Faults` draws all of it from a seed: which pieces
fail or dawdle, and at which step, and which calls (closes, starts of processes, writes) fail. What fails says `WORDS`,
so that a test finds out whether its owner heard of it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from echo2.core import background

BEGINNERS = {background.spawn.__code__, background.awaited.__code__}
WORDS = "nobody foresaw this"
#: Shares of the pieces of background work and of the calls that fail, of which a seed takes one; of the steps of others
#: that take their time.
FAILS, DAWDLES = (0.0, 0.05, 0.3), 0.2
#: Steps of a piece of work at which it may fail, and turns of the event loop that a step may take.
STEPS_MAX, TURNS_MAX = 6, 8


def is_heard(errors: Iterable[BaseException]) -> bool:
    """Whether one of these, or what caused it or came before it, is ours."""
    found, left = set[int](), [*errors]
    while left:
        error = left.pop()
        if WORDS in repr(error):
            return True
        if id(error) not in found:
            found.add(id(error))
            left += [one for one in (error.__cause__, error.__context__) if one is not None]
            left += error.exceptions if isinstance(error, BaseExceptionGroup) else []
    return False


class Strike:
    """A task factory. Work of the name `on`, when it is begun in the background, raises; `seen`: names of all."""

    def __init__(self, on: str = "") -> None:
        self._on, self.seen = on, set[str]()

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        frame, depth = sys._getframe(1), 0
        while frame.f_back is not None and frame.f_code not in BEGINNERS and depth < 4:
            frame, depth = frame.f_back, depth + 1
        if frame.f_code in BEGINNERS:
            name = f"{work.cr_code.co_filename.rpartition('/')[2]}:{work.__qualname__}"
            self.seen.add(name)
            work = self.changed(work, name)
        return asyncio.Task(work, loop=loop, **more)

    def changed(self, work: Any, name: str) -> Any:
        if name != self._on:
            return work
        work.close()
        return _raise(RuntimeError(WORDS))


class Faults(Strike):
    """A task factory, and failing calls, as the seed of `draw` says. `made`: what has failed, for messages; `done`: the
    calls that did what they are to do, failed or not; `share`: of work and calls that fails."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw, self.share = random.Random(draw.random()), draw.choice(FAILS)
        self.made, self.done = list[str](), set[str]()

    def changed(self, work: Any, name: str) -> Any:
        draws = random.Random(self._draw.random())
        fails_at = draws.randrange(STEPS_MAX) if draws.random() < self.share else -1
        if fails_at == 0 and name.endswith("._stop"):  # a close has begun, or nobody can close a server
            fails_at = 1
        return _Driven(work, draws, fails_at, lambda: self.made.append(name))

    @contextmanager
    def in_calls(self, calls: Iterable[tuple[Any, str]], *, before: bool) -> Iterator[None]:
        """Inside, these functions, methods or classes fail at times: before they do anything, or when they are done."""
        with ExitStack() as patches:
            for owner, name in calls:
                failing = self._failing(getattr(owner, name), f"{owner.__name__}.{name}", before)
                patches.enter_context(patch.object(owner, name, failing))
            yield

    def _failing(self, function: Callable[..., Any], name: str, before: bool) -> Callable[..., Any]:
        def fail() -> None:
            if self._draw.random() < self.share:
                self.made.append(name)
                raise OSError(WORDS)

        @functools.wraps(function)
        def at_once(*args: Any, **kwargs: Any) -> Any:
            if before:
                fail()
            found = function(*args, **kwargs)
            self.done.add(name)
            if not before:
                fail()
            return found

        @functools.wraps(function)
        async def in_time(*args: Any, **kwargs: Any) -> Any:
            if before:
                await dawdle()
                fail()
            found = await function(*args, **kwargs)
            self.done.add(name)
            if not before:  # a close that is given up has begun
                await dawdle()
                fail()
            return found

        async def dawdle() -> None:
            for _ in range(self._draw.randrange(TURNS_MAX)):
                await asyncio.sleep(0)

        return in_time if inspect.iscoroutinefunction(function) else at_once


async def _raise(error: Exception) -> None:
    raise error


class _Driven(Coroutine[Any, Any, Any]):
    """A coroutine that is run step by step."""

    def __init__(self, work: Any, draws: random.Random, fails_at: int, told: Callable[[], None]) -> None:
        self._work, self._steps = work, _steps(work, draws, fails_at, told)

    def send(self, value: Any) -> Any:
        return self._step(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._steps.throw, *error)

    def _step(self, go: Callable[..., Any], *given: Any) -> Any:
        try:
            return go(*given)
        except BaseException:
            self._work.close()  # it may not have begun
            raise

    def close(self) -> None:
        self._steps.close()
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps


def _steps(work: Any, draws: random.Random, fails_at: int, told: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Run a coroutine step by step: before a step others have their turns, and at one of them it fails."""
    step, thrown = 0, None
    while True:
        if draws.random() < DAWDLES and thrown is None:
            try:
                for _ in range(draws.randrange(TURNS_MAX)):
                    yield
            except BaseException as error:  # cancelled meanwhile
                thrown = error
        if step == fails_at:
            told()
            thrown = RuntimeError(WORDS)
        step += 1
        try:
            waits_for = work.send(None) if thrown is None else work.throw(thrown)
        except StopIteration as end:
            return end.value
        try:
            yield waits_for
            thrown = None
        except BaseException as error:
            thrown = error
