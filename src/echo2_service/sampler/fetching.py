"""Fetches base models and adapters, one at a time, on a machine that samples for a service, and keeps them on disk."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from echo2.core.errors import PeerError
from echo2.core.types import PayloadId, Snapshot, SnapshotRef
from echo2.transport.base import Link
from echo2.transport.grpc_link import Membership
from echo2.weights.broadcast.peer import WeightsReceiver
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.content import Content

log = logging.getLogger(__name__)

#: Maximum size of all adapters on disk; the least recently used are deleted.
ADAPTER_BYTES_MAX = 4 << 30


class FetchedWeights:
    """`node`: this machine's peer in the broadcast. `own_base`: a base model already here. For one event loop."""

    def __init__(
        self,
        member: Membership,
        link: Link,
        directory: Path,
        listen: str,
        relays: bool,
        fail: Callable[[BaseException], None],
        own_base: Snapshot | None,
    ) -> None:
        """Raises: UserError, `listen` is not HOST:PORT."""
        self._own_base = own_base
        self._receiver = WeightsReceiver(
            member, link, directory, listen, relays, on_whole=self._whole, on_gone=self._gone, on_error=fail
        )
        self.node, self._store = self._receiver.node, self._receiver.store
        self._contents = directory / "contents"
        self._contents.mkdir(parents=True, exist_ok=True)
        self._adapters: OrderedDict[PayloadId, int] = OrderedDict(  # sizes in bytes; most recently used last
            (manifest.payload, manifest.content_bytes)
            for manifest in self._store.manifests()
            if not manifest.ref.is_base_model
        )
        self._fetching = asyncio.Lock()
        self._arrival: asyncio.Future[None] | None = None

    async def base(self, policy: str) -> Snapshot:
        """Return a base model, fetching it if necessary.

        Raises:
            LinkError, PeerError: the model can't be fetched now.
            UserError: the disk is full.
        """
        if self._own_base is not None and self._own_base.ref.policy == policy:
            return self._own_base
        return await self.content(SnapshotRef(policy, 0, 0))

    async def content(self, ref: SnapshotRef) -> Snapshot:
        """Return an adapter or a base model, fetching it if necessary. Raises as `base`."""
        async with self._fetching:
            manifest = self._store.manifest(PayloadId(ref))
            if manifest is None or self._store.missing(manifest):
                manifest = await self._fetch(ref)
            content = Content(self._contents / ref.policy)
            try:
                await asyncio.to_thread(content.apply, manifest, self._store.get)
            except PeerError:  # damaged on disk: the next request fetches it again
                self._store.drop_manifest(manifest.payload)
                raise
            if not ref.is_base_model:
                await self._make_room(manifest)
            return content.snapshot()

    async def _fetch(self, ref: SnapshotRef) -> Manifest:
        manifest = await self._receiver.ask(ref)
        if manifest.payload != PayloadId(ref):
            raise PeerError("malformed", f"asked for {ref}, told of {manifest.payload}")
        self._arrival = asyncio.get_running_loop().create_future()
        self.node.fetch(manifest)
        try:
            await self._arrival
        except asyncio.CancelledError:
            self.node.stop_fetching(manifest.payload)
            raise
        finally:
            self._arrival = None
        self._store.put_manifest(manifest)
        log.info("%s is here", ref)
        return manifest

    def _whole(self, payload: PayloadId) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _gone(self, payload: PayloadId) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(PeerError("unknown_snapshot", f"{payload} is no longer stored anywhere"))

    async def _make_room(self, newest: Manifest) -> None:
        self._adapters[newest.payload] = newest.content_bytes
        self._adapters.move_to_end(newest.payload)
        excess = sum(self._adapters.values()) - ADAPTER_BYTES_MAX
        if excess <= 0:
            return
        for payload, num_bytes in list(self._adapters.items())[:-1]:
            if excess <= 0:
                break
            excess -= num_bytes
            del self._adapters[payload]
            (self._contents / payload.ref.policy).unlink(missing_ok=True)
        kept = [one for one in self._store.manifests() if one.ref.is_base_model or one.payload in self._adapters]
        self._store.forget(kept)
        await asyncio.to_thread(self._store.sweep)
