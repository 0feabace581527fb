"""The real backend: gRPC over TCP with mutual TLS. Workers and the learner dial out; the head listens on one port.

No generated stubs: `base.METHODS` is the service. A refusal travels as PERMISSION_DENIED with "<reason>: <detail>";
everything else that goes wrong on the way is LinkError at the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from echo2.errors import LinkError, PeerError, UserError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import METHODS, Handler, Handlers, Method, Peer, check_role, parse
from echo2.transport.identity import SERVER_NAME, Credentials, PeerIdentity, RunIdentity, Ticket

log = logging.getLogger(__name__)

_SERVICE = "echo2.Head"
#: A silent connection is probed after this long, and given up after as long again without an answer: a black hole (a
#: host that is gone without a word) is noticed within ten seconds. Below that, a host that is only overloaded would be
#: cut off.
KEEPALIVE_SECONDS = 5.0
#: How long joining keeps trying while the head is away.
JOIN_SECONDS = 60.0
JOIN_PAUSE_SECONDS = 0.5
CALL_SECONDS = 20.0
#: Characters of a refusal. It travels as a header, percent-encoded, and headers end at 8 KiB.
DETAIL_CHARS_MAX = 500

_COMMON: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # two heads on one port would share its callers at random
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", limits.CALLS_MAX),
]
_CLIENT: list[tuple[str, Any]] = [
    *_COMMON,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # what may be repeated is the caller's to know
]


class GrpcServer:
    """Serves `handlers` on one port. `on_error` is told what a handler raised that is nobody's refusal."""

    def __init__(
        self,
        host: str,
        port: int,
        identity: RunIdentity,
        handlers: Handlers,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._host, self._port, self._identity, self._on_error = host, port, identity, on_error
        self._handlers: dict[str, Handler] = {**handlers, "Enrol": self._enrol}
        self._server = grpc.aio.server(options=_SERVER)
        rpcs = {name: self._rpc(method) for name, method in METHODS.items() if name in self._handlers}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, rpcs),))

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            UserError: the address or port can't be had.
        """
        own = self._identity.credentials
        pair = [(own.key_pem, own.certificate_pem)]
        credentials = grpc.ssl_server_credentials(pair, root_certificates=own.ca_pem, require_client_auth=True)
        try:
            port = self._server.add_secure_port(f"{self._host}:{self._port}", credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise UserError(
                f"Cannot listen on {self._host}:{self._port}: the port is in use or the address is not this machine's. "
                "Set head.port to another port (0 takes any free one) or head.host to an address of this machine."
            )
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        await self._server.stop(grace=0.5)

    async def _enrol(self, peer: Peer, request: wire.EnrolRequest) -> wire.EnrolReply:
        if request.protocol != limits.PROTOCOL_VERSION:
            detail = (
                f"you speak protocol {request.protocol}, the head {limits.PROTOCOL_VERSION}: upgrade one of the two"
            )
            raise PeerError("protocol", detail)
        peer_id, certificate = self._identity.enrol(peer.peer_id, peer.role.removeprefix("join-"), request.csr_der)
        return wire.EnrolReply(peer_id=peer_id, certificate_der=certificate)

    def _rpc(self, method: Method) -> grpc.RpcMethodHandler:
        handler = self._handlers[method.name]

        async def answer(data: bytes, context: Any) -> Any:
            try:
                peer = self._peer(method, context)
                return await handler(peer, parse(method.request, data))
            except Exception as error:
                await self._abort(method, context, error)

        # A coroutine that writes, not a generator: when the caller goes, gRPC cancels it, and it closes the handler.
        async def answer_stream(data: bytes, context: Any) -> None:
            try:
                peer = self._peer(method, context)
                async with aclosing(handler(peer, parse(method.request, data))) as replies:
                    async for reply in replies:
                        self._identity.check_not_revoked(peer.peer_id)
                        if not await _written(context, method.reply.SerializeToString(reply)):
                            return
            except Exception as error:
                await self._abort(method, context, error)

        make = grpc.unary_stream_rpc_method_handler if method.streaming else grpc.unary_unary_rpc_method_handler
        return make(
            answer_stream if method.streaming else answer,
            request_deserializer=None,  # `parse` answers for malformed bytes
            response_serializer=None if method.streaming else method.reply.SerializeToString,
        )

    def _peer(self, method: Method, context: Any) -> Peer:
        names = context.auth_context().get("x509_common_name", [])
        role, _, peer_id = names[0].decode().partition(":") if names else ("", "", "")
        peer = Peer(peer_id, role)
        check_role(method, peer)
        self._identity.check_not_revoked(peer_id)
        return peer

    async def _abort(self, method: Method, context: Any, error: Exception) -> None:
        if isinstance(error, PeerError):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{error.reason}: {error.detail}"[:DETAIL_CHARS_MAX])
        if isinstance(error, grpc.aio.AbortError | grpc.RpcError):
            raise error
        log.error("%s failed", method.name, exc_info=error)
        if self._on_error is not None:
            self._on_error(error)
        await context.abort(grpc.StatusCode.INTERNAL, f"the head failed: {error}"[:DETAIL_CHARS_MAX])


async def _written(context: Any, data: bytes) -> bool:
    """Send one message of a stream. False: the caller is gone, which gRPC may report here before it cancels the stream.
    That is a worker that died, not a failure of the head."""
    try:
        await context.write(data)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        return False
    return True


class GrpcLink:
    """One connection to a head; reconnects by itself between calls."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._is_closed = address, False
        tls = grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.certificate_pem)
        self._channel = grpc.aio.secure_channel(address, tls, options=_CLIENT)
        self._calls = {name: self._callable(method) for name, method in METHODS.items()}

    def _callable(self, method: Method) -> Any:
        make = self._channel.unary_stream if method.streaming else self._channel.unary_unary
        path = f"/{_SERVICE}/{method.name}"
        return make(path, request_serializer=method.request.SerializeToString, response_deserializer=None)

    async def call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        try:
            return parse(METHODS[method].reply, await self._calls[method](request, timeout=timeout_seconds))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise self._translated(method, error) from error
        except asyncio.CancelledError:
            self._raise_if_closed(method)
            raise

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        under_way = None
        try:
            under_way = self._calls[method](request)
            async for reply in under_way:
                yield parse(METHODS[method].reply, reply)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            raise self._translated(method, error) from error
        except asyncio.CancelledError:
            self._raise_if_closed(method)
            raise
        finally:
            if under_way is not None:
                under_way.cancel()

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close()

    def _raise_if_closed(self, method: str) -> None:
        """gRPC reports a call that `close` ended as cancelled, just as if the caller itself were."""
        task = asyncio.current_task()
        if self._is_closed and (task is None or not task.cancelling()):
            raise LinkError(f"{method}: the link was closed")

    def _translated(self, method: str, error: Exception) -> PeerError | LinkError:
        if not isinstance(error, grpc.aio.AioRpcError):  # UsageError
            return LinkError(f"{method}: the link is closed")
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.PERMISSION_DENIED:
            reason, _, detail = details.partition(": ")
            return PeerError(reason, detail)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PeerError("oversized", details)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return PeerError("unimplemented", f"{method}: {details[:500]}")
        return LinkError(f"{method} at {self._address}: {code.name.lower()}: {details[:500]}")


