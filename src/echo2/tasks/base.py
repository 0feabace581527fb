"""Turns the rows of a task source into tasks: computes their order and validates each row. `streams.py` reads the rows.

The order is a function of (seed, epoch, position) alone, so that a resumed run or a restarted head gives the same task
for the same cursor. An epoch is a permutation of the rows, computed and never stored: a Feistel network (Luby and
Rackoff 1988) over the next power of four, applied until the result is a row's index (cycle walking, Black and Rogaway
2002), so that a source of 10^12 generated rows costs no memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

from echo2.core.errors import UserError
from echo2.core.printable import shown
from echo2.core.types import Message, Task
from echo2.sandbox.plugins import innermost_line

MAX_PROMPT_CHARS = 1 << 20
MAX_COLUMNS_BYTES = 1 << 20
FEISTEL_ROUNDS = 6


class TaskSource(Protocol):
    """Rows to solve: anything with a length whose `[index]` gives a mapping with `prompt` plus any columns.

    `prompt` is text, or chat messages `[{"role": ..., "content": ...}, ...]`. The same index must always give the same
    row. A source may have a method `where(index) -> str` that names a row for people (`rows.jsonl:17`), and a method
    `digest() -> str` that is another for other rows: a run is not resumed on these.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class TaskStream:
    """The endless, reproducible sequence of tasks that a run draws from a source: epoch after epoch.

    Raises:
        UserError: the source is empty, or its first row is invalid (so common mistakes show at once, not at step 40).
    """

    def __init__(self, source: TaskSource, seed: int, shuffle: bool) -> None:
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._length = len(source)
        if self._length < 1:
            raise UserError(f"{type(source).__name__}: the task source is empty; it needs at least one row.")
        self.task(0)

    def __len__(self) -> int:
        return self._length

    def source_of(self, cursor: int) -> str:
        """See `Tasks.source_of`. Always empty, as there is one source."""
        return ""

    def digests(self) -> list[str]:
        return [digest_of(self._source)]

    def task(self, cursor: int) -> Task:
        """The task at position `cursor` >= 0; the same cursor always gives the same task.

        Raises:
            UserError: that row is invalid; the message names the row.
        """
        epoch, position = divmod(cursor, self._length)
        index = permute(position, self._length, f"{self._seed}/{epoch}") if self._shuffle else position
        where = f"{type(self._source).__name__} row {index}"
        try:
            where = row_name(self._source, index)
            return task_from_row(self._source[index], cursor, where)
        except UserError:
            raise
        except Exception as error:  # raised by the user's source, its `where` or its mappings
            raise UserError(f"{where} could not be read: {innermost_line(error)}") from error


def row_name(source: TaskSource, index: int) -> str:
    """Return the name of a row for error messages."""
    where = getattr(source, "where", None)
    return str(where(index)) if callable(where) else f"{type(source).__name__} row {index}"


def digest_of(source: TaskSource) -> str:
    """Return the digest of the source's rows; empty if it has none."""
    digest = getattr(source, "digest", None)
    return str(digest()) if callable(digest) else ""


def permute(position: int, size: int, key: str) -> int:
    """Return the image of `position` (0 <= position < size) under the permutation of range(size) selected by `key`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value, short_key = position, hashlib.blake2b(key.encode(), digest_size=32).digest()
    while True:  # at most 4 iterations on average: the network's domain is at most four times `size`
        left, right = value >> half_bits, value & mask
        for round_ in range(FEISTEL_ROUNDS):
            digest = hashlib.blake2b(b"%d/%d" % (round_, right), key=short_key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        value = left << half_bits | right
        if value < size:
            return value


def task_from_row(row: Any, cursor: int, where: str) -> Task:
    """Check one row and make a task from it. Columns are passed through JSON (tuples become lists), so that a reward
    sees the same values on every machine.

    Raises:
        UserError: naming the row (`where`), what is wrong and what to do.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row must be a mapping with a 'prompt', got {type(row).__name__} {shown(row)}.")
    if "prompt" not in row:
        raise UserError(f"{where}: no column 'prompt' (columns: {', '.join(map(str, row)) or 'none'}). Rename yours.")
    prompt = _prompt(row["prompt"], where)
    return Task(cursor, prompt, _columns({name: value for name, value in row.items() if name != "prompt"}, where))


def _prompt(prompt: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        text = prompt
        checked: str | tuple[Message, ...] = prompt
    elif isinstance(prompt, list | tuple):
        checked = tuple(_message(item, f"{where}: message {i} of the prompt") for i, item in enumerate(prompt))
        text = "".join(message.content for message in checked)
    else:
        raise UserError(
            f"{where}: 'prompt' must be text or a list of chat messages, got {type(prompt).__name__} {shown(prompt)}."
        )
    if not checked or not text.strip():
        raise UserError(f"{where}: 'prompt' is empty. Remove the row or give it text.")
    if len(text) > MAX_PROMPT_CHARS:
        raise UserError(f"{where}: 'prompt' has {len(text)} characters; the limit is {MAX_PROMPT_CHARS}. Shorten it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: 'prompt' has an incomplete character ({error.reason}); it cannot be sent as UTF-8."
        ) from error
    return checked


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
        raise UserError(f'{where} must be {{"role": text, "content": text}}, got {shown(item)}.')
    extra = [name for name, value in item.items() if name not in ("role", "content") and value is not None]
    if extra:
        raise UserError(f"{where} has {extra[0]!r}, which would be lost: a message has only a role and a content.")
    if not item["role"].isidentifier():
        raise UserError(f"{where} has the role {shown(item['role'])}; use one word, such as user, assistant or system.")
    return Message(item["role"], item["content"])


def _columns(columns: dict[Any, Any], where: str) -> dict[str, Any]:
    for name, value in columns.items():
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{where}: column {name!r} = {shown(value)} cannot be sent as JSON ({type(value).__name__}: {error}). "
                "Store it as text or numbers, or remove it."
            ) from error
    text = json.dumps(columns, allow_nan=False)
    if len(text) > MAX_COLUMNS_BYTES:
        largest = max(columns, key=lambda name: len(json.dumps(columns[name])))
        raise UserError(
            f"{where}: the columns take {len(text)} bytes as JSON; the limit is {MAX_COLUMNS_BYTES}. "
            f"The largest is {largest!r}: remove it, or shorten it."
        )
    plain: dict[str, Any] = json.loads(text)
    return plain
