"""A gate: takes connections for a head, and passes it the calls (`gates`).

It is the head's own server in a process of its own, whose handlers are at the head: everything that is decided about a
caller before its request is read, and about a request before it is parsed, is decided here. It ends with its head.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from echo2.core import logs
from echo2.transport import limits
from echo2.transport.base import METHODS, Handler, Method, Peer
from echo2.transport.budgets import OverBudget, Party
from echo2.transport.gate_channel import Channel, Frame, HeadFailedError, pack_call, unpack_refusal
from echo2.transport.gates import ALIVE_SECONDS, GATES_MAX, METHOD_NAMES
from echo2.transport.grpc_server import DETAIL_CHARS_MAX, GrpcServer
from echo2.transport.identity import RunIdentity


class HeadLink:
    """The calls of one gate to its head. `member` is called with each new member, and `over` is set when the head ends
    the gate, or is gone."""

    def __init__(self, member: Callable[[str, dict[str, Any]], None]) -> None:
        self.over = asyncio.Event()
        self.channel = Channel(self._hear, self.over.set)
        self._member, self._numbers = member, itertools.count(1)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, asyncio.Queue[bytes | Exception | None]] = {}

    def handler(self, method: Method) -> Handler:
        """Return a handler that passes requests, as bytes, to the head."""
        return partial(self._stream if method.streaming else self._call, METHOD_NAMES.index(method.name))

    async def _call(self, method: int, peer: Peer, request: bytes) -> bytes:
        number = self._begin(method, peer, request)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            return await answer
        finally:
            del self._answers[number]
            if answer.cancelled():
                self.channel.send(Frame.CANCEL, number)

    async def _stream(self, method: int, peer: Peer, request: bytes) -> AsyncIterator[bytes]:
        number = self._begin(method, peer, request)
        items = self._streams[number] = asyncio.Queue()
        has_ended = False
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, Exception):
                    has_ended = True
                    raise item
                yield item
                self.channel.send(Frame.TAKEN, number)
            has_ended = True
        finally:
            del self._streams[number]
            if not has_ended:
                self.channel.send(Frame.CANCEL, number)

    def _begin(self, method: int, peer: Peer, request: bytes) -> int:
        number = next(self._numbers)
        self.channel.send(Frame.CALL, number, pack_call(method, f"{peer.role}:{peer.peer_id}", peer.host), request)
        return number

    def _hear(self, kind: Frame, number: int, body: bytes) -> None:
        if kind is Frame.MEMBER:
            self._member(*json.loads(body))
        elif kind is Frame.STOP:
            self.over.set()
        elif answer := self._answers.get(number):
            if not answer.done():
                answer.set_exception(unpack_refusal(body)) if kind is Frame.REFUSED else answer.set_result(body)
        elif items := self._streams.get(number):
            items.put_nowait(unpack_refusal(body) if kind is Frame.REFUSED else None if kind is Frame.END else body)


class GateServer(GrpcServer):
    """Serves a head's methods on its listening sockets. What all strangers, all machines of the owner or those of one
    ticket may leave unread is shared among the gates; answers are paced by the head."""

    def __init__(
        self, identity: RunIdentity, link: HeadLink, methods: Sequence[str], listeners: Sequence[socket.socket]
    ) -> None:
        handlers = {name: link.handler(METHODS[name]) for name in methods}
        super().__init__("", 0, identity, handlers, listeners=listeners)

    def _parties(self, peer: Peer) -> tuple[Party, ...]:
        parties = [replace(party, sent_per_second=0.0) for party in super()._parties(peer)]
        shared = [
            replace(party, unread=max(party.unread / GATES_MAX, limits.UNREAD_PER_PEER_MAX)) for party in parties[1:]
        ]
        return *parties[:1], *shared

    def _message(self, method: Method, data: bytes) -> Any:
        return data

    async def _abort(self, method: Method, context: Any, error: Exception) -> None:
        if isinstance(error, OverBudget) and error.is_flood and (caller := self._door.caller(context.peer())):
            caller.drop("asked too much")
        if isinstance(error, HeadFailedError):
            detail = f"the other end failed: {error}"[:DETAIL_CHARS_MAX]
            await context.abort(grpc.StatusCode.INTERNAL, detail)
        await super()._abort(method, context, error)


async def serve(
    directory: Path, methods: Sequence[str], channel: socket.socket, listeners: list[socket.socket]
) -> None:
    """Take connections until the head ends this gate, or has ended.

    Raises:
        UserError: the run's identity can't be read.
    """
    identity = RunIdentity.create_or_load(directory)
    link = HeadLink(identity.learn)
    await asyncio.get_running_loop().create_unix_connection(lambda: link.channel, sock=channel)
    server = GateServer(identity, link, methods, listeners)
    await server.start()
    while not link.over.is_set():
        link.channel.send(Frame.READY)
        with suppress(TimeoutError):
            async with asyncio.timeout(ALIVE_SECONDS):
                await link.over.wait()
    await server.stop()


def main() -> None:
    """Serve: DIRECTORY METHODS CHANNEL LISTENERS, where METHODS are names and the others are descriptors."""
    directory, methods, *descriptors = sys.argv[1:]
    logs.start("gate")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head ends its gates
    channel, *listeners = (socket.socket(fileno=int(number)) for number in descriptors)
    asyncio.run(serve(Path(directory), methods.split(","), channel, listeners))


if __name__ == "__main__":
    main()
