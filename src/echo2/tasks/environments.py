"""Environments: what answers the policy's turns. Built in, or a class of the user's own by name.

An environment is a class. Each attempt gets an instance of its own, `Class(columns, seed)`: the columns of the task's
row, and a seed that no other attempt has. The row's prompt is what the policy reads first, so all attempts of a group
begin alike. Then, turn by turn,

    step(action) -> (text, reward, done)

takes what the policy wrote and gives what it reads next, the reward of this action (an attempt's rewards add up), and
whether the attempt is over. The same columns, seed and actions must always give the same answers. Two attributes are
optional: `stop`, of the class, one ASCII character that ends a turn (the end token always does), and `turn_tokens`, of
the class or the instance, the longest turn in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from echo2.errors import UserError, did_you_mean
from echo2.plugins import innermost_line, load_named
from echo2.tasks.sokoban import SokobanGame
from echo2.types import Reply

BUILT_IN: Mapping[str, Any] = {"sokoban": SokobanGame}
#: Bounds on one answer. An attempt's rewards may add up to no more (`rollout/turns.py`).
REPLY_CHARS_MAX = 1 << 18
REPLY_REWARD_MAX = 1e6


def load_environment(spec: str) -> Any:
    """The class that `spec` names: a built-in, file.py:Class or package.module:Class.

    Raises:
        UserError: there is no such class, or it is no environment.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if ":" not in spec:
        hint = did_you_mean(spec, BUILT_IN)
        kinds = f"{', '.join(BUILT_IN)}, file.py:Class or package.module:Class"
        raise UserError(f"There is no environment {spec!r}.{hint} Write {kinds}.")
    kind = load_named(spec)
    stop = getattr(kind, "stop", "")
    if not isinstance(kind, type) or not callable(getattr(kind, "step", None)):
        raise UserError(f"{spec} is no environment: it must be a class with step(action) -> (text, reward, done).")
    if not isinstance(stop, str) or len(stop) > 1 or not stop.isascii():
        raise UserError(f"{spec}: stop = {stop!r}. It must be one ASCII character, or empty.")
    return kind


class OpenWorld(Protocol):
    """A `World` of `rollout/turns.py`, to be closed."""

    @property
    def stop(self) -> str: ...

    def begin(self, columns: Mapping[str, Any], seed: int) -> int: ...

    def turn_tokens(self, attempt: int) -> int: ...

    def step(self, attempt: int, action: str) -> Reply: ...

    def end(self, attempt: int) -> None: ...

    def close(self) -> None: ...


class LocalWorld:
    """Environments of one kind, in this process (`rollout/turns.py` calls it a world). For code that is trusted to end:
    built-in, or inside a process that can be killed."""

    def __init__(self, spec: str) -> None:
        self._spec, self._kind = spec, load_environment(spec)
        self._attempts: dict[int, Any] = {}
        self._next = 0

    @property
    def stop(self) -> str:
        return str(getattr(self._kind, "stop", ""))

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        """A new attempt; its number.

        Raises:
            UserError: the class raised.
        """
        try:
            attempt = self._kind(columns, seed)
        except Exception as error:
            raise self._failure("raised", error) from error
        turn_tokens = getattr(attempt, "turn_tokens", 0)
        if not isinstance(turn_tokens, int) or turn_tokens < 0:
            raise UserError(f"{self._spec}: turn_tokens = {_short(turn_tokens)}. It must be a whole number >= 0.")
        self._next += 1
        self._attempts[self._next] = attempt
        return self._next

    def turn_tokens(self, attempt: int) -> int:
        return int(getattr(self._attempts[attempt], "turn_tokens", 0))

    def step(self, attempt: int, action: str) -> Reply:
        """What the environment answers.

        Raises:
            UserError: it raised, or answered what is no answer.
        """
        try:
            answer = self._attempts[attempt].step(action)
        except Exception as error:
            raise self._failure("raised", error) from error
        return self._checked(answer)

    def end(self, attempt: int) -> None:
        self._attempts.pop(attempt, None)

    def close(self) -> None:
        self._attempts.clear()

    def _failure(self, did: str, error: Exception) -> UserError:
        said = str(error) if isinstance(error, UserError) else innermost_line(error)
        return UserError(f"The environment {self._spec} {did}: {said}")

    def _checked(self, answer: Any) -> Reply:
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise UserError(f"The environment {self._spec} answered {_short(answer)}, not (text, reward, done).")
        text, reward, done = answer
        if not isinstance(text, str) or len(text) > REPLY_CHARS_MAX:
            what = f"{len(text)} characters" if isinstance(text, str) else _short(text)
            raise UserError(
                f"The environment {self._spec} said {what}; a text of {REPLY_CHARS_MAX} characters is the most."
            )
        try:
            text.encode()
            value = float(reward)
        except (UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
            raise self._failure(f"answered {_short(answer)}", error) from error
        if not math.isfinite(value) or abs(value) > REPLY_REWARD_MAX:
            raise UserError(
                f"The environment {self._spec} gave the reward {value}; +-{REPLY_REWARD_MAX:g} is the most."
            )
        return Reply(text, value, bool(done))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
