"""The client side of gRPC: a machine joins a run with its ticket, and tries again while the head is away.

The connections are TCP with mutual TLS. Workers and the learner connect to the head; workers that others can reach
listen, too (`grpc_server`).

No generated stubs: `base.METHODS` is the service. A refusal travels as PERMISSION_DENIED with "<reason>: <detail>" and
becomes PeerError at the caller; most other failures become LinkError.

A head may have several addresses, of which one has a head at a time. A link that cannot connect, or is told that this
head is not the one (`AWAY`), goes on to the next; callers try again as they do when a head restarts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from echo2.core.addresses import Addresses, split
from echo2.core.background import spawn, unforeseen
from echo2.core.errors import LinkError, PeerError, UserError
from echo2.core.retries import Retries
from echo2.core.types import Backoff
from echo2.transport import grpc_options, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import AWAY, BUSY, METHODS, Handlers, Link, Method, packed, parse
from echo2.transport.grpc_server import SERVICE, PeerServer
from echo2.transport.identity import SERVER_NAME, PeerIdentity, peer_name
from echo2.transport.tickets import Credentials, Ticket

log = logging.getLogger(__name__)

#: How long joining keeps trying while the head is away.
JOIN_SECONDS = 60.0
JOIN_PAUSE_SECONDS = Backoff(0.5, 5.0)
CALL_SECONDS = 20.0
#: Pauses before reconnecting. In a large fleet they are drawn from this share of the heartbeat, which says how large it
#: is, so that no more machines dial in a second than the door admits (`limits.HANDSHAKES_PER_SECOND`).
RECONNECT_SECONDS, RECONNECT_SHARE = Backoff(0.2, 5.0), 0.16
#: Up to this share of a pause is left out at random: all may have lost the head at once. In a large fleet any share.
SPREAD = 0.5

#: gRPC's texts of failures to connect: the system's own word for it, and a host name that has no address.
_NO_CONNECTION = re.compile(r"remote host: .*?([A-Z][a-z]+(?: [a-z]+)*)")
_NO_HOST = re.compile(r"hostname lookup|address lookup|DNS resolution")


class GrpcLink:
    """A `Link`: one connection to the head, or to the peer that proves `server_name`; reconnects between calls, and
    calls the current one of the `addresses`."""

    def __init__(self, addresses: str | Addresses, credentials: Credentials, server_name: str = SERVER_NAME) -> None:
        self._addresses = Addresses(addresses) if isinstance(addresses, str) else addresses
        self._server_name, self._is_closed = server_name, False
        self._tls = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.certificate_pem)
        self._dial()

    def _dial(self) -> None:
        self._address = self._addresses.current
        self._host = split(self._address)[0]
        options = grpc_options.client(self._server_name, self._host, is_head=self._server_name == SERVER_NAME)
        self._channel = grpc.aio.secure_channel(self._address, self._tls, options=options)
        self._calls = {name: self._callable(method) for name, method in METHODS.items()}

    def _follow(self) -> None:
        """Call the current address, if another link has found this one's wanting. Calls under way there end."""
        if self._address != self._addresses.current and not self._is_closed:
            before = self._channel
            self._dial()
            log.debug("calling the head at %s", self._address)
            spawn(before.close(), unforeseen(log, "closing a connection"))

    def _failed_at(self, address: str) -> None:
        self._addresses.after(address)
        self._follow()

    def _callable(self, method: Method) -> Any:
        make = self._channel.unary_stream if method.streaming else self._channel.unary_unary
        path = f"/{SERVICE}/{method.name}"
        return make(path, request_serializer=packed, response_deserializer=None)

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        self._follow()
        address, channel = self._address, self._channel
        try:
            spec, header = METHODS[method], None
            if spec.in_header:
                request, header = b"", ((grpc_options.REQUEST_HEADER, packed(request)),)
            reply = await self._calls[method](request, timeout=timeout_seconds, metadata=header)
            return parse(spec.reply, reply)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise self._translated(method, address, error) from error
        except asyncio.CancelledError:
            self._raise_if_closed(method, channel)
            raise

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        async with aclosing(self.frames(method, request)) as replies:
            async for reply in replies:
                yield parse(METHODS[method].reply, reply)

    async def frames(self, method: str, request: Any) -> AsyncGenerator[bytes, None]:
        self._follow()
        under_way, address, channel = None, self._address, self._channel
        try:
            under_way = self._calls[method](request)
            while (reply := await under_way.read()) is not grpc.aio.EOF:
                yield reply
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise self._translated(method, address, error) from error
        except asyncio.CancelledError:
            self._raise_if_closed(method, channel)
            raise
        finally:
            if under_way is not None:
                under_way.cancel()

    def open(self) -> None:
        self._follow()
        self._channel.get_state(try_to_connect=True)

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close()

    def _raise_if_closed(self, method: str, channel: grpc.aio.Channel) -> None:
        """Raises LinkError if `close` or `_follow` ended the call on this channel: gRPC reports that as if the caller
        had been cancelled. (By then the address may be the same again.)"""
        task = asyncio.current_task()
        if (self._is_closed or channel is not self._channel) and (task is None or not task.cancelling()):
            raise LinkError(f"{method}: the link was closed")

    def _translated(self, method: str, address: str, error: Exception) -> PeerError | LinkError:
        if not isinstance(error, grpc.aio.AioRpcError):  # UsageError
            return LinkError(f"{method}: the link is closed")
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.PERMISSION_DENIED:
            reason, _, detail = details.partition(": ")
            if reason != AWAY:
                return PeerError(reason, detail)
            self._failed_at(address)
            return LinkError(f"{address} is not the head now: {detail}")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PeerError("oversized", details)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return PeerError("unimplemented", f"{method}: {details[:500]}")
        if code == grpc.StatusCode.UNAVAILABLE:
            if not details.startswith(f"{BUSY}: "):
                self._failed_at(address)
            if _NO_HOST.search(details):
                return _unreached(address, "there is no such host")
            if match := _NO_CONNECTION.search(details):
                return _unreached(address, match[1])
            if "proxy" in details.lower():
                return _unreached(address, details[:500])
            if "CERTIFICATE_VERIFY_FAILED" in details:
                return LinkError(f"{address} answers, but its certificate is not valid for this run")
        return LinkError(f"{method} at {address}: {code.name.lower()}: {details[:500]}")


