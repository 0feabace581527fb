"""A token server that gives its GPU to the learner for a while, against the stand-in for vLLM: requests wait and go on,
and a server that dies asleep, or cannot sleep, comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from echo2.config.values import ServerPlace
from echo2.core.types import Backoff
from echo2.engines.engine import Engine, RequestFailure
from echo2.engines.registry import make_engine
from echo2.engines.servers import engine as server_engine
from server_cases import STANDIN, closing, completed, request, served, snapshot


async def until(holds: Any) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def test_requests_wait_in_a_server_that_sleeps_and_go_on(tmp_path: Path) -> None:
    async def run(state: Any, url: str) -> None:
        place = ServerPlace(url=url, directory=tmp_path / "models")
        async with closing(make_engine("vllm", "cpu", 8, place)) as engine:
            await engine.sleep()  # there is no server yet
            await engine.update_weights(snapshot(10))
            assert not state.is_asleep
            running = [engine.submit(request(8)) for _ in range(3)]
            await until(lambda: state.num_running == 3)
            await engine.sleep()
            await engine.sleep()
            assert state.is_asleep
            later = engine.submit(request(2))
            assert not any(one.done() for one in [*running, later])
            await engine.wake_up()
            await engine.wake_up()
            assert completed(await later).tokens.tolist() == [10, 11]
            assert not any(one.done() for one in running)  # held until other weights come
            await engine.update_weights(snapshot(20, 1))
            for completion in map(completed, await asyncio.gather(*running)):
                assert completion.tokens.tolist() == [10, 11, 12, 23, 24, 25, 26, 27]

    with served(tmp_path, hold_at=3) as (state, url):
        asyncio.run(run(state, url))


@pytest.mark.parametrize("how", ["dies", "cannot sleep"])
def test_a_server_that_is_lost_over_its_sleep_is_there_for_the_next_turn(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "RESTART_SECONDS", Backoff(0.01, 0.02))
    pids, python = tmp_path / "pids", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STANDIN} "$@"\n')
    python.chmod(0o755)

    async def started() -> Engine:
        arguments = ("--hold-at", "3", "--pids", str(pids))
        place = ServerPlace(str(python), "", arguments, tmp_path / "models", takes_turns=how == "dies")
        return make_engine("vllm", "cpu", 8, place)

    async def run() -> None:
        async with closing(await started()) as engine:
            await engine.update_weights(snapshot(10, 3))
            running = engine.submit(request(90))
            await engine.submit(request(1))
            await engine.sleep()
            if how == "dies":
                os.kill(int(pids.read_text()), signal.SIGKILL)
            assert isinstance(await running, RequestFailure)
            later = engine.submit(request(2))
            await engine.wake_up()
            assert completed(await later).version_spans == ((0, 3),)
            assert len(pids.read_text().split()) == 2

    asyncio.run(run())
