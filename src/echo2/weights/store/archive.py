"""The snapshots at the head: stores payloads, chooses the payload that a worker gets, and deletes old ones.

The learner sends whole contents (anchors) and deltas over the version that it published before; they are stored
unchanged. A worker gets one payload: the deltas from its version to the newest, joined, or an anchor and the deltas
since. Joining payloads copies lists of hashes, and merging adds deltas without their base, so the head never holds
weights.

An adapter is published after its base model, which is kept until the end of the run; the planner does not know it.

Every snapshot that the planner retains can be served to a worker without any base. The newest deltas of the dropped
ones stay as *history*, so that a worker that was away for some versions gets deltas.

One thread stores and deletes, one operation at a time, so that no chunk is deleted before its payload is listed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from echo2.core.errors import PeerError, UserError
from echo2.core.loop_thread import BlockingThreads
from echo2.core.types import PayloadId, SnapshotRef
from echo2.weights.format.manifest import MAX_CHUNKS, MAX_DELTAS, Manifest, Segment, compose, widths_of
from echo2.weights.format.segments import merge_deltas
from echo2.weights.store.content import read_files
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)

#: Maximum number of chunks per offer; the learner splits larger payloads into several offers.
OFFER_CHUNKS_MAX = 4096
#: Number of joined payloads remembered: one for new workers, and one each for workers a few versions behind.
JOINED_MAX = 8
#: Maximum number of merged payloads; they are remembered until their version is dropped.
MERGED_MAX = 8
#: Time limit for merging one payload. Segments not reached by then keep their deltas in sequence.
MERGING_SECONDS = 5.0
#: Maximum number of base models of one run; each is as large as a model.
BASE_MODELS_MAX = 4


class Archive:
    """The stored snapshots. Call all methods on the event loop.

    `on_dropped` is called with payloads that are no longer served, `on_stored` with the learner's chunks (hash, bytes).
    """

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        self.on_dropped: Callable[[PayloadId], None] = lambda payload: None
        self.on_stored: Callable[[bytes, bytes], None] = lambda hash_, data: None
        self._thread = BlockingThreads(1, "archive")
        self._retained: set[SnapshotRef] = reachable(store.manifests())
        self._offered: set[bytes] = set()
        self._joined: dict[PayloadId, Manifest] = {}
        self._merged: dict[PayloadId, set[bytes]] = {}  # merged payload -> the chunks made by merging
        self._merging = asyncio.Lock()
        self._forgotten: set[PayloadId] = set()  # evicted from `_joined`; workers may still be fetching them

    async def close(self) -> None:
        """Wait for the operation that the thread is at."""
        await self._thread.close()

    # ---- from the learner ----------------------------------------------------------------------------------------

    def offer(self, hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """Accept an offer of chunks. Return the hashes of those that are not stored, for the learner to send.

        Raises:
            PeerError: "oversized": too many chunks in this offer, or in this payload.
        """
        named = tuple(dict.fromkeys(hashes))
        if len(named) > OFFER_CHUNKS_MAX or len(self._offered) + len(named) > MAX_CHUNKS:
            raise PeerError("oversized", f"{len(named)} chunks offered after {len(self._offered)} of the same payload")
        self._offered.update(named)
        return tuple(name for name in named if not self.store.has(name))

    async def put(self, hash_: bytes, data: bytes) -> None:
        """Store a chunk that was offered.

        Raises:
            PeerError: "malformed": the chunk was not offered; "corrupt": it does not have this hash.
        """
        if hash_ not in self._offered:
            raise PeerError("malformed", "a chunk that was not offered")
        await self._thread.run(self.store.put, hash_, data)
        self.on_stored(hash_, data)

    async def take(self, manifest: Manifest) -> None:
        """List a payload whose chunks have all been sent.

        Raises:
            PeerError: "base": its base is not stored here, so the whole content is needed; "missing": some chunks were
                never sent, or were deleted before they were offered; "base_model": it is an adapter over a base model
                that is not stored here; "oversized": it is one base model too many.
        """
        base_models = {ref for ref in self._retained if ref.is_base_model}
        if manifest.base_model is not None and manifest.base_model not in base_models:
            raise PeerError("base_model", f"{manifest.ref} is an adapter over {manifest.base_model}, which is not here")
        if manifest.ref.is_base_model and len(base_models | {manifest.ref}) > BASE_MODELS_MAX:
            raise PeerError("oversized", f"more than {BASE_MODELS_MAX} base models in one run")
        was_retained = manifest.ref in self._retained
        self._retained.add(manifest.ref)  # before listing: protects the payload from deletion
        try:
            await self._thread.run(self._list, manifest)
        except BaseException:  # including the cancellation when the caller's connection closes
            if not was_retained:
                self._retained.discard(manifest.ref)
            raise
        self._retained.add(manifest.ref)  # again: an earlier, cancelled call for it may have discarded it meanwhile
        self._offered.clear()

    def _list(self, manifest: Manifest) -> None:
        """Check and list a payload, on the thread, so that no chunk is deleted between the check and the listing."""
        if manifest.base is not None:
            compose([*self._steps(PayloadId(manifest.base)), manifest])
        absent = self.store.missing(manifest)
        if absent:
            raise PeerError("missing", f"{len(absent)} chunks of {manifest.payload} are not here")
        self.store.put_manifest(manifest)

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def retained(self) -> list[SnapshotRef]:
        """The snapshots that can be served, oldest first. At the start: all that are completely stored."""
        return sorted(self._retained)

    def find(self, name: SnapshotRef) -> SnapshotRef | None:
        """Return the retained snapshot of this name, or None. Lineage 0 means the newest lineage with this version."""
        versions = [ref for ref in self._retained if (ref.policy, ref.version) == (name.policy, name.version)]
        return max((ref for ref in versions if name.lineage in (0, ref.lineage)), default=None)

    def payload(self, ref: SnapshotRef, base: SnapshotRef | None) -> Manifest:
        """Return the payload of `ref` for a worker that has `base`: a delta, unless the whole content is no larger.

        Raises:
            PeerError: "unknown_snapshot": there is no such snapshot (any more).
        """
        if ref not in self._retained:
            raise PeerError("unknown_snapshot", f"no snapshot {ref} is stored")
        if base is not None and base != ref:
            with suppress(PeerError):  # the base is of another history, or too old
                delta = self._join(PayloadId(ref, base))
                if delta.total_bytes < delta.content_bytes:  # the minimum size of a payload without a base
                    return delta
        try:
            return self._join(PayloadId(ref))
        except PeerError as error:  # damaged on disk
            raise PeerError("unknown_snapshot", f"snapshot {ref} can't be served: {error}") from error

    def is_joined(self, payload: PayloadId) -> bool:
        """Whether this payload is remembered, so that serving it is cheap."""
        return payload in self._joined

    def is_chain(self, payload: PayloadId) -> bool:
        """Whether this payload would be a sequence of deltas, which `merge` may make smaller."""
        steps = None if payload in self._joined else self.store.chain(payload.ref, payload.base)
        return payload.base is not None and steps is not None and len(steps) > 1

    async def merge(self, payload: PayloadId, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Merge the deltas of a payload, segment by segment, before it is served. This does not need the weights. Where
        it is impossible (see `merge_deltas`) or takes too long, the deltas stay in sequence. `is_wanted` is called
        after earlier merges are done."""
        loop = asyncio.get_running_loop()
        async with self._merging:
            if payload.ref not in self._retained or not is_wanted():
                return
            if not self.is_chain(payload) or len(self._merged) >= MERGED_MAX:
                return
            until, made = loop.time() + MERGING_SECONDS, self._merged.setdefault(payload, set())
            merged = None
            try:
                joined = compose(self._steps(payload))
                segments = list(joined.segments)
                for at, width in enumerate(widths_of(joined.tensors, joined.extents)):
                    # Stop once the payload is dropped, so that no chunk is stored after the others were deleted.
                    if loop.time() < until and self._merged.get(payload) is made:
                        segments[at] = await self._thread.run(self._merge, segments[at], width, len(segments), made)
                if self._merged.get(payload) is made:
                    merged = replace(joined, segments=tuple(segments))
                    self._joined.setdefault(payload, merged)
            except (PeerError, UserError) as error:  # a damaged or missing chunk, an invalid record, or a full disk
                log.warning("the deltas of %s are not added up: %s", payload, error)
            finally:  # also if the caller was cancelled, or the payload was joined unmerged meanwhile
                if merged is None or self._joined.get(payload) is not merged:
                    self._merged.pop(payload, None)

    def _merge(self, segment: Segment, width: int, num_segments: int, made: set[bytes]) -> Segment:
        """Merge one segment, on the thread: its chunks are in `made` before any deletion can run."""
        merged, chunks = merge_deltas(segment, width, self.store.get, num_segments)
        made.update(chunks)
        self.store.put_checked(list(chunks.items()))
        return merged

    def base_model(self, ref: SnapshotRef) -> SnapshotRef | None:
        """Return the base model of this snapshot; None if it is a whole model, or not stored."""
        steps = self.store.chain(ref)
        return steps[-1].base_model if steps else None

    def files(self, ref: SnapshotRef) -> dict[str, bytes]:
        """Return the files of a snapshot (not its tensors), and those of its base model.

        Raises:
            PeerError: "base": the snapshot is not stored here; "corrupt": a chunk is damaged on disk.
        """
        manifest = compose(self._steps(PayloadId(ref)))
        below = {} if manifest.base_model is None else self.files(manifest.base_model)
        return below | read_files(manifest, self.store.get)

    def _steps(self, payload: PayloadId) -> list[Manifest]:
        steps = self.store.chain(payload.ref, payload.base)
        if steps is None:
            raise PeerError("base", f"nothing here leads to {payload}")
        return steps

    def _join(self, payload: PayloadId) -> Manifest:
        """Return the joined payload. It is the same manifest while it is remembered, so that workers which fetch it can
        exchange chunks.

        Raises:
            PeerError: "base": the stored payloads do not lead to it.
        """
        joined = self._joined.get(payload)
        if joined is not None and not self.store.missing(joined):
            return joined
        joined = compose(self._steps(payload))
        plain = [other for other in self._joined if other not in self._merged]
        for oldest in plain[: max(0, len(plain) - JOINED_MAX + 1)]:
            del self._joined[oldest]
            self._forgotten.add(oldest)
        self._joined[payload] = joined
        self._forgotten.discard(payload)
        return joined

    # ---- deleting ------------------------------------------------------------------------------------------------

    async def drop(self, ref: SnapshotRef) -> None:
        """Stop serving a snapshot that the planner no longer retains."""
        self._retained.discard(ref)
        for payload in [payload for payload in (*self._joined, *self._forgotten) if payload.ref == ref]:
            self._joined.pop(payload, None)
            self._forgotten.discard(payload)
            self.on_dropped(payload)
        for payload in [payload for payload in self._merged if payload.ref == ref]:
            del self._merged[payload]  # also stops a merge under way
        await self.tidy()

    async def tidy(self) -> None:
        """Delete payloads and chunks that no worker will request."""
        joined = tuple(self._joined.values())
        gone = await self._thread.run(self._tidy, frozenset(self._retained), joined, frozenset(self._offered))
        for payload in gone:
            self.on_dropped(payload)

    def _tidy(
        self, retained: Collection[SnapshotRef], joined: Collection[Manifest], offered: Collection[bytes]
    ) -> list[PayloadId]:
        """Delete on the thread. Return the payloads that are no longer listed."""
        before = {manifest.payload for manifest in self.store.manifests()}
        manifests = worth_keeping(self.store, retained)
        merged = [hash_ for hashes in list(self._merged.values()) for hash_ in hashes]
        self.store.retain([*manifests.values(), *joined], [*offered, *merged])
        return sorted(before - manifests.keys(), key=lambda payload: payload.ref)


