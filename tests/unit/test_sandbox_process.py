"""A process of the user's code that hangs: every call in flight is told, whenever its time is up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from echo2.sandbox.code_process import CodeFailure, CodeProcess

ENTRY = "test_sandbox_process:make_handler"
NUM_CALLS, APART_SECONDS = 2000, 1e-5


def make_handler(setup: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], dict[str, Any]]:
    """For the child."""

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["hang"]:
            threading.Event().wait()
        return {"done": True}

    return answer, {}


def test_calls_that_time_out_as_the_process_ends_all_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many, so close, that some are up in the moment between the end of the process and the word of it."""
    monkeypatch.setenv("PYTHONPATH", f"{__file__.rpartition('/')[0]}")

    async def scene() -> list[Any]:
        process = CodeProcess("The process of a test", ENTRY, {})
        await process.start()
        times = [0.3 + APART_SECONDS * number for number in range(NUM_CALLS)]
        calls = [process.call({"hang": True}, seconds, "hanging") for seconds in times]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert (await process.call({"hang": False}, 30.0, "answering"))["done"]
        await process.close()
        return outcomes

    outcomes = asyncio.run(scene())
    assert [type(outcome) for outcome in outcomes] == [CodeFailure] * NUM_CALLS


def test_a_call_that_is_given_up_while_it_ends_the_process_leaves_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{__file__.rpartition('/')[0]}")

    async def scene() -> object:
        process = CodeProcess("The process of a test", ENTRY, {})
        await process.start()
        first = asyncio.create_task(process.call({"hang": True}, 0.1, "hanging"))
        other = asyncio.create_task(process.call({"hang": True}, 60.0, "hanging"))
        while process.pid is not None:  # noqa: ASYNC110 (until the first call has begun to end it)
            await asyncio.sleep(0)
        first.cancel()
        (outcome,) = await asyncio.gather(other, return_exceptions=True)
        await process.close()
        return outcome

    assert isinstance(asyncio.run(scene()), CodeFailure)
