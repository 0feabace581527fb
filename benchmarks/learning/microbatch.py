"""Tokens a second of the learner, and its peak memory beside the forecast, by the size of a micro-batch.

    make bench-microbatch                      # 60 M parameters on the CPU; Qwen3-0.6B's shape on a GPU
    make bench-microbatch ARGS='--ways'        # one size, in each way to save memory: 210 M parameters; Qwen3-0.6B's

Each size, with activations kept and computed again, is a process of its own: two steps of two micro-batches, random
weights. Peak: the process's on a CPU, the allocator's on a GPU. Tokens a second: of the second step's passes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from recording import child_environment, save

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 32_768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
REAL = SMALL | {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
#: Of `--ways`.
MIDDLE = REAL | {"vocab_size": 32_768, "num_hidden_layers": 12}
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "all, moments of 8 bits": {"quantised": "moments"},
    "all, moments offloaded": {"offloaded": "moments"},
    "all, gradients and moments offloaded": {"offloaded": "moments and gradients"},
    "adapter": {"lora_rank": 16},
    "adapter, base in 4 bits": {"lora_rank": 16, "quantised": "base"},
}
ROW_TOKENS = 256
TOKENS = {"cpu": (512, 1024, 2048, 4096), "cuda": (2048, 4096, 8192, 16_384, 32_768)}


def measured(
    sizes: dict[str, Any], tokens: int, checkpointing: bool, device: str, compute: str, way: str = "all"
) -> dict[str, float]:
    """Bytes at the peak and forecast, tokens a second, and seconds of an update, of a learner in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from echo2.config.sections import LoraConfig
    from echo2.core.types import Snapshot, SnapshotRef
    from echo2.learner.core.adapters import BaseModel
    from echo2.learner.core.datum import Datum
    from echo2.learner.core.model import Policy
    from echo2.learner.core.quantised import quantise
    from echo2.learner.core.trainer import AdamParams, Trainer
    from echo2.learner.decide.memory import LearnerSetup
    from echo2.learner.decide.model_shape import read_shape

    place = torch.device(device)
    with place:
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), attn_implementation="sdpa")
    policy, rng, how = Policy(module, {}, place), random.Random(0), WAYS[way]
    if how.get("quantised") == "base":
        quantise(policy.module)
    if rank := how.get("lora_rank", 0):
        policy = BaseModel(policy, Snapshot(SnapshotRef("", 0, 0), {}, {})).adapter(LoraConfig(rank=rank), 0)
    _forget_peak(device)
    policy.computes_in_bfloat16 = compute == "bfloat16"
    if checkpointing:
        policy.checkpoint_activations()
    trainer = Trainer(tokens)
    trainer.add("it", policy, True, how.get("quantised") == "moments", how.get("offloaded", ""))
    rows = [
        array("i", [rng.randrange(sizes["vocab_size"]) for _ in range(ROW_TOKENS + 1)])
        for _ in range(tokens // ROW_TOKENS)
    ]
    data = [Datum(row[:64], row[64:], b"\x01" * (len(row) - 64)) for row in rows]
    seconds = update = 0.0
    for _ in range(2):  # the first step makes gradients and moments; the second adds to them
        started = time.perf_counter()
        for _ in range(2):
            trainer.forward_backward("it", data, lambda logp_n, _: (-logp_n, None))
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        trainer.optim_step("it", AdamParams(1e-6))
        update = time.perf_counter() - started
    shape = read_shape(sizes)
    assert shape is not None
    assert trainer.tokens_per_microbatch == tokens  # memory has not run out
    if device == "cpu":  # what is offloaded is in the same memory
        how = how | {"offloaded": ""}
    setup = LearnerSetup(shape, policy.computes_in_bfloat16, on_gpu=device == "cuda", base_bytes=4, **how)
    forecast = setup.needed(tokens, checkpointing)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _peak_bytes()
    return {"peak": peak, "forecast": forecast, "tokens_per_second": 2 * tokens / seconds, "update": update}


def _forget_peak(device: str) -> None:
    import torch

    from echo2.core.devices import map_large_blocks

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        map_large_blocks()
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def case(
    sizes: dict[str, Any], tokens: int, checkpointing: bool, device: str, compute: str, way: str = "all"
) -> dict[str, float]:
    """`measured` in a process of its own."""
    words = [sys.executable, __file__, "--case", json.dumps([sizes, tokens, checkpointing, device, compute, way])]
    done = subprocess.run(words, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", action="store_true", help="all ways to train, with one size of micro-batches")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(*json.loads(options.case))))
        return
    sizes = REAL if options.device == "cuda" else SMALL
    compute = "bfloat16" if options.device == "cuda" else "float32"
    asked = [(tokens, checkpointing, "all") for tokens in TOKENS[options.device] for checkpointing in (False, True)]
    if options.ways:
        sizes = REAL if options.device == "cuda" else MIDDLE
        asked = [(TOKENS[options.device][0], True, way) for way in WAYS]
    rows = []
    for tokens, checkpointing, way in asked * options.rounds:
        found = case(sizes, tokens, checkpointing, options.device, compute, way)
        rows.append({"tokens": tokens, "checkpointing": checkpointing, "way": way, **found})
        print(
            f"{way}, {tokens:6} tokens, activations {'computed again' if checkpointing else 'kept':14} "
            f"{found['tokens_per_second']:8.0f} tokens/s, update {found['update']:.2f} s, peak "
            f"{found['peak'] / 1e9:.2f} GB, {found['peak'] / found['forecast']:.2f} of the forecast",
            flush=True,
        )
    save("microbatch", {"model": sizes, "device": options.device, "compute": compute, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
