"""What telling of the k most likely tokens costs (score centering): a worker's draw, a group's bytes, the head's check,
the learner's logprobs. Each beside the same without, in turn, in one go.

    python benchmarks/top_logprobs.py [--vocabulary 151936] [--hidden 256] [--rounds 5] [--out FILE]

One process, one thread. A draw is of 32 rows of random logits; a group is 8 rollouts of 128 tokens; the learner goes
from 128 random hidden states to their tokens' logprobs and back to the gradients of these and of the output weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import save

from echo2.core.types import RUN_POLICY, GroupRef, Rollout, RolloutGroup, SamplingParams
from echo2.engines.random_streams import stream_keys
from echo2.engines.sampler import Draw, Sampler
from echo2.learner.core.output_layer import Choice, OutputLayer, tiled_scores
from echo2.transport import messages
from echo2.transport.codecs import check_top

WIDTHS = (0, 8, 32, 128, 1024)
ROWS, ROLLOUTS, TOKENS = 32, 8, 128


def drawn(logits_BV: torch.Tensor, width: int) -> Draw:
    """A token for each row, with its most likely ones."""
    keys, places = stream_keys([0] * ROWS, range(ROWS)), np.zeros(ROWS, dtype=np.int64)
    return Sampler(keys, [SamplingParams(top_logprobs=width)] * ROWS, logits_BV.device).draw(logits_BV, places)


def group_of(draw: Draw) -> RolloutGroup:
    """Rollouts whose tokens were drawn so, over and over."""
    rows, tops = [at % ROWS for at in range(TOKENS)], draw.tops
    rollout = Rollout(
        tokens=array("i", [int(draw.tokens_B[row]) for row in rows]),
        logprobs=array("f", [float(draw.logprobs_B[row]) for row in rows]),
        loss_mask=b"\1" * TOKENS,
        version_spans=((0, 0),),
        finish="length",
        top_tokens=array("i", b"".join(tops[row][0].tobytes() for row in rows if tops)),
        top_logprobs=b"".join(tops[row][1].tobytes() for row in rows if tops),
    )
    return RolloutGroup(GroupRef(RUN_POLICY, "train", 0), 0, 1, 0, array("i", [1]), (rollout,) * ROLLOUTS)


def train(hidden_uD: torch.Tensor, layer: OutputLayer, draw: Draw) -> None:
    """Logprobs of the drawn and the likely tokens of each position, and the gradient of their sum."""
    rows = [at % ROWS for at in range(TOKENS)]
    tokens = [[draw.tokens_B[row], *(draw.tops[row][0] if draw.tops else ())] for row in rows]
    choice = Choice(torch.arange(TOKENS), torch.tensor(np.array(tokens, dtype=np.int64)))
    scores = tiled_scores(hidden_uD, layer, [choice])
    (scores.chosen[0] - scores.log_total_u[:, None]).sum().backward()


def timed(work: Callable[[], object]) -> float:
    """Seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure(vocabulary: int, hidden: int, rounds: int) -> dict[int, dict[str, Any]]:
    """By width: seconds of each part, over the rounds, and bytes."""
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3.0 * torch.randn(ROWS, vocabulary, generator=generator)
    hidden_uD = torch.randn(TOKENS, hidden, generator=generator).requires_grad_()
    layer = OutputLayer(torch.randn(vocabulary, hidden, generator=generator).mul_(0.1).requires_grad_())
    found: dict[int, dict[str, Any]] = {width: {"draw": [], "check": [], "train": []} for width in WIDTHS}
    for number in range(-1, rounds):  # the first warms up
        for width in WIDTHS:
            draw = drawn(logits_BV, width)
            group = group_of(draw)
            parts = {
                "draw": timed(partial(drawn, logits_BV, width)),
                "check": timed(partial(check_top, group, width, vocabulary)),
                "train": timed(partial(train, hidden_uD, layer, draw)),
            }
            if number >= 0:
                for name, seconds in parts.items():
                    found[width][name].append(seconds)
                num_bytes = len(messages.encode_group(group).SerializeToString())
                found[width]["bytes_per_token"] = num_bytes / (ROLLOUTS * TOKENS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.vocabulary, options.hidden, options.rounds)
    bare = dict(found[0])
    for width, parts in found.items():
        for name in ("draw", "check", "train"):
            seconds = parts[name]
            ratios = [one / other for one, other in zip(seconds, bare[name], strict=True)]
            parts[name] = {"median_ms": 1e3 * statistics.median(seconds), "max_ms": 1e3 * max(seconds)}
            if name != "check":
                parts[name] |= {"ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}
        texts = [
            f"{name} {parts[name]['median_ms']:.1f} ms"
            + (f" ({parts[name]['ratio']:.2f} times)" if name != "check" else "")
            for name in ("draw", "train", "check")
        ]
        print(f"k = {width}: {parts['bytes_per_token']:.0f} bytes a token; {', '.join(texts)}")
    settings = {"vocabulary": options.vocabulary, "hidden": options.hidden, "rounds": options.rounds}
    print(f"figures are in {save('top_logprobs', {'settings': settings, 'by_width': found}, options.out)}")


if __name__ == "__main__":
    main()
