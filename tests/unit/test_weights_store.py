"""The chunk store: only whole, right chunks are ever visible, also after a kill or with a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_cases import bytes_of, decode, encode, encode_delta, new_content, spoil, stored_hashes

from disk_cases import no_file_beyond
from echo2.core.errors import InvariantError, PeerError, UserError
from echo2.core.types import RUN_POLICY, PayloadId, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.manifest import MAX_DELTAS, Manifest, compose
from echo2.weights.store.store import ChunkStore


def snapshot(version: int, weights: bytes) -> tuple[Manifest, dict[bytes, memoryview]]:
    tensors = {"w": TensorBytes("U8", (len(weights),), weights)}
    return encode(SnapshotRef(RUN_POLICY, 1, version), tensors, {"config.json": b"{}"}, chunk_bytes=4)


def fill(store: ChunkStore, version: int, weights: bytes) -> Manifest:
    manifest, chunks = snapshot(version, weights)
    for hash_, data in chunks.items():
        store.put(hash_, data)
    store.put_manifest(manifest)
    return manifest


def files_under(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


def test_stored_chunks_are_found_after_reopening(tmp_path: Path) -> None:
    manifest = fill(ChunkStore(tmp_path), 1, b"abcdefghij")
    store = ChunkStore(tmp_path)
    assert store.manifests() == [manifest]
    assert store.missing(manifest) == ()
    assert bytes_of(decode(manifest, store.get))[0]["w"][2] == b"abcdefghij"


def test_missing_shrinks_as_chunks_come(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest, chunks = snapshot(1, b"abcdefghij")
    assert store.missing(manifest) == manifest.hashes == tuple(chunks)
    for position, (hash_, data) in enumerate(chunks.items(), start=1):
        assert not store.has(hash_)
        store.put(hash_, data)
        assert store.has(hash_)
        assert store.missing(manifest) == manifest.hashes[position:]


def test_a_chunk_that_is_not_its_hash_is_refused(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    with pytest.raises(PeerError) as caught:
        store.put(blake3(b"good").digest(), b"evil")
    assert caught.value.reason == "corrupt"
    assert files_under(tmp_path) == set()


def test_a_request_for_an_unknown_hash_is_blamed_on_its_sender(tmp_path: Path) -> None:
    with pytest.raises(PeerError) as caught:
        ChunkStore(tmp_path).get(b"../../etc/passwd")
    assert caught.value.reason == "missing"


def test_a_manifest_is_listed_only_when_whole(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest, chunks = snapshot(1, b"abcdefghij")
    store.put(*next(iter(chunks.items())))
    with pytest.raises(InvariantError):
        store.put_manifest(manifest)
    assert store.manifests() == ChunkStore(tmp_path).manifests() == []


def test_a_published_version_is_immutable(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest = fill(store, 1, b"abcdefghij")
    store.put_manifest(manifest)
    with pytest.raises(InvariantError):
        fill(store, 1, b"ABCDEFGHIJ")
    assert store.manifests() == [manifest]


def test_damage_on_disk_is_found_dropped_and_fetched_again(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest = fill(store, 1, b"abcdefghij")
    hit = manifest.hashes[1]
    spoil(tmp_path, hit)
    with pytest.raises(PeerError) as caught:
        store.get(hit)
    assert caught.value.reason == "corrupt"
    assert store.missing(manifest) == (hit,)
    assert store.manifests() == []
    store.put(hit, b"abcd")
    assert store.manifests() == [manifest]


@pytest.mark.parametrize("damage", ["chunks", "manifests"])
def test_files_emptied_by_a_power_failure_count_as_missing(tmp_path: Path, damage: str) -> None:
    fill(ChunkStore(tmp_path), 1, b"abcdefghij")
    next((tmp_path / damage).iterdir()).write_bytes(b"")
    store = ChunkStore(tmp_path)
    assert store.manifests() == []
    manifest = fill(store, 1, b"abcdefghij")
    assert bytes_of(decode(manifest, ChunkStore(tmp_path).get))[0]["w"][2] == b"abcdefghij"


def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path) -> None:
    manifest = fill(ChunkStore(tmp_path), 1, b"abcdefghij")
    (tmp_path / "tmp" / "0-half").write_bytes(b"half")
    assert ChunkStore(tmp_path).manifests() == [manifest]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_retain_deletes_what_no_kept_manifest_names(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    old, new = fill(store, 1, b"aaaabbbb"), fill(store, 2, b"aaaacccc")
    fetched, chunks = snapshot(3, b"dddd")
    store.put(fetched.hashes[-1], chunks[fetched.hashes[-1]])
    assert store.retain([new, fetched]) == 4
    assert [path.name for path in (tmp_path / "manifests").iterdir()] == ["policy@1.2.json"]
    assert store.manifests() == ChunkStore(tmp_path).manifests() == [new]
    assert store.missing(old) == (blake3(b"bbbb").digest(),)
    assert store.has(blake3(b"dddd").digest())


def test_drop_manifest_keeps_chunks_for_others(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest = fill(store, 1, b"aaaabbbb")
    store.drop_manifest(manifest.payload)
    store.drop_manifest(manifest.payload)
    assert store.manifests() == ChunkStore(tmp_path).manifests() == []
    assert store.missing(manifest) == ()


@pytest.mark.parametrize("left", [1, 35, 36, 39])
def test_a_partly_written_chunk_of_a_killed_process_is_missing(tmp_path: Path, left: int) -> None:
    """At the end of a pack: a part of the header (36 bytes), the header alone, and all but a byte."""
    store = ChunkStore(tmp_path)
    manifest = fill(store, 1, b"abcdefghij")
    pack = tmp_path / "chunks" / "0.pack"
    whole = pack.read_bytes()
    store.put(blake3(b"half").digest(), b"half")
    os.truncate(pack, len(whole) + left)
    again = ChunkStore(tmp_path)
    assert not again.has(blake3(b"half").digest())
    assert pack.read_bytes() == whole
    assert again.manifests() == [manifest]
    again.put(blake3(b"half").digest(), b"half")
    assert ChunkStore(tmp_path).get(blake3(b"half").digest()) == b"half"


def test_a_chunk_is_read_right_while_it_is_moved(tmp_path: Path) -> None:
    """A thread forgets and sweeps, which moves what is left; what the others read is right at any time."""
    store = ChunkStore(tmp_path)
    kept = fill(store, 0, os.urandom(4000))
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            while not is_over.is_set():
                for hash_ in kept.hashes:
                    store.get(hash_)
        except BaseException as error:
            wrong.append(error)

    is_over, readers = threading.Event(), [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 40):
        fill(store, version, os.urandom(4000))
        store.retain([kept])
    is_over.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_a_store_with_a_file_for_each_chunk_is_emptied(tmp_path: Path) -> None:
    """As 0.2.0 wrote it."""
    manifest, chunks = snapshot(1, b"abcdefghij")
    for folder in ("chunks", "manifests"):
        (tmp_path / folder).mkdir()
    for hash_, data in chunks.items():
        (tmp_path / "chunks" / hash_.hex()).write_bytes(data)
    (tmp_path / "manifests" / f"{manifest.ref}.json").write_bytes(manifest.text)
    assert ChunkStore(tmp_path).manifests() == []
    assert files_under(tmp_path) == set()


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest = fill(store, 1, b"abcdefghij")
    before = files_under(tmp_path)
    big = b"x" * 1000
    with no_file_beyond(100), pytest.raises(UserError) as caught:
        store.put(blake3(big).digest(), big)
    assert str(tmp_path) in str(caught.value)
    assert "1000 bytes" in str(caught.value)
    assert files_under(tmp_path) == before
    assert not store.has(blake3(big).digest())
    store.put(blake3(big).digest(), big)
    assert ChunkStore(tmp_path).manifests() == [manifest]


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot open the snapshot store"):
        ChunkStore(tmp_path / "file" / "store")


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["publish", "retain", "drop", "reopen"])), max_size=12))
def test_a_listed_manifest_can_always_be_decoded(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, str]]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    store, listed = ChunkStore(directory), set[int]()
    for version, action in actions:
        if action == "publish":
            fill(store, version, b"same" + bytes([version]) * 6)
            listed.add(version)
        elif action == "retain":
            store.retain([m for m in store.manifests() if m.ref.version >= version])
            listed = {kept for kept in listed if kept >= version}
        elif action == "drop":
            store.drop_snapshot(SnapshotRef(RUN_POLICY, 1, version))
            listed.discard(version)
        else:
            store = ChunkStore(directory)
        assert [m.ref.version for m in store.manifests()] == sorted(listed)
        for manifest in store.manifests():
            decode(manifest, store.get)


PUBLISH_FOR_EVER = """
import itertools, pathlib, sys
from echo2.core.types import RUN_POLICY, SnapshotRef, TensorBytes
from echo2.weights.store.store import ChunkStore
from weights_cases import encode
store = ChunkStore(pathlib.Path(sys.argv[1]))
for version in itertools.count():
    tensors = {"w": TensorBytes("U8", (300_000,), version.to_bytes(4, "big") * 75_000)}
    manifest, chunks = encode(SnapshotRef(RUN_POLICY, 1, version), tensors, {}, chunk_bytes=100_003)
    for hash_, data in chunks.items():
        store.put(hash_, data)
    store.put_manifest(manifest)
    print(version, flush=True)
    store.retain([manifest])
