"""A failure in the background reaches its owner."""

from __future__ import annotations

import asyncio
import gc
import logging
from functools import partial

import pytest

from echo2.core.background import Background, Ending, Shared, awaited, close_all, spawn, to_its_end, together
from echo2.core.errors import LinkError


def test_an_error_reaches_the_owner_once_and_a_cancellation_does_not() -> None:
    errors: list[Exception] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("boom")

    async def run() -> None:
        task = spawn(fail(), errors.append)
        with pytest.raises(ValueError, match="boom"):
            await task
        sleeping = spawn(asyncio.sleep(1000), errors.append)
        await asyncio.sleep(0)
        sleeping.cancel()
        await asyncio.gather(sleeping, return_exceptions=True)
        assert await spawn(asyncio.sleep(0, "done"), errors.append) == "done"
        await asyncio.sleep(0)

    asyncio.run(run())
    assert [str(error) for error in errors] == ["boom"]


def test_each_of_several_closes_whatever_becomes_of_the_others() -> None:
    closed = list[str]()
    forever = asyncio.Event()

    async def close(name: str) -> None:
        closed.append(name)
        if name == "fails":
            raise OSError(name)
        if name == "hangs":
            await forever.wait()

    async def run() -> None:
        with pytest.raises(OSError, match="fails"):
            await close_all(partial(close, "first"), partial(close, "fails"), partial(close, "last"))
        assert closed == ["first", "fails", "last"]
        closing = awaited(close_all(partial(close, "hangs"), partial(close, "after")))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert closed[3:] == ["hangs", "after"]

    asyncio.run(run())


def test_the_first_error_of_several_works_ends_the_others_and_leaves_no_mark_on_the_task_that_waited() -> None:
    """A learner whose upload had failed once took the end of its connection to the head for its own."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("boom")

    ended: list[bool] = []

    async def begin(is_in_block: bool) -> None:
        async with together() as works:
            works.create_task(fail())
            slow = works.create_task(asyncio.sleep(1000))
            slow.add_done_callback(lambda done: ended.append(done.cancelled()))
            if is_in_block:
                await asyncio.sleep(1000)

    async def waiting(is_in_block: bool) -> int:
        with pytest.raises(ValueError, match="boom"):
            await begin(is_in_block)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    async def run() -> None:
        for is_in_block in (False, True):
            assert await waiting(is_in_block) == 0
        assert ended == [True, True]
        task = awaited(waiting(is_in_block=False))
        await asyncio.sleep(0)
        task.cancel()  # by somebody else, before the error
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() or task.result() == 1

    asyncio.run(run())


def test_background_work_without_references_is_not_garbage_collected() -> None:
    done: list[int] = []

    async def work(event: asyncio.Event) -> None:
        await event.wait()
        done.append(1)

    async def run() -> None:
        event = asyncio.Event()
        spawn(work(event), lambda _: None)
        await asyncio.sleep(0)
        gc.collect()
        event.set()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert done == [1]


def test_an_owner_learns_of_the_end_of_its_work_and_cancels_it() -> None:
    errors: list[Exception] = []

    async def fail(number: int) -> None:
        raise ValueError(str(number))

    async def run() -> None:
        owner = Background(errors.append)
        for number in range(3):
            owner.spawn(fail(number))
        waiting = owner.spawn(asyncio.Event().wait())
        assert len(list(owner)) == 4
        while len(list(owner)) > 1:  # noqa: ASYNC110  # those that fail end by themselves
            await asyncio.sleep(0)
        await owner.close()
        assert not owner
        assert waiting.cancelled()
        with pytest.raises(ValueError, match="7"):
            await awaited(fail(7))

    asyncio.run(run())
    assert [str(error) for error in errors] == ["0", "1", "2"]


def test_a_value_is_computed_once_for_all_callers_and_again_after_a_failure() -> None:
    """Memory was short the first time; nobody can be told so for ever."""
    made: list[str] = []

    async def make(key: str) -> str:
        made.append(key)
        await asyncio.sleep(0)
        if len(made) == 1:
            raise MemoryError(key)
        return key.upper()

    async def run() -> None:
        values = Shared(make)
        first = await asyncio.gather(values.get("a"), values.get("a"), return_exceptions=True)
        assert [type(one) for one in first] == [MemoryError, MemoryError]
        gone = asyncio.create_task(values.get("a"))
        await asyncio.sleep(0)
        gone.cancel()  # one that no longer asks ends nothing for others
        assert await asyncio.gather(values.get("a"), values.get("b"), values.get("a")) == ["A", "B", "A"]
        assert made == ["a", "a", "b"]
        await values.get("a")
        assert list(values.made().items()) == [("b", "B"), ("a", "A")]
        values.drop("b")
        assert await values.get("b") == "B"
        assert made == ["a", "a", "b", "b"]

    asyncio.run(run())


@pytest.mark.parametrize("error", [LinkError("away"), ValueError("a mistake")])
def test_shared_work_that_fails_after_all_have_given_up_is_heard_unless_it_was_expected(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        goes_on = asyncio.Event()

        async def make(key: str) -> str:
            await goes_on.wait()
            raise error

        values = Shared(make)
        asking = asyncio.ensure_future(values.get("a"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        goes_on.set()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    assert not [one for one in caplog.records if "never retrieved" in one.getMessage()]
    heard = [one.exc_info[1] for one in caplog.records if one.exc_info]
    assert heard == ([error] if isinstance(error, ValueError) else [])


@pytest.mark.parametrize("moments", range(1, 6))
def test_work_that_must_not_be_left_half_done_ends_before_its_cancelled_caller(moments: int) -> None:
    done = list[str]()

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        done.append("work")

    async def run() -> None:
        calling = asyncio.ensure_future(to_its_end(work()))
        for _ in range(moments):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
        assert done == ["work"]

    asyncio.run(run())


@pytest.mark.parametrize("last", [None, asyncio.CancelledError(), OSError("a close failed")])
def test_the_failure_that_ends_a_process_is_heard_whatever_ends_its_block(
    last: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, later = ValueError("first"), ValueError("later")

    async def run() -> None:
        with Ending[str](logging.getLogger(), "what it did") as ending:
            ending.fail(first)
            ending.tell("too late")
            ending.fail(LinkError("expected"))
            ending.fail(later)
            try:
                await ending.outcome
            finally:
                if last is not None:
                    raise last

    with pytest.raises(BaseException) as raised:
        asyncio.run(run())
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert logged == ([later] if last is None else [later, first])
    assert isinstance(raised.value, ValueError if last is None else type(last))


def test_a_process_that_ends_by_itself_logs_nothing_and_what_fails_after_it_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failure = ValueError("after")

    async def run() -> str:
        with Ending[str](logging.getLogger(), "what it did") as ending:
            ending.tell("the run is over")
        with Ending[str](logging.getLogger(), "what it did") as given_up:
            pass
        assert caplog.records == []
        given_up.fail(failure)
        return await ending.outcome

    assert asyncio.run(run()) == "the run is over"
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [failure]
