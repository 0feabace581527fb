"""Unequal uplinks, few members: each relay passes on a share of the stripes in proportion to its uplink, to all others.

With n members of uplinks u_i and an origin of B_0, content can reach all at R = min(B_0, (B_0 + sum u_i) / n): relay i
is given the share u_i / ((n - 1) R) and sends it on n - 1 times; what is left of the whole the origin sends to each
itself. No scheme can do better (Li, Chou and Zhang, Mutualcast, 2005).
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.control.broadcast_commands import ORIGIN

#: Uplinks as even as this are served by equal shares: the origin's connections share its uplink evenly, too.
EVEN_ENOUGH = 0.7


def deal_shares(ups: Mapping[str, float], origin_up: float, num_stripes: int) -> list[str]:
    """Who sends each stripe to all the others: a relay, or the origin.

    ups         bytes per second of each relay; everybody else of the n members has 0
    origin_up   bytes per second
    """
    others = len(ups) - 1
    rate = min(origin_up, (origin_up + sum(ups.values())) / len(ups))
    shares = {name: up / (others * rate) for name, up in ups.items()}
    total = sum(shares.values())
    if total > 1.0:  # more uplink than it takes
        shares = {name: share / total for name, share in shares.items()}
    shares[ORIGIN] = max(0.0, 1.0 - total)
    given = dict.fromkeys(shares, 0)
    stripes = []
    for stripe in range(1, num_stripes + 1):
        owner = max(shares, key=lambda name: (shares[name] * stripe - given[name], name))
        given[owner] += 1
        stripes.append(owner)
    return stripes


def are_uneven(ups: Mapping[str, float]) -> bool:
    """Whether equal shares would leave much of the uplinks unused."""
    return min(ups.values()) < EVEN_ENOUGH * max(ups.values())
