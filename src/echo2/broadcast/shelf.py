"""What a node can give away: chunks that just arrived, chunks on disk, and the content it has installed in memory.

Each chunk is handed out as the message that carries it (`transport.chunks`), so that one that is passed on to many is
hashed, read and packed once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from echo2.errors import PeerError, UserError
from echo2.transport import chunks
from echo2.types import PayloadId, SnapshotRef
from echo2.weights.store import ChunkStore

log = logging.getLogger(__name__)

#: Messages kept in memory: what the children of a relay lag behind it by.
RECENT_BYTES = 64 << 20

Cut = Callable[[], Mapping[bytes, memoryview]]


class Shelf:
    """Reads run on `disk` threads; all else on the event loop."""

    def __init__(self, store: ChunkStore, disk: Executor) -> None:
        self._store, self._disk = store, disk
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._waiting: defaultdict[bytes, set[Callable[[bytes], None]]] = defaultdict(set)
        self._held: tuple[SnapshotRef, Cut] | None = None
        self._content: asyncio.Task[Mapping[bytes, memoryview]] | None = None

    def holds(self, ref: SnapshotRef, cut: Cut) -> None:
        """This content is installed: its whole payload can be served. `cut` gives its chunks; it is called on a thread,
        when somebody asks for the first time."""
        self._held, self._content = (ref, cut), None

    async def open(self, payload: PayloadId) -> None:
        """Have the chunks of this payload at hand, if it is the whole of what is installed."""
        if self._held is None or payload.base is not None or payload.ref != self._held[0]:
            return
        if self._content is None:
            cut = self._held[1]
            self._content = asyncio.ensure_future(asyncio.to_thread(cut))
        content = self._content
        try:
            await asyncio.shield(content)
        except (UserError, MemoryError) as error:
            if self._content is content:  # who asks next has it tried again
                self._content = None
            raise PeerError("missing", f"{payload} can't be cut here: {error}") from error

    def has(self, hash_: bytes) -> bool:
        return hash_ in self._recent or self._store.has(hash_) or hash_ in self._cut()

    def _cut(self) -> Mapping[bytes, memoryview]:
        content = self._content
        return content.result() if content is not None and content.done() and content.exception() is None else {}

    async def message(self, hash_: bytes) -> bytes:
        """The message with this chunk.

        Raises:
            PeerError: "missing", also when the disk altered it: who asks is to go elsewhere, and to call nobody a liar.
        """
        message = self._recent.get(hash_)
        if message is not None:
            return message
        cut = self._cut().get(hash_)
        if cut is not None:
            return chunks.pack(hash_, cut)
        try:
            data = await asyncio.get_running_loop().run_in_executor(self._disk, self._store.get, hash_)
        except PeerError as error:
            log.warning("a chunk is not given: %s", error)
            raise PeerError("missing", str(error)) from error
        message = chunks.pack(hash_, data)
        self._remember(hash_, message)
        return message

    def arrived(self, hash_: bytes, message: bytes) -> None:
        """A chunk was verified and stored: those who wait for it are told."""
        self._remember(hash_, message)
        for tell in self._waiting.pop(hash_, ()):
            tell(hash_)

    def wait_for(self, hash_: bytes, tell: Callable[[bytes], None]) -> None:
        """Call `tell` once, when the chunk arrives."""
        self._waiting[hash_].add(tell)

    def forget(self, hash_: bytes, tell: Callable[[bytes], None]) -> None:
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


def missing(payload: PayloadId, count: int) -> PeerError:
    return PeerError("missing", f"{count} chunks of {payload} are not here and not expected")
