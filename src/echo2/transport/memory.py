"""Links within one process, for tests and simulation. Messages go through their bytes, as on the wire; a link can be
cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from echo2.errors import LinkError, PeerError
from echo2.transport import limits
from echo2.transport.base import METHODS, Handler, Handlers, Peer, check_role, parse


class MemoryLink:
    """A link to `handlers` as `peer`. After `cut()` every call and stream, also one under way, ends in LinkError."""

    def __init__(self, handlers: Handlers, peer: Peer) -> None:
        self._handlers, self._peer = handlers, peer
        self._cut = asyncio.Event()

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        self._cut.clear()

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        spec, handler = METHODS[method], self._handler(method)
        answering = asyncio.ensure_future(handler(self._peer, _through_bytes(spec.request, request)))
        try:
            reply = await self._unless_cut(answering, method, timeout_seconds)
        finally:
            answering.cancel()
        return _through_bytes(spec.reply, reply)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        spec, handler = METHODS[method], self._handler(method)
        replies = handler(self._peer, _through_bytes(spec.request, request))
        try:
            while True:
                following = asyncio.ensure_future(anext(replies))
                try:
                    reply = await self._unless_cut(following, method, None)
                except StopAsyncIteration:
                    return
                finally:
                    if not following.done():
                        following.cancel()
                        await asyncio.wait({following})
                yield _through_bytes(spec.reply, reply)
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

    async def close(self) -> None:
        self.cut()


def _through_bytes(kind: type[Any], message: Any) -> Any:
    data = message.SerializeToString()
    if len(data) > limits.MESSAGE_BYTES_MAX:
        raise PeerError("oversized", f"a message of {len(data)} bytes; the limit is {limits.MESSAGE_BYTES_MAX}")
    return parse(kind, data)
