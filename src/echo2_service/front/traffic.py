"""Bytes and requests under way, by tenant: bodies from their first byte, and answers until they are sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from echo2.core.errors import PeerError
from echo2_service import limits


class Traffic:
    """What is under way; `num_bytes` in all. For one event loop."""

    def __init__(self) -> None:
        self._bytes, self._requests = Counter[str](), Counter[str]()
        self.num_bytes = 0

    def begin(self, tenant: str) -> Passage:
        """Begin a request.

        Raises:
            PeerError: "rate", the tenant has too many requests under way.
        """
        if self._requests[tenant] >= limits.AT_ONCE_MAX:
            raise PeerError("rate", f"{limits.AT_ONCE_MAX} of your requests are under way; wait for some of them.")
        self._requests[tenant] += 1
        return Passage(tenant, self._take, self._end)

    def _take(self, tenant: str, num_bytes: int) -> None:
        mine, everyone = self._bytes[tenant] + num_bytes, self.num_bytes + num_bytes
        room = limits.ALL_BYTES_MAX - (limits.RESERVED_BYTES if mine > limits.FEW_BYTES else 0)
        if mine > limits.TENANT_BYTES_MAX:
            raise PeerError("rate", f"{mine} bytes of your requests are under way; wait until some are answered.")
        if everyone > room:
            raise PeerError("rate", "too much is under way; try again.")
        self._bytes[tenant], self.num_bytes = mine, everyone

    def _end(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        for counter, count in ((self._bytes, num_bytes), (self._requests, 1)):
            counter[tenant] -= count
            if not counter[tenant]:
                del counter[tenant]


class Passage:
    """One request of a tenant, from `Traffic.begin` to `end`."""

    def __init__(self, tenant: str, take: Callable[[str, int], None], end: Callable[[str, int], None]) -> None:
        self._tenant, self._take, self._end = tenant, take, end
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes of the request until its end.

        Raises:
            PeerError: "rate", too many bytes are under way.
        """
        self._take(self._tenant, num_bytes)
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Forget the request."""
        self._end(self._tenant, self._num_bytes)
