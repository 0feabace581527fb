"""Deltas of anything over anything: the right content or none, whatever the items are and whatever is done to them.

Arrays are drawn by numpy from a seed that hypothesis draws and prints; hypothesis shrinks sizes and shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from weights_cases import apply_delta, encode, encode_delta, new_content

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.deltas import apply_items, encode_items
from echo2.weights.format.manifest import DELTA, ITEM_BYTES, Record, Segment, compose
from echo2.weights.format.planes import UNSIGNED, Reader
from echo2.weights.format.segments import apply_segment, cut_record, merge_deltas
from seeds import examples

Array = NDArray[Any]
# Infinities, NaNs with payloads, zeros of both signs, the smallest and the largest numbers, as bf16 and as fp32.
SPECIAL = {
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0x7F7F],
    4: [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001, 1, 0x80000001],
}
KINDS = ("cast", "steps", "leaps", "special", "noise")
widths = st.sampled_from([1, 2, 4, 8])
shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1), st.floats(0, 0.01))
sizes = st.one_of(st.integers(0, 20), st.integers(0, 3000), st.integers(60_000, 150_000))


def drawn(seed: int, width: int, size: int) -> Array:
    """Items like weights: floats around zero where there are such, else anything."""
    draw = np.random.default_rng(seed)
    if width in (2, 4):
        items = draw.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
        return (items >> 16).astype(np.uint16) if width == 2 else items
    return draw.integers(0, 256, size * width, dtype=np.uint8).view(UNSIGNED[width])


def trained(base: Array, draw: np.random.Generator, rate: float) -> Array:
    """What is stored after the fp32 weights behind the base have moved by about the rate: small ones change most."""
    masters = base
    if base.itemsize == 2:
        masters = (base.astype(np.uint32) << 16) | draw.integers(0, 1 << 16, base.size, dtype=np.uint32)
    with np.errstate(all="ignore"):  # some are infinite, and some are not numbers
        moved = masters.view(np.float32) + draw.normal(0, rate, base.size).astype(np.float32)
    items = moved.astype(np.float32).view(np.uint32)
    return items if base.itemsize == 4 else (items >> 16).astype(np.uint16)


def changed(base: Array, kind: str, share: float, seed: int) -> Array:
    """The base with this share of its items moved a little or far, made special, or replaced."""
    draw = np.random.default_rng(seed)
    if kind == "cast" and base.itemsize in SPECIAL:
        return trained(base, draw, 1e-4 * 0.01 ** (1 - share))
    hit = draw.random(base.size) < share
    if kind in ("steps", "leaps"):
        reach = 2 if kind == "steps" else 100_000
        moved = base + draw.integers(-reach, reach + 1, base.size).astype(f"i{base.itemsize}").view(base.dtype)
    elif kind == "special" and base.itemsize in SPECIAL:
        moved = draw.choice(np.array(SPECIAL[base.itemsize], base.dtype), base.size)
    else:
        moved = draw.integers(0, 256, base.nbytes, dtype=np.uint8).view(base.dtype)
    return np.where(hit, moved, base)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Array, Array]:
    seed, base = draw(st.integers(0, 1 << 32)), drawn(draw(st.integers(0, 1 << 32)), draw(widths), draw(sizes))
    return base, changed(base, draw(st.sampled_from(KINDS)), draw(shares), seed)


@examples(100)
@given(changes())
def test_a_record_makes_the_target_of_the_base(change: tuple[Array, Array]) -> None:
    base, target = change
    record = encode_items(base, target)
    assert len(record) <= 1.01 * target.nbytes + 20 * target.itemsize  # one that is longer is not sent
    shadow = base.copy()
    reader = Reader(memoryview(record))
    apply_items(reader, shadow)
    reader.end()
    assert shadow.tobytes() == target.tobytes()


@examples(150)
@given(changes(), st.data())
def test_a_damaged_record_is_refused_or_read_within_bounds(change: tuple[Array, Array], data: st.DataObject) -> None:
    """No other error, and nothing written outside of the items: what came out wrong is the digest's to find."""
    base, target = change
    record = bytearray(encode_items(base, target))
    for _ in range(data.draw(st.integers(1, 4))):
        near_start = data.draw(st.booleans())
        record[data.draw(st.integers(0, min(len(record), 40) - 1 if near_start else len(record) - 1))] = data.draw(
            st.integers(0, 255)
        )
    cut_at = data.draw(st.one_of(st.just(len(record)), st.integers(0, len(record))))
    room = np.zeros(base.size + 16, base.dtype)
    shadow = room[8 : 8 + base.size]
    shadow[:] = base
    assert outcome(lambda: apply_items(Reader(memoryview(bytes(record[:cut_at]))), shadow)) in (None, "corrupt")
    assert not room[:8].any()
    assert not room[8 + base.size :].any()


@given(changes(), st.lists(st.tuples(st.sampled_from(KINDS), shares, st.integers(0, 1 << 32)), min_size=1, max_size=6))
def test_deltas_added_up_do_what_they_do_in_a_row(
    first: tuple[Array, Array], more: list[tuple[str, float, int]]
) -> None:
    """Bit for bit, with whatever forms the encoder chose, split ones or none."""
    states = [first[0], first[1]]
    for kind, share, seed in more:
        states.append(changed(states[-1], kind, share, seed))
    if not states[0].size:
        return
    records, chunks = [], dict[bytes, memoryview]()
    for base, target in pairwise(states):
        splits = 4 if len(records) % 3 else 0
        record, cut = cut_record(DELTA, memoryview(encode_items(base, target, splits)), 1000)
        records.append(record)
        chunks |= cut
    width, target = states[0].itemsize, states[-1]
    segment = Segment(target.nbytes, blake3(target.tobytes()).digest(), tuple(records))
    merged, made = merge_deltas(segment, width, chunks.__getitem__, 1)
    assert (len(merged.records) == 1 and made) or merged == segment
    assert sum(record.num_bytes for record in merged.records) <= sum(record.num_bytes for record in records)
    result = apply_segment(merged, width, states[0].view(np.uint8), (chunks | made).__getitem__)
    assert result.tobytes() == target.tobytes()


