"""Converts `echo2.core.types` to wire messages and back. Decoding trusts nothing: values out of bounds and inconsistent
messages raise PeerError.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np

from echo2.core.errors import PeerError
from echo2.core.types import (
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    Assignment,
    FinishReason,
    GroupKind,
    GroupRef,
    Lease,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Score,
    SnapshotRef,
    Teaching,
    is_policy_id,
)
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import parse
from echo2.transport.regroup import samples_of

# ---- snapshots -------------------------------------------------------------------------------------------------------

#: Messages that name a snapshot by the same three fields.
NamesSnapshot = wire.SnapshotId | wire.SnapshotNotice | wire.ManifestRequest


def encode_ref(ref: SnapshotRef) -> wire.SnapshotId:
    """The wire form of a snapshot's name."""
    return wire.SnapshotId(policy=ref.policy, lineage=ref.lineage, version=ref.version)


def decode_ref(message: NamesSnapshot) -> SnapshotRef:
    """The snapshot that a message names.

    Raises:
        PeerError: "malformed".
    """
    lineage, version = whole_number("lineage", message.lineage), whole_number("version", message.version)
    return SnapshotRef(policy_id(message.policy), lineage, version)


# ---- groups ----------------------------------------------------------------------------------------------------------


def encode_group(group: RolloutGroup, delivered: wire.RolloutGroup | None = None) -> wire.RolloutGroup:
    """The wire form of a group, with its scores if it is scored. Texts are left out: tokens can be decoded again.
    `delivered`: the group as it was delivered, if its rollouts are unchanged since; it becomes the result."""
    scores = [(one.reward or 0.0, one.reward_parts) for one in group.rollouts] if group.is_scored else []
    fields: dict[str, Any] = {
        **_encode_name(group.group),
        "step": group.step,
        "lineage": group.lineage,
        "cursor": group.cursor,
        "prompt_tokens": group.prompt_tokens.tobytes(),
        "worker_id": group.worker_id,
        "generate_seconds": group.generate_seconds,
        "logged": group.logged,
        "routes": group.routes,
        **_encode_teaching(group.teaching),
        "samples": group.samples,
        "scores": _encode_scores(scores),
    }
    if delivered is None:
        rows = [_rollout_fields(row, row.reward_parts if row.reward is None else {}) for row in group.rollouts]
        return wire.RolloutGroup(**fields, rollouts=rows)
    for field, _ in delivered.ListFields():
        if field.name != "rollouts":
            delivered.ClearField(field.name)
    delivered.MergeFrom(wire.RolloutGroup(**fields))
    return delivered


def encode_scores(scores: Sequence[Score], teaching: Teaching) -> bytes:
    """What is known with the scores. Appended to the bytes of an unscored group, it gives those of the scored group."""
    return wire.RolloutGroup(scores=_encode_scores(scores), **_encode_teaching(teaching)).SerializeToString()


def encode_unscored(group: RolloutGroup, teaching: Teaching) -> bytes:
    """What a teacher is asked about a group whose rewards are being computed; `parse_group` reads it."""
    rows = [{"tokens": row.tokens.tobytes(), "loss_mask": row.loss_mask} for row in group.rollouts]
    prompt, named = group.prompt_tokens.tobytes(), _encode_name(group.group)
    message = wire.RolloutGroup(
        **named, step=group.step, prompt_tokens=prompt, rollouts=rows, **_encode_teaching(teaching)
    )
    return message.SerializeToString()


def _encode_name(group: GroupRef) -> dict[str, Any]:
    return {"policy": group.policy, "kind": group.kind, "number": group.number}


def _encode_teaching(teaching: Teaching) -> dict[str, Any]:
    return {"teacher": teaching.teacher, "teacher_prompt": teaching.prompt_tokens.tobytes()}


