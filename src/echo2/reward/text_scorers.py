"""Scorers of other libraries that execute the text they score: those of reasoning-gym and math-verify.

They are called only in a confined process (`sandbox_child.py`). Each is made from the task's column before that process
gives up its rights, and then scores one completion after the other: `make(column) -> (text -> score in [0, 1])`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from echo2.core.errors import UserError
from echo2.reward import expressions

MAX_ANSWER_CHARS = 100_000
MAX_MATH_CHARS = 10_000  # at the end of a completion, where its answer is; parsing time grows faster than linearly

Score = Callable[[str], float]


class UnreadableColumn(Exception):
    """Raised at a scorer's first completion if the task's own column is not a readable answer."""


def make_scorer(name: str, column: Any) -> Score:
    """Make the scorer `name` for one task from the task's column (see `tasks/sources.py` for reasoning_gym's).

    Raises:
        UserError: the column is broken, or the installed library is another version.
    """
    return _MAKERS[name](column)


def load(name: str) -> None:
    """Import the library of the scorer `name`, which takes a second or more."""
    _LIBRARIES[name]()


def final_answer(text: str) -> str:
    """Return the line after the last `####`; the whole text if there is no `####`, or if there is a boxed answer. The
    minus of typesetters becomes the one that math-verify reads everywhere.
    """
    text = text.replace("\u2212", "-")
    _, mark, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0] if mark and "\\boxed" not in text else text


def tagged_answer(text: str) -> str:
    """Return the text in the last pair of <answer> tags, or else the whole text."""
    text = text[-MAX_ANSWER_CHARS:]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text[start + len("<answer>") : end] if start >= 0 else text).strip()


def _reasoning_gym(column: Mapping[str, Any]) -> Score:
    scorer = _generator(column["name"], json.dumps(column["params"], sort_keys=True))
    entry = ast.literal_eval(column["entry"])
    return lambda text: float(scorer.score_answer(tagged_answer(text), entry))


@cache
def _factory() -> Any:
    expressions.disarm()
    from reasoning_gym import factory

    return factory


@lru_cache(maxsize=32)
def _generator(name: str, params_json: str) -> Any:
    """Make a generator with the task's parameters: some scorers read them (time_intervals, puzzle24 ...)."""
    factory = _factory()
    try:
        generator = factory.create_dataset(name, **json.loads(params_json))
    except Exception as error:
        raise UserError(
            f"cannot make reasoning-gym's {name} with {params_json}: {type(error).__name__}: {error}"
        ) from error
    expressions.disarm_eval("reasoning_gym")
    return generator


def _mathematics(column: Any) -> Score:
    parse, verify = _math_verify()

    @cache
    def gold() -> Any:  # parsed in the fork, like completions: rows may come from strangers, too
        text = final_answer(str(column))
        parsed = parse(text, parsing_timeout=0) or parse(f"${text}$", parsing_timeout=0)
        if not parsed:
            raise UnreadableColumn
        return parsed

    def score(text: str) -> float:
        truth = gold()  # before the completion can use up the memory that this needs
        parsed = parse(final_answer(text[-MAX_MATH_CHARS:]), parsing_timeout=0)
        return float(verify(truth, parsed, timeout_seconds=0))  # 0: no limit; the parent kills a slow fork

    return score


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """Return `parse` and `verify` after a first use: forks inherit the grammar's tables, which take 30 ms to build."""
    expressions.disarm()
    import numpy  # noqa: F401 (sympy's numerics import it, which a fork could not)
    from math_verify import parse, verify

    verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)
    return parse, verify


_LIBRARIES: Mapping[str, Callable[[], Any]] = {"reasoning_gym": _factory, "math": _math_verify}
_MAKERS: Mapping[str, Callable[[Any], Score]] = {"reasoning_gym": _reasoning_gym, "math": _mathematics}
