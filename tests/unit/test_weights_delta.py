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
from weights_cases import apply_delta, decode, encode, encode_delta, holding

from echo2.core.errors import InvariantError, PeerError
from echo2.core.types import RUN_POLICY, PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.deltas import DENSE_STEPS, SPARSE_STEPS, SPLIT, STEP_PLANES, apply_items, encode_items
from echo2.weights.format.manifest import DELTA, Manifest, Record
from echo2.weights.format.planes import Items, Reader, Writer, where
from echo2.weights.format.segments import SEGMENT_BYTES, Encoder, chunk_bytes_for

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
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, files or {})


def plain(snapshot: Snapshot) -> tuple[object, ...]:
    tensors = {name: (t.dtype, tuple(t.shape), bytes(t.read(0, t.num_bytes))) for name, t in snapshot.tensors.items()}
    return snapshot.ref, tensors, dict(snapshot.files)


delta = encode_delta


def sent_again(manifest: Manifest, encoded: bytes) -> tuple[Manifest, Chunks]:
    """The manifest with another record in its first segment, whose chunks have the right hashes: what only a liar or a
    bug sends."""
    first, *rest = manifest.segments
    hash_ = blake3(encoded).digest()
    lie = replace(first, records=(Record(DELTA, len(encoded), len(encoded), hash_),))
    return replace(manifest, segments=(lie, *rest)), {hash_: memoryview(encoded)}


BASE = snapshot(1, {"a": weights(1), "b": weights(2, 300)}, {"config.json": b"{}", "tokenizer.json": b"t" * 500})
TARGET = snapshot(
    2,
    {"a": stepped(weights(1), 0.01, 3), "b": stepped(weights(2, 300), 0.5, 4)},
    {"config.json": b"{1}", "tokenizer.json": b"t" * 500},
)


def test_a_delta_makes_the_target_of_the_base() -> None:
    manifest, chunks = delta(BASE, TARGET)
    arrived = Manifest.from_bytes(manifest.text)
    assert arrived == manifest
    assert arrived.payload == PayloadId(SnapshotRef(RUN_POLICY, 1, 2), SnapshotRef(RUN_POLICY, 1, 1))
    assert arrived.root == encode(TARGET.ref, TARGET.tensors, TARGET.files)[0].root
    assert plain(apply_delta(arrived, BASE, chunks.__getitem__)) == plain(TARGET)


def test_only_files_that_changed_are_sent() -> None:
    manifest, chunks = delta(BASE, TARGET)
    config, tokenizer = manifest.files
    assert config.record is not None
    assert bytes(chunks[config.record.hashes]) == b"{1}"
    assert (tokenizer.name, tokenizer.record) == ("tokenizer.json", None)


def test_a_sparse_change_is_a_hundredth() -> None:
    base, target = weights(5, 1 << 20), stepped(weights(5, 1 << 20), 0.01, 6)
    manifest, _ = delta(snapshot(1, {"w": base}), snapshot(2, {"w": target}))
    share = np.mean(base != target)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) + share  # where, and one bit of direction
    assert manifest.total_bytes < 1.05 * entropy * base.size / 8


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.002, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0])
def test_the_encoded_size_is_close_to_the_entropy_at_every_density(share: float) -> None:
    base, target = weights(7, 1 << 20), stepped(weights(7, 1 << 20), share, 8)
    manifest, _ = delta(snapshot(1, {"w": base}), snapshot(2, {"w": target}))
    seen = float(np.mean(base != target))
    positions = 0.0 if seen in (0.0, 1.0) else -(seen * np.log2(seen) + (1 - seen) * np.log2(1 - seen))
    assert manifest.total_bytes <= 1.06 * (positions + seen) * base.size / 8 + 300


