"""Manifests from strangers: refused as malformed or exactly what was sent, whatever the bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from echo2.errors import PeerError, UserError
from echo2.types import PayloadId, SnapshotRef, TensorBytes
from echo2.weights import Manifest, encode, snapshot
from echo2.weights.snapshot import MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES

MANIFEST = encode(
    SnapshotRef(1, 3),
    {"a": TensorBytes("F32", (2, 2), bytes(16)), "b": TensorBytes("BF16", (3,), b"abcdef")},
    {"config.json": b"{}"},
    chunk_bytes=10,
)[0]


def canonical(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def malformed(data: bytes) -> str:
    with pytest.raises(PeerError) as caught:
        Manifest.from_bytes(data)
    assert caught.value.reason == "malformed"
    return caught.value.detail


def written_again(text: bytes) -> bytes | str:
    try:
        return Manifest.from_bytes(text).to_bytes()
    except PeerError as error:
        return error.reason


def read_again(sent: bytes) -> str:
    try:
        Manifest.from_wire(sent)
    except PeerError as error:
        return error.reason
    return "read"


def test_the_text_is_canonical_json() -> None:
    text = MANIFEST.to_bytes()
    assert canonical(json.loads(text)) == text
    assert Manifest.from_bytes(text) == MANIFEST
    assert MANIFEST.ref == SnapshotRef(1, 3)


@given(st.data())
def test_any_changed_byte_is_refused_or_read_as_it_stands(data: st.DataObject) -> None:
    text = bytearray(MANIFEST.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    assert written_again(bytes(text)) in (bytes(text), "malformed")


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    malformed(noise)


json_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from(sorted(json.loads(MANIFEST.to_bytes()))), json_values)
def test_any_other_value_of_a_field_is_refused(field: str, value: object) -> None:
    tree = json.loads(MANIFEST.to_bytes())
    is_another_version = field in ("version", "lineage") and type(value) is int and 0 <= value < 2**63
    if tree[field] == value or is_another_version:
        return
    malformed(json.dumps({**tree, field: value}, sort_keys=True, separators=(",", ":")).encode())


def changed(path: str, value: object) -> bytes:
    tree = json.loads(MANIFEST.to_bytes())
    *parents, last = path.split(".")
    node: Any = tree
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    return canonical(tree)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", 1, "format 1"),
        ("encoding", "delta", "encoding 'delta'"),
        ("encoding", "zip", "encoding 'zip'"),
        ("base", {"lineage": 1, "version": 2}, "over base 1.2"),
        ("files.0.from_base", True, "there is none"),
        ("version", -1, "version -1"),
        ("lineage", 1 << 63, "lineage"),
        ("digest", "AAAA", "digest of 3 bytes"),
        ("files.0.name", "../config.json", "plain name"),
        ("files.0.name", "dir/config.json", "plain name"),
        ("files.0.name", "", "characters"),
        ("files.0.num_bytes", -1, "bytes"),
        ("files.0.num_bytes", 3, "chunks of 24 bytes"),
        ("files.0.num_bytes", 1 << 62, "the limit is"),
        ("tensors.0.name", "b" * 600, "characters"),
        ("tensors.0.offset", 4, "is at 4, not at 0"),
        ("tensors.1.offset", 0, "is at 0, not at 16"),
        ("tensors.0.num_bytes", 15, "needs 16"),
        ("tensors.0.shape", [2, 3], "needs 24"),
        ("tensors.0.shape", [-2, -2], "shape"),
        ("tensors.0.shape", [1] * 17, "shape"),
        ("tensors.0.shape", [1 << 62, 1 << 62], "needs"),
        ("tensors.0.dtype", "F31", "dtype 'F31'"),
        ("tensors.0.dtype", "U16", "needs 8"),
        ("chunks.0.num_bytes", 0, "outside 1.."),
        ("chunks.0.num_bytes", MAX_CHUNK_BYTES + 1, "outside 1.."),
        ("chunks.0.num_bytes", 3, "chunks of 25 bytes"),
        ("chunks.0.hash", "AAAA", "3 bytes"),
        ("chunks", [], "chunks of 0 bytes"),
    ],
)
def test_inconsistent_manifests_are_refused_with_the_value(path: str, value: object, words: str) -> None:
    assert words in malformed(changed(path, value))


def test_files_must_end_at_a_chunk_border() -> None:
    tree = json.loads(MANIFEST.to_bytes())
    tree["chunks"][0]["num_bytes"] += 1
    tree["chunks"][1]["num_bytes"] -= 1
    assert "no chunk ends with the files" in malformed(canonical(tree))


def delta_tree() -> dict[str, Any]:
    """A delta as it could be: ten bytes in place of the tensors, and the base's file."""
    tree = json.loads(MANIFEST.to_bytes())
    tree["base"], tree["encoding"] = {"lineage": 1, "version": 2}, "delta"
    tree["files"][0]["from_base"] = True
    tree["chunks"] = tree["chunks"][1:2]
    return tree


