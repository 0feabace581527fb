"""Groups and leases over the wire: what goes in comes out, and nothing that a stranger sends gets past the bounds."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, Assignment, GroupRef, Lease, Rollout, RolloutGroup, SamplingParams, SnapshotRef
from echo2.transport import limits, messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import METHODS, parse
from seeds import examples

NUMBERS = st.integers(0, limits.NUMBER_MAX)
TOKEN_IDS = st.integers(0, 2**31 - 1)
NAMES = st.text(max_size=20)
FINITE = st.floats(-limits.REWARD_MAX, limits.REWARD_MAX)
KINDS = st.sampled_from(["train", "eval"])
POLICIES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True)
GROUP_REFS = st.builds(GroupRef, POLICIES, KINDS, NUMBERS)  # type: ignore[arg-type]


@st.composite
def rollouts(draw: st.DrawFn, is_scored: bool) -> Rollout:
    """One or several turns; narrowed or not; scored or not."""
    tokens = draw(st.lists(TOKEN_IDS, min_size=1, max_size=12))
    mask = bytes(draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens))))
    later = draw(st.sets(st.integers(1, len(tokens) - 1), max_size=3)) if len(tokens) > 1 else set()
    versions = sorted(draw(st.sets(NUMBERS, min_size=len(later) + 1, max_size=len(later) + 1)))
    supports = [
        draw(st.lists(TOKEN_IDS, max_size=3)) + ([token] if m else []) for token, m in zip(tokens, mask, strict=True)
    ]
    offsets = [0, *itertools.accumulate(map(len, supports))]
    is_narrowed = draw(st.booleans())
    return Rollout(
        tokens=array("i", tokens),
        logprobs=array("f", [draw(st.floats(-100, 0, width=32)) if m else 0.0 for m in mask]),
        loss_mask=mask,
        version_spans=tuple(zip([0, *sorted(later)], versions, strict=True)),
        finish=draw(st.sampled_from(["stop", "length"])),
        reward=draw(FINITE) if is_scored else None,
        reward_parts=draw(st.dictionaries(NAMES, FINITE, max_size=3)),
        support_tokens=array("i", [token for support in supports for token in support]) if is_narrowed else None,
        support_offsets=array("i", offsets) if is_narrowed else None,
    )


GROUPS = st.booleans().flatmap(
    lambda is_scored: st.builds(
        RolloutGroup,
        group=GROUP_REFS,
        step=NUMBERS,
        lineage=NUMBERS,
        cursor=NUMBERS,
        prompt_tokens=st.lists(TOKEN_IDS, max_size=5).map(lambda ids: array("i", ids)),
        rollouts=st.lists(rollouts(is_scored), min_size=1, max_size=3).map(tuple),
        worker_id=NAMES,
        generate_seconds=st.floats(0, limits.DURATION_SECONDS_MAX),
    )
)


@pytest.mark.parametrize("name", ["", "../policy", "-policy", "Policy", "a" * 65, "a b", "policy\n", "politik\u00e4"])
def test_an_invalid_policy_id_is_refused_everywhere(name: str) -> None:
    for message in (wire.SnapshotId(policy=name), wire.ManifestRequest(policy=name)):
        with pytest.raises(PeerError, match="is not a policy id"):
            messages.decode_ref(message)
    with pytest.raises(PeerError, match="is not a policy id"):
        messages.group_ref(wire.RolloutGroup(policy=name, kind="train"))


@given(st.builds(SnapshotRef, POLICIES, NUMBERS, NUMBERS))
def test_a_snapshots_name_survives_encoding(ref: SnapshotRef) -> None:
    assert messages.decode_ref(wire.SnapshotId.FromString(messages.encode_ref(ref).SerializeToString())) == ref


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
SECONDS = st.floats(0, limits.DURATION_SECONDS_MAX)
LEASES = st.builds(
    Lease,
    lease_id=NUMBERS,
    group=GROUP_REFS,
    step=NUMBERS,
    cursor=NUMBERS,
    num_samples=st.integers(1, limits.SAMPLES_MAX),
    min_version=NUMBERS,
    exact_version=st.none() | NUMBERS,
    deadline=st.floats(allow_nan=False, allow_infinity=False),
    seconds=SECONDS,
    seed=st.integers(0, 2**64 - 1),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 2**32 - 1),
    max_tokens=st.integers(1, limits.TOKENS_MAX),
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
)


ASSIGNMENTS = st.builds(
    Assignment,
    lease=LEASES,
    prompt_tokens=st.lists(TOKEN_IDS, max_size=5).map(lambda ids: array("i", ids)),
    params=PARAMS,
    columns=st.dictionaries(NAMES, JSON, max_size=3),
    environment=NAMES,
    max_turns=st.integers(1, limits.TURNS_MAX),
    is_chat=st.booleans(),
)


# ---- what goes in comes out ------------------------------------------------------------------------------------------


@given(GROUPS)
def test_group_round_trip(group: RolloutGroup) -> None:
    data = messages.encode_group(group).SerializeToString()
    assert messages.parse_group(data) == group


@given(GROUPS)
def test_the_bytes_of_a_group_and_those_of_its_scores_are_the_scored_group(group: RolloutGroup) -> None:
    unscored = tuple(replace(rollout, reward=None, reward_parts={}) for rollout in group.rollouts)
    data = messages.encode_group(replace(group, rollouts=unscored)).SerializeToString()
    assert messages.parse_group(data) == replace(group, rollouts=unscored)
    if group.is_scored:
        scores = [(rollout.reward or 0.0, rollout.reward_parts) for rollout in group.rollouts]
        assert messages.parse_group(data + messages.encode_scores(scores, group.teaching)) == group


@given(GROUPS, LEASES)
def test_a_delivery_contains_samples_only(group: RolloutGroup, lease: Lease) -> None:
    data = messages.encode_delivery(lease.lease_id, group).SerializeToString()
    prompt = array("i", [1, 2, 3])
    for num_samples in (len(group.rollouts) + 1, len(group.rollouts) - 1):
        with pytest.raises(PeerError, match=f"malformed: leased {num_samples} rollouts, got {len(group.rollouts)}"):
            messages.decode_delivery(parse(wire.Delivery, data), replace(lease, num_samples=num_samples), prompt, "w-9")
    lease = replace(lease, num_samples=len(group.rollouts))
    read = messages.decode_delivery(parse(wire.Delivery, data), lease, prompt, "w-9")
    sampled = tuple(replace(r, reward=None, reward_parts={}) for r in group.rollouts)
    heads = {"step": lease.step, "cursor": lease.cursor, "prompt_tokens": prompt, "worker_id": "w-9", "logged": False}
    assert read == replace(group, rollouts=sampled, **heads)  # type: ignore[arg-type]


@given(ASSIGNMENTS)
def test_assignment_round_trip(assignment: Assignment) -> None:
    data = messages.encode_assignment(assignment).SerializeToString()
    assert messages.decode_assignment(parse(wire.Lease, data)) == assignment


def test_tokens_are_little_endian_int32_and_logprobs_float32() -> None:
    """The format, by hand: it must not follow the machine that wrote it."""
    first = messages.encode_group(two_turns()).rollouts[0]
    assert first.tokens == bytes.fromhex("05000000 2c010000 07000000")
    assert first.logprobs == bytes.fromhex("000000bf 00000000 000080be")
    assert first.loss_mask == b"\x01\x00\x01"
    assert first.support_offsets == bytes.fromhex("00000000 02000000 02000000 03000000")


@given(GROUPS, LEASES)
def test_delivered_bytes_are_stored_unchanged(group: RolloutGroup, lease: Lease) -> None:
    """Taken apart and put together again, or forwarded: the bytes are the same, also if it fills the head's fields."""
    lease = replace(lease, num_samples=len(group.rollouts))
    sent = messages.encode_delivery(lease.lease_id, group)
    sent.group.MergeFrom(wire.RolloutGroup(step=9, worker_id="w", logged=True, scores=[{}], samples=[7], teacher="t"))
    read = messages.decode_delivery(sent, lease, array("i", [1, 2, 3]), "w-9")
    stored = messages.encode_group(read, sent.group).SerializeToString()
    assert stored == messages.encode_group(read).SerializeToString()
    assert messages.parse_group(stored) == read


