"""An HTTP endpoint that the run needs and does not run: a judge, a teacher. A request fails in one of three ways:

    busy     429, or 503 with Retry-After: all requests wait as long as it says or longer, and nothing is counted
    down     401, 403, 404, 5xx, a web page, no connection, no answer in time: one small request after the other is
             made until one is answered, and all others wait. Then the request is made again, so many times in all:
             what fails so often beside an endpoint that answers is itself at fault
    unfit    400, or an answer that cannot be used: the same, without the wait

An answer is untrusted: its bytes are bounded, and what is quoted of it is printable and short.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2

from echo2.core import addresses
from echo2.core.errors import UserError
from echo2.core.printable import printable
from echo2.core.retries import Retries
from echo2.core.types import Backoff

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Characters of a refusal that messages quote.
SAID_CHARS = 200
#: A shorter key is not a secret, but a word, as "none" for an endpoint that needs one.
KEY_CHARS = 8
#: Tries of one request beside an endpoint that answers: of requests that fail in 15 % of tries, one in 90,000 is lost.
TRIES_MAX = 6
#: Between two tries of a request or of whether the endpoint is there, and after a 429 that does not say longer.
BACKOFF = Backoff(0.5, 30.0)
#: The longest time that a Retry-After is believed.
RETRY_AFTER_SECONDS_MAX = 3600.0
#: Statuses of answers that are about the request, not about the endpoint.
REFUSALS = (400, 413, 422)


class BusyEndpoint(Exception):
    """It wants no requests now. `args`: why, and at least how many seconds to wait."""


class DownEndpoint(Exception):
    """It does not answer, or only with errors that are not about the request. The message says how."""


class UnfitAnswer(Exception):
    """Its answer cannot be used. The message says why."""


class RefusedRequest(UnfitAnswer):
    """It refuses the request."""


class FailedTries(Exception):
    """A request failed `TRIES_MAX` times. `args`: how it failed last."""


def key_in(variable: str) -> str:
    """Return the key in an environment variable, without spaces around it; empty: there is none.

    Raises:
        UserError: no header can have it. The errors of requests would quote it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(
            f"The key in ${variable} has a line break inside, or a character that is not ASCII. Export the key alone."
        )
    return key


def retry_after(headers: Mapping[str, str]) -> float:
    """Return for how many seconds a server wants no requests: it says so, or names a moment of its own clock (RFC 9110,
    10.2.3). 0: it says nothing that can be read."""
    text = headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - parsedate_to_datetime(headers["date"])).total_seconds()
        except (KeyError, TypeError, ValueError):
            return 0.0
    return seconds if seconds > 0.0 else 0.0  # also of NaN


