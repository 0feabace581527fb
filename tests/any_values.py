"""Messages with any values in any fields, as wire.proto has them: a field that is added there is lied in, too."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import MutableMapping, MutableSequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, 2, 7, 255, 65_535, (1 << 31) - 1, (1 << 32) - 1, (1 << 53) + 1, (1 << 63) - 1)
FLOATS = (0.0, -1.0, 1.0, 3e8, -1e300, float("nan"), float("inf"))
TEXTS = ("", "stop", "length", "train", "eval", "vllm", "compact", "transformers q8_0", "\x1b[2J", "x" * 70_000)


def anything(message: Message, source: random.Random) -> None:
    """One field of the message, at any depth, gets another value of its kind. Fields are drawn by their paths, so that
    one deep within is as likely as one at the top.
    """
    places = defaultdict[str, list[tuple[Message, FieldDescriptor]]](list)
    _find_places(message, "", places)
    holder, field = source.choice(places[source.choice(sorted(places))])
    old: Any = getattr(holder, field.name)
    if isinstance(old, MutableMapping):
        old[source.choice(TEXTS)] = source.choice(FLOATS)
    elif isinstance(old, Message):
        if holder.HasField(field.name):
            holder.ClearField(field.name)
        else:
            anything(old, source)
    elif not isinstance(old, MutableSequence):
        setattr(holder, field.name, _other(field, old, source))
    elif old and source.random() < 0.5:
        del old[source.randrange(len(old))]
    elif field.message_type is None:
        empty = {field.TYPE_BYTES: b"", field.TYPE_STRING: ""}.get(field.type, 0)
        old.append(_other(field, source.choice(old) if old else empty, source))
    else:
        added: Any = old
        anything(added.add(), source)


def _find_places(message: Any, where: str, places: dict[str, list[tuple[Message, FieldDescriptor]]]) -> None:
    for field in message.DESCRIPTOR.fields:
        path = f"{where}{field.name}."
        places[path].append((message, field))
        value = getattr(message, field.name)
        if isinstance(value, Message):
            within = [value] if message.HasField(field.name) else []
        else:
            within = list(value) if field.message_type and not isinstance(value, MutableMapping) else []
        for one in within:
            _find_places(one, path, places)


def _other(field: FieldDescriptor, old: Any, source: random.Random) -> Any:
    if field.cpp_type == field.CPPTYPE_BOOL:
        return not old
    if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return source.choice((*FLOATS, 10 * old))
    if field.type == field.TYPE_BYTES:
        cut = source.randint(0, len(old))
        return source.choice((b"", old[:cut], old[cut:] + old[:cut], 2 * old, source.randbytes(len(old) or 4)))
    if field.type == field.TYPE_STRING:
        return source.choice((*TEXTS, old + old))
    most = (1 << 32) - 1 if field.cpp_type == field.CPPTYPE_UINT32 else (1 << 64) - 1
    return min(most, max(0, source.choice((*NUMBERS, old - 1, old + 1))))
