"""Tiny random Llama, Qwen2 and Qwen3 models as snapshots, and requests, for the engines' tests."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.rollout.engine import Completion, Engine, Outcome, SampleRequest
from echo2.rollout.generate import assignment_of
from echo2.rollout.tokenizer import encode_prompt, load_tokenizer
from echo2.types import Assignment, Lease, SamplingParams, Snapshot, SnapshotRef, Task, TensorBytes

VOCAB = 31
END = 1
FAMILIES = ("qwen3", "qwen2", "llama")


def tiny_module(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model with grouped heads and weights large enough that its distributions are far from uniform."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": None,
        "eos_token_id": END,
    }
    if family == "qwen3":
        sizes["head_dim"] = 16
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
    return Snapshot(SnapshotRef(lineage, version), tensors, files)


def tokenizer_files() -> dict[str, bytes]:
    """One token per character of 0123456789abc...: ids from 2 on; 0 = <pad>, 1 = <eos>."""
    vocab = {"<pad>": 0, "<eos>": END} | {c: 2 + i for i, c in enumerate("0123456789abcdefghijklmnop=+?")}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    settings = b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}'
    return {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": settings}


@lru_cache(maxsize=1)
def plain_tokenizer() -> Any:
    return load_tokenizer(tokenizer_files())


def assigned(
    lease: Lease, task: Task, params: SamplingParams, environment: str = "", max_turns: int = 1, tokenizer: Any = None
) -> Assignment:
    """As the head leases it."""
    prompt = encode_prompt(task, tokenizer or plain_tokenizer())
    return assignment_of(lease, task, prompt, params, environment, max_turns)


def request(seed: int, length: int = 5, samples: int = 3, **params: Any) -> SampleRequest:
    rng = random.Random(seed)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(length)])
    return SampleRequest(prompt, samples, seed, SamplingParams(**({"max_tokens": 12} | params)))


def run(engine: Engine, requests: Sequence[SampleRequest]) -> dict[int, list[Completion]]:
    """Completions by request, in the order in which they ended."""
    outcomes: dict[int, list[Completion]] = {}

    def keep(index: int, outcome: Outcome) -> None:
        assert isinstance(outcome, list)
        assert index not in outcomes
        outcomes[index] = outcome

    engine.generate(requests, keep, lambda: False)
    return outcomes


def hf_logits(module: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence, from scratch."""
    with torch.no_grad():
        logits: torch.Tensor = module(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits
