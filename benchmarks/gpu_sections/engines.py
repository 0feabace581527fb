"""Engines: tokens a second, decoding and reading prompts, and how far their log-probabilities are from the learner's.

The bound of decoding: every step reads all weights once, at the rate of a copy.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from gpu_sections.bench import Bench, Row, snapshot_of

from echo2.core.types import SamplingParams, Snapshot
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, SampleRequest
from echo2.engines.hf_engine import build_transformers
from echo2.engines.torch_engine import TorchDecoder
from echo2.learner.core.datum import Datum
from echo2.learner.core.model import Policy
from echo2.learner.core.trainer import Trainer

BUILD: dict[str, Callable[..., object]] = {"compact": build_compact, "transformers": build_transformers}
PROMPT = 128


def decoder_of(bench: Bench, engine: str, snapshot: Snapshot) -> TorchDecoder:
    """Return an engine's decoder with these weights."""
    decoder = TorchDecoder(BUILD[engine], str(bench.device))  # type: ignore[arg-type]  # both build a Model
    decoder.load(snapshot)
    return decoder


def requests_of(
    vocab: int, count: int, length: int, max_tokens: int, temperature: float = 1.0
) -> dict[int, SampleRequest]:
    """Return requests with random prompts, each of its own."""
    rng = random.Random(0)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    return {
        number: SampleRequest(array("i", [rng.randrange(2, vocab) for _ in range(length)]), number, 0, params)
        for number in range(count)
    }


def run(bench: Bench) -> None:
    """Measure both engines on both shapes."""
    for shape in bench.pick(("0.6B", "1.7B"), ("0.6B",), ("0.6B",)):
        snapshot = snapshot_of(bench.policy(shape, "bfloat16"))
        for engine in BUILD:
            if bench.left() < bench.pick(6.0, 2.0, 0.0):
                bench.record({"shape": shape, "engine": engine, "not_run": "the time was over"})
                continue
            measured(bench, shape, engine, snapshot)


