"""Gates: processes that take a head's connections once there are many, so that the head has its core for itself.

A connection costs its process descriptors and memory, and calls cost more than half of a head's time in a large fleet:
handshakes, TLS, gRPC, and the weighing of what a stranger sends. A gate (`gate_process`) does all this for its share of
the connections, and passes the head requests that it has weighed. The head's budgets of calls and answers are those of
all gates together; connections, handshakes and unread bytes are bounded in each process.

Gates accept from the head's own listening sockets: the port, tickets and certificates stay as they are, and so does
each connection that the head has already. A small fleet never has one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import Any

from echo2.core.background import Background, close_all
from echo2.core.child import ChildProcess, child_environment, ending
from echo2.core.errors import PeerError
from echo2.core.retries import Retries
from echo2.core.types import Backoff
from echo2.transport.base import METHODS, Handlers, Method, Peer, num_bytes, packed, parse
from echo2.transport.budgets import Budgets, OverBudget, Party
from echo2.transport.door import Door
from echo2.transport.gate_channel import Channel, Frame, Window, pack_refusal, unpack_call
from echo2.transport.grpc_server import GrpcServer, OnError
from echo2.transport.identity import RunIdentity
from echo2.transport.limits import BUCKETS_MAX

log = logging.getLogger(__name__)

#: Connections that a head has when it opens its gates: they take a tenth of its core.
CROWD = 512
#: Gates on a machine of few and of many cores. Two at least, so that the fleet is not gone with one.
GATES_MIN, GATES_MAX = 2, 4
#: Time for a gate to start, and to end when it is told; pauses before another takes the place of one that died.
START_SECONDS, STOP_SECONDS, BACKOFF = 60.0, 5.0, Backoff(1.0, 60.0)
#: A gate says so often that it is there; one that said nothing in so many such times in a row is killed.
ALIVE_SECONDS, SILENCES_MAX = 10.0, 6
#: The methods by the numbers that frames carry.
METHOD_NAMES = tuple(METHODS)


class GatedServer(GrpcServer):
    """A head's server. It opens its gates when it has `CROWD` connections, or at once if so many machines have joined
    its run: they may all come back to a head that has just started."""

    def __init__(
        self,
        host: str,
        port: int,
        identity: RunIdentity,
        handlers: Handlers,
        on_error: OnError,
    ) -> None:
        super().__init__(host, port, identity, handlers, on_error)
        self.gates = Gates(self._door, identity, self._handlers, self._parties, self._budgets, on_error)
        self._door.on_crowd(CROWD, self.gates.open)

    async def start(self) -> int:
        port = await super().start()
        if len(self._identity.members) >= CROWD:
            self._door.rest()  # until the gates are there, or cannot be started: callers wait in the kernel's queue
            self.gates.open()
        return port

    async def _stop(self) -> None:
        self._door.shut()
        await close_all(self.gates.close, super()._stop)


class Gates:
    """The gates before one door, whose calls are answered by `handlers`. `parties` and `budgets` are the server's.
    `on_error` is called with exceptions of handlers that are not refusals."""

    def __init__(
        self,
        door: Door,
        identity: RunIdentity,
        handlers: Handlers,
        parties: Callable[[Peer], tuple[Party, ...]],
        budgets: Budgets,
        on_error: OnError,
    ) -> None:
        self._door, self._identity, self._parties = door, identity, parties
        self.handlers, self.budgets, self.on_error = handlers, budgets, on_error
        identity.on_enrolled = self._enrolled
        names = ",".join(name for name in METHOD_NAMES if name in handlers)
        self._command = [sys.executable, "-P", "-m", "echo2.transport.gate_process", str(identity.directory), names]
        self._work = Background(on_error)
        self._gates: set[_Gate] = set()
        self._is_closing = False
        self.caller = lru_cache(maxsize=BUCKETS_MAX)(self._caller)

    def open(self) -> None:
        """Start the gates, and start each again that dies. The door rests while one of them accepts connections."""
        if self._work:
            return
        log.info("there are many connections: other processes take those to come")
        for _ in range(min(GATES_MAX, max(GATES_MIN, (os.cpu_count() or 1) // 2))):
            self._work.spawn(self._keep())

    async def _keep(self) -> None:
        """Consumes: the ends of one gate. Produces: another one. Waits for: a gate's end, and the clock."""
        retries = Retries(BACKOFF)
        while True:
            gate, num_known = _Gate(self), len(self._identity.members)
            try:
                await gate.start(self._command, self._door.listeners)
                retries.succeeded()
                self._gates.add(gate)
                for member in list(self._identity.members.items())[num_known:]:
                    gate.tell(*member)
                self._door.rest()
                await gate.gone()
                if self._is_closing:
                    return
                log.error("a gate %s: its connections are gone, another one is started", await gate.end(1.0))
            except (OSError, TimeoutError) as error:
                log.error("a gate could not be started, it %s %s", await gate.end(1.0), error)
            finally:
                gate.kill()
                self._gates.discard(gate)
                if not self._gates:
                    self._door.accept()
            await retries.pause()

    def _enrolled(self, peer_id: str, entry: Mapping[str, Any]) -> None:
        self.caller.cache_clear()  # one that was not known shares other budgets
        for gate in self._gates:
            gate.tell(peer_id, entry)

    async def close(self) -> None:
        """Let all gates end; calls under way have the server's time for that."""
        self._is_closing, gates = True, tuple(self._gates)
        for gate in gates:
            gate.channel.send(Frame.STOP)
        await asyncio.gather(*(gate.end(STOP_SECONDS) for gate in gates))
        await self._work.close()

    def _caller(self, name: str, host: str) -> tuple[Peer, tuple[Party, ...]]:
        """The peer with this name in its certificate, and the parties whose budgets it shares."""
        role, _, peer_id = name.partition(":")
        peer = Peer(peer_id, role, host)
        return peer, self._parties(peer)


