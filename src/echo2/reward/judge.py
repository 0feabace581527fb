"""The judge of the reward `judge`: a model behind an OpenAI-compatible endpoint that says what rollouts are worth.

It is asked from the head's own process, which has the limits, the budget, and what `echo2 status` shows; there is no
code of the user's in it. A request fails in one of three ways:

    busy        429, or 503 with Retry-After: all requests wait as long as it says or longer, and nothing is counted
    down        401, 403, 404, 5xx, no connection, no answer in time: one small request after the other is made until
                one is answered, and all others wait. Then the request is made again, `TRIES_MAX` times in all: what
                fails so often beside a judge that answers is itself at fault
    no verdict  400, or a reply that cannot be read: the same, without the wait

What was not judged has no score: it is the failure of its rollout. A question is asked once in a process. Pauses are
those of `core/retries.py`, as everywhere: a library's wrap one call each, and here all requests wait together.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx2

from echo2.config import Config
from echo2.config.judge import JudgeConfig
from echo2.core import addresses
from echo2.core.background import awaited
from echo2.core.errors import UserError
from echo2.core.printable import printable
from echo2.core.retries import Retries
from echo2.core.types import Backoff, Task
from echo2.reward.judge_words import JudgeReply, NoVerdict, Usage, question, read_reply, verdict
from echo2.reward.score import RewardFailure

log = logging.getLogger(__name__)

#: Maximum bytes of an endpoint's answer.
REPLY_BYTES_MAX = 1 << 20
#: Characters of a refusal that messages quote.
SAID_CHARS = 200
#: A shorter key is no secret, but a word, as "none" for an endpoint that needs one.
KEY_CHARS = 8
#: Tries of one request beside a judge that answers: of requests that fail in 15 % of tries, one in 90,000 is lost.
TRIES_MAX = 6
#: Between two tries of a request or of whether the judge is there, and after a 429 that does not say longer.
BACKOFF = Backoff(0.5, 30.0)
#: The longest time that a Retry-After is believed.
RETRY_AFTER_SECONDS_MAX = 3600.0
#: Verdicts that are remembered.
VERDICTS_MAX = 20_000
#: Estimates of a request's tokens: English has more bytes in each; what is written if `params` do not bound it.
BYTES_PER_TOKEN, WRITTEN_TOKENS = 3, 1024
#: Statuses of answers that are about the request, not about the judge.
REFUSALS = (400, 413, 422)


class JudgeFailure(RewardFailure):
    """A rollout that the judge did not score."""

    cause = "judge_failed"


class BudgetSpent(UserError):
    """The judge's budget does not suffice for another request. What is not judged waits for a larger one."""


class _Busy(Exception):
    """`args`: why, and at least how many seconds to wait."""


class _Down(Exception):
    pass


class MinuteLimit:
    """Spaces out what has a limit by the minute (0: none), in seconds of any clock."""

    def __init__(self, per_minute: int) -> None:
        self._each = 60.0 / per_minute if per_minute else 0.0
        self._free_at = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take an amount, of any size, and return the seconds until it may be used. Negative: give it back."""
        starts_at = max(self._free_at, now)
        self._free_at = starts_at + amount * self._each
        return starts_at - now


def read_key(judge: JudgeConfig) -> str:
    """Return the endpoint's key; empty: it has none.

    Raises:
        UserError: the variable that should have it has none.
    """
    key = os.environ.get(judge.api_key_env, "").strip() if judge.api_key_env else ""
    if judge.api_key_env and not (key and key.isascii() and key.isprintable()):
        raise UserError(
            f"reward.judge.api_key_env = {judge.api_key_env!r}: there is no key in that environment variable. Export "
            "it where the head starts, or leave the setting out if the endpoint needs none."
        )
    return key


def open_judge(
    config: Config, spent_usd: float = 0.0, on_retry: Callable[[str], None] = lambda problem: None
) -> Judge | None:
    """Return the run's judge; None: it has none. Raises as `Judge`."""
    judge, seconds = config.reward.asked, config.reward.timeout_seconds
    return Judge(judge, config.run.seed, seconds, spent_usd, on_retry) if judge is not None else None


