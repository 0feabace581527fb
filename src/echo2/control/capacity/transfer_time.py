"""Estimates how long a snapshot takes to send, before anything is measured: ECHO-2's section 6. Bits and seconds.

G = bits to send, B0 = the head's uplink, Bw = a worker's link, n workers, c = bits of a chunk. A worker can't have the
snapshot before G / Bw; a head that sends it to each worker needs n G / B0. These are lower bounds: links that lose
packets or also carry rollouts take longer. A run measures the real time (`broadcast/t_bcast`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo2.control.capacity.formulas import INSTALLED_QUANTILE
from echo2.errors import UserError

CHUNK_BYTES = 1 << 20
#: Workers that one worker sends to, and one-way latency between any two.
FAN_OUT, LATENCY_SECONDS = 8, 0.05


@dataclass(frozen=True, slots=True)
class Links:
    """`count` equal workers' links, in bits per second."""

    up_bps: float
    down_bps: float
    count: int = 1


def star_seconds(num_bytes: float, num_workers: int, head_up_bps: float, worker_down_bps: float) -> float:
    """max(G / Bw, n G / B0): the head sends to every worker itself."""
    bits = 8 * num_bytes
    return max(bits / worker_down_bps, num_workers * bits / head_up_bps)


def chain_seconds(
    num_bytes: float, num_workers: int, worker_bps: float, head_up_bps: float, chunk_bytes: float = CHUNK_BYTES
) -> float:
    """G / Bw + (L - 1) c / Bw: N = B0 / Bw chains of L = n / N workers, each worker forwarding to the next."""
    bits, chunk = 8 * num_bytes, 8 * min(chunk_bytes, num_bytes)
    num_chains = max(1, math.floor(head_up_bps / worker_bps))
    length = math.ceil(num_workers / num_chains)
    return bits / min(worker_bps, head_up_bps / min(num_chains, num_workers)) + (length - 1) * chunk / worker_bps


def slowest_bps(links: Sequence[Links]) -> float:
    """Return the downlink of the worker at INSTALLED_QUANTILE, with which a broadcast ends; slower ones don't count."""
    total, have = sum(one.count for one in links), 0
    for one in sorted(links, key=lambda one: -one.down_bps):
        have += one.count
        if have >= total * INSTALLED_QUANTILE:
            return one.down_bps
    return min(one.down_bps for one in links)


def transfer_seconds(num_bytes: float, links: Sequence[Links], head_up_bps: float) -> float:
    """Return max(G / B0, G / Bw, n G / (B0 + sum of uplinks)) plus a chunk per hop: seconds until INSTALLED_QUANTILE of
    these workers have the snapshot, where every worker relays a part.

    Raises:
        UserError: no workers, or a link without bandwidth.
    """
    if not links or min(min(one.up_bps, one.down_bps) for one in links) <= 0 or head_up_bps <= 0:
        raise UserError("A broadcast needs workers, and every link needs some bandwidth.")
    bits, chunk = 8 * num_bytes, 8 * min(CHUNK_BYTES, num_bytes)
    count, slowest = sum(one.count for one in links), slowest_bps(links)
    uplinks = head_up_bps + sum(one.up_bps * one.count for one in links)
    hops = min(count, 2) if count <= FAN_OUT + 1 else 1 + math.ceil(math.log(count, FAN_OUT))
    floor = max(bits / head_up_bps, bits / slowest, count * bits / uplinks)
    return floor + (hops - 1) * chunk / slowest + hops * LATENCY_SECONDS
