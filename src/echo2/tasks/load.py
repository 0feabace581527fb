"""Loads the rows that `tasks.source` names, and makes prompts from the columns of rows without one: `params = {prompt =
"{question} The answer is"}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from echo2.config.values import template_pieces
from echo2.core.errors import UserError, did_you_mean
from echo2.sandbox.plugins import innermost_line, load_named
from echo2.tasks.base import TaskSource, digest_of, row_name
from echo2.tasks.teaching import TEACHER_PROMPT
from echo2.tasks.digit_sorting import DigitSorting
from echo2.tasks.logs import LoggedRollouts
from echo2.tasks.sources import HfRows, JsonlRows, ParquetRows, ReasoningGymRows
from echo2.tasks.verifiers_rows import VerifiersRows

BUILT_IN = {"digit_sorting": DigitSorting}
KINDS = (
    "rows.jsonl, rows.parquet, a Hugging Face dataset directory, hub:owner/name[/configuration], reasoning_gym:<name>, "
    f"verifiers:<taskset>, logs:hands.jsonl, file.py:Class, package.module:Class or {', '.join(BUILT_IN)}"
)


class TemplateRows:
    """`rows` with a column `prompt`: the template with {column} filled in; `{{` and `}}` are braces. All columns stay.
    In the same way `teacher_prompt`, for a teacher.

    With `chat`, these are single user messages, for the model's chat template.

    Raises:
        UserError: the template has fields that are not plain names, or `params` has other parameters.
    """

    def __init__(self, rows: TaskSource, params: Mapping[str, Any]) -> None:
        templates = {name: params[name] for name in ("prompt", TEACHER_PROMPT) if name in params}
        unknown, self._chat = sorted({*params} - {*templates, "chat"}), params.get("chat", False)
        are_texts = "prompt" in params and all(isinstance(template, str) for template in templates.values())
        if unknown or not are_texts or not isinstance(self._chat, bool):
            raise UserError(
                'Rows that are read take the params {prompt = "text with {column}", chat = true or false}, '
                f"teacher_prompt like prompt, and no others; got {dict(params)}."
            )
        self._rows, self._parts = rows, {name: template_pieces(template) for name, template in templates.items()}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        made = dict[str, Any]()
        for column, parts in self._parts.items():
            text = "".join(literal + self._column(row, name, index) for literal, name in parts)
            made[column] = [{"role": "user", "content": text}] if self._chat else text
        return {**row, **made}

    def digest(self) -> str:
        """That of the underlying rows."""
        return digest_of(self._rows)

    def where(self, index: int) -> str:
        """The underlying rows' name of this row."""
        return row_name(self._rows, index)

    def _column(self, row: Mapping[str, Any], name: str | None, index: int) -> str:
        if name is None:
            return ""
        if name not in row:
            raise UserError(
                f"{self.where(index)}: no column {name!r} for the prompt (columns: {', '.join(map(str, row))})."
            )
        return str(row[name])


def load_tasks(source: str, params: Mapping[str, Any], seed: int) -> TaskSource:
    """Open a task source; `#split` at its end picks a split.

    Generators and classes use `params` and `seed`: a class gets `params` as keyword arguments, `split` if there is one,
    and `seed` if its signature takes one and `params` has none. reasoning_gym makes different rows for each split name.
    For rows that are read from files or a hub, `params` can make the prompt from their columns:
    {prompt = "{question}\nThe answer is"}.

    Raises:
        UserError: the source does not exist, cannot be read, is empty, or does not take the parameters.
    """
    name, split = (source, "") if Path(source).exists() else source.partition("#")[::2]
    made = _made_rows(name, split, params, seed)
    rows = _read_rows(name, split, source) if made is None else made
    if made is None and params:
        rows = TemplateRows(rows, params)
    if len(rows) < 1:
        raise UserError(f"The task source {source!r} is empty: it needs at least one row.")
    return rows


def _made_rows(name: str, split: str, params: Mapping[str, Any], seed: int) -> TaskSource | None:
    if name in BUILT_IN:
        return _construct(BUILT_IN[name], name, split, params, seed)
    if name.startswith("reasoning_gym:"):
        return ReasoningGymRows(name.removeprefix("reasoning_gym:"), params, seed, split)
    if name.startswith("verifiers:"):
        return VerifiersRows(name.removeprefix("verifiers:"), params)
    if name.startswith("logs:"):
        return _construct(partial(LoggedRollouts, Path(name.removeprefix("logs:"))), name, split, params, seed)
    if ":" in name and not name.startswith("hub:") and not Path(name).exists():
        return _construct(load_named(name), name, split, params, seed)
    return None


def _read_rows(name: str, split: str, source: str) -> TaskSource:
    if name.startswith("hub:"):
        return HfRows(name.removeprefix("hub:"), split, from_hub=True)
    path = Path(name)
    if name and path.is_dir():
        return HfRows(name, split, from_hub=False)
    readers: dict[str, Callable[[Path], TaskSource]] = {".jsonl": JsonlRows, ".parquet": ParquetRows}
    if path.suffix not in readers:
        hint = did_you_mean(name, BUILT_IN) or f" A source is one of: {KINDS}."
        raise UserError(f"{source!r} is not a task source (looked in {Path.cwd()}).{hint}")
    if split:
        raise UserError(f"{source!r}: a single file has no splits; remove #{split}, or name a dataset directory.")
    return readers[path.suffix](path)


def _construct(kind: Any, name: str, split: str, params: Mapping[str, Any], seed: int) -> TaskSource:
    """Create an instance of a source class, and check that it is a task source."""
    arguments = {**({"split": split} if split else {}), **params}
    try:
        signature = inspect.signature(kind)
        if "seed" in signature.parameters:
            arguments.setdefault("seed", seed)
        signature.bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be made with {arguments}: {error}.") from error
    try:
        rows = kind(**arguments)
        length = len(rows)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}({arguments}) raised: {innermost_line(error)}") from error
    if not hasattr(rows, "__getitem__") or not isinstance(length, int):
        raise UserError(f"{name} is not a task source: it needs __len__ and __getitem__(index) -> row.")
    source: TaskSource = rows
    return source
