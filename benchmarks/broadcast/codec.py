"""Size and speed of weight deltas on real gradients: AdamW steps of a language model, diffed as workers get them.

    make bench-codec             # 57 M parameters; about ten minutes on two cores
    make bench-codec ARGS='--quick'     # 3 M parameters, one learning rate; checks the benchmark, not the codec

**The change.** A Llama of the usual random initialisation (normal, 0.02) is trained in fp32 with AdamW (betas 0.9,
0.999) on the next byte of this repository's and the standard library's sources, until the loss has fallen and Adam's
moments are those of a run under way. From that state 16 steps are taken at each learning rate. What is diffed is the
bf16 cast of the weights (and the fp32 weights themselves) after 1, 4, 8 and 16 steps against the cast at the start.
How much changes depends on the sizes of the weights as much as on the rate, so the share of changed items is reported.

**The limit** is the entropy of the change, per tensor: `n H(p)` for positions, with p the share of the tensor's n items
that changed, and for values the empirical entropy of the step (difference as integers) over the items that changed.
It is a limit for codes that know of the change only that: a code that looks at the base's values can be below it.

**Against**: XOR and zstd (levels 1 and 3) over the whole, int32 index and raw value without compression, zstd over
the new weights.

**Speed** is bytes of the model (not of the delta) by second of processor time of the one thread that works, from
snapshots in memory to chunks in memory and back, hashes and digests included; median and range of several runs. The
file has the median by the clock as well, which is the same on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from recording import HERE, save
from transformers import LlamaConfig, LlamaForCausalLM
from weights_cases import apply_delta, encode_delta

from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef, TensorBytes
from echo2.weights.format.manifest import Manifest, widths_of
from echo2.weights.format.segments import apply_segment, gather

SEQUENCE = 128
SEQUENCES = 2
WARM_RATE = 3e-4
AFTER_STEPS = (1, 4, 8, 16)
DTYPES = {"bf16": ("BF16", torch.bfloat16, np.uint16), "fp32": ("F32", torch.float32, np.uint32)}
Weights = dict[str, NDArray[Any]]
"""By name, the items read as unsigned integers."""


def text() -> torch.Tensor:
    """Sources as bytes: ours and the standard library's."""
    folders = (HERE.parent / "src", HERE.parent / "tests", Path(sysconfig.get_paths()["stdlib"]))
    files = [path for folder in folders for path in sorted(folder.glob("**/*.py")) if "site-packages" not in path.parts]
    data = b"".join(path.read_bytes() for path in files)[: 32 << 20]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def model_of(quick: bool) -> LlamaForCausalLM:
    hidden, layers = (192, 6) if quick else (768, 8)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class Training:
    """A model on its way: `take` steps of AdamW at some rate, go `back` to where `mark` was called."""

    def __init__(self, quick: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = model_of(quick)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=WARM_RATE, weight_decay=0.01)
        self.losses: list[float] = []
        self._text = text()
        self._draw = torch.Generator().manual_seed(seed)

    def take(self, num_steps: int, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(num_steps):
            starts = torch.randint(len(self._text) - SEQUENCE, (SEQUENCES,), generator=self._draw)
            tokens = torch.stack([self._text[start : start + SEQUENCE] for start in starts]).long()
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def mark(self) -> None:
        self._marked = (
            [tensor.detach().clone() for tensor in self.model.parameters()],
            [{name: value.clone() for name, value in state.items()} for state in self.optimizer.state.values()],
            self._draw.get_state(),
        )

    @torch.no_grad()
    def back(self) -> None:
        weights, states, draw = self._marked
        for parameter, saved in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(saved)
        for state, kept in zip(self.optimizer.state.values(), states, strict=True):
            for name, value in kept.items():
                state[name].copy_(value)
        self._draw.set_state(draw)

    def weights(self, dtype: str) -> Weights:
        _, cast, items = DTYPES[dtype]
        integers = torch.uint16 if items == np.uint16 else torch.uint32
        parameters = self.model.named_parameters()
        return {name: value.detach().to(cast, copy=True).view(integers).numpy() for name, value in parameters}


def snapshot(version: int, weights: Weights, dtype: str) -> Snapshot:
    name = DTYPES[dtype][0]
    tensors = {key: TensorBytes(name, items.shape, items.data) for key, items in weights.items()}
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, {})


def entropy_bits(counts: NDArray[Any]) -> float:
    """Bits that so many draws take at least, if each is coded by the shares of them all."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def change(base: Weights, target: Weights) -> dict[str, float]:
    """Share of items that changed, and bytes of the entropy of where and of how far."""
    changed, total, where, values = 0, 0, 0.0, 0.0
    for name, before in base.items():
        steps = (target[name] - before).reshape(-1)
        steps = steps[steps != 0]
        where += entropy_bits(np.array([steps.size, before.size - steps.size]))
        values += entropy_bits(np.unique(steps, return_counts=True)[1])
        changed, total = changed + steps.size, total + before.size
    return {"changed": changed / total, "num_changed": changed, "where_bytes": where / 8, "value_bytes": values / 8}


def timed(work: Callable[[], Any], repeats: int, num_bytes: int) -> dict[str, float]:
    """GB of the model by second of this thread's processor time (median, least, most) and of the clock (median)."""
    by_core, by_clock = [], []
    for _ in range(repeats):
        clock, core = time.perf_counter(), time.thread_time()
        work()
        by_core.append(num_bytes / (time.thread_time() - core) / 1e9)
        by_clock.append(num_bytes / (time.perf_counter() - clock) / 1e9)
    median = statistics.median(by_core)
    return {"median": median, "min": min(by_core), "max": max(by_core), "by_clock": statistics.median(by_clock)}