def measured(bench: Bench, shape: str, engine: str, snapshot: Snapshot) -> None:
    """Record tokens a second of one engine, by the number of rollouts."""
    bench.forget_peak()
    started = time.perf_counter()
    decoder = decoder_of(bench, engine, snapshot)
    bench.sync()
    load_seconds, num_bytes = time.perf_counter() - started, sum(t.num_bytes for t in snapshot.tensors.values())
    vocab = bench.values(shape)["vocab_size"]
    row: Row = {"shape": shape, "engine": engine}
    steps, length = bench.pick(64, 16, 4), bench.pick(PROMPT, PROMPT, 8)
    for rollouts in bench.pick((1, 16, 64), (1, 16), (1, 3)):
        found = _decoding(bench, decoder, requests_of(vocab, rollouts, length, 4096), steps)
        bound = bench.ceilings.get("copy_gb_s", 0.0) * 1e9 / num_bytes * rollouts
        share = {"of_bound": found / bound} if bound else {}
        bench.record(row | {"rollouts": rollouts, "tokens_s": found, "bound_tokens_s": bound, **share})
    if engine == "transformers":
        with cudnn_attention():
            found = _decoding(bench, decoder, requests_of(vocab, 16, length, 4096), steps // 4)
        bench.record(row | {"rollouts": 16, "attention": "cuDNN allowed", "tokens_s": found})
    count, length = bench.pick((16, 1024), (4, 1024), (2, 16))
    reading = requests_of(vocab, count, length, 8)
    first = _first(bench, decoder, reading)
    bench.record(
        row
        | {"prompts": f"{count} x {length}", "prefill_tokens_s": count * length / first, "load_seconds": load_seconds}
        | {"load_gb_s": num_bytes / load_seconds / 1e9, "peak_gb": bench.peak() / 1e9}
    )


@contextmanager
def cudnn_attention() -> Iterator[None]:
    """Inside, attention may run in cuDNN, which `pick_device` forbids; torch prefers it on some cards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _decoding(bench: Bench, decoder: TorchDecoder, requests: dict[int, SampleRequest], steps: int) -> float:
    """Return tokens a second; the first tokens, with which prompts are read and kernels found, are not counted."""
    decoder.step(requests, [])
    for _ in range(4):
        decoder.step({}, [])
    bench.sync()
    started = time.perf_counter()
    for _ in range(steps):
        decoder.step({}, [])
    bench.sync()
    seconds = time.perf_counter() - started
    decoder.clear()
    return steps * len(requests) / seconds


def _first(bench: Bench, decoder: TorchDecoder, requests: dict[int, SampleRequest]) -> float:
    """Return the seconds until all have their first token, the second time."""

    def once() -> None:
        decoder.clear()
        decoder.step(requests, [])

    found = bench.seconds(once, repeats=2, warm_up=1)
    decoder.clear()
    return found


def sampled(decoder: TorchDecoder, requests: Sequence[SampleRequest]) -> list[Completion]:
    """Return the completions of these requests, sampled as a worker does."""
    engine = DecodeLoop(decoder, slots=len(requests))

    async def together() -> list[Completion]:
        try:
            done = await asyncio.gather(*engine.submit_together(requests))
        finally:
            await engine.close()
        assert all(isinstance(each, Completion) for each in done), done[0]
        return [each for each in done if isinstance(each, Completion)]

    return asyncio.run(together())


def mismatch(bench: Bench) -> None:
    """Compare log-probabilities of the same tokens under the same weights, at lag 0: the engine's as it drew them in
    bfloat16, and the learner's, whose weights are float32 and whose products are bfloat16. Then both in float32.
    """
    policy = bench.policy("0.6B")
    for engine in BUILD:
        compared(bench, "0.6B", engine, policy, "bfloat16")
    compared(bench, "0.6B", "compact", policy, "float32")


def compared(bench: Bench, shape: str, engine: str, policy: Policy, dtype: str) -> None:
    """Record the log ratios of one engine. If the policy replays the engine's experts: without and with these."""
    bench.forget_peak()
    decoder, routing = decoder_of(bench, engine, snapshot_of(policy, dtype=dtype)), policy.routing
    count, length = bench.pick((32, 256), (8, 32), (3, 8))
    requests = [
        replace(request, params=replace(request.params, routes=routing is not None))
        for request in requests_of(policy.vocab_size, count, bench.pick(PROMPT, PROMPT, 8), length).values()
    ]
    completions = sampled(decoder, requests)
    data = [
        Datum(request.prompt_tokens, done.tokens, b"\x01" * len(done.tokens))
        for request, done in zip(requests, completions, strict=True)
    ]
    before, policy.computes_in_bfloat16 = policy.computes_in_bfloat16, dtype == "bfloat16"
    row: Row = {"shape": shape, "engine": engine, "dtype": dtype}
    bench.record(row | ({} if routing is None else {"replayed": False}) | _log_ratios(bench, policy, data, completions))
    if routing is not None:
        routed = [
            replace(datum, routes=routing.shape.read(done.routes))
            for datum, done in zip(data, completions, strict=True)
        ]
        row |= {"replayed": True, "route_bytes_a_token": routing.shape.token_bytes}
        bench.record(row | _log_ratios(bench, policy, routed, completions))
    policy.computes_in_bfloat16 = before
    torch.set_grad_enabled(True)


def _log_ratios(bench: Bench, policy: Policy, data: Sequence[Datum], completions: Sequence[Completion]) -> Row:
    """Return how far the learner's log-probabilities of these data are from the engine's."""
    trainer = Trainer(bench.pick(16_384, 4096, 256))
    trainer.add("it", policy, is_trained=False)
    found = trainer.forward("it", data)
    theirs = np.concatenate([np.array(done.logprobs, dtype=np.float64) for done in completions])
    ours = np.concatenate([np.array(logprobs) for logprobs in found])
    ratio = np.abs(ours - theirs)
    return {
        "tokens": len(ratio),
        "mean_log_ratio": float(ratio.mean()),
        "p99_log_ratio": float(np.quantile(ratio, 0.99)),
        "largest_log_ratio": float(ratio.max()),
        "bias": float((ours - theirs).mean()),
        "mean_logprob": float(theirs.mean()),
    }
