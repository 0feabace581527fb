"""Converts clients' training data, protobuf or JSON, to the back end's types, and the back end's answers to bytes.

Sizes are checked before anything is allocated: the shape of a small sparse tensor can exceed the memory.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from echo2.core.errors import PeerError, UserError
from echo2_service import limits
from echo2_service import tinker_pb2 as pb
from echo2_service.backend import ClientDatum, Floats, TrainOutput, TrainWork
from echo2_service.front.bodies import DatumBody, LossBody, TensorBody, TrainBody, not_text, parse, prompt_tokens
from echo2_service.front.sampled import are_whole, csr_rows, sample_as_json

DTYPES: Mapping[int, str] = {
    pb.DTYPE_FLOAT32: "<f4",
    pb.DTYPE_INT64: "<i8",
    pb.DTYPE_INT32: "<i4",
    pb.DTYPE_BFLOAT16: "<u2",
}
JSON_DTYPES = {"float32": "<f4", "int64": "<i8"}
#: Names allowed in a datum's `loss_fn_inputs`.
CLIPS = ("clip_low_threshold", "clip_high_threshold")
INPUTS = frozenset({"target_tokens", "weights", "advantages", "logprobs", "mask", "sequence_ratio_mask", *CLIPS})
Array: TypeAlias = NDArray[Any]


def read_protobuf(body: bytes) -> tuple[TrainWork, bytes]:
    """Return the work in a protobuf body, and canonical bytes that are the same for the same work.

    Raises:
        PeerError: the body is not such a message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise PeerError("malformed", f"not a ForwardBackwardRequest: {error}") from error
    data: list[tuple[ClientDatum, int]] = []
    error_text = ""
    try:
        params = _params(message)
        _check_count(len(message.data))
        tensors = [tensor for datum in message.data for tensor in datum.loss_fn_inputs.values()]
        _check_sparse(tensor.shape for tensor in tensors if tensor.HasField("sparse_csr"))
        data = _read_all(message.data, _protobuf_datum)
    except UserError as error:
        params, error_text = {}, str(error)
    work = TrainWork(
        message.model_id,
        message.seq_id or None,
        [datum for datum, _ in data],
        [width for _, width in data],
        message.loss_fn,
        params,
        message.forward_only,
        error_text,
    )
    return work, message.SerializeToString(deterministic=True)


