"""JSON and TOML that somebody else wrote: parsed, or a ValueError that says why not.

The parsers of the standard library raise RecursionError for what is nested too deep, and so do many things done with
what just passes them (copying, printing, writing it again); so depth has a limit of its own.
"""

from __future__ import annotations

import json
import tomllib
from typing import Any

#: Brackets within brackets; no file of anybody's has a tenth of it.
DEPTH_MAX = 100


def parse_json(text: str | bytes | bytearray, with_nan: bool = True) -> Any:
    """The value that JSON text holds. NaN and the infinities, which are no JSON, are taken, or else read as None.

    Raises:
        ValueError: it is not JSON, or nested deeper than `DEPTH_MAX`.
    """
    try:
        value = json.loads(text, parse_constant=None if with_nan else lambda _: None)
    except RecursionError as error:
        raise _too_deep() from error
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > DEPTH_MAX:  # in any other text, nothing can be nested deeper
        _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables that TOML text holds.

    Raises:
        ValueError: it is not TOML, or nested deeper than `DEPTH_MAX`.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    _check_depth(tables)
    return tables


def _check_depth(value: Any) -> None:
    layer = [value]
    for _ in range(DEPTH_MAX + 1):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {DEPTH_MAX}")
