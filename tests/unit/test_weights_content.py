"""Encoding and decoding: any content survives, and nothing that was altered on the way is ever decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from weights_cases import bytes_of, decode, encode, holding, new_content

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.manifest import ITEM_BYTES, Manifest
from echo2.weights.format.segments import Encoder
from echo2.weights.store.content import Content
from seeds import examples

REF = SnapshotRef(RUN_POLICY, lineage=2, version=7)

names = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=12).filter(str.isprintable)
file_names = names.filter(lambda name: not name.startswith(".") and not set(name) & set("/\\:"))
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensor_bytes(draw: st.DrawFn) -> TensorBytes:
    dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(shapes)
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return TensorBytes(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


contents = st.tuples(
    st.dictionaries(names, tensor_bytes(), max_size=5), st.dictionaries(file_names, st.binary(max_size=50), max_size=3)
)


def plain(snapshot: Snapshot) -> tuple[object, ...]:
    tensors = {name: (t.dtype, t.shape, bytes(t.read(0, t.num_bytes))) for name, t in snapshot.tensors.items()}
    return snapshot.ref, tensors, dict(snapshot.files)


def example() -> tuple[dict[str, TensorBytes], dict[str, bytes]]:
    tensors = {
        "a.weight": TensorBytes("F32", (2, 3), bytes(range(24))),
        "b.weight": TensorBytes("F32", (2, 3), bytes(range(100, 124))),
        "c.scale": TensorBytes("BF16", (3,), b"abcdef"),
    }
    return tensors, {"config.json": b"{}", "tokenizer.json": b"x" * 40}


@given(contents, st.integers(1, 64))
def test_any_content_survives(content: tuple[dict[str, TensorBytes], dict[str, bytes]], chunk_bytes: int) -> None:
    tensors, files = content
    manifest, chunks = encode(REF, tensors, files, chunk_bytes)
    arrived = Manifest.from_bytes(manifest.text)
    assert arrived == manifest
    snapshot = decode(arrived, {hash_: bytes(data) for hash_, data in chunks.items()}.__getitem__)
    assert plain(snapshot) == plain(Snapshot(REF, tensors, files))


@given(contents, st.integers(1, 64))
def test_chunks_are_named_by_their_hash_and_tensors_are_aligned(
    content: tuple[dict[str, TensorBytes], dict[str, bytes]], chunk_bytes: int
) -> None:
    manifest, chunks = encode(REF, *content, chunk_bytes)
    assert {blake3(data).digest() for data in chunks.values()} == set(chunks) == set(manifest.hashes)
    assert all(size == len(chunks[hash_]) <= chunk_bytes for hash_, size in manifest.chunk_bytes.items())
    start = 0
    for entry in manifest.tensors:
        assert start % ITEM_BYTES[entry.dtype] == 0
        start += entry.num_bytes
    tensors, files = content
    assert manifest.total_bytes == sum(map(len, files.values())) + sum(len(t.data) for t in tensors.values())


def test_encoding_does_not_depend_on_the_order_of_the_mappings() -> None:
    tensors, files = example()
    backwards = dict(reversed(tensors.items())), dict(reversed(files.items()))
    assert encode(REF, tensors, files)[0] == encode(REF, *backwards)[0]


def test_memoryviews_of_any_format_are_taken() -> None:
    view = memoryview(bytes(range(16))).cast("f", (2, 2))
    manifest, chunks = encode(REF, {"w": TensorBytes("F32", (2, 2), view)}, {})
    assert bytes_of(decode(manifest, chunks.__getitem__))[0]["w"][2] == bytes(range(16))


def test_unchanged_files_keep_their_chunks() -> None:
    tensors, files = example()
    longer = {**tensors, "a.weight": TensorBytes("F32", (7,), b"z" * 28)}
    first = encode(REF, tensors, files, chunk_bytes=16)[0]
    second = encode(SnapshotRef(RUN_POLICY, 2, 8), longer, files, chunk_bytes=16)[0]
    assert first.files == second.files
    assert first.segments[0] != second.segments[0]


def test_the_root_is_over_content_not_over_names_of_versions_or_chunk_sizes() -> None:
    tensors, files = example()
    assert encode(REF, tensors, files, 5)[0].root == encode(SnapshotRef(RUN_POLICY, 9, 9), tensors, files, 64)[0].root


@given(contents, contents)
def test_different_contents_have_different_roots(
    one: tuple[dict[str, TensorBytes], dict[str, bytes]], other: tuple[dict[str, TensorBytes], dict[str, bytes]]
) -> None:
    is_same = plain(Snapshot(REF, *one)) == plain(Snapshot(REF, *other))
    assert (encode(REF, *one)[0].root == encode(REF, *other)[0].root) == is_same


def test_a_file_that_was_damaged_is_mended_from_chunks_and_nothing_else_is_read_again() -> None:
    tensors = {name: TensorBytes("U8", (4,), name.encode() * 4) for name in "abc"}
    snapshot = Snapshot(REF, tensors, {})
    encoder = Encoder(snapshot, extents=(4, 4, 4))
    chunks = {hash_: bytes(data) for part in encoder.parts() for hash_, data in part.items()}
    content, manifest, asked = new_content(), encoder.manifest(), list[bytes]()
    content.apply(manifest, chunks.__getitem__)
    path = content.path
    path.write_bytes(path.read_bytes()[:4] + b"bxbb" + b"c")
    again = Content(path)
    again.apply(manifest, lambda hash_: (asked.append(hash_), chunks[hash_])[1])
    assert plain(again.snapshot()) == plain(snapshot)
    damaged = [hash_ for segment in manifest.segments[1:] for hash_, _ in segment.records[0].chunks()]
    assert sorted(asked) == sorted(damaged), "threads ask for segments in any order"


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"short"), lambda path: path.unlink()])
def test_an_unreadable_file_is_not_a_content(damage: Callable[[Path], object]) -> None:
    content = holding(Snapshot(REF, {"w": TensorBytes("U8", (9,), b"123456789")}, {}))
    snapshot = content.snapshot()
    damage(content.path)
    with pytest.raises(PeerError, match="missing"):
        snapshot.tensors["w"].read(0, 9)
    assert content.ref is None


def test_a_directory_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    manifest, chunks = encode(REF, *example())
    with pytest.raises(UserError, match="No such file"):
        Content(tmp_path / "gone" / "content").apply(manifest, chunks.__getitem__)


def refuse(manifest: Manifest, read_chunk: Callable[[bytes], bytes]) -> str:
    with pytest.raises(PeerError) as caught:
        decode(manifest, read_chunk)
    assert caught.value.reason == "corrupt"
    return caught.value.detail


@given(contents.filter(lambda content: any(len(t.data) for t in content[0].values())), st.integers(1, 64), st.data())
def test_one_flipped_bit_is_never_decoded(
    content: tuple[dict[str, TensorBytes], dict[str, bytes]], chunk_bytes: int, data: st.DataObject
) -> None:
    manifest, chunks = encode(REF, *content, chunk_bytes)
    hit = data.draw(st.sampled_from(sorted(chunks)))
    bad = bytearray(chunks[hit])
    bit = data.draw(st.integers(0, 8 * len(bad) - 1))
    bad[bit // 8] ^= 1 << (bit % 8)
    refuse(manifest, lambda hash_: bytes(bad) if hash_ == hit else bytes(chunks[hash_]))


@pytest.mark.parametrize("other", [b"", b"short", b"x" * 100])
def test_a_chunk_of_another_length_is_never_decoded(other: bytes) -> None:
    manifest, _ = encode(REF, *example())
    refuse(manifest, lambda hash_: other)


def test_swapped_segments_are_never_decoded() -> None:
    """Whole, valid chunks in the wrong places: each passes its own hash, only the digest can tell."""
    manifest, _chunks = encode(REF, *example())
    first, second = manifest.segments
    swapped = (replace(first, records=second.records), second)
    with pytest.raises(UserError):  # another size
        replace(manifest, segments=swapped)
    a, b = (encode(REF, {"w": TensorBytes("U8", (4,), data)}, {}) for data in (b"abcd", b"efgh"))
    mixed = replace(a[0], segments=(replace(a[0].segments[0], records=b[0].segments[0].records),))
    refuse(mixed, {**a[1], **b[1]}.__getitem__)


def test_a_file_with_other_bytes_than_its_digest_is_never_decoded() -> None:
    manifest, chunks = encode(REF, *example())
    first, second = manifest.files
    refuse(replace(manifest, files=(replace(first, digest=second.digest), second)), chunks.__getitem__)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TensorBytes("F32", (2,), b"abc"), "has 3 bytes; its shape, F32 [2], needs 8"),
        (TensorBytes("C64", (1,), b"abcdefgh"), "dtype 'C64'"),
        (TensorBytes("F32", (-1,), b""), "shape"),
    ],
)
def test_wrong_tensors_are_refused_with_the_value(tensor: TensorBytes, words: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(REF, {"w": tensor}, {})
    assert words in str(caught.value)


@examples(20)
@given(st.sampled_from(["", ".hidden", "..", "a/b", "a\\b", "C:x", "new\nline", "n\x00l", "x" * 513]))
def test_file_names_that_are_not_plain_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        encode(REF, {}, {name: b"data"})
