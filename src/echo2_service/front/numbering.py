"""What a refused request of a model was numbered. A client numbers the requests of a model, and each waits for those
before it; so a refused one must use up its number, or all behind it wait for five and a half minutes, and fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import zstandard

from echo2.core.documents import parse_json
from echo2_service.decide.order import NUMBER_MAX

#: Bytes at the beginning of a body in which model and number are looked for if the whole is not readable.
BEGINNING_BYTES = 64 << 10
_MODEL = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,512})"')
_NUMBER = re.compile(rb'"seq_id"\s*:\s*(\d{1,19})\b')


@dataclass(frozen=True, slots=True)
class Numbered:
    """A request of a model, under a number of its client."""

    model: str
    number: int


def numbered(body: bytes, is_protobuf: bool, is_packed: bool) -> Numbered | None:
    """Return model and number of a request that may be malformed or torn; None if they cannot be read."""
    if is_packed and body.startswith(zstandard.FRAME_HEADER):
        body = _beginning(body)
    model, number = _in_protobuf(body) if is_protobuf else _in_json(body)
    is_number = isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= NUMBER_MAX
    return Numbered(model, number) if isinstance(model, str) and is_number else None


def _beginning(body: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            return reader.read(BEGINNING_BYTES)
    except (zstandard.ZstdError, MemoryError):
        return b""


def _in_json(body: bytes) -> tuple[Any, Any]:
    try:
        values = parse_json(body)
    except ValueError:  # also text that is not UTF-8
        found = [pattern.search(body[:BEGINNING_BYTES]) for pattern in (_MODEL, _NUMBER)]
        model, number = (one and one[1] for one in found)
        return model and model.decode(errors="replace"), int(number) if number else None
    return (values.get("model_id"), values.get("seq_id")) if isinstance(values, dict) else (None, None)


def _in_protobuf(body: bytes) -> tuple[Any, Any]:
    """Read the first two fields of a `ForwardBackwardRequest`, a string and a varint."""
    if len(body) < 2 or body[0] != 1 << 3 | 2 or body[1] > 127:
        return None, None
    end = 2 + body[1]
    model, number, shift = body[2:end].decode(errors="replace"), 0, 0
    if body[end : end + 1] != bytes([2 << 3]):
        return None, None
    for byte in body[end + 1 : end + 11]:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return model, number
    return None, None
