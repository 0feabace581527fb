"""How long a snapshot travels, before anything is measured: ECHO-2's section 6 as formulas. Bits and seconds.

G = bits to send, B0 = the head's uplink, Bw = a worker's link, n workers, c = bits of a chunk. A worker can't have the
snapshot before G / Bw; a head that sends it to each worker needs n G / B0. Floors, not promises: links that lose
packets or carry rollouts as well take longer. A run measures it (`broadcast/t_bcast`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.control.capacity import INSTALLED_QUANTILE
from echo2.errors import UserError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Links:
    """`count` equal workers' links, in bits per second."""

    up_bps: float
    down_bps: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class Route:
    """How it is sent. `latency_seconds`: one way, between any two."""

    scheme: str = "trees"
    head_up_bps: float = 1e9
    fan_out: int = 8
    chunk_bytes: int = CHUNK_BYTES
    latency_seconds: float = 0.05


def star_seconds(num_bytes: float, num_workers: int, head_up_bps: float, worker_down_bps: float) -> float:
    """max(G / Bw, n G / B0): the head sends to everybody."""
    bits = 8 * num_bytes
    return max(bits / worker_down_bps, num_workers * bits / head_up_bps)


def chain_seconds(num_bytes: float, num_workers: int, worker_bps: float, route: Route) -> float:
    """G / Bw + (L - 1) c / Bw: N = B0 / Bw chains of L = n / N workers, each passing on what it gets."""
    bits, chunk = 8 * num_bytes, 8 * min(route.chunk_bytes, num_bytes)
    num_chains = max(1, math.floor(route.head_up_bps / worker_bps))
    length = math.ceil(num_workers / num_chains)
    rate = min(worker_bps, route.head_up_bps / min(num_chains, num_workers))
    return bits / rate + (length - 1) * chunk / worker_bps + length * route.latency_seconds


def trees_seconds(num_bytes: float, links: Sequence[Links], route: Route) -> float:
    """max(G / B0, G / Bw, n G / (B0 + sum of uplinks)) and a chunk's time for each hop: every worker relays a part."""
    bits, chunk = 8 * num_bytes, 8 * min(route.chunk_bytes, num_bytes)
    count = sum(one.count for one in links)
    uplinks = route.head_up_bps + sum(one.up_bps * one.count for one in links)
    slowest = slowest_bps(links)
    hops = 2 if count <= route.fan_out + 1 else 1 + math.ceil(math.log(count, max(2, route.fan_out)))
    floor = max(bits / route.head_up_bps, bits / slowest, count * bits / uplinks)
    if count == 1:
        hops = 1
    return floor + (hops - 1) * chunk / slowest + hops * route.latency_seconds


def slowest_bps(links: Sequence[Links]) -> float:
    """The download of the worker at the quantile that ends a broadcast: slower ones are not waited for."""
    total, have = sum(one.count for one in links), 0
    for one in sorted(links, key=lambda one: -one.down_bps):
        have += one.count
        if have >= total * INSTALLED_QUANTILE:
            return one.down_bps
    return min(one.down_bps for one in links)


def transfer_seconds(num_bytes: float, links: Sequence[Links], route: Route) -> float:
    """Seconds until enough of these workers have it.

    Raises:
        UserError: no workers, a link without bandwidth, or an unknown scheme.
    """
    if not links or min(min(one.up_bps, one.down_bps) for one in links) <= 0 or route.head_up_bps <= 0:
        raise UserError("A broadcast needs workers, and every link needs some bandwidth.")
    count = sum(one.count for one in links)
    if route.scheme == "star":
        return star_seconds(num_bytes, count, route.head_up_bps, slowest_bps(links)) + route.latency_seconds
    if route.scheme == "chain":
        worker_bps = min(slowest_bps(links), min(one.up_bps for one in links))
        return chain_seconds(num_bytes, count, worker_bps, route)
    if route.scheme == "trees":
        return trees_seconds(num_bytes, links, route)
    raise UserError(f"broadcast.scheme = {route.scheme!r} is not known. Use star, chain or trees.")
