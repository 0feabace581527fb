"""From what a user writes under `reward.functions` to a function that scores one group, whichever of two styles it has.

* TRL's, one call a group: `reward(completions, prompts, completion_ids, <columns>, **others) -> list[float | None]`
* verl's, one an attempt: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": ...}`
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo2.errors import UserError, did_you_mean
from echo2.plugins import load_named
from echo2.reward.functions import BUILT_IN, unusable
from echo2.types import Rollout, Task

VERL_PARAMETERS = ("solution_str", "ground_truth")
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward. `call(task, rollouts)` gives whatever the user's function returned, not yet checked: if it is
    well-behaved, one value for each attempt. `name` is what metrics call it."""

    name: str
    call: Callable[[Task, Sequence[Rollout]], Any]


def load_reward(spec: str) -> RewardFunction:
    """Find the function that `spec` names: a built-in, file.py:function or package.module:function.

    Raises:
        UserError: there is no such function, it is asynchronous, or its signature fits neither style.
    """
    if spec in BUILT_IN:
        if reason := unusable(spec):
            raise UserError(f"The reward {spec!r} {reason}")
        function: Callable[..., Any] = BUILT_IN[spec]
        return RewardFunction(spec, _trl_style(function, inspect.signature(function), spec))
    if ":" not in spec:
        hint = did_you_mean(spec, BUILT_IN)
        kinds = f"{', '.join(BUILT_IN)}, file.py:function or package.module:function"
        raise UserError(f"There is no reward {spec!r}.{hint} Write {kinds}.")
    function = load_named(spec)
    if not callable(function):
        raise UserError(f"The reward {spec} is no function but {type(function).__name__}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise UserError(f"The reward {spec} is asynchronous. Make it a plain `def`: it runs in a process of its own.")
    signature = _signature(function, spec)
    style = _verl_style if all(name in signature.parameters for name in VERL_PARAMETERS) else _trl_style
    return RewardFunction(spec.rpartition(":")[2], style(function, signature, spec))


def _signature(function: Callable[..., Any], spec: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"The reward {spec} does not tell its parameters: {error}. Wrap it in a `def`.") from error


def _trl_style(
    function: Callable[..., Any], signature: inspect.Signature, spec: str
) -> Callable[[Task, Sequence[Rollout]], Any]:
    """Everything is passed by name, as lists of one entry an attempt: what the function takes, or all with **kwargs."""
    parameters = signature.parameters.values()
    takes = {parameter.name for parameter in parameters if parameter.kind in _KEYWORD}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    required = {p.name for p in parameters if p.kind in _KEYWORD and p.default is inspect.Parameter.empty}
    if "completions" not in takes and not takes_all:
        raise UserError(
            f"The reward {spec}{signature} fits neither style. Its parameters must be TRL's (completions, **columns) "
            "-> list[float], or verl's (data_source, solution_str, ground_truth, extra_info) -> float."
        )

    def call(task: Task, rollouts: Sequence[Rollout]) -> Any:
        arguments = _trl_arguments(task, rollouts)
        if missing := required - arguments.keys():
            raise UserError(f"takes {min(missing)!r}, a column this task has not (it has {sorted(task.columns)})")
        return function(**(arguments if takes_all else {name: arguments[name] for name in takes & arguments.keys()}))

    return call


def _trl_arguments(task: Task, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """TRL's keyword arguments. Each attempt gets a copy of what the group shares, for a function may write into it."""
    chat = not isinstance(task.prompt, str)
    played = [rollout.reward_parts["environment"] for rollout in rollouts if "environment" in rollout.reward_parts]
    return {
        **{name: [copy.deepcopy(value) for _ in rollouts] for name, value in task.columns.items()},
        "prompts": [_prompt(task) for _ in rollouts],
        "completions": [[{"role": "assistant", "content": r.text}] if chat else r.text for r in rollouts],
        "completion_ids": [r.tokens.tolist() for r in rollouts],
        **({"environment_reward": played} if len(played) == len(rollouts) else {}),
    }


def _prompt(task: Task) -> str | list[dict[str, str]]:
    if isinstance(task.prompt, str):
        return task.prompt
    return [{"role": message.role, "content": message.content} for message in task.prompt]


def _verl_style(
    function: Callable[..., Any], signature: inspect.Signature, spec: str
) -> Callable[[Task, Sequence[Rollout]], Any]:
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())

    def call(task: Task, rollouts: Sequence[Rollout]) -> Any:
        scores = []
        for rollout in rollouts:
            columns = copy.deepcopy(dict(task.columns))
            arguments = {
                "data_source": columns.get("data_source"),
                "solution_str": rollout.text,
                "ground_truth": _ground_truth(columns),
                "extra_info": columns.get("extra_info"),
            }
            known = arguments if takes_all else {n: v for n, v in arguments.items() if n in signature.parameters}
            score = function(**known)
            scores.append(score["score"] if isinstance(score, Mapping) and "score" in score else score)
        return scores

    return call


def _ground_truth(columns: Mapping[str, Any]) -> Any:
    """verl's rows hold it within `reward_model`; flat rows in a column of their own."""
    nested = columns.get("reward_model")
    found = nested.get("ground_truth") if isinstance(nested, Mapping) else columns.get("ground_truth")
    if found is None:
        raise UserError("needs reward_model.ground_truth or ground_truth, and this task has neither")
    return found
