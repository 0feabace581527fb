"""Deadlines by key: a heap with lazy deletion, so that moving one costs a logarithm whatever the size of the fleet."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Deadlines(Generic[Key]):
    """At most one deadline a key. Ties fall in the order in which they were set."""

    def __init__(self) -> None:
        self._at: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def set(self, key: Key, at: float) -> None:
        self._count += 1
        self._at[key] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(when, count, name) for name, (when, count) in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        self._at.pop(key, None)

    def get(self, key: Key) -> float | None:
        entry = self._at.get(key)
        return None if entry is None else entry[0]

    def earliest(self) -> float | None:
        """When the next deadline is due, or None."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Key]:
        """Remove and return every key whose deadline is not after `now`, earliest first."""
        due: list[Key] = []
        while (at := self.earliest()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            due.append(key)
        return due

    def __len__(self) -> int:
        return len(self._at)
