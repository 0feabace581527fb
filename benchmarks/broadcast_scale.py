"""How a broadcast's time grows with the number of workers: simulated, with the machines that decide in real runs.

`dissemination.py` says what is modelled of links and what is not. A payload of G bytes in chunks of c goes from
an origin with uplink B_0 to n workers with links B_w each way, so long between any two. Every row has T, when the last
worker had all of it, and T over G / B_w (at `efficiency`, what is left of a link under its headers); with a slow member
T is that of the others. Bound: G / min(B_0, (B_0 + sum of uplinks) / n, B_w), which no scheme can beat.

    python benchmarks/broadcast_scale.py                    # about ten minutes; writes benchmarks/results/
    python benchmarks/broadcast_scale.py --most 64          # a minute
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dissemination import EFFICIENCY, DisseminationSpec, NodeSpec, Outcome, disseminate
from recording import save

MIB = 1 << 20
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: A star is n times as long as it is wide; its rows say so at once.
STAR_MOST = 64


@dataclass(frozen=True, slots=True)
class Links:
    """What the rows share. Rates in bytes per second, latency one way between any two."""

    num_bytes: int
    chunk_bytes: int
    rate: float
    latency_seconds: float

    def spec(self, count: int, scheme: str, fan_out: int = 8, origin: float = 1.0) -> DisseminationSpec:
        node = NodeSpec(self.rate, self.rate, self.latency_seconds / 2)
        source = replace(node, up=origin * self.rate)
        return DisseminationSpec((node,) * count, source, self.num_bytes, self.chunk_bytes, scheme, fan_out)


def change(spec: DisseminationSpec, at: int, **fields: Any) -> DisseminationSpec:
    """The same with another worker in this place."""
    workers = list(spec.workers)
    workers[at] = replace(workers[at], **fields)
    return replace(spec, workers=tuple(workers))


def mixed(spec: DisseminationSpec, seed: int) -> DisseminationSpec:
    """Links between a half and four times B_w, log-uniform, each way by itself; all are measured before."""
    rng = random.Random(seed)

    def rate(value: float) -> float:
        factor: float = 2.0 ** rng.uniform(-1.0, 2.0)
        return value * factor

    return replace(spec, workers=tuple(replace(each, up=rate(each.up), down=rate(each.down)) for each in spec.workers))


def cases(links: Links, most: int, seed: int) -> Iterator[tuple[str, DisseminationSpec, int]]:
    """(what it is, what is simulated, how many of the slowest do not count)."""
    for scheme in ("trees", "chain", "star"):
        for count in COUNTS:
            if count <= (min(most, STAR_MOST) if scheme == "star" else most):
                yield "even", links.spec(count, scheme), 0
    for count in (64, 1024):
        if count > most:
            continue
        for fan_out in (2, 4, 16):
            yield f"fan-out {fan_out}", links.spec(count, "trees", fan_out), 0
        for scheme in ("trees", "chain"):
            yield "B_0 = 4 B_w", links.spec(count, scheme, origin=4.0), 0
    for count in (8, 64, 256, 1024):
        if count > most:
            continue
        for scheme in ("trees", "chain"):
            yield "mixed", mixed(links.spec(count, scheme, origin=2.0), seed), 0
    half = 0.5 * links.num_bytes / links.rate
    for count in (4, 8, 16, 64, 256):
        if count > most:
            continue
        for scheme in ("trees", "chain"):
            even = links.spec(count, scheme)
            slow = {"up": links.rate / 10, "down": links.rate / 10}
            yield "one 10x slower", change(even, 2, **slow), 1
            hidden = tuple(replace(node, is_dialable=at % 3 != 0) for at, node in enumerate(even.workers))
            yield "third undialable", replace(even, workers=hidden), 0
            for trouble in ("killed", "vanished", "lies"):
                yield f"one {trouble}", change(even, 1, trouble=trouble, trouble_at_seconds=half), 0


def row(what: str, spec: DisseminationSpec, seconds: Sequence[float], outcome: Outcome, took: float) -> dict[str, Any]:
    workers, efficiency = spec.workers, spec.efficiency
    floor = spec.num_bytes / (min(worker.down for worker in workers) * efficiency)
    supply = (spec.origin.up + sum(worker.up for worker in workers)) / len(workers)
    bound = spec.num_bytes / (min(spec.origin.up, supply) * efficiency)
    alone = spec.num_bytes / (sorted(worker.down for worker in workers)[len(workers) // 2] * efficiency)
    return {
        "what": what,
        "scheme": spec.scheme,
        "workers": len(workers),
        "fan_out": spec.fan_out,
        "seconds": round(seconds[-1], 3),
        "seconds_median": round(seconds[len(seconds) // 2], 3),
        "over_own_link": round(seconds[-1] / alone, 3),
        "bound_seconds": round(max(bound, floor if what == "mixed" else alone), 3),
        "origin_copies": round(outcome.origin_bytes / spec.num_bytes, 3),
        "wasted_copies": round(outcome.wasted_bytes / spec.num_bytes, 3),
        "sources_given_up": len(outcome.reports),
        "routes_sent": outcome.num_routes,
        "events": outcome.num_events,
        "simulated_in_seconds": round(took, 1),
    }


def to_text(result: dict[str, Any]) -> str:
    return (
        f"{result['what']:18} {result['scheme']:6} n {result['workers']:5} fan-out {result['fan_out']:3}"
        f"  T {result['seconds']:8.2f} s  median {result['seconds_median']:8.2f}"
        f"  over G/B_w {result['over_own_link']:6.3f}  bound {result['bound_seconds']:7.2f}"
        f"  origin {result['origin_copies']:6.2f} G  given up {result['sources_given_up']:4}"
        f"  ({result['simulated_in_seconds']} s)"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1024, help="rows with more workers are left out")
    parser.add_argument("--mib", type=int, default=256, help="G")
    parser.add_argument("--chunk-kib", type=int, default=512, help="c; a real run would cut 256 MiB into 256 KiB")
    parser.add_argument("--mbit", type=float, default=100.0, help="B_w")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="one way")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args(arguments)
    links = Links(options.mib * MIB, options.chunk_kib << 10, options.mbit * 125e3, options.latency_ms / 1e3)
    rows = []
    for what, spec, left_out in cases(links, options.most, options.seed):
        began = time.perf_counter()
        outcome = disseminate(spec)
        finished = outcome.finished[: len(outcome.finished) - left_out]
        rows.append(row(what, spec, finished, outcome, time.perf_counter() - began))
        print(to_text(rows[-1]), flush=True)
    result = {
        "simulated": True,
        "num_bytes": links.num_bytes,
        "chunk_bytes": links.chunk_bytes,
        "link_bytes_per_second": links.rate,
        "latency_seconds": links.latency_seconds,
        "efficiency": EFFICIENCY,
        "seed": options.seed,
        "rows": rows,
    }
    print(f"written to {save('broadcast_scale', result, options.out)}")


if __name__ == "__main__":
    main(sys.argv[1:])