def test_frequent_changes_cost_less_where_the_base_predicts_them() -> None:
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
CHANGES = [
    (SPARSE_STEPS, weights(1, SIZE), weights(1, SIZE)),
    (SPARSE_STEPS, noise(1, SIZE), stepped(noise(1, SIZE), 0.01, 2)),
    (SPARSE_STEPS, noise(1, SIZE), np.where(FEW, 0, noise(1, SIZE)).astype(np.uint32)),
    (DENSE_STEPS, noise(1, SIZE), stepped(noise(1, SIZE), 0.6, 2)),
    (STEP_PLANES, fp32(1, SIZE), fp32(1, SIZE, moved=1e-4)),
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
def test_where_equals_numpys_flatnonzero(share: float, size: int) -> None:
    mask = np.random.default_rng(size).random(size) < share
    assert np.array_equal(where(mask), np.flatnonzero(mask))


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes"),
    [(0, 32 << 10), (1 << 20, 32 << 10), (64 << 20, 128 << 10), (65 << 20, 256 << 10), (16 << 30, 1 << 20)],
)
def test_chunks_are_about_five_hundred_within_bounds(num_bytes: int, chunk_bytes: int) -> None:
    assert chunk_bytes_for(num_bytes) == chunk_bytes


def test_many_small_tensors_cost_no_more_than_a_large_one() -> None:
    base, target = weights(9, 256_000), stepped(weights(9, 256_000), 0.01, 10)
    one = delta(snapshot(1, {"w": base}), snapshot(2, {"w": target}))[0].total_bytes
    old = {f"w{i:04}": part for i, part in enumerate(np.split(base, 1000))}
    new = {f"w{i:04}": part for i, part in enumerate(np.split(target, 1000))}
    assert delta(snapshot(1, old), snapshot(2, new))[0].total_bytes == one


def test_incompressible_changes_are_sent_whole() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 5000), dtype=np.uint8)
    base, target = snapshot(1, {"w": noise[0]}), snapshot(2, {"w": noise[1]})
    manifest, chunks = delta(base, target)
    assert [record.codec for segment in manifest.segments for record in segment.records] == ["raw"]
    assert manifest.total_bytes == 5000
    assert plain(apply_delta(manifest, base, chunks.__getitem__)) == plain(target)


def test_an_empty_change_costs_nothing() -> None:
    manifest, chunks = delta(BASE, replace(BASE, ref=SnapshotRef(RUN_POLICY, 1, 2)))
    assert (manifest.total_bytes, chunks) == (0, {})
    assert plain(apply_delta(manifest, BASE, chunks.__getitem__))[1:] == plain(BASE)[1:]


def test_different_tensors_have_no_delta() -> None:
    for other in ({"a": weights(1)}, {"a": weights(1), "b": weights(2, 300).reshape(30, 10)}):
        with pytest.raises(InvariantError, match="different tensors"):
            delta(BASE, snapshot(2, other))


def test_a_delta_over_another_base_is_refused() -> None:
    manifest, chunks = delta(BASE, TARGET)
    with pytest.raises(PeerError) as caught:
        apply_delta(manifest, replace(BASE, ref=SnapshotRef(RUN_POLICY, 1, 0)), chunks.__getitem__)
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


def test_a_base_with_a_false_digest_is_detected() -> None:
    manifest, chunks = delta(BASE, TARGET)
    drifted = snapshot(1, {"a": stepped(weights(1), 0.0001, 11), "b": weights(2, 300)}, dict(BASE.files))
    assert "digest" in corrupt(manifest, drifted, chunks)
    with pytest.raises(PeerError, match=r"base: file 'tokenizer\.json'"):
        apply_delta(manifest, replace(BASE, files={**BASE.files, "tokenizer.json": b"T" * 500}), chunks.__getitem__)


def test_a_delta_over_other_tensors_than_are_here_is_refused() -> None:
    manifest, chunks = delta(BASE, TARGET)
    for other in ({"a": weights(1), "c": weights(2, 300)}, {"b": weights(2, 300)}):
        with pytest.raises(PeerError) as caught:
            apply_delta(manifest, snapshot(1, other, dict(BASE.files)), chunks.__getitem__)
        assert caught.value.reason == "base"


