"""Scorers of other libraries that execute the text they score: those of reasoning-gym and math-verify.

They are called in a confined process alone (`sandbox_child.py`). Each is made from what the head knows, before that
process gives up its rights, and then given one completion after the other: `make(column) -> (text -> score in [0, 1])`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from echo2.errors import UserError
from echo2.reward import expressions

MAX_ANSWER_CHARS = 100_000
MAX_MATH_CHARS = 10_000  # at the end of a completion, where its answer is; reading takes longer than in proportion

Score = Callable[[str], float]


class UnreadableColumn(Exception):
    """A scorer, given its first completion, finds that the task's own column is no answer."""


def make_scorer(name: str, column: Any) -> Score:
    """The scorer `name` for one task, whose column it is (see `tasks/gym.py` for reasoning_gym's).

    Raises:
        UserError: the column is broken, or the library here is another version.
    """
    return _MAKERS[name](column)


def final_answer(text: str) -> str:
    """The line behind the last `####`; everything where there is none, or a box."""
    _, mark, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0] if mark and "\\boxed" not in text else text


def tagged_answer(text: str) -> str:
    """What stands in the last pair of <answer> tags, or else everything."""
    text = text[-MAX_ANSWER_CHARS:]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text[start + len("<answer>") : end] if start >= 0 else text).strip()


def _reasoning_gym(column: Mapping[str, Any]) -> Score:
    scorer = _generator(column["name"], json.dumps(column["params"], sort_keys=True))
    entry = ast.literal_eval(column["entry"])
    return lambda text: float(scorer.score_answer(tagged_answer(text), entry))


@lru_cache(maxsize=32)
def _generator(name: str, params_json: str) -> Any:
    """Scorers read their own parameters (time_intervals, puzzle24 ...), so they are made with the ones that asked."""
    expressions.disarm()
    from reasoning_gym import factory

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
    def gold() -> Any:  # read where completions are: rows may come from strangers too
        text = final_answer(str(column))
        found = parse(text, parsing_timeout=0) or parse(f"${text}$", parsing_timeout=0)
        if not found:
            raise UnreadableColumn
        return found

    def score(text: str) -> float:
        wanted = gold()  # before the completion can have taken the memory that it needs
        found = parse(final_answer(text[-MAX_MATH_CHARS:]), parsing_timeout=0)
        return float(verify(wanted, found, timeout_seconds=0))  # 0: what takes too long is ended from outside

    return score


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    """`parse` and `verify`, once used: a fork inherits the grammar's tables, which take 30 ms to build."""
    expressions.disarm()
    import numpy  # noqa: F401 (sympy's numerics do, but a fork could not)
    from math_verify import parse, verify

    verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)
    return parse, verify


_MAKERS: Mapping[str, Callable[[Any], Score]] = {"reasoning_gym": _reasoning_gym, "math": _mathematics}
