"""A worker's weights: which payload is fetched, what is installed and kept, and what others are given of it.

The installed content stays in memory, on the CPU: the next delta is applied to a copy of it, and late joiners are
served the whole of it. On disk lies what leads to it (a whole content and the deltas since), so that a worker that
was restarted goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from echo2.broadcast.peer import PeerNode
from echo2.control import relay_events as ev
from echo2.errors import LinkError, PeerError, UserError
from echo2.runtime.clock import Clock
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.grpc_link import Membership
from echo2.transport.identity import verify_manifest
from echo2.types import PayloadId, Snapshot, SnapshotRef
from echo2.weights import ChunkStore, Manifest, apply_delta, cut, decode, encode

log = logging.getLogger(__name__)

CALL_SECONDS = 120.0  # the head may have to make the delta first
#: Manifests of announced payloads that are remembered.
MANIFESTS_MAX = 8
#: Deltas on disk before the whole content is written in their place; sooner where they are larger than it.
DELTAS_MAX = 32
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen_address(listen: str, relays: bool, head_address: str) -> tuple[str, int] | None:
    """Where to listen for other workers; None: not at all. By default any free port: on all addresses, or on this
    machine's own where the head is on it too.

    Raises:
        UserError: `listen` is not HOST:PORT.
    """
    if not relays:
        return None
    if not listen:
        return ("127.0.0.1" if head_address.rpartition(":")[0] in LOOPBACK else "0.0.0.0", 0)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {listen}: expected HOST:PORT, for example 0.0.0.0:7342.")
    return host, int(port)


class WorkerWeights:
    """`happen` takes the relay's events, `fail` what can't be gone on from."""

    def __init__(
        self,
        member: Membership,
        link: Link,
        directory: Path,
        listen: tuple[str, int] | None,
        advertise: str,
        relays: bool,
        happen: Callable[[ev.Event], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._link, self._advertise, self._happen = link, advertise, happen
        self._ca_pem = member.credentials.ca_pem
        self._store = ChunkStore(directory / "snapshots")
        self._node = PeerNode(
            member.peer_id,
            self._store,
            member.network(),
            link,
            on_whole=lambda payload: happen(ev.SnapshotWhole(payload)),
            on_gone=lambda payload: happen(ev.SnapshotGone(payload, "nobody has it any more")),
            on_error=fail,
            clock=Clock(),
            listen=listen,
            relays=relays,
        )
        self._manifests: dict[PayloadId, Manifest] = {}
        self._incoming: PayloadId | None = None
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="loading")
        self._port = 0
        self.content: Snapshot | None = None

    async def start(self) -> None:
        """Listen, and load what an earlier process had installed.

        Raises:
            UserError: the address can't be had, or the content does not fit into memory.
        """
        self._port = await self._node.start()
        self.content = await asyncio.get_running_loop().run_in_executor(self._loading, self._restored)

    def _restored(self) -> Snapshot | None:
        newest = max((manifest.ref for manifest in self._store.manifests()), default=None)
        if newest is None:
            return None
        try:
            return self._store.load(newest)
        except PeerError as error:
            log.warning("the stored snapshot %s is not used: %s", newest, error)
            self._store.drop_snapshot(newest)
            return None

    def introduce(self, hello: wire.WorkerHello) -> None:
        """Say in the hello where others can dial us."""
        hello.listen_port, hello.advertise = self._port, self._advertise

    def connected(self) -> None:
        self._node.connected()

    def disconnected(self) -> None:
        self._node.disconnected()

    def obey(self, order: wire.Order) -> bool:
        """Follow an order of the head, if it is about the broadcast."""
        return self._node.obey(order)

    def count(self, report: wire.WorkerReport) -> None:
        report.bytes_received, report.bytes_sent = self._node.bytes_received, self._node.bytes_sent

    # ---- fetching ------------------------------------------------------------------------------------------------

    def announced(self, notice: wire.SnapshotNotice, asked_for: bool = False) -> None:
        """Raises PeerError where the notice is not the head's, or no notice."""
        verify_manifest(self._ca_pem, notice.manifest, notice.signature)
        manifest = Manifest.from_wire(notice.manifest)
        self._manifests.pop(manifest.payload, None)
        self._manifests[manifest.payload] = manifest
        if len(self._manifests) > MANIFESTS_MAX:
            del self._manifests[next(payload for payload in self._manifests if payload != self._incoming)]
        _, stored, total = self._node.progress or (None, 0, 1)
        self._happen(ev.SnapshotAnnounced(manifest.payload, asked_for, stored / max(1, total)))

    async def ask(self, ref: SnapshotRef, base: SnapshotRef | None) -> None:
        """Ask the head for a payload of `ref`, over `base` where it can."""
        over = None if base is None else wire.SnapshotId(lineage=base.lineage, version=base.version)
        request = wire.ManifestRequest(lineage=ref.lineage, version=ref.version, base=over)
        try:
            self.announced(await self._link.call("FetchManifest", request, CALL_SECONDS), asked_for=True)
        except PeerError as error:
            log.info("no manifest of %s: %s", ref, error)
            is_unknown = error.reason == "unknown_snapshot"  # else it does not know us, or its answer was no manifest
            self._happen(ev.SnapshotUnknown(ref) if is_unknown else ev.ManifestFailed(str(error)))
        except LinkError as error:
            self._happen(ev.ManifestFailed(str(error)))

    def fetch(self, payload: PayloadId) -> None:
        self._incoming = payload
        self._node.fetch(self._manifests[payload])

    def stop_fetching(self, payload: PayloadId) -> None:
        self._node.stop_fetching(payload)

    # ---- installing ----------------------------------------------------------------------------------------------

    async def install(self, payload: PayloadId, load: Callable[[Snapshot], float]) -> float | None:
        """Build the content beside the old one, verify it, have it loaded; the seconds of pause that took. None: it was
        refused, and the relay knows.

        Raises:
            UserError: it does not fit into memory, or the disk is full.
        """
        manifest, loop = self._manifests[payload], asyncio.get_running_loop()
        try:
            content, pause = await loop.run_in_executor(self._loading, self._load, manifest, load)
        except PeerError as error:
            log.warning("snapshot %s refused: %s", payload, error)
            self._happen(ev.SnapshotRefused(payload, str(error)))
            return None
        log.info("installed %s, digest %s", payload, manifest.digest.hex())
        self.content = content
        self._node.holds(content.ref, lambda: cut(content))
        return pause

    def _load(self, manifest: Manifest, load: Callable[[Snapshot], float]) -> tuple[Snapshot, float]:
        """In the loading thread."""
        if manifest.base is None:
            content = decode(manifest, self._store.get)
        elif self.content is None or self.content.ref != manifest.base:
            has = None if self.content is None else self.content.ref
            raise PeerError("base", f"payload {manifest.payload} is over another content than {has}")
        else:
            content = apply_delta(manifest, self.content, self._store.get)
        return content, load(content)

    async def reload(self, load: Callable[[Snapshot], float]) -> SnapshotRef | None:
        """Have the content of an earlier process loaded; what is installed then."""
        if self.content is None:
            return None
        try:
            await asyncio.get_running_loop().run_in_executor(self._loading, load, self.content)
        except PeerError as error:
            log.warning("the stored snapshot %s is not used: %s", self.content.ref, error)
            self.content = None
            return None
        self._node.holds(self.content.ref, lambda content=self.content: cut(content))  # type: ignore[misc]
        return self.content.ref

    async def keep(self, payload: PayloadId) -> None:
        """Keep on disk what leads to the installed content, and throw the rest away.

        Raises:
            UserError: the disk is full.
        """
        manifest = self._manifests.get(payload)
        if manifest is None or self.content is None or self.content.ref != payload.ref:
            return
        kept = await asyncio.get_running_loop().run_in_executor(self._loading, self._list, manifest, self.content)
        if kept is not None:
            incoming = self._manifests.get(self._incoming or payload, kept)
            let_go = self._store.let_go([kept, incoming])  # between two events: no fetch counts on what goes
            await asyncio.to_thread(self._store.sweep, let_go)  # thousands of files

    def _list(self, manifest: Manifest, content: Snapshot) -> Manifest | None:
        """In the loading thread: list the payload; write the whole content where the deltas since the last whole one
        have become too many. Nothing is thrown away then, because others may still want the newest delta."""
        if self._store.missing(manifest):
            return None
        self._store.put_manifest(manifest)
        listed = self._store.manifests()
        since = max((each.ref for each in listed if each.base is None), default=content.ref)
        deltas = [each for each in listed if each.base is not None and each.ref > since]
        if len(deltas) < DELTAS_MAX and sum(each.total_bytes for each in deltas) <= manifest.tensor_bytes:
            return manifest
        whole, chunks = encode(content.ref, content.tensors, content.files, is_frozen=True)
        for hash_, chunk in chunks.items():
            self._store.put(hash_, chunk)
        self._store.put_manifest(whole)
        return None

    async def close(self) -> None:
        self._loading.shutdown(wait=False, cancel_futures=True)
        await self._node.close()
