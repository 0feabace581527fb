"""Weights: a policy as content-addressed bytes. `snapshot` names them, `codec` makes and reads whole ones, `delta` what
changed between two, `store` keeps them."""

from echo2.weights.codec import chunk_bytes_for, content_digest, cut, decode, encode
from echo2.weights.delta import apply_delta, encode_delta
from echo2.weights.snapshot import ChunkEntry, FileEntry, Manifest, TensorEntry
from echo2.weights.store import ChunkStore

__all__ = [
    "ChunkEntry",
    "ChunkStore",
    "FileEntry",
    "Manifest",
    "TensorEntry",
    "apply_delta",
    "chunk_bytes_for",
    "content_digest",
    "cut",
    "decode",
    "encode",
    "encode_delta",
]
