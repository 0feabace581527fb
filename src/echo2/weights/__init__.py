"""Weights: a policy as content-addressed bytes: `snapshot` names them, `codec` makes and reads them, `store` keeps."""

from echo2.weights.codec import CHUNK_BYTES, content_digest, decode, encode
from echo2.weights.snapshot import ChunkEntry, FileEntry, Manifest, TensorEntry
from echo2.weights.store import ChunkStore

__all__ = [
    "CHUNK_BYTES",
    "ChunkEntry",
    "ChunkStore",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "content_digest",
    "decode",
    "encode",
]