async def connect(
    ticket_text: str, state_directory: Path, patience_seconds: float = JOIN_SECONDS
) -> tuple[GrpcLink, str]:
    """Join the run that a ticket names: (link, own peer id). Enrols at the first time; key and certificate are kept
    below `state_directory`, so that a restarted process is the same peer.

    Raises:
        UserError: the ticket is no ticket, is expired or used up, or the state directory can't be written.
        LinkError: the head did not answer for `patience_seconds`.
    """
    ticket = Ticket.parse(ticket_text)
    identity = PeerIdentity(state_directory / f"{ticket.run_id}-{ticket.role}")
    known = identity.load()
    if known is None:
        joining = GrpcLink(ticket.address, ticket.credentials)
        try:
            request = wire.EnrolRequest(protocol=limits.PROTOCOL_VERSION, csr_der=identity.request())
            reply = await _patiently(joining, request, patience_seconds)
        finally:
            await joining.close()
        known = identity.keep(ticket.credentials.ca_pem, reply.certificate_der)
    peer_id, credentials = known
    return GrpcLink(ticket.address, credentials), peer_id


async def _patiently(link: GrpcLink, request: wire.EnrolRequest, patience_seconds: float) -> wire.EnrolReply:
    give_up_at = asyncio.get_running_loop().time() + patience_seconds
    while True:
        try:
            reply: wire.EnrolReply = await link.call("Enrol", request, CALL_SECONDS)
            return reply
        except PeerError as error:
            raise UserError(f"The head refuses this ticket: {error.detail}.") from error
        except LinkError as error:
            if asyncio.get_running_loop().time() > give_up_at:
                raise LinkError(
                    f"{error} (the head did not answer for {patience_seconds:.0f} s; is it running?)"
                ) from error
        await asyncio.sleep(JOIN_PAUSE_SECONDS)
