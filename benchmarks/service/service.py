"""The service's back end: a training step, samples at once, conversations, a new sampler, and many tenants.

    make bench-service        # two sizes of random Qwen3; a learner and a sampler process, one thread each
    make bench-service ARGS='--quick'

Everything goes through the contract that the HTTP front calls (`src/echo2_service/backend.py`), so these are its
figures without HTTP. Warm: what is measured was done once before. A step is forward_backward on 8 x 128 tokens and an
AdamW step, a rank 8 adapter on all linear layers. A conversation is 16 calls, which grow by 104 tokens each: of one
owner, and of others, for whom all is read anew. Fairness is the slowest tenant's steps over the fastest's in the same
seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import recording

from echo2_service.backend import (
    AdamSettings,
    ClientDatum,
    CreateModelCall,
    ForwardBackwardCall,
    ModelSpec,
    OptimStepCall,
    PublishCall,
    SampleSpec,
)
from echo2_service.fleet.machines import LocalBackend

#: Calls of a conversation.
TURNS = 16
#: Hidden size, layers, vocabulary.
SIZES = {"0.2M": (64, 2, 1024), "4M": (256, 4, 4096)}
ADAM = AdamSettings(1e-4)


def make_model(path: Path, size: tuple[int, int, int]) -> int:
    """A random Qwen3; its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, vocab = size
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=max(1, hidden // 64),
            head_dim=32,
            intermediate_size=3 * hidden,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )
    module.save_pretrained(path)
    return int(module.num_parameters())


class Trial:
    """One back end and one size."""

    def __init__(self, backend: LocalBackend, vocab: int, out: Path) -> None:
        self.backend, self.vocab, self.out = backend, vocab, out
        self.rng = random.Random(0)
        self.operations: dict[str, int] = {}

    def operation(self, model: str) -> int:
        self.operations[model] = self.operations.get(model, 0) + 1
        return self.operations[model]

    def tokens(self, count: int) -> array[int]:
        return array("i", [self.rng.randrange(self.vocab) for _ in range(count)])

    async def add(self, model: str) -> None:
        await self.backend.call(CreateModelCall(model, ModelSpec("base", owner=model, rank=8)))
        await self.step(model)

    async def step(self, model: str) -> float:
        """Both calls are made before the first is answered, as clients do; seconds until that."""
        data = []
        for _ in range(8):
            tokens = self.tokens(129)
            data.append(ClientDatum(tokens[:-1], tokens[1:], array("d", [1.0]) * 128))
        began = time.perf_counter()
        call = ForwardBackwardCall(model, self.operation(model), data, "cross_entropy", {})
        forward = asyncio.create_task(self.backend.call(call))
        step = asyncio.create_task(self.backend.call(OptimStepCall(model, self.operation(model), ADAM)))
        await forward
        seconds = time.perf_counter() - began
        await step
        return seconds

    async def first_token(self) -> float:
        """Seconds until one token behind 32 is sampled from the base model."""
        began = time.perf_counter()
        await self.backend.sample("base", None, SampleSpec(self.tokens(32), max_tokens=1))
        return time.perf_counter() - began

    async def samples(self, snapshot: Path | None, concurrent: int) -> None:
        specs = [SampleSpec(self.tokens(32), max_tokens=64, seed=at, ends_with_model=False) for at in range(concurrent)]
        await asyncio.gather(*(self.backend.sample("base", snapshot, spec) for spec in specs))

    async def conversation(self, snapshot: Path | None, owners: Sequence[str]) -> None:
        """One call for each owner, one after the other: each with all that was said before, 96 tokens more, and 8
        sampled. An owner that calls again has the tokens of its earlier calls read already."""
        said = array("i")
        for owner in owners:
            said += self.tokens(96)
            spec = SampleSpec(array("i", said), max_tokens=8, ends_with_model=False, owner=owner)
            (sequence,) = (await self.backend.sample("base", snapshot, spec)).sequences
            said += sequence.tokens

    async def new_sampler(self, model: str) -> None:
        """Published, and a token sampled from it."""
        operation = self.operation(model)
        path = self.out / f"{model}-{operation}"
        await self.backend.call(PublishCall(model, operation, str(path)))
        await self.backend.sample("base", path, SampleSpec(self.tokens(8), max_tokens=1))

    async def together(self, models: list[str], seconds: float) -> dict[str, Any]:
        """All tenants step and sample a token, without a pause, for so long."""
        counts, until = dict.fromkeys(models, 0), time.perf_counter() + seconds
        forwards, tokens = list[float](), list[float]()

        async def tenant(model: str) -> None:
            while time.perf_counter() < until:
                forwards.append(await self.step(model))
                tokens.append(await self.first_token())
                counts[model] += 1

        began = time.perf_counter()
        await asyncio.gather(*map(tenant, models))
        took = time.perf_counter() - began
        return {
            "tokens_per_second": round(sum(counts.values()) * 1024 / took),
            "fairness": round(min(counts.values()) / max(counts.values()), 3),
            "steps": sorted(counts.values()),
            "forward_backward_seconds_p50_p95_p99": quantiles(forwards),
            "first_token_seconds_p50_p95_p99": quantiles(tokens),
        }


