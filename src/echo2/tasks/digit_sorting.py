"""Digit sorting, the demo's task: `5391=` -> `1359`. Endless, checkable, and learnable by RL because it generalises.

Train and held-out tasks can't overlap: a prompt is held out when `crc32(prompt) % 8 == 0`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal
from zlib import crc32

from echo2.core.errors import UserError

DEFAULT_SIZE = {"train": 100_000, "heldout": 1024}
MAX_DIGITS = 1000


class DigitSorting:
    """A sequence of rows {"prompt": "5391=", "answer": "1359"}; row i is a pure function of (seed, split, i).

    `size`: number of rows; None: 100 000 to train on, 1024 held out.

    Raises:
        UserError: on an unknown split or impossible numbers.
    """

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        min_digits: int = 5,
        max_digits: int = 10,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        if split not in DEFAULT_SIZE:
            raise UserError(f"digit_sorting: split = {split!r}. Use train or heldout.")
        if not 2 <= min_digits <= max_digits <= MAX_DIGITS:
            raise UserError(
                f"digit_sorting: min_digits = {min_digits}, max_digits = {max_digits}. They must be "
                f"within 2..{MAX_DIGITS}, the first not above the second."
            )
        self._size = DEFAULT_SIZE[split] if size is None else size
        if self._size < 1:
            raise UserError(f"digit_sorting: size = {size}. Give at least 1.")
        self._split = split
        self._min_digits, self._max_digits = min_digits, max_digits
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, str]:
        """Row `index`; negative indices count from the end.

        Raises:
            IndexError: there is no such row.
        """
        position = index + self._size if index < 0 else index
        if not 0 <= position < self._size:
            raise IndexError(index)
        rng = random.Random(f"digit_sorting {self._seed} {self._split} {position}")
        while True:
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(self._min_digits, self._max_digits)))
            if is_held_out(f"{digits}=") == (self._split == "heldout"):
                return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (self[index] for index in range(self._size))


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split."""
    return crc32(prompt.encode()) % 8 == 0
