"""Bytes that a laggard is sent when its deltas are added up, and what that costs: one segment of 16 MiB.

    python benchmarks/merging.py

fp32 weights drawn from a normal distribution (.02) move by 1.7e-7 a step, each in a direction that mostly stays, as the
first steps of AdamW do at a small learning rate; what is diffed is the bf16 cut of them. Beside the deltas in a row and
their sum: the delta that an encoder with both versions would make.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from recording import save

from echo2.weights.format.deltas import encode_items
from echo2.weights.format.manifest import DELTA, Segment
from echo2.weights.format.planes import Items
from echo2.weights.format.segments import SEGMENT_BYTES, cut_record, merge_deltas

STEP = 1.7e-7
STEPS = (2, 4, 8)
NUM_ITEMS = SEGMENT_BYTES // 2


def versions(seed: int) -> list[Items]:
    """The bf16 items of each version, [NUM_ITEMS]."""
    draw = np.random.default_rng(seed)
    masters = draw.normal(0, 0.02, NUM_ITEMS).astype(np.float32)
    drift = draw.normal(0, 1, NUM_ITEMS)
    found = []
    for _ in range(max(STEPS) + 1):
        found.append((masters.view(np.uint32) >> 16).astype(np.uint16))
        masters = masters + np.float32(STEP) * np.sign(drift + draw.normal(0, 1, NUM_ITEMS)).astype(np.float32)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    states, records, chunks = versions(0), [], dict[bytes, memoryview]()
    for base, target in pairwise(states):
        record, cut = cut_record(DELTA, memoryview(encode_items(base, target)), 1 << 20)
        records.append(record)
        chunks |= cut
    rows = []
    for steps in STEPS:
        segment = Segment(SEGMENT_BYTES, bytes(32), tuple(records[:steps]))
        began = time.process_time()
        merged, _ = merge_deltas(segment, 2, chunks.__getitem__, 1)
        spent = time.process_time() - began
        row = {
            "versions_behind": steps,
            "in_a_row_percent": 100 * sum(record.num_bytes for record in segment.records) / SEGMENT_BYTES,
            "added_up_percent": 100 * sum(record.num_bytes for record in merged.records) / SEGMENT_BYTES,
            "direct_percent": 100 * len(encode_items(states[0], states[steps])) / SEGMENT_BYTES,
            "cpu_ms_to_add_up": 1000 * spent,
        }
        rows.append(row)
        print({name: round(value, 3) for name, value in row.items()})
    changed = float(np.mean(states[0] != states[1]))
    print(save("merging", {"changed_share_a_step": changed, "rows": rows}, options.out))


if __name__ == "__main__":
    main()
