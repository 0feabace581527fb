"""Decides how large a share of a payload each relay passes on, and which stripes.

With n members of uplinks u_i and an origin of uplink B_0, all members can receive the payload at the rate
R = min(B_0, (B_0 + sum u_i) / n): relay i gets the share u_i / ((n - 1) R) and sends it n - 1 times; the origin sends
the rest to each member itself. No scheme is faster (Li, Chou and Zhang, Mutualcast, 2005), provided that each of the
origin's connections gets the bandwidth it needs. Where the origin is not paced (`Broadcast.pace`), all connections get
the same bandwidth at best, so a large share arrives late and is passed on late.
"""

from __future__ import annotations

from collections.abc import Sequence


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
    return [share - less * mine + more * free for share, mine, free in zip(shares, over, room, strict=True)]


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
    given = [0] * len(shares)
    owners: list[int] = []
    total = sum(shares)
    for stripe in range(1, round(num_stripes * min(1.0, total)) + 1):
        owner = max(range(len(shares)), key=lambda at: (shares[at] / total * stripe - given[at], -at))
        given[owner] += 1
        owners.append(owner)
    return owners
