"""The head's snapshots: what is stored of each, what is made of them for whom, and what is thrown away.

    whole        the learner sent it, or it was rebuilt here from a delta that the learner sent (digest checked)
    delta        over the version published before, as the learner sent it
    re-diff      a delta between any two retained versions, made here for workers that were away; the newest few

What the planner retains is stored whole. What it drops stays as *history*: the deltas that lead from an older whole
content (an anchor) to the present, so that a worker which was away for many versions gets one delta.

One thread rebuilds, stores and deletes, one piece at a time, so that nothing is deleted before it is listed. Another
one makes re-diffs: the learner's next publication does not wait for laggards.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from echo2.errors import PeerError
from echo2.types import PayloadId, SnapshotRef
from echo2.weights import ChunkStore, Manifest, encode, encode_delta

log = logging.getLogger(__name__)

#: Versions before the newest that a returning worker may hold and still get a delta; anchors are as far apart.
HISTORY_VERSIONS = 32
#: The history's deltas together, as a multiple of one whole content; beyond that, older ones go.
HISTORY_CONTENTS = 2.0
#: Re-diffs kept, together no larger than one whole content. Workers that come back at the same time share one where
#: they hold the same version.
REDIFFS_MAX = 8
#: Contents in memory, at most: two where one is rebuilt, and two and a delta where one is re-diffed, at the same time.
CONTENTS_MAX = 5
#: Share of the machine's memory that they may take. Where it would be more, there are no re-diffs.
MEMORY_SHARE = 0.5

T = TypeVar("T")


class Archive:
    """All methods are for the event loop; `on_dropped` is told of payloads that are stored no more. `deltas`: whether
    any are made here; `memory_bytes`: of the machine, by default all it has."""

    def __init__(
        self,
        store: ChunkStore,
        on_dropped: Callable[[PayloadId], None] = lambda payload: None,
        deltas: bool = True,
        memory_bytes: int | None = None,
    ) -> None:
        self.store = store
        self._deltas = deltas
        self._memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.on_dropped = on_dropped
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._rediff_thread = ThreadPoolExecutor(1, thread_name_prefix="re-diff")
        self._retained: set[SnapshotRef] = set(whole_refs(store))
        self._offered: Manifest | None = None
        self._offered_hashes: frozenset[bytes] = frozenset()
        self._rediffs: dict[PayloadId, int] = {}
        self._useless: set[PayloadId] = set()
        self._under_way: dict[PayloadId, asyncio.Task[None]] = {}
        self._loadable = loadable(store.manifests())

    async def _beside(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._rediff_thread.shutdown(wait=False, cancel_futures=True)

    # ---- from the learner ----------------------------------------------------------------------------------------

    def offer(self, manifest: Manifest) -> tuple[bytes, ...]:
        """A payload is about to come: the chunks of it that are not here.

        Raises:
            PeerError: "base", it is a delta over what is not stored whole: the whole content is needed.
        """
        if manifest.base is not None and not self.is_whole(manifest.base):
            raise PeerError("base", f"version {manifest.base} is not stored whole")
        self._offered, self._offered_hashes = manifest, frozenset(manifest.hashes)
        return self.store.missing(manifest)

    async def put(self, hash_: bytes, data: bytes) -> None:
        """One chunk of the offered payload."""
        if hash_ not in self._offered_hashes:
            raise PeerError("malformed", "a chunk that no offered snapshot names")
        await self._beside(self.store.put, hash_, data)

    async def take(self, manifest: Manifest) -> None:
        """All of the offered payload is here.

        Raises:
            PeerError: "missing", it is not: some chunks never came, or were thrown away while it was being offered.
        """
        was_retained = manifest.ref in self._retained
        self._retained.add(manifest.ref)  # first: what is thrown away from now on is not this
        try:
            await self._beside(self._list, manifest)
        except PeerError:
            if not was_retained:
                self._retained.discard(manifest.ref)
            raise
        self._loadable.add(manifest.ref)
        self._offered, self._offered_hashes = None, frozenset()

    def _list(self, manifest: Manifest) -> None:
        """In the thread, so that nothing is being thrown away between the look and the listing."""
        absent = self.store.missing(manifest)
        if absent:
            raise PeerError("missing", f"{len(absent)} chunks of {manifest.payload} are not here")
        self.store.put_manifest(manifest)

    # ---- what is here --------------------------------------------------------------------------------------------

    def is_whole(self, ref: SnapshotRef) -> bool:
        return self.store.manifest(PayloadId(ref)) is not None

    def find(self, lineage: int, version: int) -> SnapshotRef | None:
        """The retained snapshot of this version; lineage 0 stands for the newest lineage that has it."""
        found = [ref for ref in self._retained if ref.version == version and lineage in (0, ref.lineage)]
        return max(found, default=None)

    def ready(self, ref: SnapshotRef, base: SnapshotRef | None) -> Manifest | None:
        """The best payload of `ref` for a worker that has `base`, if it needs no work first."""
        if base is not None and base != ref:
            wanted = PayloadId(ref, base)
            manifest = self.store.manifest(wanted)
            if manifest is not None:
                return manifest
            if self._can_rediff(wanted):
                return None
        return self.store.manifest(PayloadId(ref))

    async def payload(self, ref: SnapshotRef, base: SnapshotRef | None) -> Manifest:
        """The best payload of `ref` for a worker that has `base`: made now where it is not here.

        Raises:
            PeerError: there is no such snapshot (any more).
            UserError: the disk is full.
        """
        while (manifest := self.ready(ref, base)) is None:
            if ref not in self._retained:
                raise PeerError("unknown_snapshot", f"no snapshot {ref} is stored")
            over = PayloadId(ref, base)
            await self._made(over if self._can_rediff(over) else PayloadId(ref))
        return manifest

    def _can_rediff(self, payload: PayloadId) -> bool:
        is_possible = payload.base != payload.ref and payload.base in self._loadable
        return self._deltas and is_possible and payload not in self._useless

    async def rebuild(self, ref: SnapshotRef) -> None:
        """Make sure that this version is stored whole.

        Raises:
            PeerError: "corrupt", its delta does not lead to the digest it names, or its base is damaged; it is dropped.
        """
        try:
            await self._made_whole(ref)
        except PeerError as error:
            self._forget(ref)
            raise PeerError("corrupt", f"snapshot {ref} can't be rebuilt: {error}") from error

    async def mend(self) -> list[SnapshotRef]:
        """After a start: what can be had. The newest may be there as a delta only; then it is rebuilt first."""
        newest = max(self._loadable, default=None)
        if newest is not None and newest not in self._retained:
            self._retained.add(newest)
            try:
                await self.rebuild(newest)
            except PeerError as error:
                log.warning("snapshot %s is given up: %s", newest, error)
        return sorted(self._retained)

    async def _made_whole(self, ref: SnapshotRef) -> None:
        if not self.is_whole(ref):
            await self._made(PayloadId(ref))

    async def _made(self, payload: PayloadId) -> None:
        """Make a payload, once for all who wait for it."""
        task = self._under_way.get(payload)
        if task is None:
            task = asyncio.ensure_future(self._make(payload))
            self._under_way[payload] = task
            task.add_done_callback(lambda _: self._under_way.pop(payload, None))
        await asyncio.shield(task)

    async def _make(self, payload: PayloadId) -> None:
        if payload.base is None:
            await self._beside(self._rebuild, payload.ref)
            return
        try:
            await self._made_whole(payload.ref)  # else both threads would build it
            encoded = await asyncio.get_running_loop().run_in_executor(self._rediff_thread, self._rediff, payload)
        except PeerError as error:  # damaged on disk, or dropped meanwhile
            log.warning("no delta %s: %s", payload, error)
            encoded = None
        if encoded is None:
            self._useless.add(payload)
            return
        manifest, chunks = encoded
        self._make_room(manifest.total_bytes, manifest.tensor_bytes, payload.ref)
        if self._rediffs and not self._has_room(manifest.total_bytes, manifest.tensor_bytes):
            self._useless.add(payload)  # the others lead to the same version, and are being fetched
        else:
            self._rediffs[payload] = manifest.total_bytes
            await self._beside(self._store, manifest, chunks)
        await self.tidy()

    def _has_room(self, num_bytes: int, most_bytes: int) -> bool:
        return len(self._rediffs) < REDIFFS_MAX and sum(self._rediffs.values()) + num_bytes <= most_bytes

    def _make_room(self, num_bytes: int, most_bytes: int, ref: SnapshotRef) -> None:
        """For a re-diff to `ref`: those to other versions go, the first made first."""
        for old in [each for each in self._rediffs if each.ref != ref]:
            if self._has_room(num_bytes, most_bytes):
                return
            del self._rediffs[old]

    def _rebuild(self, ref: SnapshotRef) -> None:
        """In the thread."""
        snapshot = self.store.load(ref)
        manifest, chunks = encode(ref, snapshot.tensors, snapshot.files, is_frozen=True)
        self._store(manifest, chunks)

    def _rediff(self, payload: PayloadId) -> tuple[Manifest, dict[bytes, memoryview]] | None:
        """In the re-diffs' thread. None: it would not be smaller than the whole, or take too much memory."""
        assert payload.base is not None
        whole = self.store.manifest(PayloadId(payload.ref))
        if whole is not None and CONTENTS_MAX * whole.tensor_bytes > MEMORY_SHARE * self._memory_bytes:
            log.info("no delta %s: contents of %d bytes are too large for it here", payload, whole.tensor_bytes)
            return None
        return encode_delta(self.store.load(payload.base), self.store.load(payload.ref))

    def _store(self, manifest: Manifest, chunks: Mapping[bytes, memoryview]) -> None:
        for hash_, chunk in chunks.items():
            self.store.put(hash_, chunk)
        self.store.put_manifest(manifest)

    # ---- throwing away -------------------------------------------------------------------------------------------

    async def drop(self, ref: SnapshotRef) -> None:
        """The planner retains it no more."""
        self._retained.discard(ref)
        await self.tidy()

    def _forget(self, ref: SnapshotRef) -> None:
        """It and what rests on it can't be had."""
        self._retained.discard(ref)
        for manifest in self.store.manifests():
            if ref in (manifest.ref, manifest.base):
                self.store.drop_manifest(manifest.payload)
                self.on_dropped(manifest.payload)
        self._loadable = loadable(self.store.manifests())

    async def tidy(self) -> None:
        """Delete what nobody will ask for."""
        gone = await self._beside(self._tidy, frozenset(self._retained), frozenset(self._rediffs))
        self._loadable = loadable(self.store.manifests())
        self._useless = {payload for payload in self._useless if payload.ref in self._retained}
        for payload in gone:
            self._rediffs.pop(payload, None)
            self.on_dropped(payload)

    def _tidy(self, retained: Collection[SnapshotRef], rediffs: Collection[PayloadId]) -> list[PayloadId]:
        """In the thread."""
        listed = {manifest.payload: manifest for manifest in self.store.manifests()}
        keep = worth_keeping(listed, retained, rediffs)
        gone = [payload for payload in listed if payload not in keep]
        for payload in gone:
            self.store.drop_manifest(payload)
        offered = [self._offered] if self._offered is not None else []
        self.store.retain([*(listed[payload] for payload in listed if payload in keep), *offered])
        return gone


