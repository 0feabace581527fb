"""Environments, which answer the policy's turns: the user's classes, loaded by name, run in child processes.

An environment is a class. Each rollout gets an instance of its own, `Class(columns, seed)`: the columns of the task's
row, and a seed that no other rollout has. The row's prompt is what the policy reads first, so all rollouts of a group
begin alike. Then, turn by turn,

    step(action) -> (text, reward, done)

takes the policy's text and returns the text that the policy reads next, the reward of this action (a rollout's rewards
add up), and whether the rollout is over. `async def step` is awaited, so that many rollouts can wait for slow work at
once; a plain `step` is called for one rollout at a time, in several processes if it is slow. The same columns, seed and
actions must always give the same answers. Two attributes are optional: `stop`, of the class, one ASCII character that
ends a turn (the end token always does), and `turn_tokens`, of the class or the instance, the longest turn in tokens.

An environment can stall a single call, but neither an engine nor the head. `make_handler` runs inside the child
(`sandbox/child.py`). A call that takes too long is killed with everything it started, a process that dies is replaced,
and either costs the rollout that made the call. The other rollouts continue: environments are deterministic, so each
rollout is begun again in the next process and its actions are replayed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from echo2.core.background import Background, unforeseen
from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.core.types import Reply
from echo2.sandbox.child import Handler
from echo2.sandbox.code_process import CodeFailure, CodeProcess
from echo2.sandbox.plugins import innermost_line, load_named
from echo2.tasks.process_pool import Member, ProcessPool
from echo2.transport.limits import REWARD_MAX

log = logging.getLogger(__name__)

REPLY_CHARS_MAX = 1 << 18  # kept of an answer's text; the middle of a longer one is left out
CALL_SECONDS = 30.0  # limit on beginning a rollout, or on answering an action
GRACE_SECONDS = 5.0  # for an asynchronous call to be cancelled alone, before its process is killed
DEATHS_MAX = 3  # process deaths caused by other rollouts' code that one call survives
T = TypeVar("T")


def load_environment(spec: str) -> Any:
    """Load the class that `spec` names: file.py:Class or package.module:Class.

    Raises:
        UserError: there is no such class, or it is not an environment.
    """
    kind = load_named(spec)
    stop = getattr(kind, "stop", "")
    if not isinstance(kind, type) or not callable(getattr(kind, "step", None)):
        raise UserError(f"{spec} is not an environment: it must be a class with step(action) -> (text, reward, done).")
    if not isinstance(stop, str) or len(stop) > 1 or not stop.isascii():
        raise UserError(f"{spec}: stop = {stop!r}. It must be one ASCII character, or empty.")
    return kind


class LocalEnvironment:
    """Instances of one environment class in this process, by number, for a process that may be killed."""

    def __init__(self, spec: str) -> None:
        self._spec, self._kind = spec, load_environment(spec)
        self._rollouts: dict[int, Any] = {}
        self._next = 0

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._kind.step)

    @property
    def stop(self) -> str:
        """The character that ends a turn besides the end token (empty: none)."""
        return str(getattr(self._kind, "stop", ""))

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        """Begin a rollout; returns its number.

        Raises:
            UserError: the class raised, or its `turn_tokens` is invalid.
        """
        try:
            rollout = self._kind(columns, seed)
        except Exception as error:
            raise self._failure("raised", error) from error
        turn_tokens = getattr(rollout, "turn_tokens", 0)
        if not isinstance(turn_tokens, int) or turn_tokens < 0:
            raise UserError(f"{self._spec}: turn_tokens = {shown(turn_tokens)}. It must be a whole number >= 0.")
        self._next += 1
        self._rollouts[self._next] = rollout
        return self._next

    def turn_tokens(self, rollout: int) -> int:
        """The longest turn of a rollout in tokens (0: no limit of its own)."""
        return int(getattr(self._rollouts[rollout], "turn_tokens", 0))

    def step(self, rollout: int, action: str) -> Reply:
        """Return the environment's answer to an action.

        Raises:
            UserError: the environment raised, or gave an invalid answer.
        """
        try:
            answer = self._rollouts[rollout].step(action)
        except Exception as error:
            raise self._failure("raised", error) from error
        return self._checked(answer)

    async def step_async(self, rollout: int, action: str, seconds: float) -> Reply:
        """As `step`, for an asynchronous environment.

        Raises:
            UserError: as `step`, or the step took over `seconds`.
        """
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                answer = await self._rollouts[rollout].step(action)
        except Exception as error:
            if limit.expired():
                raise UserError(f"The environment {self._spec} took longer than {seconds:g} s over a step.") from error
            raise self._failure("raised", error) from error
        return self._checked(answer)

    def end(self, rollout: int) -> None:
        self._rollouts.pop(rollout, None)

    def _failure(self, did: str, error: Exception) -> UserError:
        problem = str(error) if isinstance(error, UserError) else innermost_line(error)
        return UserError(f"The environment {self._spec} {did}: {problem}")

    def _checked(self, answer: Any) -> Reply:
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise UserError(f"The environment {self._spec} answered {shown(answer)}, not (text, reward, done).")
        text, reward, done = answer
        if not isinstance(text, str):
            raise UserError(f"The environment {self._spec} said {shown(text)}, which is no text.")
        try:
            text = _fitting(text)
            text.encode()
            value = float(reward)
        except (UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
            raise self._failure(f"answered {shown(answer)}", error) from error
        if not math.isfinite(value) or abs(value) > REWARD_MAX:
            raise UserError(f"The environment {self._spec} gave the reward {value}; +-{REWARD_MAX:g} is the limit.")
        return Reply(text, value, bool(done))


def _fitting(text: str) -> str:
    """Return a text without the middle of what is too long, as the output of a command: the same wherever it is said
    again."""
    half = REPLY_CHARS_MAX // 2
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


@dataclass(slots=True)
class RolloutHandle:
    """A rollout, with all that is needed to begin it again. `member`: the process that holds it; `life`: how many times
    that process had been started (0: not begun); `number`: the rollout's number in that process; `seconds`: of its
    ended calls; `called_at`: when the call under way began."""

    columns: Mapping[str, Any]
    seed: int
    actions: list[str] = field(default_factory=list)
    turn_tokens: int = 0
    member: Member | None = None
    life: int = 0
    number: int = 0
    is_over: bool = False
    seconds: float = 0.0
    called_at: float | None = None

    def spent_seconds(self) -> float:
        """Seconds that its calls have held a process so far; of an asynchronous environment: that they have waited."""
        return self.seconds + (0.0 if self.called_at is None else time.monotonic() - self.called_at)


class EnvironmentProcess:
    """An `Environment` of `rollouts/turns.py`: instances of one class in child processes, the first of which starts at
    the first call. For one event loop. A child takes one call at a time, and slow calls are spread over more children
    (`process_pool.py`); if `step` is `async def`, one child takes all calls at once. A call continues when its caller
    is cancelled: stopping it would mean killing the child for one abandoned rollout."""

    def __init__(self, spec: str, call_seconds: float = CALL_SECONDS) -> None:
        self._spec, self._call_seconds = spec, call_seconds
        setup = {"spec": spec, "call_seconds": call_seconds}
        name = f"The process of the environment {spec}"
        entry = "echo2.tasks.environments:make_handler"
        self._pool = ProcessPool(lambda: CodeProcess(name, entry, setup))
        self._is_async = False
        self._under_way = Background(unforeseen(log, f"the environment {spec}"))
        self._closed = False

    async def start(self) -> str:
        """Start a child unless it runs; returns the character that ends a turn besides the end token (empty: none).

        Raises:
            UserError: the environment cannot be loaded; the message says why.
        """
        self._check_open()
        facts = await self._pool.members[0].process.start()
        self._is_async = bool(facts["is_async"])
        return str(facts["stop"])

    def begin(self, columns: Mapping[str, Any], seed: int) -> RolloutHandle:
        """Return a new rollout. Its instance is created at its first call."""
        return RolloutHandle(columns, seed)

    async def turn_tokens(self, rollout: RolloutHandle) -> int:
        """Return the longest turn of a rollout in tokens (0: no limit of its own).

        Raises:
            UserError: the class raised, hung, or ended its process.
        """
        await self._finished(self._begin(rollout))
        return rollout.turn_tokens

    async def step(self, rollout: RolloutHandle, action: str) -> Reply:
        """Return the environment's answer to an action.

        Raises:
            UserError: the environment raised, hung, ended its process, or gave an invalid answer.
        """
        return await self._finished(self._step(rollout, action))

    def end(self, rollout: RolloutHandle) -> None:
        """Forget a rollout. A process that is found dead or hanging here is replaced at the next call."""
        rollout.is_over = True
        self._finished(self._end(rollout))

    async def close(self) -> None:
        """End the children; calls under way are abandoned."""
        self._closed = True
        await self._pool.close()  # calls under way fail with their processes
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    def _acquire(self, member: Member | None, is_bound: bool = True) -> AbstractAsyncContextManager[Member]:
        """Return a context that holds a process for one call: `member` if the rollout is bound to it."""
        return nullcontext(self._pool.members[0]) if self._is_async else self._pool.acquire(member, is_bound)

    async def _begin(self, rollout: RolloutHandle) -> None:
        async with self._acquire(rollout.member, is_bound=False) as member:
            await self._outlived(partial(self._number, rollout, member))

    async def _step(self, rollout: RolloutHandle, action: str) -> Reply:
        async def step() -> dict[str, Any]:
            number = await self._number(rollout, member)
            return await self._called(rollout, member, {"step": number, "action": action})

        # Before its first action, a rollout can be begun in any process.
        async with self._acquire(rollout.member, is_bound=bool(rollout.actions)) as member:
            answer = await self._outlived(step)
            rollout.actions.append(action)
            return Reply(answer["text"], answer["reward"], answer["done"])

    async def _outlived(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, retried if another rollout's code may have ended the process."""
        for _ in range(DEATHS_MAX):
            try:
                return await work()
            except CodeFailure as error:
                if not error.is_shared or self._closed:
                    raise
        return await work()

    async def _number(self, rollout: RolloutHandle, member: Member) -> int:
        """Return the rollout's number in this process; begin it there and replay its actions if need be."""
        if rollout.is_over:
            raise UserError("This rollout was given up.")  # while this call waited; its caller is gone
        if rollout.member is not member or not _runs(member, rollout.life):
            if rollout.member is not None:
                self._finished(self._forget(rollout.member, rollout.life, rollout.number))
            rollout.member, rollout.life = member, 0
            member.num_rollouts += 1
            begun = await self._called(rollout, member, {"begin": dict(rollout.columns), "seed": rollout.seed})
            rollout.number, rollout.turn_tokens = begun["number"], begun["turn_tokens"]
            rollout.life = member.process.num_started
            for action in rollout.actions:
                await self._called(rollout, member, {"step": rollout.number, "action": action})
        return rollout.number

    async def _end(self, rollout: RolloutHandle) -> None:
        if rollout.member is not None:
            async with self._acquire(rollout.member):  # wait for an abandoned step of this rollout
                pass
            await self._forget(rollout.member, rollout.life, rollout.number)

    async def _forget(self, member: Member, life: int, number: int) -> None:
        member.num_rollouts -= 1
        async with self._acquire(member):
            if _runs(member, life) and not self._closed:
                try:
                    await self._call(member, {"end": number})
                except UserError as error:
                    if not self._closed:
                        log.warning("%s", error)

    async def _called(self, rollout: RolloutHandle, member: Member, request: dict[str, Any]) -> dict[str, Any]:
        rollout.called_at = time.monotonic()
        try:
            return await self._call(member, request)
        finally:
            rollout.seconds, rollout.called_at = rollout.spent_seconds(), None

    async def _call(self, member: Member, request: dict[str, Any]) -> dict[str, Any]:
        self._check_open()
        seconds = self._call_seconds + (GRACE_SECONDS if self._is_async else 0.0)
        answer = await member.process.call(request, seconds, f"answering {next(iter(request))!r}")
        self._pool.observe(answer.get("seconds", 0.0), answer.get("cpu_seconds", 0.0))
        return answer

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"The environment {self._spec} is closed: its worker or head ends.")

    def _finished(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` to its end even if the caller is cancelled."""
        return asyncio.shield(self._under_way.spawn(work))


def _runs(member: Member, life: int) -> bool:
    """Whether a process runs and has not been restarted since `life`."""
    return member.process.pid is not None and life == member.process.num_started


def make_handler(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """Make the handler for `sandbox/child.py`. It answers {"begin": columns, "seed"} by {"number", "turn_tokens"},
    {"step": number, "action"} by {"text", "reward", "done"}, and {"end": number} by {}. Answers of a synchronous
    environment also have "seconds" and "cpu_seconds".

    Raises:
        UserError: the environment cannot be loaded.
    """
    environment = LocalEnvironment(setup["spec"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        began, cpu_seconds = time.perf_counter(), _cpu_seconds()
        if "begin" in request:
            number = environment.begin(request["begin"], request["seed"])
            facts = {"number": number, "turn_tokens": environment.turn_tokens(number)}
        elif "step" in request:
            facts = asdict(environment.step(request["step"], request["action"]))
        else:
            environment.end(request["end"])
            facts = {}
        return facts | {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - cpu_seconds}

    async def answer_later(request: dict[str, Any]) -> dict[str, Any]:
        if "step" in request:
            return asdict(await environment.step_async(request["step"], request["action"], setup["call_seconds"]))
        return answer(request)

    facts = {"stop": environment.stop, "is_async": environment.is_async}
    return answer_later if environment.is_async else answer, facts


def _cpu_seconds() -> float:
    """CPU seconds used by this process and by its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
