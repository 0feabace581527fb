"""Deltas: what they take from the base and what they send, and that nothing but the right content ever comes out."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from echo2.errors import PeerError
from echo2.types import PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights import ChunkEntry, Manifest, apply_delta, chunk_bytes_for, cut, decode, encode, encode_delta
from echo2.weights.delta import SEGMENT_BYTES, segments
from echo2.weights.items import (
    DENSE_STEPS,
    FULL_PLANES,
    RAW,
    SAME,
    SPARSE_STEPS,
    SPARSE_VALUES,
    SPLIT,
    STEP_PLANES,
    XOR_PLANES,
    apply_items,
    encode_items,
)
from echo2.weights.planes import Items, Reader, Writer, where

Chunks = dict[bytes, memoryview]


def weights(seed: int, num_items: int = 20_000) -> NDArray[np.uint16]:
    """bf16 numbers as a model has them, read as integers."""
    values = np.random.default_rng(seed).normal(0, 0.02, num_items).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def stepped(base: NDArray[Any], share: float, seed: int) -> NDArray[Any]:
    """One step of the integers up or down in this share of the items."""
    draw = np.random.default_rng(seed)
    steps = draw.choice(np.array([1, -1]), base.shape) * (draw.random(base.shape) < share)
    return base + steps.astype(f"i{base.itemsize}").view(base.dtype)


def snapshot(version: int, arrays: dict[str, NDArray[Any]], files: dict[str, bytes] | None = None) -> Snapshot:
    names = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}
    tensors = {name: TensorBytes(names[array.itemsize], array.shape, array.data) for name, array in arrays.items()}
    return Snapshot(SnapshotRef(1, version), tensors, files or {})


def plain(snapshot: Snapshot) -> tuple[object, ...]:
    tensors = {name: (t.dtype, tuple(t.shape), bytes(t.data)) for name, t in snapshot.tensors.items()}
    return snapshot.ref, tensors, dict(snapshot.files)


def delta(base: Snapshot, target: Snapshot, **options: Any) -> tuple[Manifest, Chunks]:
    encoded = encode_delta(base, target, **options)
    assert encoded is not None
    return encoded


def sent_again(manifest: Manifest, stream: bytes) -> tuple[Manifest, Chunks]:
    """The manifest with another tensor stream, whose chunks have the right hashes: what only a liar or a bug sends."""
    kept = manifest.chunks[: manifest.num_file_chunks]
    chunk = {blake3(stream).digest(): memoryview(stream)} if stream else {}
    return replace(manifest, chunks=(*kept, *(ChunkEntry(hash_, len(stream)) for hash_ in chunk))), chunk


BASE = snapshot(1, {"a": weights(1), "b": weights(2, 300)}, {"config.json": b"{}", "tokenizer.json": b"t" * 500})
TARGET = snapshot(
    2,
    {"a": stepped(weights(1), 0.01, 3), "b": stepped(weights(2, 300), 0.5, 4)},
    {"config.json": b"{1}", "tokenizer.json": b"t" * 500},
)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_delta_makes_the_target_of_the_base(num_threads: int) -> None:
    manifest, chunks = delta(BASE, TARGET, num_threads=num_threads)
    arrived = Manifest.from_bytes(manifest.to_bytes())
    assert arrived == manifest
    assert arrived.payload == PayloadId(SnapshotRef(1, 2), SnapshotRef(1, 1))
    assert arrived.digest == encode(TARGET.ref, TARGET.tensors, TARGET.files)[0].digest
    before = plain(BASE)
    assert plain(apply_delta(arrived, BASE, chunks.__getitem__, num_threads=num_threads)) == plain(TARGET)
    assert plain(BASE) == before


def test_only_files_that_changed_are_sent() -> None:
    manifest, chunks = delta(BASE, TARGET)
    assert [(entry.name, entry.from_base) for entry in manifest.files] == [
        ("config.json", False),
        ("tokenizer.json", True),
    ]
    assert bytes(chunks[manifest.chunks[0].hash]) == b"{1}"
    assert manifest.num_file_chunks == 1


def test_a_sparse_change_is_a_hundredth() -> None:
    base, target = weights(5, 1 << 20), stepped(weights(5, 1 << 20), 0.01, 6)
    manifest, _ = delta(snapshot(1, {"w": base}), snapshot(2, {"w": target}))
    share = np.mean(base != target)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) + share  # where, and one bit of direction
    assert manifest.total_bytes < 1.05 * entropy * base.size / 8


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.002, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0])
def test_size_is_near_the_entropy_at_every_density(share: float) -> None:
    base, target = weights(7, 1 << 20), stepped(weights(7, 1 << 20), share, 8)
    manifest, _ = delta(snapshot(1, {"w": base}), snapshot(2, {"w": target}))
    seen = float(np.mean(base != target))
    positions = 0.0 if seen in (0.0, 1.0) else -(seen * np.log2(seen) + (1 - seen) * np.log2(1 - seen))
    assert manifest.total_bytes <= 1.06 * (positions + seen) * base.size / 8 + 300


def test_items_that_change_more_often_are_told_by_the_base() -> None:
    """Weights near zero are stored more finely and change more often: knowing that, less than the entropy is sent."""
    draw = np.random.default_rng(11)
    masters = draw.normal(0, 0.02, 1 << 20).astype(np.float32)
    moved = masters + draw.choice(np.array([-1e-6, 1e-6], np.float32), masters.size)
    base, target = ((values.view(np.uint32) >> 16).astype(np.uint16) for values in (masters, moved))
    record = encode_items(base, target)
    assert record[0] == SPLIT
    share = np.mean(base != target)
    positions = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * base.size / 8
    assert 0.02 < share < 0.06
    assert len(record) < 0.9 * (positions + np.count_nonzero(base != target) / 8)
    reader, shadow = Reader(memoryview(record)), base.copy()
    apply_items(reader, shadow)
    reader.end()
    assert np.array_equal(shadow, target)


def noise(seed: int, num_items: int, dtype: str = "<u4") -> NDArray[Any]:
    return np.frombuffer(np.random.default_rng(seed).bytes(num_items * np.dtype(dtype).itemsize), dtype)


def fp32(seed: int, num_items: int, moved: float = 0.0) -> NDArray[np.uint32]:
    values = np.random.default_rng(seed).normal(0, 0.02, num_items)
    return (values + np.random.default_rng(seed + 1).normal(0, moved, num_items)).astype(np.float32).view(np.uint32)


SIZE = 40_000
FEW = np.random.default_rng(3).random(SIZE) < 0.01
FLIPS = noise(5, SIZE) & np.uint32(0x10101010)  # one bit of each byte, or not
CHANGES = [
    (SAME, weights(1, SIZE), weights(1, SIZE)),
    (SPARSE_STEPS, noise(1, SIZE), stepped(noise(1, SIZE), 0.01, 2)),
    (SPARSE_VALUES, noise(1, SIZE), np.where(FEW, 0, noise(1, SIZE)).astype(np.uint32)),
    (DENSE_STEPS, noise(1, SIZE), stepped(noise(1, SIZE), 0.6, 2)),
    (STEP_PLANES, fp32(1, SIZE), fp32(1, SIZE, moved=1e-4)),
    (XOR_PLANES, noise(1, SIZE), noise(1, SIZE) ^ FLIPS),
    (FULL_PLANES, noise(1, SIZE), fp32(1, SIZE)),
    (RAW, noise(1, SIZE), noise(2, SIZE)),
]


@pytest.mark.parametrize(("form", "base", "target"), CHANGES)
def test_each_form_is_taken_where_it_is_smallest(form: int, base: Items, target: Items) -> None:
    record = encode_items(base, target)
    assert record[0] == form
    reader, shadow = Reader(memoryview(record)), base.copy()
    apply_items(reader, shadow)
    reader.end()
    assert np.array_equal(shadow, target)


def test_splits_within_splits_have_a_bound() -> None:
    nested = bytes((SPLIT, 255)) * 100_000
    with pytest.raises(PeerError, match="splits"):
        apply_items(Reader(memoryview(nested)), weights(1))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.09, 0.3, 1.0])
@pytest.mark.parametrize("size", [0, 1, 7, 64, 65, 10_003])
def test_where_is_where_numpy_says(share: float, size: int) -> None:
    mask = np.random.default_rng(size).random(size) < share
    assert np.array_equal(where(mask), np.flatnonzero(mask))


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes"),
    [(0, 32 << 10), (1 << 20, 32 << 10), (256 << 20, 256 << 10), (257 << 20, 512 << 10), (16 << 30, 1 << 20)],
)
def test_chunks_are_about_a_thousand_within_bounds(num_bytes: int, chunk_bytes: int) -> None:
    assert chunk_bytes_for(num_bytes) == chunk_bytes


def test_many_small_tensors_cost_no_more_than_a_large_one() -> None:
    base, target = weights(9, 256_000), stepped(weights(9, 256_000), 0.01, 10)
    one = delta(snapshot(1, {"w": base}), snapshot(2, {"w": target}))[0].total_bytes
    old = {f"w{i:04}": part for i, part in enumerate(np.split(base, 1000))}
    new = {f"w{i:04}": part for i, part in enumerate(np.split(target, 1000))}
    assert delta(snapshot(1, old), snapshot(2, new))[0].total_bytes == one


def test_what_is_not_smaller_than_the_whole_is_no_delta() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 5000), dtype=np.uint8)
    assert encode_delta(snapshot(1, {"w": noise[0]}), snapshot(2, {"w": noise[1]})) is None
    assert encode_delta(snapshot(1, {}), snapshot(2, {})) is None


def test_nothing_changed_costs_next_to_nothing() -> None:
    manifest, chunks = delta(BASE, replace(BASE, ref=SnapshotRef(1, 2)))
    assert manifest.total_bytes == 5
    assert plain(apply_delta(manifest, BASE, chunks.__getitem__))[1:] == plain(BASE)[1:]


def test_new_renamed_and_reshaped_tensors_come_whole() -> None:
    shared = weights(1, 30_000)
    base = snapshot(1, {"keep": shared, "gone": weights(2, 50), "turned": weights(3, 60).reshape(6, 10)})
    target = snapshot(2, {"keep": shared, "came": weights(2, 50), "turned": weights(3, 60).reshape(10, 6)})
    manifest, chunks = delta(base, target)
    assert plain(apply_delta(manifest, base, chunks.__getitem__)) == plain(target)


def test_a_delta_over_another_base_is_refused() -> None:
    manifest, chunks = delta(BASE, TARGET)
    with pytest.raises(PeerError) as caught:
        apply_delta(manifest, replace(BASE, ref=SnapshotRef(1, 0)), chunks.__getitem__)
    assert caught.value.reason == "base"
    with pytest.raises(PeerError) as caught:
        apply_delta(manifest, replace(BASE, files={}), chunks.__getitem__)
    assert caught.value.reason == "base"
    with pytest.raises(PeerError) as caught:
        decode(manifest, chunks.__getitem__)
    assert caught.value.reason == "base"


def corrupt(manifest: Manifest, base: Snapshot, chunks: Chunks) -> str:
    with pytest.raises(PeerError) as caught:
        apply_delta(manifest, base, chunks.__getitem__)
    assert caught.value.reason == "corrupt"
    return caught.value.detail


def test_a_base_that_is_not_what_it_says_is_found() -> None:
    manifest, chunks = delta(BASE, TARGET)
    drifted = snapshot(1, {"a": stepped(weights(1), 0.0001, 11), "b": weights(2, 300)}, dict(BASE.files))
    assert "digest" in corrupt(manifest, drifted, chunks)
    assert "digest" in corrupt(manifest, replace(BASE, files={**BASE.files, "tokenizer.json": b"T" * 500}), chunks)


def test_a_tensor_renamed_on_the_way_is_found() -> None:
    manifest, chunks = delta(BASE, TARGET)
    first, second = manifest.tensors
    assert "digest" in corrupt(replace(manifest, tensors=(first, replace(second, name="c"))), BASE, chunks)


def test_a_tensor_that_the_base_lacks_is_found() -> None:
    manifest, chunks = delta(BASE, TARGET)
    lacking = replace(BASE, tensors={"b": BASE.tensors["b"]})
    assert "digest" in corrupt(manifest, lacking, chunks)


def test_a_stream_with_less_or_more_than_the_records_is_found() -> None:
    manifest, chunks = delta(BASE, TARGET)
    stream = b"".join(chunks[entry.hash] for entry in manifest.chunks[manifest.num_file_chunks :])
    for other in (b"", stream[:-1], stream + b"\0", stream[4:]):
        longer, chunk = sent_again(manifest, other)
        corrupt(longer, BASE, {**chunks, **chunk})


def test_a_plane_that_claims_to_be_huge_is_not_opened() -> None:
    """A few bytes that would decompress to a gigabyte: refused by what they claim, before memory is taken."""
    manifest, chunks = delta(BASE, TARGET)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    record, claim = Writer(), Writer()
    record.byte(6)  # full planes
    record.number(len(bomb))
    record.raw(bomb)
    claim.number(len(record.record()))
    claimed, chunk = sent_again(manifest, claim.record() + record.record())
    tracemalloc.start()
    try:
        assert f"a plane of {64 << 20} bytes" in corrupt(claimed, BASE, {**chunks, **chunk})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_idempotent_delta_may_be_applied_to_its_own_result() -> None:
    manifest, chunks = delta(BASE, TARGET, idempotent=True)
    assert plain(apply_delta(manifest, BASE, chunks.__getitem__)) == plain(TARGET)
    again = apply_delta(manifest, replace(TARGET, ref=BASE.ref), chunks.__getitem__)
    assert plain(again) == plain(TARGET)


def test_segments_cover_the_stream_and_keep_to_one_width() -> None:
    arrays = {"a": np.zeros(SEGMENT_BYTES, np.uint16), "b": np.zeros(7, np.uint8), "c": np.zeros(3, np.uint64)}
    manifest = encode(SnapshotRef(1, 1), snapshot(1, arrays).tensors, {})[0]
    assert list(segments(manifest.tensors)) == [
        (0, 24, 8),
        (24, 24 + SEGMENT_BYTES, 2),
        (24 + SEGMENT_BYTES, 24 + 2 * SEGMENT_BYTES, 2),
        (24 + 2 * SEGMENT_BYTES, 31 + 2 * SEGMENT_BYTES, 1),
    ]


def test_segments_of_large_tensors_meet() -> None:
    base = weights(1, SEGMENT_BYTES // 2 + 1001)
    old, new = snapshot(1, {"a": base[:11], "w": base[11:]}), stepped(base, 0.001, 2)
    target = snapshot(2, {"a": new[:11], "w": new[11:]})
    manifest, chunks = delta(old, target)
    assert plain(apply_delta(manifest, old, chunks.__getitem__)) == plain(target)


def test_a_holder_cuts_the_chunks_that_the_origin_made() -> None:
    manifest, chunks = encode(TARGET.ref, TARGET.tensors, TARGET.files)
    held = decode(manifest, chunks.__getitem__)
    assert {hash_: bytes(data) for hash_, data in cut(held).items()} == {h: bytes(c) for h, c in chunks.items()}
    assert list(cut(TARGET)) == list(manifest.hashes)


def test_cutting_what_was_decoded_copies_nothing() -> None:
    big = snapshot(1, {"v": weights(1, 1000), "w": weights(2, 1 << 20)})
    manifest, chunks = encode(big.ref, big.tensors, big.files)
    held = decode(manifest, chunks.__getitem__)
    tracemalloc.start()
    try:
        served = cut(held)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert list(served) == list(manifest.hashes)
