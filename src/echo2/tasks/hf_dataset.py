"""Rows of a Hugging Face dataset, mapped from disk: a `save_to_disk` directory, a directory of data files, a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.errors import UserError

DEFAULT_SPLIT = "train"


class HfRows:
    """One split of a Hugging Face dataset. From the hub: owner/name, or owner/name/configuration.

    Raises:
        UserError: `datasets` is not installed, there is no such dataset or split, or its files cannot be read.
    """

    def __init__(self, name: str, split: str, from_hub: bool) -> None:
        try:
            import datasets
        except ImportError as error:
            raise UserError(f"{name}: Hugging Face datasets need: pip install 'echo2[data]'.") from error
        self._name = f"{name}#{split or DEFAULT_SPLIT}"
        saved = not from_hub and any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
        try:
            loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(*_hub_name(name, from_hub))
        except Exception as error:  # `datasets` raises its own errors, pyarrow's, the hub client's and built-in ones
            raise UserError(f"Cannot load the dataset {name}: {type(error).__name__}: {error}") from error
        self._rows = _pick_split(loaded, name, split) if isinstance(loaded, Mapping) else loaded
        if split and not isinstance(loaded, Mapping):
            raise UserError(f"{name} was saved without splits: remove #{split}.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._rows[index]
        return row

    def where(self, index: int) -> str:
        """The row's dataset, split and number, from 0."""
        return f"{self._name} row {index}"


def _hub_name(name: str, from_hub: bool) -> tuple[str, ...]:
    """The dataset's id, and its configuration where there is one."""
    owner, _, rest = name.partition("/")
    dataset, _, configuration = rest.partition("/")
    return (f"{owner}/{dataset}", configuration) if from_hub and configuration else (name,)


def _pick_split(splits: Mapping[str, Any], name: str, split: str) -> Any:
    """Return the named split; without a name, the only split, else `train`."""
    wanted = split or (DEFAULT_SPLIT if len(splits) != 1 else next(iter(splits)))
    if wanted not in splits:
        known = ", ".join(splits)
        raise UserError(f"{name} has no split {wanted!r}; it has {known}. Write {name}#<split>.")
    return splits[wanted]
