"""Chunks and manifests on disk, by content. One process owns a store; its caller does the fetching.

    <directory>/chunks/<hash in hex>          manifests/<lineage>.<version>.json          tmp/

A file is written under tmp/ and renamed into place: at any instant, also under ``kill -9``, every name outside tmp/ is
whole. Files are not synced one by one, so after a *power* failure some may be empty; sizes are checked at opening and
hashes at each reading, and what is wrong counts as missing and is fetched again.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from echo2.errors import InvariantError, PeerError, UserError
from echo2.types import SnapshotRef
from echo2.weights.snapshot import HASH_BYTES, MAX_CHUNK_BYTES, Manifest

_CHUNK_NAME = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


class ChunkStore:
    """Content-addressed chunks and the manifests that are whole.

    Opening creates the directory where needed and clears what a killed process left half-written.

    Raises:
        UserError: the directory cannot be used or is full; nothing half-written is visible, nothing stored is lost.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._chunks = directory / "chunks"
        self._manifests = directory / "manifests"
        self._tmp = directory / "tmp"
        self._serial = itertools.count()
        try:
            for folder in (self._chunks, self._manifests, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._tmp.iterdir():
                leftover.unlink()
            self._sizes = _chunk_sizes(self._chunks)
            self._whole = self._load_manifests()
        except OSError as error:
            raise UserError(f"Cannot open the snapshot store {directory}: {error.strerror}.") from error

    def has(self, hash_: bytes) -> bool:
        return hash_ in self._sizes

    def put(self, hash_: bytes, data: bytes | memoryview) -> None:
        """Keep one chunk. Putting it again changes nothing.

        Raises:
            PeerError: "corrupt", when the data does not have this hash; "oversized".
            UserError: the disk is full or cannot be written.
        """
        if len(data) > MAX_CHUNK_BYTES:
            raise PeerError("oversized", f"chunk of {len(data)} bytes; the limit is {MAX_CHUNK_BYTES}")
        if blake3(data).digest() != hash_:
            raise PeerError("corrupt", f"{len(data)} bytes were sent as chunk {hash_.hex()[:128]} and are not it")
        if self._sizes.get(hash_) != len(data):
            self._write(self._chunks / hash_.hex(), data)
            self._sizes[hash_] = len(data)

    def get(self, hash_: bytes) -> bytes:
        """The bytes of one chunk, verified.

        Raises:
            PeerError: "missing", when it is not here; "corrupt", when the disk altered it: it is then dropped, so that
                it is fetched again.
        """
        if hash_ not in self._sizes:
            raise PeerError("missing", f"chunk {hash_.hex()[:128]} is not in this store")
        path = self._chunks / hash_.hex()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if blake3(data).digest() != hash_:
            self._drop_chunk(hash_)
            raise PeerError("corrupt", f"{path} was altered on disk and is dropped")
        return data

    def missing(self, manifest: Manifest) -> tuple[bytes, ...]:
        """Hashes of the manifest's chunks that are not here, distinct, in stream order."""
        absent = (entry.hash for entry in manifest.chunks if self._sizes.get(entry.hash) != entry.num_bytes)
        return tuple(dict.fromkeys(absent))

    def put_manifest(self, manifest: Manifest) -> None:
        """List a manifest whose chunks are all here.

        Raises:
            InvariantError: some chunks are missing, or another content is listed under the same ref.
            UserError: the disk is full or cannot be written.
        """
        absent = self.missing(manifest)
        if absent:
            raise InvariantError(f"snapshot {manifest.ref} misses {len(absent)} chunks, first {absent[0].hex()}")
        listed = self._whole.get(manifest.ref)
        if listed is not None and listed.digest != manifest.digest:
            raise InvariantError(f"snapshot {manifest.ref} is immutable, but came again with another digest")
        self._write(self._manifest_path(manifest.ref), manifest.to_bytes())
        self._whole[manifest.ref] = manifest

    def manifests(self) -> list[Manifest]:
        """The manifests that are whole, oldest first."""
        return [self._whole[ref] for ref in sorted(self._whole) if not self.missing(self._whole[ref])]

    def drop_manifest(self, ref: SnapshotRef) -> None:
        """Forget a manifest, if it is listed. Its chunks stay until `retain`."""
        if self._whole.pop(ref, None) is not None:
            self._manifest_path(ref).unlink(missing_ok=True)

    def retain(self, manifests: Iterable[Manifest]) -> int:
        """Keep what these manifests (listed, or still being fetched) name and delete the rest.

        Returns the number of bytes freed. Other manifests go first: one that is listed is whole at any instant.
        """
        kept = list(manifests)
        kept_refs = {manifest.ref for manifest in kept}
        for ref in [ref for ref in self._whole if ref not in kept_refs]:
            self.drop_manifest(ref)
        used = {hash_ for manifest in kept for hash_ in manifest.hashes}
        return sum(self._drop_chunk(hash_) for hash_ in [hash_ for hash_ in self._sizes if hash_ not in used])

    def _drop_chunk(self, hash_: bytes) -> int:
        size = self._sizes.pop(hash_)
        (self._chunks / hash_.hex()).unlink(missing_ok=True)
        return size

    def _manifest_path(self, ref: SnapshotRef) -> Path:
        return self._manifests / f"{ref.lineage}.{ref.version}.json"

    def _load_manifests(self) -> dict[SnapshotRef, Manifest]:
        """Manifests that are whole; the files of others (a disk's damage) are deleted."""
        whole: dict[SnapshotRef, Manifest] = {}
        for path in self._manifests.iterdir():
            try:
                manifest = Manifest.from_bytes(path.read_bytes())
            except PeerError:
                path.unlink()
                continue
            if path == self._manifest_path(manifest.ref) and not self.missing(manifest):
                whole[manifest.ref] = manifest
            else:
                path.unlink()
        return whole

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        tmp = self._tmp / f"{next(self._serial)}-{path.name}"
        try:
            try:
                tmp.write_bytes(data)
                os.replace(tmp, path)
            except BaseException:
                tmp.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise UserError(
                f"Cannot write {len(data)} bytes into the snapshot store {self.directory}: {error.strerror}. "
                "Nothing that was stored is lost; make room there (or allow writing), then start again."
            ) from error


def _chunk_sizes(folder: Path) -> dict[bytes, int]:
    """Sizes of the chunks in `folder`, by hash. Files that are not chunks are not ours and stay alone."""
    with os.scandir(folder) as entries:
        return {
            bytes.fromhex(entry.name): entry.stat().st_size for entry in entries if _CHUNK_NAME.fullmatch(entry.name)
        }
