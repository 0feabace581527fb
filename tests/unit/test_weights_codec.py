"""Encoding and decoding: any content survives, and nothing that was altered on the way is ever decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import PeerError, UserError
from echo2.types import Snapshot, SnapshotRef, TensorBytes
from echo2.weights import ChunkEntry, Manifest, decode, encode
from echo2.weights.snapshot import ITEM_BYTES

REF = SnapshotRef(lineage=2, version=7)

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
    tensors = {name: (t.dtype, t.shape, bytes(t.data)) for name, t in snapshot.tensors.items()}
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
    arrived = Manifest.from_bytes(manifest.to_bytes())
    assert arrived == manifest
    snapshot = decode(arrived, {hash_: bytes(data) for hash_, data in chunks.items()}.__getitem__)
    assert plain(snapshot) == plain(Snapshot(REF, tensors, files))


@given(contents, st.integers(1, 64))
def test_chunks_are_named_by_their_hash_and_tensors_are_aligned(
    content: tuple[dict[str, TensorBytes], dict[str, bytes]], chunk_bytes: int
) -> None:
    manifest, chunks = encode(REF, *content, chunk_bytes)
    assert {blake3(data).digest() for data in chunks.values()} == set(chunks) == set(manifest.hashes)
    assert all(entry.num_bytes == len(chunks[entry.hash]) <= chunk_bytes for entry in manifest.chunks)
    assert all(entry.offset % ITEM_BYTES[entry.dtype] == 0 for entry in manifest.tensors)
    tensors, files = content
    assert manifest.total_bytes == sum(map(len, files.values())) + sum(len(t.data) for t in tensors.values())


def test_encoding_does_not_depend_on_the_order_of_the_mappings() -> None:
    tensors, files = example()
    backwards = dict(reversed(tensors.items())), dict(reversed(files.items()))
    assert encode(REF, tensors, files)[0] == encode(REF, *backwards)[0]


def test_chunks_are_copies_so_training_may_go_on() -> None:
    weights = bytearray(b"abcd")
    manifest, chunks = encode(REF, {"w": TensorBytes("F32", (1,), memoryview(weights))}, {})
    weights[:] = b"wxyz"
    assert bytes(decode(manifest, chunks.__getitem__).tensors["w"].data) == b"abcd"


def test_memoryviews_of_any_format_are_taken() -> None:
    view = memoryview(bytes(range(16))).cast("f", (2, 2))
    manifest, chunks = encode(REF, {"w": TensorBytes("F32", (2, 2), view)}, {})
    assert bytes(decode(manifest, chunks.__getitem__).tensors["w"].data) == bytes(range(16))


def test_unchanged_files_keep_their_chunks() -> None:
    tensors, files = example()
    longer = {**tensors, "a.weight": TensorBytes("F32", (7,), b"z" * 28)}
    first = encode(REF, tensors, files, chunk_bytes=16)[0]
    second = encode(SnapshotRef(2, 8), longer, files, chunk_bytes=16)[0]
    num_file_chunks = 3  # 42 bytes
    assert first.chunks[:num_file_chunks] == second.chunks[:num_file_chunks]
    assert first.chunks[num_file_chunks] != second.chunks[num_file_chunks]


def test_digest_is_over_content_not_over_names_of_versions_or_chunk_sizes() -> None:
    tensors, files = example()
    assert encode(REF, tensors, files, 5)[0].digest == encode(SnapshotRef(9, 9), tensors, files, 64)[0].digest


def test_tensors_come_out_read_only() -> None:
    manifest, chunks = encode(REF, *example())
    view = decode(manifest, chunks.__getitem__).tensors["a.weight"].data
    assert isinstance(view, memoryview)
    assert view.readonly


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
    detail = refuse(manifest, lambda hash_: bytes(bad) if hash_ == hit else bytes(chunks[hash_]))
    assert hit.hex() in detail  # found at the chunk, before anything else is asked for


@pytest.mark.parametrize("other", [b"", b"short", b"x" * 100])
def test_a_chunk_of_another_length_is_never_decoded(other: bytes) -> None:
    manifest, _ = encode(REF, *example())
    refuse(manifest, lambda hash_: other)


@pytest.mark.parametrize("name", ["b.other", "z.weight"])  # in its old place in name order, and in another
def test_a_renamed_tensor_is_never_decoded(name: str) -> None:
    manifest, chunks = encode(REF, *example())
    first, second, *rest = manifest.tensors
    refuse(replace(manifest, tensors=(first, replace(second, name=name), *rest)), chunks.__getitem__)


def test_a_reshaped_or_retyped_tensor_is_never_decoded() -> None:
    manifest, chunks = encode(REF, *example())
    for change in ({"shape": (3, 2)}, {"dtype": "I32"}):
        first, *rest = manifest.tensors
        refuse(replace(manifest, tensors=(replace(first, **change), *rest)), chunks.__getitem__)


def test_a_renamed_file_is_never_decoded() -> None:
    manifest, chunks = encode(REF, *example())
    first, second = manifest.files
    refuse(replace(manifest, files=(replace(first, name="config.txt"), second)), chunks.__getitem__)


def test_swapped_tensors_are_never_decoded() -> None:
    """Whole, valid chunks in the wrong places: each passes its own hash, only the digest can tell."""
    tensors, files = example()
    manifest, chunks = encode(REF, tensors, files, chunk_bytes=24)
    a, b = (blake3(tensors[name].data).digest() for name in ("a.weight", "b.weight"))
    swapped = {a: ChunkEntry(b, 24), b: ChunkEntry(a, 24)}
    refuse(
        replace(manifest, chunks=tuple(swapped.get(entry.hash, entry) for entry in manifest.chunks)), chunks.__getitem__
    )


def test_a_missing_tensor_is_never_decoded() -> None:
    tensors, files = example()
    digest = encode(REF, tensors, files)[0].digest
    del tensors["c.scale"]
    manifest, chunks = encode(REF, tensors, files)
    refuse(replace(manifest, digest=digest), chunks.__getitem__)


def test_a_moved_border_between_two_files_is_never_decoded() -> None:
    manifest, chunks = encode(REF, {}, {"a": b"one", "b": b"two"})
    first, second = manifest.files
    moved = (replace(first, num_bytes=2), replace(second, num_bytes=4))
    refuse(replace(manifest, files=moved), chunks.__getitem__)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TensorBytes("F32", (2,), b"abc"), "has 3 bytes; F32 [2] needs 8"),
        (TensorBytes("C64", (1,), b"abcdefgh"), "dtype 'C64'"),
        (TensorBytes("F32", (-1,), b""), "shape"),
    ],
)
def test_wrong_tensors_are_refused_with_the_value(tensor: TensorBytes, words: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(REF, {"w": tensor}, {})
    assert words in str(caught.value)


@settings(max_examples=20)
@given(st.sampled_from(["", ".hidden", "..", "a/b", "a\\b", "C:x", "new\nline", "n\x00l", "x" * 513]))
def test_file_names_that_are_not_plain_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        encode(REF, {}, {name: b"data"})
