"""The judge of the reward `judge`: a model behind an OpenAI-compatible endpoint that says what rollouts are worth.

It is asked from the head's own process, which has the limits, the budget, and what `echo2 status` shows; there is no
code of the user's in it. `core/endpoint.py` says what happens when it is busy, down, or gives no verdict. What was not
judged has no score: it is the failure of its rollout. A question is asked once in a process.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from echo2.config import Config
from echo2.config.judge import JudgeConfig
from echo2.core.background import awaited
from echo2.core.endpoint import BACKOFF, TRIES_MAX, Endpoint, FailedTries, key_in
from echo2.core.errors import UserError
from echo2.core.types import Backoff, Task
from echo2.reward.judge_words import JudgeReply, Usage, question, read_reply, verdict
from echo2.reward.score import RewardFailure

log = logging.getLogger(__name__)

#: Maximum bytes of an endpoint's answer.
REPLY_BYTES_MAX = 1 << 20
CHAT = "/chat/completions"
#: Verdicts that are remembered.
VERDICTS_MAX = 20_000
#: Estimates of a request's tokens: English has more bytes in each; what is written if `params` do not bound it.
BYTES_PER_TOKEN, WRITTEN_TOKENS = 3, 1024


class JudgeFailure(RewardFailure):
    """A rollout that the judge did not score."""

    cause = "judge_failed"


class BudgetSpent(UserError):
    """The judge's budget does not suffice for another request. Unjudged rollouts wait for a larger one."""


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
        UserError: the variable that should have it has none, or as `key_in`.
    """
    key = key_in(judge.api_key_env) if judge.api_key_env else ""
    if judge.api_key_env and not key:
        raise UserError(
            f"reward.judge.api_key_env = {judge.api_key_env!r}: there is no key in that environment variable. Export "
            "it where the head starts, or leave the setting out if the endpoint needs none."
        )
    return key


def open_judge(
    config: Config,
    spent_usd: float = 0.0,
    on_retry: Callable[[str], None] = lambda problem: None,
    keep: Callable[[float], object] = lambda usd: None,
) -> Judge | None:
    """Return the run's judge; None: it has none. Raises as `Judge`."""
    judge, seconds = config.reward.judge_config, config.reward.timeout_seconds
    return Judge(judge, config.run.seed, seconds, spent_usd, on_retry, keep=keep) if judge is not None else None


