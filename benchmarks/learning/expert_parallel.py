"""What a step of a mixture of experts costs two ranks: experts that are gathered, or tokens that are exchanged.

    make bench-expert_parallel                      # 68 M parameters, two processes over gloo
    make bench-expert_parallel ARGS='--layers 8'    # 219 M

`gather`: the learner's own ranks (`core/mesh.py`, FSDP2): a layer's experts come to each rank while it computes.
`exchange`: transformers' expert parallelism, `DistributedConfig(ep_size=2, fsdp_size=2)` with all_to_all: each rank has
half of the experts whole, and tokens travel to them. Both compute the same loss of the same tokens in float32, forward
and backward, without an optimizer; the gradients' norms must agree. Seconds are the least of the steps, wall and CPU of
both ranks. Peak: beyond what the rank has after loading and its own rows' gradients. Bytes: what a rank receives.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mixture_loading import EXPERT, EXPERTS, HIDDEN, VOCABULARY, memory, write_model
from recording import child_environment, save
from torch import Tensor, nn

from echo2.core.devices import map_large_blocks
from echo2.learner.core.mesh import Place, join
from echo2.learner.core.model import load_policy

RANKS, CHOSEN, FLOAT_BYTES = 2, 8, 4
ROW_TOKENS = 256


def gather(directory: Path, rank: int) -> tuple[nn.Module, Callable[..., Any]]:
    """The model cut as the learner cuts it, and what runs a computation with it."""
    mesh = join(Place(rank, RANKS, rank, "env://"), torch.device("cpu"))
    policy = load_policy(str(directory), "float32", "cpu", mesh)
    return policy.module, mesh.shard(policy.module)


def exchange(directory: Path, rank: int) -> tuple[nn.Module, Callable[..., Any]]:
    """The model cut by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(ep_size=RANKS, fsdp_size=RANKS, ep_implementation="all_to_all")
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, distributed_config=config)
    return module, lambda compute: compute()


SIDES = {"gather": gather, "exchange": exchange}


def measure(side: str, directory: Path, rank: int, tokens: int, steps: int) -> dict[str, Any]:
    """What each rank does."""
    import torch.distributed as dist

    map_large_blocks()
    torch.set_num_threads(1)
    module, run = SIDES[side](directory, rank)
    module.eval()  # no dropout; gradients are computed all the same
    torch.manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, (tokens // ROW_TOKENS, ROW_TOKENS))

    def loss() -> Tensor:
        logits_BTV = module(input_ids=ids, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids[:, 1:])

    before, seconds, cpu = memory("VmRSS"), list[float](), list[float]()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        value = run(loss)
        value.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    own = [_own(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    squares = torch.stack([gradient.double().square().sum() for gradient in own]).sum()
    dist.all_reduce(squares)
    rows = FLOAT_BYTES * sum(gradient.numel() for gradient in own)
    found = {"seconds": min(seconds), "cpu_seconds": min(cpu), "median_seconds": statistics.median(seconds)}
    found |= {"own_bytes": rows, "peak_bytes": memory("VmHWM") - before - rows}
    found |= {"loss": value.item(), "gradient_norm": squares.sqrt().item()}
    dist.destroy_process_group()
    return found


def _own(gradient: Any) -> Tensor:
    part: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


def received_bytes(side: str, layers: int, tokens: int) -> int:
    """What a rank receives in a step because of its experts: their weights twice and their gradients once, or each
    token's hidden state for its chosen experts there, back, and both again in the backward pass."""
    away = (RANKS - 1) / RANKS
    if side == "gather":
        return round(3 * away * FLOAT_BYTES * layers * 3 * EXPERTS * EXPERT * HIDDEN)
    return round(4 * away * FLOAT_BYTES * layers * tokens * CHOSEN * HIDDEN)


def measured(side: str, directory: Path, tokens: int, steps: int) -> list[dict[str, Any]]:
    """The figures of both ranks."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = str(tried.getsockname()[1])
    common = {**child_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--side", side, "--model", str(directory)]
    words += ["--tokens", str(tokens), "--steps", str(steps)]
    started = [
        subprocess.Popen(
            words, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a rank of {side} failed")
    return [json.loads(text.splitlines()[-1]) for text in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048], help="of each rank, in a step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/expert_parallel-DATE.json)")
    options = parser.parse_args()
    if options.side:
        rank = int(os.environ["RANK"])
        print(json.dumps(measure(options.side, options.model, rank, options.tokens[0], options.steps)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        parameters = write_model(Path(directory), options.layers)
        for tokens in options.tokens * options.rounds:
            for side in SIDES:
                ranks = measured(side, Path(directory), tokens, options.steps)
                row = {"side": side, "tokens": tokens, "received_bytes": received_bytes(side, options.layers, tokens)}
                row |= {name: max(rank[name] for rank in ranks) for name in ("seconds", "median_seconds", "peak_bytes")}
                row |= {"cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks), "ranks": ranks}
                rows.append(row)
                print(
                    f"{side:8} {tokens:6} tokens: {row['seconds']:.2f} s ({row['cpu_seconds']:.2f} of CPU), peak "
                    f"{row['peak_bytes'] / 1e9:.2f} GB, received {row['received_bytes'] / 1e9:.2f} GB, gradient "
                    f"{ranks[0]['gradient_norm']:.6f}",
                    flush=True,
                )
                path = save("expert_parallel", {"parameters": parameters, "rows": rows}, options.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