def test_unknown_fields_are_not_stored() -> None:
    sent, unknown = messages.encode_delivery(3, two_turns()), b"\xfa\x3f\x04junk"  # field 1023
    rollout = wire.Rollout.FromString(sent.group.rollouts[0].SerializeToString() + unknown)
    sent.group.rollouts[0].CopyFrom(rollout)
    assert unknown in sent.SerializeToString()
    read = messages.decode_delivery(sent, LEASED, array("i"), "w-9")
    assert unknown not in messages.encode_group(read, sent.group).SerializeToString()


# ---- what is refused, and with which word ----------------------------------------------------------------------------


def two_turns() -> RolloutGroup:
    """Token 300 was written by the environment between two turns; the policy changed after the first."""
    rollout = Rollout(
        tokens=array("i", [5, 300, 7]),
        logprobs=array("f", [-0.5, 0.0, -0.25]),
        loss_mask=b"\x01\x00\x01",
        version_spans=((0, 3), (2, 4)),
        finish="stop",
        reward=1.0,
        reward_parts={"exact": 1.0},
        support_tokens=array("i", [5, 6, 7]),
        support_offsets=array("i", [0, 2, 2, 3]),
    )
    return RolloutGroup(GroupRef(RUN_POLICY, "train", 9), 4, 1, 9, array("i", [1, 2]), (rollout,), "w-1", 0.5)


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def set_spans(rollout: wire.Rollout, *spans: tuple[int, int]) -> None:
    del rollout.version_spans[:]
    rollout.version_spans.extend(wire.VersionSpan(start=start, version=version) for start, version in spans)