class Judge:
    """Scores rollouts, for one event loop. `seed` draws the order of compared answers; `seconds` limits one request;
    `spent_usd` is what was spent before; `on_retry` is called for each repeated request. `keep` stores what may have
    been spent, before a request is made that may cost more than is stored: a process that is killed counts what was
    under way with the most that it may cost, so that no number of restarts exceeds the budget.

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
        keep: Callable[[float], object] = lambda usd: None,
    ) -> None:
        self._judge, self._seed, self._on_retry, self._keep = judge, seed, on_retry, keep
        name = judge.api_key_env
        self._endpoint = Endpoint(
            judge.base_url,
            "the judge",
            "scoring",
            seconds=seconds,
            limit="reward.timeout_seconds",
            key=read_key(judge),
            about_key=f"the key is that of ${name}" if name else "reward.judge.api_key_env names no key",
            max_concurrency=judge.max_concurrency,
            backoff=backoff,
            on_unanswered=self._unanswered,
        )
        self._requests, self._tokens = MinuteLimit(judge.requests_per_minute), MinuteLimit(judge.tokens_per_minute)
        self._verdicts: dict[bytes, asyncio.Task[tuple[float, float]]] = {}
        self._reserved, self._freed = list[float](), asyncio.Event()  # of requests under way
        self.spent_usd = self._kept_usd = spent_usd

    def keep_usd(self) -> None:
        """Store what was spent, with the most that requests under way may cost. Raises as `keep`."""
        self._kept_usd = self.spent_usd + sum(self._reserved)
        self._keep(self._kept_usd)

    @property
    def num_answers(self) -> int:
        """How many requests it has answered."""
        return self._endpoint.num_answers

    @property
    def trouble(self) -> str:
        """Why scoring waits; empty: it does not."""
        return self._endpoint.trouble

    async def score(self, task: Task, texts: Sequence[str]) -> tuple[list[float | JudgeFailure | None], float]:
        """Return a score in [0, 1] for each answer of a group, or why it has none (None: nothing to compare it with),
        and the seconds that a judge takes for them that has nothing else to do.

        Raises:
            BudgetSpent: another request would cost too much.
            UserError: the task lacks a column that the rubric names.
        """
        compared = [(at,) for at in range(len(texts))] if self._judge.form == "rubric" else self._pairs(texts)
        verdicts = await asyncio.gather(*(self._verdict(task, [texts[at] for at in places]) for places in compared))
        seconds = sum(elapsed for _, elapsed in verdicts) / max(1, min(len(verdicts), self._judge.max_concurrency))
        if self._judge.form == "rubric":
            return [score for score, _ in verdicts], seconds
        won, failures = [list[float]() for _ in texts], dict[int, JudgeFailure]()
        for (first, second), (score, _) in zip(compared, verdicts, strict=True):
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
        await self._endpoint.close()

    def _pairs(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the comparisons of a group: each pair in a drawn order, or in both."""
        pairs: list[tuple[int, ...]] = []
        for pair in itertools.combinations(range(len(texts)), 2):
            content = json.dumps([self._seed, *(texts[at] for at in pair)]).encode()
            first = pair if hashlib.blake2b(content, digest_size=1).digest()[0] % 2 else pair[::-1]
            pairs += [first] if self._judge.form == "pairwise" else [first, first[::-1]]
        return pairs

    async def _verdict(self, task: Task, answers: Sequence[str]) -> tuple[float | JudgeFailure, float]:
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
        problem_start = f"the judge {self._judge.model} gave no verdict"
        try:
            return await self._endpoint.persist(
                lambda: self._try(body, is_pair), lambda problem: self._on_retry(f"{problem_start}: {problem}")
            )
        except FailedTries as error:
            raise JudgeFailure(f"{problem_start}: {error}. It was asked {TRIES_MAX} times.") from error

    async def _try(self, body: bytes, is_pair: bool) -> tuple[float, float]:
        """Make a request when the limits allow it."""
        estimate = self._estimate(body)
        usd = self._usd(estimate)
        while not self._affords(usd):
            if not self._reserved:
                raise self._too_dear(usd)
            self._freed.clear()
            await self._freed.wait()  # most cost less than they may
        with self._reserving(usd):
            now = time.monotonic()
            paces = self._requests.take(1, now), self._tokens.take(_tokens(estimate), now)
            await asyncio.sleep(max(paces))
            data, seconds = await self._endpoint.request(CHAT, body, REPLY_BYTES_MAX, self._look)
            return verdict(self._counted(data, estimate), is_pair), seconds

    @contextmanager
    def _reserving(self, usd: float) -> Iterator[None]:
        """Count a request that is about to be made, until it is counted with what it cost. Raises as `keep`."""
        self._reserved.append(usd)
        try:
            if self.spent_usd + sum(self._reserved) > self._kept_usd:
                self.keep_usd()
            yield
        finally:
            self._reserved.remove(usd)
            self._freed.set()

    async def _look(self) -> None:
        """Find out whether the judge answers. Raises BudgetSpent: that may cost too much."""
        body = self._body([{"role": "user", "content": "Say: yes."}])
        estimate = self._estimate(body)
        usd = self._usd(estimate)
        if not self._affords(usd):
            raise self._too_dear(usd)
        with self._reserving(usd):
            self._counted(await self._endpoint.exchange(CHAT, body, REPLY_BYTES_MAX), estimate)

    def _affords(self, usd: float) -> bool:
        """Whether the budget suffices for so much beside what was spent, and what requests under way may cost."""
        budget = self._judge.budget_usd
        return not budget or self.spent_usd + sum(self._reserved) + usd <= budget

    def _too_dear(self, usd: float) -> BudgetSpent:
        return BudgetSpent(
            f"the judge's budget of ${self._judge.budget_usd:g} is spent: it has cost ${self.spent_usd:.4f}, and the "
            f"next request may cost ${usd:.4f}. Raise reward.judge.budget_usd and continue with --resume"
        )

    def _unanswered(self, body: bytes) -> None:
        """Count a request whose answer never came: an endpoint bills what it has written. It cannot be more than the
        request may cost, where `params` bound what is written."""
        self.spent_usd += self._usd(self._estimate(body))

    def _counted(self, data: bytes, estimate: Usage) -> JudgeReply:
        """Read a reply, and count what it costs; `estimate`: the cost of an unreadable one.

        Raises:
            NoVerdict: it is that.
        """
        usage = estimate
        try:
            reply = read_reply(data)
            usage = reply.usage or estimate
        finally:
            self.spent_usd += self._usd(usage)
            more = _tokens(usage) - _tokens(estimate)  # of an absurd count a minute's worth
            self._tokens.take(min(more, self._judge.tokens_per_minute), 0.0)
        return reply

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
