"""A machine's stream of orders: when it ends for good, and what its owner reads then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from echo2.core.errors import LinkError, PeerError, UserError
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Peer
from echo2.transport.grpc_link import GrpcLink, attended
from echo2.weights.broadcast.peer import PeerNode
from echo2.worker.worker_process import WorkerOptions, WorkerProcess
from memory_links import MemoryLink
from random_faults import WORDS, Strike
from test_worker_weights import joined

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


@pytest.mark.parametrize("num_cancelled", [0, 1, 2])
def test_failure_is_heard_and_all_is_closed_if_ctrl_c_comes_while_the_worker_ends_for_it(
    num_cancelled: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, links_closed = list[BaseException](), list[GrpcLink]()
    close_link, close_node = GrpcLink.close, PeerNode.close

    async def closing_link(link: GrpcLink) -> None:
        await close_link(link)
        links_closed.append(link)

    async def scenario() -> None:
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def closing_node(node: PeerNode) -> None:
            begun.set()
            try:
                await goes_on.wait()
            finally:
                await close_node(node)

        async with joined(tmp_path) as (_, member):
            asyncio.get_running_loop().set_task_factory(Strike("worker_process.py:WorkerProcess._keep_attending"))  # type: ignore[arg-type]
            with monkeypatch.context() as patch:
                patch.setattr(PeerNode, "close", closing_node)
                patch.setattr(GrpcLink, "close", closing_link)
                worker = WorkerProcess(member, tmp_path / "worker", WorkerOptions(relays=False), {})
                running = asyncio.ensure_future(worker.run())
                await begun.wait()
                for _ in range(num_cancelled):
                    running.cancel()
                    await asyncio.sleep(0)
                goes_on.set()
                raised.extend(one for one in await asyncio.gather(running, return_exceptions=True) if one)  # type: ignore[misc]
            assert links_closed

    asyncio.run(scenario())
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert sum(WORDS in repr(error) for error in [*raised, *logged]) == 1
