"""Memory and time of a publication: from the weights themselves, and as it was, from a copy over a copy.

    python benchmarks/publication.py             # 64 and 256 million fp32 parameters, published in bfloat16
    python benchmarks/publication.py --quick

Each case is a process of its own: it makes weights, publishes them whole, moves them by so much that about 0.7 % of
the bfloat16 items change, and publishes again. Memory is the most that the process had during the second publication
beyond what it had before the first (`VmHWM`, set back; `RssFile` does not grow: files are read, not mapped). Seconds
are by the clock, from the call to the last chunk encoded; GB are of the bfloat16 content.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recording import HERE, save

SIDES = {"copies": 1, "file, 1 thread": 1, "file, 2 threads": 2}
WAYS = ("seconds", "gb_s", "gb_cpu_second", "peak_bytes_a_parameter", "peak_mb")


def resident(field: str) -> int:
    """Bytes, of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{field}:\s+(\d+)", status)[0])


def child(side: str, num_parameters: int, directory: Path) -> dict[str, Any]:
    """Two publications; figures of the second."""
    import torch

    from echo2.learner import publication
    from echo2.learner.model import stored
    from echo2.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
    from echo2.weights.encoder import Encoder

    publication.THREADS_MAX = SIDES[side]
    draw = torch.Generator().manual_seed(0)
    tensors = {f"w{at}": torch.randn(num_parameters // 8, generator=draw) * 0.02 for at in range(8)}
    weights = {name: stored(tensor, torch.bfloat16) for name, tensor in tensors.items()}
    publisher, base = publication.Publisher(directory), None

    def publish(version: int, base: Snapshot | None) -> tuple[int, Snapshot | None]:
        """Bytes of the records, and what is kept for the next."""
        ref = SnapshotRef(RUN_POLICY, 1, version)
        if side == "copies":
            copies = {key: TensorBytes(t.dtype, t.shape, bytes(t.read(0, t.num_bytes))) for key, t in weights.items()}
            target = Snapshot(ref, copies, {})
            encoder = Encoder(target, base)
            for _ in encoder.parts():
                pass
            return encoder.manifest().total_bytes, target
        payload = publisher.payload(ref, publication.LentWeights(weights, {}))
        for _ in payload.parts():
            pass
        return payload.manifest.total_bytes, None

    before = resident("VmRSS")
    _, base = publish(0, base)
    for tensor in tensors.values():
        for part in tensor.split(1 << 20):
            part += torch.randn(part.shape, generator=draw) * 1.6e-7
    Path("/proc/self/clear_refs").write_text("5")
    clock, cpu = time.perf_counter(), time.process_time()
    sent, base = publish(1, base)
    seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
    peak = resident("VmHWM") - before
    content = 2 * num_parameters
    return {
        "seconds": seconds,
        "gb_cpu_second": content / cpu / 1e9,
        "gb_s": content / seconds / 1e9,
        "peak_bytes_a_parameter": peak / num_parameters,
        "peak_mb": peak / 1e6,
        "delta_percent": 100 * sent / content,
    }


def measure(side: str, num_parameters: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", side, str(num_parameters), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE, env=environment)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "PARAMETERS", "DIRECTORY"))
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/publication-DATE.json)")
    options = parser.parse_args()
    if options.child:
        side, parameters, directory = options.child
        print(json.dumps(child(side, int(parameters), Path(directory))))
        return
    sizes, rounds = ([1 << 23], 1) if options.quick else ([64 << 20, 256 << 20], options.rounds)
    table = []
    for size in sizes:
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                found[side].append(measure(side, size))
        for side, figures in found.items():
            row: dict[str, Any] = {"parameters": size, "side": side, "delta_percent": figures[0]["delta_percent"]}
            for way in WAYS:
                values = [one[way] for one in figures]
                row[way] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            table.append(row)
            spread = "  ".join(
                f"{way} {row[way]['median']:.3g} [{row[way]['min']:.3g}, {row[way]['max']:.3g}]" for way in WAYS
            )
            print(f"{size / 1e6:.0f} M, {side:15}  {spread}", flush=True)
        medians = {row["side"]: row["seconds"]["median"] for row in table if row["parameters"] == size}
        print(f"copies / 2 threads: {medians['copies'] / medians['file, 2 threads']:.2f} x the seconds", flush=True)
    if not options.quick or options.out:
        print(f"written to {save('publication', {'rounds': rounds, 'rows': table}, options.out)}")


if __name__ == "__main__":
    main()
