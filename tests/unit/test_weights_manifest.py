"""Manifests from strangers: refused as malformed or exactly what was sent, whatever the bytes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from weights_cases import encode

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, PayloadId, SnapshotRef, TensorBytes
from echo2.weights.format import manifest
from echo2.weights.format.manifest import (
    DELTA,
    FORMAT,
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_DELTAS,
    MAX_MANIFEST_BYTES,
    RAW,
    FileEntry,
    Manifest,
    Record,
    Segment,
    TensorEntry,
    stream_order,
)
from echo2.weights.format.segments import chunk_bytes_for, cut_stream

MANIFEST = encode(
    SnapshotRef(RUN_POLICY, 1, 3),
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
        return Manifest.from_bytes(text).text
    except PeerError as error:
        return error.reason


def read_again(sent: bytes) -> str:
    try:
        Manifest.from_wire(sent)
    except PeerError as error:
        return error.reason
    return "read"


def test_the_text_is_canonical_json() -> None:
    text = MANIFEST.text
    assert canonical(json.loads(text)) == text
    assert Manifest.from_bytes(text) == MANIFEST
    assert MANIFEST.ref == SnapshotRef(RUN_POLICY, 1, 3)


@given(st.data())
def test_any_changed_byte_is_refused_or_decoded(data: st.DataObject) -> None:
    text = bytearray(MANIFEST.text)
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    assert written_again(bytes(text)) in (bytes(text), "malformed")


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    malformed(noise)


json_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from(sorted(json.loads(MANIFEST.text))), json_values)
def test_any_other_value_of_a_field_is_refused(field: str, value: object) -> None:
    tree = json.loads(MANIFEST.text)
    if tree[field] == value or (field == "files" and value == []):  # that is another manifest
        return
    malformed(json.dumps({**tree, field: value}, sort_keys=True, separators=(",", ":")).encode())


def changed(path: str, value: object) -> bytes:
    tree = json.loads(MANIFEST.text)
    *parents, last = path.split(".")
    node: Any = tree
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    return canonical(tree)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", 3, "format 3"),
        ("ref.policy", "../up", "not a policy id"),
        ("ref.version", -1, "version -1"),
        ("ref.lineage", 1 << 63, "lineage"),
        ("base", {"lineage": 1, "policy": RUN_POLICY, "version": 3}, "over itself"),
        ("base", {"lineage": 1, "policy": RUN_POLICY, "version": -1}, "version -1"),
        ("files.0.name", "../config.json", "plain name"),
        ("files.0.name", "dir/config.json", "plain name"),
        ("files.0.name", "", "characters"),
        ("files.0.num_bytes", -1, "bytes"),
        ("files.0.num_bytes", 3, "a raw record of 2 bytes for 3"),
        ("files.0.digest", "AAAA", "digest of 3 bytes"),
        ("files.0.record", None, "there is none"),
        ("files.0.record.codec", "delta", "encoded as 'delta'"),
        ("files.0.record.hashes", "", "chunk hashes of 0 bytes together, not 32"),
        ("tensors.0.name", "b" * 600, "characters"),
        ("tensors.0.shape", [2, 3], "segment"),
        ("tensors.0.shape", [2, 1], "of other items"),
        ("tensors.0.shape", [-2, -2], "shape"),
        ("tensors.0.shape", [1] * 17, "shape"),
        ("tensors.0.shape", [1 << 62, 1 << 62], "segment"),
        ("tensors.0.dtype", "F31", "dtype 'F31'"),
        ("tensors.0.dtype", "U16", "segment"),
        ("segments", [], "segments end before the tensors do"),
        ("segments.0.num_bytes", 15, "within an item"),
        ("segments.0.num_bytes", 18, "of other items"),
        ("segments.1.num_bytes", 8, "2 bytes beyond the tensors"),
        ("segments.1.num_bytes", 0, "a segment of 0 bytes"),
        ("segments.1.num_bytes", 1 << 30, "a segment of"),
        ("segments.0.digest", "AAAA", "digest of 3 bytes"),
        ("segments.0.records", [], "no raw record, over no base"),
        ("segments.0.records.0.codec", "delta", "no raw record, over no base"),
        ("segments.0.records.0.codec", "zip", "codec 'zip'"),
        ("segments.0.records.0.num_bytes", 15, "a raw record of 15 bytes for 16"),
        ("segments.0.records.0.chunk_bytes", 0, "outside 1.."),
        ("segments.0.records.0.chunk_bytes", MAX_CHUNK_BYTES + 1, "outside 1.."),
        ("segments.0.records.0.chunk_bytes", 16, "chunk hashes of 64 bytes together, not 32"),
        ("segments.0.records.0.hashes", "AAAA", "chunk hashes of 3 bytes together, not 64"),
    ],
)
def test_inconsistent_manifests_are_refused_with_the_value(path: str, value: object, words: str) -> None:
    assert words in malformed(changed(path, value))


def record(num_bytes: int, codec: str = "delta") -> dict[str, Any]:
    return {"chunk_bytes": num_bytes, "codec": codec, "hashes": "A" * 43 + "=", "num_bytes": num_bytes}


def delta_tree(*records: list[dict[str, Any]]) -> dict[str, Any]:
    """A payload over a base as it could be: these records for its segments, and the base's file."""
    tree = json.loads(MANIFEST.text)
    tree["base"] = {"lineage": 1, "policy": RUN_POLICY, "version": 2}
    tree["files"][0]["record"] = None
    for segment, its_records in zip(tree["segments"], records, strict=True):
        segment["records"] = its_records
    return tree