def _encode_scores(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [{"reward": reward, "reward_parts": parts} for reward, parts in scores]


def _rollout_fields(rollout: Rollout, parts: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a `wire.Rollout`: the message that holds the rollout takes them without another copy."""
    fields: dict[str, Any] = {
        "tokens": rollout.tokens.tobytes(),
        "logprobs": rollout.logprobs.tobytes(),
        "loss_mask": rollout.loss_mask,
        "version_spans": [{"start": start, "version": version} for start, version in rollout.version_spans],
        "finish": rollout.finish,
        "reward_parts": parts,
    }
    if rollout.support_tokens is not None and rollout.support_offsets is not None:
        fields["support_tokens"] = rollout.support_tokens.tobytes()
        fields["support_offsets"] = rollout.support_offsets.tobytes()
    return fields


def parse_group(data: bytes | wire.RolloutGroup) -> RolloutGroup:
    """Parse a group that the head stored, or fed to the learner. The head checked its contents at delivery; they are
    not checked again.

    Raises:
        PeerError: "malformed": it is not a group.
    """
    message: wire.RolloutGroup = parse(wire.RolloutGroup, data) if isinstance(data, bytes) else data
    try:
        scores = message.scores or [None] * len(message.rollouts)
        rollouts = tuple(_rollout(*pair) for pair in zip(message.rollouts, scores, strict=True))
        prompt, teacher_prompt = array("i", message.prompt_tokens), array("i", message.teacher_prompt)
    except ValueError as error:
        raise PeerError("malformed", f"group {message.number} is no rollout group: {error}") from error
    return RolloutGroup(
        group=group_ref(message),
        step=message.step,
        lineage=message.lineage,
        cursor=message.cursor,
        prompt_tokens=prompt,
        rollouts=rollouts,
        worker_id=message.worker_id,
        generate_seconds=message.generate_seconds,
        logged=message.logged,
        routes=message.routes,
        teaching=Teaching(message.teacher, teacher_prompt),
        samples=tuple(message.samples),
    )


def encode_delivery(lease_id: int, group: RolloutGroup, batch: wire.Deliveries | None = None) -> wire.Delivery:
    """The wire form of a worker's result under this lease: only what the head cannot know itself. `batch`: the message
    that it is added to."""
    message = (wire.Deliveries() if batch is None else batch).items.add(
        lease_id=lease_id,
        group={
            **_encode_name(group.group),
            "lineage": group.lineage,
            "rollouts": [_rollout_fields(rollout, {}) for rollout in group.rollouts],
            "generate_seconds": group.generate_seconds,
            "routes": group.routes,
        },
        lost=[{"sample": one.sample, "detail": one.detail} for one in group.lost],
    )
    if group.by_harness:
        message.group.prompt_tokens = group.prompt_tokens.tobytes()
        message.rewards.extend(rows[0].reward_parts["environment"] for rows in group.by_rollout)
        message.rows.extend(map(len, group.by_rollout if group.num_rollouts < len(group.rollouts) else ()))
    return message


def decode_delivery(
    message: wire.Delivery, lease: Lease, prompt_tokens: array[int], worker_id: str, seconds_max: float = math.inf
) -> RolloutGroup:
    """Decode a group from a worker: its rollouts come from the worker, without those that it lost, all else from the
    head. It has no texts and rewards. `generate_seconds` as reported by the worker is capped at `seconds_max`.

    Each byte of a rollout is checked here, once: those of `message.group` may be stored and fed unchanged.

    Raises:
        PeerError: "oversized" or "malformed", saying what is wrong.
    """
    message.DiscardUnknownFields()
    lost, samples = samples_of(message, lease)
    delivered = message.group
    _require(0 <= delivered.generate_seconds <= limits.DURATION_SECONDS_MAX, "generate_seconds is not a duration")
    rollouts = tuple(map(_received, delivered.rollouts))
    check_rollouts(rollouts)
    return RolloutGroup(
        group=group_ref(delivered),
        step=lease.step,
        lineage=whole_number("lineage", delivered.lineage),
        cursor=lease.cursor,
        prompt_tokens=prompt_tokens,
        rollouts=rollouts,
        worker_id=worker_id,
        generate_seconds=min(delivered.generate_seconds, seconds_max),
        routes=delivered.routes,
        samples=samples if lost or lease.first_sample or message.rows else (),
        lost=lost,
    )


def decode_played(message: wire.Delivery, lease: Lease, worker_id: str, seconds_max: float = math.inf) -> RolloutGroup:
    """Decode a group that a harness played on a machine of the owner; that machine also gives the prompt and rewards.

    Raises:
        PeerError: "oversized" or "malformed", saying what is wrong.
    """
    prompt = _token_ids("prompt_tokens", message.group.prompt_tokens)
    group = decode_delivery(message, lease, prompt, worker_id, seconds_max)
    _require(len(prompt) > 0, "a harness's rollouts without a prompt")
    _require(len(message.rewards) == group.num_rollouts, f"{len(message.rewards)} rewards for the rollouts")
    _require(all(abs(one) <= limits.REWARD_MAX for one in message.rewards), "a reward is not finite, or beyond measure")
    pairs = zip(group.by_rollout, message.rewards, strict=True)
    rollouts = tuple(replace(row, reward_parts={"environment": reward}) for rows, reward in pairs for row in rows)
    return replace(group, rollouts=rollouts)


def check_lengths(group: RolloutGroup, max_tokens: int) -> None:
    """Raises PeerError("oversized") if a rollout is longer than was leased."""
    longest = max(len(rollout.tokens) for rollout in group.rollouts)
    if longest > max_tokens:
        raise PeerError("oversized", f"a rollout of {longest} tokens; {max_tokens} were leased")


def check_turns(group: RolloutGroup, max_turns: int, is_played: bool = False) -> None:
    """Raises PeerError("malformed") if a rollout does not begin and end with the policy's tokens, or has more turns, in
    all its rows, than were leased. With one turn, no token is the environment's. A harness's rollouts (`is_played`) may
    begin with tokens that were not sampled."""
    for masks in ([row.loss_mask for row in rows] for rows in group.by_rollout):
        _require(all(mask[-1] == 1 for mask in masks), "a rollout does not end with a sampled token")
        _require(is_played or all(mask[0] == 1 for mask in masks), "a rollout does not begin with a sampled token")
        turns = sum(mask[0] + mask.count(b"\x00\x01") for mask in masks)
        _require(turns <= max_turns, f"a rollout of {turns} turns; {max_turns} were leased")


def check_support(group: RolloutGroup, params: SamplingParams, vocab_size: int) -> None:
    """Raises PeerError("malformed") if a token's support is wider than these sampling parameters allow: the learner
    makes room for the widest support at every token."""
    widest = min(params.top_k or vocab_size, vocab_size, limits.SUPPORT_WIDTH_MAX)
    for rollout in group.rollouts:
        if rollout.support_offsets is not None:
            widths = np.diff(np.frombuffer(rollout.support_offsets, dtype=np.int32))
            _require(params.is_narrow, "a support, and sampling is not narrowed by top_k, top_p or min_p")
            _require(int(widths.max()) <= widest, f"a token drawn from {widths.max()}; {widest} are possible")
            unsampled = np.frombuffer(rollout.loss_mask, dtype=np.uint8) == 0
            _require(not widths[unsampled].any(), "a token that was not sampled has a support")


def check_vocabulary(group: RolloutGroup, vocab_size: int) -> None:
    """Raises PeerError("malformed") if a token is outside the learner's vocabulary: it would break a training step."""
    of_rollouts = [tokens for one in group.rollouts for tokens in (one.tokens, one.support_tokens)]
    largest = max(np.frombuffer(tokens, np.int32).max() for tokens in (group.prompt_tokens, *of_rollouts) if tokens)
    _require(bool(largest < vocab_size), f"token {largest} is outside the vocabulary of {vocab_size}")


def _rollout(message: wire.Rollout, score: wire.Score | None = None) -> Rollout:
    """Convert a rollout that has been checked."""
    return Rollout(
        tokens=array("i", message.tokens),
        logprobs=array("f", message.logprobs),
        loss_mask=message.loss_mask,
        version_spans=tuple((span.start, span.version) for span in message.version_spans),
        finish=cast(FinishReason, message.finish),
        reward=None if score is None else score.reward,
        reward_parts=dict((message if score is None else score).reward_parts),
        support_tokens=array("i", message.support_tokens) if message.HasField("support_tokens") else None,
        support_offsets=array("i", message.support_offsets) if message.HasField("support_offsets") else None,
    )


def _received(message: wire.Rollout) -> Rollout:
    """Convert a rollout that is still to be checked (`check_rollouts`), unless that would take much memory."""
    if len(message.version_spans) > limits.VERSION_SPANS_MAX:
        detail = f"{len(message.version_spans)} version spans; the limit is {limits.VERSION_SPANS_MAX}"
        raise PeerError("oversized", detail)
    _require(not message.reward_parts, "a rollout with rewards, which are the head's to say")
    try:
        return _rollout(message)
    except ValueError as error:
        raise PeerError("malformed", f"a rollout with numbers that are not whole: {error}") from error


def check_rollouts(rollouts: Sequence[Rollout]) -> None:
    """Check rollouts from a worker, or from a log. Conditions on single logprobs are checked for all rollouts at once.

    Raises:
        PeerError: "oversized" or "malformed", saying what is wrong.
    """
    for rollout in rollouts:
        length = len(rollout.loss_mask)
        _check_tokens("tokens", rollout.tokens)
        if not length or length != len(rollout.tokens) or length != len(rollout.logprobs):
            counts = f"{len(rollout.tokens)} tokens, {len(rollout.logprobs)} logprobs, {length} bytes of its mask"
            raise PeerError("malformed", f"a rollout with {counts}")
        _require(rollout.finish in ("stop", "length"), "finish is neither stop nor length")
        _check_spans(rollout.version_spans, length)
        _check_support(rollout)
    _check_logprobs(b"".join(one.logprobs for one in rollouts), b"".join(one.loss_mask for one in rollouts))


def _check_logprobs(data: bytes, mask: bytes) -> None:
    values = np.frombuffer(data, dtype="<f4")
    least, most = float(values.min()), float(values.max())  # NaN if any value is NaN
    _require(math.isfinite(least) and math.isfinite(most), "a logprob is not finite")
    _require(most <= limits.LOGPROB_SLACK, "a logprob is above 0")
    _require(least >= limits.LOGPROB_MIN, f"a logprob is below {limits.LOGPROB_MIN:g}")
    if mask.count(1) < len(mask):
        _require(mask.count(0) + mask.count(1) == len(mask), "a loss mask holds bytes other than 0 and 1")
        unsampled = np.frombuffer(mask, dtype=np.uint8) == 0
        _require(not values[unsampled].any(), "a token that was not sampled has a logprob")


def _check_spans(spans: Sequence[tuple[int, int]], num_tokens: int) -> None:
    _require(bool(spans) and spans[0][0] == 0, "version spans do not begin at the first token")
    last, before = -1, -1
    for start, version in spans:
        _require(last < start < num_tokens, "version spans do not ascend within the rollout")
        _require(version <= limits.NUMBER_MAX, "a version span's version is out of range")
        _require(before < version, "a version span's version is not above the one before it")
        last, before = start, version


def _check_support(rollout: Rollout) -> None:
    tokens, offsets = rollout.support_tokens, rollout.support_offsets
    if tokens is None and offsets is None:
        return
    if tokens is None or offsets is None:
        raise PeerError("malformed", "support tokens without offsets, or offsets without tokens")
    _check_tokens("support_tokens", tokens, limits.MESSAGE_BYTES_MAX // 4)
    _check_tokens("support_offsets", offsets, limits.TOKENS_MAX + 1)
    drawn = np.frombuffer(rollout.tokens, dtype=np.int32)
    _require(len(offsets) == len(drawn) + 1, f"{len(offsets)} support offsets for {len(drawn)} tokens")
    widths = np.diff(np.frombuffer(offsets, dtype=np.int32)).astype(np.int32)
    _require(offsets[0] == 0 and offsets[-1] == len(tokens), "support offsets do not span the support tokens")
    _require(bool((widths >= 0).all()), "support offsets descend")
    sampled = np.frombuffer(rollout.loss_mask, dtype=np.uint8) == 1
    drawn_from = np.repeat(np.arange(len(drawn)), widths)
    hits = np.frombuffer(tokens, dtype=np.int32) == drawn[drawn_from]
    is_supported = np.zeros(len(drawn), dtype=bool)
    is_supported[drawn_from[hits]] = True
    _require(bool(is_supported[sampled].all()), "a sampled token is not in the support it was drawn from")


# ---- leases ----------------------------------------------------------------------------------------------------------


def encode_assignment(assignment: Assignment) -> wire.Lease:
    """The wire form of a lease with its prompt and sampling."""
    lease, params = assignment.lease, assignment.params
    message = wire.Lease(
        lease_id=lease.lease_id,
        **_encode_name(lease.group),
        step=lease.step,
        cursor=lease.cursor,
        num_samples=lease.num_samples,
        min_version=lease.min_version,
        deadline=lease.deadline,
        seconds=lease.seconds,
        seed=lease.seed,
        first_sample=lease.first_sample,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        stop=params.stop,
        routes=params.routes,
        max_tokens=params.max_tokens,
        environment=assignment.environment,
        max_turns=assignment.max_turns,
        prompt_tokens=assignment.prompt_tokens.tobytes(),
        columns_json=json.dumps(dict(assignment.columns)) if assignment.columns else "",
        is_chat=assignment.is_chat,
    )
    if lease.exact_version is not None:
        message.exact_version = lease.exact_version
    return message


def decode_assignment(message: wire.Lease) -> Assignment:
    """Decode a lease from the head. Raises PeerError, "oversized" or "malformed"."""
    _require(0 < message.num_samples <= limits.SAMPLES_MAX, f"{message.num_samples} samples leased")
    _require(0 < message.max_tokens <= limits.TOKENS_MAX, f"max_tokens = {message.max_tokens}")
    _require(math.isfinite(message.temperature) and message.temperature >= 0, "temperature is not a number >= 0")
    _require(0 < message.top_p <= 1, f"top_p = {message.top_p}")
    _require(0 <= message.min_p < 1, f"min_p = {message.min_p}")
    _require(math.isfinite(message.deadline), "the deadline is not a time")
    _require(0 <= message.seconds <= limits.DURATION_SECONDS_MAX, "the lease's length is not a duration")
    _require(0 < message.max_turns <= limits.TURNS_MAX, f"max_turns = {message.max_turns}")
    _bound_chars("environment", message.environment, limits.NAME_CHARS_MAX)
    exact = whole_number("exact_version", message.exact_version) if message.HasField("exact_version") else None
    lease = Lease(
        lease_id=whole_number("lease_id", message.lease_id),
        group=group_ref(message),
        step=whole_number("step", message.step),
        cursor=whole_number("cursor", message.cursor),
        num_samples=message.num_samples,
        min_version=whole_number("min_version", message.min_version),
        exact_version=exact,
        deadline=message.deadline,
        seconds=message.seconds,
        seed=message.seed,
        first_sample=message.first_sample,
    )
    are_bounded = len(message.stop) <= STOP_STRINGS_MAX and all(0 < len(one) <= STOP_CHARS_MAX for one in message.stop)
    _require(are_bounded, "too many stop strings, or one that is empty or too long")
    drawn = message.temperature, message.top_p, message.top_k, message.max_tokens
    params = SamplingParams(*drawn, message.min_p, tuple(message.stop), message.routes)
    return Assignment(
        lease,
        _token_ids("prompt_tokens", message.prompt_tokens),
        params,
        decode_object("columns_json", message.columns_json),
        message.environment,
        message.max_turns,
        message.is_chat,
    )


def decode_object(what: str, text: str) -> dict[str, Any]:
    """Parse a JSON object from the head; empty text gives an empty object.

    Raises:
        PeerError: "oversized" or "malformed".
    """
    _bound_chars(what, text, limits.TEXT_CHARS_MAX)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise PeerError("malformed", f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PeerError("malformed", f"{what} is not an object")
    return value


# ---- checks ----------------------------------------------------------------------------------------------------------


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise PeerError("malformed", complaint)


def _bound_chars(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise PeerError("oversized", f"{what} of {len(text)} characters; the limit is {most}")


def whole_number(what: str, value: int) -> int:
    """Return `value` if it is in 0..`limits.NUMBER_MAX`. Raises PeerError("malformed") otherwise."""
    _require(0 <= value <= limits.NUMBER_MAX, f"{what} = {value} is out of range")
    return value


def finite(what: str, value: float) -> float:
    """Return `value` if it is finite. Raises PeerError("malformed") otherwise."""
    _require(math.isfinite(value), f"{what} = {value} is not finite")
    return value


def policy_id(text: str) -> str:
    """Return `text` if it is a valid policy id. Raises PeerError("malformed") otherwise."""
    _require(is_policy_id(text), f"{text[:80]!r} is not a policy id")
    return text


def group_ref(message: wire.RolloutGroup | wire.Lease) -> GroupRef:
    """The group that a message names. Raises PeerError("malformed")."""
    return GroupRef(policy_id(message.policy), _kind(message.kind), whole_number("number", message.number))


def _kind(text: str) -> GroupKind:
    _require(text in ("train", "eval"), "a group is of kind train or eval")
    return cast(Literal["train", "eval"], text)


def _token_ids(what: str, data: bytes) -> array[int]:
    _require(len(data) % 4 == 0, f"{what}: {len(data)} bytes are not whole 32-bit integers")
    _check_tokens(what, tokens := array("i", data))
    return tokens


def _check_tokens(what: str, tokens: array[int], most: int = limits.TOKENS_MAX) -> None:
    if len(tokens) > most:
        raise PeerError("oversized", f"{what}: {len(tokens)} entries; the limit is {most}")
    _require(np.frombuffer(tokens, dtype=np.int32).min(initial=0) == 0, f"{what}: a negative entry")
