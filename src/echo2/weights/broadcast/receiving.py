"""What every machine that gets weights needs: chunks on disk, a peer that fetches and serves them, and manifests that
the head has signed. Which weights it wants is its own affair: a worker the newest, a service's sampler those of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echo2.core.addresses import host_and_port, is_loopback, split
from echo2.core.types import PayloadId, SnapshotRef
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import Link
from echo2.transport.grpc_link import Membership
from echo2.transport.identity import verify_manifest
from echo2.weights.broadcast.peer import PeerNode
from echo2.weights.format.manifest import Manifest
from echo2.weights.store.store import ChunkStore

CALL_SECONDS = 60.0


class WeightsReceiver:
    """`store`: the chunks in `directory`; `node`: the machine's part in the broadcast, which calls the `on_*`. It
    listens for other machines on `listen` if it `relays`, by default on a free port: on all interfaces, or on loopback
    if the head is on this machine.
    """

    def __init__(
        self,
        member: Membership,
        link: Link,
        directory: Path,
        listen: str,
        relays: bool,
        on_whole: Callable[[PayloadId], None],
        on_gone: Callable[[PayloadId], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Raises: UserError, `listen` is not HOST:PORT."""
        self._link, self._ca_pem = link, member.credentials.ca_pem
        address = listen_address(listen, relays, member.address)
        self.store = ChunkStore(directory / "snapshots")
        self.node = PeerNode(
            member.peer_id,
            self.store,
            member.network(),
            link,
            on_whole=on_whole,
            on_gone=on_gone,
            on_error=on_error,
            listen=address,
            relays=relays,
        )

    def manifest_in(self, notice: wire.SnapshotNotice) -> Manifest:
        """Return an announced manifest. Raises PeerError if it is invalid or not signed by the head."""
        verify_manifest(self._ca_pem, notice.manifest, notice.signature)
        return Manifest.from_wire(notice.manifest)

    async def ask(self, ref: SnapshotRef, base: SnapshotRef | None = None) -> Manifest:
        """Ask the head for a payload of `ref`, preferably a delta from `base`.

        Raises:
            LinkError: the head can't be reached.
            PeerError: "unknown_snapshot", it has none; or it does not know this machine, or the manifest is invalid.
        """
        over = None if base is None else messages.encode_ref(base)
        request = wire.ManifestRequest(policy=ref.policy, lineage=ref.lineage, version=ref.version, base=over)
        return self.manifest_in(await self._link.call("FetchManifest", request, CALL_SECONDS))


def listen_address(listen: str, relays: bool, head_address: str) -> tuple[str, int] | None:
    """Return the (host, port) to listen on for other machines, or None not to listen. Raises as `WeightsReceiver`."""
    if not relays:
        return None
    if not listen:
        host = split(head_address)[0]
        return (host if is_loopback(host) else "0.0.0.0", 0)
    return host_and_port(listen, "--listen", "0.0.0.0:7342")