def _params(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    texts = [name for name, value in message.loss_fn_config_v2.items() if value.HasField("text")]
    if texts:
        raise UserError(f"loss_fn_config has a text at {texts[0]!r}; the losses here take numbers.")
    numbers = {name: value.number for name, value in message.loss_fn_config_v2.items()}
    return numbers or dict(message.loss_fn_config)


def read_json(body: bytes, forward_only: bool) -> TrainWork:
    """Return the work in the body of an SDK that sends JSON.

    Raises:
        PeerError: the body is not such JSON.
    """
    parsed = parse(TrainBody, body)
    given = parsed.forward_input if forward_only else parsed.forward_backward_input
    if given is None:
        raise PeerError("malformed", "forward_input or forward_backward_input is missing")
    try:
        data, params = _json_data(given)
        error = ""
    except UserError as problem:
        data, params, error = [], {}, str(problem)
    rows, widths = [datum for datum, _ in data], [width for _, width in data]
    return TrainWork(parsed.model_id, parsed.seq_id, rows, widths, given.loss_fn, params, forward_only, error)


def _json_data(given: LossBody) -> tuple[list[tuple[ClientDatum, int]], dict[str, float]]:
    config = given.loss_fn_config or {}
    params = {name: value for name, value in config.items() if not isinstance(value, str)}
    if len(params) < len(config):
        raise UserError("loss_fn_config holds a text; the losses here take numbers.")
    _check_count(len(given.data))
    tensors = [tensor for datum in given.data for tensor in datum.loss_fn_inputs.values()]
    _check_sparse(tensor.shape or () for tensor in tensors if tensor.sparse_crow_indices is not None)
    return _read_all(given.data, _json_datum), params


def _json_datum(datum: DatumBody) -> tuple[ClientDatum, int]:
    tokens = np.asarray(prompt_tokens(datum.model_input), dtype="<i4")
    return _datum(tokens, {name: _json_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()})


def _check_sparse(shapes: Iterable[Sequence[int]]) -> None:
    """Refuse sparse tensors that would be too large once dense."""
    count = sum(math.prod(abs(size) for size in shape) for shape in shapes)
    if count > limits.NUMBERS_MAX:
        raise UserError(f"The sparse tensors of a request stand for {count} numbers; {limits.NUMBERS_MAX} are taken.")


def _check_count(count: int) -> None:
    if not 1 <= count <= limits.DATA_MAX:
        raise UserError(f"A request has {count} data; from 1 to {limits.DATA_MAX} are taken.")


def _read_all(given: Iterable[Any], read: Callable[[Any], tuple[ClientDatum, int]]) -> list[tuple[ClientDatum, int]]:
    """Return `read(datum)` for each datum; errors name the datum by its index."""
    data, count = [], 0
    for index, datum in enumerate(given):
        try:
            data.append(read(datum))
        except (UserError, ValueError, OverflowError) as error:
            raise UserError(f"datum {index}: {error}") from error
        made = data[-1][0]
        columns = (made.targets, made.weights, made.advantages, made.logprobs, made.clip_low, made.clip_high)
        count += sum(len(column) for column in columns if column is not None)
        if count > limits.NUMBERS_MAX:
            raise UserError(f"The first {index + 1} data have {count} numbers; a request has {limits.NUMBERS_MAX}.")
    return data


def _protobuf_datum(datum: pb.Datum) -> tuple[ClientDatum, int]:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise not_text(chunk.WhichOneof("chunk") or "unknown")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, dtype="<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype="<i4")
    return _datum(tokens, {name: _protobuf_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()})


def _protobuf_tensor(tensor: pb.Tensor) -> Array:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"a tensor has the dtype {tensor.dtype}, which is unknown.")
    shape = list(tensor.shape)
    is_sparse = tensor.HasField("sparse_csr")
    values = np.frombuffer(tensor.sparse_csr.values if is_sparse else tensor.dense, dtype=dtype)
    if tensor.dtype == pb.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if not is_sparse:
        return _shaped(values, shape)
    crow = np.frombuffer(tensor.sparse_csr.crow_indices, dtype="<i8")
    col = np.frombuffer(tensor.sparse_csr.col_indices, dtype="<i8")
    return _dense(values, crow, col, shape)


def _json_tensor(tensor: TensorBody) -> Array:
    dtype = JSON_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"a tensor has the dtype {tensor.dtype!r}; there are float32 and int64.")
    numbers = np.asarray(tensor.data, dtype=np.float64)
    if tensor.dtype == "int64" and not are_whole(numbers):
        raise UserError("an int64 tensor has a number that is not a whole one, or is too large.")
    with np.errstate(over="ignore", invalid="ignore"):  # overflows become infinite and are refused later
        values = numbers.astype(dtype)
    if tensor.sparse_crow_indices is None:
        return _shaped(values, tensor.shape)
    crow = np.asarray(tensor.sparse_crow_indices, dtype=np.int64)
    col = np.asarray(tensor.sparse_col_indices or [], dtype=np.int64)
    return _dense(values, crow, col, tensor.shape or [])


def _shaped(values: Array, shape: Sequence[int] | None) -> Array:
    if not shape:
        return values
    most = limits.TENSOR_NUMBERS_MAX
    if any(size < 0 or size > most for size in shape) or int(np.prod(shape, dtype=object)) != values.size:
        raise UserError(f"a tensor of shape {list(shape)[:4]} has {values.size} numbers.")
    return values.reshape(shape)