@given(changes(), st.data())
def test_damaged_deltas_are_not_added_up(change: tuple[Array, Array], data: st.DataObject) -> None:
    """Refused, or what the digest finds: memory stays within the segment's."""
    base, target = change
    if not base.size:
        return
    chunks, records = dict[bytes, memoryview](), []
    for _ in range(2):
        damaged = bytearray(encode_items(base, target, splits=0))
        damaged[data.draw(st.integers(0, min(len(damaged), 40) - 1))] = data.draw(st.integers(0, 255))
        record, cut = cut_record(DELTA, memoryview(bytes(damaged)), 1000)
        records.append(record)
        chunks |= cut
    segment = Segment(base.nbytes, bytes(32), tuple(records))
    assert outcome(lambda: len(merge_deltas(segment, base.itemsize, chunks.__getitem__, 1)[0].records)) in (
        1,
        2,
        "corrupt",
    )


def outcome(work: Callable[[], Any]) -> Any:
    """What the work gives back, or the reason that a peer is blamed for; any other error is a failure."""
    try:
        return work()
    except PeerError as error:
        return error.reason


tensor_names = st.sampled_from(["embed", "layers.0.q", "layers.0.norm", "layers.1.q", "head", "ü"])
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, TensorBytes]:
    found = {}
    for name in draw(st.sets(tensor_names)):
        dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(shapes)
        items = drawn(draw(st.integers(0, 1 << 32)), ITEM_BYTES[dtype], int(np.prod(shape)))
        found[name] = TensorBytes(dtype, shape, items.tobytes())
    return found


@st.composite
def histories(draw: st.DrawFn, length: int) -> list[Snapshot]:
    """Versions of a model: some tensors change, a little or altogether, and so do files."""
    tensors, found = draw(contents()), []
    for version in range(1, length + 1):
        for name in draw(st.sets(st.sampled_from(sorted(tensors)))) if tensors else ():
            tensor = tensors[name]
            items = np.frombuffer(tensor.data, UNSIGNED[ITEM_BYTES[tensor.dtype]])
            moved = changed(items, draw(st.sampled_from(KINDS)), draw(shares), draw(st.integers(0, 1 << 32)))
            tensors[name] = replace(tensor, data=moved.tobytes())
        files = {"config.json": b"{}", "tokenizer.json": draw(st.sampled_from([b"t" * 99, b"u" * 99, b""]))}
        found.append(Snapshot(SnapshotRef(RUN_POLICY, 1, version), dict(tensors), files))
    return found


def plain(snapshot: Snapshot) -> tuple[object, ...]:
    tensors = {name: (t.dtype, tuple(t.shape), bytes(t.read(0, t.num_bytes))) for name, t in snapshot.tensors.items()}
    return snapshot.ref, tensors, dict(snapshot.files)


@given(histories(4))
def test_deltas_one_after_the_other_come_to_the_same_as_joined_and_as_one_over_all(history: list[Snapshot]) -> None:
    encoded = [encode_delta(base, target, chunk_bytes=64) for base, target in pairwise(history)]
    chunks = {hash_: data for _, some in encoded for hash_, data in some.items()}
    whole, its_chunks = encode(history[0].ref, history[0].tensors, history[0].files)
    content = new_content()
    content.apply(whole, its_chunks.__getitem__)
    for (manifest, _), target in zip(encoded, history[1:], strict=True):
        assert manifest.total_bytes <= manifest.content_bytes
        content.apply(manifest, chunks.__getitem__)
        assert plain(content.snapshot()) == plain(target)
    joined = compose([manifest for manifest, _ in encoded])
    assert plain(apply_delta(joined, history[0], chunks.__getitem__)) == plain(history[-1])
    from_nothing = compose([whole, joined])
    content = new_content()
    content.apply(from_nothing, {**chunks, **its_chunks}.__getitem__)
    assert plain(content.snapshot()) == plain(history[-1])
    over_all, chunks = encode_delta(history[0], history[-1])
    assert plain(apply_delta(over_all, history[0], chunks.__getitem__)) == plain(history[-1])
    assert over_all.root == from_nothing.root == encoded[-1][0].root


@given(histories(2), st.data())
def test_a_damaged_record_never_gives_a_wrong_snapshot(history: list[Snapshot], data: st.DataObject) -> None:
    """Damage that a liar has given the right chunk hashes: only the digest of the segment is left to tell."""
    base, target = history
    manifest, chunks = encode_delta(base, target)
    sent = [place for place, segment in enumerate(manifest.segments) if segment.records]
    if not sent:
        return
    place = data.draw(st.sampled_from(sent))
    segment = manifest.segments[place]
    [record] = segment.records
    encoded = bytearray(b"".join(chunks[hash_] for hash_, _ in record.chunks()))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut_at = (
        data.draw(st.one_of(st.just(len(encoded)), st.integers(1, len(encoded)))) if record.codec == DELTA else None
    )
    wrong = bytes(encoded[:cut_at])
    hash_ = blake3(wrong).digest()
    lie = replace(segment, records=(Record(record.codec, len(wrong), len(wrong), hash_),))
    other = replace(manifest, segments=(*manifest.segments[:place], lie, *manifest.segments[place + 1 :]))
    result = outcome(lambda: apply_delta(other, base, {**chunks, hash_: memoryview(wrong)}.__getitem__))
    assert result == "corrupt" or plain(result) == plain(target)
