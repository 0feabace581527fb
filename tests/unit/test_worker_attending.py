"""A machine's stream of orders: when it ends for good, and what its owner reads then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from echo2.core.errors import LinkError, PeerError, UserError
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_link import attended
from memory_links import MemoryLink

WORKER = Peer("w-0123456789", "worker")


async def one_order(peer: Peer, _: wire.WorkerHello) -> AsyncIterator[wire.Order]:
    """A head that ends each stream after an order."""
    yield wire.Order(stop=wire.Stop(reason=peer.peer_id))


async def refused(peer: Peer, _: wire.WorkerHello) -> AsyncIterator[wire.Order]:
    raise PeerError("revoked", f"{peer.peer_id} was revoked")
    yield


async def count(link: MemoryLink, leaves_after: int, patience_seconds: float = 60.0) -> tuple[int, int]:
    """Attend until the machine leaves. Return the numbers of orders and of lost connections."""
    num_orders, lost = 0, []
    calls = wire.WorkerHello, patience_seconds, lambda: lost.append(1), lambda: num_orders >= leaves_after
    async for _ in attended(link, *calls):
        num_orders += 1
    return num_orders, len(lost)


def test_machine_that_leaves_does_not_try_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert asyncio.run(count(MemoryLink({"Attend": one_order}, WORKER), leaves_after=1)) == (1, 0)
    assert "not connected" not in caplog.text
    assert asyncio.run(count(MemoryLink({"Attend": one_order}, WORKER), leaves_after=2)) == (2, 1)
    assert caplog.text.count("not connected (the head ended the stream); trying again, for 60 s in all") == 1
    assert caplog.text.count("connected again") == 1


def test_revoked_machine_reads_what_to_do() -> None:
    words = r"^w-0123456789 was revoked by the run's owner\. Ask the owner for a new ticket, .* --state DIR\.$"
    with pytest.raises(UserError, match=words):
        asyncio.run(count(MemoryLink({"Attend": refused}, WORKER), leaves_after=1))


def test_machine_without_a_head_is_sent_to_the_doctor() -> None:
    async def scenario() -> None:
        link = MemoryLink({"Attend": one_order}, WORKER)
        link.cut()
        await count(link, leaves_after=1, patience_seconds=0.0)

    with pytest.raises(LinkError, match=r"^No head for 0 s: Attend: the link is cut\. `echo2 doctor @TICKET`"):
        asyncio.run(scenario())