def _unreached(address: str, why: str) -> LinkError:
    note = grpc_options.note(split(address)[0])
    return LinkError(f"{address} does not answer: {why}" + (f". {note}" if note else ""))


@dataclass(frozen=True, slots=True)
class Membership:
    """The result of joining: the machine's peer id, the head's addresses and the machine's credentials."""

    peer_id: str
    head: Addresses
    credentials: Credentials

    def link(self) -> GrpcLink:
        """Return a connection to the head."""
        return GrpcLink(self.head, self.credentials)

    def network(self) -> GrpcNetwork:
        """Return a network that opens connections and serves peers with these credentials."""
        return GrpcNetwork(self.credentials, self.head)


class GrpcNetwork:
    """`base.Network` of one member. The head, too, dials workers with it (`to_peer`), to learn which are reachable."""

    def __init__(self, credentials: Credentials, head: str | Addresses = "") -> None:
        self._credentials, self._head = credentials, head
        self._server: PeerServer | None = None

    def to_head(self) -> GrpcLink:
        return GrpcLink(self._head, self._credentials)

    def to_peer(self, peer_id: str, address: str) -> GrpcLink:
        return GrpcLink(address, self._credentials, peer_name(peer_id))

    async def listen(self, host: str, port: int, handlers: Handlers, check_not_revoked: Callable[[str], None]) -> int:
        self._server = PeerServer(host, port, self._credentials, handlers, check_not_revoked)
        return await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()


async def connect(
    ticket_text: str, state_directory: Path, patience_seconds: float = JOIN_SECONDS
) -> tuple[GrpcLink, str]:
    """Join as `join` does; return (link to the head, own peer id)."""
    member = await join(ticket_text, state_directory, patience_seconds)
    return member.link(), member.peer_id


