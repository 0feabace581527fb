"""The manifest of a payload: what a snapshot consists of, and in which chunks it is sent. It contains no weights.

The tensors of a snapshot form one stream, wide items first, then in name order, so that every tensor is aligned to its
items. The stream is cut into *segments*: a tensor, a shard of a tensor, or several small tensors. Each segment has a
digest of its bytes after applying, and the *records* that lead to those bytes, in this order:

    raw     the bytes as they are, independent of the bytes before
    delta   the change since the base, or since the record before (`deltas.py`)

A segment without records is unchanged from the base. So a payload over a base may be one delta or several deltas in a
row, and a payload without a base begins with a raw record in every segment. Each record is cut into chunks, named by
their BLAKE3 hash. A file is sent whole, or taken from the base.

`Manifest.root` names the content: files, tensors and the digests of all segments. A renamed, missing, swapped or
altered tensor changes it, and the encoding does not. A manifest has exactly one JSON text (sorted keys, hashes in
base64); any other text is refused. The learner sends this `text` to the head. The head signs `to_wire()`, the
compressed text, and sends it to workers.

An adapter's manifest names its `base_model`, the frozen model that the tensors belong to. A base model is the only
snapshot of its own policy and is named by its content: its name can be computed from its bytes.

Successive payloads are joined into one without reading or decoding weights (`compose`): each record of a segment is
applied to the result of the record before it, so a chain of deltas equals one payload with all their records in order.
A raw record makes the records before it unnecessary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import msgspec
import zstandard
from blake3 import blake3

from echo2.core.errors import PeerError, UserError
from echo2.core.types import PayloadId, SnapshotRef, is_policy_id

FORMAT = 6
RAW = "raw"
DELTA = "delta"
HASH_BYTES = 32

MAX_MANIFEST_BYTES = 32 << 20  # half of the largest message
WIRE_LEVEL = 3
MAX_CHUNK_BYTES = 1 << 20  # as in transport: small enough to be re-requested, large enough to fill a link
MAX_CHUNKS = 1 << 20  # 1 TiB in all
MAX_SEGMENT_BYTES = 64 << 20  # applying a segment takes a few times its size in memory
MAX_SEGMENTS = 1 << 18
MAX_DELTAS = 24  # of one segment in one payload; a whole content is published before there are more
MAX_CONTENTS = 3  # a payload is at most this many times as large as its content
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
    """One tensor of the stream. `dtype` as in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Record:
    """`num_bytes` of encoded data in chunks of `chunk_bytes`, the last of which may be shorter. `hashes`: the BLAKE3
    hashes of the chunks, 32 bytes each, joined."""

    codec: str
    num_bytes: int
    chunk_bytes: int
    hashes: bytes

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """(hash, bytes) of each chunk, in order."""
        for place in range(len(self.hashes) // HASH_BYTES):
            size = min(self.chunk_bytes, self.num_bytes - place * self.chunk_bytes)
            yield self.hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES], size


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the snapshot: a plain name, no directories. `record`: None if the file is taken from the base.
    `digest`: BLAKE3 of its bytes."""

    name: str
    num_bytes: int
    digest: bytes
    record: Record | None


@dataclass(frozen=True, slots=True)
class Segment:
    """The next `num_bytes` of the tensor stream. `digest`: BLAKE3 of these bytes after all records are applied."""

    num_bytes: int
    digest: bytes
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of one payload. A constructed manifest is consistent in itself and within every limit.

    Raises:
        UserError: names the entry that is inconsistent or over a limit, and the value.
    """

    format: int
    ref: SnapshotRef
    base: SnapshotRef | None
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    segments: tuple[Segment, ...]
    base_model: SnapshotRef | None = None

    def __post_init__(self) -> None:
        _check_head(self)
        _check_files(self.files, self.base)
        _check_tensors(self.tensors)
        _check_segments(self)
        _check_base_model(self)
        limit = MAX_CONTENTS * self.content_bytes
        _require(self.total_bytes <= limit, f"{self.total_bytes} bytes lead to {self.content_bytes}; limit {limit}")
        _require(len(self.chunk_bytes) <= MAX_CHUNKS, f"{len(self.chunk_bytes)} chunks; the limit is {MAX_CHUNKS}")
        size = len(self.text)
        _require(size <= MAX_MANIFEST_BYTES, f"a manifest of {size} bytes; the limit is {MAX_MANIFEST_BYTES}")

    @property
    def payload(self) -> PayloadId:
        """The name of the payload: its snapshot and its base."""
        return PayloadId(self.ref, self.base)

    @property
    def content_bytes(self) -> int:
        """Bytes of all files and tensors of the snapshot, however they are sent."""
        return sum(entry.num_bytes for entry in self.files) + self.tensor_bytes

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors of the snapshot, however they are sent."""
        return sum(segment.num_bytes for segment in self.segments)

    @cached_property
    def chunk_bytes(self) -> Mapping[bytes, int]:
        """Bytes of each distinct chunk by its hash, in stream order."""
        return {hash_: size for record in self.records() for hash_, size in record.chunks()}

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Distinct chunk hashes, in stream order."""
        return tuple(self.chunk_bytes)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all records: what has to be sent."""
        return sum(record.num_bytes for record in self.records())

    @property
    def extents(self) -> tuple[int, ...]:
        """Bytes of each segment: how the tensor stream is cut."""
        return tuple(segment.num_bytes for segment in self.segments)

    @cached_property
    def root(self) -> bytes:
        """BLAKE3 over every file and tensor entry, the digest of every segment, and the base model. It is the same for
        every payload that leads to the same content, if the tensor stream is cut in the same way."""
        files = [(entry.name, entry.num_bytes, entry.digest) for entry in self.files]
        segments = [(segment.num_bytes, segment.digest) for segment in self.segments]
        content = [files, self.tensors, segments, self.base_model]
        return blake3(msgspec.json.encode(content, order="sorted")).digest()

    def records(self) -> Iterator[Record]:
        """Yield all records that are sent: the files', then the segments' in stream order."""
        yield from (entry.record for entry in self.files if entry.record is not None)
        for segment in self.segments:
            yield from segment.records

    @cached_property
    def text(self) -> bytes:
        """The canonical JSON text, encoded once. It is stored and sent in this form."""
        return msgspec.json.encode(self, order="sorted")

    def to_wire(self) -> bytes:
        """Return the compressed text: it goes to every worker, and consists mostly of names."""
        return zstandard.ZstdCompressor(level=WIRE_LEVEL).compress(self.text)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest that another process sent.

        Raises:
            PeerError: "malformed", for anything that is not the `text` of a valid manifest.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise PeerError("malformed", f"manifest of {len(data)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        try:
            manifest = msgspec.json.decode(data, type=cls)
            is_canonical = manifest.text == data
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


def widths_of(tensors: Iterable[TensorEntry], extents: Iterable[int]) -> Iterator[int]:
    """Yield the item width, in bytes, of each segment of a stream that is cut into `extents`.

    Raises:
        UserError: a segment is empty, holds items of different sizes or a part of an item, or the segments do not add
            up to the stream.
    """
    entries = iter(tensors)
    tensor_bytes, width = 0, 1
    for extent in extents:
        _require(0 < extent <= MAX_SEGMENT_BYTES, f"a segment of {extent} bytes, outside 1..{MAX_SEGMENT_BYTES}")
        begun = tensor_bytes > 0
        while extent:
            while not tensor_bytes:
                entry = next(entries, None)
                if entry is None:
                    raise UserError(f"Snapshot refused: segments go {extent} bytes beyond the tensors.")
                tensor_bytes = entry.num_bytes
                wide = item_bytes(entry.dtype)
                _require(
                    not tensor_bytes or not begun or wide == width,
                    f"a segment goes on into {entry.name!r} of other items",
                )
                width = wide if tensor_bytes else width
            begun = True
            shared = min(tensor_bytes, extent)
            _require(shared % width == 0, "a segment ends within an item")
            tensor_bytes, extent = tensor_bytes - shared, extent - shared
        yield width
    _require(not tensor_bytes and not any(entry.num_bytes for entry in entries), "segments end before the tensors do")


def name_base_model(
    tensors: Sequence[TensorEntry], segments: Iterable[tuple[int, bytes]], config_digest: bytes
) -> SnapshotRef:
    """Return the name of a base model. Any other byte in a tensor or in config.json gives another name.

    segments       (bytes, BLAKE3 digest) of each segment of the tensor stream, as `segments.cut_stream` cuts it
    config_digest  BLAKE3 of config.json
    """
    content = msgspec.json.encode([config_digest, tensors, list(segments)], order="sorted")
    return SnapshotRef(f"base-{blake3(content).hexdigest()[:16]}", 0, 0)


def _require(is_true: bool, complaint: str) -> None:
    if not is_true:
        raise UserError(f"Snapshot refused: {complaint}.")


def _check_head(manifest: Manifest) -> None:
    _require(manifest.format == FORMAT, f"format {manifest.format}; this echo2 knows {FORMAT}")
    _require(manifest.base != manifest.ref, f"a delta of {manifest.ref} over itself")
    base = manifest.base or manifest.ref
    _require(base.policy == manifest.ref.policy, f"a delta of {manifest.ref} over another policy's {base}")
    _require(is_policy_id(base.policy), f"{base.policy[:80]!r} is not a policy id")
    for ref in (manifest.ref, base):
        for name, value in (("lineage", ref.lineage), ("version", ref.version)):
            _require(0 <= value <= MAX_NUMBER, f"{name} {value} is outside 0..{MAX_NUMBER}")
    limits = {"files": MAX_FILES, "tensors": MAX_TENSORS, "segments": MAX_SEGMENTS}
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


def _check_digest(digest: bytes) -> None:
    _require(len(digest) == HASH_BYTES, f"a digest of {len(digest)} bytes, not {HASH_BYTES}")


def _check_files(files: tuple[FileEntry, ...], base: SnapshotRef | None) -> None:
    for entry in files:
        _check_name(entry.name)
        # Names become paths on the worker: nothing that could leave its directory or hide in it.
        is_plain = not entry.name.startswith(".") and not set(entry.name) & set("/\\:")
        _require(is_plain, f"file name {entry.name!r}; a plain name without directories is needed")
        _require(entry.num_bytes >= 0, f"file {entry.name!r} has {entry.num_bytes} bytes")
        _check_digest(entry.digest)
        if entry.record is None:
            _require(base is not None, f"file {entry.name!r} refers to a base; there is none")
        else:
            _check_record(entry.record, entry.num_bytes)
            _require(entry.record.codec == RAW, f"file {entry.name!r} is encoded as {entry.record.codec[:32]!r}")
    total = sum(entry.num_bytes for entry in files)
    _require(total <= MAX_FILE_BYTES, f"files of {total} bytes together; the limit is {MAX_FILE_BYTES}")
    _check_ascending((0, entry.name) for entry in files)


def _check_tensors(tensors: tuple[TensorEntry, ...]) -> None:
    for entry in tensors:
        _check_name(entry.name)
        dims_fit = len(entry.shape) <= MAX_DIMS and all(0 <= size <= MAX_NUMBER for size in entry.shape)
        _require(dims_fit, f"tensor {entry.name!r} has a shape outside {MAX_DIMS} dimensions of 0..{MAX_NUMBER}")
    _check_ascending(stream_order(entry.name, entry.dtype) for entry in tensors)


def _check_segments(manifest: Manifest) -> None:
    for _ in widths_of(manifest.tensors, manifest.extents):
        pass
    for segment in manifest.segments:
        _check_digest(segment.digest)
        for place, record in enumerate(segment.records):
            _check_record(record, segment.num_bytes)
            _require(record.codec == DELTA or place == 0, "a raw record after another one")
        is_raw = bool(segment.records) and segment.records[0].codec == RAW
        _require(is_raw or manifest.base is not None, "a segment that has no raw record, over no base")
        count = len(segment.records) - is_raw
        _require(count <= MAX_DELTAS, f"{count} deltas of one segment; the limit is {MAX_DELTAS}")


def _check_base_model(manifest: Manifest) -> None:
    base_model = manifest.base_model
    _require(base_model is None or base_model.is_base_model, f"an adapter of {base_model}, which is not a base model")
    if not manifest.ref.policy.startswith("base-"):
        return
    _require(base_model is None, f"{manifest.ref} is a base model and an adapter")
    digest = next((entry.digest for entry in manifest.files if entry.name == "config.json"), b"")
    segments = ((segment.num_bytes, segment.digest) for segment in manifest.segments)
    name = name_base_model(manifest.tensors, segments, digest)
    _require(manifest.ref == name, f"{manifest.ref} is the name of another base model; this one's is {name}")


def _check_record(record: Record, decoded_bytes: int) -> None:
    _require(record.codec in (RAW, DELTA), f"codec {record.codec[:32]!r}; this echo2 knows {RAW!r} and {DELTA!r}")
    is_sized = record.num_bytes == decoded_bytes if record.codec == RAW else 0 < record.num_bytes <= decoded_bytes
    _require(is_sized, f"a {record.codec} record of {record.num_bytes} bytes for {decoded_bytes}")
    is_cut = 0 < record.chunk_bytes <= MAX_CHUNK_BYTES
    _require(is_cut, f"chunks of {record.chunk_bytes} bytes, outside 1..{MAX_CHUNK_BYTES}")
    hashes_bytes = HASH_BYTES * -(-record.num_bytes // record.chunk_bytes)
    _require(
        len(record.hashes) == hashes_bytes, f"chunk hashes of {len(record.hashes)} bytes together, not {hashes_bytes}"
    )


def compose(steps: Sequence[Manifest]) -> Manifest:
    """Join successive payloads, each over the one before it, into one. A single payload is returned as it is.

    Raises:
        PeerError: "base", they do not fit together, or are too many or too large for one payload.
    """
    if len(steps) == 1:
        return steps[0]
    for first, second in pairwise(steps):
        if second.base != first.ref:
            raise PeerError("base", f"payload {second.payload} is not over {first.ref}")
        if (first.tensors, first.extents) != (second.tensors, second.extents):
            raise PeerError("base", f"{second.payload} has other tensors than {first.payload}, or cuts them otherwise")
        if first.base_model != second.base_model:
            raise PeerError("base", f"{second.payload} is an adapter of another base model than {first.payload}")
    segments = zip(*(step.segments for step in steps), strict=True)
    try:
        return replace(
            steps[-1],
            base=steps[0].base,
            files=tuple(_sent_file(entry, steps) for entry in steps[-1].files),
            segments=tuple(_joined(parts) for parts in segments),
        )
    except UserError as error:
        raise PeerError("base", f"{steps[-1].payload} after {len(steps) - 1} others: {error}") from error


def is_anchor_due(steps: Sequence[Manifest]) -> bool:
    """Whether the next payload without a base should be raw throughout. `steps` lead from nothing to the newest
    snapshot. A raw payload is due once they reach the number of deltas that one payload may have, or once their deltas
    are as large as the content."""
    try:
        whole = compose(steps)
    except PeerError:  # they do not fit into one payload
        return True
    num_deltas = max((sum(one.codec != RAW for one in segment.records) for segment in whole.segments), default=0)
    is_large = num_deltas > 0 and whole.total_bytes >= 2 * whole.content_bytes
    return is_large or max(num_deltas, len(steps) - 1) >= MAX_DELTAS


def _sent_file(entry: FileEntry, steps: Sequence[Manifest]) -> FileEntry:
    """Return the entry of the newest step that sends this file, or the first step's if the file is from its base."""
    for step in reversed(steps):
        sent = next((one for one in step.files if one.name == entry.name and one.digest == entry.digest), None)
        if sent is None:
            break
        if sent.record is not None or step is steps[0]:
            return sent
    raise PeerError("base", f"{steps[0].payload} does not lead to the file {entry.name!r}")


def _joined(parts: Sequence[Segment]) -> Segment:
    """Join the records of one segment over all payloads. Records before a raw record are dropped."""
    records: list[Record] = []
    for part in parts:
        starts_anew = bool(part.records) and part.records[0].codec == RAW
        records = [*(() if starts_anew else records), *part.records]
    return replace(parts[-1], records=tuple(records))
