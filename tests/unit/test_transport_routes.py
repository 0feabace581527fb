"""A group's routes are packed, read back, and refused where no mixture has them."""

from __future__ import annotations

import random
import zlib
from array import array
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, SEVERAL, GroupRef, LostRollout, Rollout, RolloutGroup
from echo2.transport import messages, routes
from echo2.transport import wire_pb2 as wire
from echo2.transport.regroup import joined, without
from echo2.transport.routes import RouteShape, check_routes, decode_shape, encode_shape, num_routed, packed, unpacked

SHAPE = RouteShape(3, 2, 8)


def group_of(rng: random.Random, lengths: list[int], shape: RouteShape = SHAPE, prompt: int = 5) -> RolloutGroup:
    """Rollouts of these lengths, whose routes begin alike."""

    def choices(num_tokens: int) -> bytes:
        ids = [rng.sample(range(shape.experts), shape.chosen) for _ in range(num_tokens * shape.layers)]
        return np.array(ids, shape.dtype).tobytes()

    start = choices(prompt - 1)
    rollouts = [
        Rollout(array("i", [1] * n), array("f", [-1.0] * n), b"\x01" * n, ((0, 0),), "stop", routes=start + choices(n))
        for n in lengths
    ]
    return RolloutGroup(GroupRef(RUN_POLICY, "train", 0), 0, 1, 0, array("i", [3] * prompt), tuple(rollouts))


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([8, 256, 300]))
def test_packed_routes_are_unpacked_unchanged(seed: int, lengths: list[int], experts: int) -> None:
    shape = RouteShape(3, 2, experts)
    group = group_of(random.Random(seed), lengths, shape)
    sent = packed(group)
    assert sent.routes
    assert not any(rollout.routes for rollout in sent.rollouts)
    check_routes(sent, shape)
    stored = messages.parse_group(messages.encode_group(sent).SerializeToString())
    assert unpacked(stored).rollouts == group.rollouts
    first = shape.read(group.rollouts[0].routes)
    assert first.shape == (num_routed(group)[0], 3, 2)
    assert first.dtype.itemsize == (1 if experts <= 256 else 2)
    assert decode_shape(encode_shape(shape) or wire.RouteShape()) == shape


def test_a_prompt_that_was_read_once_takes_no_more_bytes_than_once() -> None:
    """Also where it is further back than zstd looks by itself."""
    rng, own = random.Random(0), 20_000
    prompt = rng.randbytes(3_000_000)
    group = group_of(rng, [1] * 8)
    rollouts = [replace(one, routes=prompt + rng.randbytes(own)) for one in group.rollouts]
    alone, eight = (len(packed(replace(group, rollouts=tuple(rollouts[:n]))).routes) for n in (1, 8))
    assert eight - alone < 7 * own * 1.05


def test_a_group_goes_without_routes_that_it_does_not_have_all_of_or_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of(random.Random(0), [4, 6])
    without = (replace(group.rollouts[0], routes=b""), group.rollouts[1])
    assert packed(replace(group, rollouts=without)).routes == b""
    monkeypatch.setattr(routes, "ROUTES_BYTES_MAX", sum(num_routed(group)) * SHAPE.token_bytes - 1)
    assert packed(group).routes == b""
    assert not any(rollout.routes for rollout in packed(group).rollouts)


def spoilt(group: RolloutGroup, place: int, value: int) -> RolloutGroup:
    first = bytearray(group.rollouts[0].routes)
    first[place] = value
    return packed(replace(group, rollouts=(replace(group.rollouts[0], routes=bytes(first)), *group.rollouts[1:])))


def test_routes_that_no_router_chooses_are_refused() -> None:
    group = group_of(random.Random(0), [4, 6])
    sent = packed(group)
    bomb = zstandard.ZstdCompressor().compress(bytes(routes.ROUTES_BYTES_MAX + 18))
    data = b"".join(rollout.routes for rollout in group.rollouts)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    twice = group.rollouts[0].routes[1]
    lies = {
        "expert 8 of 8": spoilt(group, 0, 8),
        "expert 255 of 8": spoilt(group, 17, 255),
        "chosen twice": spoilt(group, 0, twice),
        "18 tokens of 6 were sampled": packed(group_of(random.Random(0), [4, 6], RouteShape(2, 2, 8))),
        "bytes of routes for 18 tokens": replace(sent, routes=zstandard.ZstdCompressor().compress(data[:-1])),
        "the limit is": replace(sent, routes=bomb),
        "not a zstd frame": replace(sent, routes=zlib.compress(data)),
        "is not consumed|not a zstd frame": replace(sent, routes=sent.routes + b"x"),
        "does not tell its size": replace(sent, routes=silent),
    }
    for what, lie in lies.items():
        with pytest.raises(PeerError, match=what):
            check_routes(lie, SHAPE)
    with pytest.raises(PeerError, match="not asked for"):
        check_routes(sent, None)
    for shape in ((0, 2, 8), (3, 8, 8), (3, 2, 1 << 20)):
        with pytest.raises(PeerError, match="of the shape"):
            decode_shape(wire.RouteShape(layers=shape[0], chosen=shape[1], experts=shape[2]))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_routes(data: bytes) -> None:
    group = replace(packed(group_of(random.Random(0), [1])), routes=data)
    try:
        check_routes(group, SHAPE)
    except PeerError:
        return
    assert not data or unpacked(group).rollouts[0].routes


def test_rollouts_that_are_left_and_those_that_join_them_keep_their_routes_and_numbers() -> None:
    group = replace(group_of(random.Random(1), [3, 4, 5]), worker_id="a")
    left = without(packed(group), [LostRollout(1, "reward_failed")])
    assert unpacked(left).rollouts == (group.rollouts[0], group.rollouts[2])
    assert (left.samples, [one.sample for one in left.lost]) == ((0, 2), [1])
    assert without(left, []) is left
    more = replace(group_of(random.Random(2), [6]), worker_id="b", samples=(3,))
    whole = joined(left, packed(more))
    assert unpacked(whole).rollouts == (group.rollouts[0], group.rollouts[2], more.rollouts[0])
    assert (whole.samples, whole.worker_id) == ((0, 2, 3), SEVERAL)
    bare = replace(more, rollouts=tuple(replace(one, routes=b"") for one in more.rollouts))
    assert (joined(left, bare).routes, len(joined(left, bare).rollouts)) == (b"", 3)
    assert joined(replace(left, lineage=2), packed(more)).samples == (3,), "versions of two lineages cannot be compared"