def test_a_delta_names_its_base() -> None:
    manifest = Manifest.from_bytes(canonical(delta_tree()))
    assert manifest.payload == PayloadId(SnapshotRef(1, 3), SnapshotRef(1, 2))
    assert (manifest.total_bytes, manifest.num_file_chunks) == (10, 0)
    assert (manifest.file_bytes, manifest.sent_file_bytes, manifest.tensor_bytes) == (2, 0, 22)


def test_deltas_that_cannot_be_are_refused() -> None:
    tree = delta_tree()
    assert "over itself" in malformed(canonical({**tree, "base": {"lineage": 1, "version": 3}}))
    assert "version -1" in malformed(canonical({**tree, "base": {"lineage": 1, "version": -1}}))
    assert "encoding 'full'" in malformed(canonical({**tree, "encoding": "full"}))
    assert "over base None" in malformed(canonical({**tree, "base": None}))
    three = [dict(tree["chunks"][0], num_bytes=8) for _ in range(3)]
    assert "chunks of 24 bytes" in malformed(canonical({**tree, "chunks": three}))  # as much as the whole


def test_a_name_twice_is_refused() -> None:
    tree = json.loads(MANIFEST.to_bytes())
    tree["tensors"][1] = {"name": "a", "dtype": "F32", "shape": [0], "offset": 16, "num_bytes": 0}
    assert "twice" in malformed(canonical(tree))


def test_unknown_fields_spaces_and_other_orders_are_refused() -> None:
    tree = json.loads(MANIFEST.to_bytes())
    for text in (
        canonical({**tree, "more": 1}),
        canonical(tree) + b" ",
        json.dumps(tree, sort_keys=True).encode(),
        canonical(tree).replace(b'"digest":', b'"digest":null,"digest":'),
    ):
        malformed(text)


def test_too_large_a_text_is_not_parsed() -> None:
    assert "the limit is" in malformed(b" " * (MAX_MANIFEST_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    malformed(b'{"files":' + b"[" * 100_000)


def test_what_is_sent_is_small_where_names_repeat_and_comes_back_as_it_was() -> None:
    """Half a layer of a mixture of 128 experts."""
    names = [
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(128) for part in ("up", "down")
    ]
    manifest = encode(SnapshotRef(1, 3), {name: TensorBytes("F32", (4,), bytes(16)) for name in names}, {})[0]
    sent = manifest.to_wire()
    assert Manifest.from_wire(sent) == manifest
    assert len(sent) < len(manifest.to_bytes()) / 8


@given(st.data())
def test_what_was_sent_and_altered_is_refused_or_another_manifest(data: st.DataObject) -> None:
    sent = bytearray(MANIFEST.to_wire())
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    assert read_again(bytes(sent)) in ("read", "malformed")


@pytest.mark.parametrize("num_bytes", [0, MAX_MANIFEST_BYTES + 1])
def test_a_frame_that_holds_nothing_or_too_much_is_not_opened(num_bytes: int) -> None:
    with pytest.raises(PeerError, match=f"malformed: manifest of {num_bytes} bytes"):
        Manifest.from_wire(zstandard.ZstdCompressor().compress(bytes(num_bytes)))
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10))
    for frame in (unsaid, b"", b"noise", MANIFEST.to_bytes(), MANIFEST.to_wire()[:-1], MANIFEST.to_wire() + b"x"):
        with pytest.raises(PeerError, match="malformed"):
            Manifest.from_wire(frame)


def test_a_manifest_longer_than_the_other_end_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = len(MANIFEST.to_bytes())
    monkeypatch.setattr(snapshot, "MAX_MANIFEST_BYTES", num_bytes)
    MANIFEST.to_bytes()
    monkeypatch.setattr(snapshot, "MAX_MANIFEST_BYTES", num_bytes - 1)
    with pytest.raises(UserError, match=f"manifest of {num_bytes} bytes; the limit is {num_bytes - 1}"):
        MANIFEST.to_bytes()
