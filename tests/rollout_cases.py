"""Tiny random models as snapshots, and requests, for the engines' tests."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    Lease,
    Reply,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    Task,
    TensorBytes,
)
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Completion, Engine, Outcome, SampleRequest
from echo2.engines.tokenizer import encode_prompt, load_tokenizer
from echo2.rollouts.generate import assignment_of

VOCAB = 31
END = 1
FAMILIES = ("qwen3", "qwen2", "llama")
#: Beside these, the families that `compact` alone knows.
CLASSES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "gemma3_text": "Gemma3",
    "qwen3_5_text": "Qwen3_5",
}
HYBRID = {
    "initializer_range": 0.15,  # transformers' own chunks and steps differ by 1e-4 with larger weights
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


def tiny_module(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model with grouped heads and weights large enough that its distributions are far from uniform."""
    import transformers

    name = CLASSES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if family.endswith("_text") else f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
        "tie_word_embeddings": family in ("qwen3", "gemma3_text"),
        "bos_token_id": None,
        "eos_token_id": END,
    }
    if family in ("qwen3", "gemma3_text", "qwen3_5_text"):
        sizes["head_dim"] = 16
    if family == "qwen3_5_text":
        sizes |= HYBRID
    if family == "smollm3":
        sizes["pad_token_id"] = 0
    torch.manual_seed(seed)
    module = model_class(config_class(**(sizes | changes))).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(".bias") or "norm" in name:  # transformers starts them at 0 and 1: not a test of anything
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def snapshot_of(module: Any, version: int = 0, lineage: int = 1) -> Snapshot:
    """As the learner makes them: tied weights once."""
    tied = module.config.tie_word_embeddings
    tensors = {
        name: TensorBytes("F32", tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in module.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    files = {"config.json": module.config.to_json_string(use_diff=False).encode(), **tokenizer_files()}
    return Snapshot(SnapshotRef(RUN_POLICY, lineage, version), tensors, files)


def tokenizer_files() -> dict[str, bytes]:
    """One token per character of 0123456789abc...: ids from 2 on; 0 = <pad>, 1 = <eos>."""
    vocab = {"<pad>": 0, "<eos>": END} | {c: 2 + i for i, c in enumerate("0123456789abcdefghijklmnop=+?")}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}'
    return {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings}


def tiny_directory(path: Path) -> Path:
    """A random Qwen3 with that tokenizer, as a model directory."""
    tiny_module("qwen3").save_pretrained(path)
    for name, data in tokenizer_files().items():
        (path / name).write_bytes(data)
    return path


@lru_cache(maxsize=1)
def plain_tokenizer() -> Any:
    return load_tokenizer(tokenizer_files())


def assigned(
    lease: Lease, task: Task, params: SamplingParams, environment: str = "", max_turns: int = 1, tokenizer: Any = None
) -> Assignment:
    """As the head leases it."""
    prompt = encode_prompt(task, tokenizer or plain_tokenizer())
    return assignment_of(lease, task, prompt, params, environment, max_turns)


def requests(seed: int, length: int = 5, samples: int = 3, **params: Any) -> list[SampleRequest]:
    """Those of a group: the samples of one prompt."""
    rng = random.Random(seed)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(length)])
    sampling = SamplingParams(**({"max_tokens": 12} | params))
    return [SampleRequest(prompt, seed, sample, sampling) for sample in range(samples)]


def load(engine: Engine, snapshot: Snapshot) -> float:
    """The engine's pause, in seconds."""
    return asyncio.run(engine.update_weights(snapshot))


def outcomes(engine: Engine, asked: Sequence[SampleRequest], together: bool = False) -> list[Outcome]:
    """What comes of these requests, in their order."""

    async def ask() -> list[Outcome]:
        return await asyncio.gather(
            *(engine.submit_together(asked) if together else [engine.submit(request) for request in asked])
        )

    return asyncio.run(ask())


def run(engine: Engine, asked: Sequence[SampleRequest], together: bool = False) -> list[Completion]:
    """The completions of these requests, in their order."""
    found = outcomes(engine, asked, together)
    completions = [one for one in found if isinstance(one, Completion)]
    assert len(completions) == len(found), found
    return completions


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    while not holds():  # noqa: ASYNC110 - a thread does it, not a task
        await asyncio.sleep(0.001)


class Beside:
    """An `Environment` around what answers at once, by number; a test's own never waits in the event loop."""

    def __init__(self, answers: Any) -> None:
        self._answers, self._turn = answers, asyncio.Lock()

    async def start(self) -> str:
        stop: str = self._answers.stop
        return stop

    def begin(self, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {"columns": columns, "seed": seed}

    async def turn_tokens(self, rollout: dict[str, Any]) -> int:
        async with self._turn:
            rollout["number"] = self._answers.begin(rollout["columns"], rollout["seed"])
        tokens: int = self._answers.turn_tokens(rollout["number"])
        return tokens

    async def step(self, rollout: dict[str, Any], action: str) -> Reply:
        async with self._turn:
            return await asyncio.to_thread(self._answers.step, rollout["number"], action)

    def end(self, rollout: dict[str, Any]) -> None:
        if "number" in rollout:
            self._answers.end(rollout["number"])


class Hooked:
    """A `Decoder` around another: calls `before(n)` in the decode thread before its n-th step."""

    def __init__(self, decoder: Any, before: Callable[[int], object]) -> None:
        self._decoder, self._before, self._steps = decoder, before, itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def step(self, added: Mapping[int, SampleRequest], dropped: Sequence[int]) -> list[tuple[int, Completion]]:
        self._before(next(self._steps))
        ended: list[tuple[int, Completion]] = self._decoder.step(added, dropped)
        return ended


def hooked(name: str, before: Callable[[int], object], snapshot: Snapshot, slots: int = 64) -> tuple[DecodeLoop, Any]:
    """An engine with this snapshot and a hook, and its decoder, whose `load` may be called from the hook."""
    from echo2.engines.fake_engine import FakeDecoder
    from echo2.engines.torch_engine import TorchDecoder
    from engine_builders import BUILDERS

    decoder: Any = FakeDecoder()
    if name != "fake":
        decoder = TorchDecoder(BUILDERS[name], "cpu")
    decoder.load(snapshot)
    return DecodeLoop(Hooked(decoder, before), slots), decoder


def hf_logits(module: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence, from scratch."""
    with torch.no_grad():
        logits: torch.Tensor = module(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits
