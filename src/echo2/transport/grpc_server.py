"""The server side of gRPC: at the head, and at a worker that serves chunks to others.

Every method is served as one with a stream of requests, even if it takes a single request: gRPC calls such a handler as
soon as the header of a call arrives. So the caller's identity, role, revocation and budget are checked before a byte of
the body is read; an unread body stays with the caller.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio

from echo2.core.addresses import LOOPBACK, join
from echo2.core.background import to_its_end
from echo2.core.errors import PeerError, UserError
from echo2.transport import grpc_options, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import (
    BUSY,
    METHODS,
    Handler,
    Handlers,
    Method,
    Peer,
    check_role,
    num_bytes,
    packed,
    parse,
    weigh,
)
from echo2.transport.budgets import Budgets, OverBudget, Party, worst
from echo2.transport.door import Connection, Door
from echo2.transport.identity import Enrolment, RunIdentity
from echo2.transport.tickets import Credentials

log = logging.getLogger(__name__)

SERVICE = "echo2.Head"
#: Characters of a refusal. It travels as a header, percent-encoded, and headers end at 8 KiB.
DETAIL_CHARS_MAX = 500
#: Time for calls under way to end by themselves when the server stops.
GRACE_SECONDS = 0.5

OnError = Callable[[BaseException], None]


class PeerServer:
    """Serves `handlers` on one port to members of the run. `on_error` receives exceptions of handlers that are not
    refusals; `advice` says in the error what to do if the port is not available."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        handlers: Handlers,
        check_not_revoked: Callable[[str], None],
        on_error: OnError | None = None,
        advice: str = "Choose another address or port for --listen (port 0 takes any free one).",
        message_bytes_max: int = limits.PEER_MESSAGE_BYTES_MAX,
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._where, self._credentials, self._advice = join(host, port), credentials, advice
        self._check_not_revoked, self._on_error = check_not_revoked, on_error
        self._handlers: dict[str, Handler] = dict(handlers)
        self._budgets, self._door = Budgets(), Door(host, port, listeners)
        self._server = grpc.aio.server(options=grpc_options.server(message_bytes_max, self._door.connections_max))
        rpcs = {name: self._rpc(method) for name, method in METHODS.items() if name in self._handlers}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rpcs),))

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            UserError: the address or port is not available.
        """
        own = self._credentials
        pair = [(own.key_pem, own.certificate_pem)]
        credentials = grpc.ssl_server_credentials(pair, root_certificates=own.ca_pem, require_client_auth=True)
        inner = self._server.add_secure_port(f"{LOOPBACK}:0", credentials)
        await self._server.start()
        try:
            return await self._door.open(inner)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            await self._server.stop(None)
            raise UserError(
                f"Cannot listen on {self._where}: the port is in use or the address is not this machine's "
                f"({error}). {self._advice}"
            ) from error

    async def stop(self) -> None:
        """Accept no more connections; calls under way have `GRACE_SECONDS` to end. Also if this is cancelled."""
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        self._door.shut()
        try:
            await self._server.stop(grace=GRACE_SECONDS)
        finally:
            await self._door.close()

    def _parties(self, peer: Peer) -> tuple[Party, ...]:
        """The parties whose budgets a call of this peer counts against; its own first."""
        rate, burst = limits.PEER_CALLS_PER_SECOND_MAX, limits.PEER_CALLS_BURST
        own = Party(
            peer.peer_id,
            rate,
            burst,
            unread=limits.PEER_UNREAD_PER_PEER_MAX,
            connections=limits.CONNECTIONS_PER_PEER_MAX,
            sent_per_second=limits.SENT_PER_SECOND_MAX,
            sent_burst=limits.SENT_BURST,
        )
        return own, self._strangers("all workers", limits.PEER_UNREAD_MAX)

    def _strangers(self, name: str, unread: float) -> Party:
        """The party of all whom the owner of this server need not trust: what they share is memory and connections."""
        num_connections = max(1, int(limits.STRANGERS_SHARE * self._door.connections_max))
        return Party(name, unread=unread, connections=num_connections)

    # ---- one call ----------------------------------------------------------------------------------------------------

    def _rpc(self, method: Method) -> grpc.RpcMethodHandler:
        handler = self._handlers[method.name]

        async def answer(_: Any, context: Any) -> Any:
            try:
                async with self._admitted(method, context) as (peer, request, parties):
                    reply = await handler(peer, request)
                    await self._budgets.sending(parties, num_bytes(reply))
                    return reply
            except Exception as error:
                await self._abort(method, context, error)

        # A coroutine that writes, not a generator: gRPC cancels it when the caller is gone, which closes the handler.
        async def answer_stream(_: Any, context: Any) -> None:
            try:
                async with (
                    self._admitted(method, context) as (peer, request, parties),
                    aclosing(handler(peer, request)) as replies,
                ):
                    async for reply in replies:
                        if not method.is_paced:
                            await self._budgets.sending(parties, num_bytes(reply))
                        self._check_not_revoked(peer.peer_id)
                        if not await _written(context, packed(reply)):
                            return
            except Exception as error:
                await self._abort(method, context, error)

        make = grpc.stream_stream_rpc_method_handler if method.streaming else grpc.stream_unary_rpc_method_handler
        return make(
            answer_stream if method.streaming else answer,
            request_deserializer=None,  # `parse` answers for malformed bytes
            response_serializer=None if method.streaming else packed,
        )

    @asynccontextmanager
    async def _admitted(self, method: Method, context: Any) -> AsyncGenerator[tuple[Peer, Any, tuple[Party, ...]]]:
        """Yield the caller, its request and its parties. The body is read only after the caller's rights and budget are
        checked."""
        names = context.auth_context().get("x509_common_name", [])
        name = names[0].decode() if names else ""
        role, _, peer_id = name.partition(":")
        caller = self._door.caller(context.peer())
        if caller is None or caller.name not in ("", name):  # a late call of a connection that had the same port
            raise PeerError("forbidden", "call the port that the ticket names")
        peer = Peer(peer_id, role, caller.host)
        parties = caller.parties if caller.name else self._parties(peer)
        self._count(name, caller, parties)
        check_role(method, peer)
        try:
            self._check_not_revoked(peer_id)
        except PeerError:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, caller.drop, "was revoked")
            raise
        with self._budgets.under_way(name):
            if method.in_header:
                yield peer, self._message(method, _header(context)), parties
                return
            data = await self._body(method, context, parties)
            weight = len(data)
            try:
                if parties and not method.raw:  # what the message takes once parsed counts like bytes that came
                    weight = weigh(method.request, data, _bytes_max(method))
                    self._budgets.has_read(parties, weight - len(data))
                    self._came(parties, weight - len(data))
                yield peer, self._message(method, data), parties
            finally:
                self._budgets.handled(parties, weight)

    def _count(self, name: str, caller: Connection, parties: tuple[Party, ...]) -> None:
        if not caller.name:
            caller.meter = lambda num_bytes: self._came(parties, num_bytes)
            self._door.named(caller, name, parties)
            for party in parties:
                if 0 < party.connections < self._door.num_connections(party):
                    newest = self._worst(party, self._door.num_connections)[-1]
                    newest.drop("had too many others")
                    if newest is caller:
                        raise OverBudget(f"{party.name} has more than {party.connections} connections")
        try:
            self._budgets.called(parties)
        except OverBudget as error:
            if error.is_flood:
                caller.drop("asked too much")
            raise

    def _worst(self, over: Party, measure: Callable[[Party], float]) -> list[Connection]:
        """The connections of the peer that has most of what a party has too much of, oldest first."""
        chains = [each.parties for each in self._door.connections(over)]
        return self._door.connections(worst(over, chains, measure))

    def _came(self, parties: tuple[Party, ...], num_bytes: int) -> None:
        """Count received bytes; if a party is over its limit, disconnect its peer with the most unread bytes."""
        over = self._budgets.count_unread(parties, num_bytes)
        if over is None:
            return
        for connection in self._worst(over, self._budgets.unread):
            parties = connection.parties
            connection.drop("sent much more than was read")
        self._budgets.count_unread(parties, -self._budgets.unread(parties[0]))

    async def _body(self, method: Method, context: Any, parties: tuple[Party, ...]) -> bytes:
        try:
            async with asyncio.timeout(limits.READ_SECONDS), self._budgets.reading(parties, method.is_large):
                data = await context.read()
        except TimeoutError as error:
            raise OverBudget(f"no request of {method.name} within {limits.READ_SECONDS:.0f} s") from error
        if not isinstance(data, bytes):
            raise PeerError("malformed", f"{method.name} without a request")
        self._budgets.has_read(parties, len(data))
        if parties and len(data) > _bytes_max(method):
            self._budgets.handled(parties, len(data))
            raise PeerError("oversized", f"{method.name} of {len(data)} bytes; the limit is {_bytes_max(method)}")
        return data

    def _message(self, method: Method, data: bytes) -> Any:
        """What the handler of a method gets."""
        return data if method.raw else parse(method.request, data)

    async def _abort(self, method: Method, context: Any, error: Exception) -> None:
        if isinstance(error, PeerError):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{error.reason}: {error.detail}"[:DETAIL_CHARS_MAX])
        if isinstance(error, OverBudget):  # not PERMISSION_DENIED: trying again, later, may help
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{BUSY}: {error}"[:DETAIL_CHARS_MAX])
        if isinstance(error, grpc.aio.AbortError | grpc.RpcError):
            raise error
        log.error("%s failed", method.name, exc_info=error)
        if self._on_error is not None:
            self._on_error(error)
        await context.abort(grpc.StatusCode.INTERNAL, f"the other end failed: {error}"[:DETAIL_CHARS_MAX])


class GrpcServer(PeerServer):
    """The head's server: it also enrols peers, and applies revocations at once."""

    def __init__(
        self,
        host: str,
        port: int,
        identity: RunIdentity,
        handlers: Handlers,
        on_error: OnError | None = None,
        advice: str = "Set head.listen to an address of this machine and another port (0 takes any free one).",
        listeners: Sequence[socket.socket] = (),
    ) -> None:
        self._identity = identity
        super().__init__(
            host,
            port,
            identity.credentials,
            {"Enrol": partial(enrol, identity), **handlers},
            identity.check_not_revoked,
            on_error,
            advice,
            limits.MESSAGE_BYTES_MAX,
            listeners,
        )

    def _parties(self, peer: Peer) -> tuple[Party, ...]:
        """See `PeerServer._parties`. The learner belongs to the owner and has no bounds. The owner's machines and
        strangers share no budget."""
        if peer.role == "learner":
            return ()
        if peer.role.startswith("join-"):
            rate, burst, unread = limits.ENROLMENTS_PER_SECOND, limits.ENROLMENTS_BURST, limits.UNREAD_UNNAMED_MAX
            joining = f"{peer.role}:{peer.peer_id}"
            return (Party(joining, rate, burst, unread=unread, connections=limits.CONNECTIONS_PER_PEER_MAX),)
        own = Party(
            peer.peer_id,
            limits.CALLS_PER_SECOND_MAX,
            limits.CALLS_BURST,
            limits.READS_PER_PEER_MAX,
            limits.BYTES_PER_SECOND_MAX,
            limits.BYTES_BURST,
            limits.UNREAD_PER_PEER_MAX,
            limits.CONNECTIONS_PER_PEER_MAX,
        )
        try:
            member = self._identity.member(peer.peer_id)
        except PeerError:  # a valid certificate of this run, but the list of members is older
            member = Enrolment("", is_own=False)
        if member.is_own:
            return own, Party("machines of the owner", unread=limits.UNREAD_MAX)
        own = replace(own, sent_per_second=limits.SENT_PER_SECOND_MAX, sent_burst=limits.SENT_BURST)
        ticket = Party(
            f"ticket {member.ticket_id}",
            limits.TICKET_CALLS_PER_SECOND_MAX,
            limits.TICKET_CALLS_BURST,
            limits.READS_PER_TICKET_MAX,
            unread=limits.UNREAD_PER_TICKET_MAX,
            sent_per_second=limits.TICKET_SENT_PER_SECOND_MAX,
            sent_burst=limits.TICKET_SENT_BURST,
        )
        return own, ticket, self._strangers("strangers", limits.UNREAD_MAX)


async def enrol(identity: RunIdentity, peer: Peer, request: wire.EnrolRequest) -> wire.EnrolReply:
    """Admit a caller whose ticket is valid. Raises PeerError: as `RunIdentity.enrol`, or "protocol"."""
    if request.protocol != limits.PROTOCOL_VERSION:
        detail = f"you speak protocol {request.protocol}, the head {limits.PROTOCOL_VERSION}: upgrade one of the two"
        raise PeerError("protocol", detail)
    peer_id, certificate = identity.enrol(peer.peer_id, peer.role.removeprefix("join-"), request.csr_der)
    return wire.EnrolReply(peer_id=peer_id, certificate_der=certificate)


def _bytes_max(method: Method) -> int:
    """The limit of a request to this method."""
    return limits.MESSAGE_BYTES_MAX if method.is_large else limits.PEER_MESSAGE_BYTES_MAX


def _header(context: Any) -> bytes:
    """The request in the header of a call; empty if the caller sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == grpc_options.REQUEST_HEADER and isinstance(value, bytes):
            return value
    return b""


async def _written(context: Any, data: bytes) -> bool:
    """Send one message of a stream. Return False if the caller is gone, which gRPC may report here before it cancels
    the stream: the caller died, and nothing failed here."""
    try:
        await context.write(data)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        return False
    return True