class _Gate:
    """One gate, as its head sees it. `over` is set when it has closed its end of the channel."""

    def __init__(self, gates: Gates) -> None:
        self.over = asyncio.Event()
        self.channel = Channel(self._hear, self._lost)
        self._gates, self._is_ready, self._was_heard = gates, asyncio.Event(), True
        self._process: ChildProcess | None = None
        self._work = Background(gates.on_error)
        self._calls: dict[int, tuple[asyncio.Task[None], Window]] = {}

    async def start(self, command: list[str], listeners: list[socket.socket]) -> None:
        """Start the process, and wait until it accepts connections.

        Raises:
            OSError: it can't be started, or has ended.
            TimeoutError: it says nothing.
        """
        near, far = socket.socketpair()
        with far:
            descriptors = [far.fileno(), *(listener.fileno() for listener in listeners)]
            words = [*command, *map(str, descriptors)]
            await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=near)
            # Of the head's session: Linux divides processors among sessions, and a gate that is starved is of no use.
            self._process = ChildProcess(
                words, environment=child_environment(), descriptors=descriptors, leads_group=False
            )
        async with asyncio.timeout(START_SECONDS):
            await self._is_ready.wait()
        if self.over.is_set():
            raise OSError("before it accepted a connection")

    def tell(self, peer_id: str, entry: Mapping[str, Any]) -> None:
        """Tell the gate of a new member."""
        self.channel.send(Frame.MEMBER, 0, json.dumps([peer_id, entry]).encode())

    async def gone(self) -> None:
        """Wait until the gate has ended, or says nothing any more."""
        num_silences = 0
        while num_silences < SILENCES_MAX and not self.over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self.over.wait()
            num_silences = 0 if self._was_heard else num_silences + 1
            self._was_heard = False

    async def end(self, seconds: float) -> str:
        """Wait for the process's end, at most this long. Return how it ended, in words."""
        return ending(None if self._process is None else await self._process.ended(seconds))

    def kill(self) -> None:
        """End the process and all calls of its connections."""
        self.channel.close()
        self._work.cancel()
        if self._process is not None:
            self._process.kill()

    def _lost(self) -> None:
        self.over.set()
        self._is_ready.set()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _hear(self, kind: Frame, number: int, body: bytes) -> None:
        self._was_heard = True
        if kind is Frame.CALL:
            window = Window()
            task = self._work.spawn(self._answer(number, window, body))
            self._calls[number] = task, window
            task.add_done_callback(lambda _: self._calls.pop(number))
        elif kind is Frame.READY:
            self._is_ready.set()
        elif call := self._calls.get(number):  # else it has ended meanwhile
            task, window = call
            task.cancel() if kind is Frame.CANCEL else window.taken()

    async def _answer(self, number: int, window: Window, body: bytes) -> None:
        """Consumes: one call. Produces: its answer, or the items of its stream. Waits for: its handler, the caller's
        budget, and room in its stream.
        """
        index, name, host, data = unpack_call(body)
        method, budgets = METHODS[METHOD_NAMES[index]], self._gates.budgets
        peer, parties = self._gates.caller(name, host)
        try:
            budgets.called(parties)
            with budgets.under_way(name):
                request = data if method.raw else parse(method.request, data)
                handled = self._gates.handlers[method.name](peer, request)
                if method.streaming:
                    await self._stream(method, handled, parties, number, window)
                    self.channel.send(Frame.END, number)
                else:
                    reply = await handled
                    await budgets.sending(parties, num_bytes(reply))
                    self.channel.send(Frame.ANSWER, number, packed(reply))
        except Exception as error:
            if not isinstance(error, PeerError | OverBudget):
                log.error("%s failed", method.name, exc_info=error)
                self._gates.on_error(error)
            self.channel.send(Frame.REFUSED, number, pack_refusal(error))

    async def _stream(
        self, method: Method, handled: Any, parties: tuple[Party, ...], number: int, window: Window
    ) -> None:
        async with aclosing(handled) as items:
            async for item in items:
                if not method.is_paced:
                    await self._gates.budgets.sending(parties, num_bytes(item))
                data = packed(item)
                await window.room_for(len(data))
                self.channel.send(Frame.ANSWER, number, data)
