"""Environments, which answer the policy's turns: the user's classes, loaded by name.

An environment is a class. Each rollout gets an instance of its own, `Class(columns, seed)`: the columns of the task's
row, and a seed that no other rollout has. The row's prompt is what the policy reads first, so all rollouts of a group
begin alike. Then, turn by turn,

    step(action) -> (text, reward, done)

takes the policy's text and returns the text that the policy reads next, the reward of this action (a rollout's rewards
add up), and whether the rollout is over. `async def step` is awaited, so that many rollouts can wait for slow work at
once; a plain `step` is called for one rollout at a time, in several processes if it is slow. The same columns, seed and
actions must always give the same answers. Two attributes are optional: `stop`, of the class, one ASCII character that
ends a turn (the end token always does), and `turn_tokens`, of the class or the instance, the longest turn in tokens.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from typing import Any

from echo2.errors import UserError
from echo2.printable import shown
from echo2.sandbox.plugins import innermost_line, load_named
from echo2.types import Reply

#: Bounds on one answer. A rollout's rewards may add up to no more (`rollout/turns.py`).
REPLY_CHARS_MAX = 1 << 18
REPLY_REWARD_MAX = 1e6


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
    """Instances of one environment class in this process, by number. Meant for a process that may be killed."""

    def __init__(self, spec: str) -> None:
        self._spec, self._kind = spec, load_environment(spec)
        self._rollouts: dict[int, Any] = {}
        self._next = 0

    @property
    def is_async(self) -> bool:
        """Whether `step` is a coroutine function."""
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
        """Forget a rollout."""
        self._rollouts.pop(rollout, None)

    def _failure(self, did: str, error: Exception) -> UserError:
        said = str(error) if isinstance(error, UserError) else innermost_line(error)
        return UserError(f"The environment {self._spec} {did}: {said}")

    def _checked(self, answer: Any) -> Reply:
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise UserError(f"The environment {self._spec} answered {shown(answer)}, not (text, reward, done).")
        text, reward, done = answer
        if not isinstance(text, str) or len(text) > REPLY_CHARS_MAX:
            what = f"{len(text)} characters" if isinstance(text, str) else shown(text)
            raise UserError(
                f"The environment {self._spec} said {what}; a text of {REPLY_CHARS_MAX} characters is the limit."
            )
        try:
            text.encode()
            value = float(reward)
        except (UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
            raise self._failure(f"answered {shown(answer)}", error) from error
        if not math.isfinite(value) or abs(value) > REPLY_REWARD_MAX:
            raise UserError(
                f"The environment {self._spec} gave the reward {value}; +-{REPLY_REWARD_MAX:g} is the limit."
            )
        return Reply(text, value, bool(done))
