"""A run's harness in a separate process: it plays many rollouts at once, and calls each rollout's model over HTTP.

`tasks.environment` names it: `harness:file.py:Class`, `harness:package.module:Class`, `harbor`, `verifiers`, or
`openenv:http://HOST:PORT`. The last two are packages with conflicting pins, each in a separate Python. A rollout that
takes too long is given up alone. A process that dies or hangs is replaced, and the other rollouts that it was playing
begin again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

from echo2.core.background import spawn, unforeseen
from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.sandbox.child import Handler
from echo2.sandbox.code_process import CodeProcess
from echo2.sandbox.containers import FAULTS
from echo2.sandbox.plugins import innermost_line, load_named, own_python
from echo2.sandbox.programs import ContainerFault
from echo2.tasks.loopback_model import LoopbackModel, OutOfRoomError, Play, is_out_of_room

log = logging.getLogger(__name__)

OWN, HARBOR, VERIFIERS, OPENENV = "harness:", "harbor", "verifiers", "openenv:"
#: Time that a rollout may take beyond its own limit before its process is killed.
GRACE_SECONDS = 30.0


def is_harness(environment: str) -> bool:
    """Whether `tasks.environment` names a harness, which calls the model by itself."""
    return environment in (HARBOR, VERIFIERS) or environment.startswith((OWN, OPENENV))


class HarnessProcess:
    """A `Harness` of `rollouts/harness.py`, in a child process. For one event loop."""

    def __init__(self, spec: str) -> None:
        entry = "echo2.tasks.harness_process:make_handler"
        name = f"The process of {spec}"
        python = sys.executable if spec == HARBOR or spec.startswith(OWN) else own_python(spec.partition(":")[0])
        self._process = CodeProcess(name, entry, {"spec": spec}, python=python)

    async def start(self) -> None:
        """Start the child unless it runs.

        Raises:
            UserError: the harness cannot be loaded; the message says why.
        """
        await self._process.start()

    async def play(self, columns: Mapping[str, Any], seed: int, model: Mapping[str, str], seconds: float) -> float:
        """Play one rollout; return its reward. If the caller is cancelled, it goes on until its next call of the model.

        Raises:
            OutOfRoomError: it ended with a call that was refused for lack of room.
            UserError: the rollout failed, took over `seconds`, or its process died.
        """
        request = {"columns": dict(columns), "seed": seed, "model": dict(model), "seconds": seconds}
        playing = self._process.call(request, seconds + GRACE_SECONDS, "playing a rollout")
        call = spawn(playing, unforeseen(log, "playing a rollout"))  # its caller may be gone
        answer = await asyncio.shield(call)
        if "cut" in answer:
            raise OutOfRoomError(answer["cut"])
        reward: float = answer["reward"]
        return reward

    async def close(self) -> None:
        """End the child; rollouts under way are abandoned."""
        await self._process.close()


def make_handler(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """Make the handler for `sandbox/child.py`. It answers {"columns", "seed", "model", "seconds"} by {"reward"},
    or, if the play ends with the refusal of a call for lack of room, by {"cut": why}.

    Raises:
        UserError: the harness cannot be loaded.
    """
    spec = setup["spec"]
    play = load_harness(spec)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        seconds, faults = request["seconds"], list[ContainerFault]()
        FAULTS.set(faults)  # of this asyncio task, and those that it starts
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                reward: Any = await play(request["columns"], request["seed"], LoopbackModel(**request["model"]))
            if not faults:
                return {"reward": _number(spec, reward)}
        except Exception as error:
            if limit.expired():
                raise UserError(f"{spec} took longer than {seconds:g} s over a rollout.") from error
            if not faults:
                if is_out_of_room(error):
                    return {"cut": str(error)}
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{spec} raised: {innermost_line(error)}") from error
        raise faults[0]

    return answer, {}


def _number(spec: str, reward: Any) -> float:
    is_number = hasattr(type(reward), "__float__")  # text and lists have none
    if not is_number or not math.isfinite(number := float(reward)):
        raise UserError(f"{spec} returned {shown(reward)} as its reward. Return a finite number from `run`.")
    return number


def load_harness(spec: str) -> Play:
    """Return the function that plays a rollout with the harness `spec`.

    Raises:
        UserError: there is no such class, or it is not a harness.
    """
    if spec == VERIFIERS:
        from echo2.tasks import verifiers_play

        return verifiers_play.make_play()
    if spec == HARBOR:
        from echo2.tasks import harbor_play

        return harbor_play.make_play()
    if spec.startswith(OPENENV):
        from echo2.tasks import openenv_play

        return openenv_play.make_play(spec.removeprefix(OPENENV))
    kind = load_named(spec.removeprefix(OWN))
    if not isinstance(kind, type) or not inspect.iscoroutinefunction(getattr(kind, "run", None)):
        raise UserError(f"{spec}: it must be a class with `async def run(self, model) -> reward`.")

    async def play(columns: Mapping[str, Any], seed: int, model: LoopbackModel) -> float:
        reward: float = await kind(columns, seed).run(model)
        return reward

    return play