class Judge:
    """Scores rollouts, for one event loop. `seed` draws the order of compared answers; `seconds` limits one request;
    `spent_usd` is what was spent before; `on_retry` hears of each request that is made again.

    Raises:
        UserError: as `read_key`.
    """

    def __init__(
        self,
        judge: JudgeConfig,
        seed: int,
        seconds: float,
        spent_usd: float,
        on_retry: Callable[[str], None],
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._judge, self._seed, self._seconds, self._on_retry = judge, seed, seconds, on_retry
        self._backoff, self._key = backoff, read_key(judge)
        # No compression: the byte limit counts real sizes.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs every request
        is_near = addresses.is_private(urlsplit(judge.base_url).hostname or "")
        direct = httpx2.AsyncHTTPTransport() if is_near else None  # no proxy that the environment names leads there
        self._client = httpx2.AsyncClient(headers=headers, timeout=None, transport=direct)
        self._slots = asyncio.Semaphore(judge.max_concurrency)
        self._requests, self._tokens = MinuteLimit(judge.requests_per_minute), MinuteLimit(judge.tokens_per_minute)
        self._verdicts: dict[bytes, asyncio.Task[tuple[float, float]]] = {}
        self._looking = asyncio.Lock()  # held while the judge is down
        self._down = self._busy = ""
        self._busy_until, self._num_busy = 0.0, 0
        self._reserved, self._freed = list[float](), asyncio.Event()
        self.spent_usd, self.num_answers = spent_usd, 0

    @property
    def trouble(self) -> str:
        """Why scoring waits; empty: it does not."""
        url, seconds = self._judge.base_url, self._busy_until - time.monotonic()
        if self._down:
            return f"scoring waits for the judge at {url}, which is asked until it answers: {self._down}"
        return f"scoring waits {seconds:.0f} s, as the judge at {url} wants: {self._busy}" if seconds > 0.0 else ""

    async def score(self, task: Task, texts: Sequence[str]) -> tuple[list[float | JudgeFailure | None], float]:
        """Return a score in [0, 1] for each answer of a group, or why it has none (None: nothing to compare it with),
        and the seconds that a judge takes for them that has nothing else to do.

        Raises:
            BudgetSpent: another request would cost too much.
            UserError: the task lacks a column that the rubric names.
        """
        compared = [(at,) for at in range(len(texts))] if self._judge.form == "rubric" else self._pairs(texts)
        found = await asyncio.gather(*(self._asked(task, [texts[at] for at in places]) for places in compared))
        seconds = sum(took for _, took in found) / max(1, min(len(found), self._judge.max_concurrency))
        if self._judge.form == "rubric":
            return [score for score, _ in found], seconds
        won, failures = [list[float]() for _ in texts], dict[int, JudgeFailure]()
        for (first, second), (score, _) in zip(compared, found, strict=True):
            if isinstance(score, JudgeFailure):
                failures[first] = failures[second] = score
            else:
                won[first].append(score)
                won[second].append(1.0 - score)
        fewest = len(compared) / len(texts)  # half: an answer that cannot be compared spoils a few of each other
        scores = [
            statistics.fmean(one) if one and len(one) >= fewest else failures.get(at) for at, one in enumerate(won)
        ]
        return list(scores), seconds

    async def close(self) -> None:
        """End all requests, and close the connections."""
        works = [work for work in self._verdicts.values() if work.cancel()]
        await asyncio.gather(*works, return_exceptions=True)
        await self._client.aclose()

    def _pairs(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the comparisons of a group: each pair in a drawn order, or in both."""
        found: list[tuple[int, ...]] = []
        for pair in itertools.combinations(range(len(texts)), 2):
            said = json.dumps([self._seed, *(texts[at] for at in pair)]).encode()
            first = pair if hashlib.blake2b(said, digest_size=1).digest()[0] % 2 else pair[::-1]
            found += [first] if self._judge.form == "pairwise" else [first, first[::-1]]
        return found

    async def _asked(self, task: Task, answers: Sequence[str]) -> tuple[float | JudgeFailure, float]:
        """Return the score of an answer, or of the first of two, and the seconds that it took. It is remembered."""
        if len(answers) == 2 and answers[0] == answers[1]:
            return 0.5, 0.0
        body = self._body(question(self._judge.rubric, task, answers))
        key = hashlib.blake2b(body, digest_size=16).digest()
        work = self._verdicts.pop(key, None) or awaited(self._ask(body, len(answers) == 2))
        self._verdicts[key] = work
        if len(self._verdicts) > VERDICTS_MAX and self._verdicts[oldest := next(iter(self._verdicts))].done():
            del self._verdicts[oldest]
        try:
            return await asyncio.shield(work)
        except UserError as error:
            if self._verdicts.get(key) is work:
                del self._verdicts[key]  # it is asked anew
            if not isinstance(error, JudgeFailure):
                raise
            return error, 0.0

    async def _ask(self, body: bytes, is_pair: bool) -> tuple[float, float]:
        """Ask until there is a verdict; return it, and the seconds of the last request.

        Raises:
            JudgeFailure: none came at `TRIES_MAX` tries.
            BudgetSpent: the next request may cost too much.
        """
        pauses, problem, num_tries = Retries(self._backoff), "", 0
        while num_tries < TRIES_MAX:
            if problem:
                self._on_retry(problem)
                await pauses.pause()
                problem = ""
            async with self._slots:
                try:
                    return await self._try(body, is_pair)
                except _Busy as error:
                    now, (self._busy, seconds) = time.monotonic(), error.args
                    is_first = self._busy_until <= now  # of those that were refused together
                    self._num_busy += is_first
                    seconds = max(self._backoff.after(self._num_busy), min(seconds, RETRY_AFTER_SECONDS_MAX))
                    self._busy_until = max(self._busy_until, now + seconds)
                    if is_first and seconds >= self._backoff.most_seconds:
                        log.warning("%s", self.trouble)
                except (NoVerdict, _Down) as error:
                    problem = f"the judge {self._judge.model} gave no verdict: {error}"
                    num_tries += 1
        raise JudgeFailure(f"{problem}. It was asked {num_tries} times.")

    async def _try(self, body: bytes, is_pair: bool) -> tuple[float, float]:
        """Make a request when the limits allow it."""
        estimate, budget = self._estimate(body), self._judge.budget_usd
        usd = self._usd(estimate)
        while budget and self.spent_usd + sum(self._reserved) + usd > budget:
            if not self._reserved:
                raise BudgetSpent(
                    f"the judge's budget of ${budget:g} is spent: it has cost ${self.spent_usd:.4f}, and the next "
                    f"request may cost ${usd:.4f}. Raise reward.judge.budget_usd and continue with --resume"
                )
            self._freed.clear()
            await self._freed.wait()  # most cost less than they may
        self._reserved.append(usd)
        try:
            now = time.monotonic()
            paces = self._requests.take(1, now), self._tokens.take(_tokens(estimate), now)
            await asyncio.sleep(max(paces))
            while (seconds := self._busy_until - time.monotonic()) > 0.0:  # noqa: ASYNC110  # it grows if others are refused
                await asyncio.sleep(seconds)
            async with self._looking:
                began, num_answers = time.monotonic(), self.num_answers
            try:
                return verdict(await self._post(body), is_pair), time.monotonic() - began
            except _Down:
                await self._until_up(num_answers)
                raise
        finally:
            self._reserved.remove(usd)
            self._freed.set()

    async def _until_up(self, num_answers: int) -> None:
        """Wait until the judge answers, after a request failed that was made when it had answered so often."""
        pauses, body = Retries(self._backoff), self._body([{"role": "user", "content": "Say: yes."}])
        async with self._looking:
            while self.num_answers == num_answers:
                try:
                    await self._post(body)
                except (_Busy, NoVerdict):
                    break  # it is there
                except _Down as error:
                    is_news, self._down = not self._down, str(error)
                    if is_news:
                        log.warning("%s", self.trouble)
                    await pauses.pause()
            self._down = ""

    async def _post(self, body: bytes) -> JudgeReply:
        """Make one request, and count what it costs. Raises _Busy, _Down or NoVerdict."""
        try:
            async with asyncio.timeout(self._seconds):
                status, retry_after, data = await self._exchange(body)
        except TimeoutError as error:
            raise _Down(f"it gave no answer within reward.timeout_seconds = {self._seconds:g}") from error
        except httpx2.HTTPError as error:
            raise _Down(f"{type(error).__name__} {printable(str(error), SAID_CHARS)}".rstrip()) from error
        if 200 <= status < 300:
            self.num_answers, self._num_busy = self.num_answers + 1, 0
            usage = estimate = self._estimate(body)  # what a reply costs that nobody can read
            try:
                reply = read_reply(data)
                usage = reply.usage or estimate
            finally:
                self.spent_usd += self._usd(usage)
                more = _tokens(usage) - _tokens(estimate)  # of an absurd count a minute's worth
                self._tokens.take(min(more, self._judge.tokens_per_minute), 0.0)
            return reply
        said = data[: 4 * SAID_CHARS].decode(errors="replace")
        words = f"it answers {status}: " + printable(said, SAID_CHARS)
        if status in (401, 403):
            key = self._judge.api_key_env
            words += f"; the key is that of ${key}" if key else "; reward.judge.api_key_env names no key"
            words += ": stop the run, set it, and continue with --resume"
        if status == 429 or (status == 503 and retry_after):
            raise _Busy(words, float(retry_after) if retry_after.isdecimal() else 0.0)
        raise NoVerdict(words) if status in REFUSALS else _Down(words)

    async def _exchange(self, body: bytes) -> tuple[int, str, bytes]:
        """Return status, Retry-After and answer: cut off where it is too long, and without the key, which some repeat
        and messages would quote."""
        url = f"{self._judge.base_url.rstrip('/')}/chat/completions"
        async with self._client.stream("POST", url, content=body) as response:
            read = bytearray()
            async for part in response.aiter_raw():
                read += part
                if len(read) > REPLY_BYTES_MAX:
                    break
        data = bytes(read).replace(self._key.encode(), b"***") if len(self._key) >= KEY_CHARS else bytes(read)
        return response.status_code, response.headers.get("retry-after", ""), data

    def _body(self, messages: list[dict[str, str]]) -> bytes:
        return json.dumps({"model": self._judge.model, "messages": messages, **self._judge.params}).encode()

    def _estimate(self, body: bytes) -> Usage:
        params = self._judge.params
        written = params.get("max_tokens") or params.get("max_completion_tokens")
        return Usage(len(body) // BYTES_PER_TOKEN, written if isinstance(written, int) else WRITTEN_TOKENS)

    def _usd(self, usage: Usage) -> float:
        read, written = self._judge.usd_per_mtok
        return (usage.prompt_tokens * read + usage.completion_tokens * written) / 1e6


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
