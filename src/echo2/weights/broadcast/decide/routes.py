"""Plans routes: the source of each stripe of a payload for each member, and how many stripes each relay passes on.
Stateless.

A stripe travels from the origin down a tree of members. The relays are dealt to *colours*; each colour has one tree,
whose inner nodes are the relays of that colour, and an equal share of the stripes (the origin's streams share its
uplink evenly, so they end together). A relay has children in proportion to its uplink. With n <= fan_out + 1 members (a
*mesh*) each relay is a colour of its own, with a share that its uplink carries: origin -> root -> all other members. A
member that receives far slower than most does not count when the pace is set, and serves at most members that are no
faster. Alternative schemes for comparison are in benchmarks/broadcast/broadcast_schemes.py.

With n members of uplinks u_i and an origin of uplink B_0, all members can receive the payload at the rate
R = min(B_0, (B_0 + sum u_i) / n): relay i gets the share u_i / ((n - 1) R) and sends it n - 1 times; the origin sends
the rest to each member itself. No scheme is faster (Li, Chou and Zhang, Mutualcast, 2005), provided that each of the
origin's connections gets the bandwidth it needs. Without a `Broadcast.rate_limit` at the origin, all connections get
the same bandwidth at best, so a large share arrives late and is passed on late.

The receivers' own downlinks bound the target rate, too. The origin itself sends the stripes that relays can't carry.
These are the last ones: chunks are requested stripe by stripe, and the relayed stripes must start first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from echo2.core.errors import InvariantError
from echo2.weights.broadcast.decide.origin_messages import ORIGIN

Routes = dict[str, list[str]]

#: A member whose uplink is below this share of the median is a leaf.
SLOW_UP = 0.25
#: The common rate is at most this factor above the downlink of the slowest relay.
RELAY_DOWN = 1.05
#: The cost estimate assumes that every slow member gets at least this share of its downlink.
STARVED = 0.1
#: How many different relay counts are tried.
PACES_TRIED = 24
#: The origin relieves the relays if the busiest one needs more than this many times the time at the common rate.
PACE_SLACK = 1.02
#: Load moves between relays while one uses more than this share of its uplink; limit of moves per member.
FULL_USE = 0.95
MOVES_A_MEMBER = 8
#: Share of the child places kept free, for the children of a relay that drops out. (In a mesh all members are
#: neighbours already and need no new places.)
SPARE_PLACES = 0.25
#: Parents of a slow member: two share its load, and each slow member has a place at no more than these.
SLOW_PARENTS = 2
#: Members examined as a possible parent outside the own colour.
SPARE_TRIES = 64


def mesh_shares(ups: Sequence[float], rate: float, count: int, origin_up: float | None) -> list[float]:
    """Return the share that each relay sends to all others of `count` members, at this rate.

    The shares add up to 1 where the uplinks allow it or `origin_up` is None. They are as even as the uplinks allow. A
    share larger than what arrives in time is cut, as far as other relays can take the excess and send it once; the
    relay with the smaller share helps them with the other copies.
    """
    most = [up / (max(1, count - 1) * rate) for up in ups]
    level = water_level(sorted(most), 1.0)
    shares = [min(share, level) for share in most]
    total = sum(shares)
    if origin_up is None:
        return [share / total for share in shares]
    in_time = origin_up / (count * rate)
    over = [max(0.0, share - in_time) for share in shares]
    room = [max(0.0, min(in_time, up / rate) - share) for share, up in zip(shares, ups, strict=True)]
    moved = min(sum(over), sum(room))
    if moved <= 0.0:
        return shares
    less, more = moved / sum(over), moved / sum(room)
    return [share - less * excess + more * free for share, excess, free in zip(shares, over, room, strict=True)]


def water_level(ranked: Sequence[float], supply: float) -> float:
    """Return the level at which all takers together take `supply`, each the level or its own limit, whichever is less.

    `ranked`: the limits in ascending order. If the limits add up to less than `supply`, the largest limit is returned.
    """
    for at, limit in enumerate(ranked):
        level = supply / (len(ranked) - at)
        if level <= limit:
            return level
        supply -= limit
    return ranked[-1]


def deal(shares: Sequence[float], num_stripes: int) -> list[int]:
    """Return the owner of each of the first stripes, as an index into `shares`, dealt in turn. If the shares add up to
    less than 1, the remaining stripes have no owner and are left out.
    """
    num_owned = [0] * len(shares)
    owners: list[int] = []
    total = sum(shares)
    for stripe in range(1, round(num_stripes * min(1.0, total)) + 1):
        owner = max(range(len(shares)), key=lambda at: (shares[at] / total * stripe - num_owned[at], -at))
        num_owned[owner] += 1
        owners.append(owner)
    return owners


@dataclass(frozen=True, slots=True)
class Receiver:
    """A worker as route planning sees it. Rates in bytes per second, None where unknown."""

    worker_id: str
    address: str = ""
    reach: str = ""
    up: float | None = None
    down: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates with unknown values filled in. `relays`: members that may have children, fastest uplink first; `slow`:
    members that receive less than the common rate, fastest downlink first; `able`: members with enough uplink to relay
    to slower ones; `demand`: the share of the common rate that a member can receive.
    """

    up: Mapping[str, float]
    down: Mapping[str, float]
    demand: Mapping[str, float]
    relays: tuple[Receiver, ...]
    slow: tuple[Receiver, ...]
    able: frozenset[str]
    rate: float


