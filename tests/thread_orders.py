"""Runs code of several threads in many orders, each drawn from a seed, and reports what goes wrong only in some.

At every step that another thread can notice (a call into an event loop, a queue, a future, a lock of a condition, the
start and the end of a thread), the seed decides whether the thread stands aside until no other thread takes a step. So
an order that a machine makes once in a thousand runs becomes a common one, and does not depend on the machine's speed.
The decisions are the same in every run of a seed; what the threads do between two steps is up to the machine.

It patches classes of the standard library while a scenario runs; only threads that the scenario started stand aside.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import random
import sys
import threading
import time
import traceback
from asyncio.base_events import BaseEventLoop
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

Scenario = Callable[[random.Random], None]

#: Share of the steps at which a thread stands aside; a seed takes one of them.
RATES = (0.02, 0.06, 0.15, 0.35)
#: Another look whether the other threads are idle, the looks without a step after which they are, and the most looks.
LOOK_SECONDS, IDLE_LOOKS, LOOKS_MAX = 0.0003, 2, 40
#: For what must happen, however slow the machine.
HANG_SECONDS = 100.0
STEPS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (BaseEventLoop, ("call_soon_threadsafe", "stop", "run_in_executor", "_run_once")),
    (BaseSelectorEventLoop, ("close",)),
    (threading.Thread, ("start", "join", "is_alive", "run")),
    (threading.Condition, ("__enter__", "__exit__", "wait")),  # of events, queues and futures, too
    (ThreadPoolExecutor, ("submit", "shutdown")),
)
_SimpleQueue = queue.SimpleQueue


class _Order:
    """The order of one run: which threads belong to it, and when each stands aside."""

    def __init__(self, seed: int) -> None:
        self._seed, self._rate = seed, RATES[seed % len(RATES)]
        self._num_steps = 0
        self.threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread) -> None:
        name = thread.name.rstrip("0123456789-_")
        number = sum(each.name.startswith(name) for each in self.threads)
        vars(thread)["draws"] = random.Random(f"{self._seed} {name} {number}")
        self.threads.append(thread)

    def draws(self) -> random.Random | None:
        """Return those of the thread that runs; None: it does not belong here."""
        thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
        found: random.Random | None = getattr(thread, "draws", None)
        return found

    def step(self) -> None:
        draws = self.draws()
        if draws is None:
            return
        self._num_steps += 1
        if draws.random() >= self._rate:
            return
        seen, idle = self._num_steps, 0
        for _ in range(LOOKS_MAX):
            time.sleep(LOOK_SECONDS)
            idle = idle + 1 if self._num_steps == seen else 0
            seen = self._num_steps
            if idle == IDLE_LOOKS:
                break

    def around(self, method: Callable[..., Any], is_start: bool) -> Callable[..., Any]:
        @wraps(method)
        def stepping(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if is_start and self.draws() is not None:
                self.add(owner)
            self.step()
            try:
                return method(owner, *args, **kwargs)
            finally:
                self.step()

        return stepping

    @contextmanager
    def patched(self) -> Iterator[None]:
        order = self

        class Queue(_SimpleQueue):  # type: ignore[type-arg]
            def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
                order.step()
                super().put(item)
                order.step()

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                order.step()
                item = super().get(block, timeout)
                order.step()
                return item

        with ExitStack() as patches:
            for owner, names in STEPS:
                for name in names:
                    is_start = (owner, name) == (threading.Thread, "start")
                    patches.enter_context(patch.object(owner, name, self.around(getattr(owner, name), is_start)))
            patches.enter_context(patch.object(queue, "SimpleQueue", Queue))
            yield


class _Errors(logging.Handler):
    """What is logged as an error, also by asyncio (a task destroyed, a callback that raised)."""

    def __init__(self, troubles: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._troubles = troubles

    def emit(self, record: logging.LogRecord) -> None:
        self._troubles.append(f"logged by {record.name}: {logging.Formatter().format(record)}")


def troubles_of(scenario: Scenario, seed: int) -> list[str]:
    """Run a scenario in the order of a seed. Return its exceptions, those of all its threads, errors that were logged,
    coroutines, sockets and tasks that were left, threads that did not end; and where it hung."""
    order, troubles = _Order(seed), list[str]()

    def run() -> None:
        try:
            scenario(random.Random(seed))
        except BaseException as error:
            troubles.append("".join(traceback.format_exception(error)))

    def take(raised: Any) -> None:
        if not issubclass(raised.exc_type, SystemExit):
            where = getattr(raised, "thread", None) or getattr(raised, "object", None)
            lines = traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
            troubles.append(f"raised in {where!r}: {''.join(lines)}")

    handler, root = _Errors(troubles), threading.Thread(target=run, name="scenario", daemon=True)
    gc.collect()
    gc.freeze()  # what a run leaves is found by collecting that alone
    logging.getLogger().addHandler(handler)
    try:
        with patch.object(threading, "excepthook", take), patch.object(sys, "unraisablehook", take):
            with order.patched():
                order.add(root)
                root.start()
                root.join(HANG_SECONDS)
                for thread in order.threads:
                    thread.join(0.0 if root.is_alive() else HANG_SECONDS / 10)
            troubles += [_stack(thread) for thread in order.threads if thread.is_alive()]
            del order, root
            gc.collect()
    finally:
        logging.getLogger().removeHandler(handler)
    return troubles


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name} still runs:\n" + ("".join(traceback.format_stack(frame)) if frame else "")


def search(scenario: Scenario, seeds: Iterable[int], foreseen: str = "") -> None:
    """Run a scenario in the orders of these seeds. Raises AssertionError at the first seed with a fault. `foreseen`:
    what names this is an error that the scenario itself has caused, and looks after. gRPC's poller, which all loops of
    a process share, may tell one that is closed of a call that ended with it: a process of echo2 has one loop for gRPC.
    """
    known = [foreseen, "PollerCompletionQueue._handle_events"] if foreseen else []
    try:
        for seed in seeds:
            troubles = [one for one in troubles_of(scenario, seed) if not any(word in one for word in known)]
            assert not troubles, f"seed {seed} of {scenario.__name__}:\n" + "\n".join(troubles)
    finally:
        gc.unfreeze()


def at_once(*actions: Callable[[], object]) -> None:
    """Run each action in a thread of its own. Raises what they raised."""
    raised: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(action,), name=f"actor{at}") for at, action in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise BaseExceptionGroup("actors", raised)


def in_loop(work: Callable[[], Any]) -> Callable[[], None]:
    """An action that runs a coroutine function in an event loop of its own."""
    return lambda: asyncio.run(work())
