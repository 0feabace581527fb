"""Converts clients' data, protobuf or JSON, to the back end's types, and the back end's answers to bytes: of training,
and of samples with the scores that clients request beside them.

Sizes are checked before anything is allocated: the shape of a small sparse tensor can exceed the memory.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from echo2.core.errors import PeerError, UserError
from echo2.transport.base import MESSAGE_WEIGHT, weigh
from echo2_service import limits
from echo2_service import tinker_pb2 as pb
from echo2_service.backend import ClientDatum, Floats, Ints, SampleOutput, SampleSpec, TrainOutput, TrainWork
from echo2_service.front.bodies import (
    DatumBody,
    LossBody,
    SampleBody,
    TensorBody,
    TrainBody,
    digest_of,
    not_text,
    parse,
    prompt_tokens,
)

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

#: The protocol's value for "no logprob".
NO_LOGPROB = -99999.0


def read_training(body: bytes, is_protobuf: bool, forward_only: bool = False) -> TrainWork:
    """Return the work in the body of a `forward_backward`, or of a `forward` of an SDK that sends JSON.

    Raises:
        PeerError: the body is not such a message, or has too many parts.
    """
    return read_protobuf(body) if is_protobuf else read_json(body, forward_only)


def read_protobuf(body: bytes) -> TrainWork:
    """Return the work in a protobuf body. Its digest is that of canonical bytes, which are the same for the same work.

    Raises:
        PeerError: the body is not such a message, or has too many parts.
    """
    weigh(pb.ForwardBackwardRequest, body, limits.PARTS_MAX * MESSAGE_WEIGHT)
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
    digest = digest_of(message.SerializeToString(deterministic=True))
    begun = TrainWork(
        message.model_id, message.seq_id or None, [], [], message.loss_fn, params, message.forward_only, error_text
    )
    return _with_data(begun, data, digest)


def _with_data(work: TrainWork, data: Sequence[tuple[ClientDatum, int]], digest: str) -> TrainWork:
    """Return the work with these data. A token counts if its weight, or else its advantage, is not 0."""
    rows, counted = [datum for datum, _ in data], 0
    for datum in rows:
        column = datum.weights if datum.weights is not None else datum.advantages
        counted += len(datum.targets) if column is None else int(np.count_nonzero(np.frombuffer(column)))
    tokens = sum(len(datum.tokens) for datum in rows)
    widths = [width for _, width in data]
    return replace(work, data=rows, widths=widths, num_tokens=tokens, num_counted=counted, digest=digest)


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
    loss_body = parsed.forward_input if forward_only else parsed.forward_backward_input
    if loss_body is None:
        raise PeerError("malformed", "forward_input or forward_backward_input is missing")
    try:
        data, params = _json_data(loss_body)
        error = ""
    except UserError as problem:
        data, params, error = [], {}, str(problem)
    begun = TrainWork(parsed.model_id, parsed.seq_id, [], [], loss_body.loss_fn, params, forward_only, error)
    return _with_data(begun, data, digest_of(body))


def _json_data(loss_body: LossBody) -> tuple[list[tuple[ClientDatum, int]], dict[str, float]]:
    config = loss_body.loss_fn_config or {}
    params = {name: value for name, value in config.items() if not isinstance(value, str)}
    if len(params) < len(config):
        raise UserError("loss_fn_config holds a text; the losses here take numbers.")
    _check_count(len(loss_body.data))
    tensors = [tensor for datum in loss_body.data for tensor in datum.loss_fn_inputs.values()]
    _check_sparse(tensor.shape or () for tensor in tensors if tensor.sparse_crow_indices is not None)
    return _read_all(loss_body.data, _json_datum), params


def _json_datum(datum: DatumBody) -> tuple[ClientDatum, int]:
    tokens = np.asarray(prompt_tokens(datum.model_input), dtype="<i4")
    return _datum(tokens, {name: _json_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()})


def _check_sparse(shapes: Iterable[Sequence[int]]) -> None:
    """Refuse sparse tensors that would be too large once dense."""
    count = sum(math.prod(abs(size) for size in shape) for shape in shapes if len(shape) == 2)  # or else refused
    if count > limits.NUMBERS_MAX:
        raise UserError(f"The sparse tensors of a request stand for {count} numbers; {limits.NUMBERS_MAX} are taken.")


def _check_count(count: int) -> None:
    if not 1 <= count <= limits.DATA_MAX:
        raise UserError(f"A request has {count} data; from 1 to {limits.DATA_MAX} are taken.")


def _read_all(items: Iterable[Any], read: Callable[[Any], tuple[ClientDatum, int]]) -> list[tuple[ClientDatum, int]]:
    """Return `read(datum)` for each datum; errors name the datum by its index."""
    data, count = [], 0
    for index, datum in enumerate(items):
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
    if len(shape) > limits.DIMENSIONS_MAX:  # their product would have millions of digits
        raise UserError(f"a tensor's shape has {len(shape)} sizes; {limits.DIMENSIONS_MAX} are taken.")
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
        raise UserError(f"target_tokens has {low if low < 0 else high}, which is not a token.")
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
    """Convert an answer for a client that accepts only JSON. Its long parts are encoded one by one: nobody else runs
    while one is.
    """
    if kind == "sample":
        sample = sample_as_json(pb.SampleResponse.FromString(answer))
        return {**sample, "sequences": [_encoded(sequence) for sequence in sample["sequences"]]}
    message = pb.ForwardBackwardOutput.FromString(answer)
    outputs: list[msgspec.Raw] = []
    for record in message.loss_fn_outputs:
        batch = record.fields["logprobs"]
        offsets = np.frombuffer(batch.offsets, dtype="<i8") // 4
        flat, width = np.frombuffer(batch.data, dtype="<f4"), list(batch.trailing_shape)
        for begin, end in itertools.pairwise(offsets):
            shape = [int(end - begin) // (width[0] if width else 1), *width]
            tensor = {"data": flat[begin:end].tolist(), "dtype": "float32", "shape": shape}
            outputs.append(_encoded({"logprobs": tensor}))
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(message.metrics)}


def _encoded(part: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(part))


def check_scores(spec: SampleSpec) -> None:
    """Refuse a request for more scores than can be held and sent.

    Raises:
        UserError: too many scores are requested.
    """
    of_prompt = len(spec.prompt) * (spec.top_prompt_logprobs + spec.num_alternatives) + len(spec.target_places)
    count = of_prompt + spec.num_samples * spec.max_tokens * spec.top_sample_logprobs
    if count > limits.SCORES_MAX:
        raise UserError(
            f"{count} logprobs are asked for; a call gives {limits.SCORES_MAX}: lower max_tokens, num_samples or k."
        )
    if (count := spec.num_samples * spec.max_tokens) > limits.SAMPLED_TOKENS_MAX:
        raise UserError(
            f"{spec.num_samples} samples of {spec.max_tokens} tokens are asked for; a call gives "
            f"{limits.SAMPLED_TOKENS_MAX} tokens: lower max_tokens or num_samples."
        )


def read_targets(tensor: TensorBody, length: int) -> tuple[Ints, Ints]:
    """Return ascending positions in a prompt of this length, and the tokens to score there.

    Raises:
        UserError: the tensor is not an int64 tensor [length - 1, K] of tokens, dense or with compressed rows.
    """
    shape = tensor.shape or []
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
        raise UserError(
            f"target_prompt_logprobs is {tensor.dtype} of shape {shape[:4]}; it must be int64, [{length - 1}, K]."
        )
    tokens = np.asarray(tensor.data, dtype=np.float64)
    rows = _rows(tensor, len(tokens), shape)
    if not are_whole(tokens) or not ((tokens >= -1) & (tokens < 2**31)).all():
        raise UserError("target_prompt_logprobs has a number that is neither a token nor -1.")
    is_wanted = tokens >= 0
    places = (rows[is_wanted] + 1).astype("<i4")
    return array("i", places.tobytes()), array("i", tokens[is_wanted].astype("<i4").tobytes())


def are_whole(numbers: Any) -> bool:
    """Whether each of these float64 numbers is an integer that float64 holds exactly."""
    return bool(((np.abs(numbers) <= 2.0**53) & (numbers == np.floor(numbers))).all())


def _rows(tensor: TensorBody, count: int, shape: Sequence[int]) -> Any:
    """Return the row of each number of a tensor."""
    if tensor.sparse_crow_indices is None:
        if count != shape[0] * shape[1]:
            raise UserError(f"target_prompt_logprobs of shape {list(shape)} has {count} numbers.")
        return np.repeat(np.arange(shape[0]), shape[1])
    crow = np.asarray(tensor.sparse_crow_indices, dtype=np.int64)
    col = np.asarray(tensor.sparse_col_indices or [], dtype=np.int64)
    return csr_rows(crow, col, count, shape)


def csr_rows(crow: Any, col: Any, count: int, shape: Sequence[int]) -> Any:
    """Return the row of each of the `count` numbers of a sparse tensor with compressed rows.

    Raises:
        UserError: the indices do not fit the shape.
    """
    rows, columns = shape
    sizes = np.diff(crow)
    is_sound = len(crow) == rows + 1 and len(col) == count and crow[0] == 0 and crow[-1] == count
    if not is_sound or (sizes < 0).any() or (count and not (col.min() >= 0 and col.max() < columns)):
        raise UserError("a sparse tensor's indices do not fit its shape.")
    return np.repeat(np.arange(rows), sizes)


def sample_answer(output: SampleOutput, body: SampleBody) -> bytes:
    """Return the bytes of a `SampleResponse` with all that the body requests."""
    message = pb.SampleResponse()
    for sequence in output.sequences:
        reason = pb.STOP_REASON_STOP if sequence.finish == "stop" else pb.STOP_REASON_LENGTH
        made = message.sequences.add(
            stop_reason=reason, tokens=sequence.tokens.tobytes(), logprobs=sequence.logprobs.tobytes()
        )
        if body.topk_sample_logprobs:
            made.topk_sampled_logprobs.CopyFrom(_top(sequence.top_tokens, sequence.top_logprobs, len(sequence.tokens)))
    num_places, last_n = len(output.prompt_logprobs), body.prompt_logprobs_last_n
    num_skipped = 0 if last_n is None else max(0, num_places - last_n)
    if body.prompt_logprobs:
        logprobs = np.frombuffer(output.prompt_logprobs, dtype="<f4").copy()
        logprobs[:num_skipped] = np.nan
        message.prompt_logprobs = logprobs.tobytes()
    if body.topk_prompt_logprobs:
        top = _top(output.top_prompt_tokens, output.top_prompt_logprobs, num_places, num_skipped)
        message.topk_prompt_logprobs.CopyFrom(top)
    if body.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_targets(body.target_prompt_logprobs, output.target_logprobs))
    if body.prompt_alt_tokens_k:
        shape = [num_places - 1, body.prompt_alt_tokens_k]
        drawn = np.frombuffer(output.alternative_tokens, dtype="<i4").astype("<i8").tobytes()
        alternatives = message.prompt_alt_tokens
        alternatives.tokens.CopyFrom(pb.Tensor(dense=drawn, dtype=pb.DTYPE_INT64, shape=shape))
        logprobs_bytes = output.alternative_logprobs.tobytes()
        alternatives.logprobs.CopyFrom(pb.Tensor(dense=logprobs_bytes, dtype=pb.DTYPE_FLOAT32, shape=shape))
    return message.SerializeToString()


def _top(tokens: Ints, logprobs: Floats, rows: int, num_skipped: int = 0) -> pb.TopkLogprobs:
    width = len(tokens) // max(1, rows)
    ids, likely = np.frombuffer(tokens, dtype="<i4").copy(), np.frombuffer(logprobs, dtype="<f4").copy()
    is_empty = ids < 0
    is_empty[: num_skipped * width] = True
    ids[is_empty], likely[is_empty] = 0, NO_LOGPROB
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=likely.tobytes(), k=width, length=rows)


def _targets(targets: TensorBody, sampled: Floats) -> pb.Tensor:
    """Return logprobs in the layout of the requested targets; 0 where no target was requested."""
    logprobs = np.zeros(len(targets.data), dtype="<f4")
    logprobs[np.asarray(targets.data) >= 0] = np.frombuffer(sampled, dtype="<f4")
    answer = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=targets.shape)
    if targets.sparse_crow_indices is None:
        answer.dense = logprobs.tobytes()
        return answer
    crow, col = (
        np.asarray(indices or [], dtype="<i8").tobytes()
        for indices in (targets.sparse_crow_indices, targets.sparse_col_indices)
    )
    answer.sparse_csr.CopyFrom(pb.SparseCsr(values=logprobs.tobytes(), crow_indices=crow, col_indices=col))
    return answer


def sample_as_json(message: pb.SampleResponse) -> dict[str, Any]:
    """Convert an answer for a client that accepts only JSON. No JSON SDK requests targets or alternatives."""
    names = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}
    sequences = [
        {
            "tokens": np.frombuffer(sequence.tokens, dtype="<i4").tolist(),
            "logprobs": np.frombuffer(sequence.logprobs, dtype="<f4").tolist(),
            "stop_reason": names[sequence.stop_reason],
            "topk_logprobs": _top_rows(sequence.topk_sampled_logprobs) or None,
        }
        for sequence in message.sequences
    ]
    logprobs = np.frombuffer(message.prompt_logprobs, dtype="<f4")
    of_prompt = [None if np.isnan(x) else float(x) for x in logprobs] if len(logprobs) else None
    top = _top_rows(message.topk_prompt_logprobs) or None
    return {"sequences": sequences, "prompt_logprobs": of_prompt, "topk_prompt_logprobs": top}


def _top_rows(top: pb.TopkLogprobs) -> list[list[list[float]] | None]:
    tokens = np.frombuffer(top.token_ids, dtype="<i4").reshape(-1, max(1, top.k))
    likely = np.frombuffer(top.logprobs, dtype="<f4").reshape(-1, max(1, top.k))
    return [
        [[int(t), float(x)] for t, x in zip(*row, strict=True) if x > NO_LOGPROB] or None
        for row in zip(tokens, likely, strict=True)
    ]
