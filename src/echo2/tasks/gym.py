"""Rows from a reasoning-gym generator: `prompt` is the question; the column `reasoning_gym` is for the scorer.

Scorers read the whole entry, and some distinguish tuples from lists and integer keys from text, which JSON does not. So
the entry travels as a Python literal, which `ast.literal_eval` restores exactly. `echo2/reward/text_scorers.py` reads
this column.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from echo2.errors import UserError, did_you_mean

DEFAULT_SIZE = 100_000
# Generators whose questions depend on the order of a set of strings, which differs from process to process: after a
# restart of the head, answers to one question would be scored against another.
HASH_ORDERED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})


class ReasoningGymRows:
    """The rows of the generator `name`, made with `params` (its own configuration; `size` defaults to 100 000).

    Without `seed` in `params`, rows are a function of (seed, split). A generator seeds row i with its seed + i, so
    (seed, split) is hashed to the generator's seed: else neighbouring seeds would share nearly all rows.

    Raises:
        UserError: reasoning-gym is not installed, has no such generator, or refuses the parameters.
    """

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, split: str = "") -> None:
        try:
            from reasoning_gym import factory
        except ImportError as error:
            raise UserError(f"reasoning_gym:{name} needs: pip install 'echo2[tasks]'.") from error
        if name not in factory.DATASETS:
            raise UserError(f"reasoning-gym has no generator {name!r}.{did_you_mean(name, factory.DATASETS)}")
        if name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise UserError(
                f"reasoning_gym:{name} makes different rows in every process. Set PYTHONHASHSEED=0 and start again."
            )
        self._name = name
        self._params = {"size": DEFAULT_SIZE, "seed": _block_seed(seed, split), **params}
        try:
            self._generator = factory.create_dataset(name, **self._params)
        except Exception as error:  # each generator checks its parameters in its own way, mostly by assert
            raise UserError(f"reasoning_gym:{name} refuses {dict(params)}: {type(error).__name__}: {error}") from error

    def __len__(self) -> int:
        return len(self._generator)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        entry = self._generator[index]
        column = {"name": self._name, "params": self._params, "entry": repr(_plain(entry))}
        return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": column}

    def where(self, index: int) -> str:
        """The row's generator and number, from 0."""
        return f"reasoning_gym:{self._name} row {index}"


def _block_seed(seed: int, split: str) -> int:
    """Hash (seed, split) to 31 bits, so that seed + index stays within numpy's range of seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{split}".encode(), digest_size=4).digest(), "little") >> 1


def _plain(value: Any) -> Any:
    """Return the value with subclasses of str (numpy's), whose repr is not a literal, replaced by str."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value
