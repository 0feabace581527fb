"""Which connection carries the next chunk, where a peer asked for the same chunks over several connections.

A TCP connection may keep to a tenth of its share for seconds: it is new, or it lost a packet under CUBIC. If chunks
were split among the connections beforehand, the slowest one would decide when a peer has everything. So a chunk belongs
to no connection until one is free to send it: a slow connection takes few, each chunk is sent once, and all that a slow
one can still delay is what it holds, a window of flow control.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

#: Connections over which one request may come; further ones are refused.
CONNECTIONS_MAX = 8


class Dealing:
    """The chunks of one request: `remaining`, which no connection has taken yet, and of these in `ready` those that are
    here. `num_connections`: over which it came and that still send."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.remaining = dict.fromkeys(chunks)
        self.request = tuple(self.remaining)
        self.ready: deque[bytes] = deque()
        self.num_connections = 0

    def may_join(self, chunks: Iterable[bytes]) -> bool:
        """Return whether one more connection may send these: it was asked for the same, and there is room."""
        return self.num_connections < CONNECTIONS_MAX and self.request == tuple(chunks)

    def arrived(self, chunk: bytes) -> None:
        """Record that a chunk is here; once for each that is wanted."""
        self.ready.append(chunk)

    def take(self) -> bytes:
        """Return the next chunk for a connection that is free. No other connection gets it."""
        chunk = self.ready.popleft()
        del self.remaining[chunk]
        return chunk

    def put_back(self, chunk: bytes) -> None:
        """Undo `take`: the chunk could not be read. It is wanted, and not here until it arrives."""
        self.remaining[chunk] = None
