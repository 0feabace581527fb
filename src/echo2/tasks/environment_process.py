"""A run's environment in child processes: it can stall a single call, but neither an engine nor the head.

`make_handler` runs inside the child (`sandbox/child.py`). A call that takes too long is killed with everything it
started, a process that dies is replaced, and either costs the group that made the call. The other rollouts continue:
environments are deterministic, so each rollout is begun again in the next process and its actions are replayed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from echo2.background import spawn, unforeseen
from echo2.errors import UserError
from echo2.sandbox.child import Handler
from echo2.sandbox.process import CodeFailure, CodeProcess
from echo2.tasks.environments import LocalEnvironment
from echo2.tasks.process_pool import Member, ProcessPool
from echo2.types import Reply

log = logging.getLogger(__name__)

CALL_SECONDS = 30.0  # limit on beginning a rollout, or on answering an action
GRACE_SECONDS = 5.0  # for an asynchronous call to be cancelled alone, before its process is killed
DEATHS_MAX = 3  # process deaths caused by other rollouts' code that one call survives
T = TypeVar("T")


@dataclass(slots=True)
class Begun:
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
    """An `Environment` of `rollout/turns.py`: instances of one class in child processes, the first of which starts at
    the first call. For one event loop. A child takes one call at a time, and slow calls are spread over more children
    (`process_pool.py`); if `step` is `async def`, one child takes all calls at once. A call continues when its caller
    is cancelled: stopping it would mean killing the child for one abandoned rollout."""

    def __init__(self, spec: str, call_seconds: float = CALL_SECONDS) -> None:
        self._spec, self._call_seconds = spec, call_seconds
        setup = {"spec": spec, "call_seconds": call_seconds}
        name = f"The process of the environment {spec}"
        entry = "echo2.tasks.environment_process:make_handler"
        self._pool = ProcessPool(lambda: CodeProcess(name, entry, setup))
        self._is_async = False
        self._under_way: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def start(self) -> str:
        """Start a child unless it runs; returns the character that ends a turn besides the end token (empty: none).

        Raises:
            UserError: the environment cannot be loaded; the message says why.
        """
        self._check_open()
        said = await self._pool.members[0].process.start()
        self._is_async = bool(said["is_async"])
        return str(said["stop"])

    def begin(self, columns: Mapping[str, Any], seed: int) -> Begun:
        """Return a new rollout. Its instance is created at its first call."""
        return Begun(columns, seed)

    async def turn_tokens(self, rollout: Begun) -> int:
        """Return the longest turn of a rollout in tokens (0: no limit of its own).

        Raises:
            UserError: the class raised, hung, or ended its process.
        """
        await self._finished(self._begin(rollout))
        return rollout.turn_tokens

    async def step(self, rollout: Begun, action: str) -> Reply:
        """Return the environment's answer to an action.

        Raises:
            UserError: the environment raised, hung, ended its process, or gave an invalid answer.
        """
        return await self._finished(self._step(rollout, action))

    def end(self, rollout: Begun) -> None:
        """Forget a rollout. A process that is found dead or hanging here is replaced at the next call."""
        rollout.is_over = True
        self._finished(self._end(rollout))

    async def close(self) -> None:
        """End the children; calls under way are abandoned."""
        self._closed = True
        await self._pool.close()  # calls under way fail with their processes
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    def _turn(self, member: Member | None, is_bound: bool = True) -> AbstractAsyncContextManager[Member]:
        """Return a context that holds a process for one call: `member` if the rollout is bound to it."""
        return nullcontext(self._pool.members[0]) if self._is_async else self._pool.turn(member, is_bound)

    async def _begin(self, rollout: Begun) -> None:
        async with self._turn(rollout.member, is_bound=False) as member:
            await self._outlived(partial(self._number, rollout, member))

    async def _step(self, rollout: Begun, action: str) -> Reply:
        async def step() -> dict[str, Any]:
            number = await self._number(rollout, member)
            return await self._called(rollout, member, {"step": number, "action": action})

        # Before its first action, a rollout can be begun in any process.
        async with self._turn(rollout.member, is_bound=bool(rollout.actions)) as member:
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

    async def _number(self, rollout: Begun, member: Member) -> int:
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

    async def _end(self, rollout: Begun) -> None:
        if rollout.member is not None:
            async with self._turn(rollout.member):  # wait for an abandoned step of this rollout
                pass
            await self._forget(rollout.member, rollout.life, rollout.number)

    async def _forget(self, member: Member, life: int, number: int) -> None:
        """Make a process forget a rollout."""
        member.num_rollouts -= 1
        async with self._turn(member):
            if _runs(member, life) and not self._closed:
                try:
                    await self._call(member, {"end": number})
                except UserError as error:
                    if not self._closed:
                        log.warning("%s", error)

    async def _called(self, rollout: Begun, member: Member, request: dict[str, Any]) -> dict[str, Any]:
        """Make a call of this rollout, and count its seconds."""
        rollout.called_at = time.monotonic()
        try:
            return await self._call(member, request)
        finally:
            rollout.seconds, rollout.called_at = rollout.spent_seconds(), None

    async def _call(self, member: Member, request: dict[str, Any]) -> dict[str, Any]:
        self._check_open()
        seconds = self._call_seconds + (GRACE_SECONDS if self._is_async else 0.0)
        answer = await member.process.call(request, seconds, f"answering {next(iter(request))!r}")
        self._pool.took(answer.get("seconds", 0.0), answer.get("cpu_seconds", 0.0))
        return answer

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"The environment {self._spec} is closed: its worker or head ends.")

    def _finished(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` to its end even if the caller is cancelled."""
        task = spawn(work, unforeseen(log, f"the environment {self._spec}"))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return asyncio.shield(task)


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
            said = {"number": number, "turn_tokens": environment.turn_tokens(number)}
        elif "step" in request:
            said = asdict(environment.step(request["step"], request["action"]))
        else:
            environment.end(request["end"])
            said = {}
        return said | {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - cpu_seconds}

    async def answer_later(request: dict[str, Any]) -> dict[str, Any]:
        if "step" in request:
            return asdict(await environment.step_async(request["step"], request["action"], setup["call_seconds"]))
        return answer(request)

    said = {"stop": environment.stop, "is_async": environment.is_async}
    return answer_later if environment.is_async else answer, said


def _cpu_seconds() -> float:
    """CPU seconds used by this process and by its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
