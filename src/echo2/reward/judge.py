"""The judge of the reward `judge`: a model behind an OpenAI-compatible endpoint that says what rollouts are worth.

It is asked from the head's own process, which has the run's limits, its budget, and what `echo2 status` shows; the user
has no code in it. A request that fails is one of three kinds:

    busy        429, or 503 with Retry-After: all requests wait as long as it says, and nothing is counted
    down        401, 403, 404, 5xx, no connection, no answer in time: one small request after the other is sent until
                one is answered, and everything else waits. Then the request is made again, `TRIES_MAX` times in all:
                what still fails beside a judge that answers is at fault itself
    no verdict  400, or a reply that cannot be read: the same, without the wait

What was never judged has no score: it is the failure of its rollout. The same question is asked once in a process.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import itertools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence

import httpx2

from echo2.config import Config
from echo2.config.sections import JudgeConfig
from echo2.core.background import awaited
from echo2.core.errors import UserError
from echo2.core.printable import printable
from echo2.core.retries import Retries
from echo2.core.types import Backoff, Task
from echo2.reward.judge_words import Reply, UnreadableReply, Usage, question, read_reply, verdict
from echo2.reward.score import RewardFailure

#: Maximum bytes of an endpoint's answer.
REPLY_BYTES_MAX = 1 << 20
#: Characters of a refusal that messages quote.
SAID_CHARS = 200
#: Tries of one request beside a judge that answers: of requests that fail in 15 % of tries, one in 90,000 is lost.
TRIES_MAX = 6
#: Between two tries of a request, between two requests that ask whether the judge is there, and after a 429 that does
#: not say how long.
BACKOFF = Backoff(0.5, 30.0)
#: The longest time that a Retry-After is believed.
RETRY_AFTER_SECONDS_MAX = 3600.0
#: Verdicts that are remembered.
VERDICTS_MAX = 100_000
#: For estimates before a request: English has more bytes in a token.
BYTES_PER_TOKEN = 3
#: The same for what is written, where reward.judge.params does not say.
WRITTEN_TOKENS = 1024
#: Answers with these codes are about the request, not about the judge.
REFUSALS = (400, 413, 422)


class JudgeFailure(RewardFailure):
    """A rollout that the judge did not score."""

    cause = "judge_failed"


class BudgetSpent(UserError):
    """The judge's budget does not suffice for another request. What is not judged waits for a larger one."""


class _Busy(Exception):
    def __init__(self, words: str, seconds: float | None) -> None:
        super().__init__(words)
        self.seconds = seconds


class _Down(Exception):
    pass


class Pace:
    """Spaces out what has a limit by the minute (0: none), in seconds of any clock: no minute has more than the limit,
    plus one piece, whatever its size.
    """

    def __init__(self, per_minute: int) -> None:
        self._seconds_each = 60.0 / per_minute if per_minute else 0.0
        self._free_at = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take an amount, and return the seconds until it may be used."""
        starts_at = max(self._free_at, now)
        self._free_at = starts_at + amount * self._seconds_each
        return starts_at - now

    def correct(self, amount: float) -> None:
        """Take what was used beyond an estimate; negative: give it back."""
        self._free_at += amount * self._seconds_each


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
    config: Config, spent_usd: float = 0.0, on_retry: Callable[[str], None] = lambda message: None
) -> Judge | None:
    """Return the run's judge; None if it has none. Raises as `Judge`."""
    reward = config.reward
    return Judge(reward.judge, config.run.seed, reward.timeout_seconds, spent_usd, on_retry) if reward.judge.model else None


