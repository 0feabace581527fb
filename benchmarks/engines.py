"""Tokens per second of requests whose lengths have a long tail: `compact`, vLLM by itself, vLLM as a worker's engine;
one thread each, the same slots and requests, all sides in turn. Then the pause of new weights while requests run.

ECHO2_ENGINE_PYTHON=.venv-vllm/bin/python python benchmarks/engines.py [--requests 128] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import recording
import torch

from echo2.config.engines import ServerPlace
from echo2.rollout.engine import Completion, Engine, SampleRequest
from echo2.rollout.engines import make_engine
from echo2.types import SamplingParams, Snapshot, SnapshotRef, TensorBytes

PYTHON = os.environ.get("ECHO2_ENGINE_PYTHON", "")
SLOTS, PROMPT_TOKENS, VOCAB = 64, 16, 8192
#: Of the completions' lengths: the median, the spread of their logarithms, and the longest.
MEDIAN_TOKENS, LOG_SPREAD, MOST_TOKENS = 48, 0.9, 400
PAUSES = 20
Round = list[tuple[list[int], int]]


def build_model(directory: Path) -> Snapshot:
    """29 M parameters in Qwen3's shape, random, and without an end token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = Qwen3Config(
        vocab_size=VOCAB, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, **sizes, **heads
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    tensors = {
        name: TensorBytes("F32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    print(f"{sum(tensor.num_bytes for tensor in tensors.values()) / 4e6:.1f} M parameters", file=sys.stderr)
    return Snapshot(SnapshotRef("policy", 1, 0), tensors, {"config.json": (directory / "config.json").read_bytes()})


def draw_round(seed: int, num_requests: int) -> Round:
    """Prompts and lengths."""
    rng = random.Random(seed)
    lengths = [
        min(MOST_TOKENS, max(4, int(MEDIAN_TOKENS * rng.lognormvariate(0, LOG_SPREAD)))) for _ in range(num_requests)
    ]
    return [([rng.randrange(2, VOCAB) for _ in range(PROMPT_TOKENS)], length) for length in lengths]


async def sample(engine: Engine, asked: Round) -> tuple[int, float]:
    """Tokens and seconds."""
    started = time.perf_counter()
    requests = [
        SampleRequest(array("i", prompt), place, 0, SamplingParams(max_tokens=length))
        for place, (prompt, length) in enumerate(asked)
    ]
    found = await asyncio.gather(*map(engine.submit, requests))
    tokens = sum(len(one.tokens) for one in found if isinstance(one, Completion))
    assert tokens == sum(length for _, length in asked)
    return tokens, time.perf_counter() - started


async def measure_pauses(engine: Engine, snapshot: Snapshot) -> dict[str, float]:
    """Of weights that come while requests run: seconds of pause, and from the whole snapshot to its first token."""
    pauses, delays = [], []
    for version in range(1, PAUSES + 1):
        running = asyncio.ensure_future(sample(engine, draw_round(version, 16)))
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        ref = SnapshotRef("policy", 1, version)
        pauses.append(await engine.update_weights(Snapshot(ref, snapshot.tensors, snapshot.files)))
        delays.append(time.perf_counter() - started)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    quantiles = {
        "pause_p50": (pauses, 0.5),
        "pause_p95": (pauses, 0.95),
        "delay_p50": (delays, 0.5),
        "delay_p95": (delays, 0.95),
    }
    return {f"{name}_seconds": round(recording.quantile(*of), 4) for name, of in quantiles.items()}


def main() -> None:
    """Print each round, then the means, their ratios and the pauses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        snapshot = build_model(model)
        variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        alone = subprocess.Popen(
            [PYTHON, str(Path(__file__).with_name("engines_alone.py")), str(model), str(SLOTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables,
            text=True,
        )
        ours = make_engine("compact", "cpu", SLOTS)
        server = make_engine("vllm", "cpu", SLOTS, ServerPlace(PYTHON, directory=Path(folder) / "served"))
        for engine in (ours, server):
            asyncio.run(engine.update_weights(snapshot))

        def ask_alone(asked: Round) -> tuple[int, float]:
            assert alone.stdin is not None
            assert alone.stdout is not None
            print(json.dumps(asked), file=alone.stdin, flush=True)
            tokens, seconds = json.loads(alone.stdout.readline())
            return tokens, seconds

        sides: dict[str, Callable[[Round], tuple[int, float]]] = {
            "compact": lambda asked: asyncio.run(sample(ours, asked)),
            "vllm alone": ask_alone,
            "vllm at a worker": lambda asked: asyncio.run(sample(server, asked)),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side(draw_round(0, 4))  # what is done once
        for number in range(options.rounds):
            for name, side in sides.items():
                tokens, seconds = side(draw_round(number, options.requests))
                rates[name].append(round(tokens / seconds, 1))
                print(f"round {number}  {name:<18} {tokens / seconds:8.0f} tokens/s", flush=True)
        pauses = asyncio.run(measure_pauses(server, snapshot))
        asyncio.run(server.close())
        alone.communicate()  # the end of its input ends it, and with it vLLM's own processes
    means: dict[str, Any] = {name: mean(values) for name, values in rates.items()}
    ratios = {
        "compact / vllm alone": means["compact"] / means["vllm alone"],
        "vllm at a worker / vllm alone": means["vllm at a worker"] / means["vllm alone"],
    }
    for name, value in {**ratios, **pauses}.items():
        print(f"{name:<34} {value:.3f}")
    figures = {"requests": options.requests, "slots": SLOTS, "tokens_per_second": rates, "ratios": ratios, **pauses}
    print(recording.save("engines", figures, options.out))


if __name__ == "__main__":
    main()