Spoil = Callable[[Any], Any]
BEYOND = limits.NUMBER_MAX + 1

LEASED = Lease(3, GroupRef(RUN_POLICY, "train", 9), 4, 9, 1, 3, None, 100.0, 60.0, 77)

BAD_DELIVERIES: dict[str, Spoil] = {
    "kind": lambda d: setattr(d.group, "kind", "test"),
    "number": lambda d: setattr(d.group, "number", BEYOND),
    "lineage": lambda d: setattr(d.group, "lineage", BEYOND),
    "no rollouts": lambda d: d.group.ClearField("rollouts"),
    "a rollout too many": lambda d: d.group.rollouts.append(d.group.rollouts[0]),
    "NaN duration": lambda d: setattr(d.group, "generate_seconds", math.nan),
}
BAD_ROLLOUTS: dict[str, Spoil] = {
    "empty": lambda r: r.CopyFrom(wire.Rollout(finish="stop")),
    "half a token": lambda r: setattr(r, "tokens", r.tokens[:-1]),
    "negative token": lambda r: setattr(r, "tokens", ints(5, -300, 7)),
    "a token more": lambda r: setattr(r, "tokens", r.tokens + ints(1)),
    "mask too short": lambda r: setattr(r, "loss_mask", b"\1\0"),
    "mask of 2": lambda r: setattr(r, "loss_mask", b"\1\2\1"),
    "logprobs too few": lambda r: setattr(r, "logprobs", floats(-0.5)),
    "logprob NaN": lambda r: setattr(r, "logprobs", floats(math.nan, 0, -1)),
    "logprob -inf": lambda r: setattr(r, "logprobs", floats(-math.inf, 0, -1)),
    "logprob positive": lambda r: setattr(r, "logprobs", floats(0.01, 0, -1)),
    "logprob below any that is drawn": lambda r: setattr(r, "logprobs", floats(-100.1, 0, -1)),
    "logprob of -1e15": lambda r: setattr(r, "logprobs", floats(-1e15, 0, -1)),
    "logprob of the environment": lambda r: setattr(r, "logprobs", floats(-1, -1, -1)),
    "no spans": lambda r: set_spans(r),
    "spans begin late": lambda r: set_spans(r, (1, 3)),
    "spans descend": lambda r: set_spans(r, (0, 3), (2, 4), (1, 5)),
    "spans repeat": lambda r: set_spans(r, (0, 3), (0, 4)),
    "spans beyond the end": lambda r: set_spans(r, (0, 3), (3, 4)),
    "versions repeat": lambda r: set_spans(r, (0, 3), (1, 3)),
    "versions fall": lambda r: set_spans(r, (0, 4), (1, 3)),
    "version": lambda r: setattr(r.version_spans[0], "version", BEYOND),
    "finish": lambda r: setattr(r, "finish", "tired"),
    "a reward of its own": lambda r: r.reward_parts.update({"environment": 1.0}),
    "support without offsets": lambda r: r.ClearField("support_offsets"),
    "offsets without support": lambda r: r.ClearField("support_tokens"),
    "offsets too few": lambda r: setattr(r, "support_offsets", ints(0, 3)),
    "offsets begin late": lambda r: setattr(r, "support_offsets", ints(1, 2, 2, 3)),
    "offsets end early": lambda r: setattr(r, "support_offsets", ints(0, 1, 1, 2)),
    "offsets descend": lambda r: setattr(r, "support_offsets", ints(0, 3, 2, 3)),
    "offsets negative": lambda r: setattr(r, "support_offsets", ints(0, -1, 2, 3)),
    "empty support": lambda r: setattr(r, "support_offsets", ints(0, 3, 3, 3)),
    "token not in its support": lambda r: setattr(r, "support_tokens", ints(4, 6, 7)),
    "token in the other's support": lambda r: setattr(r, "support_tokens", ints(7, 6, 5)),
    "negative support": lambda r: setattr(r, "support_tokens", ints(5, -6, 7)),
}