def plan_routes(
    members: Sequence[Receiver],
    *,
    fan_out: int,
    num_stripes: int,
    origin_up: float | None = None,
    weak: AbstractSet[str] = frozenset(),
    blocked: AbstractSet[tuple[str, str]] = frozenset(),
) -> Routes:
    """Return the source of each stripe for each member: at most `num_stripes` stripes, the same number for all members.
    `weak`: members that never relay; `blocked`: pairs that failed, in either order.
    """
    if fan_out < 1 or num_stripes < 1:
        raise InvariantError(f"no routes for fan_out {fan_out}, {num_stripes} stripes")
    forests: list[_Trees] = []
    for group, share in by_reach(members, origin_up):
        pace = find_pace(group, share, weak)
        if pace.relays and len(group) > 1:
            forests.append(_Trees(group, pace, share, fan_out, num_stripes, blocked))
    if forests:
        trees = max(forests, key=lambda forest: len(forest.members)).trees
        is_even = num_stripes >= len(trees) and len({tree.share for tree in trees}) == 1
        num_stripes -= num_stripes % len(trees) if is_even else 0
    routes: Routes = {member.worker_id: [ORIGIN] * num_stripes for member in members}
    for forest in forests:
        forest.fill(routes, num_stripes)
    return routes


def by_reach(members: Iterable[Receiver], origin_up: float | None) -> Iterator[tuple[list[Receiver], float | None]]:
    """Yield each group of members that reach each other, in a fixed order, with its share of the origin's uplink."""
    ranked = sorted(members, key=lambda member: (member.reach, member.worker_id))
    for _, group in itertools.groupby(ranked, key=lambda member: member.reach):
        members_there = list(group)
        yield members_there, None if origin_up is None else origin_up * len(members_there) / len(ranked)


def can_link(one: Receiver, other: Receiver) -> bool:
    """Return whether these two can be neighbours: they are in reach of each other, and one of them can be dialled."""
    return one.reach == other.reach and bool(one.address or other.address)


