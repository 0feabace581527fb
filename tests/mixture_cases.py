"""A tiny mixture of experts, its snapshots, and groups that are sampled from it with their routes."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    TensorBytes,
)
from echo2.engines.engine import Engine
from echo2.engines.registry import make_engine
from echo2.learner.core.datum import Datum
from echo2.learner.grpo.data import group_data
from echo2.rollouts.generate import sample_group
from echo2.transport.routes import Routes, RouteShape, packed
from learner_cases import random_group
from rollout_cases import VOCAB, plain_tokenizer, tokenizer_files

LAYERS, EXPERTS, CHOSEN = 3, 8, 2
SHAPE = RouteShape(LAYERS, CHOSEN, EXPERTS)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MIXTURE = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16}


def mixture(seed: int = 0, **changes: Any) -> Any:
    """A Qwen3-MoE with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE, **changes)).eval()


def dense() -> Any:
    """A Qwen3 of the same sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


def snapshot(module: Any, version: int = 0, is_half: bool = False) -> Snapshot:
    tensors = {}
    for name, tensor in module.state_dict().items():
        kept = tensor.detach().to(torch.bfloat16 if is_half else torch.float32).contiguous()
        raw = kept.flatten().view(torch.uint8).numpy().tobytes()
        tensors[name] = TensorBytes("BF16" if is_half else "F32", tuple(tensor.shape), raw)
    files = {"config.json": module.config.to_json_string(use_diff=False).encode(), **tokenizer_files()}
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), tensors, files)


def engine_with(*snapshots: Snapshot) -> Engine:
    engine = make_engine("transformers", "cpu")
    for one in snapshots:
        asyncio.run(engine.update_weights(one))
    return engine


def leased(seed: int, num_samples: int = 4, max_tokens: int = 24, **params: Any) -> Assignment:
    rng = random.Random(seed)
    prompt = array("i", [rng.randrange(2, VOCAB) for _ in range(6)])
    lease = Lease(1, GroupRef(RUN_POLICY, "train", seed), 0, seed, num_samples, 0, None, 60.0, 60.0, 12345 + seed)
    return Assignment(lease, prompt, SamplingParams(**{"max_tokens": max_tokens, "routes": True} | params))


def sampled(engine: Engine, *assignments: Assignment) -> list[RolloutGroup]:
    """The groups of these leases, sampled together, with rewards."""

    async def all_of() -> list[Any]:
        return await asyncio.gather(*(sample_group(engine, plain_tokenizer(), one, "w") for one in assignments))

    groups: list[RolloutGroup] = asyncio.run(all_of())
    return [
        replace(group, rollouts=tuple(replace(one, reward=float(at % 2)) for at, one in enumerate(group.rollouts)))
        for group in groups
    ]


def data_of(groups: Sequence[RolloutGroup], with_routes: bool = True) -> list[Datum]:
    return [
        datum
        for group in groups
        for datum in group_data(group, 0, "dr_grpo", "token", True, SHAPE if with_routes else None).data
    ]


def any_routes(rng: random.Random, num_tokens: int) -> Routes:
    """Different experts for each layer of each token."""
    ids = [rng.sample(range(EXPERTS), CHOSEN) for _ in range(num_tokens * LAYERS)]
    return np.array(ids, np.uint8).reshape(num_tokens, LAYERS, CHOSEN)


def groups_of(seed: int = 0, with_routes: bool = True) -> list[RolloutGroup]:
    """Random groups with any routes; where rollouts share tokens they share routes, as one pass gives them."""
    rng = random.Random(seed)
    groups = [random_group(rng, number, samples=4, longest=9) for number in range(3)]
    return [_routed(group, rng) if with_routes else group for group in groups]


def _routed(group: RolloutGroup, rng: random.Random) -> RolloutGroup:
    tree: dict[tuple[int, ...], bytes] = {}
    rollouts = []
    for rollout in group.rollouts:
        tokens, ids = [*group.prompt_tokens, *rollout.tokens][:-1], b""
        for end in range(1, len(tokens) + 1):
            ids += tree.setdefault(tuple(tokens[:end]), any_routes(rng, 1).tobytes())
        rollouts.append(replace(rollout, routes=ids))
    return packed(replace(group, rollouts=tuple(rollouts)))
