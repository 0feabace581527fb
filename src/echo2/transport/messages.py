"""`echo2.types` on the wire, and back. Decoding trusts nothing: what comes out is within bounds and consistent, or
PeerError.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np

from echo2.errors import PeerError
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.types import (
    Assignment,
    FinishReason,
    GroupKind,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

# ---- groups ----------------------------------------------------------------------------------------------------------


def encode_group(group: RolloutGroup) -> wire.RolloutGroup:
    """The wire form of a group."""
    return wire.RolloutGroup(
        kind=group.group.kind,
        number=group.group.number,
        step=group.step,
        lineage=group.lineage,
        cursor=group.cursor,
        prompt_tokens=group.prompt_tokens.tobytes(),
        rollouts=[_encode_rollout(rollout) for rollout in group.rollouts],
        worker_id=group.worker_id,
        generate_seconds=group.generate_seconds,
        logged=group.logged,
    )


def _encode_rollout(rollout: Rollout) -> wire.Rollout:
    message: wire.Rollout = _encode_sample(rollout, wire.Rollout)
    message.text = rollout.text
    message.reward_parts.update(rollout.reward_parts)
    if rollout.reward is not None:
        message.reward = rollout.reward
    return message


def decode_group(message: wire.RolloutGroup) -> RolloutGroup:
    """A group as the head stored it.

    Raises:
        PeerError: "oversized" or "malformed", saying what is wrong.
    """
    _bound_samples(len(message.rollouts))
    _bound_seconds(message.generate_seconds)
    _bound_chars("worker_id", message.worker_id, limits.NAME_CHARS_MAX)
    return RolloutGroup(
        group=GroupRef(_kind(message.kind), whole_number("number", message.number)),
        step=whole_number("step", message.step),
        lineage=whole_number("lineage", message.lineage),
        cursor=whole_number("cursor", message.cursor),
        prompt_tokens=_token_ids("prompt_tokens", message.prompt_tokens),
        rollouts=tuple(_decode_rollout(rollout) for rollout in message.rollouts),
        worker_id=message.worker_id,
        generate_seconds=message.generate_seconds,
        logged=message.logged,
    )


def encode_delivery(lease_id: int, group: RolloutGroup) -> wire.Delivery:
    """What a worker sends of the group that it sampled under this lease: what nobody else can know."""
    return wire.Delivery(
        lease_id=lease_id,
        kind=group.group.kind,
        number=group.group.number,
        lineage=group.lineage,
        samples=[_encode_sample(rollout) for rollout in group.rollouts],
        generate_seconds=group.generate_seconds,
    )


def _encode_sample(rollout: Rollout, kind: type[Any] = wire.Sample) -> Any:
    """What both forms of an attempt hold: its tokens, and how they were drawn."""
    message = kind(
        tokens=rollout.tokens.tobytes(),
        logprobs=rollout.logprobs.tobytes(),
        loss_mask=rollout.loss_mask,
        version_spans=[wire.VersionSpan(start=start, version=version) for start, version in rollout.version_spans],
        finish=rollout.finish,
    )
    if rollout.support_tokens is not None and rollout.support_offsets is not None:
        message.support_tokens = rollout.support_tokens.tobytes()
        message.support_offsets = rollout.support_offsets.tobytes()
    return message


def delivered_group(message: wire.Delivery) -> GroupRef:
    """The group that a worker says its result is of.

    Raises:
        PeerError: "malformed".
    """
    return GroupRef(_kind(message.kind), whole_number("number", message.number))


def decode_delivery(message: wire.Delivery, lease: Lease, prompt_tokens: array[int], worker_id: str) -> RolloutGroup:
    """A group from a stranger: its samples are the stranger's, all else is the head's. Without texts and rewards.

    Raises:
        PeerError: "oversized" or "malformed", saying what is wrong.
    """
    _bound_samples(len(message.samples))
    _bound_seconds(message.generate_seconds)
    return RolloutGroup(
        group=delivered_group(message),
        step=lease.step,
        lineage=whole_number("lineage", message.lineage),
        cursor=lease.cursor,
        prompt_tokens=prompt_tokens,
        rollouts=tuple(_decode_sample(sample) for sample in message.samples),
        worker_id=worker_id,
        generate_seconds=message.generate_seconds,
    )


def _bound_samples(num_samples: int) -> None:
    if num_samples > limits.SAMPLES_MAX:
        raise PeerError("oversized", f"{num_samples} rollouts; the limit is {limits.SAMPLES_MAX}")
    _require(num_samples > 0, "a group without rollouts")


def _bound_seconds(seconds: float) -> None:
    _require(0 <= seconds <= limits.DURATION_SECONDS_MAX, "generate_seconds is no duration")


def check_lengths(group: RolloutGroup, max_tokens: int) -> None:
    """Raises PeerError where a rollout is longer than was leased."""
    longest = max(len(rollout.tokens) for rollout in group.rollouts)
    if longest > max_tokens:
        raise PeerError("oversized", f"a rollout of {longest} tokens; {max_tokens} were leased")


def check_turns(group: RolloutGroup, max_turns: int) -> None:
    """Raises PeerError("malformed") where an attempt does not begin and end with the policy's tokens, or has more turns
    than were leased. One turn: no token is an environment's."""
    for rollout in group.rollouts:
        mask = rollout.loss_mask
        _require(mask[0] == mask[-1] == 1, "an attempt does not begin and end with a sampled token")
        turns = 1 + mask.count(b"\x00\x01")
        _require(turns <= max_turns, f"an attempt of {turns} turns; {max_turns} were leased")


