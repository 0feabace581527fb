"""Full encoding: weights and files to content-addressed chunks, and back. Not here: deltas (`delta.py`).

Encoding joins the tensors once (one copy at memory speed, which also frees the caller to go on training) and cuts
views of that copy; nothing is done per element. Decoding checks every chunk against its hash and the whole against
the manifest's digest before anything is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

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

MIN_CHUNK_BYTES = 32 << 10
CHUNKS_AIMED_AT = 1024
"""Enough to spread over many links, few enough to name: 256 MiB go in chunks of 256 KiB."""

ReadChunk = Callable[[bytes], bytes | memoryview]


def chunk_bytes_for(num_bytes: int) -> int:
    """The size of the chunks (but the last) of a payload of `num_bytes`: a power of two, 32 KiB to 1 MiB."""
    wanted = max(1, num_bytes // CHUNKS_AIMED_AT)
    return min(max(MIN_CHUNK_BYTES, 1 << (wanted - 1).bit_length()), MAX_CHUNK_BYTES)


def encode(
    ref: SnapshotRef,
    tensors: Mapping[str, TensorBytes],
    files: Mapping[str, bytes],
    chunk_bytes: int | None = None,
    *,
    is_frozen: bool = False,
) -> tuple[Manifest, dict[bytes, memoryview]]:
    """Describe and cut a snapshot: its manifest, and its distinct chunks by hash.

    The chunks are views of a private copy: the tensors may change afterwards. `is_frozen`: they never will; then the
    chunks of a content that `decode` or `apply_delta` returned are views of it and cost no memory.

    Raises:
        UserError: a name, dtype, shape or size that a manifest cannot carry.
    """
    entries = tensor_index(tensors)
    file_stream = join_files(files)
    parts = [tensors[entry.name].data for entry in entries]
    tensor_stream = _one_buffer(parts) if is_frozen else memoryview(b"".join(parts))
    named = list(cut_streams(file_stream, tensor_stream, chunk_bytes))
    manifest = Manifest(
        format=FORMAT,
        lineage=ref.lineage,
        version=ref.version,
        base=None,
        encoding=ENCODING_FULL,
        files=tuple(FileEntry(name, len(files[name])) for name in sorted(files)),
        tensors=entries,
        chunks=tuple(ChunkEntry(hash_, chunk.nbytes) for hash_, chunk in named),
        digest=content_digest(slice_tensors(entries, tensor_stream), files),
    )
    return manifest, dict(named)


def cut(snapshot: Snapshot, chunk_bytes: int | None = None) -> dict[bytes, memoryview]:
    """The chunks that `encode` makes of this content, by hash: what a holder serves to those who come late.

    Of a snapshot that `decode` or `apply_delta` returned, the chunks are views of it and cost no memory.
    """
    entries = tensor_index(snapshot.tensors)
    tensor_stream = _one_buffer([snapshot.tensors[entry.name].data for entry in entries])
    return dict(cut_streams(join_files(snapshot.files), tensor_stream, chunk_bytes))


def decode(manifest: Manifest, read_chunk: ReadChunk) -> Snapshot:
    """Rebuild a snapshot, whole and verified. `read_chunk` gives the bytes of a chunk by its hash.

    The tensors are read-only views of one buffer, each aligned to its item size.

    Raises:
        PeerError: "corrupt", when a chunk does not have its hash or size, or the content not the digest; "base", when
            the manifest is one of a delta (`apply_delta` takes it).
        UserError: the snapshot does not fit into memory.
        Whatever `read_chunk` raises.
    """
    if manifest.base is not None:
        raise PeerError("base", f"payload {manifest.payload} is a delta and cannot be decoded alone")
    tensor_stream = assemble(manifest.chunks[manifest.num_file_chunks :], read_chunk).data.toreadonly()
    return checked(manifest, slice_tensors(manifest.tensors, tensor_stream), decode_files(manifest, read_chunk))


def decode_files(manifest: Manifest, read_chunk: ReadChunk) -> dict[str, bytes]:
    """The files alone, of a manifest that is no delta's. The chunks are checked, the digest of the whole is not.

    Raises:
        PeerError: "corrupt", when a chunk does not have its hash or size.
        Whatever `read_chunk` raises.
    """
    return slice_files(manifest.files, assemble(manifest.chunks[: manifest.num_file_chunks], read_chunk).data)


def checked(manifest: Manifest, tensors: Mapping[str, TensorBytes], files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot of this content, if it is what the manifest says.

    Raises:
        PeerError: "corrupt", when it has another digest.
    """
    digest = content_digest(tensors, files)
    if digest != manifest.digest:
        raise PeerError(
            "corrupt", f"snapshot {manifest.payload} has digest {digest.hex()}, not {manifest.digest.hex()}"
        )
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