def _dense(values: Array, crow: Array, col: Array, shape: Sequence[int]) -> Array:
    """Convert a sparse tensor with compressed rows to a dense one."""
    most = limits.TENSOR_NUMBERS_MAX
    if len(shape) != 2 or min(shape) < 0 or max(shape) > most or shape[0] * shape[1] > most:
        raise UserError(f"a sparse tensor has the shape {list(shape)[:4]}; two sizes are taken, their product bounded.")
    rows = csr_rows(crow, col, len(values), shape)
    dense = np.zeros(shape, dtype=values.dtype)
    dense[rows, col] = values
    return dense


def _datum(tokens: Array, inputs: Mapping[str, Array]) -> tuple[ClientDatum, int]:
    """Return the datum, and the width of its targets; 0 if the targets have one dimension."""
    unknown = sorted(inputs.keys() - INPUTS)
    if unknown:
        raise UserError(f"loss_fn_inputs has {unknown[0]!r}; known: {', '.join(sorted(INPUTS))}.")
    targets = inputs.get("target_tokens")
    if targets is None:
        raise UserError("loss_fn_inputs lacks target_tokens.")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise UserError(f"target_tokens has the shape {list(targets.shape)}; the input has {len(tokens)} tokens.")
    floats = {name: _floats(name, inputs[name], targets) for name in inputs if name != "target_tokens"}
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= 2**31:
        raise UserError(f"target_tokens has {low if low < 0 else high}, which is no token.")
    clips = [array("d", floats[name].astype("<f8").tobytes()) if name in floats else None for name in CLIPS]
    masks = [floats[name] for name in ("mask", "sequence_ratio_mask") if name in floats]
    weights = floats.get("weights", masks[0] if masks else None)
    datum = ClientDatum(
        array("i", tokens.astype("<i4").tobytes()),
        array("i", targets.astype("<i4").tobytes()),
        None if weights is None else array("d", weights.astype("<f8").tobytes()),
        array("d", floats["advantages"].astype("<f8").tobytes()) if "advantages" in floats else None,
        array("f", floats["logprobs"].astype("<f4").tobytes()) if "logprobs" in floats else None,
        *clips,
    )
    return datum, targets.shape[1] if targets.ndim == 2 else 0


def _floats(name: str, values: Array, targets: Array) -> Array:
    if name in CLIPS and values.size == 1:
        values = np.full(targets.size, values.item())  # one bound for all tokens of the datum
    if values.size != targets.size:
        raise UserError(f"{name} has {values.size} numbers, target_tokens {targets.size}.")
    if not np.isfinite(values).all():
        raise UserError(f"{name} holds a number that is not finite.")
    return values


def train_answer(output: TrainOutput, widths: Sequence[int]) -> bytes:
    """Return the bytes of a `ForwardBackwardOutput`, in which consecutive data of equal width share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=output.metrics)
    begin = 0
    for end in range(1, len(widths) + 1):
        if end == len(widths) or widths[end] != widths[begin]:
            record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - begin)
            record.fields["logprobs"].CopyFrom(_batched(output.logprobs[begin:end], widths[begin]))
            begin = end
    return message.SerializeToString()


def _batched(rows: Sequence[Floats], width: int) -> pb.BatchedTensor:
    offsets = np.cumsum([0, *(len(row) * row.itemsize for row in rows)], dtype="<i8")
    data = b"".join(row.tobytes() for row in rows)
    shape = [width] if width else []
    return pb.BatchedTensor(data=data, offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32, trailing_shape=shape)


def answer_as_json(kind: str, answer: bytes) -> dict[str, Any]:
    """Convert an answer for a client that accepts only JSON."""
    if kind == "sample":
        return sample_as_json(pb.SampleResponse.FromString(answer))
    message = pb.ForwardBackwardOutput.FromString(answer)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        batch = record.fields["logprobs"]
        offsets = np.frombuffer(batch.offsets, dtype="<i8") // 4
        flat, width = np.frombuffer(batch.data, dtype="<f4"), list(batch.trailing_shape)
        for begin, end in itertools.pairwise(offsets):
            shape = [int(end - begin) // (width[0] if width else 1), *width]
            outputs.append({"logprobs": {"data": flat[begin:end].tolist(), "dtype": "float32", "shape": shape}})
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(message.metrics)}