def check_support(group: RolloutGroup, params: SamplingParams, vocab_size: int) -> None:
    """Raises PeerError("malformed") where a token was drawn from more tokens than this sampling leaves: the learner
    makes room for the widest choice at every token."""
    is_narrow = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)
    widest = min(params.top_k or vocab_size, vocab_size, limits.SUPPORT_WIDTH_MAX)
    for rollout in group.rollouts:
        if rollout.support_offsets is not None:
            widths = np.diff(np.frombuffer(rollout.support_offsets, dtype=np.int32))
            _require(is_narrow, "a support, and sampling is not narrowed by top_k or top_p")
            _require(int(widths.max()) <= widest, f"a token drawn from {widths.max()}; {widest} are possible")
            unsampled = np.frombuffer(rollout.loss_mask, dtype=np.uint8) == 0
            _require(not widths[unsampled].any(), "a token that was not sampled has a support")


def check_vocabulary(group: RolloutGroup, vocab_size: int) -> None:
    """Raises PeerError("malformed") where a token is none of the learner's: it would break the training step."""
    for rollout in group.rollouts:
        for tokens in (rollout.tokens, rollout.support_tokens):
            if tokens and max(tokens) >= vocab_size:
                raise PeerError("malformed", f"token {max(tokens)} is outside the vocabulary of {vocab_size}")


def _decode_rollout(message: wire.Rollout) -> Rollout:
    _bound_chars("text", message.text, limits.TEXT_CHARS_MAX)
    reward = message.reward if message.HasField("reward") else None
    _require(reward is None or abs(reward) <= limits.REWARD_MAX, "the reward is not finite, or beyond all measure")
    return replace(_decode_sample(message), text=message.text, reward=reward, reward_parts=_reward_parts(message))


def _decode_sample(message: wire.Sample | wire.Rollout) -> Rollout:
    """What the worker says of an attempt; the fields have the same names in both messages."""
    tokens = _token_ids("tokens", message.tokens)
    _require(len(tokens) > 0, "a rollout without tokens")
    mask = message.loss_mask
    _require(len(mask) == len(tokens), f"{len(mask)} mask bytes for {len(tokens)} tokens")
    _require(not mask.translate(None, b"\x00\x01"), "a loss mask holds bytes other than 0 and 1")
    _require(message.finish in ("stop", "length"), "finish is neither stop nor length")
    support = _support(message, tokens)
    return Rollout(
        tokens=tokens,
        logprobs=_logprobs(message.logprobs, mask),
        loss_mask=mask,
        version_spans=_version_spans(message.version_spans, len(tokens)),
        finish=cast(FinishReason, message.finish),
        support_tokens=support[0] if support else None,
        support_offsets=support[1] if support else None,
    )


