"""A worker's content and the payloads that lead to it, which serve other workers and restore the content after a crash.

Nothing here runs in the background or waits: the caller fetches, and decides when to apply, list and delete.
"""

from __future__ import annotations

import logging

from echo2.errors import PeerError
from echo2.types import PayloadId, Snapshot, SnapshotRef
from echo2.weights.chain import compose, is_anchor_due
from echo2.weights.content import Content
from echo2.weights.encoder import Encoder
from echo2.weights.manifest import Manifest
from echo2.weights.segments import gather
from echo2.weights.store import ChunkStore

log = logging.getLogger(__name__)


class KeptContent(Content):
    """The content of one worker, with the store of its payloads and of the base models of adapters."""

    def __init__(self, store: ChunkStore) -> None:
        super().__init__(store.directory / "content")
        self._store = store

    def base(self, ref: SnapshotRef) -> Snapshot:
        """Return a base model, made from its stored chunks.

        Raises:
            PeerError: the store does not have all of it, or the disk altered it.
            UserError: the disk is full.
        """
        manifest = self._store.manifest(PayloadId(ref))
        if manifest is None:
            raise PeerError("missing", f"base model {ref} is not whole here")
        base = Content(self._store.directory / "base")
        base.apply(manifest, self._store.get)
        return base.snapshot()

    def take_base(self, manifest: Manifest, own: Snapshot) -> None:
        """Store the chunks of a base model, taken from the tensors of `own`, a copy on this machine.

        Raises:
            UserError: the disk is full.
        """
        for segment, data in zip(manifest.segments, gather(own.tensors, manifest.extents), strict=True):
            start = 0
            for hash_, num_bytes in segment.records[0].chunks():
                if not self._store.has(hash_):
                    self._store.put(hash_, data[start : start + num_bytes].data)
                start += num_bytes

    def restore(self) -> None:
        """Restore the newest content that the store's payloads lead to. If it is damaged, its payloads are forgotten.

        Raises:
            UserError: the disk is full.
        """
        refs = (manifest.ref for manifest in self._store.manifests())
        newest = max((ref for ref in refs if not ref.is_base_model), default=None)
        if newest is None:
            return
        try:
            steps = self._store.chain(newest)
            if steps is None:
                raise PeerError("missing", "nothing leads to it")
            self.apply(compose(steps), self._store.get)
        except PeerError as error:
            log.warning("the stored snapshot %s is not used: %s", newest, error)
            self._store.drop_snapshot(newest)

    def take(self, manifest: Manifest) -> None:
        """Apply a payload whose chunks are stored; see `Content.apply`."""
        if self.ref != manifest.ref:  # else an engine refused it, and it is tried again
            self.apply(manifest, self._store.get)

    def keep(self, manifest: Manifest) -> list[Manifest] | None:
        """List the payload of the current content. Returns the payloads that are still needed, which are the chain that
        leads to the content, and base models. All others may be deleted.

        If the chain has become long, the whole content is stored too, in the same chunks as the learner makes. Returns
        None then, and nothing may be deleted: peers may still need the newest delta.

        Raises:
            UserError: the disk is full.
        """
        if self.ref != manifest.ref or self._store.missing(manifest):
            return None
        self._store.put_manifest(manifest)
        steps = self._store.chain(manifest.ref)
        if steps is not None and not is_anchor_due(steps):
            return [*steps, *(one for one in self._store.manifests() if one.ref.is_base_model)]
        encoder = Encoder(self.snapshot(), extents=manifest.extents)
        for chunks in encoder.parts():
            for hash_, chunk in chunks.items():
                self._store.put(hash_, chunk)
        self._store.put_manifest(encoder.manifest())
        return None
