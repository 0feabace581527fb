"""Scores that clients request beside their samples, and the answers to sample requests as protobuf and JSON."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from echo2.core.errors import UserError
from echo2_service import limits
from echo2_service import tinker_pb2 as pb
from echo2_service.backend import Floats, Ints, SampleOutput, SampleSpec
from echo2_service.front.bodies import SampleBody, TensorBody

#: The protocol's value for "no logprob".
NO_LOGPROB = -99999.0


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
        UserError: the tensor is no int64 tensor [length - 1, K] of tokens, dense or with compressed rows.
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


def _targets(asked: TensorBody, found: Floats) -> pb.Tensor:
    """Return logprobs in the layout of the requested targets; 0 where no target was requested."""
    logprobs = np.zeros(len(asked.data), dtype="<f4")
    logprobs[np.asarray(asked.data) >= 0] = np.frombuffer(found, dtype="<f4")
    answer = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=asked.shape)
    if asked.sparse_crow_indices is None:
        answer.dense = logprobs.tobytes()
        return answer
    crow, col = (
        np.asarray(indices or [], dtype="<i8").tobytes()
        for indices in (asked.sparse_crow_indices, asked.sparse_col_indices)
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
    wanted = [None if np.isnan(x) else float(x) for x in logprobs] if len(logprobs) else None
    top = _top_rows(message.topk_prompt_logprobs) or None
    return {"sequences": sequences, "prompt_logprobs": wanted, "topk_prompt_logprobs": top}


def _top_rows(top: pb.TopkLogprobs) -> list[list[list[float]] | None]:
    tokens = np.frombuffer(top.token_ids, dtype="<i4").reshape(-1, max(1, top.k))
    likely = np.frombuffer(top.logprobs, dtype="<f4").reshape(-1, max(1, top.k))
    return [
        [[int(t), float(x)] for t, x in zip(*row, strict=True) if x > NO_LOGPROB] or None
        for row in zip(tokens, likely, strict=True)
    ]
