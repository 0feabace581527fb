"""From the rollouts of one group to their rewards: every function called, every value checked, one weighted sum.

    reward = sum over functions i of  weight_i * part_i          (a part that is None, "not applicable", is left out)

as in TRL's GRPOTrainer. What a function gets wrong is a `RewardFailure`: its group is not trained on, and nothing else
is lost.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from echo2.errors import UserError
from echo2.plugins import innermost_line
from echo2.reward.load import RewardFunction, load_reward
from echo2.types import Rollout, Task

PROMPT_CHARS_SHOWN = 120
#: Size of a score and of a reward: beyond it, one attempt would outweigh all the others of its step. As the wire's.
REWARD_MAX = 1e6


class RewardFailure(UserError):
    """A reward function raised, hung, died or returned what is no score. The message is for its author."""


class Scorer:
    """The run's reward functions, loaded, with a weight each (no weights: 1.0 each).

    Raises:
        UserError: no functions, a function that cannot be loaded, two of one name, or weights that don't fit.
    """

    def __init__(self, specs: Sequence[str], weights: Sequence[float] = ()) -> None:
        if not specs:
            raise UserError("reward.functions is empty: name at least one, e.g. exact_match.")
        if weights and len(weights) != len(specs):
            raise UserError(f"{len(weights)} reward.weights for {len(specs)} reward.functions: give one each, or none.")
        if not all(math.isfinite(weight) for weight in weights):
            raise UserError(f"reward.weights = {list(weights)}: they must be finite numbers.")
        self._functions = [load_reward(spec) for spec in specs]
        self._weights = list(weights) or [1.0] * len(specs)
        names = [function.name for function in self._functions]
        if len(set(names)) < len(names):
            raise UserError(
                f"Two reward functions have one name, which metrics could not tell apart: {names}. Rename one."
            )

    def score(self, task: Task, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """The same rollouts with `reward_parts` and `reward` filled in.

        Raises:
            RewardFailure: see there.
        """
        parts: list[dict[str, float]] = [{} for _ in rollouts]
        totals = [0.0] * len(rollouts)
        for function, weight in zip(self._functions, self._weights, strict=True):
            for i, value in enumerate(_call(function, task, rollouts)):
                if value is not None:
                    parts[i][function.name] = value
                    totals[i] += weight * value
        for i, found in enumerate(parts):
            if not found:
                raise _failure("reward", f"returned None for attempt {i}: no function scores this task", task)
            if not abs(totals[i]) <= REWARD_MAX:  # NaN is not, either
                raise _failure("reward", f"adds up to {totals[i]}; +-{REWARD_MAX:g} is the most", task)
        return tuple(
            replace(rollout, reward=total, reward_parts=found)
            for rollout, total, found in zip(rollouts, totals, parts, strict=True)
        )


def _call(function: RewardFunction, task: Task, rollouts: Sequence[Rollout]) -> list[float | None]:
    try:
        returned = function.call(task, rollouts)
    except UserError as error:
        raise _failure(function.name, str(error), task) from error
    except Exception as error:
        raise _failure(function.name, f"raised at {innermost_line(error)}", task) from error
    if hasattr(returned, "tolist"):  # numpy and torch
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise _failure(function.name, f"returned {_short(returned)}, not a list of floats", task)
    if len(returned) != len(rollouts):
        raise _failure(function.name, f"returned {len(returned)} scores for {len(rollouts)} completions", task)
    return [_number(function.name, value, task) for value in returned]


def _number(name: str, value: Any, task: Task) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise _failure(name, f"returned {_short(value)} ({type(value).__name__}) as a score, not a float or None", task)
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise _failure(
            name, f"returned {score} as a score; scores must be finite. Return None where it does not apply", task
        )
    if abs(score) > REWARD_MAX:
        raise _failure(name, f"returned {score:g} as a score; +-{REWARD_MAX:g} is the most. Scale it down", task)
    return score


def _failure(name: str, problem: str, task: Task) -> RewardFailure:
    prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
    return RewardFailure(f"The reward function {name} {problem}. Prompt (task {task.cursor}): {_short(prompt)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= PROMPT_CHARS_SHOWN else text[: PROMPT_CHARS_SHOWN - 3] + "..."
