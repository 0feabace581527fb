"""A worker's weights: fetches payloads, installs snapshots, and keeps the chunks that other workers need.

The content is one file: the next payload is applied to it in place, segment by segment, and the engine reads its
weights from there. Beside it are the chunks that lead to it (an anchor and the deltas since): they are served to late
joiners, and a worker that was killed while applying a payload repairs its content from them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from echo2.core.background import close_all, spawn
from echo2.core.devices import return_freed_memory
from echo2.core.errors import LinkError, PeerError, UserError
from echo2.core.loop_thread import BlockingThreads
from echo2.core.types import PayloadId, Snapshot, SnapshotRef
from echo2.engines.engine import OutOfMemoryError
from echo2.transport import wire_pb2 as wire
from echo2.weights.broadcast.peer import Receive
from echo2.weights.format.manifest import Manifest
from echo2.weights.format.model_files import rounded
from echo2.weights.store.content import InstalledContent
from echo2.worker.decide import messages as ev

log = logging.getLogger(__name__)

#: Maximum number of manifests of announced payloads that are remembered.
MANIFESTS_MAX = 8


class WorkerWeights:
    """Fetches, installs and keeps a worker's weights. `dispatch` receives the scheduler's events, `fail` the fatal
    errors. `node`: the worker's part in the broadcast; `port`: where others can dial it (0: it does not listen).
    `own_base`: a base model on the owner's disk, whose bytes need not be fetched."""

    def __init__(
        self,
        receive: Receive,
        dispatch: Callable[[ev.Event], None],
        fail: Callable[[BaseException], None],
        own_base: Snapshot | None = None,
    ) -> None:
        self._dispatch, self._fail, self._own_base = dispatch, fail, own_base
        self._receiver = receive(self._whole, lambda payload: dispatch(ev.SnapshotGone(payload)), fail)
        self.node, self._store = self._receiver.node, self._receiver.store
        self._manifests: dict[PayloadId, Manifest] = {}
        # The payload may be announced again with other chunks; a fetch under way continues with its first manifest.
        self._incoming: Manifest | None = None
        self._applied_manifest: Manifest | None = None  # of the payload applied last
        self._loading = BlockingThreads(1, "loading")
        self._taking: asyncio.Task[None] | None = None
        self.port = 0
        self.content = InstalledContent(self._store)

    async def start(self) -> None:
        """Listen for other workers, and restore the content that an earlier process had installed.

        Raises:
            UserError: the address is not available, or the disk is full.
        """
        self.port = await self.node.start()
        await self._loading.run(self.content.restore)

    # ---- fetching ------------------------------------------------------------------------------------------------

    def announced(self, notice: wire.SnapshotNotice) -> None:
        """Remember an announced manifest, and tell the scheduler. Raises PeerError if it is invalid or not signed by
        the head."""
        self._know(self._receiver.manifest_in(notice), asked_for=False)

    def _know(self, manifest: Manifest, asked_for: bool) -> None:
        self._manifests.pop(manifest.payload, None)
        self._manifests[manifest.payload] = manifest
        if len(self._manifests) > MANIFESTS_MAX:
            incoming = None if self._incoming is None else self._incoming.payload
            del self._manifests[next(payload for payload in self._manifests if payload != incoming)]
        _, stored, total = self.node.progress or (None, 0, 1)
        progress = stored / max(1, total)
        self._dispatch(ev.SnapshotAnnounced(manifest.payload, asked_for, progress, manifest.base_model))

    async def ask(self, ref: SnapshotRef, base: SnapshotRef | None) -> None:
        """Ask the head for a payload of `ref`, preferably a delta from `base`."""
        try:
            self._know(await self._receiver.ask(ref, base), asked_for=True)
        except PeerError as error:
            log.info("no manifest of %s: %s", ref, error)
            is_unknown = error.reason == "unknown_snapshot"  # else the worker is unknown, or the manifest is invalid
            self._dispatch(ev.SnapshotUnknown(ref) if is_unknown else ev.ManifestFailed())
        except LinkError:
            self._dispatch(ev.ManifestFailed())

    def fetch(self, payload: PayloadId) -> None:
        self._incoming = manifest = self._manifests[payload]
        if payload.ref.is_base_model and self._own_base is not None:
            self._taking = spawn(self._take_own(manifest, self._own_base), self._fail)
        else:
            self.node.fetch(manifest)

    async def _take_own(self, manifest: Manifest, own: Snapshot) -> None:
        """Take a base model's weights from the owner's disk, then fetch the rest, its smaller files."""
        if own.ref != manifest.ref:  # the run may have it in 16 bits
            own = await self._loading.run(rounded, own)
        if own.ref != manifest.ref:
            ours, theirs = own.ref.policy, manifest.ref.policy
            raise UserError(
                f"--base holds {ours}, and the run's adapters are over {theirs}: these differ, if only by a byte. "
                "Give the model that the learner has, or leave --base out to fetch it."
            )
        try:
            await self._loading.run(self.content.take_base, manifest, own)
        except PeerError as error:
            raise UserError(
                f"--base no longer holds {own.ref.policy}: it changed while the worker ran ({error}). Leave it as it "
                "is, and start the worker again."
            ) from error
        if self._incoming is manifest:
            self.node.fetch(manifest)

    def _whole(self, payload: PayloadId) -> None:
        if payload.ref.is_base_model:  # record its manifest now: no content uses it yet, and it must outlive a restart
            self._store.put_manifest(self._fetched(payload))
            log.info("the base model %s is here", payload.ref.policy)
        self._dispatch(ev.SnapshotWhole(payload))

    def _fetched(self, payload: PayloadId) -> Manifest:
        incoming = self._incoming
        return incoming if incoming is not None and incoming.payload == payload else self._manifests[payload]

    # ---- base models ---------------------------------------------------------------------------------------------

    @property
    def base_models(self) -> set[SnapshotRef]:
        """Base models that are complete on disk."""
        return {manifest.ref for manifest in self._store.manifests() if manifest.ref.is_base_model}

    async def base(self, ref: SnapshotRef) -> Snapshot:
        """Return one of `base_models`, ready to be loaded.

        Raises:
            PeerError: "base_model": its content does not match its name; it must be fetched again.
            UserError: the disk is full.
        """
        try:
            return await self._loading.run(self.content.base, ref)
        except PeerError as error:
            raise PeerError("base_model", error.detail) from error

    # ---- installing ----------------------------------------------------------------------------------------------

    async def install(self, payload: PayloadId, load: Callable[[Snapshot], Awaitable[float]]) -> float | None:
        """Apply the payload, verify it, and load it by `load`. Return the seconds that generation paused. None: the
        payload was refused or does not fit into memory; the scheduler has been told.

        Raises:
            UserError: the disk is full.
        """
        manifest = self._fetched(payload)
        self._applied_manifest = manifest
        if self._own_base is not None and manifest.base_model is None:
            log.warning("the run trains whole models: --base has no effect here")
            self._own_base = None
        try:
            await self._loading.run(self._take, manifest)
            pause = await load(self.content.snapshot())
            await self._loading.run(return_freed_memory, manifest.tensor_bytes)  # of the weights before
        except (OutOfMemoryError, MemoryError) as error:
            log.warning("no room for snapshot %s: %s", payload, error)
            self._dispatch(ev.SnapshotTooLarge(payload, str(error)))
            return None
        except PeerError as error:
            log.warning("snapshot %s refused: %s", payload, error)
            below = manifest.base_model if error.reason == "base_model" else None
            self._dispatch(ev.SnapshotRefused(payload if below is None else PayloadId(below), str(error)))
            return None
        return pause

    def _take(self, manifest: Manifest) -> None:
        self.content.take(manifest)
        return_freed_memory(manifest.tensor_bytes)  # of the segments that were applied

    async def reload(self, load: Callable[[Snapshot], Awaitable[float]]) -> SnapshotRef | None:
        """Load the content that an earlier process installed. Return its snapshot, or None if it is not usable."""
        if self.content.ref is None:
            return None
        try:
            await load(self.content.snapshot())
        except PeerError as error:
            log.warning("the stored snapshot %s is not used: %s", self.content.ref, error)
            return None
        return self.content.ref

    async def keep(self, payload: PayloadId) -> None:
        """Keep the chunks that lead to the installed content on disk, and delete the others.

        Raises:
            UserError: the disk is full.
        """
        manifest = self._applied_manifest
        if manifest is None or manifest.payload != payload:
            return
        manifests = await self._loading.run(self.content.keep, manifest)
        if manifests is not None:
            # No await since they were read: no fetch relies on what is forgotten.
            self._store.forget([*manifests, self._incoming or manifest])
            await asyncio.to_thread(self._store.sweep)

    async def close(self) -> None:
        """Wait for what is being loaded, and leave the broadcast."""
        await close_all(self._loading.close, self.node.close)
