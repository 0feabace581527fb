"""Base models and published adapters as payloads of the broadcast, which machines of the fleet fetch from the service
and from each other.

A base model is stored when the first machine samples from it; its chunks take as much disk as the model. Only the most
recently used adapters are stored; others are encoded again from their directories when needed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from echo2.core.background import spawn
from echo2.core.types import Snapshot, SnapshotRef
from echo2.transport import wire_pb2 as wire
from echo2.transport.grpc_link import GrpcNetwork
from echo2.transport.identity import RunIdentity
from echo2.weights.broadcast.distribution import Distribution
from echo2.weights.broadcast.origin import OriginNode
from echo2.weights.format.model_files import read_adapter, read_base_model
from echo2.weights.format.segments import Encoder
from echo2.weights.store.archive import OFFER_CHUNKS_MAX, Archive
from echo2.weights.store.store import ChunkStore
from echo2_service import limits

#: Lineage and version of every published adapter, which has only one version.
LINEAGE, VERSION = 1, 0


class Payloads:
    """`directories`: of the base models, by the names that clients use. `order` sends an order to a machine."""

    def __init__(
        self,
        directory: Path,
        directories: Mapping[str, str],
        identity: RunIdentity,
        order: Callable[[str, wire.Order], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        store = ChunkStore(directory)
        self._archive, self._directories = Archive(store), directories
        origin = OriginNode(store, order, GrpcNetwork(identity.credentials).to_peer, on_error)
        self.distribution = Distribution(
            self._archive, origin, identity, order, lambda _: None, partial(spawn, on_error=on_error)
        )
        self._bases: dict[str, SnapshotRef] = {}
        stored = [ref for ref in self._archive.retained if not ref.is_base_model]
        self._adapters: OrderedDict[SnapshotRef, int] = OrderedDict(  # and bytes; most recently used last
            (ref, self._archive.payload(ref, None).content_bytes) for ref in stored
        )
        self._storing = asyncio.Lock()

    async def store(self, base: str, snapshot: Path | None) -> tuple[str, str]:
        """Store a base model and the adapter in a directory for machines to fetch; return their policy ids ("" without
        an adapter).

        Raises:
            UserError: a directory holds no model, or the disk is full.
            PeerError: there are more base models than one archive takes.
        """
        async with self._storing:
            base_ref = self._bases.get(base)
            if base_ref is None:
                model = await asyncio.to_thread(read_base_model, Path(self._directories[base]))
                if self._archive.find(model.ref) is None:
                    await self._put(model)
                base_ref = self._bases[base] = model.ref
            if snapshot is None:
                return base_ref.policy, ""
            ref = adapter_ref(snapshot)
            if self._archive.find(ref) is None:
                self._adapters[ref] = await self._put(await asyncio.to_thread(read_adapter, snapshot, ref, base_ref))
            self._adapters.move_to_end(ref)
            while len(self._adapters) > limits.FLEET_ADAPTERS_MAX or (
                sum(self._adapters.values()) > limits.FLEET_ADAPTER_BYTES_MAX and len(self._adapters) > 1
            ):
                await self._archive.drop(self._adapters.popitem(last=False)[0])
            return base_ref.policy, ref.policy

    async def _put(self, snapshot: Snapshot) -> int:
        """Store a snapshot and return its bytes."""
        encoder = Encoder(snapshot)
        parts = encoder.parts()
        while (chunks := await asyncio.to_thread(next, parts, None)) is not None:
            names = list(chunks)
            for start in range(0, len(names), OFFER_CHUNKS_MAX):
                for name in self._archive.offer(names[start : start + OFFER_CHUNKS_MAX]):
                    await self._archive.put(name, bytes(chunks[name]))
        manifest = encoder.manifest()
        await self._archive.take(manifest)
        return manifest.content_bytes


def adapter_ref(directory: Path) -> SnapshotRef:
    """Return the reference of the adapter that was published to a directory and never changes."""
    return SnapshotRef(f"adapter-{hashlib.sha256(bytes(directory)).hexdigest()[:32]}", LINEAGE, VERSION)