def delivery_word(spoil: Spoil) -> str:
    message = messages.encode_delivery(LEASED.lease_id, two_turns())
    assert messages.decode_delivery(message, LEASED, array("i"), "w-1").rollouts
    spoil(message)
    with pytest.raises(PeerError) as caught:
        messages.decode_delivery(message, LEASED, array("i"), "w-1")
    return caught.value.reason


@pytest.mark.parametrize("spoil", BAD_DELIVERIES.values(), ids=BAD_DELIVERIES)
def test_malformed_delivery(spoil: Spoil) -> None:
    assert delivery_word(spoil) == "malformed"


@pytest.mark.parametrize("spoil", BAD_ROLLOUTS.values(), ids=BAD_ROLLOUTS)
def test_malformed_rollout(spoil: Spoil) -> None:
    assert delivery_word(lambda delivery: spoil(delivery.group.rollouts[0])) == "malformed"


TOO_MANY = limits.MESSAGE_BYTES_MAX + 4
LARGE_ROLLOUTS: dict[str, Spoil] = {
    "tokens": lambda r: setattr(r, "tokens", bytes(4 * (limits.TOKENS_MAX + 1))),
    "spans": lambda r: set_spans(r, *((at, at) for at in range(limits.VERSION_SPANS_MAX + 1))),
    "offsets": lambda r: setattr(r, "support_offsets", bytes(4 * (limits.TOKENS_MAX + 2))),
    "support": lambda r: setattr(r, "support_tokens", bytes(TOO_MANY)),
}


@pytest.mark.parametrize("spoil", LARGE_ROLLOUTS.values(), ids=LARGE_ROLLOUTS)
def test_oversized_rollout(spoil: Spoil) -> None:
    assert delivery_word(lambda delivery: spoil(delivery.group.rollouts[0])) == "oversized"


@pytest.mark.parametrize("spoil", [lambda g: g.scores.append(g.scores[0]), lambda g: setattr(g, "kind", "test")])
def test_bytes_without_a_stored_group_are_refused_as_such(spoil: Spoil) -> None:
    message = messages.encode_group(two_turns())
    spoil(message)
    with pytest.raises(PeerError, match="malformed"):
        messages.parse_group(message.SerializeToString())


def test_turns_are_counted() -> None:
    group = two_turns()
    assert group.rollouts[0].loss_mask == b"\x01\x00\x01"
    messages.check_turns(group, 2)
    for mask, max_turns in ((b"\1\0\1", 1), (b"\0\1\1", 9), (b"\1\1\0", 9), (b"\0\0\0", 9)):
        rollout = replace(group.rollouts[0], loss_mask=mask)
        with pytest.raises(PeerError, match="malformed"):
            messages.check_turns(replace(group, rollouts=(rollout,)), max_turns)


def test_tokens_must_be_of_the_learners_vocabulary() -> None:
    group = two_turns()
    largest = max(max(group.prompt_tokens), *(max(rollout.tokens) for rollout in group.rollouts))
    messages.check_vocabulary(group, 10**6)
    with pytest.raises(PeerError) as caught:
        messages.check_vocabulary(group, largest)
    assert caught.value.reason == "malformed"


