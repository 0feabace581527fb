"""Makes prompts from the columns of rows without a prompt: `params = {prompt = "{question}\nThe answer is"}`."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from echo2.errors import UserError
from echo2.tasks.base import TaskSource, digest_of, row_name


class TemplateRows:
    """`rows` with a column `prompt`: the template with {column} filled in; `{{` and `}}` are braces. All columns stay.

    With `chat`, the prompt is a single user message, for the model's chat template.

    Raises:
        UserError: the template has fields that are not plain names, or `params` has other parameters.
    """

    def __init__(self, rows: TaskSource, params: Mapping[str, Any]) -> None:
        unknown = sorted(set(params) - {"prompt", "chat"})
        template, self._chat = params.get("prompt"), params.get("chat", False)
        if unknown or not isinstance(template, str) or not isinstance(self._chat, bool):
            raise UserError(
                'Rows that are read take the params {prompt = "text with {column}", chat = true or false} and no '
                f"others; got {dict(params)}."
            )
        self._rows, self._parts = rows, _parse(template)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        text = "".join(literal + self._column(row, name, index) for literal, name in self._parts)
        return {**row, "prompt": [{"role": "user", "content": text}] if self._chat else text}

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


def _parse(template: str) -> list[tuple[str, str | None]]:
    """Split a template into pieces of text, each with the column that follows it (None: no column)."""
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"The prompt {template!r} is no template: {error}. Write {{{{ for a brace.") from error
    for _, name, form, conversion in pieces:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise UserError(f"The prompt {template!r} may have plain column names in braces only, not {name!r}.")
    return [(literal, name) for literal, name, _, _ in pieces]