def case(base: Weights, target: Weights, dtype: str, repeats: int) -> dict[str, Any]:
    """One row: sizes relative to the full weights in this dtype, and speeds."""
    before, after = snapshot(1, base, dtype), snapshot(2, target, dtype)
    manifest, chunks = encode_delta(before, after)
    full = sum(items.nbytes for items in base.values())
    applied = apply_delta(manifest, before, chunks.__getitem__)
    if any(bytes(applied.tensors[name].read(0, items.nbytes)) != items.tobytes() for name, items in target.items()):
        raise SystemExit("the applied delta is not the target")
    row: dict[str, Any] = change(base, target)
    row["full_bytes"] = full
    row["delta_bytes"] = manifest.total_bytes
    row["manifest_bytes"] = len(manifest.text)
    row["entropy_bytes"] = row["where_bytes"] + row["value_bytes"]
    row["over_entropy"] = row["delta_bytes"] / row["entropy_bytes"]
    row.update(others(base, target, row["num_changed"]))
    row["encode_gb_s"] = timed(lambda: encode_delta(before, after), repeats, full)
    row["apply_gb_s"] = timed(lambda: apply_all(manifest, before, chunks), repeats, full)
    return row


def apply_all(manifest: Manifest, base: Snapshot, chunks: Mapping[bytes, memoryview]) -> None:
    """Each segment over its base, verified."""
    widths, bases = widths_of(manifest.tensors, manifest.extents), gather(base.tensors, manifest.extents)
    for segment, width, items in zip(manifest.segments, widths, bases, strict=True):
        apply_segment(segment, width, items, chunks.__getitem__)


def others(base: Weights, target: Weights, num_changed: int) -> dict[str, int]:
    """Bytes that the plain ways take."""
    old = np.concatenate([items.reshape(-1) for items in base.values()])
    new = np.concatenate([items.reshape(-1) for items in target.values()])
    difference = (old ^ new).tobytes()
    return {
        "xor_zstd1_bytes": len(zstandard.ZstdCompressor(level=1).compress(difference)),
        "xor_zstd3_bytes": len(zstandard.ZstdCompressor(level=3).compress(difference)),
        "index_value_bytes": num_changed * (4 + new.itemsize),
        "full_zstd3_bytes": len(zstandard.ZstdCompressor(level=3).compress(new.tobytes())),
    }


def rows(options: argparse.Namespace, training: Training) -> Iterator[dict[str, Any]]:
    training.mark()
    base = {dtype: training.weights(dtype) for dtype in DTYPES}
    for rate in options.rates:
        training.back()
        done = 0
        for steps in AFTER_STEPS:
            training.take(steps - done, rate)
            done = steps
            for dtype in DTYPES if steps in (1, 16) else ("bf16",):
                row = case(base[dtype], training.weights(dtype), dtype, options.repeats)
                yield {"dtype": dtype, "rate": rate, "steps": steps, **row}


def shown(row: dict[str, Any]) -> str:
    full = row["full_bytes"]
    sizes = " ".join(f"{100 * row[name] / full:7.3f}" for name in ("delta_bytes", "entropy_bytes", "xor_zstd3_bytes"))
    plain = " ".join(f"{100 * row[name] / full:7.2f}" for name in ("index_value_bytes", "full_zstd3_bytes"))
    return (
        f"{row['dtype']} {row['rate']:.0e} {row['steps']:3d} {100 * row['changed']:8.3f} {sizes} {plain} "
        f"{row['over_entropy']:6.3f} {row['encode_gb_s']['median']:6.2f} {row['apply_gb_s']['median']:6.2f}"
    )


HEADER = (
    "dtype rate steps  changed   delta entropy xor+zst idx+val full+zs  over H encode  apply\n"
    "                        %   % of full ...                                      x   GB/s   GB/s"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--warm-steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/codec-DATE.json)")
    options = parser.parse_args()
    if options.quick:
        options.rates, options.warm_steps, options.repeats = options.rates[:1], 10, 2

    training = Training(options.quick, options.seed)
    num_parameters = sum(value.numel() for value in training.model.parameters())
    training.take(options.warm_steps, WARM_RATE)
    losses = training.losses
    print(
        f"{num_parameters} parameters, loss {losses[0]:.3f} -> {statistics.mean(losses[-10:]):.3f}\n{HEADER}",
        flush=True,
    )
    table = []
    for row in rows(options, training):
        print(shown(row), flush=True)
        table.append(row)
    result = {
        "model": {
            "parameters": num_parameters,
            "kind": "Llama, random, normal 0.02",
            "tokens_a_step": SEQUENCE * SEQUENCES,
        },
        "warm_up": {"steps": options.warm_steps, "rate": WARM_RATE, "losses": losses},
        "threads": f"codec 1, training {torch.get_num_threads()}",
        "rows": table,
    }
    if not options.quick or options.out:
        print(f"written to {save('codec', result, options.out)}")


if __name__ == "__main__":
    main()