def quantiles(seconds: list[float]) -> list[float]:
    """How long one waits: half of the times, and all but 5 and but 1 of 100."""
    return [round(recording.quantile(seconds, share), 4) for share in (0.5, 0.95, 0.99)]


async def timed(action: Callable[[], Awaitable[object]], times: int) -> list[float]:
    """Seconds of each time, after one that is not counted."""
    await action()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        await action()
        found.append(time.perf_counter() - began)
    return found


def spread(seconds: list[float], work: float = 0.0) -> dict[str, float]:
    """Median and quartiles of seconds, or of work a second."""
    values = [work / each for each in seconds] if work else seconds
    middle = statistics.median(values)
    return {
        "median": round(middle, 4),
        "low": round(recording.quantile(values, 0.25), 4),
        "high": round(recording.quantile(values, 0.75), 4),
    }


async def measure(size: str, folder: Path, quick: bool) -> dict[str, Any]:
    """All figures of one size."""
    parameters = make_model(folder / "base", SIZES[size])
    backend = LocalBackend({"base": str(folder / "base")}, folder / "run", "cpu")
    trial, times, found = Trial(backend, SIZES[size][2], folder), 3 if quick else 15, dict[str, Any]()
    try:
        await trial.add("a")
        found["parameters"] = parameters
        found["step_seconds"] = spread(await timed(lambda: trial.step("a"), times))
        found["new_sampler_seconds"] = spread(await timed(lambda: trial.new_sampler("a"), times))
        snapshot = folder / f"a-{trial.operations['a']}"
        for concurrent in (1, 16, 64):
            seconds = await timed(partial(trial.samples, snapshot, concurrent), max(2, times // 3))
            found[f"sample_{concurrent}_tokens_per_second"] = spread(seconds, 64 * concurrent)
        one, others = ["one"] * TURNS, [f"owner-{turn}" for turn in range(TURNS)]
        for kind, owners in (("its_own", one), ("others", others)):
            seconds = await timed(partial(trial.conversation, snapshot, owners), max(2, times // 3))
            found[f"conversation_of_{kind}_seconds"] = spread(seconds)
        for count in (1, 4, 16):
            models = [f"t{number}" for number in range(count)]
            await asyncio.gather(*(trial.add(model) for model in models if model not in trial.operations))
            found[f"tenants_{count}"] = await trial.together(models, 2.0 if quick else 10.0)
    finally:
        await backend.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            figures[size] = asyncio.run(measure(size, Path(folder), options.quick))
        print(size, figures[size])
    print(recording.save("service", figures, options.out))


if __name__ == "__main__":
    main()
