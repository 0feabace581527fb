"""Adapters over one base model in the `compact` engine: what one costs, what a swap costs, and several taking turns.

    python benchmarks/adapters.py [--layers 8] [--hidden 512] [--rank 16] [--rows 64] [--tokens 48] [--repeats 5]
        [--out FILE]

Weights are random. `turns`: as many rollouts of each of n policies as there are rows in all, one policy after the other
with the base model in place, as a worker does it; 1 is one adapter with all the rows at once. Everything is measured in
turn, `repeats` times, and ratios are of neighbours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import save

from echo2.rollout.architecture import read_architecture
from echo2.rollout.compact import build_compact
from echo2.rollout.engine import SampleRequest
from echo2.rollout.torch_engine import TorchDecoder
from echo2.types import SamplingParams, Snapshot, SnapshotRef, TensorBytes

BASE = SnapshotRef("base-" + "0" * 16, 0, 0)
TURNS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("hidden", 512), ("rank", 16), ("rows", 64), ("tokens", 48), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = model(options.layers, options.hidden)
    adapters = [adapter(whole, options.rank, seed) for seed in range(max(TURNS))]
    decoder = TorchDecoder(build_compact, "cpu")
    rows: dict[str, list[float]] = {}
    for repeat in range(options.repeats + 1):
        measured = one_round(decoder, whole, adapters, options)
        for name, value in measured.items() if repeat else ():  # the first round warms up
            rows.setdefault(name, []).append(value)
    sizes = {"base_bytes": size_of(whole), "adapter_bytes": size_of(adapters[0])}
    figures = {name: {"median": statistics.median(all_), "all": all_} for name, all_ in rows.items()}
    for name, all_ in rows.items():
        print(f"{name}: {statistics.median(all_):.4g} ({min(all_):.4g} to {max(all_):.4g})")
    print({name: f"{value / 1e6:.1f} MB" for name, value in sizes.items()})
    shown = vars(options) | {"out": None}
    print(f"figures are in {save('adapters', {'options': shown, **sizes, 'figures': figures}, options.out)}")


def one_round(decoder: TorchDecoder, whole: Snapshot, adapters: list[Snapshot], options: Any) -> dict[str, float]:
    began = time.perf_counter()
    decoder.load(whole)
    found = {"whole_swap_seconds": time.perf_counter() - began}
    plain = sample(decoder, options.rows, options.tokens)
    decoder.load(adapters[0], base_of(whole))
    began = time.perf_counter()
    decoder.load(adapters[1])
    found["adapter_swap_seconds"] = time.perf_counter() - began
    one = 0.0
    for num in TURNS:
        began = time.perf_counter()
        for each in adapters[:num]:
            decoder.load(each)
            sample(decoder, options.rows // num, options.tokens)
        seconds = time.perf_counter() - began
        one = one or seconds
        found[f"turns_{num}_tokens_per_second"] = options.rows * options.tokens / seconds
        found[f"turns_{num}_time_ratio"] = seconds / one
    found["adapter_time_ratio"] = one / plain
    return found


def sample(decoder: TorchDecoder, rows: int, tokens: int) -> float:
    """Seconds for so many rows of so many tokens each."""
    prompt, params = array("i", [5, 6, 7, 8]), SamplingParams(max_tokens=tokens)
    began = time.perf_counter()
    left = {number: SampleRequest(prompt, number, 0, params) for number in range(rows)}
    num_ended = len(decoder.step(left, ()))
    while num_ended < rows:
        num_ended += len(decoder.step({}, ()))
    return time.perf_counter() - began


def model(layers: int, hidden: int) -> Snapshot:
    """A whole model of Qwen3's shape that never ends by itself."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    rng = np.random.default_rng(0)
    tensors = {
        name: floats(rng.normal(0.0, 0.02, shape) if len(shape) > 1 else np.ones(shape))
        for name, shape in read_architecture(config).tensor_shapes().items()
    }
    return Snapshot(
        SnapshotRef("whole", 1, random.randrange(1 << 30)), tensors, {"config.json": json.dumps(config).encode()}
    )


def base_of(whole: Snapshot) -> Snapshot:
    return Snapshot(BASE, whole.tensors, whole.files)


def adapter(whole: Snapshot, rank: int, seed: int) -> Snapshot:
    """An adapter of every linear map in the layers."""
    rng, tensors = np.random.default_rng(seed + 1), dict[str, TensorBytes]()
    for name, tensor in whole.tensors.items():
        if name.endswith("_proj.weight"):
            prefix = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{prefix}.lora_A.weight"] = floats(rng.normal(0.0, 0.02, (rank, tensor.shape[1])))
            tensors[f"{prefix}.lora_B.weight"] = floats(rng.normal(0.0, 0.02, (tensor.shape[0], rank)))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    files = {**whole.files, "adapter_config.json": json.dumps(config).encode()}
    return Snapshot(SnapshotRef(f"policy-{seed}", 1, 0), tensors, files, BASE)


def floats(values: Any) -> TensorBytes:
    data = np.ascontiguousarray(values, np.float32)
    return TensorBytes("F32", data.shape, data.tobytes())


def size_of(snapshot: Snapshot) -> int:
    return sum(tensor.num_bytes for tensor in snapshot.tensors.values())


if __name__ == "__main__":
    main()
