"""The manifest of a snapshot: what is in it, in which chunks, and the digest of the whole. It holds no weights.

A snapshot is sent as two streams, one behind the other, cut into chunks that are named by their BLAKE3 hash:

    files:    config.json | tokenizer.json | ...            in name order
    tensors:  largest item size first, then name order      so every tensor is aligned to its items

No chunk holds bytes of both, so files that do not change keep their chunks from version to version.

The encoding "full" sends exactly that. The encoding "delta" over the snapshot `base` sends only the files that changed
(the others are marked `from_base`), and in place of the tensors the records of `delta.py` that turn the base's tensors
into these. The tensor index is that of the snapshot in both.

`Manifest.digest` is over the *decoded* content (`codec.content_digest`), not over chunks: however the bytes were
encoded, a renamed, missing, swapped or altered tensor changes it. There is one JSON text for one manifest (sorted keys,
hashes in base64); anything else is refused. `to_wire()`, that text compressed, is what is sent and what the run signs:
a signature over it is one over every chunk and over the content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import zstandard

from echo2.errors import PeerError, UserError
from echo2.types import PayloadId, SnapshotRef

FORMAT = 2
ENCODING_FULL = "full"
ENCODING_DELTA = "delta"
HASH_BYTES = 32

MAX_MANIFEST_BYTES = 32 << 20  # half of the largest message; about 400 GB of weights in chunks of 1 MiB
WIRE_LEVEL = 3
MAX_CHUNK_BYTES = 1 << 20  # as transport: small enough to be re-requested, large enough to fill a link
MAX_CHUNKS = 1 << 20  # 1 TiB in all
MAX_TENSORS = 1 << 18  # the largest mixtures of experts have about 100 000
MAX_FILES = 256
MAX_FILE_BYTES = 256 << 20  # of all files together; large tokenizers have about 30 MB
MAX_NAME_CHARS = 512
MAX_DIMS = 16
MAX_NUMBER = (1 << 63) - 1  # versions and lineages are 64-bit on the wire and in the ledger

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64"), 8),
        **dict.fromkeys(("F32", "I32", "U32"), 4),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
        **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
    }
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the tensor stream."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the snapshot: a plain name, no directories. `from_base`: not sent, it is the base's file."""

    name: str
    num_bytes: int
    from_base: bool = False


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """One chunk: `hash` is the BLAKE3 hash of its bytes."""

    hash: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one snapshot is made of. A constructed manifest is consistent in itself and within every limit.

    Raises:
        UserError: names the entry that is inconsistent or over a limit, and the value.
    """

    format: int
    lineage: int
    version: int
    base: SnapshotRef | None
    encoding: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    digest: bytes

    def __post_init__(self) -> None:
        _check_head(self)
        _check_files(self.files, self.base)
        _check_tensors(self.tensors)
        _check_chunks(self)

    @property
    def ref(self) -> SnapshotRef:
        return SnapshotRef(self.lineage, self.version)

    @property
    def payload(self) -> PayloadId:
        return PayloadId(self.ref, self.base)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files of the snapshot, sent or not."""
        return sum(entry.num_bytes for entry in self.files)

    @property
    def sent_file_bytes(self) -> int:
        """Bytes of the file stream."""
        return sum(entry.num_bytes for entry in self.files if not entry.from_base)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors of the snapshot, however they are sent."""
        return sum(entry.num_bytes for entry in self.tensors)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks: what has to be sent."""
        return sum(entry.num_bytes for entry in self.chunks)

    @property
    def num_file_chunks(self) -> int:
        """How many of the first chunks are those of the file stream."""
        count, end = 0, 0
        while end < self.sent_file_bytes:
            end += self.chunks[count].num_bytes
            count += 1
        return count

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Distinct chunk hashes, in stream order."""
        return tuple(dict.fromkeys(entry.hash for entry in self.chunks))

    def to_bytes(self) -> bytes:
        """The canonical JSON text.

        Raises:
            UserError: it is longer than a manifest may be.
        """
        text = msgspec.json.encode(self, order="sorted")
        _require(len(text) <= MAX_MANIFEST_BYTES, f"a manifest of {len(text)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        return text

    def to_wire(self) -> bytes:
        """The text, compressed: it goes to every worker, and names are most of it."""
        return zstandard.ZstdCompressor(level=WIRE_LEVEL).compress(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest that a stranger sent.

        Raises:
            PeerError: "malformed", for anything that `to_bytes` of a valid manifest could not have written.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise PeerError("malformed", f"manifest of {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        try:
            manifest = msgspec.json.decode(data, type=cls)
            is_canonical = manifest.to_bytes() == data
        except (msgspec.MsgspecError, UserError, UnicodeError, RecursionError) as error:
            raise PeerError("malformed", f"manifest: {error}") from error
        if not is_canonical:
            raise PeerError("malformed", "manifest is not in canonical form")
        return manifest

    @classmethod
    def from_wire(cls, data: bytes) -> Manifest:
        """Read what `to_wire` wrote.

        Raises:
            PeerError: "malformed".
        """
        try:
            claimed = zstandard.get_frame_parameters(data).content_size
            if not 0 < claimed <= MAX_MANIFEST_BYTES:
                raise PeerError("malformed", f"manifest of {claimed} bytes; the limit is {MAX_MANIFEST_BYTES}")
            return cls.from_bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise PeerError("malformed", f"manifest: {error}") from error


def item_bytes(dtype: str) -> int:
    """Bytes of one item of `dtype`.

    Raises:
        UserError: for a dtype that snapshots cannot carry.
    """
    if dtype not in ITEM_BYTES:
        raise UserError(f"Tensor dtype {dtype[:32]!r} cannot be in a snapshot; use one of {', '.join(ITEM_BYTES)}.")
    return ITEM_BYTES[dtype]


def stream_order(name: str, dtype: str) -> tuple[int, str]:
    """Sort key of a tensor in the tensor stream: wide items first, so that each tensor is aligned to its items."""
    return -item_bytes(dtype), name


def _require(is_true: bool, complaint: str) -> None:
    if not is_true:
        raise UserError(f"Snapshot refused: {complaint}.")


def _check_head(manifest: Manifest) -> None:
    _require(manifest.format == FORMAT, f"format {manifest.format}; this echo2 knows {FORMAT}")
    is_known = manifest.encoding == (ENCODING_FULL if manifest.base is None else ENCODING_DELTA)
    _require(
        is_known, f"encoding {manifest.encoding[:32]!r} over base {manifest.base}; 'full' has none, 'delta' has one"
    )
    _require(manifest.base != manifest.ref, f"a delta of {manifest.ref} over itself")
    for ref in (manifest.ref, manifest.base or manifest.ref):
        for name, value in (("lineage", ref.lineage), ("version", ref.version)):
            _require(0 <= value <= MAX_NUMBER, f"{name} {value} is outside 0..{MAX_NUMBER}")
    _require(len(manifest.digest) == HASH_BYTES, f"digest of {len(manifest.digest)} bytes, not {HASH_BYTES}")
    limits = {"files": MAX_FILES, "tensors": MAX_TENSORS, "chunks": MAX_CHUNKS}
    for name, limit in limits.items():
        count = len(getattr(manifest, name))
        _require(count <= limit, f"{count} {name}; the limit is {limit}")


def _check_name(name: str) -> None:
    shown = repr(name[:80])
    _require(0 < len(name) <= MAX_NAME_CHARS, f"name {shown} has {len(name)} characters, not 1..{MAX_NAME_CHARS}")
    _require(name.isprintable(), f"name {shown} has unprintable characters")


def _check_ascending(keys: Iterable[tuple[int, str]]) -> None:
    previous: tuple[int, str] | None = None
    for key in keys:
        _require(previous is None or previous < key, f"name {key[1]!r} is there twice or out of order")
        previous = key


def _check_files(files: tuple[FileEntry, ...], base: SnapshotRef | None) -> None:
    for entry in files:
        _check_name(entry.name)
        # Names become paths on the worker: nothing that could leave its directory or hide in it.
        is_plain = not entry.name.startswith(".") and not set(entry.name) & set("/\\:")
        _require(is_plain, f"file name {entry.name!r}; a plain name without directories is needed")
        _require(not (entry.from_base and base is None), f"file {entry.name!r} is said to be the base's; there is none")
        _require(entry.num_bytes >= 0, f"file {entry.name!r} has {entry.num_bytes} bytes")
    total = sum(entry.num_bytes for entry in files)
    _require(total <= MAX_FILE_BYTES, f"files of {total} bytes together; the limit is {MAX_FILE_BYTES}")
    _check_ascending((0, entry.name) for entry in files)


def _check_tensors(tensors: tuple[TensorEntry, ...]) -> None:
    offset = 0
    for entry in tensors:
        _check_name(entry.name)
        dims_fit = len(entry.shape) <= MAX_DIMS and all(0 <= size <= MAX_NUMBER for size in entry.shape)
        _require(dims_fit, f"tensor {entry.name!r} has a shape outside {MAX_DIMS} dimensions of 0..{MAX_NUMBER}")
        wanted = math.prod(entry.shape) * item_bytes(entry.dtype)
        _require(
            entry.num_bytes == wanted,
            f"tensor {entry.name!r} has {entry.num_bytes} bytes; {entry.dtype} {list(entry.shape)} needs {wanted}",
        )
        _require(entry.offset == offset, f"tensor {entry.name!r} is at {entry.offset}, not at {offset}")
        offset += entry.num_bytes
    _check_ascending(stream_order(entry.name, entry.dtype) for entry in tensors)


def _check_chunks(manifest: Manifest) -> None:
    end = 0
    ends = {0}
    for entry in manifest.chunks:
        _require(len(entry.hash) == HASH_BYTES, f"a chunk hash of {len(entry.hash)} bytes, not {HASH_BYTES}")
        is_sized = 0 < entry.num_bytes <= MAX_CHUNK_BYTES
        _require(is_sized, f"a chunk of {entry.num_bytes} bytes, outside 1..{MAX_CHUNK_BYTES}")
        end += entry.num_bytes
        ends.add(end)
    whole, file_bytes = manifest.file_bytes + manifest.tensor_bytes, manifest.sent_file_bytes
    # A delta that is not smaller than the whole is never made, and nobody is made to fetch one.
    fits = end == whole if manifest.base is None else end < whole
    _require(fits, f"chunks of {end} bytes together for files and tensors of {whole}")
    _require(file_bytes in ends, f"no chunk ends with the files, at byte {file_bytes}")
