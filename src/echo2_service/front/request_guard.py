"""Checks every request before its handler: first the key, with its scopes, expiry and rate, then the body, which is
bounded and must keep coming.

A caller's mistakes are answered with a status that the SDKs treat as final; after 408 and 429 they try again. Errors
name no path of this machine (`for_tenants`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from typing import TypeAlias

import msgspec
import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Send
from starlette.types import Scope as Asgi

from echo2.core.errors import PeerError, UserError
from echo2.views.assets import HEADERS
from echo2_service import limits
from echo2_service.front.database import UNREACHED, Database, keys

log = logging.getLogger(__name__)

#: train: models and checkpoints; sample: samplers and samples; owner: what the service knows of all tenants.
TENANT_SCOPES = ("train", "sample")
SCOPES = (*TENANT_SCOPES, "owner")
PREFIX = "tml-"  # required by the SDK
STATUS = {
    "unauthenticated": 401,
    "spent": 402,  # the SDKs pause and retry for an hour
    "scope": 403,
    "not_found": 404,
    "gone": 410,
    "too_large": 413,
    "oversized": 413,
    "rate": 429,
    "full": 503,
}
#: What looks like an absolute path. Addresses of the service and of checkpoints stay; other URLs, such as a database's,
#: and quoted paths go as a whole.
_PATH = re.compile(
    r"(?P<kept>(?:tinker|logits|https?)://\S*|(?<![\w.])/api/v1(?:/\S*)?)"
    r"|(?<![\w+.-])[A-Za-z][\w+.-]*:/{2,}\S*"
    r"|(?P<quote>['\"`])~?/[^'\"`]*(?:(?P=quote)|\Z)"
    r"|(?<![\w/.~-])~?/(?:[^\s'\"`,;:()\[\]{}<>|]|:(?=[\w.-]))+"
)
ERROR_CHARS_MAX = 2000
#: Carries a page's half of its key.
PAGE_HEADER = "x-echo2-page"
NO_KEY = "no API key was sent; send it as X-API-Key."


class Traffic:
    """Bytes and requests under way, by tenant: bodies from their first byte, answers until they are sent. `num_bytes`:
    of all tenants. For one event loop.
    """

    def __init__(self) -> None:
        self._bytes, self._requests = Counter[str](), Counter[str]()
        self.num_bytes = 0

    def begin(self, tenant: str) -> Passage:
        """Begin a request.

        Raises:
            PeerError: "rate", the tenant has too many requests under way.
        """
        if self._requests[tenant] >= limits.AT_ONCE_MAX:
            raise PeerError("rate", f"{limits.AT_ONCE_MAX} of your requests are under way; wait for some of them.")
        self._requests[tenant] += 1
        return Passage(tenant, self._take, self._end)

    def _take(self, tenant: str, num_bytes: int) -> None:
        tenant_bytes, everyone = self._bytes[tenant] + num_bytes, self.num_bytes + num_bytes
        room = limits.ALL_BYTES_MAX - (limits.RESERVED_BYTES if tenant_bytes > limits.FEW_BYTES else 0)
        if tenant_bytes > limits.TENANT_BYTES_MAX:
            raise PeerError(
                "rate", f"{tenant_bytes} bytes of your requests are under way; wait until some are answered."
            )
        if everyone > room:
            raise PeerError("rate", "too much is under way; try again.")
        self._bytes[tenant], self.num_bytes = tenant_bytes, everyone

    def _end(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        for counter, count in ((self._bytes, num_bytes), (self._requests, 1)):
            counter[tenant] -= count
            if not counter[tenant]:
                del counter[tenant]


class Passage:
    """One request of a tenant, from `Traffic.begin` to `end`."""

    def __init__(self, tenant: str, take: Callable[[str, int], None], end: Callable[[str, int], None]) -> None:
        self._tenant, self._take, self._end = tenant, take, end
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes of the request until its end.

        Raises:
            PeerError: "rate", too many bytes are under way.
        """
        self._take(self._tenant, num_bytes)
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Forget the request."""
        self._end(self._tenant, self._num_bytes)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    tenant: str
    key: str
    scopes: frozenset[str]


class ApiKeys:
    """Authenticates callers by their keys and limits their rate."""

    def __init__(
        self, database: Database, clock: Callable[[], float], ticks: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: seconds since 1970, when keys expire; `ticks`: seconds that never step, for their rates."""
        self._database, self._clock, self._ticks = database, clock, ticks
        self._budgets: dict[str, tuple[float, float]] = {}

    def add_key(
        self, tenant: str, scopes: Sequence[str] = TENANT_SCOPES, days: float | None = None, per_minute: int = 100_000
    ) -> str:
        """Create a key and return its text. Only a digest is stored, so the text cannot be retrieved later.

        Raises:
            UserError: there is no such scope.
        """
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown:
            raise UserError(f"There is no scope {unknown[0]!r}; there are {', '.join(SCOPES)}.")
        text, now = PREFIX + secrets.token_urlsafe(32), self._clock()
        self._database.insert(
            keys,
            id="key_" + secrets.token_hex(6),
            digest=_digest(text),
            tenant=tenant,
            scopes=list(scopes),
            per_minute=per_minute,
            created=now,
            expires=None if days is None else now + days * 86400.0,
        )
        return text

    def revoke(self, key_id: str) -> None:
        """Refuse this key from now on.

        Raises:
            UserError: there is no such key.
        """
        if not self._database.update(keys, {"id": key_id}, revoked=self._clock()):
            raise UserError(f"There is no key {key_id!r}.")

    def admit(self, text: str) -> Caller:
        """Return the caller with this key.

        Raises:
            PeerError: `unauthenticated`, or `rate` if the key's rate is exceeded.
        """
        row = self._database.find(keys, digest=_digest(text)) if text else None
        now = self._clock()
        if row is None:
            raise PeerError("unauthenticated", "the API key is not known; send it as X-API-Key." if text else NO_KEY)
        if row.revoked is not None or (row.expires is not None and row.expires <= now):
            raise PeerError("unauthenticated", f"the API key {row.id} is {'revoked' if row.revoked else 'expired'}.")
        ticks = self._ticks()
        calls, since = self._budgets.get(row.id, (float(row.per_minute), ticks))
        calls = min(float(row.per_minute), calls + (ticks - since) * row.per_minute / 60.0)
        self._budgets[row.id] = (max(0.0, calls - 1.0), ticks)
        if calls < 1.0:
            raise PeerError("rate", f"the API key {row.id} may make {row.per_minute} calls a minute.")
        return Caller(row.tenant, row.id, frozenset(row.scopes))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