def whole_refs(store: ChunkStore) -> set[SnapshotRef]:
    return {manifest.ref for manifest in store.manifests() if manifest.base is None}


def loadable(listed: Collection[Manifest]) -> set[SnapshotRef]:
    """The contents that can be made of these: whole, or by deltas from a whole one."""
    found = {manifest.ref for manifest in listed if manifest.base is None}
    deltas = [manifest for manifest in listed if manifest.base is not None]
    size = -1
    while size != len(found):
        size = len(found)
        found |= {manifest.ref for manifest in deltas if manifest.base in found}
    return found


def worth_keeping(
    listed: Mapping[PayloadId, Manifest], retained: Collection[SnapshotRef], rediffs: Collection[PayloadId]
) -> set[PayloadId]:
    """The retained contents, re-diffs to them, and the history: deltas from an anchor to the newest of them."""
    keep = {payload for payload in listed if payload.base is None and payload.ref in retained}
    keep |= {payload for payload in rediffs if payload in listed and payload.ref in retained}
    newest = max((payload.ref for payload in listed if payload.ref in retained), default=None)
    if newest is None:
        return keep
    chain = _chain_back(listed, newest, rediffs)
    budget = HISTORY_CONTENTS * max(m.tensor_bytes for m in listed.values())
    floor, num_bytes = 0, 0
    for place, (ref, delta) in enumerate(chain):
        if PayloadId(ref) in listed:
            if num_bytes > budget and floor:
                break
            floor = place
            if place >= HISTORY_VERSIONS:
                break
        num_bytes += listed[delta].total_bytes if delta is not None else 0
    keep |= {delta for _, delta in chain[:floor] if delta is not None}
    anchored_at = floor + HISTORY_VERSIONS
    for place in range(floor, -1, -1):  # from the oldest on
        whole = PayloadId(chain[place][0])
        if whole in listed and anchored_at - place >= HISTORY_VERSIONS:
            keep.add(whole)
            anchored_at = place
    return keep


def _chain_back(
    listed: Collection[PayloadId], newest: SnapshotRef, rediffs: Collection[PayloadId]
) -> list[tuple[SnapshotRef, PayloadId | None]]:
    """The newest content and those before it, each with the delta that leads to it (None at the last)."""
    delta_to: dict[SnapshotRef, PayloadId] = {}
    for payload in sorted(
        (p for p in listed if p.base is not None and p not in rediffs), key=lambda p: p.base or p.ref
    ):
        if payload.base is not None and payload.base < payload.ref:
            delta_to[payload.ref] = payload
    chain: list[tuple[SnapshotRef, PayloadId | None]] = []
    ref: SnapshotRef | None = newest
    while ref is not None:
        delta = delta_to.get(ref)
        chain.append((ref, delta))
        ref = delta.base if delta is not None else None
    return chain
