"""The JSON bodies of clients, typed. Other fields are ignored: each release of an SDK adds some.

A client numbers the requests of a model, and each waits for those before it; so a refused one must use up its number,
or all behind it wait for five and a half minutes, and fail. `numbered` finds the number in a body that was refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import zstandard
from msgspec import Meta, Struct

from echo2.core.documents import half_character, may_have_half_character, parse_json
from echo2.core.errors import PeerError, UserError
from echo2_service import limits
from echo2_service.decide.order import NUMBER_MAX

#: Whole numbers that fit a 64-bit database column, and those that fit an int32 array. An SDK numbers the clones of a
#: sampling client up to 10^18.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Token: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
#: An id made by the service or a path that contains one; and a name chosen by a user, which becomes part of a path.
Id: TypeAlias = Annotated[str, Meta(max_length=512)]
Name: TypeAlias = Annotated[str, Meta(pattern=r"^(?!\.+$)[A-Za-z0-9._-]{1,128}\Z")]
#: Free-form data of users, which is stored and returned.
Labels: TypeAlias = dict[str, Any]

T = TypeVar("T", bound=Struct)

#: Bytes at either end of a body in which model and number are looked for if the whole is not readable, or is longer: a
#: parser would keep all tenants waiting.
END_BYTES = 64 << 10
_MODEL = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,512})"')
_NUMBER = re.compile(rb'"seq_id"\s*:\s*(\d{1,19})\b')


class LabelledBody(Struct):
    """A body with a client's own data; `create_session` has nothing else that is read.

    Raises:
        ValueError: the data are too large, or nested deeper than what stores them can write.
    """

    user_metadata: Labels | None = None

    def __post_init__(self) -> None:
        if self.user_metadata:
            text = msgspec.json.encode(self.user_metadata)
            if len(text) > limits.LABELS_BYTES_MAX:
                raise ValueError(f"user_metadata has {len(text)} bytes as JSON; {limits.LABELS_BYTES_MAX} are taken")
            parse_json(text)


class SessionIdBody(Struct):
    """`session_heartbeat`."""

    session_id: Id


class DeleteBody(Struct):
    """`checkpoints/delete`: all checkpoints that fit everything that is given. `keep_newest`: so many of each model and
    kind stay.

    Raises:
        ValueError: nothing is given.
    """

    paths: Annotated[list[Id], Meta(max_length=limits.PAGE_MAX)] | None = None
    training_run_id: Id | None = None
    older_than_seconds: Annotated[float, Meta(ge=0)] | None = None
    keep_newest: Annotated[int, Meta(ge=0, le=limits.CHECKPOINTS_MAX)] | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in self.__struct_fields__):
            raise ValueError(f"name what to delete, by {', '.join(self.__struct_fields__)}")


class LoraBody(Struct):
    """Settings of an adapter."""

    rank: Annotated[int, Meta(ge=1, le=limits.RANK_MAX)] = 32
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    train_mlp: bool = True
    train_attn: bool = True


class ModelBody(LabelledBody, kw_only=True):
    """`create_model`."""

    session_id: Id
    model_seq_id: Count
    base_model: Id
    lora_config: LoraBody | None = None


class ModelIdBody(Struct):
    """`get_info`, `unload_model`."""

    model_id: Id


class TensorBody(Struct):
    """A tensor as JSON, dense or sparse with compressed rows (CSR)."""

    data: list[float]
    dtype: str = "float32"
    shape: list[Count] | None = None
    sparse_crow_indices: list[Count] | None = None
    sparse_col_indices: list[Count] | None = None


class ChunkBody(Struct):
    """A part of a prompt; only text is accepted."""

    tokens: list[Token] | None = None
    type: str = "encoded_text"


class PromptBody(Struct):
    """A prompt in parts."""

    chunks: list[ChunkBody]


class DatumBody(Struct):
    """One training datum."""

    model_input: PromptBody
    loss_fn_inputs: dict[str, TensorBody]


class LossBody(Struct):
    """Data and their loss."""

    data: list[DatumBody]
    loss_fn: Annotated[str, Meta(max_length=64)]
    loss_fn_config: dict[str, float | str] | None = None


class TrainBody(Struct):
    """`forward_backward` and `forward` of the SDKs that send JSON."""

    model_id: Id
    seq_id: Count | None = None
    forward_backward_input: LossBody | None = None
    forward_input: LossBody | None = None


class AdamBody(Struct):
    """AdamW's settings."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimBody(Struct):
    """`optim_step`."""

    model_id: Id
    adam_params: AdamBody
    seq_id: Count | None = None


