"""Built-in rewards, in TRL's signature: `reward(completions, **columns) -> list[float | None]`, one number a rollout.

Matches score 1.0 for right and 0.0 for wrong against the column `answer`. reasoning_gym reads a column of its own and
may give partial credit; `environment`, `judge` and `logged` pass on given rewards. A broken column raises UserError, as
the data is at fault; a completion never does.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from echo2.core.errors import UserError
from echo2.reward import sandbox
from echo2.sandbox import confinement

Completion = str | Sequence[Mapping[str, str]]

_NUMBER = re.compile(
    r"""
    (?: (?<![\w)\].]) [-+] )?                  # a sign, unless it is the minus between two terms
    (?: (?: \d{1,3} (?:,\d{3})+ (?!\d) | \d+ )  # thousands may be grouped
        (?: \.\d+ )?
      | (?<![\d.]) \.\d+ )
    (?: [eE] [-+]? \d{1,3} (?!\d) )?
    """,
    re.VERBOSE | re.ASCII,
)


def exact_match(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Whether the completion is the column `answer`, apart from white space at both ends."""
    return [
        float(text_of(completion).strip() == str(_not_null(expected)).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def numeric_match(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Whether the last number in the completion equals the last in the column `answer` (also in GSM8K's `#### 42`)."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        number = last_number(str(_not_null(expected)))
        if number is None:
            raise UserError(f"finds no number in the column 'answer': {expected!r}")
        scores.append(float(last_number(text_of(completion)) == number))
    return scores


def math_match(completions: Sequence[Completion], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Whether the completion equals the column `answer` as mathematics (LaTeX or plain), by math-verify.

    If a text has a `####` (GSM8K's form), only the line after the last one counts, unless the text also has a \\boxed
    answer, which is clearer.
    """
    return _in_sandbox("math", completions, [str(_not_null(expected)) for expected in answer])


def reasoning_gym_score(
    completions: Sequence[Completion], reasoning_gym: Sequence[Mapping[str, Any]], **_: Any
) -> list[float | None]:
    """The generator's own score in [0, 1] of the text in the last <answer> tags, or else of the whole completion."""
    return _in_sandbox("reasoning_gym", completions, reasoning_gym)


def _in_sandbox(scorer: str, completions: Sequence[Completion], columns: Sequence[Any]) -> list[float | None]:
    """Score with a library that executes text, in a process without rights. A group has one task, so one column."""
    if not completions:
        return []
    return list(sandbox.shared().score(scorer, columns[0], [text_of(completion) for completion in completions]))


def logged_reward(
    completions: Sequence[Completion], logged_rollouts: Sequence[Mapping[str, Any]] | None = None, **_: Any
) -> list[float | None]:
    """The reward of each rollout in the log; None for tasks that are not from a log."""
    if logged_rollouts is None:
        return [None] * len(completions)
    return [float(column["rollouts"][place]["reward"]) for place, column in enumerate(logged_rollouts)]


def environment_sum(
    completions: Sequence[Completion], environment_reward: Sequence[float] | None = None, **_: Any
) -> list[float | None]:
    """The sum of the environment's rewards for the rollout's actions."""
    if environment_reward is None:
        raise UserError("needs an environment: set tasks.environment")
    return list(environment_reward)


def judge_score(
    completions: Sequence[Completion], judge_reward: Sequence[float] | None = None, **_: Any
) -> list[float | None]:
    """The judge's scores (`reward/judge.py`); None where it had nothing to compare."""
    return [None] * len(completions) if judge_reward is None else list(judge_reward)


BUILT_IN: Mapping[str, Callable[..., list[float | None]]] = {
    "environment": environment_sum,
    "judge": judge_score,
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "math": math_match,
    "reasoning_gym": reasoning_gym_score,
    "logged": logged_reward,
}
#: Rewards whose library executes text, with the library's module; they are computed in a sandbox.
RUN_TEXT: Mapping[str, str] = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


def unusable(name: str) -> str:
    """Why a built-in reward cannot be computed here; empty if it can."""
    if name not in RUN_TEXT:
        return ""
    if importlib.util.find_spec(RUN_TEXT[name]) is None:
        return f"needs {RUN_TEXT[name]}: pip install 'echo2[tasks]'."
    if reason := confinement.missing():
        return (
            f"may run a completion as a program, and this machine has no sandbox for it: {reason}. Run the head on one "
            "that has, or write a reward of your own."
        )
    return ""


def text_of(completion: Completion) -> str:
    """The text of a completion, which for chat prompts comes as `[{"role": "assistant", "content": text}]`."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text, exact; None if there is none."""
    numbers = _NUMBER.findall(text.replace("\u2212", "-"))  # the minus of typesetters
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _not_null(expected: Any) -> Any:
    if expected is None:
        raise UserError("finds null in the column 'answer'")
    return expected
