"""Decides how large a part of a payload each relay passes on, and which stripes.

With n members of uplinks u_i and an origin of B_0, content can reach all at R = min(B_0, (B_0 + sum u_i) / n): relay i
is given the share u_i / ((n - 1) R) and sends it on n - 1 times; what is left of the whole the origin sends to each
itself. No scheme can do better (Li, Chou and Zhang, Mutualcast, 2005), where the origin's connections get what they
need. They get the same each: a share that arrives late is passed on late.
"""

from __future__ import annotations

from collections.abc import Sequence


def mesh_shares(ups: Sequence[float], rate: float, count: int, origin_up: float | None) -> list[float]:
    """The share of each relay that sends it to all others of `count` members, at this rate: together the whole, where
    uplinks allow it or the origin's is not known. As even as they allow, and no larger than what arrives in time, as
    far as others can take what is left over and send it on once: the one spared helps them with the rest.
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
    """What everybody can have at most (its own limit, where that is less) so that all together take `supply`."""
    for at, limit in enumerate(ranked):
        level = supply / (len(ranked) - at)
        if level <= limit:
            return level
        supply -= limit
    return ranked[-1]


def deal(shares: Sequence[float], num_stripes: int) -> list[int]:
    """Whose each stripe is, by place in `shares`: in turn, of the first stripes; nobody's are the last, as many as the
    shares lack to 1.
    """
    given = [0] * len(shares)
    owners: list[int] = []
    total = sum(shares)
    for stripe in range(1, round(num_stripes * min(1.0, total)) + 1):
        owner = max(range(len(shares)), key=lambda at: (shares[at] / total * stripe - given[at], -at))
        given[owner] += 1
        owners.append(owner)
    return owners
