"""An event loop in a thread of its own: what a call gives before, during and after the end of the loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from echo2.core.loop_thread import BlockingThreads, LoopThread, call_in


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError(value)
    return value


def test_work_ends_with_its_result_or_its_error() -> None:
    thread = LoopThread("a loop")
    assert thread.start(answer(3)).result() == 3
    with pytest.raises(ValueError, match="-1"):
        thread.start(answer(-1)).result()
    thread.close()


def test_no_work_begins_after_the_end() -> None:
    thread, called = LoopThread("a loop"), list[int]()
    thread.close()
    future = thread.start(answer(3))
    assert future.cancelled()
    assert not thread.call(called.append, 1)
    thread.close()
    assert called == []


def test_work_under_way_is_cancelled_and_awaited_before_the_last_work() -> None:
    thread, order, has_begun = LoopThread("a loop"), list[str](), threading.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("ended")

    async def last() -> None:
        order.append("last")

    future = thread.start(work())
    has_begun.wait()
    thread.close(last)
    with pytest.raises(CancelledError):
        future.result()
    assert order == ["ended", "last"]


def test_an_error_of_the_last_work_is_raised_and_the_thread_ends() -> None:
    thread = LoopThread("a loop")

    async def last() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        thread.close(last)
    assert not thread.call(print)


def test_cancelling_a_future_cancels_its_work() -> None:
    thread, was_cancelled, has_begun = LoopThread("a loop"), threading.Event(), threading.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    future = thread.start(work())
    has_begun.wait()
    assert future.cancel()
    was_cancelled.wait()
    thread.close()


def test_a_call_into_a_closed_loop_does_nothing() -> None:
    loop, called = asyncio.new_event_loop(), list[int]()
    assert call_in(loop, called.append, 1)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not call_in(loop, called.append, 2)
    assert called == [1]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_threads_for_blocking_work_end_before_the_loop_may(is_cancelled: bool) -> None:
    """A thread that ends later than its loop calls into a closed one, whoever still awaits the work."""
    done = list[str]()

    async def use() -> None:
        threads, has_begun, may_end = BlockingThreads(1, "disk"), threading.Event(), threading.Event()

        def work() -> str:
            has_begun.set()
            may_end.wait()
            done.append("worked")
            return "found"

        working, waiting = asyncio.ensure_future(threads.run(work)), asyncio.ensure_future(threads.run(done.append))
        await asyncio.to_thread(has_begun.wait)
        if is_cancelled:
            working.cancel()
        closing = asyncio.ensure_future(threads.close())
        await asyncio.wait([waiting])
        assert (waiting.cancelled(), closing.done()) == (True, False)
        may_end.set()
        await closing
        assert done == ["worked"]
        assert not any(one.name.startswith("disk") for one in threading.enumerate())
        await asyncio.wait([working])
        assert working.cancelled() if is_cancelled else working.result() == "found"

    asyncio.run(use())
