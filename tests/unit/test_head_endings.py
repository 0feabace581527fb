"""How a rollout of one turn ends: by an end token, a stop string or its length; the head believes nothing else. And
who waits while results are read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo2.transport import wire_pb2 as wire
from head_cases import OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END, tokenizer_files

RIGHT = [5, 7, END]  # 35
HONEST = [sample(RIGHT) for _ in range(4)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


ENDS = {"config.json": b'{"eos_token_id": 1, "max_position_embeddings": 12}'}
ENDINGS: dict[str, tuple[str, wire.Rollout]] = {
    "stopped without an end token": ("malformed", sample([5, 7])),
    "goes on behind an end token": ("malformed", sample([END, 5, END])),
    "cut off behind its end token": ("malformed", sample(RIGHT, finish="length")),
    "cut off before its length": ("malformed", sample([5, 7], finish="length")),
    "longer than the model reads": ("oversized", sample([5] * 10, finish="length")),
}


@pytest.mark.parametrize(("word", "attempt"), ENDINGS.values(), ids=ENDINGS)
def test_a_rollout_ends_where_sampling_ends(tmp_path: Path, word: str, attempt: wire.Rollout) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw, tokenizer_files() | ENDS) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], [*HONEST[:3], attempt]))
            assert not accepted
            assert reason.startswith(word), reason
            await until(lambda: len(leases) > 1)
            full = sample([5] * 9, finish="length")  # all that the model reads behind a prompt of 3
            assert (await open_head.deliver(delivery(leases[-1], [*HONEST[:3], full])))[0][0]

    run(scenario())


STOPPINGS: dict[str, tuple[str, list[int], str]] = {
    "goes on behind a stop string": ("goes on behind a stop string, which ends at token 2", [5, 7, 5, END], "stop"),
    "stopped before it": ("did not end by 'stop'", [7, 5], "stop"),
    "is said to be cut off with it": ("did not end by 'length'", [4, 5, 7], "length"),
}


@pytest.mark.parametrize(("complaint", "tokens", "finish"), STOPPINGS.values(), ids=STOPPINGS)
@pytest.mark.parametrize("has_ends", [True, False])
def test_a_rollout_ends_with_its_first_stop_string(
    tmp_path: Path, complaint: str, tokens: list[int], finish: str, has_ends: bool
) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), sampling={"stop": ["35", "00"]})
        files = tokenizer_files() | (ENDS if has_ends else {})
        async with OpenHead(tmp_path, raw, files) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            assert list(leases[0].stop) == ["35", "00"]
            honest = [sample([5, 7]), sample([7, 3, 5, 7]), sample([2, 2])]
            bad = sample(tokens, finish=finish)
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], [*honest, bad]))
            assert not accepted
            assert complaint in reason
            await until(lambda: len(leases) > 1)
            assert (await open_head.deliver(delivery(leases[-1], [*honest, sample([5, 7])])))[0][0]

    run(scenario())


def test_a_heartbeat_does_not_wait_for_all_that_was_delivered(tmp_path: Path) -> None:
    """However many workers deliver at once: it waits for the few calls whose turn it is."""
    num_calls = 40

    async def scenario() -> None:
        async with (
            OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "53="))) as open_head,
            open_head.attending() as leases,
        ):
            await until(lambda: leases)
            junk = [delivery(leases[0], HONEST, lease_id=0)] * 16
            calls = [asyncio.ensure_future(open_head.deliver(*junk)) for _ in range(num_calls)]
            for _ in range(8):  # turns of the loop, in each of which a heartbeat may come
                await asyncio.sleep(0)
            await open_head.report()
            assert sum(call.done() for call in calls) <= num_calls / 2
            assert {refused for call in calls for refused in await call} == {(False, "late: lease 0 is over")}

    run(scenario())
