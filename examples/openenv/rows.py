"""Rows for the environment of server.py: what it is begun with, and which of its fields are read and written."""

from collections.abc import Iterator
from typing import Any

from echo2.tasks.digit_sorting import DigitSorting


class Rows(DigitSorting):
    """Those of the demo's task; none of `#heldout` is in `#train`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        digits = super().__getitem__(index)["prompt"].removesuffix("=")
        return {"prompt": digits, "reset": {"digits": digits}, "action": "digits", "observation": "digits"}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))