class Endpoint:
    """Makes requests to an endpoint, for one event loop, `max_concurrency` at once. `name` and `waiting`: the subjects
    of sentences, as in "the judge" and "scoring". `key`: empty, it has none; `about_key`: what a refused key needs.
    `seconds`: the limit of one request, which the setting or reason `limit` gives. `on_unanswered` is called with the
    body of a request that was sent, and whose answer never came or was not awaited: it may be billed.
    """

    def __init__(
        self,
        url: str,
        name: str,
        waiting: str,
        *,
        seconds: float,
        limit: str,
        key: str = "",
        about_key: str = "",
        max_concurrency: int = 16,
        backoff: Backoff = BACKOFF,
        on_unanswered: Callable[[bytes], None] = lambda body: None,
    ) -> None:
        self._on_unanswered = on_unanswered
        self._url, self._name, self._waiting = url.rstrip("/"), name, waiting
        self._seconds, self._limit, self._backoff = seconds, limit, backoff
        self._key, self._about_key = key, about_key
        # No compression: byte limits count real sizes.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs every request
        is_near = addresses.is_private(urlsplit(url).hostname or "")
        direct = httpx2.AsyncHTTPTransport() if is_near else None  # no proxy that the environment names leads there
        self._client = httpx2.AsyncClient(headers=headers, timeout=None, transport=direct)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._looking = asyncio.Lock()  # held while it is down
        self._down = self._busy = ""
        self._busy_until, self._num_busy = 0.0, 0
        self.num_answers = 0

    @property
    def trouble(self) -> str:
        """Why requests wait; empty: they do not."""
        where, seconds = f"{self._name} at {self._url}", self._busy_until - time.monotonic()
        if self._down:
            return f"{self._waiting} waits for {where}, which is asked until it answers: {self._down}"
        return f"{self._waiting} waits {seconds:.0f} s, as {where} wants: {self._busy}" if seconds > 0.0 else ""

    async def persist(self, make: Callable[[], Awaitable[T]], on_retry: Callable[[str], None]) -> T:
        """Return what `make` returns, which makes one request and may raise what requests and `UnfitAnswer` say. It is
        called again as long as that helps; `on_retry` is called each time.

        Raises:
            FailedTries: it does not.
        """
        pauses, problem, num_tries = Retries(self._backoff), "", 0
        while num_tries < TRIES_MAX:
            if problem:
                on_retry(problem)
                await pauses.pause()
                problem = ""
            async with self._slots:
                try:
                    return await make()
                except BusyEndpoint as error:
                    self._rest(*error.args)
                except (UnfitAnswer, DownEndpoint) as error:
                    problem = str(error)
                    num_tries += 1
        raise FailedTries(problem)

    async def request(
        self, path: str, body: bytes | None, bytes_max: int, look: Callable[[], Awaitable[object]]
    ) -> tuple[bytes, float]:
        """Make one request when the endpoint is there and wants it. Return its answer, cut off behind `bytes_max`, and
        the seconds that it took. `body`: None, it is a GET. `look`: makes a small request with `exchange`, to find out
        whether it is there.

        Raises: as `exchange`.
        """
        while (seconds := self._busy_until - time.monotonic()) > 0.0:  # noqa: ASYNC110  # it grows if others are refused
            await asyncio.sleep(seconds)
        async with self._looking:
            began, num_answers = time.monotonic(), self.num_answers
        try:
            return await self.exchange(path, body, bytes_max), time.monotonic() - began
        except DownEndpoint:
            await self._until_up(num_answers, look)
            raise

    async def exchange(self, path: str, body: bytes | None, bytes_max: int) -> bytes:
        """Make one request now, and return its answer, cut off behind `bytes_max`.

        Raises:
            BusyEndpoint, DownEndpoint: it is.
            RefusedRequest: it refuses this one.
        """
        sent = asyncio.Event()
        try:
            async with asyncio.timeout(self._seconds):
                status, headers, data = await self._exchange(path, body, bytes_max, sent)
            sent.clear()
        except TimeoutError as error:
            raise DownEndpoint(f"it gave no answer within {self._limit} = {self._seconds:g}") from error
        except httpx2.HTTPError as error:
            raise DownEndpoint(f"{type(error).__name__} {printable(str(error), SAID_CHARS)}".rstrip()) from error
        finally:
            if sent.is_set() and body is not None:
                self._on_unanswered(body)
        text = printable(data[: 4 * SAID_CHARS].decode(errors="replace"), SAID_CHARS)
        if 200 <= status < 300:
            if headers.get("content-type", "").startswith("text/html"):  # of a proxy, or at another address
                raise DownEndpoint(f"it answers with a web page: {text}")
            self.num_answers, self._num_busy = self.num_answers + 1, 0
            return data
        words = f"it answers {status}: {text}"
        if status in (401, 403):
            words += f"; {self._about_key}: stop the run, set it, and continue with --resume"
        if status == 429 or (status == 503 and headers.get("retry-after")):
            raise BusyEndpoint(words, retry_after(headers))
        raise RefusedRequest(words) if status in REFUSALS else DownEndpoint(words)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _rest(self, why: str, seconds: float) -> None:
        """Wait with all requests, after one was refused."""
        now, self._busy = time.monotonic(), why
        is_first = self._busy_until <= now  # of those that were refused together
        self._num_busy += is_first
        seconds = max(self._backoff.after(self._num_busy), min(seconds, RETRY_AFTER_SECONDS_MAX))
        self._busy_until = max(self._busy_until, now + seconds)
        if is_first and seconds >= self._backoff.most_seconds:
            log.warning("%s", self.trouble)

    async def _until_up(self, num_answers: int, look: Callable[[], Awaitable[object]]) -> None:
        """Wait until it answers, after a request failed that was made when it had answered so often."""
        pauses = Retries(self._backoff)
        async with self._looking:
            while self.num_answers == num_answers:
                try:
                    await look()
                except (BusyEndpoint, UnfitAnswer):
                    break  # it is there
                except DownEndpoint as error:
                    is_news, self._down = not self._down, str(error)
                    if is_news:
                        log.warning("%s", self.trouble)
                    await pauses.pause()
            self._down = ""

    async def _exchange(
        self, path: str, body: bytes | None, bytes_max: int, sent: asyncio.Event
    ) -> tuple[int, httpx2.Headers, bytes]:
        """Return status, headers and answer: cut off where it is too long, and without the key, which some repeat and
        messages would quote. `sent` is set when the request has left."""

        async def trace(moment: str, _: object) -> None:
            if moment.endswith("send_request_body.complete"):
                sent.set()

        method, traced = "GET" if body is None else "POST", {"trace": trace}
        async with self._client.stream(method, self._url + path, content=body, extensions=traced) as response:
            read = bytearray()
            async for part in response.aiter_raw():
                read += part
                if len(read) > bytes_max:
                    break
        data = bytes(read).replace(self._key.encode(), b"***") if len(self._key) >= KEY_CHARS else bytes(read)
        return response.status_code, response.headers, data
