"""Full encoding: weights and files to content-addressed chunks, and back. Not here: deltas, which need a base.

Encoding joins the tensors once (one copy at memory speed, which also frees the caller to go on training) and cuts
views of that copy; nothing is done per element. Decoding checks every chunk against its hash and the whole against
the manifest's digest before anything is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from blake3 import blake3

from echo2.errors import PeerError, UserError
from echo2.types import Snapshot, SnapshotRef, TensorBytes
from echo2.weights.snapshot import (
    ENCODING_FULL,
    FORMAT,
    MAX_CHUNK_BYTES,
    ChunkEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    stream_order,
)

CHUNK_BYTES = MAX_CHUNK_BYTES
"""Size of the chunks, except the last of the files and the last of the tensors."""


def encode(
    ref: SnapshotRef,
    tensors: Mapping[str, TensorBytes],
    files: Mapping[str, bytes],
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Manifest, dict[bytes, memoryview]]:
    """Describe and cut a snapshot: its manifest, and its distinct chunks by hash.

    The chunks are views of a private copy: the tensors may change afterwards.

    Raises:
        UserError: a name, dtype, shape or size that a manifest cannot carry.
    """
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise UserError(f"chunk_bytes = {chunk_bytes} is outside 1..{MAX_CHUNK_BYTES}.")
    file_names = sorted(files)
    tensor_names = sorted(tensors, key=lambda name: stream_order(name, tensors[name].dtype))
    file_stream = memoryview(b"".join(files[name] for name in file_names))
    tensor_stream = memoryview(b"".join(tensors[name].data for name in tensor_names))

    entries, offset = [], 0
    for name in tensor_names:
        tensor = tensors[name]
        num_bytes = memoryview(tensor.data).nbytes
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), offset, num_bytes))
        offset += num_bytes
    chunks = [*_cut(file_stream, chunk_bytes), *_cut(tensor_stream, chunk_bytes)]
    manifest = Manifest(
        format=FORMAT,
        lineage=ref.lineage,
        version=ref.version,
        base_version=None,
        encoding=ENCODING_FULL,
        files=tuple(FileEntry(name, len(files[name])) for name in file_names),
        tensors=tuple(entries),
        chunks=tuple(ChunkEntry(hash_, chunk.nbytes) for hash_, chunk in chunks),
        digest=content_digest(_slice_tensors(entries, tensor_stream), files),
    )
    return manifest, dict(chunks)


def decode(manifest: Manifest, read_chunk: Callable[[bytes], bytes | memoryview]) -> Snapshot:
    """Rebuild a snapshot, whole and verified. `read_chunk` gives the bytes of a chunk by its hash.

    The tensors are read-only views of one buffer, each aligned to its item size.

    Raises:
        PeerError: "corrupt", when a chunk does not have its hash or size, or the content not the digest.
        UserError: the snapshot does not fit into memory.
        Whatever `read_chunk` raises.
    """
    num_file_chunks, end = 0, 0
    while end < manifest.file_bytes:
        end += manifest.chunks[num_file_chunks].num_bytes
        num_file_chunks += 1
    file_stream = _assemble(manifest.chunks[:num_file_chunks], read_chunk)
    tensor_stream = _assemble(manifest.chunks[num_file_chunks:], read_chunk)

    files, offset = {}, 0
    for entry in manifest.files:
        files[entry.name] = bytes(file_stream[offset : offset + entry.num_bytes])
        offset += entry.num_bytes
    tensors = _slice_tensors(manifest.tensors, tensor_stream)
    digest = content_digest(tensors, files)
    if digest != manifest.digest:
        raise PeerError("corrupt", f"snapshot {manifest.ref} has digest {digest.hex()}, not {manifest.digest.hex()}")
    return Snapshot(manifest.ref, tensors, files)


def content_digest(tensors: Mapping[str, TensorBytes], files: Mapping[str, bytes]) -> bytes:
    """BLAKE3 over every file and tensor in name order: a header [kind, name, dtype, shape, bytes], then the bytes.

    A header is a JSON array that says how many bytes follow, so no two different contents give the same input.
    """
    hasher = blake3()
    for name in sorted(files):
        hasher.update(msgspec.json.encode(["file", name, "", [], len(files[name])]))
        hasher.update(files[name])
    for name in sorted(tensors):
        tensor = tensors[name]
        data = memoryview(tensor.data)
        hasher.update(msgspec.json.encode(["tensor", name, tensor.dtype, list(tensor.shape), data.nbytes]))
        hasher.update(data.cast("B") if data.nbytes else b"")
    return hasher.digest()


def _cut(stream: memoryview, chunk_bytes: int) -> Iterator[tuple[bytes, memoryview]]:
    for start in range(0, stream.nbytes, chunk_bytes):
        chunk = stream[start : start + chunk_bytes]
        yield blake3(chunk).digest(), chunk


def _slice_tensors(entries: Sequence[TensorEntry], stream: memoryview) -> dict[str, TensorBytes]:
    return {
        entry.name: TensorBytes(entry.dtype, entry.shape, stream[entry.offset : entry.offset + entry.num_bytes])
        for entry in entries
    }


def _assemble(chunks: tuple[ChunkEntry, ...], read_chunk: Callable[[bytes], bytes | memoryview]) -> memoryview:
    num_bytes = sum(entry.num_bytes for entry in chunks)
    try:
        # Zeroed pages cost no memory until they are written: a manifest's claim alone does not fill it.
        stream = memoryview(bytearray(num_bytes))
    except MemoryError as error:
        raise UserError(f"A snapshot of {num_bytes} bytes does not fit into this machine's memory.") from error
    offset = 0
    for entry in chunks:
        data = read_chunk(entry.hash)
        if len(data) != entry.num_bytes or blake3(data).digest() != entry.hash:
            raise PeerError("corrupt", f"chunk {entry.hash.hex()} came with {len(data)} other bytes")
        stream[offset : offset + entry.num_bytes] = data
        offset += entry.num_bytes
    return stream.toreadonly()
