"""The serving end of gRPC: the head's, and that of a worker which other workers take chunks from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from echo2.errors import PeerError, UserError
from echo2.transport import grpc_options, limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import METHODS, Handler, Handlers, Method, Peer, check_role, packed, parse
from echo2.transport.identity import Credentials, RunIdentity

log = logging.getLogger(__name__)

SERVICE = "echo2.Head"
#: Characters of a refusal. It travels as a header, percent-encoded, and headers end at 8 KiB.
DETAIL_CHARS_MAX = 500
#: What is under way when the server stops may still end by itself.
GRACE_SECONDS = 0.5

OnError = Callable[[BaseException], None]


class PeerServer:
    """Serves `handlers` on one port to members of the run. `on_error` is told what a handler raised that is nobody's
    refusal; `advice` says what to do where the port can't be had."""

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
    ) -> None:
        self._host, self._port, self._credentials, self._advice = host, port, credentials, advice
        self._check_not_revoked, self._on_error = check_not_revoked, on_error
        self._handlers: dict[str, Handler] = dict(handlers)
        bound = ("grpc.max_receive_message_length", message_bytes_max)
        options = [option for option in grpc_options.SERVER if option[0] != bound[0]]
        self._server = grpc.aio.server(options=[*options, bound])
        rpcs = {name: self._rpc(method) for name, method in METHODS.items() if name in self._handlers}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rpcs),))

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            UserError: the address or port can't be had.
        """
        own = self._credentials
        pair = [(own.key_pem, own.certificate_pem)]
        credentials = grpc.ssl_server_credentials(pair, root_certificates=own.ca_pem, require_client_auth=True)
        try:
            port = self._server.add_secure_port(f"{self._host}:{self._port}", credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise UserError(
                f"Cannot listen on {self._host}:{self._port}: the port is in use or the address is not this machine's. "
                f"{self._advice}"
            )
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        await self._server.stop(grace=GRACE_SECONDS)

    def _rpc(self, method: Method) -> grpc.RpcMethodHandler:
        handler = self._handlers[method.name]

        async def answer(data: bytes, context: Any) -> Any:
            try:
                peer = self._peer(method, context)
                return await handler(peer, data if method.raw else parse(method.request, data))
            except Exception as error:
                await self._abort(method, context, error)

        # A coroutine that writes, not a generator: when the caller goes, gRPC cancels it, and it closes the handler.
        async def answer_stream(data: bytes, context: Any) -> None:
            try:
                peer = self._peer(method, context)
                async with aclosing(handler(peer, parse(method.request, data))) as replies:
                    async for reply in replies:
                        self._check_not_revoked(peer.peer_id)
                        if not await _written(context, packed(reply)):
                            return
            except Exception as error:
                await self._abort(method, context, error)

        make = grpc.unary_stream_rpc_method_handler if method.streaming else grpc.unary_unary_rpc_method_handler
        return make(
            answer_stream if method.streaming else answer,
            request_deserializer=None,  # `parse` answers for malformed bytes
            response_serializer=None if method.streaming else packed,
        )

    def _peer(self, method: Method, context: Any) -> Peer:
        names = context.auth_context().get("x509_common_name", [])
        role, _, peer_id = names[0].decode().partition(":") if names else ("", "", "")
        peer = Peer(peer_id, role, _host(context.peer()))
        check_role(method, peer)
        self._check_not_revoked(peer_id)
        return peer

    async def _abort(self, method: Method, context: Any, error: Exception) -> None:
        if isinstance(error, PeerError):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{error.reason}: {error.detail}"[:DETAIL_CHARS_MAX])
        if isinstance(error, grpc.aio.AbortError | grpc.RpcError):
            raise error
        log.error("%s failed", method.name, exc_info=error)
        if self._on_error is not None:
            self._on_error(error)
        await context.abort(grpc.StatusCode.INTERNAL, f"the other end failed: {error}"[:DETAIL_CHARS_MAX])


class GrpcServer(PeerServer):
    """The head's: it also enrols, and heeds revocations at once."""

    def __init__(
        self, host: str, port: int, identity: RunIdentity, handlers: Handlers, on_error: OnError | None = None
    ) -> None:
        self._identity = identity
        super().__init__(
            host,
            port,
            identity.credentials,
            {**handlers, "Enrol": self._enrol},
            identity.check_not_revoked,
            on_error,
            "Set head.port to another port (0 takes any free one) or head.host to an address of this machine.",
            limits.MESSAGE_BYTES_MAX,
        )

    async def _enrol(self, peer: Peer, request: wire.EnrolRequest) -> wire.EnrolReply:
        if request.protocol != limits.PROTOCOL_VERSION:
            detail = (
                f"you speak protocol {request.protocol}, the head {limits.PROTOCOL_VERSION}: upgrade one of the two"
            )
            raise PeerError("protocol", detail)
        peer_id, certificate = self._identity.enrol(peer.peer_id, peer.role.removeprefix("join-"), request.csr_der)
        return wire.EnrolReply(peer_id=peer_id, certificate_der=certificate)


def _host(peer: str) -> str:
    """The address in gRPC's name of a caller, like "ipv4:127.0.0.1:4700" or "ipv6:%5B::1%5D:4700"."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


async def _written(context: Any, data: bytes) -> bool:
    """Send one message of a stream. False: the caller is gone, which gRPC may report here before it cancels the stream.
    That is a caller that died, not a failure here."""
    try:
        await context.write(data)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        return False
    return True
