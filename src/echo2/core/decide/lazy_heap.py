"""A heap with lazy deletion: keys by rank, such as leases by deadline. Changing a rank costs O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str)
Rank = TypeVar("Rank", float, tuple[int, int, float, str])


class LazyHeap(Generic[Key, Rank]):
    """At most one rank per key; the smallest is first. Keys of equal rank are in the order in which they got it."""

    def __init__(self) -> None:
        self._ranks: dict[Key, tuple[Rank, int]] = {}
        self._heap: list[tuple[Rank, int, Key]] = []
        self._count = 0

    def set(self, key: Key, rank: Rank) -> None:
        if self.get(key) == rank:
            return
        self._count += 1
        self._ranks[key] = (rank, self._count)
        heapq.heappush(self._heap, (rank, self._count, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, count, key) for key, (rank, count) in self._ranks.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """Remove this key, if it has a rank."""
        self._ranks.pop(key, None)

    def get(self, key: Key) -> Rank | None:
        entry = self._ranks.get(key)
        return None if entry is None else entry[0]

    def first(self) -> Rank | None:
        while self._heap and self._ranks.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def first_key(self) -> Key | None:
        return None if self.first() is None else self._heap[0][2]

    def first_that(self, fits: Callable[[Key], bool], most: int) -> Key | None:
        """Return the first key that fits, of the `most` first ones."""
        passed: list[tuple[Rank, int, Key]] = []
        while len(passed) < most and (key := self.first_key()) is not None and not fits(key):
            passed.append(heapq.heappop(self._heap))
        fitting = self.first_key() if len(passed) < most else None
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return fitting

    def pop_until(self, last: Rank) -> list[Key]:
        """Remove and return every key whose rank is not above `last`, smallest first."""
        due: list[Key] = []
        while (rank := self.first()) is not None and rank <= last:
            key = heapq.heappop(self._heap)[2]
            del self._ranks[key]
            due.append(key)
        return due

    def __len__(self) -> int:
        return len(self._ranks)