def _logprobs(data: bytes, mask: bytes) -> array[float]:
    _require(len(data) == 4 * len(mask), f"{len(data)} bytes of logprobs for {len(mask)} tokens")
    values = np.frombuffer(data, dtype="<f4")
    _require(bool(np.isfinite(values).all()), "a logprob is not finite")
    _require(bool((values <= limits.LOGPROB_SLACK).all()), "a logprob is above 0")
    _require(bool((values >= limits.LOGPROB_MIN).all()), f"a logprob is below {limits.LOGPROB_MIN:g}")
    unsampled = np.frombuffer(mask, dtype=np.uint8) == 0
    _require(bool((values[unsampled] == 0).all()), "a token that was not sampled has a logprob")
    return array("f", data)


def _version_spans(spans: Sequence[wire.VersionSpan], num_tokens: int) -> tuple[tuple[int, int], ...]:
    if len(spans) > limits.VERSION_SPANS_MAX:
        raise PeerError("oversized", f"{len(spans)} version spans; the limit is {limits.VERSION_SPANS_MAX}")
    _require(len(spans) > 0 and spans[0].start == 0, "version spans do not begin at the first token")
    last = -1
    for span in spans:
        _require(last < span.start < num_tokens, "version spans do not ascend within the rollout")
        whole_number("version", span.version)
        last = span.start
    return tuple((span.start, span.version) for span in spans)


def _reward_parts(message: wire.Rollout) -> dict[str, float]:
    parts = dict(message.reward_parts)
    if len(parts) > limits.REWARD_PARTS_MAX:
        raise PeerError("oversized", f"{len(parts)} reward parts; the limit is {limits.REWARD_PARTS_MAX}")
    for name, value in parts.items():
        _bound_chars("reward part", name, limits.NAME_CHARS_MAX)
        _require(abs(value) <= limits.REWARD_MAX, "a reward part is not finite, or beyond all measure")
    return parts