def test_a_payload_over_a_base_names_it_and_may_send_nothing_for_a_segment() -> None:
    manifest = Manifest.from_bytes(canonical(delta_tree([record(10)], [])))
    assert manifest.payload == PayloadId(SnapshotRef(RUN_POLICY, 1, 3), SnapshotRef(RUN_POLICY, 1, 2))
    assert (manifest.total_bytes, manifest.tensor_bytes, manifest.content_bytes) == (10, 22, 24)


def test_a_payload_over_another_policys_snapshot_is_refused() -> None:
    tree = delta_tree([record(10)], [])
    tree["base"]["policy"] = "other"
    assert "over another policy's other@1.2" in malformed(canonical(tree))


def test_records_that_cannot_be_are_refused() -> None:
    assert "delta record of 17 bytes for 16" in malformed(canonical(delta_tree([record(17)], [])))
    assert "raw record after another" in malformed(canonical(delta_tree([record(9), record(16, "raw")], [])))
    Manifest.from_bytes(canonical(delta_tree([record(1)] * MAX_DELTAS, [])))
    Manifest.from_bytes(canonical(delta_tree([record(16, "raw"), *[record(1)] * MAX_DELTAS], [])))
    assert f"{MAX_DELTAS + 1} deltas" in malformed(canonical(delta_tree([record(1)] * (MAX_DELTAS + 1), [])))
    assert "80 bytes lead to 24; limit 72" in malformed(canonical(delta_tree([record(16)] * 5, [])))


def test_a_name_twice_is_refused() -> None:
    tree = json.loads(MANIFEST.text)
    tree["tensors"][1] = {"name": "a", "dtype": "F32", "shape": [0], "offset": 16, "num_bytes": 0}
    assert "twice" in malformed(canonical(tree))


def test_unknown_fields_spaces_and_other_orders_are_refused() -> None:
    tree = json.loads(MANIFEST.text)
    for text in (
        canonical({**tree, "more": 1}),
        canonical(tree) + b" ",
        json.dumps(tree, sort_keys=True).encode(),
        canonical(tree).replace(b'"format":', b'"format":null,"format":'),
    ):
        malformed(text)


