"""The current plan for one payload: who takes which stripe from whom, and how this changes when a source drops out.

A change moves as few stripes as possible: those that came from the source that dropped out, to whoever has most uplink
to spare among those that have the stripe or are on a way to it which does not lead through the one that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from echo2.control.broadcast.origin_commands import ORIGIN
from echo2.control.broadcast.routes import Receiver, can_link
from echo2.types import PayloadId

#: Good places compared before one is taken.
PLACES_COMPARED = 16


@dataclass(frozen=True, slots=True)
class MembersView:
    """What a plan must know of the members. `can_serve(source, worker)`: nothing known speaks against this pair."""

    members: Mapping[str, Receiver]
    up: Callable[[str], float]
    can_serve: Callable[[str, str], bool]
    fan_out: int


@dataclass(slots=True)
class RoutePlan:
    """routes    the source of each stripe, of every member that has the payload or is to have it
    children     source -> child -> stripes it takes of it; only children that are not whole
    whole        members that have all of it (they may also have it from elsewhere, and have no routes)
    unusable     not asked any more for this payload, by anybody
    blamed       source -> who gave it up
    taken        member -> sources it was ever to take stripes of
    """

    payload: PayloadId
    num_stripes: int
    routes: dict[str, list[str]] = field(default_factory=dict)
    children: dict[str, dict[str, int]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    unusable: set[str] = field(default_factory=set)
    blamed: dict[str, set[str]] = field(default_factory=dict)
    taken: dict[str, set[str]] = field(default_factory=dict)
    calm_until: float = 0.0
    changed: dict[str, None] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether everybody who was to have the payload has all of it."""
        return all(worker_id in self.whole for worker_id in self.routes)

    def load(self, source: str) -> int:
        """Stripes times children."""
        return sum(self.children.get(source, {}).values())

    def set_source(self, worker_id: str, stripe: int, source: str) -> None:
        """Let this member take this stripe from `source` from now on."""
        sources = self.routes[worker_id]
        if sources[stripe] != source:
            self._unlink(worker_id, sources[stripe])
            sources[stripe] = source
            self._link(worker_id, source)
        self.changed[worker_id] = None

    def set_route(self, worker_id: str, sources: Iterable[str]) -> None:
        """All stripes of a member that had no route."""
        self.routes[worker_id] = list(sources)
        for source in self.routes[worker_id]:
            self._link(worker_id, source)
        self.changed[worker_id] = None

    def _link(self, worker_id: str, source: str) -> None:
        mine = self.children.setdefault(source, {})
        mine[worker_id] = mine.get(worker_id, 0) + 1
        self.taken.setdefault(worker_id, set()).add(source)

    def _unlink(self, worker_id: str, source: str) -> None:
        mine = self.children.get(source, {})
        mine[worker_id] = mine.get(worker_id, 0) - 1
        if mine[worker_id] <= 0:
            del mine[worker_id]
            if not mine:
                self.children.pop(source, None)

    def received(self, worker_id: str) -> None:
        """It has all of it and takes nothing more."""
        if worker_id in self.routes and worker_id not in self.whole:
            self._forget_sources(worker_id)
        self.whole.add(worker_id)

    def _forget_sources(self, worker_id: str) -> None:
        for source in self.routes[worker_id]:
            self._unlink(worker_id, source)

    def drop(self, worker_id: str) -> None:
        """This member is gone: it neither takes nor gives any more."""
        if worker_id in self.routes:
            if worker_id not in self.whole:
                self._forget_sources(worker_id)
            del self.routes[worker_id]
        self.whole.discard(worker_id)
        self.unusable.discard(worker_id)
        self.changed.pop(worker_id, None)
        self.blamed.pop(worker_id, None)
        self.taken.pop(worker_id, None)
        for blamers in self.blamed.values():
            blamers.discard(worker_id)

    def leads_to_origin(self, source: str, stripe: int, without: str, lost: str) -> bool:
        """Has `source` this stripe, or gets it on a way that leads through neither of the two?"""
        for _ in range(len(self.routes) + 1):
            if source in (without, lost):
                return False
            if source == ORIGIN or source in self.whole:
                return True
            if source not in self.routes:
                return False
            source = self.routes[source][stripe]
        return False

    # ---- moving stripes ----------------------------------------------------------------------------------------------

    def replace_source(self, lost: str, children: Iterable[str], fleet: MembersView) -> None:
        """Give these children other sources for the stripes that they took of `lost`."""
        orphans: dict[int, list[str]] = {}
        for child in children:
            if child in self.whole:
                continue
            for stripe, source in enumerate(self.routes.get(child, ())):
                if source == lost:
                    orphans.setdefault(stripe, []).append(child)
        if not orphans:
            return
        places = self._places(fleet)
        for stripe, waiting in orphans.items():
            # Who has most to spare goes first: where all others came through `lost`, it takes its place.
            waiting.sort(key=lambda child: (self.cost(child, fleet), child))
            for child in waiting:
                self.set_source(child, stripe, self._place(child, stripe, lost, places, fleet))

    def add_late(self, worker_id: str, fleet: MembersView) -> None:
        """One more who is to have it, as a leaf of those that are at it or have it."""
        self.set_route(worker_id, [ORIGIN] * self.num_stripes)
        self.spare_origin(worker_id, fleet)

    def spare_origin(self, worker_id: str, fleet: MembersView) -> None:
        """What it takes of the origin it takes of others, where it can."""
        places = self._places(fleet)
        for stripe, source in enumerate(self.routes[worker_id]):
            if source == ORIGIN:
                self.set_source(worker_id, stripe, self._place(worker_id, stripe, ORIGIN, places, fleet))

    def cost(self, source: str, fleet: MembersView) -> float:
        """The load on its uplink if it served one stripe more, against that uplink."""
        return (self.load(source) + 1) / fleet.up(source)

    def _places(self, fleet: MembersView) -> list[str]:
        """Who may serve, least loaded first. Sources outside the fleet of this payload are those that hold it."""
        ids = [key for key in dict.fromkeys([*self.routes, *sorted(self.whole)]) if key not in self.unusable]
        return sorted(ids, key=lambda key: (self.cost(key, fleet), key))

    def _place(self, child: str, stripe: int, lost: str, places: list[str], fleet: MembersView) -> str:
        member = fleet.members[child]
        barred = lost if lost in self.unusable else child  # else only this pair failed, and others may pass it on
        found: list[str] = []
        for source in places:
            mine = self.children.get(source, {})
            is_full = len(mine) >= fleet.fan_out and child not in mine
            if source in (lost, child) or is_full or child in self.blamed.get(source, ()):
                continue
            other = fleet.members.get(source)
            if other is None or not can_link(other, member) or not fleet.can_serve(source, child):
                continue
            if self.leads_to_origin(source, stripe, child, barred):
                found.append(source)
                if len(found) >= PLACES_COMPARED:
                    break
        return min(found, key=lambda source: (self.cost(source, fleet), source)) if found else ORIGIN