def find_pace(members: Sequence[Receiver], origin_up: float | None, weak: AbstractSet[str]) -> Pace:
    """Return the common rate of these members, and which of them relay. A relay that receives less than the common rate
    delays all members below it. So several counts k are tried, with the k fastest receivers as relays; the k with the
    smallest mean completion time wins.
    """
    ups, downs = _filled([member.up for member in members]), _filled([member.down for member in members])
    middle = sorted(ups)[len(ups) // 2]
    able = [
        (down, up, member)
        for member, up, down in zip(members, ups, downs, strict=True)
        if up >= SLOW_UP * middle and member.worker_id not in weak
    ]
    able.sort(key=lambda item: (-item[0], -item[1], item[2].worker_id))
    ranked, best, rate = sorted(downs), (math.inf, 0), 0.0
    gives = {member.worker_id: up for _, up, member in able}
    pairs = sorted(zip(downs, members, strict=True), key=lambda item: (-item[0], item[1].worker_id))
    everything = sum(ups) + (origin_up or middle)
    for count in sorted({math.ceil(len(able) * share / PACES_TRIED) for share in range(1, PACES_TRIED + 1)} | {0}):
        supply = sum(up for _, up, _ in able[:count]) + (origin_up or middle)
        limit = min(origin_up or math.inf, RELAY_DOWN * able[count - 1][0] if count else math.inf)
        common = min(limit, water_level(ranked, everything))
        fast = sum(down * RELAY_DOWN >= common for down in ranked)
        common = min(common, supply / max(1, fast))
        cost = fast / common + _cost_of_slow(pairs[fast:], gives, supply - fast * common)
        if cost <= best[0] * (1.0 + 1e-9):  # on a tie, more relays are better
            best, rate = (cost, count), common
    relays = sorted(able[: best[1]], key=lambda item: (-item[1], item[2].worker_id))
    relay_ids = {member.worker_id for _, _, member in relays}
    return Pace(
        up={member.worker_id: up for member, up in zip(members, ups, strict=True)},
        down={member.worker_id: down for down, member in pairs},
        demand={member.worker_id: min(1.0, down / rate) for down, member in pairs},
        relays=tuple(member for _, _, member in relays),
        slow=tuple(member for down, member in pairs if down * RELAY_DOWN < rate and member.worker_id not in relay_ids),
        able=frozenset(gives),
        rate=rate,
    )


def _cost_of_slow(pairs: Sequence[tuple[float, Receiver]], gives: Mapping[str, float], spare: float) -> float:
    """Return the summed transfer times of the slow members, each fed by the spare rate of those before it."""
    cost = 0.0
    for down, member in pairs:
        rate = min(down, max(spare, STARVED * down))
        cost += 1.0 / rate
        spare += gives.get(member.worker_id, 0.0) - rate
    return cost


def _filled(rates: Iterable[float | None]) -> list[float]:
    """Replace unknown rates by the median of the known ones, or by 1.0 if none is known."""
    rates = list(rates)
    known_rates = sorted(rate for rate in rates if rate)
    return [rate or (known_rates[len(known_rates) // 2] if known_rates else 1.0) for rate in rates]


def is_blocked(one: Receiver, other: Receiver, blocked: AbstractSet[tuple[str, str]]) -> bool:
    """Whether this pair failed, in either order."""
    return (one.worker_id, other.worker_id) in blocked or (other.worker_id, one.worker_id) in blocked


class _Tree:
    """One colour: `parent` of each member ("" the origin), and its share of the stripes."""

    def __init__(self, root: Receiver, share: float) -> None:
        self.share = share
        self.parent: dict[str, str] = {root.worker_id: ORIGIN}
        self.placed: list[Receiver] = [root]

    def may_move(self, child: str, parent: Receiver) -> bool:
        """Return whether moving `child` below `parent` creates no cycle."""
        above = parent.worker_id
        while above != ORIGIN and above != child:
            above = self.parent[above]
        return above == ORIGIN

    def put(self, member: Receiver, parent: Receiver | None) -> None:
        self.parent[member.worker_id] = ORIGIN if parent is None else parent.worker_id
        self.placed.append(member)


class _Trees:
    """The trees of one reach class. `load`: how many payloads each relay sends; `_budget` is how many its uplink can
    send at the common rate."""

    def __init__(
        self,
        members: Sequence[Receiver],
        pace: Pace,
        origin_up: float | None,
        fan_out: int,
        num_stripes: int,
        blocked: AbstractSet[tuple[str, str]],
    ) -> None:
        self.members, self.pace, self.origin_up, self.fan_out = members, pace, origin_up, fan_out
        self.num_stripes, self.blocked = num_stripes, blocked
        self.children: dict[str, set[str]] = {member.worker_id: set() for member in members}
        self.slow_parents: dict[str, dict[str, None]] = {}
        self.load = dict.fromkeys(self.children, 0.0)
        self.spare = [member for member in pace.relays if member.address] or list(pace.relays)
        self.next_spare = 0
        slow = {member.worker_id for member in pace.slow}
        self.others = [member for member in members if member.worker_id not in slow]
        is_mesh = len(self.others) <= fan_out + 1
        self.most_children = fan_out if is_mesh else max(1, fan_out - int(SPARE_PLACES * fan_out))
        self.trees = self._mesh() if is_mesh else self._colours()
        if is_mesh:
            self._even_out()

    def fill(self, routes: Routes, num_stripes: int) -> None:
        """Deal stripes to the trees. The origin sends the others, which are requested last, to every member itself."""
        share = self._share_of_peers()
        for stripe, owner in enumerate(deal([tree.share * share for tree in self.trees], num_stripes)):
            for worker_id, parent in self.trees[owner].parent.items():
                routes[worker_id][stripe] = parent

    def _share_of_peers(self) -> float:
        """Return the fraction of the trees' shares that the relays carry at the common pace. The origin sends the rest
        to every member, as far as its uplink has room.
        """
        if self.origin_up is None:
            return 1.0
        busiest = max(self.load[member.worker_id] / self._budget(member) for member in self.pace.relays)
        others = len(self.members) - 1
        if busiest <= PACE_SLACK or others == 0:
            return 1.0
        most = max(0.0, self.origin_up / self.pace.rate - 1.0) / others
        whole = sum(tree.share for tree in self.trees)
        return min(1.0, max((1.0 - most) / whole, 1.0 / busiest))

    def _budget(self, member: Receiver) -> float:
        return self.pace.up[member.worker_id] / self.pace.rate

    def _mesh(self) -> list[_Tree]:
        """Build one tree per relay. Each relay sends its own share at least once; that load is reserved beforehand."""
        relays, ups = self.pace.relays, [self.pace.up[relay.worker_id] for relay in self.pace.relays]
        shares = mesh_shares(ups, self.pace.rate, len(self.others), self.origin_up)
        self.load.update({root.worker_id: share for root, share in zip(relays, shares, strict=True)})
        trees = [self._grow_mesh(root, share) for root, share in zip(relays, shares, strict=True)]
        for tree in trees:
            self._place_slow(tree)
        return trees

    def _colours(self) -> list[_Tree]:
        """Build one tree per colour, all with the same share."""
        colours = self._inner_nodes()
        trees = [self._grow(inner, 1.0 / len(colours)) for inner in colours]
        for tree in trees:  # last: they would take the places of relays whose own tree is not grown yet
            self._place_slow(tree)
        return trees

    def _inner_nodes(self) -> list[list[Receiver]]:
        """Return the inner nodes of each tree: relays dealt so that all trees can send the same, dialable relays first.
        Unequal uplinks make fewer trees, so that the faster relays have places left for more children than the others.
        """
        relays, needed = self.pace.relays, len(self.others) - 1
        a_tree = -(-needed // self.most_children)
        dialable = [relay for relay in relays if relay.address]
        hidden = [relay for relay in relays if not relay.address]
        if not dialable:
            return [list(relays)]
        ups = sorted(self.pace.up[relay.worker_id] for relay in relays)
        evenness = sum(ups) / len(ups) / ups[(9 * len(ups)) // 10]
        wide = self.most_children if evenness > 1.0 / PACE_SLACK else max(2, int(self.most_children * evenness))
        most = max(1, min(len(relays) // a_tree, len(dialable), self.num_stripes, wide))

        def busiest(count: int) -> float:  # children per relay of the smallest colour, times its tree's share
            return math.ceil(needed / (len(relays) // count)) / count

        count = min(range(1, most + 1), key=lambda count: (busiest(count), -count))
        return [[*_dealt(dialable, at, count), *_dealt(hidden, at, count)] for at in range(count)]

    def _grow_mesh(self, root: Receiver, share: float) -> _Tree:
        """Build the tree of `root`, which sends to all members it can reach until its uplink is full. Relays placed
        before help with the rest."""
        tree = _Tree(root, share)
        self.load[root.worker_id] -= share
        fast = {member.worker_id for member in self.pace.relays}
        others = [member for member in self.others if member != root]
        others.sort(key=lambda member: (member.worker_id not in fast, not member.address, self._use(member, share)))
        for member in others:
            cost = share * self.pace.demand[member.worker_id]
            can = [other for other in tree.placed if other.worker_id in fast and self._may_take(other, member)]
            easy = [other for other in can if self._use(other, cost) <= 1.0 + 1e-9]
            parent = root if root in easy else min(easy or can, key=lambda other: self._use(other, cost), default=None)
            self._place(tree, member, parent)
        return tree

    def _place_slow(self, tree: _Tree) -> None:
        """Place slow members below the least loaded parents that receive no slower: relays, or earlier slow ones. They
        may have the places that are kept free otherwise. From the origin each would take the uplink of a fast one."""
        by_id = {member.worker_id: member for member in self.members}
        free = [(self._use(member), member.worker_id) for member in tree.placed if member.worker_id in self.pace.able]
        heapq.heapify(free)
        for member in self.pace.slow:
            old_parents = [key for key in self.slow_parents.get(member.worker_id, ()) if key in tree.parent]
            parent = (
                None
                if len(old_parents) < SLOW_PARENTS
                else by_id[min(old_parents, key=lambda key: self._use(by_id[key]))]
            )
            unfit: list[tuple[float, str]] = []
            while free and parent is None and len(unfit) < SPARE_TRIES:
                use, worker_id = heapq.heappop(free)
                other = by_id[worker_id]
                unfit.append((self._use(other), worker_id))
                if use < unfit[-1][0]:
                    heapq.heappush(free, unfit.pop())  # its load has grown since
                elif self._may_take(other, member, self.fan_out):
                    parent = other
            if parent is None and old_parents:
                parent = by_id[old_parents[0]]
            self._place(tree, member, parent)
            if parent is not None:
                self.slow_parents.setdefault(member.worker_id, {})[parent.worker_id] = None
            for item in unfit:
                heapq.heappush(free, item)
            if member.worker_id in self.pace.able:
                heapq.heappush(free, (self._use(member), member.worker_id))

    def _even_out(self) -> None:
        """Move children from the busiest relay to less loaded ones, as long as that helps."""
        by_id = {member.worker_id: member for member in self.members}
        for _ in range(MOVES_A_MEMBER * len(self.members)):
            busiest = max(self.pace.relays, key=lambda relay: (self._use(relay), relay.worker_id))
            limit = self._use(busiest)
            best: tuple[float, int, str, Receiver] | None = None
            for number, tree in enumerate(self.trees):
                for child in [key for key, parent in tree.parent.items() if parent == busiest.worker_id]:
                    cost = tree.share * self.pace.demand[child]
                    for other in self.pace.relays:
                        use = self._use(other, cost)
                        is_better = use < min(limit - 1e-9, best[0] if best else limit)
                        if is_better and self._may_take(other, by_id[child]) and tree.may_move(child, other):
                            best = (use, number, child, other)
            if limit <= FULL_USE or best is None:
                return
            tree, child, other = self.trees[best[1]], best[2], best[3]
            cost = tree.share * self.pace.demand[child]
            self.load[busiest.worker_id] -= cost
            tree.parent[child] = other.worker_id
            self.children[other.worker_id].add(child)
            self.load[other.worker_id] += cost

    def _use(self, member: Receiver, more: float = 0.0) -> float:
        """Return the share of its budget that a relay uses with `more` payloads added to its load."""
        return (self.load[member.worker_id] + more) / self._budget(member)

    def _place(self, tree: _Tree, member: Receiver, parent: Receiver | None) -> None:
        tree.put(member, parent)
        if parent is not None:
            self.children[parent.worker_id].add(member.worker_id)
            self.load[parent.worker_id] += tree.share * self.pace.demand[member.worker_id]

    def _grow(self, inner: Sequence[Receiver], share: float) -> _Tree:
        tree = _Tree(inner[0], share)
        inner_ids = {member.worker_id for member in inner}
        fast = {member.worker_id for member in self.pace.relays}
        others = [member for member in self.others if member.worker_id not in inner_ids]
        others.sort(key=lambda member: (member.worker_id not in fast, bool(member.address)))
        slots = self._slots(inner)
        open_at = [inner[0]]
        for member in [*inner[1:], *others]:
            parent = self._open_parent(member, open_at, slots) or self._spare_parent(member, tree)
            self._place(tree, member, parent)
            if member.worker_id in inner_ids:
                open_at.append(member)
        return tree

    def _open_parent(self, member: Receiver, open_at: list[Receiver], slots: dict[str, int]) -> Receiver | None:
        for at, parent in enumerate(open_at):
            if self._may_take(parent, member):
                slots[parent.worker_id] -= 1
                if slots[parent.worker_id] <= 0:
                    del open_at[at]
                return parent
        return None

    def _may_take(self, parent: Receiver, member: Receiver, most: int = 0) -> bool:
        if not can_link(parent, member) or is_blocked(parent, member, self.blocked):
            return False
        children = self.children[parent.worker_id]
        return len(children) < (most or self.most_children) or member.worker_id in children

    def _spare_parent(self, member: Receiver, tree: _Tree) -> Receiver | None:
        """Return a relay of another colour that also receives this tree's stripes and has room for a child, or None."""
        relays: list[Receiver] = []
        for _ in range(min(SPARE_TRIES, len(self.spare))):
            relay = self.spare[self.next_spare % len(self.spare)]
            self.next_spare += 1
            is_placed = relay != member and relay.worker_id in tree.parent
            if is_placed and self._may_take(relay, member):
                relays.append(relay)
        if not relays:
            return None
        return min(relays, key=self._use)

    def _slots(self, inner: Sequence[Receiver]) -> dict[str, int]:
        """Return the number of children of each inner node: proportional to its uplink, from 1 to `most_children`."""
        slots = dict.fromkeys((member.worker_id for member in inner), 1)
        num_left = len(self.others) - 1 - len(inner)
        ups = self.pace.up
        open_ids = [key for key in slots if self.most_children > 1]
        while num_left > 0 and open_ids:
            total = sum(ups[key] for key in open_ids)
            num_given = 0
            for key in open_ids:
                more = min(self.most_children - slots[key], int(num_left * ups[key] / total), num_left - num_given)
                slots[key] += more
                num_given += more
            num_left -= num_given
            open_ids = [key for key in open_ids if slots[key] < self.most_children]
            if num_given == 0:
                for key in sorted(open_ids, key=lambda key: slots[key] / ups[key])[:num_left]:
                    slots[key] += 1
                    num_left -= 1
                open_ids = [key for key in open_ids if slots[key] < self.most_children]
        return slots


def _dealt(items: Sequence[Receiver], at: int, count: int) -> Sequence[Receiver]:
    """Return the items of hand `at` of `count`. They are dealt back and forth, so that no hand gets all the best."""
    return [item for number, item in enumerate(items) if min(number % (2 * count), (-number - 1) % (2 * count)) == at]
