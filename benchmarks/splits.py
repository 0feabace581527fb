"""What it costs and saves to code items near zero by themselves (`weights/format/deltas.py`, the form `split`).

    python benchmarks/splits.py

One segment of 16 MiB of bfloat16 items, normal with 0.02, whose fp32 masters move by normal steps of several sizes.
Both sides are coded in turn in one run: with all splits that save 1/4096 of the bytes, and with none. Times are
processor time of the one thread that works, medians of several repeats and the least; applying includes the copy of
the segment. `even at` is the link on which the bytes that are saved take as long as the split does on one core that
encodes and one that applies; four cores on each side are even at four times that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recording import save

from echo2.weights.format import deltas
from echo2.weights.format.planes import Reader

NUM_ITEMS = 8 << 20
STEP_SIZES = (3e-8, 1.6e-7, 5e-7, 1e-6, 2e-6, 3e-6, 6e-6, 1.2e-5)


def cast(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """To bfloat16, to the nearest, even where there are two."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def milliseconds(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    taken = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        taken.append(1e3 * (time.thread_time() - started))
    return {"median": statistics.median(taken), "min": min(taken), "max": max(taken)}


def side(base: NDArray[Any], target: NDArray[Any], splits: int, repeats: int) -> dict[str, Any]:
    record = deltas.encode_items(base, target, splits)
    applied = base.copy()
    deltas.apply_items(Reader(memoryview(record)), applied)
    if not np.array_equal(applied, target):
        raise SystemExit("the applied record is not the target")
    return {
        "bytes": len(record),
        "encode_ms": milliseconds(lambda: deltas.encode_items(base, target, splits), repeats),
        "apply_ms": milliseconds(lambda: deltas.apply_items(Reader(memoryview(record)), base.copy()), repeats),
    }


def shown(found: dict[str, Any]) -> str:
    encode, apply = (f"{found[way]['median']:.1f} [{found[way]['min']:.1f}] ms" for way in ("encode_ms", "apply_ms"))
    return f"{100 * found['bytes'] / (2 * NUM_ITEMS):.3f} %, encode {encode}, apply {apply}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/splits-DATE.json)")
    options = parser.parse_args()
    deltas.SPLIT_SAVES = 1 / 4096
    draw = np.random.default_rng(0)
    masters = draw.normal(0, 0.02, NUM_ITEMS).astype(np.float32)
    base, table = cast(masters), []
    for size in STEP_SIZES:
        target = cast(masters + draw.normal(0, size, NUM_ITEMS).astype(np.float32))
        split = side(base, target, deltas.MAX_SPLITS, options.repeats)
        plain = side(base, target, 0, options.repeats)
        saved = plain["bytes"] - split["bytes"]
        cost = sum(split[way]["median"] - plain[way]["median"] for way in ("encode_ms", "apply_ms"))
        row = {
            "changed": float(np.mean(base != target)),
            "split": split,
            "plain": plain,
            "saved_share": saved / base.nbytes,
        }
        row["even_at_mbit_s"] = 8e-3 * saved / cost if cost > 0 else None
        table.append(row)
        ways = "  ".join(f"{name} {shown(found)}" for name, found in (("split", split), ("plain", plain)))
        even = row["even_at_mbit_s"]
        print(f"{100 * row['changed']:6.2f} % changed: {ways}; even at {even or 0:.0f} Mbit/s", flush=True)
    print(f"written to {save('splits', {'rows': table}, options.out)}")


if __name__ == "__main__":
    main()
