"""Checks every request before its handler: first the key, then the body, whose size is bounded while it is read.

A caller's mistakes are answered with a status that the SDKs treat as final; after 408 and 429 they try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from echo2.errors import PeerError, UserError
from echo2.service.access import Caller, Doorkeeper

log = logging.getLogger(__name__)

#: Limits: bytes of a body, as received and unpacked; of all bodies being read or handled; seconds to receive a body.
BODY_BYTES_MAX = 32 << 20
SMALL_BODY_BYTES_MAX = 4 << 20
ALL_BODIES_BYTES_MAX = 512 << 20
BODY_SECONDS = 60.0

STATUS = {
    "unauthenticated": 401,
    "spent": 402,  # the SDKs pause and retry for an hour
    "scope": 403,
    "not_found": 404,
    "gone": 410,
    "too_large": 413,
    "rate": 429,
}

Handler: TypeAlias = Callable[[Caller, Request, bytes], Awaitable[Response]]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def answer(value: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Entrance:
    """Wraps handlers. `keeper` authenticates the callers."""

    def __init__(self, keeper: Doorkeeper) -> None:
        self._keeper = keeper
        self._num_bytes = 0

    def __call__(self, handler: Handler, scope: str = "", max_bytes: int = SMALL_BODY_BYTES_MAX) -> Endpoint:
        """Return the endpoint of a handler. `scope`: a scope that the key must have; empty: any key."""

        async def endpoint(request: Request) -> Response:
            try:
                return await self._handle(handler, request, scope, max_bytes)
            except PeerError as error:
                headers = {"Retry-After": "1"} if error.reason == "rate" else None
                response = answer({"detail": error.detail}, STATUS.get(error.reason, 400))
                response.headers.update(headers or {})
                return response
            except UserError as error:
                return answer({"detail": str(error)}, 400)
            except ClientDisconnect:
                return Response(status_code=400)

        return endpoint

    async def _handle(self, handler: Handler, request: Request, scope: str, max_bytes: int) -> Response:
        bearer = request.headers.get("authorization", "")
        text = request.headers.get("x-api-key") or bearer.removeprefix("Bearer ").strip()
        caller = self._keeper.admit(text)
        if scope and scope not in caller.scopes:
            raise PeerError("scope", f"the API key {caller.key} lacks the scope {scope!r}.")
        with self._taking() as take:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = b"".join([take(part) async for part in _bounded(request, max_bytes)])
            except TimeoutError as error:
                raise PeerError("slow", f"the body took longer than {BODY_SECONDS:g} seconds.") from error
            if request.headers.get("content-encoding", "") == "zstd":
                body = take(unpacked(body, max_bytes))
            return await handler(caller, request, body)

    @contextmanager
    def _taking(self) -> Iterator[Callable[[bytes], bytes]]:
        """Yield a function that counts the bytes of one request, both as received and unpacked, until it is answered.

        Raises:
            PeerError: "rate", all requests together have too many bytes.
        """
        taken = 0

        def take(data: bytes) -> bytes:
            nonlocal taken
            taken += len(data)
            self._num_bytes += len(data)
            if self._num_bytes > ALL_BODIES_BYTES_MAX:
                raise PeerError("rate", "too much is being read; try again.")
            return data

        try:
            yield take
        finally:
            self._num_bytes -= taken


async def _bounded(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > max_bytes:
        raise PeerError("too_large", f"the body is announced with {announced[:20]} bytes; {max_bytes} are taken.")
    count = 0
    async for part in request.stream():
        count += len(part)
        if count > max_bytes:
            raise PeerError("too_large", f"the body is longer than {max_bytes} bytes.")
        yield part


def unpacked(body: bytes, max_bytes: int) -> bytes:
    """Unpack a zstd body up to `max_bytes`, whatever size the body claims to have.

    Raises:
        PeerError: the body is not zstd, or unpacks to more.
    """
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            text = reader.read(max_bytes + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise PeerError("malformed", f"the body is not zstd: {error}") from error
    if len(text) > max_bytes:
        raise PeerError("too_large", f"the body unpacks to more than {max_bytes} bytes.")
    return text