def reachable(listed: Collection[Manifest]) -> set[SnapshotRef]:
    """Return the snapshots that these payloads lead to without a base."""
    refs = {manifest.ref for manifest in listed if manifest.base is None}
    size = -1
    while size != len(refs):
        size = len(refs)
        refs |= {manifest.ref for manifest in listed if manifest.base in refs}
    return refs


def worth_keeping(store: ChunkStore, retained: Collection[SnapshotRef]) -> dict[PayloadId, Manifest]:
    """Return the payloads that lead to the retained snapshots, and for each policy the deltas up to its newest one: at
    most `MAX_DELTAS`, and together no larger than the content.
    """
    manifests: dict[PayloadId, Manifest] = {}
    for ref in retained:
        manifests.update({step.payload: step for step in store.chain(ref) or ()})
    deltas = {manifest.ref: manifest for manifest in store.manifests() if manifest.base is not None}
    for newest in {ref.policy: ref for ref in sorted(retained)}.values():
        total_bytes, step = 0, deltas.get(newest)
        for _ in range(MAX_DELTAS):
            if step is None or total_bytes + step.total_bytes > step.content_bytes:
                break
            total_bytes += step.total_bytes
            manifests[step.payload] = step
            step = None if step.base is None else deltas.get(step.base)
    return manifests
