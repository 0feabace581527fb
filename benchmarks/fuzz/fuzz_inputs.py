"""Hostile inputs out of valid ones: what `fuzz.py` feeds to parsers. Everything is drawn from the generator given.

Bytes are flipped, cut, repeated, overwritten with extreme numbers and joined with other inputs; texts are also nested
and given words of their grammar; messages of the wire have fields set to extremes, dropped and repeated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

#: A smaller input does not grow beyond this by ordinary changes. Every `1 / BLOW_UP_SHARE`-th is blown up to
#: BLOWN_UP_BYTES.
INPUT_BYTES_MAX = 8 << 10
BLOWN_UP_BYTES = 256 << 10
MESSAGE_BYTES_MAX = 1 << 20
BLOW_UP_SHARE = 1 / 4000
NESTED_MAX = 3000
#: How many changes an input gets: mostly one, for two that are refused say no more than one.
CHANGES = (1, 1, 1, 2, 4)

INTEGERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 4095, 65535, 1 << 16, (1 << 20) - 1, 1 << 20, 1 << 24)
EXTREMES = (
    *INTEGERS,
    *((1 << bits) + more for bits in (31, 32, 53, 63, 64) for more in (-1, 0, 1)),
    *(-1, -2, -128, -(1 << 31), -(1 << 63), 10**19, 10**400),
)
DOUBLES = (0.0, -0.0, 1.0, -1.0, 0.5, 1e12, -1e12, 1e300, -1e300, 5e-324, float("inf"), float("-inf"), float("nan"))
SINGLES = (b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\x80", b"\1\0\0\0")
TEXTS = ("", "\0", "\x1b[2J", "é", "\U0001f600", "a\nb", "../../x", "x" * 201, "%s{0}", '"', "-", "NaN", " ", "²", "١")
NESTS = ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"{a=", b"}"), (b"-", b""), (b"[[", b"]]"))
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
#: Of the whole numbers of a message, those that are not of 64 bits; of signed ones no sign, of enumerations few.
BITS = {
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_ENUM: 2,
}


def changed(data: bytes, others: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> bytes:
    """The input after one to four changes; seldom one that is hundreds of kilobytes long."""
    if rng.random() < BLOW_UP_SHARE:
        return _blown_up(data, rng)
    longest = max(INPUT_BYTES_MAX, len(data))
    for _ in range(rng.choice(CHANGES)):
        if words and rng.random() < 0.3:
            word, at = rng.choice(words), rng.randint(0, len(data))
            data = data[:at] + word + data[at + rng.choice((0, 0, len(word))) :]
        else:
            data = rng.choice(_CHANGES)(data, others, rng)
    return data[:longest]


Change = Callable[[bytes, Sequence[bytes], random.Random], bytes]


def _flip(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    if not data:
        return data
    at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
    return data[:at] + bytes((data[at] ^ bit,)) + data[at + 1 :]


def _byte(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + bytes((rng.randrange(256),)) + data[at + rng.randrange(2) :]


def _integer(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    width = rng.choice((1, 2, 4, 4, 8))
    value = rng.choice(EXTREMES) & ((1 << 8 * width) - 1)
    new = rng.choice(SINGLES) if rng.random() < 0.2 else value.to_bytes(width, rng.choice(("little", "big")))
    at = rng.randint(0, max(0, len(data) - len(new)))
    return data[:at] + new + data[at + len(new) :]


def _decimal(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """A number of a text becomes an extreme one."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return _byte(data, others, rng)
    place, digits = rng.choice(found), rng.choice((*EXTREMES, *DOUBLES, 1e999))
    return data[: place.start()] + str(digits).encode() + data[place.end() :]


