"""The chunks that a node can serve: recently received chunks in memory, and chunks on disk.

Chunks are returned as encoded messages (`transport.chunks`), so that a chunk sent to many peers is hashed, read and
packed once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Executor

from echo2.errors import PeerError, UserError
from echo2.transport import chunks
from echo2.weights.store import ChunkStore

log = logging.getLogger(__name__)

#: Bytes of messages kept in memory: how far the children of a relay can lag behind it without disk reads.
RECENT_BYTES = 64 << 20


class ChunkCache:
    """Serves chunks from memory or from `store`. Disk reads run on `disk` threads, the rest on the event loop."""

    def __init__(self, store: ChunkStore, disk: Executor) -> None:
        self._store, self._disk = store, disk
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._waiting: defaultdict[bytes, set[Callable[[bytes], None]]] = defaultdict(set)

    def has(self, hash_: bytes) -> bool:
        """Whether this chunk can be sent now."""
        return hash_ in self._recent or self._store.has(hash_)

    async def message(self, hash_: bytes) -> bytes:
        """Return the message with this chunk.

        Raises:
            PeerError: "missing": the chunk is not stored, or damaged on disk (the peer then asks another source, and
                does not report this one as corrupt); "busy": it is stored but can't be read now.
        """
        message = self._recent.get(hash_)
        if message is not None:
            return message
        try:
            data = await asyncio.get_running_loop().run_in_executor(self._disk, self._store.get, hash_)
        except PeerError as error:
            log.warning("a chunk is not given: %s", error)
            raise PeerError("missing", str(error)) from error
        except UserError as error:
            log.warning("a chunk is not given: %s", error)
            raise PeerError("busy", f"chunk {hash_.hex()} can't be read now") from error
        message = chunks.pack(hash_, data)
        self._remember(hash_, message)
        return message

    def arrived(self, hash_: bytes, message: bytes) -> None:
        """Add a verified chunk, and notify the requests that wait for it."""
        self._remember(hash_, message)
        self.stored(hash_)

    def stored(self, hash_: bytes) -> None:
        """Notify the requests that wait for this chunk, which is now on disk. A request may have begun to wait after
        the chunk was evicted from memory and before it was written."""
        for tell in self._waiting.pop(hash_, ()):
            tell(hash_)

    def wait_for(self, hash_: bytes, tell: Callable[[bytes], None]) -> None:
        """Call `tell` once, when the chunk arrives."""
        self._waiting[hash_].add(tell)

    def forget(self, hash_: bytes, tell: Callable[[bytes], None]) -> None:
        """Undo `wait_for`."""
        waiting = self._waiting.get(hash_)
        if waiting is not None:
            waiting.discard(tell)
            if not waiting:
                del self._waiting[hash_]

    def _remember(self, hash_: bytes, message: bytes) -> None:
        if hash_ in self._recent:
            return
        self._recent[hash_] = message
        self._recent_bytes += len(message)
        while self._recent_bytes > RECENT_BYTES:
            self._recent_bytes -= len(self._recent.popitem(last=False)[1])
