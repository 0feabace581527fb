"""Runs the user's reward functions in processes beside the head, so that they can neither stall nor kill it.

A process scores one group at a time, and the head starts more processes, up to one a core, while groups wait. Groups
that wait for quick functions share a request. Functions that are `async def` wait for something else (such as a judge
behind an API), so one process scores many groups at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from echo2.core.background import close_all, spawn
from echo2.core.retries import Retries
from echo2.core.types import Backoff, Rollout, Score, Task
from echo2.reward import messages
from echo2.reward.judge import Judge
from echo2.reward.score import RewardFailure
from echo2.sandbox.code_process import CodeFailure, CodeProcess

#: Maximum number of processes, however many cores there are: each imports the user's module.
PROCESSES_MAX = 16
#: If a group waits this long for a free process, another one is started.
GROW_SECONDS = 0.5
#: Maximum number of groups in one request. How many take `REQUEST_SECONDS` is estimated from previous groups.
REQUEST_GROUPS_MAX = 64
#: Groups in flight in one process whose functions are asynchronous.
GROUPS_TOGETHER = 64
#: Time beyond `timeout_seconds` for an asynchronous function to be cancelled in its process.
CANCEL_SECONDS = 5.0
#: Tries of a group whose function raises, as when a judge's service is overloaded for a moment, and the pauses between
#: them: five in 7.5 s. If 6 % of tries fail, one group in a million is lost; if each of 8 calls of a group fails so (39
#: %), one in a hundred.
TRIES_MAX = 5
BACKOFF = Backoff(0.5, 4.0)
ADVICE = "Make it faster, or raise reward.timeout_seconds."


def groups_at_once(is_async: bool) -> int:
    """Maximum number of groups that this machine scores at once."""
    return GROUPS_TOGETHER if is_async else min(PROCESSES_MAX, os.cpu_count() or 1)


@dataclass(eq=False, slots=True)
class _Group:
    """A group that waits for its scores. `doing`: for error messages; `answer`: scores or failure, and the seconds.
    `lost_seconds`: of requests that broke their process while they held this group and others.
    """

    message: dict[str, Any]
    doing: str
    answer: asyncio.Future[tuple[dict[str, Any], float]]
    lost_seconds: float = 0.0


class RewardProcesses:
    """Scores groups in child processes, the first of which starts at the first call (or by `start`).

    `functions` as for `Scorer`; relative paths are relative to this process's working directory. `log_path`
    receives the output of the functions. `num_processes`: the maximum (default: one a core). A group whose function
    raised is scored `tries_max` times, unless the next try must fail, too (`score.FINAL`); `on_retry` receives
    message and traceback of what was not the last try. `judge` is asked first; what it says is a part of each rollout,
    which the function `judge` passes on.
    """

    def __init__(
        self,
        functions: Sequence[str],
        timeout_seconds: float,
        log_path: Path,
        num_processes: int = 0,
        tries_max: int = TRIES_MAX,
        backoff: Backoff = BACKOFF,
        on_retry: Callable[[str, str], None] = lambda message, traceback: None,
        judge: Judge | None = None,
    ) -> None:
        setup = {"functions": list(functions), "timeout_seconds": timeout_seconds}
        self._process_arguments = ("The reward process", "echo2.reward.messages:make_handler", setup, log_path)
        self._timeout_seconds, self._on_retry = timeout_seconds, on_retry
        self._tries_max, self._backoff = tries_max, backoff
        self.judge = judge
        self._most = num_processes or groups_at_once(is_async=False)
        self._processes = [CodeProcess(*self._process_arguments)]
        self._alone: CodeProcess | None = None
        self._alone_lock = asyncio.Lock()
        self._free: asyncio.LifoQueue[CodeProcess] = asyncio.LifoQueue()
        self._is_async: bool | None = None
        self._takes_tokens = True
        self._waiting: deque[_Group] = deque()
        self._requests: dict[asyncio.Task[None], list[_Group]] = {}
        self._is_asking = False  # whether a request waits for a free process
        self._seconds = math.inf  # per group, in the last request
        self._seconds_by_function: dict[str, float] = {}

    @property
    def most_at_once(self) -> int:
        """Maximum number of groups scored at once; known once `start` has been awaited."""
        return GROUPS_TOGETHER if self._is_async else self._most

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each function, over the groups scored since the last call of this."""
        seconds, self._seconds_by_function = self._seconds_by_function, {}
        return seconds

    @property
    def pids(self) -> list[int]:
        """Process ids of the running children."""
        return [process.pid for process in self._all() if process.pid is not None]

    async def start(self) -> None:
        """Start the first child now, so that a function that cannot be loaded fails before there is anything to score.

        Raises:
            UserError: a function cannot be loaded; the message says which and why.
        """
        facts = await self._processes[0].start()
        if self._is_async is None:
            self._is_async, self._takes_tokens = bool(facts["is_async"]), bool(facts["takes_tokens"])
            self._most = 1 if self._is_async else self._most
            for _ in range(GROUPS_TOGETHER if self._is_async else 1):
                self._free.put_nowait(self._processes[0])

    async def score(self, task: Task, rollouts: Sequence[Rollout]) -> tuple[tuple[Rollout, ...], float]:
        """Return the rollouts with `reward_parts` and `reward` filled in, and the seconds that they took.

        Raises:
            RewardFailure: also of a single rollout. UserError: as `scores`.
        """
        results, seconds = await self.scores(task, rollouts, [rollout.text for rollout in rollouts])
        scored = []
        for rollout, result in zip(rollouts, results, strict=True):
            if isinstance(result, RewardFailure):
                raise result
            scored.append(replace(rollout, reward=result[0], reward_parts=result[1]))
        return tuple(scored), seconds

    async def scores(
        self, task: Task, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> tuple[list[Score | RewardFailure], float]:
        """Return the scores of rollouts with these texts, or why a rollout has none after all tries, and the seconds
        that the tries took, without the pauses. Of several scores of a rollout the first stands.

        Raises:
            RewardFailure: a function raised at every try, returned no score, took over `timeout_seconds` or ended the
                process; or no rollout has a score.
            BudgetSpent: the judge's.
            UserError: the functions cannot be loaded.
        """
        if self.judge is None:
            return await self._by_functions(task, rollouts, texts)
        judged, seconds = await self.judge.score(task, texts)
        self._seconds_by_function["judge"] = self._seconds_by_function.get("judge", 0.0) + seconds
        judged_rollouts = list[Rollout]()
        failures = {at: one for at, one in enumerate(judged) if isinstance(one, RewardFailure)}
        for rollout, one in zip(rollouts, judged, strict=True):
            if not isinstance(one, RewardFailure):
                parts = {} if one is None else {"judge": one}
                judged_rollouts.append(replace(rollout, reward_parts={**rollout.reward_parts, **parts}))
        if failures and not judged_rollouts:
            raise next(iter(failures.values()))
        texts_left = [text for at, text in enumerate(texts) if at not in failures]
        scores, more = await self._by_functions(task, judged_rollouts, texts_left)
        remaining_scores = iter(scores)
        return [failures[at] if at in failures else next(remaining_scores) for at in range(len(texts))], seconds + more

    async def _by_functions(
        self, task: Task, rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> tuple[list[Score | RewardFailure], float]:
        """As `scores`, after the judge was asked."""
        if self._is_async is None:
            await self.start()
        seconds, num_tries, scores, retries = 0.0, 0, dict[int, Score](), Retries(self._backoff)
        while True:
            answer, elapsed = await self._try(task, rollouts, texts)
            seconds, num_tries = seconds + elapsed, num_tries + 1
            results = answer.get("scores") or [answer] * len(rollouts)
            scores |= {
                at: (one[0], one[1]) for at, one in enumerate(results) if at not in scores and not isinstance(one, dict)
            }
            failures = {at: one for at, one in enumerate(results) if at not in scores}
            last = next(iter(failures.values()), None)
            if last is None or num_tries >= self._tries_max or not any(one["may_pass"] for one in failures.values()):
                break
            self._on_retry(last["failed"], last["traceback"])
            await retries.pause()
        tried = f" It was tried {num_tries} times." if num_tries > 1 else ""
        failed = {at: RewardFailure(one["failed"] + tried, seconds, one["traceback"]) for at, one in failures.items()}
        if failed and not scores:
            raise next(iter(failed.values()))
        return [failed[at] if at in failed else scores[at] for at in range(len(rollouts))], seconds

    async def _try(self, task: Task, rollouts: Sequence[Rollout], texts: Sequence[str]) -> tuple[dict[str, Any], float]:
        """Score the rollouts once; return the answer for their group, and the seconds that it took."""
        answer: asyncio.Future[tuple[dict[str, Any], float]] = asyncio.get_running_loop().create_future()
        message = messages.group_message(task, rollouts, texts, self._takes_tokens)
        self._waiting.append(_Group(message, f"scoring task {task.cursor}", answer))
        self._request_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            for request, groups in self._requests.items():
                if groups and all(group.answer.cancelled() for group in groups) and not request.cancelling():
                    request.cancel()
            raise

    async def close(self) -> None:
        """End the children; groups under way are abandoned."""
        for request in self._requests:
            if not request.cancelling():  # cancelled twice, it would not wait for its process to end
                request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        judges = () if self.judge is None else (self.judge.close,)
        await close_all(*(process.close for process in self._all()), *judges)

    def _request_soon(self) -> None:
        """Let one request wait for a free process; groups that arrive meanwhile may join it."""
        if self._waiting and not self._is_asking:
            self._is_asking = True
            groups: list[_Group] = []
            request = spawn(self._request(groups), partial(self._request_failed, groups))
            self._requests[request] = groups
            request.add_done_callback(self._requests.pop)

    def _request_failed(self, groups: list[_Group], error: Exception) -> None:
        """Raise it where the groups are awaited; without a process, in all that wait for one."""
        if not groups:
            groups, self._waiting, self._is_asking = list(self._waiting), deque(), False
        for group in groups:
            if not group.answer.done():
                group.answer.set_exception(error)

    async def _request(self, groups: list[_Group]) -> None:
        """Consumes: waiting groups. Produces: their answers. Waits for: a free process. If a process ended while it
        held several groups, any of them may be the cause: each is tried alone.
        """
        process = await self._take()
        try:
            most = max(1, min(REQUEST_GROUPS_MAX, int(messages.REQUEST_SECONDS / self._seconds)))
            groups += [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._is_asking = False
            self._request_soon()
            unanswered = await self._answer(process, [group for group in groups if not group.answer.done()])
        finally:
            self._free.put_nowait(process)
        for group in unanswered:
            async with self._alone_lock:
                self._alone = self._alone or CodeProcess(*self._process_arguments)
                await self._answer(self._alone, [group])

    async def _answer(self, process: CodeProcess, groups: Sequence[_Group]) -> Sequence[_Group]:
        """Score these groups in one request; those that it has no time for wait for another. Returns them if one of
        them, unknown which, broke the process.
        """
        if not groups:
            return ()
        seconds = self._timeout_seconds + (CANCEL_SECONDS if self._is_async else 0.0)
        request, began = {"groups": [group.message for group in groups]}, time.monotonic()
        try:
            answer = await process.call(request, seconds, groups[0].doing, ADVICE)
            answers = list(zip(groups, answer["groups"], strict=False))
            self._waiting.extendleft(reversed(groups[len(answers) :]))
            self._request_soon()
            for name, elapsed in answer["seconds"].items():
                self._seconds_by_function[name] = self._seconds_by_function.get(name, 0.0) + elapsed
        except CodeFailure as failure:
            elapsed = time.monotonic() - began
            if failure.is_shared or len(groups) > 1:
                for group in groups:
                    group.lost_seconds += elapsed
                return groups
            broken = {
                "failed": str(failure),
                "traceback": failure.traceback,
                "may_pass": False,
                "seconds": groups[0].lost_seconds + elapsed,
            }
            answers = [(groups[0], broken)]
        except Exception as error:
            for group in groups:
                if not group.answer.done():
                    group.answer.set_exception(error)
            return ()
        self._seconds = max(1e-6, (time.monotonic() - began) / len(answers))
        for group, scores in answers:
            if not group.answer.done():
                group.answer.set_result((scores, scores["seconds"]))
        return ()

    async def _take(self) -> CodeProcess:
        """Return a free process; start another if none is free within `GROW_SECONDS`."""
        if self._free.empty() and len(self._processes) < self._most:
            try:
                async with asyncio.timeout(GROW_SECONDS):
                    return await self._free.get()
            except TimeoutError:
                if len(self._processes) < self._most:
                    self._processes.append(CodeProcess(*self._process_arguments))
                    return self._processes[-1]
        return await self._free.get()

    def _all(self) -> list[CodeProcess]:
        return [*self._processes, *([self._alone] if self._alone is not None else [])]
