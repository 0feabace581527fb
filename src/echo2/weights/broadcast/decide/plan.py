"""The current plan for one payload: the source of each member's stripes, and how it changes when a source drops out.

A change moves as few stripes as possible: only those that came from the source that dropped out. Each goes to the
member with the most spare uplink among those that have the stripe, or receive it on a path that does not lead through
the member that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from echo2.core.types import PayloadId
from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.weights.broadcast.decide.routes import Receiver, can_link

#: Suitable sources compared before the cheapest is taken.
PLACES_COMPARED = 16
#: Members looked through for a source, in turn: the least loaded of these serve nearly as well as the least loaded of
#: thousands, and a join costs no more in a large fleet.
PLACES_EXAMINED = 256


@dataclass(frozen=True, slots=True)
class MembersView:
    """What a plan must know about the members. `can_serve(source, worker)`: no known failure rules out this pair."""

    members: Mapping[str, Receiver]
    up: Callable[[str], float]
    can_serve: Callable[[str, str], bool]
    fan_out: int


@dataclass(slots=True)
class RoutePlan:
    """The routes of one payload.

    routes       the source of each stripe, for every member that has the payload or shall receive it
    children     source -> child -> number of stripes taken; only children that do not have the whole payload
    whole        members that have the whole payload (they may have it from elsewhere, and then have no routes)
    unusable     sources that no member uses any more for this payload
    blamed       source -> members that gave it up
    past_sources member -> all sources that it was ever told to take stripes from
    """

    payload: PayloadId
    num_stripes: int
    routes: dict[str, list[str]] = field(default_factory=dict)
    children: dict[str, dict[str, int]] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    unusable: set[str] = field(default_factory=set)
    blamed: dict[str, set[str]] = field(default_factory=dict)
    past_sources: dict[str, set[str]] = field(default_factory=dict)
    calm_until: float = 0.0
    changed: dict[str, None] = field(default_factory=dict)
    _next_place: int = 0

    @property
    def is_done(self) -> bool:
        """Whether every member with routes has the whole payload."""
        return all(worker_id in self.whole for worker_id in self.routes)

    def load(self, source: str) -> int:
        """Return how many (child, stripe) pairs this source serves."""
        return sum(self.children.get(source, {}).values())

    def set_source(self, worker_id: str, stripe: int, source: str) -> None:
        """Make `source` the source of this member's stripe from now on."""
        sources = self.routes[worker_id]
        if sources[stripe] != source:
            self._unlink(worker_id, sources[stripe])
            sources[stripe] = source
            self._link(worker_id, source)
        self.changed[worker_id] = None

    def set_route(self, worker_id: str, sources: Iterable[str]) -> None:
        """Set the sources of all stripes of a member that had no route."""
        self.routes[worker_id] = list(sources)
        for source in self.routes[worker_id]:
            self._link(worker_id, source)
        self.changed[worker_id] = None

    def _link(self, worker_id: str, source: str) -> None:
        children = self.children.setdefault(source, {})
        children[worker_id] = children.get(worker_id, 0) + 1
        self.past_sources.setdefault(worker_id, set()).add(source)

    def _unlink(self, worker_id: str, source: str) -> None:
        children = self.children.get(source, {})
        children[worker_id] = children.get(worker_id, 0) - 1
        if children[worker_id] <= 0:
            del children[worker_id]
            if not children:
                self.children.pop(source, None)

    def received(self, worker_id: str) -> None:
        """Record that this member has the whole payload and takes nothing more."""
        if worker_id in self.routes and worker_id not in self.whole:
            self._forget_sources(worker_id)
        self.whole[worker_id] = None

    def _forget_sources(self, worker_id: str) -> None:
        for source in self.routes[worker_id]:
            self._unlink(worker_id, source)

    def drop(self, worker_id: str) -> None:
        """Remove a member that left: it neither takes nor serves any more."""
        if worker_id in self.routes:
            if worker_id not in self.whole:
                self._forget_sources(worker_id)
            del self.routes[worker_id]
        self.whole.pop(worker_id, None)
        self.unusable.discard(worker_id)
        self.changed.pop(worker_id, None)
        self.blamed.pop(worker_id, None)
        self.past_sources.pop(worker_id, None)
        for blamers in self.blamed.values():
            blamers.discard(worker_id)

    def leads_to_origin(self, source: str, stripe: int, without: str, lost: str) -> bool:
        """Return whether `source` has this stripe, or receives it on a path through neither `without` nor `lost`."""
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
        """Give these children other sources for the stripes that they took from `lost`."""
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
            # The child with the most spare uplink goes first: it replaces `lost` where all paths led through `lost`.
            waiting.sort(key=lambda child: (self.cost(child, fleet), child))
            for child in waiting:
                self.set_source(child, stripe, self._place(child, stripe, lost, places, fleet))

    def add_late(self, worker_id: str, fleet: MembersView) -> None:
        """Add a member that joins late, as a leaf below members that have the payload or are receiving it."""
        self.set_route(worker_id, [ORIGIN] * self.num_stripes)
        self.spare_origin(worker_id, fleet)

    def spare_origin(self, worker_id: str, fleet: MembersView) -> None:
        """Move this member's stripes from the origin to peers, where possible."""
        places = self._places(fleet)
        for stripe, source in enumerate(self.routes[worker_id]):
            if source == ORIGIN:
                self.set_source(worker_id, stripe, self._place(worker_id, stripe, ORIGIN, places, fleet))

    def cost(self, source: str, fleet: MembersView) -> float:
        """Return the load on this source's uplink if it served one more stripe, divided by that uplink."""
        return (self.load(source) + 1) / fleet.up(source)

    def _places(self, fleet: MembersView) -> list[str]:
        """Return the possible sources, least loaded first: members with routes, and others that hold the payload."""
        ids = [*self.routes, *(key for key in self.whole if key not in self.routes)]
        if len(ids) > PLACES_EXAMINED:
            first = self._next_place % len(ids)
            self._next_place = first + PLACES_EXAMINED
            ids = [*ids[first:], *ids[: max(0, first + PLACES_EXAMINED - len(ids))]][:PLACES_EXAMINED]
        ids = [key for key in ids if key not in self.unusable]
        return sorted(ids, key=lambda key: (self.cost(key, fleet), key))

    def _place(self, child: str, stripe: int, lost: str, places: list[str], fleet: MembersView) -> str:
        member = fleet.members[child]
        barred = lost if lost in self.unusable else child  # else only this pair failed: others may relay
        places_there: list[str] = []
        for source in places:
            children = self.children.get(source, {})
            is_full = len(children) >= fleet.fan_out and child not in children
            if source in (lost, child) or is_full or child in self.blamed.get(source, ()):
                continue
            other = fleet.members.get(source)
            if other is None or not can_link(other, member) or not fleet.can_serve(source, child):
                continue
            if self.leads_to_origin(source, stripe, child, barred):
                places_there.append(source)
                if len(places_there) >= PLACES_COMPARED:
                    break
        return min(places_there, key=lambda source: (self.cost(source, fleet), source)) if places_there else ORIGIN
