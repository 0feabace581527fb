"""Links within one process. Messages go through their bytes, as on the wire; a link can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from echo2.core.errors import LinkError, PeerError
from echo2.transport import limits
from echo2.transport.base import METHODS, Handler, Handlers, Peer, check_role, packed, parse

LOOPBACK = "127.0.0.1"


class MemoryLink:
    """A link to `handlers` as `peer`. After `cut()` every call and stream, also one under way, ends in LinkError."""

    def __init__(self, handlers: Handlers, peer: Peer) -> None:
        self._handlers, self._peer = handlers, peer
        self._cut = asyncio.Event()
        self.is_closed = False

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        self._cut.clear()

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        spec, handler = METHODS[method], self._handler(method)
        sent = _bounded(packed(request))
        answering = asyncio.ensure_future(handler(self._peer, sent if spec.raw else parse(spec.request, sent)))
        try:
            reply = await self._unless_cut(answering, method, timeout_seconds)
        finally:
            answering.cancel()
        return parse(spec.reply, _bounded(packed(reply)))

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        async with aclosing(self.frames(method, request)) as replies:
            async for reply in replies:
                yield parse(METHODS[method].reply, reply)

    async def frames(self, method: str, request: Any) -> AsyncGenerator[bytes, None]:
        spec, handler = METHODS[method], self._handler(method)
        replies = handler(self._peer, parse(spec.request, _bounded(packed(request))))
        try:
            while True:
                following = asyncio.ensure_future(anext(replies))
                following.add_done_callback(lambda done: done.cancelled() or done.exception())  # the link may be cut
                try:
                    reply = await self._unless_cut(following, method, None)
                except StopAsyncIteration:
                    return
                finally:
                    if not following.done():
                        following.cancel()
                        await asyncio.wait({following})
                yield _bounded(packed(reply))
        finally:
            await replies.aclose()

    def _handler(self, method: str) -> Handler:
        if self._cut.is_set():
            raise LinkError(f"{method}: the link is cut")
        if method not in self._handlers:
            raise PeerError("unimplemented", f"{method}: nobody serves it")
        check_role(METHODS[method], self._peer)
        return self._handlers[method]

    async def _unless_cut(self, work: asyncio.Future[Any], method: str, timeout_seconds: float | None) -> Any:
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({work, cut}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._cut.is_set():
                raise LinkError(f"{method}: the link is cut")
            if not work.done():
                raise LinkError(f"{method}: no answer within {timeout_seconds} s")
            return work.result()
        finally:
            cut.cancel()

    def open(self) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True
        self.cut()


class MemoryNetwork:
    """Workers and a head within one process: `member` gives each its `base.Network`. Links of a worker break, and
    can't be opened, from `isolate` to `rejoin`. `head_handlers` may be exchanged at any time: a head that restarts."""

    def __init__(self) -> None:
        self.head_handlers: dict[str, Handler] = {}
        self.listeners: dict[str, tuple[str, Handlers, Callable[[str], None]]] = {}
        self._links: list[tuple[str, str, MemoryLink]] = []
        self._isolated: set[str] = set()

    def member(self, peer_id: str) -> MemoryMember:
        return MemoryMember(self, peer_id)

    def isolate(self, peer_id: str) -> None:
        self._isolated.add(peer_id)
        self.cut(peer_id)

    def rejoin(self, peer_id: str) -> None:
        self._isolated.discard(peer_id)
        for caller, callee, link in self._links:
            if peer_id in (caller, callee) and not self._isolated & {caller, callee} and not link.is_closed:
                link.mend()

    def cut(self, peer_id: str) -> None:
        for caller, callee, link in self._links:
            if peer_id in (caller, callee):
                link.cut()

    def open(self, caller: str, callee: str, handlers: Handlers) -> MemoryLink:
        link = MemoryLink(handlers, Peer(caller, "worker", LOOPBACK))
        if self._isolated & {caller, callee}:
            link.cut()
        self._links = [entry for entry in self._links if not entry[2].is_closed]
        self._links.append((caller, callee, link))
        return link


class MemoryMember:
    """`base.Network` of one worker."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self._network, self._peer_id = network, peer_id

    def to_head(self) -> MemoryLink:
        return self._network.open(self._peer_id, "", self._network.head_handlers)

    def to_peer(self, peer_id: str, address: str) -> MemoryLink:
        at, handlers, check_not_revoked = self._network.listeners.get(address, ("", {}, _admit))
        link = self._network.open(self._peer_id, peer_id, _checked(handlers, check_not_revoked))
        if at != peer_id:
            link.cut()
        return link

    async def listen(self, host: str, port: int, handlers: Handlers, check_not_revoked: Callable[[str], None]) -> int:
        port = port or 1 + len(self._network.listeners)
        self._network.listeners[f"{host}:{port}"] = (self._peer_id, handlers, check_not_revoked)
        return port

    async def close(self) -> None:
        listeners = self._network.listeners
        for address in [at for at, entry in listeners.items() if entry[0] == self._peer_id]:
            del listeners[address]
        self._network.cut(self._peer_id)


def _admit(peer_id: str) -> None:
    pass


def _checked(handlers: Handlers, check_not_revoked: Callable[[str], None]) -> Handlers:
    """Handlers that refuse revoked callers, at the call and at each message of a stream."""

    def guarded(name: str, handler: Handler) -> Handler:
        async def answer(peer: Peer, request: Any) -> Any:
            check_not_revoked(peer.peer_id)
            return await handler(peer, request)

        async def answer_stream(peer: Peer, request: Any) -> AsyncIterator[Any]:
            check_not_revoked(peer.peer_id)
            async with aclosing(handler(peer, request)) as replies:
                async for reply in replies:
                    check_not_revoked(peer.peer_id)
                    yield reply

        return answer_stream if METHODS[name].streaming else answer

    return {name: guarded(name, handler) for name, handler in handlers.items()}


def _bounded(data: bytes) -> bytes:
    if len(data) > limits.MESSAGE_BYTES_MAX:
        raise PeerError("oversized", f"a message of {len(data)} bytes; the limit is {limits.MESSAGE_BYTES_MAX}")
    return data