"""


@pytest.mark.parametrize("num_published", [1, 2, 5])
def test_kill_9_leaves_only_whole_snapshots(tmp_path: Path, num_published: int) -> None:
    command = [sys.executable, "-c", PUBLISH_FOR_EVER, str(tmp_path)]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=here) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(num_published)][-1]
        process.send_signal(signal.SIGKILL)
    store = ChunkStore(tmp_path)
    manifests = store.manifests()
    assert manifests
    assert manifests[-1].ref.version >= acknowledged
    for manifest in manifests:
        decode(manifest, store.get)
    assert list((tmp_path / "tmp").iterdir()) == []


def versions(count: int) -> list[Snapshot]:
    """A model of 20 000 items of which some change from version to version."""
    found, items = [], bytearray(range(250)) * 80
    for version in range(1, count + 1):
        items[version * 100 : version * 100 + 5] = bytes([version]) * 5
        found.append(
            Snapshot(
                SnapshotRef(RUN_POLICY, 1, version), {"w": TensorBytes("U8", (20_000,), bytes(items))}, {"c": b"{}"}
            )
        )
    return found


def put(store: ChunkStore, encoded: tuple[Manifest, dict[bytes, memoryview]] | None) -> Manifest:
    assert encoded is not None
    manifest, chunks = encoded
    for hash_, data in chunks.items():
        store.put(hash_, data)
    store.put_manifest(manifest)
    return manifest


def weights_of(snapshot: Snapshot) -> bytes:
    return bytes_of(snapshot)[0]["w"][2]


def test_payloads_of_one_snapshot_stand_beside_each_other(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    one, two, three = versions(3)
    full = put(store, encode(three.ref, three.tensors, three.files))
    over_two, over_one = put(store, encode_delta(two, three)), put(store, encode_delta(one, three))
    for opened in (store, ChunkStore(tmp_path)):
        assert opened.manifests() == [full, over_one, over_two]
        assert opened.manifest(PayloadId(three.ref)) == full
        assert opened.manifest(PayloadId(three.ref, two.ref)) == over_two
        assert opened.manifest(PayloadId(two.ref)) is None
    store.drop_manifest(over_two.payload)
    assert store.manifests() == [full, over_one]
    store.drop_snapshot(three.ref)
    assert store.manifests() == ChunkStore(tmp_path).manifests() == []


def test_two_payloads_of_one_snapshot_have_one_content(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    one, two, three = versions(3)
    put(store, encode(two.ref, two.tensors, two.files))
    with pytest.raises(InvariantError):
        put(store, encode_delta(one, Snapshot(two.ref, three.tensors, three.files)))


def loaded(store: ChunkStore, ref: SnapshotRef) -> Snapshot:
    """What the payloads in a store come to."""
    steps = store.chain(ref)
    assert steps is not None
    content = new_content()
    content.apply(compose(steps), store.get)
    return content.snapshot()


def test_a_snapshot_is_rebuilt_from_its_deltas(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    history = versions(5)
    put(store, encode(history[0].ref, history[0].tensors, history[0].files))
    for base, target in pairwise(history):
        put(store, encode_delta(base, target))
    for snapshot in history:
        assert weights_of(loaded(ChunkStore(tmp_path), snapshot.ref)) == weights_of(snapshot)


def test_a_chain_starts_at_the_nearest_whole_content_or_the_workers_version(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    history = versions(5)
    one, two, three, four, five = (snapshot.ref for snapshot in history)
    whole = put(store, encode(one, history[0].tensors, history[0].files))
    deltas = [put(store, encode_delta(base, target)) for base, target in pairwise(history)]
    assert store.chain(five) == [whole, *deltas]
    anchor = put(store, encode(three, history[2].tensors, history[2].files))
    assert store.chain(five) == [anchor, *deltas[2:]]
    assert store.chain(five, over=two) == deltas[1:]
    assert store.chain(three) == [anchor]
    assert store.chain(four, over=five) is None
    store.drop_manifest(deltas[3].payload)
    assert store.chain(five) is None


def test_a_chain_of_deltas_has_a_bound(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    history = versions(MAX_DELTAS + 2)
    put(store, encode(history[0].ref, history[0].tensors, history[0].files))
    for base, target in pairwise(history):
        put(store, encode_delta(base, target))
    assert weights_of(loaded(store, history[MAX_DELTAS].ref)) == weights_of(history[MAX_DELTAS])
    assert store.chain(history[MAX_DELTAS + 1].ref) is None


def test_a_circle_of_deltas_leads_to_no_version(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    one, two = versions(2)
    there, back = put(store, encode_delta(one, two)), put(store, encode_delta(two, one))
    assert store.chain(two.ref) is None
    assert store.chain(two.ref, over=one.ref) == [there]
    assert store.chain(one.ref, over=two.ref) == [back]


def test_a_damaged_delta_is_found_and_dropped(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    one, two = versions(2)
    put(store, encode(one.ref, one.tensors, one.files))
    delta = put(store, encode_delta(one, two))
    spoil(tmp_path, delta.hashes[-1])
    with pytest.raises(PeerError) as caught:
        loaded(store, two.ref)
    assert caught.value.reason == "corrupt"
    assert store.manifest(delta.payload) is None
    assert store.chain(two.ref) is None


def test_chunks_without_a_manifest_can_be_kept(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    for data in (b"early", b"other"):
        store.put(blake3(data).digest(), data)
    assert store.retain([], [blake3(b"early").digest()]) == 5
    assert store.get(blake3(b"early").digest()) == b"early"
    assert not store.has(blake3(b"other").digest())


def test_a_chunk_that_was_stored_again_is_not_swept(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    old, new = fill(store, 1, b"aaaabbbb"), fill(store, 2, b"aaaacccc")
    gone = set(old.hashes) - set(new.hashes)
    assert store.forget([new]) == 4
    assert len(gone) == 1
    assert set(store.missing(old)) == gone, "it counts as missing at once"
    [hash_] = gone
    store.put(hash_, b"bbbb")
    store.sweep()
    assert store.get(hash_) == b"bbbb"
    store.forget([new])
    store.sweep()
    assert stored_hashes(tmp_path) == set(new.hashes)
    assert store.missing(new) == ()


def test_unswept_chunks_are_deleted_after_the_next_opening(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    fill(store, 1, b"aaaabbbb")
    new = fill(store, 2, b"aaaacccc")
    store.forget([new])
    assert len(stored_hashes(tmp_path)) == 4
    reopened = ChunkStore(tmp_path)
    assert [manifest.ref.version for manifest in reopened.manifests()] == [2]
    assert reopened.retain(reopened.manifests()) == 4
    assert set(reopened.missing(new)) == set()
    assert not reopened.has(blake3(b"bbbb").digest())


def test_a_chunk_that_cannot_be_read_counts_as_missing(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    manifest = fill(store, 1, b"aaaabbbb")
    path = tmp_path / "chunks" / "0.pack"
    path.unlink()
    path.mkdir()  # reading it is an error of the system, not an end of file
    with pytest.raises(PeerError, match=r"corrupt.*can't be read"):
        store.get(manifest.hashes[0])
    assert store.missing(manifest) == manifest.hashes[:1]