def test_content_that_does_not_verify_leaves_nothing_loadable_and_a_whole_content_repairs_it() -> None:
    manifest, chunks = delta(BASE, TARGET)
    lie, lying = sent_again(manifest, b"no record")
    content = holding(BASE)
    with pytest.raises(PeerError, match="corrupt"):
        content.apply(lie, {**chunks, **lying}.__getitem__)
    assert content.ref is None
    with pytest.raises(PeerError, match="missing"):
        content.snapshot()
    with pytest.raises(PeerError, match="base"):
        content.apply(manifest, chunks.__getitem__)
    whole, all_chunks = encode(TARGET.ref, TARGET.tensors, TARGET.files)
    content.apply(whole, all_chunks.__getitem__)
    assert plain(content.snapshot()) == plain(TARGET)


def test_a_record_with_less_or_more_than_its_items_is_found() -> None:
    manifest, chunks = delta(BASE, TARGET)
    [record] = manifest.segments[0].records
    encoded = b"".join(chunks[hash_] for hash_, _ in record.chunks())
    for other in (encoded[:1], encoded[:-1], encoded + b"\0", encoded[4:]):
        longer, chunk = sent_again(manifest, other)
        corrupt(longer, BASE, {**chunks, **chunk})


def test_a_plane_that_claims_to_be_huge_is_not_opened() -> None:
    """A few bytes that would decompress to a gigabyte: refused by what they claim, before memory is taken."""
    manifest, chunks = delta(BASE, TARGET)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    record = Writer()
    record.byte(STEP_PLANES)
    record.number(len(bomb))
    record.raw(bomb)
    claimed, chunk = sent_again(manifest, record.record())
    tracemalloc.start()
    try:
        assert f"a plane of {64 << 20} bytes" in corrupt(claimed, BASE, {**chunks, **chunk})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_segments_cover_the_stream_and_keep_to_one_width() -> None:
    arrays = {"a": np.zeros(SEGMENT_BYTES, np.uint16), "b": np.zeros(7, np.uint8), "c": np.zeros(3, np.uint64)}
    arrays |= {f"d{number}": np.zeros(5, np.uint8) for number in range(3)}
    manifest = encode(SnapshotRef(RUN_POLICY, 1, 1), snapshot(1, arrays).tensors, {})[0]
    assert manifest.extents == (24, SEGMENT_BYTES, SEGMENT_BYTES, 22)


def test_segments_of_large_tensors_meet() -> None:
    base = weights(1, SEGMENT_BYTES // 2 + 1001)
    old, new = snapshot(1, {"a": base[:11], "w": base[11:]}), stepped(base, 0.001, 2)
    target = snapshot(2, {"a": new[:11], "w": new[11:]})
    manifest, chunks = delta(old, target)
    assert plain(apply_delta(manifest, old, chunks.__getitem__)) == plain(target)


def test_applying_takes_memory_for_a_segment_a_thread_and_not_for_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.weights.store.content.THREADS_MAX", 1)
    base = weights(1, 3 * SEGMENT_BYTES)
    old, new = snapshot(1, {"w": base}), snapshot(2, {"w": stepped(base, 0.001, 2)})
    manifest, chunks = delta(old, new)
    content = holding(old)
    tracemalloc.start()
    try:
        content.apply(manifest, chunks.__getitem__)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * SEGMENT_BYTES < base.nbytes / 2
    finally:
        tracemalloc.stop()
    assert plain(content.snapshot()) == plain(new)


def test_threads_change_nothing() -> None:
    """Twenty segments, in which nothing, little or everything changed: the same payload however many work on it."""
    target = {"a": stepped(weights(1), 0.01, 3), "b": weights(9, 300)}
    target["a"][2000:4000] = weights(1)[2000:4000]
    extents = [2000] * 20 + [600]
    seen = []
    for num_threads in (1, 4):
        kept: dict[int, bytes] = {}
        encoder = Encoder(
            snapshot(2, target),
            BASE,
            extents=extents,
            num_threads=num_threads,
            keep=lambda start, items, segment, chunks, kept=kept: kept.update({start: items.tobytes()}),
        )
        chunks = {name: bytes(data) for part in encoder.parts() for name, data in part.items()}
        seen.append((encoder.manifest(), chunks, kept))
    assert seen[0] == seen[1]
    manifest, _, kept = seen[0]
    assert b"".join(kept[start] for start in sorted(kept)) == target["a"].tobytes() + target["b"].tobytes()
    assert {len(segment.records) for segment in manifest.segments} == {0, 1}
