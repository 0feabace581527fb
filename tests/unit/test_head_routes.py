"""The head takes a group's routes only as the learner's mixture has them, and keeps them with the group."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from echo2.transport import wire_pb2 as wire
from echo2.transport.routes import RouteShape, unpacked
from head_cases import OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END, VOCAB

SHAPE = RouteShape(3, 2, 8)
PROMPT = 3
TOKENS = [[5, 7, END], [7, 5, END], [5, 7, END], [7, 7, 5, END]]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


def opened(path: Path, is_asked: bool = True) -> OpenHead:
    raw = settings(rows(path / "rows.jsonl", "53="), learner={"routing_replay": is_asked})
    return OpenHead(path, raw)


def routes_of(shape: RouteShape = SHAPE) -> bytes:
    rng, count = random.Random(0), sum(PROMPT + len(tokens) - 1 for tokens in TOKENS) * shape.layers
    return np.array([rng.sample(range(shape.experts), shape.chosen) for _ in range(count)], shape.dtype).tobytes()


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def brought(lease: wire.Lease, routes: bytes) -> wire.Delivery:
    return delivery(lease, [sample(tokens) for tokens in TOKENS], routes=routes)


def test_routes_are_checked_kept_and_fed_again_after_a_kill(tmp_path: Path) -> None:
    good = routes_of()
    wrong = {
        "expert 9 of 8": bytes([9]) + good[1:],
        "chosen twice": bytes([good[1]]) + good[1:],
        "bytes of routes": routes_of(RouteShape(2, 2, 8)),
    }

    async def scenario() -> None:
        async with opened(tmp_path) as head, head.attending() as leases:
            head.head.deliveries.learn_sizes(VOCAB, SHAPE)
            await until(lambda: leases)
            assert leases[0].routes
            for what, data in wrong.items():
                accepted, reason = (await head.deliver(brought(leases[-1], frame(data))))[0]
                assert not accepted
                assert what in reason
            assert (await head.deliver(brought(leases[0], frame(good))))[0][0]
            await until(lambda: head.fed)
            (first,) = head.fed
        async with opened(tmp_path) as again:
            await until(lambda: again.fed)
            (second,) = again.fed
        assert first.routes == second.routes == frame(good)
        whole = b"".join(rollout.routes for rollout in unpacked(second).rollouts)
        assert whole == good

    run(scenario())


def test_unrequested_routes_are_refused_and_useless_ones_dropped(tmp_path: Path) -> None:
    async def refused() -> None:
        async with opened(tmp_path, is_asked=False) as head, head.attending() as leases:
            await until(lambda: leases)
            assert not leases[0].routes
            accepted, reason = (await head.deliver(brought(leases[0], frame(routes_of()))))[0]
            assert not accepted
            assert "not asked for" in reason

    async def left_out() -> None:
        """The learner replays none, as TRL's does not."""
        async with opened(tmp_path / "other") as head, head.attending() as leases:
            await until(lambda: leases)
            assert (await head.deliver(brought(leases[0], frame(routes_of()))))[0][0]
            await until(lambda: head.fed)
            assert head.fed[0].routes == b""
            assert head.fed[0].prompt_tokens == array("i", [7, 5, 28])

    (tmp_path / "other").mkdir()
    run(refused())
    run(left_out())
