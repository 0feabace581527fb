"""Loads the function that `reward.functions` names, in either of two styles, as a function that scores one group.

* TRL's, one call a group: `reward(completions, prompts, completion_ids, <columns>, **others) -> list[float | None]`
* verl's, one a rollout: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": ...}`

An exception that a call in verl's style raises, or that a list holds in the place of a score, concerns one rollout.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echo2.core.errors import UserError, did_you_mean
from echo2.core.types import Rollout, Task
from echo2.reward.functions import BUILT_IN, unusable
from echo2.sandbox.plugins import load_named

VERL_PARAMETERS = ("solution_str", "ground_truth")
#: Rewards that are known before functions are called; a function receives them as `environment_reward` ...
GIVEN = ("environment", "judge")
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward function. `call(task, rollouts)` returns the result of the user's function, not yet checked; it should
    be one value for each rollout. `name`: used in metrics. `is_async`: the result must be awaited. `columns`: columns
    that the function requires; `ground_truth` may stand in `reward_model`, as in verl's rows. `takes_tokens`: whether
    it is passed the rollouts' tokens.
    """

    name: str
    call: Callable[[Task, Sequence[Rollout]], Any]
    is_async: bool = False
    columns: frozenset[str] = frozenset()
    takes_tokens: bool = False

    def missing_column(self, task: Task) -> str:
        """Return a required column that the task lacks; empty: it has all."""
        has = set(task.columns)
        if isinstance(nested := task.columns.get("reward_model"), Mapping):
            has |= nested.keys() & {"ground_truth"}
        return min(self.columns - has, default="")


def load_reward(spec: str) -> RewardFunction:
    """Load the function that `spec` names: a built-in, file.py:function or package.module:function.

    Raises:
        UserError: there is no such function, or its signature fits neither style.
    """
    if spec in BUILT_IN:
        if reason := unusable(spec):
            raise UserError(f"The reward {spec!r} {reason}")
        function: Callable[..., Any] = BUILT_IN[spec]
        signature = inspect.signature(function)
        call = _trl_style(function, signature, spec)
        return RewardFunction(spec, call, columns=_columns(signature))  # none of them reads tokens
    if ":" not in spec:
        hint = did_you_mean(spec, BUILT_IN)
        kinds = f"{', '.join(BUILT_IN)}, file.py:function or package.module:function"
        raise UserError(f"There is no reward {spec!r}.{hint} Write {kinds}.")
    function = load_named(spec)
    if not callable(function):
        raise UserError(f"The reward {spec} is not a function: its type is {type(function).__name__}.")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    signature = _signature(function, spec)
    if all(name in signature.parameters for name in VERL_PARAMETERS):
        call = _verl_style(function, signature, is_async)
        columns, takes_tokens = frozenset({"ground_truth"}), False
    else:
        call, columns = _trl_style(function, signature, spec), _columns(signature)
        takes_tokens = _takes_tokens(signature)
    return RewardFunction(spec.rpartition(":")[2], call, is_async, columns, takes_tokens)


def _takes_tokens(signature: inspect.Signature) -> bool:
    """Whether a function in TRL's style is passed `completion_ids`: by name, or among all others."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    return kinds.get("completion_ids") in _KEYWORD or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _columns(signature: inspect.Signature) -> frozenset[str]:
    """Parameters of a function in TRL's style that only a task's columns can fill."""
    required = {p.name for p in signature.parameters.values() if p.kind in _KEYWORD and p.default is p.empty}
    return frozenset(required - {"prompts", "completions", "completion_ids", *(f"{name}_reward" for name in GIVEN)})


def _signature(function: Callable[..., Any], spec: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"The reward {spec} does not show its parameters: {error}. Wrap it in a `def`.") from error


def _trl_style(
    function: Callable[..., Any], signature: inspect.Signature, spec: str
) -> Callable[[Task, Sequence[Rollout]], Any]:
    """Arguments are passed by name, as lists of one entry a rollout: those the function takes, or all with **kwargs."""
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
            raise UserError(f"takes {min(missing)!r}, a column that this task lacks (it has {sorted(task.columns)})")
        return function(**(arguments if takes_all else {name: arguments[name] for name in takes & arguments.keys()}))

    return call


def _trl_arguments(task: Task, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """TRL's keyword arguments. Each rollout gets its own copy of shared values, since a function may modify them."""
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    parts = {name: [one.reward_parts[name] for one in rollouts if name in one.reward_parts] for name in GIVEN}
    answers = [r.text if prompt is task.prompt else [{"role": "assistant", "content": r.text}] for r in rollouts]
    return {
        **{name: [copy.deepcopy(value) for _ in rollouts] for name, value in task.columns.items()},
        "prompts": [copy.deepcopy(prompt) for _ in rollouts],
        "completions": answers,
        "completion_ids": [r.tokens.tolist() for r in rollouts],
        **{f"{name}_reward": values for name, values in parts.items() if len(values) == len(rollouts)},
    }


def _verl_style(
    function: Callable[..., Any], signature: inspect.Signature, is_async: bool
) -> Callable[[Task, Sequence[Rollout]], Any]:
    """One call a rollout; asynchronous calls are awaited together."""

    def call(task: Task, rollouts: Sequence[Rollout]) -> Any:
        return [tried(**_verl_arguments(signature, task, rollout)) for rollout in rollouts]

    def tried(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except Exception as error:
            return error

    async def call_async(task: Task, rollouts: Sequence[Rollout]) -> Any:
        calls = [function(**_verl_arguments(signature, task, rollout)) for rollout in rollouts]
        return await asyncio.gather(*calls, return_exceptions=True)

    return call_async if is_async else call


def _verl_arguments(signature: inspect.Signature, task: Task, rollout: Rollout) -> dict[str, Any]:
    columns = copy.deepcopy(dict(task.columns))
    arguments = {
        "data_source": columns.get("data_source"),
        "solution_str": rollout.text,
        "ground_truth": _ground_truth(columns),
        "extra_info": columns.get("extra_info"),
    }
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    return arguments if takes_all else {n: v for n, v in arguments.items() if n in signature.parameters}


def _ground_truth(columns: Mapping[str, Any]) -> Any:
    """Return the ground truth: verl's rows hold it in `reward_model`, flat rows in a column of its own."""
    nested = columns.get("reward_model")
    truth = nested.get("ground_truth") if isinstance(nested, Mapping) else columns.get("ground_truth")
    if truth is None:
        raise UserError("needs reward_model.ground_truth or ground_truth, and this task has neither")
    return truth