class Judge:
    """Scores rollouts, for one event loop. `seed` draws the order of compared answers; `seconds` limits one request;
    `spent_usd` is what was spent before; `on_retry` hears of each request that is made again.

    Raises:
        UserError: as `read_key`.
    """

    def __init__(
        self,
        settings: JudgeConfig,
        seed: int,
        seconds: float,
        spent_usd: float = 0.0,
        on_retry: Callable[[str], None] = lambda message: None,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._settings, self._seed, self._seconds = settings, seed, seconds
        self._on_retry, self._backoff = on_retry, backoff
        self._key = read_key(settings)
        headers = {"content-type": "application/json", "accept-encoding": "identity"}  # the byte limit counts real sizes
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it logs every request
        self._client = httpx2.AsyncClient(headers=headers, timeout=None)
        self._url = f"{settings.base_url.rstrip('/')}/chat/completions"
        params = settings.params
        written = params.get("max_tokens") or params.get("max_completion_tokens")
        self._written_most = written if isinstance(written, int) else WRITTEN_TOKENS
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        self._requests, self._tokens = Pace(settings.requests_per_minute), Pace(settings.tokens_per_minute)
        self._verdicts: dict[bytes, asyncio.Task[tuple[float, float]]] = {}
        self._looking = asyncio.Lock()  # held while the judge is down
        self._down = self._busy = ""
        self._busy_until, self._num_busy = 0.0, 0
        self._reserved_usd, self._num_reserved, self._freed = 0.0, 0, asyncio.Event()
        self.spent_usd = spent_usd
        self.num_answers = self.num_remembered = 0

    @property
    def trouble(self) -> str:
        """Why scoring waits; empty: it does not."""
        if self._down:
            return f"scoring waits for the judge at {self._settings.base_url}, which is asked until it answers: {self._down}"
        seconds = self._busy_until - time.monotonic()
        if seconds > 0.0:
            return f"scoring waits {seconds:.0f} s, as the judge at {self._settings.base_url} says: {self._busy}"
        return ""

    def told(self) -> dict[str, float]:
        """Return its numbers for status and metrics, since the head's start, and its dollars since the run's."""
        return {"answers": self.num_answers, "remembered": self.num_remembered, "usd": self.spent_usd}

    async def score(self, task: Task, texts: Sequence[str]) -> tuple[list[float | None | JudgeFailure], float]:
        """Return a score in [0, 1] for each answer of a group, or why it has none (None: nothing to compare it with),
        and the seconds that the judge takes for them.

        Raises:
            BudgetSpent: another request would cost too much.
            UserError: the task lacks a column that the rubric names.
        """
        if self._settings.form == "rubric":
            found = await asyncio.gather(*(self._asked(task, (text,)) for text in texts))
            return [score for score, _ in found], self._alone_seconds(found)
        pairs = [pair for one in itertools.combinations(range(len(texts)), 2) for pair in self._orders(texts, one)]
        found = await asyncio.gather(*(self._asked(task, (texts[a], texts[b])) for a, b in pairs))
        won: list[list[float]] = [[] for _ in texts]
        failures = dict[int, JudgeFailure]()
        for (first, second), (score, _) in zip(pairs, found, strict=True):
            if isinstance(score, JudgeFailure):
                failures[first] = failures[second] = score
            else:
                won[first].append(score)
                won[second].append(1.0 - score)
        most = 2 * len(pairs) // max(1, len(texts))
        # An answer that the judge can't compare is in each comparison of one pair; the others keep theirs.
        return [
            None if not most else statistics.fmean(wins) if 2 * len(wins) >= most else failures[at]
            for at, wins in enumerate(won)
        ], self._alone_seconds(found)

    async def close(self) -> None:
        """End all requests, and close the connections."""
        works = list(self._verdicts.values())
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        await self._client.aclose()

    def _orders(self, texts: Sequence[str], pair: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the pair in the order in which its answers are shown, or in both."""
        drawn = hashlib.blake2b(json.dumps([self._seed, *(texts[at] for at in pair)]).encode(), digest_size=1).digest()
        first = pair if drawn[0] % 2 else (pair[1], pair[0])
        return [first] if self._settings.form == "pairwise" else [first, (first[1], first[0])]

    def _alone_seconds(self, found: Sequence[tuple[object, float]]) -> float:
        """Return the time of these requests if no others are made."""
        return sum(seconds for _, seconds in found) / max(1, min(len(found), self._settings.max_concurrency))

    async def _asked(self, task: Task, answers: tuple[str, ...]) -> tuple[float | JudgeFailure, float]:
        """Return the score of an answer, or of the first of two, and the seconds that it took. It is remembered."""
        if len(answers) == 2 and answers[0] == answers[1]:
            return 0.5, 0.0
        settings = self._settings
        asked = {"model": settings.model, "messages": question(settings.rubric, task, answers), **settings.params}
        body = json.dumps(asked).encode()
        key = hashlib.blake2b(body, digest_size=16).digest()
        known = self._verdicts.pop(key, None)
        self.num_remembered += known is not None
        work = self._verdicts[key] = known or awaited(self._ask(body, len(answers) == 2))
        if len(self._verdicts) > VERDICTS_MAX and self._verdicts[oldest := next(iter(self._verdicts))].done():
            del self._verdicts[oldest]
        try:
            return await asyncio.shield(work)
        except (JudgeFailure, BudgetSpent) as error:
            if self._verdicts.get(key) is work:
                del self._verdicts[key]  # whoever asks again, asks the judge again
            if isinstance(error, BudgetSpent):
                raise
            return error, error.seconds

    async def _ask(self, body: bytes, is_pair: bool) -> tuple[float, float]:
        """Ask until there is a verdict; return it, with the seconds of the last request.

        Raises:
            JudgeFailure: there was none at `TRIES_MAX` tries.
            BudgetSpent.
        """
        pauses, problem, num_tries = Retries(self._backoff), "", 0
        while num_tries < TRIES_MAX:
            if num_tries:
                self._on_retry(f"The judge {self._settings.model} gave no verdict: {problem}")
                await pauses.pause()
            async with self._slots:
                num_answers = self.num_answers
                try:
                    return await self._try(body, is_pair)
                except _Busy as error:
                    self._wait_as_told(error)
                    continue
                except UnreadableReply as error:
                    problem = str(error)
                except _Down as error:
                    problem = str(error)
                    await self._until_up(problem, num_answers)
            num_tries += 1
        raise JudgeFailure(
            f"The judge {self._settings.model} gave no verdict: {problem}. It was asked {num_tries} times."
        )

    async def _try(self, body: bytes, is_pair: bool) -> tuple[float, float]:
        estimate = self._estimate(body)
        usd = self._usd(estimate)
        await self._reserve(usd)
        try:
            amounts = (self._requests, 1), (self._tokens, estimate.prompt_tokens + estimate.completion_tokens)
            await asyncio.sleep(max(pace.take(amount, time.monotonic()) for pace, amount in amounts))
            while (seconds := self._busy_until - time.monotonic()) > 0.0:
                await asyncio.sleep(seconds)
            async with self._looking:
                pass
            began = time.monotonic()
            return verdict(await self._post(body), is_pair), time.monotonic() - began
        finally:
            self._reserved_usd, self._num_reserved = self._reserved_usd - usd, self._num_reserved - 1
            self._freed.set()

    async def _reserve(self, usd: float) -> None:
        """Wait until the budget has room for a request that may cost so much.

        Raises:
            BudgetSpent: it has none, and nothing is under way that may cost less than was reserved for it.
        """
        budget = self._settings.budget_usd
        while budget and self.spent_usd + self._reserved_usd + usd > budget:
            if not self._num_reserved:
                raise BudgetSpent(
                    f"the judge's budget of ${budget:g} is spent: ${self.spent_usd:.4f}, and the next request may cost "
                    f"${usd:.4f}; raise reward.judge.budget_usd and continue with --resume"
                )
            self._freed.clear()
            await self._freed.wait()
        self._reserved_usd, self._num_reserved = self._reserved_usd + usd, self._num_reserved + 1

    def _wait_as_told(self, error: _Busy) -> None:
        self._num_busy += 1
        seconds = self._backoff.after(self._num_busy) if error.seconds is None else error.seconds
        until = time.monotonic() + min(seconds, RETRY_AFTER_SECONDS_MAX)
        self._busy, self._busy_until = str(error), max(self._busy_until, until)

    async def _until_up(self, problem: str, num_answers: int) -> None:
        """Wait until the judge answers, after a request failed that was sent when it had answered so often."""
        body = {"model": self._settings.model, "messages": [{"role": "user", "content": "Say: yes."}]}
        pauses = Retries(self._backoff)
        async with self._looking:
            try:
                while self.num_answers == num_answers:
                    try:
                        await self._post(json.dumps({**body, **self._settings.params}).encode())
                    except (_Busy, UnreadableReply):
                        return  # it is there
                    except _Down as error:
                        self._down = str(error)
                        await pauses.pause()
            finally:
                self._down = ""

    async def _post(self, body: bytes) -> Reply:
        """Make one request, and count what it costs.

        Raises:
            _Busy, _Down, UnreadableReply.
        """
        estimate = self._estimate(body)
        try:
            async with asyncio.timeout(self._seconds):
                status, retry_after, data = await self._exchange(body)
        except TimeoutError as error:
            raise _Down(f"no answer within reward.timeout_seconds = {self._seconds:g} s") from error
        except httpx2.HTTPError as error:
            raise _Down(f"{type(error).__name__} {printable(str(error), SAID_CHARS)}".rstrip()) from error
        if 200 <= status < 300:
            self.num_answers, self._num_busy = self.num_answers + 1, 0
            try:
                reply = read_reply(data)
            except UnreadableReply:
                self._pay(estimate, estimate)
                raise
            self._pay(reply.usage or estimate, estimate)
            return reply
        said = data[: 4 * SAID_CHARS].decode(errors="replace")
        words = f"it answers {status}: " + printable(said.replace(self._key, "***") if self._key else said, SAID_CHARS)
        if status == 429 or (status == 503 and retry_after is not None):
            raise _Busy(words, retry_after)
        raise UnreadableReply(words) if status in REFUSALS else _Down(words)

    async def _exchange(self, body: bytes) -> tuple[int, float | None, bytes]:
        async with self._client.stream("POST", self._url, content=body) as response:
            parts, size = [], 0
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > REPLY_BYTES_MAX:
                    self._pay(self._estimate(body), self._estimate(body))
                    raise UnreadableReply(f"it has more than {REPLY_BYTES_MAX} bytes")
        return response.status_code, _seconds(response.headers.get("retry-after", "")), b"".join(parts)

    def _estimate(self, body: bytes) -> Usage:
        return Usage(len(body) // BYTES_PER_TOKEN, self._written_most)

    def _usd(self, usage: Usage) -> float:
        read, written = self._settings.usd_per_mtok
        return (usage.prompt_tokens * read + usage.completion_tokens * written) / 1e6

    def _pay(self, usage: Usage, estimate: Usage) -> None:
        self.spent_usd += self._usd(usage)
        used, thought = (one.prompt_tokens + one.completion_tokens for one in (usage, estimate))
        self._tokens.correct(used - thought)


def _seconds(retry_after: str) -> float | None:
    """Read a Retry-After: seconds, or a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
