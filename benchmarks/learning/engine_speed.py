"""Engines and forms side by side on one model: tokens a second, seconds to install weights, memory, and how far their
logprobs are from those of the published weights.

    make outputs/models/smollm2/config.json       # once; and `make vllm` for the engine vllm
    make bench-engine_speed ARGS='[--model DIR] [--engines compact,transformers,llamacpp-q8_0,vllm] [--groups 16]'
    make bench-engine_speed ARGS='--shape 0.6B'   # random weights in bfloat16, with the tokenizer of --model
    make bench-engine_speed ARGS='--engines mlx,mlx-q8,mlx-q4 --device auto'    # on a Mac

Each engine has a process of its own, with one thread, as a worker has. `tokens_per_second_N`: with N rollouts of 48
tokens at once, by the clock; `per_cpu_second`: by the time of all processors, in which other programs do not count.

    install     the first version: making the engine's model, or starting its server, is part of it
    whole       another version of all weights
    delta       one in which an item in fifty has changed: applying the delta on the disk, and installing
    adapter     of rank 16 on attention and MLP, over a base that is installed
    memory_mb   peak of the process, less what it had before the engine, and what its children hold

`mean_log_ratio` and `largest_log_ratio`: over groups of 8 rollouts, between what an engine says of its tokens and what
the published weights say of them in `compact`, which reads as the learner does. `compact` itself gives what rounding
leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_sections.bench import SHAPES, TINY
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from recording import child_environment, output_of, save, there
from rounded_weights import TOKENS, judged, leased, prompts, snapshot
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from weights_cases import encode_delta, holding

from echo2.config.values import FORMS, ServerPlace
from echo2.core.types import RUN_POLICY, RolloutGroup, SamplingParams, Snapshot, SnapshotRef, TensorBytes
from echo2.engines.engine import Completion, Engine, SampleRequest
from echo2.engines.registry import make_engine
from echo2.rollouts.generate import sample_group
from echo2.weights.format.segments import base_model_of

REPOSITORY = Path(__file__).resolve().parents[2]
SLOTS, CHANGED_EVERY, RANK = (1, 8, 32), 50, 16
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: For a try: what each engine takes, and the vocabulary of SmolLM2.
SMALL = SHAPES["0.6B"] | TINY | {"head_dim": 32, "intermediate_size": 64, "vocab_size": 49_152}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class Clock:
    """Seconds by the clock, and of all processors for this process and those that it started."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._since = (time.perf_counter(), self._cpu())

    def _cpu(self) -> float:
        tree = [self._process, *self._process.children(recursive=True)]
        return float(sum(sum(one.cpu_times()[:4]) for one in tree))

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._since[0], max(1e-3, self._cpu() - self._since[1])


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """One engine's figures, in this process."""
    held, row = snapshot(options.model), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="engine-speed-") as folder:
        place = ServerPlace(options.engine_python, "", ("--max-model-len", "512"), Path(folder))
        before = peak_mb()
        engine = make_engine(options.engine, options.device, max(SLOTS), place)
        try:
            row["install_seconds"] = await timed(lambda: engine.update_weights(held))
            await speed(engine, options.model, 1)  # what it makes at its first tokens
            for slots in SLOTS:
                row |= await speed(engine, options.model, slots)
            row["memory_mb"] = peak_mb() - before + children_mb()
            row |= await distances(engine, held, options)
            row |= await installs(engine, held, options.model)
        finally:
            await engine.close()
    return row


async def timed(act: Callable[[], Awaitable[Any]]) -> float:
    clock = Clock()
    await act()
    return clock.read()[0]


async def speed(engine: Engine, model: Path, slots: int) -> dict[str, float]:
    texts = prompts(model)
    asked = [SampleRequest(texts[at % len(texts)], 7, at, SamplingParams(max_tokens=TOKENS)) for at in range(slots)]
    clock = Clock()
    found = await asyncio.gather(*map(engine.submit, asked))
    seconds, processor = clock.read()
    tokens = sum(len(one.tokens) for one in found if isinstance(one, Completion))
    return {f"tokens_per_second_{slots}": tokens / seconds, f"tokens_per_cpu_second_{slots}": tokens / processor}


async def distances(engine: Engine, held: Snapshot, options: argparse.Namespace) -> dict[str, float]:
    """Of what the engine samples, to the published weights in float32."""
    texts = prompts(options.model)
    asked = [leased(texts[at % len(texts)], 1000 + at) for at in range(options.groups)]
    found = await asyncio.gather(*(sample_group(engine, None, one, "worker") for one in asked))  # type: ignore[arg-type]
    groups = [group for group in found if isinstance(group, RolloutGroup)]
    reader: Any = make_engine("compact", "cpu", max(SLOTS))
    await reader.update_weights(in_float32(held))
    verdicts = await judged(reader, asked, groups, "")
    await reader.close()
    return {
        "log_ratio_tokens": sum(one.num_tokens for one in verdicts),
        "mean_log_ratio": statistics.mean(one.mean_logprob for one in verdicts),
        "largest_log_ratio": max(one.worst_logprob for one in verdicts),
    }