class SaveBody(LabelledBody, kw_only=True):
    """`save_weights` and `save_weights_for_sampler`. Without `path` the latter makes a sampler."""

    model_id: Id
    path: Name | None = None
    seq_id: Count | None = None
    ttl_seconds: Annotated[int, Meta(ge=1, le=10**9)] | None = None
    overwrite: bool = False
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"


class LoadBody(LabelledBody, kw_only=True):
    """`load_weights`, into a model or, with `session_id`, into a new one."""

    path: Id
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: Count | None = None
    session_id: Id | None = None
    model_seq_id: Count | None = None


class SamplerBody(Struct):
    """`create_sampling_session`."""

    session_id: Id
    sampling_session_seq_id: Count
    base_model: Id | None = None
    model_path: Id | None = None


class SamplingBody(Struct):
    """Sampling parameters. `stop`: null stops at the model's own end tokens, an empty list never."""

    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0


class SampleBody(Struct):
    """`asample`. `ends_with_model`: an answer also ends with the model's own end tokens where `stop` is given."""

    prompt: PromptBody
    sampling_params: SamplingBody = msgspec.field(default_factory=SamplingBody)
    num_samples: Annotated[int, Meta(ge=1, le=limits.SAMPLES_MAX)] = 1
    sampling_session_id: Id | None = None
    seq_id: Count | None = None
    base_model: Id | None = None
    model_path: Id | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=64)] = 0
    topk_sample_logprobs: Annotated[int, Meta(ge=0, le=64)] = 0
    prompt_logprobs_last_n: Count | None = None
    prompt_alt_tokens_k: Annotated[int, Meta(ge=0, le=64)] = 0
    target_prompt_logprobs: TensorBody | None = None
    ends_with_model: bool = False


class CopyBody(Struct):
    """`copy_weights`. There are no projects here: a project in the body is ignored, and the copy is the caller's."""

    source_path: Id
    ttl_seconds: Annotated[int, Meta(ge=1, le=10**9)] | None = None


class AdapterBody(Struct):
    """`adapters`: the base model of a client's own adapter, and the name to give it."""

    base_model: Id
    name: Name


class FutureBody(Struct):
    """`retrieve_future`, `cancel_future`."""

    request_id: Id


class TtlBody(Struct):
    """The time for which a checkpoint is kept; null: forever."""

    ttl_seconds: Annotated[int, Meta(ge=1, le=10**9)] | None = None


def parse(kind: type[T], body: bytes) -> T:
    """Decode a body.

    Raises:
        PeerError: the body is not JSON of that type, or has too many parts.
    """
    check_parts(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise PeerError("malformed", _half_character(body) or str(error) or type(error).__name__) from error


def digest_of(body: bytes) -> str:
    """Return the digest that identifies a repeated request."""
    return hashlib.sha256(body).hexdigest()


def check_parts(text: bytes) -> None:
    """Refuse JSON of too many parts, before it is parsed.

    Raises:
        PeerError: "too_large".
    """
    if len(text) > limits.PARTS_MAX and (count := text.count(b"{") + text.count(b"[")) > limits.PARTS_MAX:
        raise PeerError("too_large", f"the JSON has {count} objects and lists; {limits.PARTS_MAX} are taken.")


def _half_character(body: bytes) -> str:
    """Return a sentence that names the field with half of a character, which msgspec does not; empty: there is none."""
    try:
        return half_character(parse_json(body)) if may_have_half_character(body) else ""
    except ValueError:
        return ""


def prompt_tokens(prompt: PromptBody) -> Sequence[int]:
    """Return the tokens of all parts.

    Raises:
        UserError: a part is not text.
    """
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if chunk.tokens is None:
            raise not_text(chunk.type)
        tokens += chunk.tokens
    return tokens


def not_text(kind: str) -> UserError:
    """Return the error for a part of this type in a prompt or datum."""
    return UserError(f"The input has a part of type {kind!r}. Only 'encoded_text' is taken here: send tokens alone.")


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
    is_name = isinstance(model, str) and not half_character(model)
    return Numbered(model, number) if is_name and is_number else None


def _beginning(body: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            return reader.read(END_BYTES)
    except (zstandard.ZstdError, MemoryError):
        return b""


def _in_json(body: bytes) -> tuple[Any, Any]:
    try:
        values = parse_json(body) if len(body) <= 2 * END_BYTES else None
    except ValueError:  # also text that is not UTF-8
        values = None
    if values is None:
        model, number = (_at_an_end(body, pattern) for pattern in (_MODEL, _NUMBER))
        return model and model.decode(errors="replace"), int(number) if number else None
    return (values.get("model_id"), values.get("seq_id")) if isinstance(values, dict) else (None, None)


def _at_an_end(body: bytes, pattern: re.Pattern[bytes]) -> bytes | None:
    found = pattern.search(body[:END_BYTES]) or pattern.search(body[-END_BYTES:])
    return found and found[1]


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
