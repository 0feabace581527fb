"""KV caches of ended rows, kept by a torch engine so that a rollout's next turn prefills only its new tokens."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

KEPT_SHARE = 1 / 16
"""Limit of all kept rows together, as a share of the device's free memory when a policy's first row is kept."""


class KeptCache(Protocol):
    """Keys and values of one row."""

    @property
    def num_bytes(self) -> int:
        """Memory of this cache, bytes."""


C = TypeVar("C", bound=KeptCache)


class KeptRows(Generic[C]):
    """Caches by the tokens that were read, oldest first. Above the memory limit the oldest are dropped, so rollouts
    that never continue do not pile up."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rows: dict[bytes, C] = {}
        self.num_bytes = 0

    def keep(self, tokens: bytes, cache: C) -> None:
        """Keep the cache of these tokens."""
        self._drop(tokens)
        self._rows[tokens] = cache
        self.num_bytes += cache.num_bytes
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._rows)))

    def take(self, tokens: bytes) -> C | None:
        """Remove and return the cache of the longest prefix of these tokens that is kept."""
        longest = max(filter(tokens.startswith, self._rows), key=len, default=None)
        return None if longest is None else self._drop(longest)

    def _drop(self, tokens: bytes) -> C | None:
        cache = self._rows.pop(tokens, None)
        self.num_bytes -= 0 if cache is None else cache.num_bytes
        return cache