def test_no_support_is_wider_than_the_limit_at_which_samplers_cut_it() -> None:
    width, narrow = limits.SUPPORT_WIDTH_MAX, SamplingParams(top_p=0.9)
    rollout = replace(two_turns().rollouts[0], support_tokens=array("i", [5] * (width + 1)))
    for at_once, is_possible in ((width, True), (width + 1, False)):
        offsets = array("i", [0, at_once, at_once, width + 1])
        group = replace(two_turns(), rollouts=(replace(rollout, support_offsets=offsets),))
        if is_possible:
            messages.check_support(group, narrow, 10**6)
        else:
            with pytest.raises(PeerError, match="4097; 4096 are possible"):
                messages.check_support(group, narrow, 10**6)


def test_a_token_that_was_not_sampled_has_no_support() -> None:
    rollout = replace(two_turns().rollouts[0], support_offsets=array("i", [0, 1, 2, 3]))
    messages.check_support(two_turns(), SamplingParams(top_k=4), 10**6)
    with pytest.raises(PeerError, match="not sampled has a support"):
        messages.check_support(replace(two_turns(), rollouts=(rollout,)), SamplingParams(top_k=4), 10**6)


def test_a_logprob_may_exceed_0_by_rounding() -> None:
    message = messages.encode_delivery(LEASED.lease_id, two_turns())
    message.group.rollouts[0].logprobs = floats(limits.LOGPROB_SLACK / 2, 0, -1)
    assert messages.decode_delivery(message, LEASED, array("i"), "w-1").rollouts[0].logprobs[0] > 0


def leased() -> Assignment:
    lease = Lease(3, GroupRef(RUN_POLICY, "train", 9), 4, 9, 2, 3, None, 100.0, 60.0, 77)
    return Assignment(lease, array("i", [3, 4]), SamplingParams(), {"level": 4}, "own.py:Game", 7, is_chat=True)


BAD_LEASES: dict[str, Spoil] = {
    "kind": lambda m: setattr(m, "kind", ""),
    "lease id": lambda m: setattr(m, "lease_id", BEYOND),
    "no samples": lambda m: setattr(m, "num_samples", 0),
    "many samples": lambda m: setattr(m, "num_samples", limits.SAMPLES_MAX + 1),
    "no tokens": lambda m: setattr(m, "max_tokens", 0),
    "many tokens": lambda m: setattr(m, "max_tokens", limits.TOKENS_MAX + 1),
    "exact version": lambda m: setattr(m, "exact_version", BEYOND),
    "negative temperature": lambda m: setattr(m, "temperature", -0.1),
    "temperature NaN": lambda m: setattr(m, "temperature", math.nan),
    "top_p 0": lambda m: setattr(m, "top_p", 0.0),
    "top_p above 1": lambda m: setattr(m, "top_p", 1.01),
    "empty stop string": lambda m: m.stop.append(""),
    "long stop string": lambda m: m.stop.append("a" * 129),
    "many stop strings": lambda m: m.stop.extend("abcdefghijklmnopq"),
    "min_p 1": lambda m: setattr(m, "min_p", 1.0),
    "min_p NaN": lambda m: setattr(m, "min_p", math.nan),
    "top_p NaN": lambda m: setattr(m, "top_p", math.nan),
    "deadline": lambda m: setattr(m, "deadline", math.inf),
    "negative seconds": lambda m: setattr(m, "seconds", -1.0),
    "endless seconds": lambda m: setattr(m, "seconds", math.inf),
    "no turns": lambda m: setattr(m, "max_turns", 0),
    "many turns": lambda m: setattr(m, "max_turns", limits.TURNS_MAX + 1),
    "cursor": lambda m: setattr(m, "cursor", BEYOND),
    "half a prompt token": lambda m: setattr(m, "prompt_tokens", b"\0" * 6),
    "negative prompt token": lambda m: setattr(m, "prompt_tokens", ints(-1)),
    "no JSON": lambda m: setattr(m, "columns_json", "{"),
    "JSON that is no object": lambda m: setattr(m, "columns_json", "[1]"),
    "deep JSON": lambda m: setattr(m, "columns_json", "[" * 100_000),
    "long number": lambda m: setattr(m, "columns_json", '{"a": ' + "1" * 10_000 + "}"),
}
LARGE_LEASES: dict[str, Spoil] = {
    "environment": lambda m: setattr(m, "environment", "a" * (limits.NAME_CHARS_MAX + 1)),
    "columns": lambda m: setattr(m, "columns_json", " " * (limits.TEXT_CHARS_MAX + 1)),
    "prompt": lambda m: setattr(m, "prompt_tokens", bytes(4 * (limits.TOKENS_MAX + 1))),
}


