"""The link within one process keeps the promises of every link."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from echo2.transport.base import Link, Peer
from memory_links import LOOPBACK, MemoryLink
from transport_cases import Desk, LinkCases


class TestMemoryLink(LinkCases):
    def linked(self, desk: Desk, role: str = "worker") -> AbstractAsyncContextManager[Link]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Link]:
            link = MemoryLink(desk.handlers(), Peer("w-1", role, LOOPBACK))
            yield link
            await link.close()

        return opened()

    def cut(self, link: Link) -> None:
        assert isinstance(link, MemoryLink)
        link.cut()

    def mend(self, link: Link) -> None:
        assert isinstance(link, MemoryLink)
        link.mend()