async def join(ticket_text: str, state_directory: Path, patience_seconds: float = JOIN_SECONDS) -> Membership:
    """Join the run that a ticket names. The first call enrols; key and certificate are kept below `state_directory`, so
    that a restarted process is the same peer.

    Raises:
        UserError: the ticket is invalid, expired or used up, or the state directory can't be written.
        LinkError: the head did not answer for `patience_seconds`.
    """
    ticket = Ticket.parse(ticket_text)
    identity = PeerIdentity(state_directory / f"{ticket.run_id}-{ticket.role}")
    known, head = identity.load(), Addresses(ticket.address)
    if known is None:
        joining = GrpcLink(head, ticket.credentials)
        try:
            request = wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION, csr_der=identity.request())
            reply = await _patiently(joining, request, patience_seconds)
        finally:
            await joining.close()
        known = identity.keep(ticket.credentials.ca_pem, reply.certificate_der)
    peer_id, credentials = known
    return Membership(peer_id, head, credentials)


async def _patiently(link: GrpcLink, request: wire.EnrolRequest, patience_seconds: float) -> wire.EnrolReply:
    retries = Retries(JOIN_PAUSE_SECONDS, patience_seconds, spread=0.5)  # a fleet may join at once
    while True:
        try:
            reply: wire.EnrolReply = await link.call("Enrol", request, CALL_SECONDS)
            return reply
        except PeerError as error:
            raise UserError(f"The head refuses this ticket: {error.detail}.") from error
        except LinkError as error:
            if retries.failed():
                raise LinkError(
                    f"The head did not answer for {patience_seconds:.0f} s: {error}. Is it running? "
                    "`echo2 doctor @TICKET` finds what is wrong on the way to it."
                ) from error
        await retries.pause()


def dial_pauses(heartbeat_seconds: float) -> tuple[Backoff, float]:
    """Return the pauses of a machine that has lost the head, and which share of each is left out at random."""
    seconds = RECONNECT_SHARE * heartbeat_seconds
    if seconds < 1.0:
        return RECONNECT_SECONDS, SPREAD
    return Backoff(seconds, max(RECONNECT_SECONDS.most_seconds, seconds)), 1.0


async def attended(
    link: Link,
    hello: Callable[[], wire.WorkerHello],
    patience_seconds: float,
    disconnected: Callable[[], None],
    is_leaving: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[wire.Order]:
    """Yield the head's orders, over as many streams as needed. `hello` returns the first message of each stream;
    `disconnected` is called when a stream has ended; no other stream follows if `is_leaving()` then.

    Raises:
        LinkError: the head was away for `patience_seconds`.
        PeerError: the head refused this machine.
        UserError: the run's owner revoked this machine.
    """
    retries, reason = Retries(RECONNECT_SECONDS, patience_seconds), ""
    while True:
        at_least_seconds = 0.0
        try:
            async for order in link.stream("Attend", hello()):
                if reason:
                    log.info("connected again")
                reason = ""
                retries.succeeded()
                if order.HasField("settings"):
                    pauses, spread = dial_pauses(order.settings.heartbeat_seconds)
                    retries = Retries(pauses, patience_seconds, spread)
                yield order
            reason = "the head ended the stream"
        except LinkError as error:
            reason = str(error)
        except PeerError as error:
            if error.reason == "revoked":
                raise UserError(
                    f"{error.detail} by the run's owner. Ask the owner for a new ticket, and use it with another "
                    "directory: --state DIR."
                ) from error
            if error.reason != "expelled":
                raise
            reason, at_least_seconds = str(error), RECONNECT_SECONDS.most_seconds
        if is_leaving():
            return
        if retries.failed():
            raise LinkError(
                f"No head for {patience_seconds:.0f} s: {reason}. "
                "`echo2 doctor @TICKET` finds what is wrong on the way to it."
            )
        log.info("not connected (%s); trying again, for %.0f s in all", reason, patience_seconds)
        disconnected()
        await retries.pause(at_least_seconds)
