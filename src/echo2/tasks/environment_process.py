"""A run's environment in a separate process: it can stall a single call, but neither an engine nor the head.

`make_handler` is what runs inside (`sandbox/child.py`). A call that takes too long is killed with
everything it started, a process that dies is replaced, and either costs the group that made the call. The other
rollouts go on: environments are deterministic, so each is begun anew in the next process and its actions done again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from echo2.errors import UserError
from echo2.sandbox.child import Handler
from echo2.sandbox.process import CodeFailure, CodeProcess
from echo2.tasks.environments import LocalEnvironment
from echo2.types import Reply

log = logging.getLogger(__name__)

CALL_SECONDS = 30.0  # to begin a rollout, or to answer an action
GRACE_SECONDS = 5.0  # for an asynchronous one to be given up alone, before its process is killed
DEATHS_MAX = 3  # of the process by other rollouts' code, that one call outlives
T = TypeVar("T")


@dataclass(slots=True)
class Begun:
    """What it takes to begin a rollout anew. `inside`: the process that has it, and its number there."""

    columns: Mapping[str, Any]
    seed: int
    actions: list[str] = field(default_factory=list)
    inside: tuple[int, int] | None = None
    turn_tokens: int = 0


class EnvironmentProcess:
    """An `Environment` of `rollout/turns.py`: instances of one class in a child process, which is started at the first
    call. For one event loop. The child takes one call after the other, or, where `step` is `async def`, all that there
    are at once. A call that nobody awaits any more goes on: else
    the child would have to be killed for a rollout that was given up."""

    def __init__(self, spec: str, call_seconds: float = CALL_SECONDS) -> None:
        self._spec, self._call_seconds = spec, call_seconds
        setup = {"spec": spec, "call_seconds": call_seconds}
        name = f"The process of the environment {spec}"
        self._process = CodeProcess(name, "echo2.tasks.environment_process:make_handler", setup)
        self._alone = asyncio.Lock()
        self._turn: AbstractAsyncContextManager[Any] = self._alone
        self._under_way: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def start(self) -> str:
        """Start the child unless it runs; the character that ends a turn beside the end token (empty: none).

        Raises:
            UserError: the environment cannot be loaded; the message says why.
        """
        self._check_open()
        said = await self._process.start()
        if said["is_async"]:
            self._turn = nullcontext()
        return str(said["stop"])

    def begin(self, columns: Mapping[str, Any], seed: int) -> Begun:
        """A new rollout. Its instance is made when it is first asked for something."""
        return Begun(columns, seed)

    async def turn_tokens(self, rollout: Begun) -> int:
        """The longest turn of a rollout in tokens (0: no limit of its own).

        Raises:
            UserError: the class raised, hung, or ended its process.
        """
        await self._finished(self._begin(rollout))
        return rollout.turn_tokens

    async def step(self, rollout: Begun, action: str) -> Reply:
        """What the environment answers.

        Raises:
            UserError: it raised, hung, ended its process, or answered what is no answer.
        """
        return await self._finished(self._step(rollout, action))

    def end(self, rollout: Begun) -> None:
        """Forget a rollout. A process that is found dead or hanging here is replaced at the next call."""
        self._finished(self._end(rollout))

    async def close(self) -> None:
        """End the child; whatever it was doing is abandoned."""
        self._closed = True
        await self._process.close()  # a call under way ends by it
        async with self._alone:
            await self._process.close()  # it was being started then

    async def _begin(self, rollout: Begun) -> None:
        async with self._turn:
            await self._outlived(partial(self._number, rollout))

    async def _step(self, rollout: Begun, action: str) -> Reply:
        async def step() -> dict[str, Any]:
            return await self._call({"step": await self._number(rollout), "action": action})

        async with self._turn:
            answer = await self._outlived(step)
            rollout.actions.append(action)
            return Reply(answer["text"], answer["reward"], answer["done"])

    async def _outlived(self, work: Callable[[], Awaitable[T]]) -> T:
        """The outcome of this work, done again where another rollout's code ended the process."""
        for _ in range(DEATHS_MAX):
            try:
                return await work()
            except CodeFailure as error:
                if not error.is_shared or self._closed:
                    raise
        return await work()

    async def _end(self, rollout: Begun) -> None:
        async with self._turn:
            if rollout.inside is not None and self._is_inside(rollout.inside) and not self._closed:
                try:
                    await self._call({"end": rollout.inside[1]})
                except UserError as error:
                    log.warning("%s", error)

    async def _number(self, rollout: Begun) -> int:
        """The rollout's number in the process that runs now."""
        if rollout.inside is None or not self._is_inside(rollout.inside):
            begun = await self._call({"begin": dict(rollout.columns), "seed": rollout.seed})
            number, rollout.turn_tokens = begun["number"], begun["turn_tokens"]
            rollout.inside = (self._process.num_started, number)
            for action in rollout.actions:
                await self._call({"step": number, "action": action})
        return rollout.inside[1]

    def _is_inside(self, inside: tuple[int, int]) -> bool:
        """Whether the process that runs now is that one."""
        return self._process.pid is not None and inside[0] == self._process.num_started

    async def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_open()
        seconds = self._call_seconds + (0.0 if self._turn is self._alone else GRACE_SECONDS)
        return await self._process.call(request, seconds, f"answering {next(iter(request))!r}")

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"The environment {self._spec} is closed: its worker or head ends.")

    def _finished(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The outcome of this work, which goes on though nobody awaits it any more."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask
        return asyncio.shield(task)


def make_handler(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """For `sandbox/child.py`: {"begin": columns, "seed"} is answered by {"number", "turn_tokens"}, {"step": number,
    "action"} by {"text", "reward", "done"}, {"end": number} by {}.

    Raises:
        UserError: the environment cannot be loaded.
    """
    environment = LocalEnvironment(setup["spec"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "begin" in request:
            number = environment.begin(request["begin"], request["seed"])
            return {"number": number, "turn_tokens": environment.turn_tokens(number)}
        if "step" in request:
            return asdict(environment.step(request["step"], request["action"]))
        environment.end(request["end"])
        return {}

    async def answer_later(request: dict[str, Any]) -> dict[str, Any]:
        if "step" in request:
            return asdict(await environment.step_async(request["step"], request["action"], setup["call_seconds"]))
        return answer(request)

    said = {"stop": environment.stop, "is_async": environment.is_async}
    return answer_later if environment.is_async else answer, said
