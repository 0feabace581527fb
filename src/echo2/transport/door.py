"""The public port: counts connections by address, and forwards bytes to the server behind it.

gRPC accepts connections until the process has no descriptors left. The door stands in front of it: it bounds the number
of connections, in all and of one address; it drops connections that send nothing, or anything but TLS; it limits the
rate of handshakes; and when descriptors run out it pauses and continues. It does not decrypt: the server authorizes
calls, knows callers by their certificates, and tells the door their names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import cast

from echo2.core.addresses import LOOPBACK, network
from echo2.core.background import spawn
from echo2.transport import grpc_options, limits
from echo2.transport.budgets import Buckets, Party
from echo2.transport.sockets import EXHAUSTED, connections_max, listen, notice_when_gone, plain

log = logging.getLogger(__name__)

#: Connections that are accepted in one go; others are served in between.
ACCEPTS_PER_TURN = 64
#: Time for a new caller to send its first bytes; then it has `grpc_options.HANDSHAKE_SECONDS` for its handshake.
FIRST_BYTES_SECONDS = 5.0
#: Time from the end of the handshake to the first call.
NAMELESS_SECONDS = 20.0
#: Time for data in flight to reach a caller after the server has closed one connection, or all of them.
CLOSE_SECONDS = 1.0
#: Pause after running out of descriptors, and between two log lines about refused connections.
PAUSE_SECONDS = 0.25
LOG_SECONDS = 30.0
#: Bytes read at a time, and bytes held for a slow reader.
READ_BYTES = 256 << 10
HELD_BYTES = 512 << 10
#: First byte of a TLS handshake.
TLS = 0x16


class Door:
    """Listens on `host` and `port`, see `open`; or on `listeners`, which other processes share."""

    def __init__(self, host: str, port: int, listeners: Sequence[socket.socket] = ()) -> None:
        self._host, self._port = host, port
        self.connections_max = connections_max()
        self.listeners, self._rests = list(listeners), False
        self._crowd = 0
        self._crowded: Callable[[], None] | None = None
        self._inner_port = 0
        self._open: dict[Connection, None] = {}  # oldest first, as below
        self._inside: dict[int, Connection] = {}
        self._unproven: set[Connection] = set()
        self._by_address: Counter[str] = Counter()
        self._unproven_by_address: Counter[str] = Counter()
        self._named: set[Connection] = set()
        self._by_party: defaultdict[str, dict[Connection, None]] = defaultdict(dict)
        self._handshakes = Buckets()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._telling: asyncio.TimerHandle | None = None
        self.buffer = memoryview(bytearray(READ_BYTES))  # shared by all connections: bytes are passed on at once

    async def open(self, inner_port: int) -> int:
        """Listen, and forward connections to `inner_port` on loopback; returns the public port.

        Raises:
            OSError: the address or port is not available.
        """
        self._inner_port = inner_port
        if not self.listeners:
            self.listeners = await listen(self._host, self._port)
        self.accept()
        return int(self.listeners[0].getsockname()[1])

    def accept(self) -> None:
        """Accept connections."""
        self._rests = False
        for listener in self.listeners:
            self._accept_again(listener)

    def rest(self) -> None:
        """Leave new connections to others that have the listening sockets, too. Those that are open stay."""
        self._rests = True
        for listener in self.listeners:
            asyncio.get_running_loop().remove_reader(listener)

    def on_crowd(self, count: int, crowded: Callable[[], None]) -> None:
        """Call `crowded` when so many connections are open, each time that there come to be so many."""
        self._crowd, self._crowded = count, crowded

    def caller(self, inner_peer: str) -> Connection | None:
        """The connection whose inner address at the server is, say, "ipv4:127.0.0.1:4700"; None: it is closed."""
        port = inner_peer.rpartition(":")[2]
        return self._inside.get(int(port)) if port.isdecimal() else None

    def shut(self) -> None:
        """Accept no more connections."""
        for listener in self.listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self.listeners = []

    async def close(self) -> None:
        """End all connections; data that the server has sent already may still go out."""
        self.shut()
        if self._telling is not None:
            self._telling.cancel()
            self._tell()
        ends = [connection.ended for connection in self._inside.values()]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_SECONDS)
        for connection in list(self._open):
            connection.cut()

    # ---- accepting ---------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self.refuse(error.strerror or "no descriptors", "anybody")
                    loop.remove_reader(listener)
                    loop.call_later(PAUSE_SECONDS, self._accept_again, listener)
                    return
                continue  # that caller has disconnected already
            host = plain(address[0])
            why = self._reason_against(network(host))
            if why:
                self.refuse(why, host)
                sock.close()
                continue
            sock.setblocking(False)
            # asyncio does that only where a socket names its protocol, and accepted ones don't. With Nagle's algorithm
            # the end of a chunk waits a round trip and goes out alone; BBR takes it for all that the path carries.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_when_gone(sock)
            Connection(self, host).start(sock)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self.listeners and not self._rests:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _reason_against(self, network: str) -> str:
        half, unnamed = max(1, self.connections_max // 2), max(1, int(limits.UNNAMED_SHARE * self.connections_max))
        few = max(1, unnamed // 2)
        if not self._may_begin(network, amount=0.0):
            return "began too many handshakes"
        if len(self._open) >= self.connections_max:
            return f"{self.connections_max} connections are open"
        if len(self._open) - len(self._named) >= unnamed:  # the others are for members that have made a call
            return f"{unnamed} connections have not asked anything"
        if len(self._unproven) >= min(limits.UNPROVEN_MAX, half):
            return f"{len(self._unproven)} connections have not proven who they are"
        if self._by_address[network] >= min(limits.CONNECTIONS_PER_ADDRESS_MAX, half):
            return f"{self._by_address[network]} connections of one address are open"
        if self._unproven_by_address[network] >= min(limits.UNPROVEN_PER_ADDRESS_MAX, few):
            return f"{self._unproven_by_address[network]} connections of one address have not proven who they are"
        return ""

    def refuse(self, why: str, host: str) -> None:
        """Count a refusal; one log line every `LOG_SECONDS` sums them up."""
        if len(self._refused) >= limits.BUCKETS_MAX:
            why, host = "and others", "others"
        self._refused[why, host] += 1
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(LOG_SECONDS, self._tell)

    def _tell(self) -> None:
        self._telling = None
        most = [f"{count} of {host} ({why})" for (why, host), count in self._refused.most_common(3)]
        log.warning("refused %d connections: %s", self._refused.total(), ", ".join(most))
        self._refused.clear()

    # ---- told by connections -----------------------------------------------------------------------------------------

    def accepted(self, connection: Connection) -> None:
        """Count a connection that was just accepted; its name is not known yet."""
        self._open[connection] = None
        if len(self._open) == self._crowd and self._crowded is not None:
            self._crowded()
        self._unproven.add(connection)
        self._by_address[connection.network] += 1
        self._unproven_by_address[connection.network] += 1

    def may_begin(self, connection: Connection) -> bool:
        """Whether the handshake rates, of this address and in all, allow one more; it is counted."""
        return self._may_begin(connection.network, amount=1.0)

    def _may_begin(self, network: str, amount: float) -> bool:
        now = asyncio.get_running_loop().time()
        rate, burst = limits.HANDSHAKES_PER_SECOND_PER_ADDRESS, limits.HANDSHAKES_BURST_PER_ADDRESS
        if self._handshakes.take(network, rate, burst, now, amount) < 1.0 - amount:
            return False
        rate, burst = limits.HANDSHAKES_PER_SECOND, limits.HANDSHAKES_BURST
        return self._handshakes.take("", rate, burst, now, amount) >= 1.0 - amount

    async def forward(self, connection: Connection) -> int:
        """Connect a connection to the server; returns its port as the server sees it.

        Raises:
            OSError: the server does not answer, or no descriptors are left.
        """
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: connection.inner, LOOPBACK, self._inner_port)
        return int(transport.get_extra_info("sockname")[1])

    def entered(self, connection: Connection, inner_port: int) -> None:
        """Record the port of this connection as the server sees it."""
        self._inside[inner_port] = connection

    def proven(self, connection: Connection) -> None:
        """Record that this connection has completed its handshake."""
        if connection in self._unproven:
            self._unproven.discard(connection)
            _count_down(self._unproven_by_address, connection.network)

    def connections(self, party: Party | None = None) -> list[Connection]:
        """Return the open connections, oldest first: all, or those of a party, which have made a call."""
        return list(self._open if party is None else self._by_party.get(party.name, ()))

    def num_connections(self, party: Party) -> int:
        """Return how many connections a party has."""
        return len(self._by_party.get(party.name, ()))

    def named(self, connection: Connection, name: str, parties: tuple[Party, ...]) -> None:
        """Record that this caller has proven to be `name`, of these parties."""
        self.proven(connection)
        connection.name, connection.parties = name, parties
        self._named.add(connection)
        for party in parties:
            self._by_party[party.name][connection] = None

    def uncounted(self, connection: Connection) -> None:
        """Stop to count a connection that is being closed."""
        self._named.discard(connection)
        for party in connection.parties:
            self._by_party[party.name].pop(connection, None)
            if not self._by_party[party.name]:
                del self._by_party[party.name]

    def closed(self, connection: Connection, inner_port: int) -> None:
        """Forget a connection that has ended."""
        self.proven(connection)
        self.uncounted(connection)
        self._open.pop(connection, None)
        _count_down(self._by_address, connection.network)
        if self._inside.get(inner_port) is connection:
            del self._inside[inner_port]


class Connection:
    """One caller's connection. `host`: its address. `name`, `parties`: its proven name and the parties whose budgets it
    shares, both known from its first call on. `meter`: called with the number of bytes that arrive."""

    def __init__(self, door: Door, host: str) -> None:
        self.door, self.host, self.network, self.name = door, host, network(host), ""
        self.outer, self.inner = _End(self), _End(self)
        self.meter: Callable[[int], None] = self._meter_unnamed
        self.parties: tuple[Party, ...] = ()
        self._num_unnamed_bytes = 0
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._inner_port, self._has_begun = 0, False
        self._timer = loop.call_later(FIRST_BYTES_SECONDS, self.drop, "said nothing")
        door.accepted(self)

    def start(self, sock: socket.socket) -> None:
        """Begin to read what this caller sends."""
        self._task = spawn(self._take(sock), self._broke)

    async def _take(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self.outer, sock)
        except OSError as error:
            sock.close()
            self.drop(f"could not be taken: {error.strerror}")
            self._end()

    def received(self, end: _End, data: memoryview) -> None:
        """Pass on bytes that arrived at one end to the other."""
        far = self.inner if end is self.outer else self.outer
        if far is self.inner:
            self.meter(len(data))
        if far.transport is not None:
            far.transport.write(data)
            if far.transport.get_write_buffer_size():  # the transport may hold a view of the buffer
                self.door.buffer = memoryview(bytearray(READ_BYTES))
        elif not self._has_begun:
            self._has_begun = True
            self._begin(bytes(data))

    def _meter_unnamed(self, num_bytes: int) -> None:
        self._num_unnamed_bytes += num_bytes
        if self._num_unnamed_bytes > limits.UNREAD_UNNAMED_MAX:
            self.drop("sent too much before it asked anything")

    def _begin(self, data: bytes) -> None:
        """Handle the first bytes: only the beginning of a TLS handshake is forwarded."""
        assert self.outer.transport is not None
        self._timer.cancel()
        if data[0] != TLS:
            self.drop("did not speak TLS")
        elif not self.door.may_begin(self):
            self.drop("began too many handshakes")
        else:
            self.outer.transport.pause_reading()
            self._task = spawn(self._forward(data), self._broke)

    async def _forward(self, data: bytes) -> None:
        try:
            inner_port = await self.door.forward(self)
        except OSError as error:
            self.drop(f"could not be taken: {error.strerror}")
            return
        assert self.outer.transport is not None
        assert self.inner.transport is not None
        if self.outer.transport.is_closing():
            self.inner.transport.abort()
            return
        self._inner_port = inner_port
        self.door.entered(self, inner_port)
        self.inner.transport.write(data)
        self.outer.transport.resume_reading()
        # Longer than the server waits for a handshake: a connection still open then belongs to a member of this run.
        self._timer = asyncio.get_running_loop().call_later(grpc_options.HANDSHAKE_SECONDS + 1.0, self._proven)

    def _proven(self) -> None:
        """Record a completed handshake. The peer's name is not known yet, and its certificate may be revoked."""
        self.door.proven(self)
        if not self.name:
            self._timer = asyncio.get_running_loop().call_later(NAMELESS_SECONDS, self._drop_nameless)

    def _drop_nameless(self) -> None:
        if not self.name:
            self.drop("asked for nothing")

    def hold(self, end: _End, is_full: bool) -> None:
        """Pause reading from the far end while this end's write buffer is full; resume when it has drained."""
        far = self.inner if end is self.outer else self.outer
        if far.transport is not None:
            far.transport.pause_reading() if is_full else far.transport.resume_reading()

    def _broke(self, error: Exception) -> None:
        """Give the connection up: its caller hears that at once, and the counts are right."""
        log.error("a connection could not be taken", exc_info=error)
        self.drop("could not be taken")
        self._end()

    def drop(self, why: str) -> None:
        """Abort both ends, and count the reason for the log."""
        self.door.refuse(why, self.host)
        self.cut()

    def cut(self) -> None:
        """Abort both ends."""
        self.door.uncounted(self)
        for end in (self.outer, self.inner):
            if end.transport is not None:
                end.transport.abort()

    def lost(self, end: _End) -> None:
        """One end has closed: close the other when its buffer is sent, or after `CLOSE_SECONDS`. (Neither TLS nor
        gRPC continues when one direction has ended.)"""
        self._timer.cancel()
        end.is_over = True
        far = self.inner if end is self.outer else self.outer
        if far.transport is None or far.is_over:
            self._end()
        else:
            far.transport.close()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, far.transport.abort)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
            self.door.closed(self, self._inner_port)


class _End(asyncio.BufferedProtocol):
    """One end of a connection: `outer` is the caller's, `inner` the server's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.transport: asyncio.Transport | None = None
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=HELD_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.door.buffer

    def buffer_updated(self, nbytes: int) -> None:
        door = self._connection.door
        self._connection.received(self, door.buffer[:nbytes])

    def pause_writing(self) -> None:
        self._connection.hold(self, True)

    def resume_writing(self) -> None:
        self._connection.hold(self, False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost(self)


def _count_down(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
