"""The output layer: log-probabilities of 16,384 tokens over 151,936, and their gradients, from hidden states.

Ours by the size of its tiles, and all logits at once in plain torch. Memory: beside inputs and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_sections.bench import Bench, Row
from torch import Tensor
from torch.nn import functional

from echo2.learner.core.output_layer import GPU_TILE, TILE, Choice, OutputLayer, tiled_scores

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Sizes of tiles: positions, tokens of the vocabulary.
TILES = (GPU_TILE, TILE, (2048, 8192), (4096, 16_384), (8192, 8192), (16_384, 8192), (4096, 32_768))


def run(bench: Bench) -> None:
    """Measure all ways."""
    tokens, width, vocab = bench.pick((16_384, 1024, 151_936), (4096, 1024, 151_936), (32, 16, 64))
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, width, device=bench.device) * 0.03).requires_grad_()
    target = torch.randint(vocab, (tokens,), device=bench.device)
    ways: dict[str, Way] = {
        f"tiles of {positions} x {chosen}": partial(tiled, tile=(positions, chosen))
        for positions, chosen in bench.pick(TILES, TILES[:2], TILES[:1])
    }
    ways["plain torch"] = plain
    for name, way in ways.items():
        row: Row = {"way": name, "tokens": tokens, "vocab": vocab}
        try:
            bench.record(row | measured(bench, way, hidden, weight, target))
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            bench.record(row | {"failed": str(error).splitlines()[0][:200]})


def measured(bench: Bench, way: Way, hidden: Tensor, weight: Tensor, target: Tensor) -> Row:
    """Return seconds and memory of one way."""
    hidden.grad = weight.grad = None
    bench.forget_peak()
    before = bench.held()
    found: list[float] = []

    def once() -> None:
        hidden.grad = weight.grad = None
        logp = way(hidden, weight, target)
        (logp.sum() / len(target)).backward()
        found[:] = [float(logp.detach().mean())]

    def forward() -> None:
        with torch.no_grad():
            way(hidden, weight, target)

    seconds = bench.seconds(once, repeats=3, warm_up=1)
    results = hidden.nbytes + weight.nbytes
    return {
        "seconds": seconds,
        "forward_seconds": bench.seconds(forward, repeats=3, warm_up=1),
        "beside_gb": max(0, bench.peak() - before - results) / 1e9,
        "mean_logprob": found[0],
        "tflops": 6 * weight.numel() * len(target) / seconds / 1e12,
    }


def tiled(hidden: Tensor, weight: Tensor, target: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return the log-probabilities, ours."""
    choice = Choice(torch.arange(len(target), device=target.device), target[:, None])
    scores = tiled_scores(hidden, OutputLayer(weight), [choice], tile=tile)
    return scores.chosen[0][:, 0] - scores.log_total_u


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the log-probabilities from all logits."""
    logits = functional.linear(hidden, weight.to(hidden.dtype)).float()
    return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)
