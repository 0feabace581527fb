"""The schemes that broadcasts are compared by: the origin to everybody, the paper's striped chains, and ours.

star    everybody takes everything from the origin
chain   N = B_0 / B_w chains; each member has one child, and one parent for everything
trees   what a run does: `weights/broadcast/decide/routes.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.weights.broadcast.decide.routes import (
    Pace,
    Receiver,
    Routes,
    by_reach,
    can_link,
    find_pace,
    is_blocked,
    plan_routes,
)

Pairs = AbstractSet[tuple[str, str]]


def plan_chain(
    members: Sequence[Receiver],
    *,
    fan_out: int,
    num_stripes: int,
    origin_up: float | None = None,
    weak: AbstractSet[str] = frozenset(),
    blocked: Pairs = frozenset(),
) -> Routes:
    """As `plan_routes`; a member has one child, whatever the fan-out."""
    routes: Routes = {member.worker_id: [ORIGIN] * num_stripes for member in members}
    for group, share in by_reach(members, origin_up):
        _chain(group, find_pace(group, share, weak), share, routes, weak, blocked)
    return routes


#: What `BroadcastOptions.plan` is for each.
SCHEMES: dict[str, Callable[..., Routes] | None] = {"star": None, "chain": plan_chain, "trees": plan_routes}


def _chain(
    members: Sequence[Receiver],
    pace: Pace,
    origin_up: float | None,
    routes: Routes,
    weak: AbstractSet[str],
    blocked: Pairs,
) -> None:
    """Fast members first, slow ones at the tails; two that can't be dialled are never neighbours."""
    rates = sorted(pace.up.values())
    num_chains = 1 if origin_up is None else max(1, int(origin_up / rates[len(rates) // 2] + 1e-9))
    ranked = sorted(
        members, key=lambda member: (-min(pace.up[member.worker_id], pace.down[member.worker_id]), member.worker_id)
    )
    fast = [member for member in ranked if member.worker_id in pace.able]
    slow = [member for member in ranked if member.worker_id not in pace.able]
    tails: list[Receiver | None] = [None] * min(num_chains, len(members))
    for pending in (fast, slow):
        dialable = [member for member in pending if member.address]
        hidden = [member for member in pending if not member.address]
        at = 0
        while dialable or hidden:
            tail = tails[at % len(tails)]
            takes_hidden = tail is None or bool(tail.address)
            queue = hidden if hidden and takes_hidden and len(hidden) >= len(dialable) else dialable or hidden
            member = queue.pop(0)
            is_open = tail is not None and tail.worker_id not in weak
            linked = is_open and tail is not None and can_link(tail, member) and not is_blocked(tail, member, blocked)
            if linked and tail is not None:
                routes[member.worker_id] = [tail.worker_id] * len(routes[member.worker_id])
            if linked or not is_open:
                tails[at % len(tails)] = member
            at += 1
