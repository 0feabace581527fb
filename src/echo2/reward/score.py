"""Computes the rewards of one group: calls every function, checks every value, and sums them with weights.

    reward = sum over functions i of  weight_i * part_i          (a part that is None, "not applicable", is left out)

as in TRL's GRPOTrainer. A score is anything that `float` reads as one number, text aside: also NumPy's and torch's
scalars. If a function returns {"score": ..., more} for a rollout, as verl's may, its other numeric fields are kept
beside the parts as `function.field` and do not count. An exception in the place of a score, anything else that is no
score (NaN, text, an absurd number), and None of all functions are the `RewardFailure` of one rollout. A call that
raises, or returns something other than one value for each rollout, is that of the group.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from echo2.config.values import weighted
from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.core.types import Rollout, Task
from echo2.reward.load import RewardFunction, load_reward
from echo2.sandbox.plugins import innermost_line
from echo2.transport.limits import REWARD_MAX

#: Fields beside the score that are kept for one function.
FIELDS_MAX = 16
#: Exceptions that the next try raises, too: the program is wrong, not what it calls. Everything else is tried again,
#: also what a program makes of a service's bad answer (KeyError, ValueError).
FINAL = (
    *(TypeError, NameError, AttributeError, SyntaxError, ImportError, NotImplementedError, AssertionError),
    *(RecursionError, MemoryError, UserError),
)


class RewardFailure(UserError):
    """A reward function raised, hung, died or returned an invalid score. The message is for its author. `seconds`:
    duration of the scoring; `traceback`: the function's, if it raised; `may_pass`: another try may succeed;
    `cause`: what it is counted as."""

    cause = "reward_failed"

    def __init__(self, message: str, seconds: float = 0.0, traceback: str = "", may_pass: bool = False) -> None:
        super().__init__(message)
        self.seconds, self.traceback, self.may_pass = seconds, traceback, may_pass


#: One function's result for one rollout: the score (None: not applicable), and its other numeric fields.
_Score = tuple[float | None, dict[str, float]]
_Result = _Score | RewardFailure


class Scorer:
    """The run's reward functions, loaded, each with its weight: `entries` are those of `reward.functions`.

    Raises:
        UserError: a function that cannot be loaded, two with one name, or a weight that is not a number.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        weighted_names = [weighted(entry) for entry in entries]
        self._weights = [weight for weight, _ in weighted_names]
        self._functions = [load_reward(name) for _, name in weighted_names]
        self._seconds: dict[str, float] = {}
        names = [function.name for function in self._functions]
        if len(set(names)) < len(names):
            raise UserError(
                f"Two reward functions have one name, which metrics could not tell apart: {names}. Rename one."
            )

    @property
    def is_async(self) -> bool:
        """Whether any function is a coroutine function; if so, call `score_each_async`."""
        return any(function.is_async for function in self._functions)

    @property
    def takes_tokens(self) -> bool:
        """Whether any function is passed the rollouts' tokens."""
        return any(function.takes_tokens for function in self._functions)

    def take_seconds(self) -> dict[str, float]:
        """Return the functions' seconds since the last call of this, by name; concurrent calls each count in full."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def missing_columns(self, task: Task) -> list[tuple[str, str]]:
        """Return (function, column) for each function that needs a column that the task lacks."""
        columns = [(function.name, function.missing_column(task)) for function in self._functions]
        return [(name, column) for name, column in columns if column]

    def score_each(self, task: Task, rollouts: Sequence[Rollout]) -> tuple[Rollout | RewardFailure, ...]:
        """Return the rollouts with `reward_parts` and `reward` filled in, or the failure of a rollout's reward.

        Raises:
            RewardFailure: a function failed for the whole group.
        """
        return self._added(task, rollouts, [self._call(function, task, rollouts) for function in self._functions])

    async def score_each_async(self, task: Task, rollouts: Sequence[Rollout]) -> tuple[Rollout | RewardFailure, ...]:
        """As `score_each`; asynchronous functions are awaited together.

        Raises:
            RewardFailure: as `score_each`.
        """
        calls = [self._call_async(function, task, rollouts) for function in self._functions]
        try:
            values = await asyncio.gather(*calls)
        except asyncio.CancelledError as error:
            task_here = asyncio.current_task()
            if task_here is not None and task_here.cancelling():
                raise
            # The cancellation came out of a function whose own task group or judge was cancelled.
            names = ", ".join(function.name for function in self._functions)
            raise _failure(names, f"was cancelled at {innermost_line(error)}", task) from error
        return self._added(task, rollouts, values)

    def _added(
        self, task: Task, rollouts: Sequence[Rollout], values: Sequence[Sequence[_Result]]
    ) -> tuple[Rollout | RewardFailure, ...]:
        parts: list[dict[str, float]] = [{} for _ in rollouts]
        totals, failures = [0.0] * len(rollouts), dict[int, RewardFailure]()
        for function, weight, column in zip(self._functions, self._weights, values, strict=True):
            for i, result in enumerate(column):
                if isinstance(result, RewardFailure):
                    failures[i] = result
                elif result[0] is not None:
                    parts[i] |= {function.name: result[0], **result[1]}
                    totals[i] += weight * result[0]
        names = ", ".join(function.name for function in self._functions)
        for i, named_scores in enumerate(parts):
            if i in failures:
                continue
            if self._functions and not named_scores:
                failures[i] = _failure(names, f"returned None for rollout {i}: no function scores it", task)
            elif not abs(totals[i]) <= REWARD_MAX:  # also refuses NaN
                failures[i] = _failure(names, f"adds up to {totals[i]}; +-{REWARD_MAX:g} is the most", task)
        return tuple(
            failures.get(i) or replace(rollout, reward=totals[i], reward_parts=parts[i])
            for i, rollout in enumerate(rollouts)
        )

    def _call(self, function: RewardFunction, task: Task, rollouts: Sequence[Rollout]) -> list[_Result]:
        with self._timed(function), _blamed(function, task):
            returned = function.call(task, rollouts)
        return _checked(function, returned, task, rollouts)

    async def _call_async(self, function: RewardFunction, task: Task, rollouts: Sequence[Rollout]) -> list[_Result]:
        with self._timed(function), _blamed(function, task):
            returned = function.call(task, rollouts)
            if inspect.isawaitable(returned):
                returned = await returned
        return _checked(function, returned, task, rollouts)

    @contextmanager
    def _timed(self, function: RewardFunction) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[function.name] = self._seconds.get(function.name, 0.0) + seconds


@contextmanager
def _blamed(function: RewardFunction, task: Task) -> Iterator[None]:
    """Turn any exception of the function into its RewardFailure."""
    try:
        yield
    except Exception as error:
        raise _raised(function, error, task) from error


def _raised(function: RewardFunction, error: Exception, task: Task) -> RewardFailure:
    at = "at " if error.__traceback__ else ""  # one that was returned has no line
    problem = str(error) if isinstance(error, UserError) else f"raised {at}{innermost_line(error)}{_form(error, task)}"
    return _failure(function.name, problem, task, not isinstance(error, FINAL))


def _form(error: Exception, task: Task) -> str:
    """Return what completions look like, if the function seems to have taken them for the other form; else nothing."""
    is_text, message = isinstance(task.prompt, str), str(error)
    if not isinstance(error, TypeError | AttributeError):
        return ""
    if is_text:
        return " (prompts are texts, so each completion is a text)" if "string indices" in message else ""
    example = 'completion[0]["content"] is its text'
    return f" (prompts are chats, so each completion is a list of messages: {example})" if "list" in message else ""


def _checked(function: RewardFunction, returned: Any, task: Task, rollouts: Sequence[Rollout]) -> list[_Result]:
    values = _plain(returned)
    if not isinstance(values, list | tuple):
        raise _failure(function.name, f"returned {_named(returned)}, not a list of floats", task)
    if len(values) != len(rollouts):
        raise _failure(function.name, f"returned {len(values)} scores for {len(rollouts)} completions", task)
    return [_result(function, value, task) for value in values]


def _result(function: RewardFunction, value: Any, task: Task) -> _Result:
    """Return the function's score of one rollout. An invalid score fails this rollout."""
    if not isinstance(value, Exception):
        try:
            return _score(function.name, value, task)
        except RewardFailure as no_score:
            return no_score
    failure = _raised(function, value, task)
    failure.__cause__ = value
    return failure


