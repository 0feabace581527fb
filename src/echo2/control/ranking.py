"""Workers in an order that changes all the time: a heap with lazy deletion, so that moving one costs a logarithm."""

from __future__ import annotations

import heapq

#: Samples asked for, a stranger's failures in a row, time of joining, worker id: the least loaded first, then who did
#: not fail, then who came first.
Rank = tuple[int, int, float, str]


class Ranking:
    """At most one rank a worker; the smallest is first."""

    __slots__ = ("_heap", "_rank")

    def __init__(self) -> None:
        self._rank: dict[str, Rank] = {}
        self._heap: list[Rank] = []

    def put(self, rank: Rank) -> None:
        """Give the worker named in it this rank."""
        if self._rank.get(rank[-1]) == rank:
            return
        self._rank[rank[-1]] = rank
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 64 + 4 * len(self._rank):
            self._heap = list(self._rank.values())
            heapq.heapify(self._heap)

    def drop(self, worker_id: str) -> None:
        self._rank.pop(worker_id, None)

    def first(self) -> Rank | None:
        """The smallest rank, or None."""
        heap = self._heap
        while heap and self._rank.get(heap[0][-1]) != heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._rank

    def __len__(self) -> int:
        return len(self._rank)