def _cut(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    start, stop = _range(data, rng)
    return data[:start] if rng.random() < 0.3 else data[:start] + data[stop:]


def _repeat(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    start, stop = _range(data, rng)
    return data[:start] + data[start:stop] * rng.choice((2, 2, 2, 3, 5, 50)) + data[stop:]


def _move(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    start, stop = _range(data, rng)
    part, rest = data[start:stop], data[:start] + data[stop:]
    at = rng.randint(0, len(rest))
    return rest[:at] + part + rest[at:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    (start, stop), at = _range(other, rng), rng.randint(0, len(data))
    return data[:at] + other[start:stop] + data[at + rng.choice((0, stop - start)) :]


def _nest(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """A part of a text inside brackets inside brackets: at most a few, seldom thousands."""
    opening, closing = rng.choice(NESTS)
    depth = NESTED_MAX if rng.random() < 0.02 else rng.choice((1, 1, 2, 20, 200))
    start, stop = _range(data, rng)
    return data[:start] + opening * depth + data[start:stop] + closing * depth + data[stop:]


_CHANGES: tuple[Change, ...] = (_flip, _byte, _integer, _integer, _decimal, _cut, _repeat, _move, _splice, _nest)


def _range(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 2, 4, 8, 16, 32, 64, len(data))))


def _blown_up(data: bytes, rng: random.Random) -> bytes:
    """A part repeated until the input is large: what takes time, or memory, out of proportion shows here."""
    start, stop = _range(data, rng)
    part = data[start:stop] or b"a"
    return data[:start] + part * (rng.choice((BLOWN_UP_BYTES >> 4, BLOWN_UP_BYTES)) // len(part)) + data[stop:]


# ---- messages of the wire --------------------------------------------------------------------------------------------


def changed_message(kind: type[Message], data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """The bytes of the message with a few fields changed; of bytes that are no message, other bytes."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return changed(data, others, (), rng)
    for _ in range(rng.choice(CHANGES)):
        _change_field(message, rng)
    written: bytes = message.SerializeToString()
    return written if len(written) <= MESSAGE_BYTES_MAX else data


def filled(kind: type[Message], rng: random.Random, depth: int = 0) -> Any:
    """A message of which every field is set."""
    message = kind()
    for entry in kind.DESCRIPTOR.fields:
        _set(message, entry, rng, depth)
    return message


def _change_field(message: Any, rng: random.Random) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    entry = rng.choice(fields)
    below = _children(message, entry)
    if below and rng.random() < 0.7:
        _change_field(rng.choice(below), rng)
    elif rng.random() < 0.15:
        message.ClearField(entry.name)
    elif entry.is_repeated and not _is_map(entry) and rng.random() < 0.4:
        values = getattr(message, entry.name)
        copies = list(values)
        for _ in range(rng.choice((1, 2, 5, 40))):
            values.extend(copies[: 1 + 4096 // (1 + len(copies))])
    else:
        _set(message, entry, rng, 2)


def _children(message: Any, entry: FieldDescriptor) -> list[Any]:
    if entry.message_type is None or _is_map(entry):
        return []
    if entry.is_repeated:
        return list(getattr(message, entry.name))
    return [getattr(message, entry.name)] if message.HasField(entry.name) else []


def _set(message: Any, entry: Any, rng: random.Random, depth: int) -> None:
    """`entry`: a FieldDescriptor of whichever implementation of protobuf is there."""
    if _is_map(entry):
        value, place = entry.message_type.fields_by_name["value"], rng.choice(TEXTS)
        if value.message_type is None:
            getattr(message, entry.name)[place] = _value(value, rng)
        else:
            getattr(message, entry.name)[place].CopyFrom(filled(GetMessageClass(value.message_type), rng, depth + 1))
    elif entry.message_type is not None:
        if depth > 3:
            return
        inner = filled(GetMessageClass(entry.message_type), rng, depth + 1)
        if entry.is_repeated:
            getattr(message, entry.name).append(inner)
        else:
            getattr(message, entry.name).CopyFrom(inner)
    elif entry.is_repeated:
        getattr(message, entry.name).append(_value(entry, rng))
    else:
        setattr(message, entry.name, _value(entry, rng))


def _value(entry: FieldDescriptor, rng: random.Random) -> Any:
    if entry.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if entry.type == FieldDescriptor.TYPE_STRING:
            return rng.choice(TEXTS) * rng.choice((1, 1, 1, 1, 60))
        return rng.choice((b"", rng.randbytes(4 * rng.randrange(9)), rng.randbytes(32), b"\1" * 8, *SINGLES))
    if entry.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(DOUBLES)
    if entry.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    bits = BITS.get(entry.cpp_type, 64)
    return rng.choice(EXTREMES) & ((1 << bits) - 1)


def _is_map(entry: FieldDescriptor) -> bool:
    return entry.message_type is not None and entry.message_type.GetOptions().map_entry
