"""Log-probabilities and their gradients from hidden states: our tiles, all logits at once, and TRL's chunks.

    make bench-output_layer                    # the full size once each, where it fits; the small one timed
    make bench-output_layer ARGS='--trl-python ~/trl/bin/python --threads 1'

Each measurement is a process of its own: hidden states [n, D] and a weight [V, D] in float32, one loss token a
position, temperature .7, forward and backward. **Memory**: the most that the process held (VmHWM), less what it held
before with hidden states, weight and targets made and torch warm, less the two gradients, which are results. What a
method needs beside is its log-probabilities and all that it makes on the way. **Time**: CPU seconds of one pass (others
may be on the machine), the sides in turn. Ratios are ours over theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
#: (loss tokens, hidden size, vocabulary)
FULL, SMALL = (16_384, 1024, 151_936), (1024, 1024, 151_936)
SIDES = ("tiled", "plain", "trl")
LIMIT_SECONDS = 3600.0
TEMPERATURE = 0.7
TRL_CHUNK = 8192  # tokens of the vocabulary, its own default


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one side. `beside_bytes`: beyond inputs and gradients."""

    side: str
    tokens: int
    forward_cpu_seconds: float
    backward_cpu_seconds: float
    beside_bytes: int
    mean_logprob: float
    weight_gradient_norm: float

    @property
    def cpu_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_cpu_seconds + self.backward_cpu_seconds


def held_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def way(side: str) -> Callable[[Any, Any, Any], Any]:
    """(hidden [n, D], weight [V, D], target [n]) -> log-probabilities [n]."""
    if side == "tiled":
        import torch

        from echo2.learner.core.output_layer import Choice, OutputLayer, tiled_scores

        def tiled(hidden: Any, weight: Any, target: Any) -> Any:
            choice = Choice(torch.arange(len(target)), target[:, None])
            found = tiled_scores(hidden, OutputLayer(weight), [choice], TEMPERATURE)
            return found.chosen[0][:, 0] - found.log_total_u

        return tiled
    if side == "trl":
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        def trl(hidden: Any, weight: Any, target: Any) -> Any:
            found = ChunkedLogProbFunction.apply(
                hidden, weight, None, target, TEMPERATURE, TRL_CHUNK, None, 1.0, ("entropy",)
            )
            return found[0]

        return trl

    def plain(hidden: Any, weight: Any, target: Any) -> Any:
        logits = hidden @ weight.t() / TEMPERATURE
        return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)

    return plain


def child(side: str, size: tuple[int, int, int]) -> Pass:
    """One pass in this process."""
    import torch

    torch.manual_seed(0)
    run, (tokens, width, vocabulary) = way(side), size
    warm_hidden, warm_weight = (torch.randn(shape, requires_grad=True) for shape in ((8, 16), (32, 16)))
    run(warm_hidden, warm_weight, torch.zeros(8, dtype=torch.int64)).sum().backward()
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 0.03).requires_grad_()
    target, factors = torch.randint(vocabulary, (tokens,)), torch.randn(tokens) / tokens
    before, began = held_bytes("VmRSS"), time.process_time()
    logprobs = run(hidden, weight, target)
    middle = time.process_time()
    (logprobs * factors).sum().backward()
    ended = time.process_time()
    assert hidden.grad is not None
    assert weight.grad is not None
    results = 4 * (hidden.numel() + weight.numel())
    beside = held_bytes("VmHWM") - before - results
    norm = float(weight.grad.norm())
    return Pass(side, tokens, middle - began, ended - middle, beside, float(logprobs.detach().mean()), norm)


def measure(side: str, size: tuple[int, int, int], options: argparse.Namespace) -> Pass:
    """`child` in a process of its own."""
    python = options.trl_python if side == "trl" else sys.executable
    threads = str(options.threads)
    done = subprocess.run(
        [python, str(HERE), "--child", side, *map(str, size)],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
    )
    found = Pass(**json.loads(done.stdout.splitlines()[-1]))
    print(
        f"{side:6} {found.tokens:6} tokens {found.cpu_seconds:8.1f} CPU s, beside {found.beside_bytes / 1e6:8.0f} MB",
        flush=True,
    )
    return found


def ratios(passes: list[Pass], over: str) -> list[float]:
    """CPU seconds of ours over those of the pass of `over` beside it, ascending."""
    seconds = {side: [found.cpu_seconds for found in passes if found.side == side] for side in ("tiled", over)}
    return sorted(ours / theirs for ours, theirs in zip(seconds["tiled"], seconds[over], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=4, metavar=("SIDE", "TOKENS", "HIDDEN", "VOCABULARY"), help=argparse.SUPPRESS)
    parser.add_argument("--trl-python", help="Python of an environment with TRL; without it TRL is left out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of the small size, the sides in turn")
    parser.add_argument("--small-tokens", type=int, default=SMALL[0], help="loss tokens of the small size")
    parser.add_argument("--full-vocabulary", type=int, default=FULL[2], help="less, where there is no hour to wait")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    if options.child:
        side, *size = options.child
        print(json.dumps(asdict(child(side, (int(size[0]), int(size[1]), int(size[2]))))))
        return
    from recording import save

    sides = [side for side in SIDES if side != "trl" or options.trl_python]
    small_size = (options.small_tokens, *SMALL[1:])
    small = [measure(side, small_size, options) for _ in range(options.rounds) for side in sides]
    # Plain would need some 4.9 * tokens * vocabulary * 4 bytes: 49 GB at the full size.
    full_size = (*FULL[:2], options.full_vocabulary)
    full = [measure(side, full_size, options) for side in sides if side != "plain"]
    time_ratios = {side: ratios(small, side) for side in sides if side != "tiled"}
    for side, found in time_ratios.items():
        print(f"CPU time, tiled over {side}: {statistics.median(found):.2f} [{found[0]:.2f}, {found[-1]:.2f}]")
    figures = {
        "threads": options.threads,
        "sizes": {"small": small_size, "full": full_size},
        "small": [asdict(one) for one in small],
        "full": [asdict(one) for one in full],
        "cpu_seconds_over": time_ratios,
    }
    print(save("output_layer", figures, options.out))


if __name__ == "__main__":
    main()