@pytest.mark.parametrize(
    ("word", "spoil"),
    [
        *(("malformed", spoil) for spoil in BAD_LEASES.values()),
        *(("oversized", spoil) for spoil in LARGE_LEASES.values()),
    ],
    ids=[*BAD_LEASES, *(f"large {name}" for name in LARGE_LEASES)],
)
def test_bad_lease(word: str, spoil: Spoil) -> None:
    message = messages.encode_assignment(leased())
    assert messages.decode_assignment(message) == leased()
    spoil(message)
    with pytest.raises(PeerError) as caught:
        messages.decode_assignment(message)
    assert caught.value.reason == word


@pytest.mark.parametrize("value", [limits.NUMBER_MAX + 1, 2**64 - 1, -1])
def test_whole_number_out_of_range(value: int) -> None:
    with pytest.raises(PeerError, match="lease_id"):
        messages.whole_number("lease_id", value)


# ---- anything at all -------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(METHODS)), st.binary(max_size=200))
@example("Deliver", b"\x12\xff\xff\xff\xff\x0f")  # a length beyond the end
@example("Attend", b"\x22\x02\xff\xfe")  # a string that is no UTF-8
def test_any_bytes_parse_or_are_malformed(method: str, data: bytes) -> None:
    refusal_or(lambda: parse(METHODS[method].request, data))


@examples(300)
@given(GROUPS, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_of_a_delivery_are_refused_or_harmless(group: RolloutGroup, flips: list[tuple[int, int]]) -> None:
    data = flipped(messages.encode_delivery(3, group).SerializeToString(), flips)
    lease = replace(LEASED, num_samples=len(group.rollouts))
    decoded = refusal_or(lambda: messages.decode_delivery(parse(wire.Delivery, data), lease, array("i", [1]), "w-1"))
    if decoded is not None:
        assert messages.parse_group(messages.encode_group(decoded).SerializeToString()) == decoded
        assert_usable(decoded)


@examples(300)
@given(ASSIGNMENTS, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_of_a_lease_are_refused_or_harmless(leased: Assignment, flips: list[tuple[int, int]]) -> None:
    data = flipped(messages.encode_assignment(leased).SerializeToString(), flips)
    decoded = refusal_or(lambda: messages.decode_assignment(parse(wire.Lease, data)))
    if decoded is not None:
        messages.encode_assignment(decoded)
        assert 0 < decoded.lease.num_samples <= limits.SAMPLES_MAX


def refusal_or(decode: Callable[[], Any]) -> Any:
    """What it gives, or None if it refuses with a word that belongs here. Nothing else may happen."""
    try:
        return decode()
    except PeerError as error:
        reason = error.reason
    assert reason in ("malformed", "oversized")
    return None


def flipped(data: bytes, flips: list[tuple[int, int]]) -> bytes:
    spoilt = bytearray(data)
    for place, bit in flips:
        spoilt[place % len(spoilt)] ^= 1 << bit
    return bytes(spoilt)


def assert_usable(group: RolloutGroup) -> None:
    """What a trainer relies on without looking."""
    assert group.oldest_version <= group.newest_version <= limits.NUMBER_MAX
    for rollout in group.rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.loss_mask) > 0
        assert min(rollout.tokens) >= 0
        assert all(math.isfinite(logprob) and logprob <= limits.LOGPROB_SLACK for logprob in rollout.logprobs)
        assert rollout.reward is None or math.isfinite(rollout.reward)
        assert (rollout.support_tokens is None) == (rollout.support_offsets is None)
        if rollout.support_tokens is not None and rollout.support_offsets is not None:
            bounds = zip(rollout.support_offsets, rollout.support_offsets[1:], strict=False)
            for token, mask, (first, end) in zip(rollout.tokens, rollout.loss_mask, bounds, strict=True):
                assert not mask or token in rollout.support_tokens[first:end]
