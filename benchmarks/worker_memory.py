"""Memory of a worker's part in snapshots, by the size of the model: the weights once, and how long a swap takes.

    python benchmarks/worker_memory.py [--sizes 60M 300M 596M] [--dtypes BF16 F32]

For each size a model of random numbers in Qwen3's shape is published by the learner's encoder into a store of chunks:
whole, and a delta in which a hundredth of the numbers moved. A process of its own then does what a worker does: applies
the whole payload to its content, loads it into the engine `compact`, samples, and installs the delta meanwhile. Once as
it is done now, and once as it was before: the content in memory, a second model beside the first. Reported is the most
memory that each process had over what it had before it touched a weight, less the weights and the cache; and seconds by
part. Files are not fetched but lie there: `broadcast.py` is about that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from head_memory import own_peak_bytes
from recording import save

from echo2.rollout.architecture import read_architecture
from echo2.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.encoder import Encoder
from echo2.weights.store import ChunkStore

SHAPES = {"60M": (65_536, 512, 1536, 8), "300M": (151_936, 1024, 3072, 10), "596M": (151_936, 1024, 3072, 28)}
ROWS, TOKENS, PROMPT_TOKENS = 4, 24, 16
MOVED = 0.01


def config_of(size: str) -> dict[str, Any]:
    vocabulary, hidden, ffn, layers = SHAPES[size]
    return {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    }


def publish(directory: Path, size: str, dtype: str) -> None:
    """The learner's part: a whole payload and a delta, in a store."""
    draw, config = np.random.default_rng(0), config_of(size)
    files = {"config.json": json.dumps(config).encode()}
    store, base = ChunkStore(directory), None
    weights = {name: numbers(draw, shape, dtype) for name, shape in read_architecture(config).tensor_shapes().items()}
    for version in range(2):
        if version:
            for items in weights.values():
                items += (draw.random(items.shape, np.float32) < MOVED).astype(items.dtype)
        tensors = {name: TensorBytes(dtype, items.shape, items.tobytes()) for name, items in weights.items()}
        target = Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, files)
        encoder = Encoder(target, base)
        for chunks in encoder.parts():
            for hash_, chunk in chunks.items():
                store.put(hash_, chunk)
        store.put_manifest(encoder.manifest())
        base = target


def numbers(draw: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Small weights, as the integers that their bits are."""
    bits = draw.normal(0, 0.02, shape).astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits


async def work(directory: Path, before: bool) -> dict[str, float]:
    """The worker's part."""
    from echo2.rollout import torch_engine
    from echo2.rollout.compact import build_compact
    from echo2.rollout.decode_loop import DecodeLoop
    from echo2.rollout.engine import Completion, SampleRequest
    from echo2.weights.content import Content

    if before:
        torch_engine.CPU_SHARE = 1e9  # always beside
    engine = DecodeLoop(torch_engine.TorchDecoder(build_compact, "cpu"), ROWS)
    store, content = ChunkStore(directory), Content(directory / "content")
    started, figures, held = own_peak_bytes(), {}, None
    for manifest in sorted(store.manifests(), key=lambda manifest: manifest.ref):
        clock = time.perf_counter()
        content.apply(manifest, store.get)
        figures[f"apply_{manifest.ref.version}"] = time.perf_counter() - clock
        snapshot, futures = content.snapshot(), []  # the last holder of what was held before
        if before:
            held = None  # the one before it goes first
            held = {
                name: TensorBytes(one.dtype, one.shape, one.read(0, one.num_bytes))
                for name, one in snapshot.tensors.items()
            }
            snapshot = Snapshot(snapshot.ref, held, snapshot.files)
        if manifest.ref.version:
            futures = [
                engine.submit(request)
                for request in (
                    SampleRequest(array("i", range(PROMPT_TOKENS)), 0, row, SamplingParams(max_tokens=TOKENS))
                    for row in range(ROWS)
                )
            ]
            await asyncio.sleep(0.5)
        clock = time.perf_counter()
        pause = await engine.update_weights(snapshot)
        figures[f"load_{manifest.ref.version}"] = time.perf_counter() - clock
        if manifest.ref.version:
            figures["pause"] = pause
            clock = time.perf_counter()
            completions = [one for one in await asyncio.gather(*futures) if isinstance(one, Completion)]
            assert len(completions) == ROWS, "the engine refused some"
            figures["swapped_under_way"] = sum(len(one.version_spans) > 1 for one in completions)
    await engine.close()
    figures["content_bytes"] = sum(one.num_bytes for one in snapshot.tensors.values())
    config = json.loads(snapshot.files["config.json"])
    width = 2 if next(iter(snapshot.tensors.values())).dtype == "BF16" else 4
    rows = ROWS * (PROMPT_TOKENS + TOKENS + 32)
    cache = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128 * rows * width
    figures["python_bytes"] = started
    figures["beyond_bytes"] = own_peak_bytes() - figures["content_bytes"] - cache
    return figures


def child(*words: str) -> str:
    return subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["60M", "300M"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["BF16", "F32"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--publish", nargs=3)
    parser.add_argument("--work", nargs=2)
    options = parser.parse_args()
    if options.publish:
        directory, size, dtype = options.publish
        publish(Path(directory), size, dtype)
        return
    if options.work:
        print(json.dumps(asyncio.run(work(Path(options.work[0]), options.work[1] == "before"))))
        return
    rows = {}
    for size in options.sizes:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                child("--publish", folder, size, dtype)
                row: dict[str, Any] = {}
                for side in ("before", "now"):
                    row[side] = json.loads(child("--work", folder, side))
                    (Path(folder) / "content").unlink()
            rows[f"{size} {dtype}"] = row
            peaks = {side: row[side]["beyond_bytes"] + row[side]["content_bytes"] for side in row}
            row["peak_ratio"] = peaks["now"] / peaks["before"]
            print(size, dtype, f"{row['now']['content_bytes'] / 1e6:.0f} MB of weights")
            for side in ("before", "now"):
                parts = {
                    name: round(value / 1e6 if name.endswith("bytes") else value, 2)
                    for name, value in row[side].items()
                }
                print(f"  {side}: {parts}")
            print(f"  most memory, now to before: {row['peak_ratio']:.2f}", flush=True)
            print(save("worker_memory", {"cases": rows}, options.out))


if __name__ == "__main__":
    main()
