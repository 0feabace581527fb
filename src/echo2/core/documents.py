"""Parses other people's JSON and TOML, or raises a ValueError that says what is wrong; and writes safetensors.

The parsers of the standard library raise RecursionError for input that is nested too deep, and so do many operations on
values that just pass the parsers (copying, printing, writing). So depth has an explicit limit.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from echo2.core.errors import UserError, did_you_mean
from echo2.core.types import TensorSource

#: Maximum nesting of brackets; real files have less than a tenth of it.
DEPTH_MAX = 100
#: Of the name of a field, in an error.
NAME_CHARS_SHOWN = 64
#: Bytes read at a time from a tensor that is not in memory.
PIECE_BYTES = 16 << 20
_CONTAINERS = frozenset([dict, list])
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes | bytearray, with_nan: bool = True) -> Any:
    """Parse JSON text. NaN and the infinities, which JSON excludes, are accepted; without `with_nan` they become None.

    Raises:
        ValueError: the text is not JSON, or nested deeper than `DEPTH_MAX`.
    """
    try:
        value = json.loads(text, parse_constant=None if with_nan else lambda _: None)
    except RecursionError as error:
        raise _too_deep() from error
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > DEPTH_MAX:  # with fewer brackets, nothing can be nested deeper
        _check_depth(value)
    return value


def half_character(value: Any) -> str:
    """Return a sentence that names the first text in a JSON value, or key, with half of a surrogate pair; empty: there
    is none. JSON can write half a pair (`"\\ud800"`), and Python reads it, but no UTF-8 and no tokenizer can.
    """
    trail: list[tuple[str | int, Iterator[tuple[str | int, Any]]]] = [("", iter([("", value)]))]
    while trail:  # a place gets its words when it is found: all of them would take many times the memory of the text
        for name, one in trail[-1][1]:
            texts = [one] if isinstance(one, str) else one if isinstance(one, dict) else ()
            if any(_SURROGATE.search(text) for text in texts):
                named = _named([*(outer for outer, _ in trail[2:]), name]) or "the body"
                what = "has a key with" if isinstance(one, dict) else "has"
                return f"{named} {what} half of a surrogate pair, which is not a character: send both halves, or none"
            if isinstance(one, dict | list):
                trail.append((name, iter(one.items()) if isinstance(one, dict) else iter(enumerate(one))))
                break
        else:
            trail.pop()
    return ""


def _named(place: Iterable[str | int]) -> str:
    words = "".join(f"[{name}]" if isinstance(name, int) else f".{name[:NAME_CHARS_SHOWN]}" for name in place)
    return words.lstrip(".").encode(errors="backslashreplace").decode()


def may_have_half_character(text: bytes | bytearray) -> bool:
    """Whether JSON text may have half of a surrogate pair: a cheap look, before `half_character` looks everywhere."""
    return b"\xed" in text or b"\\ud" in text or b"\\uD" in text


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML text.

    Raises:
        ValueError: the text is not TOML, or nested deeper than `DEPTH_MAX`.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    _check_depth(tables)
    return tables


def read_tables(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file, or of a JSON file if its name ends in .json. `what`: the file's name in errors.

    Raises:
        UserError: the file is missing or malformed.
    """
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        tables = parse_json(text) if is_json else parse_toml(text)
    except OSError as error:
        raise UserError(f"Cannot read {what} {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid {'JSON' if is_json else 'TOML'}: {error}.") from error
    if not isinstance(tables, dict):
        raise UserError(f"{path} must hold an object, not {tables!r}.")
    return tables


def safetensors_pieces(
    tensors: Mapping[str, TensorSource], metadata: Mapping[str, str] = MappingProxyType({})
) -> Iterable[bytes | memoryview]:
    """Yield the bytes of a safetensors file, piece by piece, so that weights are never in memory twice (the library's
    own writer takes all tensors at once).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        for start in range(0, tensor.num_bytes, PIECE_BYTES):
            yield tensor.read(start, min(start + PIECE_BYTES, tensor.num_bytes))


def refuse_unknown(keys: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse the first key that is not known.

    Raises:
        UserError: with the nearest known key.
    """
    known = list(known)
    for key in keys:
        if key not in known:
            hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
            raise UserError(f"{where}: unknown key {key!r}.{hint}")


def _check_depth(value: Any) -> None:
    layer = [value] if type(value) in _CONTAINERS else []
    for _ in range(DEPTH_MAX):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if type(inner) in _CONTAINERS
        ]
        if not layer:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {DEPTH_MAX}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value from JSON is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