async def installs(engine: Engine, held: Snapshot, model: Path) -> dict[str, float]:
    """Seconds to install further versions."""
    found = {"install_whole_seconds": await timed(lambda: engine.update_weights(numbered(held, 2)))}
    target, content = changed(held, 3), holding(numbered(held, 2))
    manifest, chunks = encode_delta(numbered(held, 2), target)

    async def by_delta() -> None:
        await asyncio.to_thread(content.apply, manifest, chunks.__getitem__)
        await engine.update_weights(content.snapshot())

    found["install_delta_seconds"] = await timed(by_delta)
    base, first, second = adapters(held, model)
    await engine.update_weights(first, base)
    found["install_adapter_seconds"] = await timed(lambda: engine.update_weights(second, base))
    return found


def numbered(held: Snapshot, version: int) -> Snapshot:
    return replace(held, ref=replace(held.ref, version=version))


def in_float32(held: Snapshot) -> Snapshot:
    """What the learner holds."""
    return replace(held, tensors={name: stored("F32", values_of(one)) for name, one in held.tensors.items()})


def values_of(tensor: Any) -> torch.Tensor:
    data = bytearray(tensor.read(0, tensor.num_bytes))
    return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)


def stored(dtype: str, values: torch.Tensor) -> TensorBytes:
    data = values.to(DTYPES[dtype]).contiguous().view(torch.uint8).numpy().tobytes()
    return TensorBytes(dtype, tuple(values.shape), data)


def changed(held: Snapshot, version: int) -> Snapshot:
    """The next version, in which an item in `CHANGED_EVERY` has moved by a hundredth of itself."""
    tensors: dict[str, Any] = {}
    for name, tensor in held.tensors.items():
        values = values_of(tensor).clone()
        values.view(-1)[::CHANGED_EVERY] *= 1.01
        tensors[name] = stored(tensor.dtype, values)
    return replace(numbered(held, version), tensors=tensors)


def adapters(held: Snapshot, model: Path) -> tuple[Snapshot, Snapshot, Snapshot]:
    """The model as a base, and two versions of an adapter over it."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        whole: Any = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LINEARS))
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tuple(one.shape) for name, one in get_peft_model_state_dict(whole).items()}
    said = {key: sorted(v) if isinstance(v, set) else v for key, v in whole.peft_config["default"].to_dict().items()}
    files = {**held.files, "adapter_config.json": json.dumps(said).encode()}
    base = base_model_of(held.tensors, held.files["config.json"])
    versions = [
        Snapshot(
            SnapshotRef(RUN_POLICY, 1, 10 + at),
            {name: stored("F32", 0.01 * torch.randn(shape, generator=generator)) for name, shape in shapes.items()},
            files,
            base,
        )
        for at in range(2)
    ]
    return replace(held, ref=base), versions[0], versions[1]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)


def children_mb() -> float:
    return float(sum(one.memory_info().rss for one in psutil.Process().children(recursive=True))) / (1 << 20)


def shaped(shape: str, model: Path) -> Path:
    """A directory with a model of this shape and random weights in bfloat16, and the tokenizer of another."""
    directory = REPOSITORY / "outputs" / "models" / f"random-{shape}"
    if not (directory / "model.safetensors").is_file():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        Qwen3ForCausalLM(Qwen3Config(**SMALL if shape == "tiny" else SHAPES[shape])).save_pretrained(directory)
        torch.set_default_dtype(torch.float32)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((model / name).read_bytes())
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=there, default=REPOSITORY / "outputs" / "models" / "smollm2")
    parser.add_argument("--shape", choices=("tiny", "0.6B", "1.7B"), help="a model with random weights, in its place")
    parser.add_argument("--engines", default="compact,transformers,llamacpp-q8_0,llamacpp-q4_0,vllm")
    parser.add_argument("--engine-python", default=str(REPOSITORY / ".venv-vllm" / "bin" / "python"), help="of vLLM")
    parser.add_argument("--groups", type=int, default=16, help="of 8 rollouts, for the log ratios")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", help="measure this one, and print it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.engine:
        print(json.dumps(asyncio.run(measured(options))))
        return
    options.model = shaped(options.shape, options.model) if options.shape else options.model
    weights = json.loads((options.model / "config.json").read_text())
    figures: dict[str, Any] = {"model": options.model.name, "dtype": weights.get("dtype"), "device": options.device}
    figures["forms"] = {name: FORMS[name] for name in options.engines.split(",") if name in FORMS}
    for name in options.engines.split(","):
        command = [sys.executable, __file__, "--model", options.model, "--engine", name, "--device", options.device]
        command += ["--engine-python", options.engine_python, "--groups", str(options.groups)]
        told = output_of(list(map(str, command)), env={"OMP_NUM_THREADS": "1", **child_environment()})
        figures.setdefault("engines", {})[name] = json.loads(told.splitlines()[-1])
        print(name, json.dumps(figures["engines"][name]), flush=True)
        path = save("engine_speed", figures, options.out)
    print("saved to", path)


if __name__ == "__main__":
    main()
