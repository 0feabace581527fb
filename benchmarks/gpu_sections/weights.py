"""Weights on their way: encoded, applied, and swapped into an engine that samples.

A step of 1e-6 in the direction of a random sign, as AdamW's first one, is what changes. Gigabytes are of the model in
bfloat16, not of the delta.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_sections.bench import Bench, Row, snapshot_of
from gpu_sections.engines import decoder_of, requests_of

from echo2.core.types import Snapshot
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.torch_engine import TorchDecoder
from echo2.learner.core.model import Policy
from echo2.weights.format.manifest import Manifest
from echo2.weights.format.segments import Encoder
from echo2.weights.store.content import Content

THREADS = 4
RATE = 1e-6
Chunks = dict[bytes, memoryview]


def encode(target: Snapshot, base: Snapshot | None = None) -> tuple[Manifest, Chunks, float]:
    """Return a payload, and the seconds that it took."""
    started = time.perf_counter()
    encoder, chunks = Encoder(target, base, num_threads=THREADS), Chunks()
    for part in encoder.parts():
        chunks |= {name: memoryview(bytes(chunk)) for name, chunk in part.items()}
    return encoder.manifest(), chunks, time.perf_counter() - started


def apply(content: Content, manifest: Manifest, chunks: Chunks) -> float:
    """Apply a payload; return the seconds."""
    started = time.perf_counter()
    content.apply(manifest, chunks.__getitem__)
    return time.perf_counter() - started


def updated(policy: Policy) -> None:
    """Make a step."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randint_like(parameter, 2).mul_(2).sub_(1), alpha=RATE)


def run(bench: Bench) -> None:
    """Measure a whole snapshot, a delta, and a swap."""
    policy = bench.policy("0.6B")
    with tempfile.TemporaryDirectory() as folder:
        content = Content(Path(folder) / "content")
        first = snapshot_of(policy, 1)
        num_bytes = sum(tensor.num_bytes for tensor in first.tensors.values())
        manifest, chunks, seconds = encode(first)
        row: Row = {"model_gb": num_bytes / 1e9, "threads": THREADS, "source": str(bench.device)}
        found = {"encode_gb_s": num_bytes / seconds / 1e9, "payload_mb": manifest.total_bytes / 1e6}
        bench.record(row | found | {"what": "whole", "apply_gb_s": num_bytes / apply(content, manifest, chunks) / 1e9})
        decoder = decoder_of(bench, "compact", content.snapshot())
        updated(policy)
        manifest, chunks, seconds = encode(snapshot_of(policy, 2), content.snapshot())
        found = {"encode_gb_s": num_bytes / seconds / 1e9, "payload_mb": manifest.total_bytes / 1e6}
        bench.record(row | found | {"what": "delta", "apply_gb_s": num_bytes / apply(content, manifest, chunks) / 1e9})
        bench.record(row | beside_training(bench, policy, num_bytes))
        bench.record(row | asyncio.run(swap(bench, decoder, content, policy)))


def beside_training(bench: Bench, policy: Policy, num_bytes: int) -> Row:
    """Encode while the device computes for somebody else, as it does while the next step is trained."""
    side = bench.pick(8192, 4096, 32)
    factor = torch.randn(side, side, device=bench.device, dtype=torch.bfloat16)
    target = snapshot_of(policy, 3)
    bench.sync()
    for _ in range(bench.pick(3000, 300, 3)):  # some seconds of work, queued at once
        factor @ factor
    *_, seconds = encode(target)
    bench.sync()
    return {"what": "whole, beside queued work", "encode_gb_s": num_bytes / seconds / 1e9}


async def swap(bench: Bench, decoder: TorchDecoder, content: Content, policy: Policy) -> Row:
    """Publish while the engine samples: seconds from the learner's weights to the first token that they draw, and the
    longest time between two tokens meanwhile."""
    times: list[tuple[float, int]] = []
    step = decoder.step

    def timed(added: Any, dropped: Any) -> Any:
        done = step(added, dropped)
        assert decoder.installed is not None
        times.append((time.perf_counter(), decoder.installed.version))
        return done

    decoder.step = timed  # type: ignore[method-assign]
    engine = DecodeLoop(decoder, 64)
    rollouts, before = bench.pick(16, 16, 3), bench.pick(1.0, 0.3, 0.02)
    vocab, limit = policy.vocab_size, bench.pick(30_000, 30_000, 400)
    futures = [engine.submit(each) for each in requests_of(vocab, rollouts, 8, limit).values()]
    await asyncio.sleep(before)
    updated(policy)
    bench.sync()
    started = time.perf_counter()
    manifest, chunks, _ = await asyncio.to_thread(encode, snapshot_of(policy, 4), content.snapshot())
    encoded = time.perf_counter()
    await asyncio.to_thread(apply, content, manifest, chunks)
    applied = time.perf_counter()
    pause = await engine.update_weights(content.snapshot())
    installed = time.perf_counter()
    await asyncio.sleep(before)
    for future in futures:
        future.cancel()
    await engine.close()
    ticks = [at for at, _ in times if at >= started - before]
    gaps = [after - at for at, after in itertools.pairwise(ticks)]
    new = [at for at, version in times if version == 4]
    return {
        "what": "swap",
        "rollouts": rollouts,
        "encode_seconds": encoded - started,
        "apply_seconds": applied - encoded,
        "load_seconds": installed - applied,
        "pause_seconds": pause,
        "longest_gap_seconds": max(gaps, default=0.0),
        "median_gap_seconds": sorted(gaps)[len(gaps) // 2] if gaps else 0.0,
        "to_first_token_seconds": new[0] - started if new else None,
    }