def _support(message: wire.Sample | wire.Rollout, drawn: array[int]) -> tuple[array[int], array[int]] | None:
    has = message.HasField("support_tokens"), message.HasField("support_offsets")
    _require(has[0] == has[1], "support tokens without offsets, or offsets without tokens")
    if not has[0]:
        return None
    tokens = _token_ids("support_tokens", message.support_tokens, limits.MESSAGE_BYTES_MAX // 4)
    offsets = _token_ids("support_offsets", message.support_offsets, limits.TOKENS_MAX + 1)
    _require(len(offsets) == len(drawn) + 1, f"{len(offsets)} support offsets for {len(drawn)} tokens")
    widths = np.diff(np.frombuffer(offsets, dtype=np.int32)).astype(np.int32)
    _require(offsets[0] == 0 and offsets[-1] == len(tokens), "support offsets do not span the support tokens")
    _require(bool((widths >= 0).all()), "support offsets descend")
    sampled = np.frombuffer(message.loss_mask, dtype=np.uint8) == 1
    drawn_from = np.repeat(np.arange(len(drawn)), widths)
    hits = np.frombuffer(tokens, dtype=np.int32) == np.frombuffer(drawn, dtype=np.int32)[drawn_from]
    is_supported = np.zeros(len(drawn), dtype=bool)
    is_supported[drawn_from[hits]] = True
    _require(bool(is_supported[sampled].all()), "a sampled token is not in the support it was drawn from")
    return tokens, offsets


def with_rollouts(group: RolloutGroup, rollouts: Sequence[Rollout]) -> RolloutGroup:
    """The same group with other (scored) rollouts."""
    return replace(group, rollouts=tuple(rollouts))


# ---- leases ----------------------------------------------------------------------------------------------------------


def encode_assignment(assignment: Assignment) -> wire.Lease:
    """The wire form of a lease with its prompt and sampling."""
    lease, params = assignment.lease, assignment.params
    message = wire.Lease(
        lease_id=lease.lease_id,
        kind=lease.group.kind,
        number=lease.group.number,
        step=lease.step,
        cursor=lease.cursor,
        num_samples=lease.num_samples,
        min_version=lease.min_version,
        deadline=lease.deadline,
        seconds=lease.seconds,
        seed=lease.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        environment=assignment.environment,
        max_turns=assignment.max_turns,
        first_sample=lease.first_sample,
        prompt_tokens=assignment.prompt_tokens.tobytes(),
        columns_json=json.dumps(dict(assignment.columns)) if assignment.columns else "",
        is_chat=assignment.is_chat,
    )
    if lease.exact_version is not None:
        message.exact_version = lease.exact_version
    return message


def decode_assignment(message: wire.Lease) -> Assignment:
    """A lease from the head.

    Raises:
        PeerError: "oversized" or "malformed".
    """
    _require(0 < message.num_samples <= limits.SAMPLES_MAX, f"{message.num_samples} samples leased")
    _require(message.first_sample < limits.SAMPLES_MAX, f"samples leased from {message.first_sample} on")
    _require(0 < message.max_tokens <= limits.TOKENS_MAX, f"max_tokens = {message.max_tokens}")
    _require(math.isfinite(message.temperature) and message.temperature >= 0, "temperature is not a number >= 0")
    _require(0 < message.top_p <= 1, f"top_p = {message.top_p}")
    _require(math.isfinite(message.deadline), "the deadline is no time")
    _require(0 <= message.seconds <= limits.DURATION_SECONDS_MAX, "the lease's length is no duration")
    _require(0 < message.max_turns <= limits.TURNS_MAX, f"max_turns = {message.max_turns}")
    _bound_chars("environment", message.environment, limits.NAME_CHARS_MAX)
    lease = Lease(
        lease_id=whole_number("lease_id", message.lease_id),
        group=GroupRef(_kind(message.kind), whole_number("number", message.number)),
        step=whole_number("step", message.step),
        cursor=whole_number("cursor", message.cursor),
        num_samples=message.num_samples,
        min_version=whole_number("min_version", message.min_version),
        exact_version=whole_number("exact_version", message.exact_version)
        if message.HasField("exact_version")
        else None,
        deadline=message.deadline,
        seconds=message.seconds,
        seed=message.seed,
        first_sample=message.first_sample,
    )
    params = SamplingParams(message.temperature, message.top_p, message.top_k, message.max_tokens)
    return Assignment(
        lease,
        _token_ids("prompt_tokens", message.prompt_tokens),
        params,
        _decode_columns(message.columns_json),
        message.environment,
        message.max_turns,
        message.is_chat,
    )


def _decode_columns(text: str) -> dict[str, Any]:
    _bound_chars("columns", text, limits.TEXT_CHARS_MAX)
    try:
        columns = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise PeerError("malformed", f"a task's columns are not JSON: {error}") from error
    if not isinstance(columns, dict):
        raise PeerError("malformed", "a task's columns are not an object")
    return columns


# ---- checks ----------------------------------------------------------------------------------------------------------


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PeerError("malformed", complaint)


def _bound_chars(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise PeerError("oversized", f"{what} of {len(text)} characters; the limit is {most}")


def whole_number(what: str, value: int) -> int:
    """`value`, if everything that keeps it can. Raises PeerError("malformed")."""
    _require(0 <= value <= limits.NUMBER_MAX, f"{what} = {value} is out of range")
    return value


def _kind(text: str) -> GroupKind:
    _require(text in ("train", "eval"), "a group is of kind train or eval")
    return cast(Literal["train", "eval"], text)


def _token_ids(what: str, data: bytes, most: int = limits.TOKENS_MAX) -> array[int]:
    _require(len(data) % 4 == 0, f"{what}: {len(data)} bytes are not whole 32-bit integers")
    if len(data) // 4 > most:
        raise PeerError("oversized", f"{what}: {len(data) // 4} entries; the limit is {most}")
    _require(bool((np.frombuffer(data, dtype="<i4") >= 0).all()), f"{what}: a negative entry")
    return array("i", data)
