"""Messages between a service's processes: MessagePack in frames.

msgspec checks the types. Arrays are sent as their type code and their bytes.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import msgspec

from echo2.core import frames
from echo2_service.backend import (
    AdamSettings,
    ClientDatum,
    ModelSpec,
    SampleOutput,
    SampleSpec,
    TrainOutput,
    TrainWork,
)

#: Type codes of the arrays that may be sent.
_CODES = ("i", "f", "d")


class CreateModelCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.create_model`."""

    model: str
    spec: ModelSpec


class ForwardBackwardCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.forward_backward`."""

    model: str
    operation: int
    data: list[ClientDatum]
    loss: str
    params: dict[str, float]
    forward_only: bool


class OptimStepCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.optim_step`."""

    model: str
    operation: int
    adam: AdamSettings


class SaveStateCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.save_state`."""

    model: str
    operation: int
    directory: str


class LoadStateCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.load_state`."""

    model: str
    operation: int
    directory: str
    with_optimizer: bool


class PublishCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.publish`."""

    model: str
    operation: int
    directory: str


class UnloadCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.unload`."""

    model: str


class DeleteCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.delete`."""

    model: str


class SampleCall(msgspec.Struct, frozen=True, tag=True):
    """See `Backend.sample`."""

    base: str
    snapshot: str
    spec: SampleSpec


class ReadCall(msgspec.Struct, frozen=True, tag=True):
    """Read training data in JSON."""

    body: bytes
    forward_only: bool


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """The caller no longer waits for the answer to call `number`."""

    number: int


Operation: TypeAlias = ForwardBackwardCall | OptimStepCall | SaveStateCall | LoadStateCall | PublishCall
ModelCall: TypeAlias = CreateModelCall | Operation | UnloadCall | DeleteCall
Call: TypeAlias = ModelCall | SampleCall | ReadCall | CancelCall


class Request(msgspec.Struct, frozen=True):
    """A call, numbered by the caller."""

    number: int
    call: Call


class Answer(msgspec.Struct, frozen=True):
    """The outcome of a call; fields of other kinds of calls are None. `has_begun`: no outcome yet, but the call is in
    progress. `fault`: an error message; `is_ours`: the fault is echo2's, not the tenant's.
    """

    number: int = 0
    has_begun: bool = False
    fault: str = ""
    is_ours: bool = False
    trained: TrainOutput | None = None
    metrics: dict[str, float] | None = None
    sampled: SampleOutput | None = None
    work: TrainWork | None = None


class JournalRecord(msgspec.Struct, frozen=True):
    """An operation that was carried out. `call`: the call to repeat to restore the model's state; None if there is
    nothing to repeat. `is_checkpoint`: no operation, but a mark that a checkpoint covers all up to `operation`.
    """

    operation: int
    call: ForwardBackwardCall | OptimStepCall | None
    answer: Answer
    is_checkpoint: bool = False


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return [value.typecode, value.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} is not sent")


def _typed(kind: Any, value: Any) -> Any:
    if kind is not array or not isinstance(value, list) or len(value) != 2 or value[0] not in _CODES:
        raise ValueError("not an array")
    return array(value[0], value[1])


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
REQUESTS = msgspec.msgpack.Decoder(Request, dec_hook=_typed)
ANSWERS = msgspec.msgpack.Decoder(Answer, dec_hook=_typed)
RECORDS = msgspec.msgpack.Decoder(JournalRecord, dec_hook=_typed)
#: The first bytes of each JournalRecord: a map, and the first name in it.
RECORD_BEGINNING = bytes([0x80 | len(JournalRecord.__struct_fields__)]) + _ENCODER.encode("operation")


def encode(message: Request | Answer) -> bytes:
    """Encode a message without its length, for links that preserve message boundaries."""
    return _ENCODER.encode(message)


def frame(message: Request | Answer | JournalRecord) -> bytes:
    """Encode a message as one frame.

    Raises:
        PeerError: "oversized".
    """
    return frames.frame(_ENCODER.encode(message))