def tensor_index(tensors: Mapping[str, TensorBytes]) -> tuple[TensorEntry, ...]:
    """Where each tensor lies in the tensor stream.

    Raises:
        UserError: a dtype that snapshots cannot carry.
    """
    entries, offset = [], 0
    for name in sorted(tensors, key=lambda name: stream_order(name, tensors[name].dtype)):
        tensor = tensors[name]
        num_bytes = memoryview(tensor.data).nbytes
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), offset, num_bytes))
        offset += num_bytes
    return tuple(entries)


def join_files(files: Mapping[str, bytes]) -> memoryview:
    return memoryview(b"".join(files[name] for name in sorted(files)))


def slice_files(entries: Iterable[FileEntry], stream: memoryview) -> dict[str, bytes]:
    files, offset = {}, 0
    for entry in entries:
        files[entry.name] = bytes(stream[offset : offset + entry.num_bytes])
        offset += entry.num_bytes
    return files


def slice_tensors(entries: Sequence[TensorEntry], stream: memoryview) -> dict[str, TensorBytes]:
    return {
        entry.name: TensorBytes(entry.dtype, entry.shape, stream[entry.offset : entry.offset + entry.num_bytes])
        for entry in entries
    }


def cut_streams(files: memoryview, tensors: memoryview, chunk_bytes: int | None) -> Iterator[tuple[bytes, memoryview]]:
    """(hash, bytes) of every chunk in stream order; no chunk holds bytes of both streams.

    Raises:
        UserError: a chunk size outside the limits.
    """
    size = chunk_bytes_for(files.nbytes + tensors.nbytes) if chunk_bytes is None else chunk_bytes
    if not 0 < size <= MAX_CHUNK_BYTES:
        raise UserError(f"chunk_bytes = {size} is outside 1..{MAX_CHUNK_BYTES}.")
    for stream in (files, tensors):
        for start in range(0, stream.nbytes, size):
            chunk = stream[start : start + size]
            yield blake3(chunk).digest(), chunk


def assemble(chunks: tuple[ChunkEntry, ...], read_chunk: ReadChunk) -> NDArray[np.uint8]:
    """The stream that these chunks are, each checked.

    Raises:
        PeerError: "corrupt", when a chunk does not have its hash or size.
        UserError: the stream does not fit into memory.
    """
    stream = empty_bytes(sum(entry.num_bytes for entry in chunks))
    offset = 0
    for entry in chunks:
        data = read_chunk(entry.hash)
        if len(data) != entry.num_bytes or blake3(data).digest() != entry.hash:
            raise PeerError("corrupt", f"chunk {entry.hash.hex()} came with {len(data)} other bytes")
        stream[offset : offset + entry.num_bytes] = np.frombuffer(data, np.uint8)
        offset += entry.num_bytes
    return stream


def empty_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """A buffer to be filled. Its pages cost no memory until they are written: a manifest's claim alone does not.

    Raises:
        UserError: it does not fit into memory.
    """
    try:
        return np.empty(num_bytes, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address can hold
        raise UserError(f"A snapshot of {num_bytes} bytes does not fit into this machine's memory.") from error


def flat_bytes(data: bytes | memoryview) -> NDArray[np.uint8]:
    """The bytes of a tensor as they lie, of any format and shape, without a copy."""
    view = memoryview(data)
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)


def _one_buffer(parts: Sequence[bytes | memoryview]) -> memoryview:
    """The parts joined: where they already lie behind each other in one object, a view of it."""
    views = [memoryview(part) for part in parts if memoryview(part).nbytes]
    starts = [flat_bytes(view).__array_interface__["data"][0] for view in views]
    ends = [start + view.nbytes for start, view in zip(starts, views, strict=True)]
    if not views or starts[1:] != ends[:-1] or any(view.obj is not views[0].obj for view in views):
        return memoryview(b"".join(parts))
    whole = memoryview(views[0].obj).cast("B")
    offset = starts[0] - flat_bytes(whole).__array_interface__["data"][0]
    return whole[offset : offset + ends[-1] - starts[0]].toreadonly()
