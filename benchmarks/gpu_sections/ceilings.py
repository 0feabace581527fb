"""What the device can do at most: matrix products in bfloat16, and copies from memory to memory."""

from __future__ import annotations

import torch
from gpu_sections.bench import Bench


def run(bench: Bench) -> None:
    """Measure, and keep the figures for the other sections."""
    side = bench.pick(8192, 8192, 64)
    left, right = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    seconds = bench.seconds(lambda: torch.mm(left, right, out=out), repeats=10, warm_up=3)
    bench.ceilings["tflops"] = 2 * side**3 / seconds / 1e12
    source = torch.randint(100, (bench.pick(1 << 32, 1 << 31, 1 << 20),), device=bench.device, dtype=torch.int8)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source), repeats=10, warm_up=3)
    bench.ceilings["copy_gb_s"] = 2 * source.nbytes / seconds / 1e9
    host = torch.empty(bench.pick(1 << 28, 1 << 27, 1 << 20), dtype=torch.int8)
    near = source[: len(host)]
    bench.ceilings["to_host_gb_s"] = len(host) / bench.seconds(lambda: host.copy_(near), repeats=3) / 1e9
    bench.ceilings["from_host_gb_s"] = len(host) / bench.seconds(lambda: near.copy_(host), repeats=3) / 1e9
    bench.record({"product": f"{side} x {side} x {side} bfloat16", **bench.ceilings})
