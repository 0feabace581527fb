"""The snapshots at the head: what is stored of each, which payload a worker gets, and what is deleted.

The learner sends whole contents (anchors) and deltas over the version that it published before. They are stored as they
come. A worker is given one payload: the deltas that lead from what it has to the newest version, joined, or an anchor
and the deltas since. To join payloads is to copy lists of hashes, and steps are added up without what they are
added to; the head never holds a weight.

An adapter comes after its base model, which stays as long as the run: the planner knows nothing of it.

What the planner retains can be had from nothing. What it drops stays as *history*: the newest deltas, so that a worker
that was away for some versions is sent what changed.

One thread stores and deletes, one piece at a time, so that nothing is deleted before it is listed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from echo2.errors import PeerError, UserError
from echo2.types import PayloadId, SnapshotRef
from echo2.weights.chain import compose
from echo2.weights.content import read_files
from echo2.weights.manifest import MAX_CHUNKS, MAX_DELTAS, Manifest, Segment, widths_of
from echo2.weights.segments import merge_deltas
from echo2.weights.store import ChunkStore

log = logging.getLogger(__name__)

#: Chunks that one offer may name; the learner makes more offers for more.
OFFER_CHUNKS_MAX = 4096
#: Joined payloads that are remembered: one each for a newcomer and for the laggards of a few versions.
JOINED_MAX = 8
#: Payloads whose deltas are added up; they are remembered until their version is dropped.
MERGED_MAX = 8
#: Seconds that adding up one payload may take. Segments that are not reached keep their deltas in a row.
MERGING_SECONDS = 5.0
#: Base models of one run; each is as large as a model.
BASE_MODELS_MAX = 4

T = TypeVar("T")


class Archive:
    """All methods are for the event loop; `on_dropped` is told of payloads that are handed out no more."""

    def __init__(self, store: ChunkStore, on_dropped: Callable[[PayloadId], None] = lambda payload: None) -> None:
        self.store = store
        self.on_dropped = on_dropped
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._retained: set[SnapshotRef] = reachable(store.manifests())
        self._offered: set[bytes] = set()
        self._joined: dict[PayloadId, Manifest] = {}
        self._merged: dict[PayloadId, set[bytes]] = {}  # of which deltas were added up: the chunks of the sums
        self._merging = asyncio.Lock()
        self._forgotten: set[PayloadId] = set()  # joined before, of retained contents: workers may be fetching them

    async def _beside(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- from the learner ----------------------------------------------------------------------------------------

    def offer(self, hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """The hashes among these chunks that are missing here, before they are sent.

        Raises:
            PeerError: "oversized", more at once, or more of one payload, than may be.
        """
        named = tuple(dict.fromkeys(hashes))
        if len(named) > OFFER_CHUNKS_MAX or len(self._offered) + len(named) > MAX_CHUNKS:
            raise PeerError("oversized", f"{len(named)} chunks offered after {len(self._offered)} of the same payload")
        self._offered.update(named)
        return tuple(name for name in named if not self.store.has(name))

    async def put(self, hash_: bytes, data: bytes) -> None:
        """Store a chunk that was offered.

        Raises:
            PeerError: "malformed", it was not; "corrupt", it does not have this hash.
        """
        if hash_ not in self._offered:
            raise PeerError("malformed", "a chunk that was not offered")
        await self._beside(self.store.put, hash_, data)

    async def take(self, manifest: Manifest) -> None:
        """All chunks of this payload were sent: list it.

        Raises:
            PeerError: "base", it is over what can't be had here, so the whole content is needed; "missing", some chunks
                never came, or were thrown away before they were offered; "base_model", it is an adapter over one that
                is not here; "oversized", it is one base model too many.
        """
        base_models = {ref for ref in self._retained if ref.is_base_model}
        if manifest.base_model is not None and manifest.base_model not in base_models:
            raise PeerError("base_model", f"{manifest.ref} is an adapter over {manifest.base_model}, which is not here")
        if manifest.ref.is_base_model and len(base_models | {manifest.ref}) > BASE_MODELS_MAX:
            raise PeerError("oversized", f"more than {BASE_MODELS_MAX} base models in one run")
        was_retained = manifest.ref in self._retained
        self._retained.add(manifest.ref)  # first: what is thrown away from now on is not this
        try:
            await self._beside(self._list, manifest)
        except BaseException:  # its caller's connection may have closed, too
            if not was_retained:
                self._retained.discard(manifest.ref)
            raise
        self._retained.add(manifest.ref)  # again: an earlier call for it may have been cancelled meanwhile
        self._offered.clear()

    def _list(self, manifest: Manifest) -> None:
        """In the thread, so that nothing is being thrown away between the look and the listing."""
        if manifest.base is not None:
            compose([*self._steps(PayloadId(manifest.base)), manifest])
        absent = self.store.missing(manifest)
        if absent:
            raise PeerError("missing", f"{len(absent)} chunks of {manifest.payload} are not here")
        self.store.put_manifest(manifest)

    # ---- what is here --------------------------------------------------------------------------------------------

    @property
    def retained(self) -> list[SnapshotRef]:
        """The snapshots that can be served, oldest first. At the start: all that are stored and complete."""
        return sorted(self._retained)

    def find(self, asked: SnapshotRef) -> SnapshotRef | None:
        """The retained snapshot with this name; lineage 0 means the newest lineage that has the version."""
        versions = [ref for ref in self._retained if (ref.policy, ref.version) == (asked.policy, asked.version)]
        return max((ref for ref in versions if asked.lineage in (0, ref.lineage)), default=None)

    def payload(self, ref: SnapshotRef, base: SnapshotRef | None) -> Manifest:
        """The payload of `ref` for a worker that has `base`: a delta over it, unless the whole content is no larger.

        Raises:
            PeerError: "unknown_snapshot", there is no such snapshot (any more).
        """
        if ref not in self._retained:
            raise PeerError("unknown_snapshot", f"no snapshot {ref} is stored")
        if base is not None and base != ref:
            with suppress(PeerError):  # it is of another history, or too old
                delta = self._join(PayloadId(ref, base))
                if delta.total_bytes < delta.content_bytes:  # which a payload without a base sends at least
                    return delta
        try:
            return self._join(PayloadId(ref))
        except PeerError as error:  # damaged on disk
            raise PeerError("unknown_snapshot", f"snapshot {ref} can't be had: {error}") from error

    def is_joined(self, payload: PayloadId) -> bool:
        """Whether this payload is remembered, so that serving it costs next to nothing."""
        return payload in self._joined

    def is_chain(self, payload: PayloadId) -> bool:
        """Whether this payload would be several deltas in a row, which `merge` may make smaller."""
        steps = None if payload in self._joined else self.store.chain(payload.ref, payload.base)
        return payload.base is not None and steps is not None and len(steps) > 1

    async def merge(self, payload: PayloadId, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Add up the deltas of a payload, segment by segment, before it is handed out. Nothing of the weights is needed
        for that. Where it cannot be done (see `merge_deltas`) or takes too long, deltas stay in a row. `is_wanted` is
        asked when those that were requested before are done."""
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
                    # Once it is dropped, nothing more is made: what is thrown away then is all that was.
                    if loop.time() < until and self._merged.get(payload) is made:
                        segments[at] = await self._beside(self._merge, segments[at], width, len(segments), made)
                if self._merged.get(payload) is made:
                    merged = replace(joined, segments=tuple(segments))
                    self._joined.setdefault(payload, merged)
            except (PeerError, UserError) as error:  # a chunk is altered or missing, a record is none, the disk is full
                log.warning("the deltas of %s are not added up: %s", payload, error)
            finally:  # also where the caller was cancelled, or others have it already with its deltas in a row
                if merged is None or self._joined.get(payload) is not merged:
                    self._merged.pop(payload, None)

    def _merge(self, segment: Segment, width: int, num_segments: int, made: set[bytes]) -> Segment:
        """In the thread: what it stores is among `made` before anything is thrown away."""
        merged, chunks = merge_deltas(segment, width, self.store.get, num_segments)
        made.update(chunks)
        self.store.put_checked(list(chunks.items()))
        return merged

    def base_model(self, ref: SnapshotRef) -> SnapshotRef | None:
        """The base model of this snapshot; None if it is a whole model, or is not here."""
        steps = self.store.chain(ref)
        return steps[-1].base_model if steps else None

    def files(self, ref: SnapshotRef) -> dict[str, bytes]:
        """The files of a snapshot, without its tensors; with those of its base model.

        Raises:
            PeerError: "base", it can't be had here; "corrupt", the disk altered a chunk.
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
        """One and the same for as long as it is remembered: workers that fetch it take chunks from each other.

        Raises:
            PeerError: "base", nothing here leads to it.
        """
        joined = self._joined.get(payload)
        if joined is not None and not self.store.missing(joined):
            return joined
        joined = compose(self._steps(payload))
        plain = [known for known in self._joined if known not in self._merged]
        for oldest in plain[: max(0, len(plain) - JOINED_MAX + 1)]:
            del self._joined[oldest]
            self._forgotten.add(oldest)
        self._joined[payload] = joined
        self._forgotten.discard(payload)
        return joined

    # ---- throwing away -------------------------------------------------------------------------------------------

    async def drop(self, ref: SnapshotRef) -> None:
        """The planner no longer retains this snapshot."""
        self._retained.discard(ref)
        for payload in [payload for payload in (*self._joined, *self._forgotten) if payload.ref == ref]:
            self._joined.pop(payload, None)
            self._forgotten.discard(payload)
            self.on_dropped(payload)
        for payload in [payload for payload in self._merged if payload.ref == ref]:
            del self._merged[payload]  # also where they are being added up
        await self.tidy()

    async def tidy(self) -> None:
        """Delete what nobody will request."""
        joined = tuple(self._joined.values())
        gone = await self._beside(self._tidy, frozenset(self._retained), joined, frozenset(self._offered))
        for payload in gone:
            self.on_dropped(payload)

    def _tidy(
        self, retained: Collection[SnapshotRef], joined: Collection[Manifest], offered: Collection[bytes]
    ) -> list[PayloadId]:
        """In the thread. Returns what is listed no more."""
        before = {manifest.payload for manifest in self.store.manifests()}
        kept = worth_keeping(self.store, retained)
        merged = [hash_ for hashes in list(self._merged.values()) for hash_ in hashes]
        self.store.retain([*kept.values(), *joined], [*offered, *merged])
        return sorted(before - kept.keys(), key=lambda payload: payload.ref)


def reachable(listed: Collection[Manifest]) -> set[SnapshotRef]:
    """The contents that can be made from these payloads without a base."""
    found = {manifest.ref for manifest in listed if manifest.base is None}
    size = -1
    while size != len(found):
        size = len(found)
        found |= {manifest.ref for manifest in listed if manifest.base in found}
    return found


def worth_keeping(store: ChunkStore, retained: Collection[SnapshotRef]) -> dict[PayloadId, Manifest]:
    """The payloads that lead to the retained contents, and for each policy the deltas before the newest of them: as
    many as fit one payload, together no larger than the content.
    """
    kept: dict[PayloadId, Manifest] = {}
    for ref in retained:
        kept.update({step.payload: step for step in store.chain(ref) or ()})
    deltas = {manifest.ref: manifest for manifest in store.manifests() if manifest.base is not None}
    for newest in {ref.policy: ref for ref in sorted(retained)}.values():
        total_bytes, step = 0, deltas.get(newest)
        for _ in range(MAX_DELTAS):
            if step is None or total_bytes + step.total_bytes > step.content_bytes:
                break
            total_bytes += step.total_bytes
            kept[step.payload] = step
            step = None if step.base is None else deltas.get(step.base)
    return kept
