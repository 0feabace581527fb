"""Chunks and manifests on disk, by content. One process owns a store; its caller fetches what is missing.

    <directory>/chunks/<number>.pack      manifests/<ref>[-over-<ref>].json      tmp/

One snapshot may be listed as several payloads: without a base, and over several bases. All lead to the same content.

At any instant, also under ``kill -9``, everything stored is complete: chunks as described in `packs.py`, and a manifest
is written under tmp/ and renamed into place. Files are not synced, so after a *power* failure some may be empty or full
of zeros. Hashes are checked at each read, and a wrong chunk counts as missing and is fetched again.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from echo2.core.errors import InvariantError, PeerError, UserError, write_failed
from echo2.core.types import PayloadId, SnapshotRef
from echo2.weights.format.manifest import HASH_BYTES, MAX_CHUNK_BYTES, MAX_DELTAS, Manifest
from echo2.weights.store.packs import PASSING, Packs

_CHUNK_NAME = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")  # 0.2.0 had a file for each chunk; such files are deleted


class ChunkStore:
    """Content-addressed chunks, and the manifests whose chunks are all stored.

    Opening creates the directory where needed and clears what a killed process left half-written. One thread may write
    while others read: a read gives verified bytes, or an error.

    Raises:
        UserError: the directory cannot be used or is full; nothing half-written is visible, nothing stored is lost.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manifests = directory / "manifests"
        self._tmp = directory / "tmp"
        self._serial = itertools.count()
        try:
            for folder in (self._manifests, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._tmp.iterdir():
                leftover.unlink()
            self._packs = Packs(directory / "chunks")
            for path in self._packs.directory.iterdir():
                if _CHUNK_NAME.fullmatch(path.name):
                    path.unlink()
            self._whole = self._load_manifests()
        except OSError as error:
            raise UserError(f"Cannot open the snapshot store {directory}: {error.strerror}.") from error

    def has(self, hash_: bytes) -> bool:
        """Whether this chunk is stored here."""
        return self._packs.place(hash_) is not None

    def put(self, hash_: bytes, data: bytes | memoryview) -> None:
        """Store one chunk. Putting it again changes nothing.

        Raises:
            PeerError: "corrupt", when the data does not have this hash; "oversized".
            UserError: the disk is full or cannot be written.
        """
        check_chunk(hash_, data)
        self.put_checked([(hash_, data)])

    def put_checked(self, chunks: Sequence[tuple[bytes, bytes | memoryview]]) -> None:
        """Store chunks, given as (hash, bytes), that passed `check_chunk`.

        Raises:
            UserError: the disk is full or cannot be written; the chunks before the one that failed are kept.
        """
        try:
            self._packs.append(chunks)
        except OSError as error:
            raise self._write_failed(sum(len(data) for _, data in chunks), error) from error

    def get(self, hash_: bytes) -> bytes:
        """Return the bytes of one chunk, verified.

        Raises:
            PeerError: "missing", when it is not stored here; "corrupt", when the disk altered it or cannot read it. The
                chunk is dropped then, so that it is fetched again.
            UserError: too many files are open or memory is short. The chunk stays.
        """
        while (place := self._packs.place(hash_)) is not None:
            try:
                data, fault = self._packs.read(place), "was altered on disk"
            except OSError as error:
                if error.errno in PASSING:
                    message = f"Cannot read in the snapshot store {self.directory}: {error.strerror}. "
                    raise UserError(message + "Allow this process more open files (ulimit -n) and memory.") from error
                data, fault = b"", f"can't be read ({error.strerror})"
            if blake3(data).digest() == hash_:
                return data
            if self._packs.place(hash_) is place:  # else a sweep has moved it
                self._packs.drop(hash_)
                path = self._packs.path(place.pack)
                raise PeerError("corrupt", f"chunk {hash_.hex()} in {path} {fault} and is dropped")
        raise PeerError("missing", f"chunk {hash_.hex()[:128]} is not in this store")

    def missing(self, manifest: Manifest) -> tuple[bytes, ...]:
        """Return the distinct hashes of the manifest's chunks that are not stored here, in stream order."""
        return tuple(hash_ for hash_, size in manifest.chunk_bytes.items() if self._size(hash_) != size)

    def put_manifest(self, manifest: Manifest) -> None:
        """List a manifest whose chunks are all stored.

        Raises:
            InvariantError: some chunks are missing, or another content is listed under the same ref.
            UserError: the disk is full or cannot be written.
        """
        absent = self.missing(manifest)
        if absent:
            raise InvariantError(f"payload {manifest.payload} misses {len(absent)} chunks, first {absent[0].hex()}")
        if any(m.ref == manifest.ref and m.root != manifest.root for m in list(self._whole.values())):
            raise InvariantError(f"snapshot {manifest.ref} is immutable, but came again with another content")
        self._write(self._manifest_path(manifest.payload), manifest.text)
        self._whole[manifest.payload] = manifest

    def manifest(self, payload: PayloadId) -> Manifest | None:
        """Return the manifest of this payload if all its chunks are stored, else None."""
        manifest = self._whole.get(payload)
        return None if manifest is None or self.missing(manifest) else manifest

    def manifests(self) -> list[Manifest]:
        """Return the manifests whose chunks are all stored, oldest first; for one snapshot, without a base first."""
        found = (self.manifest(payload) for payload in sorted(self._whole, key=_age))
        return [manifest for manifest in found if manifest is not None]

    def chain(self, ref: SnapshotRef, over: SnapshotRef | None = None) -> list[Manifest] | None:
        """Return the payloads that lead to `ref` from nothing, or from `over`, in the order of applying. None: no such
        chain is stored, or it is too long for one payload. From nothing, it begins with the nearest payload without a
        base."""
        steps: list[Manifest] = []
        while len(steps) <= MAX_DELTAS:
            whole = None if over is not None else self.manifest(PayloadId(ref))
            deltas = (m for m in list(self._whole.values()) if m.ref == ref and m.base is not None)
            step = whole or next((delta for delta in deltas if not self.missing(delta)), None)
            if step is None:
                return None
            steps.insert(0, step)
            if step.base == over:
                return steps
            assert step.base is not None
            ref = step.base
        return None

    def drop_manifest(self, payload: PayloadId) -> None:
        """Forget a manifest, if it is listed. Its chunks stay until `retain`."""
        if self._whole.pop(payload, None) is not None:
            self._manifest_path(payload).unlink(missing_ok=True)

    def drop_snapshot(self, ref: SnapshotRef) -> None:
        """Forget every payload of a snapshot."""
        for payload in [payload for payload in list(self._whole) if payload.ref == ref]:
            self.drop_manifest(payload)

    def retain(self, manifests: Iterable[Manifest], chunks: Iterable[bytes] = ()) -> int:
        """Keep these manifests (listed, or still being fetched), their chunks, and `chunks`; delete all others.

        Returns the number of bytes freed. Manifests are deleted before their chunks: a listed manifest is complete at
        any instant.
        """
        num_bytes = self.forget(manifests, chunks)
        self.sweep()
        return num_bytes

    def forget(self, manifests: Iterable[Manifest], chunks: Iterable[bytes] = ()) -> int:
        """The quick half of `retain`: forget all other manifests and chunks. The chunks take disk space until `sweep`.
        Returns the number of their bytes.
        """
        payloads, used = set(), set(chunks)
        for manifest in manifests:
            payloads.add(manifest.payload)
            used.update(manifest.chunk_bytes)
        for payload in [payload for payload in list(self._whole) if payload not in payloads]:
            self.drop_manifest(payload)
        forgotten = [self._packs.forget(hash_) for hash_ in self._packs.hashes() if hash_ not in used]
        return sum(place.num_bytes for place in forgotten if place is not None)

    def sweep(self) -> None:
        """The slow half of `retain`, on any thread: free the disk space of forgotten chunks. See `Packs.sweep`.

        Raises:
            UserError: a pack cannot be deleted, read or written.
        """
        try:
            self._packs.sweep()
        except OSError as error:
            message = f"Cannot delete in the snapshot store {self.directory}: {error.strerror}."
            raise write_failed(error, message) from error

    def _size(self, hash_: bytes) -> int:
        place = self._packs.place(hash_)
        return 0 if place is None else place.num_bytes

    def _manifest_path(self, payload: PayloadId) -> Path:
        over = "" if payload.base is None else f"-over-{payload.base}"
        return self._manifests / f"{payload.ref}{over}.json"

    def _load_manifests(self) -> dict[PayloadId, Manifest]:
        """Load the manifests whose chunks are all stored; delete the files of the others (damaged by the disk)."""
        whole: dict[PayloadId, Manifest] = {}
        for path in self._manifests.iterdir():
            try:
                manifest = Manifest.from_bytes(path.read_bytes())
            except PeerError:
                path.unlink()
                continue
            if path == self._manifest_path(manifest.payload) and not self.missing(manifest):
                whole[manifest.payload] = manifest
            else:
                path.unlink()
        return whole

    def _write(self, path: Path, data: bytes) -> None:
        tmp = self._tmp / f"{next(self._serial)}-{path.name}"
        try:
            try:
                tmp.write_bytes(data)
                os.replace(tmp, path)
            except BaseException:
                tmp.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._write_failed(len(data), error) from error

    def _write_failed(self, num_bytes: int, error: OSError) -> Exception:
        message = (
            f"Cannot write {num_bytes} bytes into the snapshot store {self.directory}: {error.strerror}. "
            "Nothing that was stored is lost; make room there (or allow writing), then start again."
        )
        return write_failed(error, message)


def check_chunk(hash_: bytes, data: bytes | memoryview) -> None:
    """Raises:
    PeerError: "corrupt", when the data does not have this hash; "oversized".
    """
    if len(data) > MAX_CHUNK_BYTES:
        raise PeerError("oversized", f"chunk of {len(data)} bytes; the limit is {MAX_CHUNK_BYTES}")
    if blake3(data).digest() != hash_:
        raise PeerError("corrupt", f"{len(data)} bytes were sent as chunk {hash_.hex()[:128]} and are not it")


def _age(payload: PayloadId) -> tuple[SnapshotRef, bool, SnapshotRef]:
    return payload.ref, payload.base is not None, payload.base or payload.ref