def _score(name: str, value: Any, task: Task) -> _Score:
    if not isinstance(value, Mapping) or "score" not in value:
        return _number(name, value, task), {}
    named = {field: _float(one) for field, one in value.items() if field != "score" and str(field).isidentifier()}
    numbers = {f"{name}.{field}": one for field, one in named.items() if one is not None and abs(one) <= REWARD_MAX}
    return _number(name, value["score"], task), dict(itertools.islice(numbers.items(), FIELDS_MAX))


def _number(name: str, value: Any, task: Task) -> float | None:
    if value is None:
        return None
    score = _float(value)
    if score is None:
        raise _failure(name, f"returned {_named(value)} as a score, not a float or None", task)
    if not math.isfinite(score):
        raise _failure(
            name, f"returned {score} as a score; scores must be finite. Return None where it does not apply", task
        )
    if abs(score) > REWARD_MAX:
        raise _failure(name, f"returned {score:g} as a score; +-{REWARD_MAX:g} is the most. Scale it down", task)
    return score


def _float(value: Any) -> float | None:
    """Return a number, or an array or tensor without dimensions, as a float; None for anything else."""
    plain = _plain(value)
    if not hasattr(type(plain), "__float__"):  # text and lists have none
        return None
    try:
        return float(plain)
    except OverflowError:
        return math.inf
    except Exception:  # a type of the user's or of a library may raise anything
        return None


def _plain(value: Any) -> Any:
    """Return an array or tensor of NumPy or torch as numbers or lists, and anything else as it is."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except Exception:  # for example a tensor without storage
        return value


def _named(value: Any) -> str:
    try:
        return f"{shown(value)} ({type(value).__name__})"
    except Exception:  # of its repr
        return f"a value of the type {type(value).__name__}"


def _failure(name: str, problem: str, task: Task, may_pass: bool = False) -> RewardFailure:
    prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
    message = f"The reward function {name} {problem}. Prompt (task {task.cursor}): {shown(prompt)}"
    return RewardFailure(message, may_pass=may_pass)
