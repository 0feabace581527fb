"""reasoning-gym's scorers, on the column that `echo2/tasks/gym.py` writes: {"name", "params", "entry"}."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from echo2.errors import UserError

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score_entry(column: Mapping[str, Any], text: str) -> float:
    """What the generator that asked the question gives for this completion.

    Raises:
        UserError: the reasoning-gym here is another version, which does not know the generator or its parameters.
    """
    scorer = _generator(column["name"], json.dumps(column["params"], sort_keys=True))
    answers = _ANSWER.findall(text)
    try:
        return float(scorer.score_answer((answers[-1] if answers else text).strip(), ast.literal_eval(column["entry"])))
    except Exception:
        # Some generators parse the answer without a guard (prime_factorization raises ValueError on a word). The entry
        # is what their own code made, so what they cannot read is a wrong answer.
        return 0.0


@lru_cache(maxsize=32)
def _generator(name: str, params_json: str) -> Any:
    """Scorers read their own parameters (time_intervals, puzzle24 ...), so they are made with the ones that asked."""
    from reasoning_gym import factory

    try:
        return factory.create_dataset(name, **json.loads(params_json))
    except Exception as error:
        raise UserError(
            f"cannot make reasoning-gym's {name} with {params_json}: {type(error).__name__}: {error}"
        ) from error