def test_too_large_a_text_is_not_parsed() -> None:
    assert "the limit is" in malformed(b" " * (MAX_MANIFEST_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    malformed(b'{"files":' + b"[" * 100_000)


def test_an_encoded_manifest_is_small_with_repeated_names_and_decodes_to_itself() -> None:
    """Half a layer of a mixture of 128 experts."""
    names = [
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(128) for part in ("up", "down")
    ]
    manifest = encode(SnapshotRef(RUN_POLICY, 1, 3), {name: TensorBytes("F32", (4,), bytes(16)) for name in names}, {})[
        0
    ]
    sent = manifest.to_wire()
    assert Manifest.from_wire(sent) == manifest
    assert len(sent) < len(manifest.text) / 8


def llama_of_70b() -> tuple[TensorEntry, ...]:
    """Names and shapes of Llama-3.1-70B in bfloat16, in the order of the tensor stream."""
    hidden, inner, keys, vocabulary = 8192, 28672, 8 * 128, 128256
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    shapes |= {f"model.layers.{number}.{name}": shape for number in range(80) for name, shape in layer.items()}
    shapes["model.norm"] = (hidden,)
    entries = [TensorEntry(f"{name}.weight", "BF16", shape) for name, shape in shapes.items()]
    return tuple(sorted(entries, key=lambda entry: stream_order(entry.name, entry.dtype)))


@pytest.mark.parametrize(("share", "most_bytes"), [(16, 1_000_000), (1, 5_000_000)])
def test_the_manifest_of_a_70b_model(share: int, most_bytes: int) -> None:
    """A delta of a sixteenth of the weights, or all of them; digests and hashes, which nothing compresses, are drawn
    by chance instead of computed."""
    rng, tensors = random.Random(share), llama_of_70b()
    extents = cut_stream(tensors)
    assert (len(tensors), len(extents), sum(extents)) == (723, 8572, 141_107_412_992)

    def record(num_bytes: int, total: int) -> Record:
        chunk_bytes = chunk_bytes_for(total)
        hashes = rng.randbytes(HASH_BYTES * -(-num_bytes // chunk_bytes))
        return Record(RAW if share == 1 else DELTA, num_bytes, chunk_bytes, hashes)

    config = FileEntry("config.json", 855, rng.randbytes(HASH_BYTES), record(855, 855) if share == 1 else None)
    segments = tuple(
        Segment(size, rng.randbytes(HASH_BYTES), (record(size // share, sum(extents) // share),)) for size in extents
    )
    base = None if share == 1 else SnapshotRef(RUN_POLICY, 1, 6)
    manifest = Manifest(FORMAT, SnapshotRef(RUN_POLICY, 1, 7), base, (config,), tensors, segments)
    sent = manifest.to_wire()
    assert Manifest.from_wire(sent) == manifest
    told = f"{len(sent)} bytes are sent, {len(manifest.text)} as text, with {len(manifest.hashes)} chunks"
    assert len(sent) < most_bytes, told


@given(st.data())
def test_an_altered_manifest_is_refused_or_another_one(data: st.DataObject) -> None:
    sent = bytearray(MANIFEST.to_wire())
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    assert read_again(bytes(sent)) in ("read", "malformed")


@pytest.mark.parametrize("num_bytes", [0, MAX_MANIFEST_BYTES + 1])
def test_a_frame_that_holds_nothing_or_too_much_is_not_opened(num_bytes: int) -> None:
    with pytest.raises(PeerError, match=f"malformed: manifest of {num_bytes} bytes"):
        Manifest.from_wire(zstandard.ZstdCompressor().compress(bytes(num_bytes)))
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10))
    for frame in (unsaid, b"", b"noise", MANIFEST.text, MANIFEST.to_wire()[:-1], MANIFEST.to_wire() + b"x"):
        with pytest.raises(PeerError, match="malformed"):
            Manifest.from_wire(frame)


def test_a_manifest_longer_than_the_other_end_takes_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = len(MANIFEST.text)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", num_bytes)
    replace(MANIFEST)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", num_bytes - 1)
    with pytest.raises(UserError, match=f"manifest of {num_bytes} bytes; the limit is {num_bytes - 1}"):
        replace(MANIFEST)