Handler: TypeAlias = Callable[[Caller, Request, bytes], Awaitable[Response]]
WhenRefused: TypeAlias = Callable[[Caller, Request, bytes, PeerError | UserError], Awaitable[Response | None]]
ToBrowser: TypeAlias = Callable[[PeerError], Response]
Endpoint: TypeAlias = Callable[[Request], Awaitable["Response | Counted"]]


def answer(value: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Body:
    """What has come of a body. It is handed on without a copy, for which all tenants would wait."""

    def __init__(self) -> None:
        self._buffer = BytesIO()

    def __len__(self) -> int:
        return self._buffer.tell()

    def add(self, part: bytes) -> None:
        self._buffer.write(part)

    def set(self, content: bytes) -> None:
        """Put this in place of what has come."""
        self._buffer = BytesIO(content)
        self._buffer.seek(0, SEEK_END)

    @property
    def content(self) -> bytes:
        return self._buffer.getvalue()


class Counted:
    """A response whose bytes are under way until they are sent. It is sent piece by piece, because the server buffers
    a piece of any size at once.
    """

    def __init__(self, response: Response, passage: Passage) -> None:
        self._response, self._passage = response, passage

    async def __call__(self, scope: Asgi, receive: Receive, send: Send) -> None:

        async def paced(message: Message) -> None:
            body, size = message.get("body", b""), limits.PROGRESS_BYTES
            last = max(0, len(body) - 1) // size * size
            for begin in range(0, last, size):
                await send({"type": "http.response.body", "body": body[begin : begin + size], "more_body": True})
            await send({**message, "body": body[last:]} if "body" in message else message)

        try:
            await self._response(scope, receive, paced)
        finally:
            self._passage.end()


class RequestGuard:
    """Wraps handlers. `api_keys` authenticates the callers; `traffic`: what is under way."""

    def __init__(self, api_keys: ApiKeys) -> None:
        self.api_keys, self.traffic = api_keys, Traffic()

    def __call__(
        self,
        handler: Handler,
        scope: str = "",
        limit: str = "SMALL_BODY_BYTES_MAX",
        when_refused: WhenRefused | None = None,
        to_browser: ToBrowser | None = None,
    ) -> Endpoint:
        """Return the endpoint of a handler. `scope`: a scope that the key must have; empty: any key. `limit`: the name
        of the body's limit. `when_refused` gets the beginning of a refused body, and may return another answer.
        `to_browser`: the key may come from a page, for this changes nothing, and this is the answer if it is refused.
        """

        async def endpoint(request: Request) -> Response | Counted:
            try:
                caller = self._admitted(request, scope, to_browser is not None)
                passage = self.traffic.begin(caller.tenant)
            except PeerError as error:
                return refused(error) if to_browser is None else for_browsers(to_browser(error))
            except UNREACHED as error:
                return _later(error)
            try:
                response = await self._answered(handler, caller, request, passage, getattr(limits, limit), when_refused)
            except BaseException:
                passage.end()
                raise
            return Counted(response if to_browser is None else for_browsers(response), passage)

        return endpoint

    def _admitted(self, request: Request, scope: str, may_be_page: bool) -> Caller:
        bearer = request.headers.get("authorization", "")
        if bearer.startswith("Basic "):  # a browser's, for a proxy in front of the service
            bearer = ""
        text = request.headers.get("x-api-key") or bearer.removeprefix("Bearer ").strip()
        if may_be_page:
            text = text or joined(request.cookies.get(cookie_of(request), ""), request.headers.get(PAGE_HEADER, ""))
        caller = self.api_keys.admit(text)
        if scope and scope not in caller.scopes:
            raise PeerError("scope", f"the API key {caller.key} lacks the scope {scope!r}.")
        return caller

    async def _answered(
        self,
        handler: Handler,
        caller: Caller,
        request: Request,
        passage: Passage,
        max_bytes: int,
        when_refused: WhenRefused | None,
    ) -> Response:
        """Return the answer to a request, also to one that is refused, or whose refusal cannot be stored."""
        body = Body()
        try:
            try:
                response = await self._handle(handler, caller, request, passage, body, max_bytes)
                passage.take(len(response.body) if hasattr(response, "body") else 0)
            except (PeerError, UserError) as error:
                other = None if when_refused is None else await when_refused(caller, request, body.content, error)
                return refused(error) if other is None else other
        except (PeerError, UserError) as error:
            return refused(error)
        except UNREACHED as error:
            return _later(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return response

    async def _handle(
        self,
        handler: Handler,
        caller: Caller,
        request: Request,
        passage: Passage,
        body: Body,
        max_bytes: int,
    ) -> Response:
        """Read the request into `body`, and handle it."""
        await read_body(request, passage, body, max_bytes)
        if request.headers.get("content-encoding", "") == "zstd":
            text = await asyncio.to_thread(unpacked, body.content, max_bytes)
            passage.take(len(text))
            body.set(text)
        return await handler(caller, request, body.content)


def cookie_of(request: Request) -> str:
    """Return the name of the cookie with one half of the key of who has signed in. Browsers share cookies between
    ports: a program on another one may read and set it."""
    return f"echo2_key_{request.url.port or 80}"


def split(key: str) -> tuple[str, str]:
    """Return two halves of a key: its bytes under random ones, and these. Neither alone says anything of it."""
    pad = secrets.token_bytes(len(key.encode()))
    return bytes(one ^ other for one, other in zip(key.encode(), pad, strict=True)).hex(), pad.hex()


def joined(one: str, other: str) -> str:
    """Return the key of two halves; empty: they are not halves of a key."""
    try:
        pairs = zip(bytes.fromhex(one), bytes.fromhex(other), strict=True)
        return bytes(first ^ second for first, second in pairs).decode()
    except ValueError:
        return ""


def for_browsers(response: Response) -> Response:
    """Add the headers that restrict what a browser does, unless the response has others."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _later(error: Exception) -> Response:
    """Return the response while the store cannot be reached, or the disk is full. The SDKs try again."""
    log.warning("a request waits for the database: %s", error)
    return answer({"detail": "the service cannot store anything at the moment; try again."}, 503)


def refused(error: PeerError | UserError) -> Response:
    """Return the response that tells an error."""
    if isinstance(error, UserError):
        return answer({"detail": for_tenants(str(error))}, 400)
    response = answer({"detail": for_tenants(error.detail)}, STATUS.get(error.reason, 400))
    if error.reason == "rate":
        response.headers["Retry-After"] = "1"
    return response


def for_tenants(text: str) -> str:
    """Return the text of an error with "..." in place of absolute paths, cut to a bounded length. It may quote what a
    tenant wrote, at any length, and half of a character could not be sent."""
    shown = _PATH.sub(lambda match: match["kept"] or "...", text[:ERROR_CHARS_MAX])[:ERROR_CHARS_MAX]
    return shown.encode(errors="replace").decode()


async def read_body(request: Request, passage: Passage, body: Body, max_bytes: int) -> None:
    """Read the body; of one that is announced as too large, only the beginning.

    Raises:
        PeerError: "too_large"; "slow", it does not keep coming; "rate", too many bytes are under way.
    """
    announced, parts = request.headers.get("content-length", "0"), request.stream()
    is_too_large = not announced.isdecimal() or int(announced) > max_bytes
    while True:
        before = len(body)
        try:
            async with asyncio.timeout(limits.PROGRESS_SECONDS):
                while len(body) < before + limits.PROGRESS_BYTES:
                    part = await anext(parts, None)
                    if part is None:
                        return
                    passage.take(len(part))
                    body.add(part)
                    if is_too_large:
                        raise PeerError(
                            "too_large", f"the body is announced with {announced[:20]} bytes; {max_bytes} are taken."
                        )
                    if len(body) > max_bytes:
                        raise PeerError("too_large", f"the body is longer than {max_bytes} bytes.")
        except TimeoutError as error:
            raise PeerError(
                "slow",
                f"the body came too slowly: {len(body) - before} bytes in {limits.PROGRESS_SECONDS:g} seconds, where "
                f"{limits.PROGRESS_BYTES} are expected, or its end.",
            ) from error


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
