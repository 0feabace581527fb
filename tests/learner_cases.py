"""A tiny random Qwen3, random rollout groups and what a trainer made of them, for the learner's tests."""

from __future__ import annotations

import functools
import math
import random
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echo2.config import Config
from echo2.core.types import RUN_POLICY, GroupRef, Rollout, RolloutGroup
from echo2.learner.core.batch import Layout
from echo2.learner.core.datum import Datum
from echo2.learner.core.losses import LossTokens
from echo2.learner.core.model import Policy, load_policy
from echo2.learner.grpo.loop import GrpoClient

VOCAB = 13
TEXTS = tuple(f"t{number}" for number in range(VOCAB))
#: Where settings are that are not the learner's.
SECTIONS = {
    **dict.fromkeys(("max_steps", "deterministic"), "run"),
    **dict.fromkeys(("temperature", "max_tokens", "group_size"), "sampling"),
    **dict.fromkeys(("snapshot_dtype", "compute_dtype"), "model"),
    **dict.fromkeys(("groups_per_step", "publish_every", "max_staleness"), "schedule"),
    **dict.fromkeys(("teacher", "weight", "divergence"), "distill"),
}


def config_of(settings: Config | None = None, **changes: Any) -> Config:
    """The settings with these changes, each under its own name without the section's."""
    config, by_section = settings or Config(), defaultdict[str, dict[str, Any]](dict)
    for name, value in changes.items():
        by_section[SECTIONS.get(name, "learner")][name] = value
    sections = {name: replace(getattr(config, name), **changed) for name, changed in by_section.items()}
    return replace(config, **sections)


def tiny_module(
    seed: int = 0,
    hidden: int = 16,
    layers: int = 2,
    vocab: int = VOCAB,
    tied: bool = True,
) -> torch.nn.Module:
    """A Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=2 * hidden,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config)


def in_float64(module: torch.nn.Module) -> torch.nn.Module:
    """The module in float64 throughout: transformers' RMSNorm rounds to float32 inside, whatever the dtype."""
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = functools.partial(_exact_rms_norm, part)  # type: ignore[method-assign]
    return module.double()


def _exact_rms_norm(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part.weight * x * (x.square().mean(-1, keepdim=True) + part.variance_epsilon).rsqrt()


def tiny_policy(seed: int = 0) -> Policy:
    return Policy(in_float64(tiny_module(seed)), {"config.json": b"{}"}, torch.device("cpu"))


def model_directory(path: Path, seed: int = 0) -> Path:
    tiny_module(seed).save_pretrained(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def write_tokenizer(where: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Put the files of a tokenizer with these tokens into a directory."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token=texts[0]))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(where)
    return where


def rollout(
    tokens: Sequence[int],
    reward: float = 0.0,
    logprobs: Sequence[float] | None = None,
    loss_mask: bytes | None = None,
    finish: str = "stop",
    support: Sequence[Sequence[int]] | None = None,
    version: int = 0,
) -> Rollout:
    offsets = [0]
    for piece in support or ():
        offsets.append(offsets[-1] + len(piece))
    return Rollout(
        tokens=array("i", tokens),
        logprobs=array("f", logprobs if logprobs is not None else [-2.0] * len(tokens)),
        loss_mask=loss_mask if loss_mask is not None else b"\x01" * len(tokens),
        version_spans=((0, version),),
        finish="length" if finish == "length" else "stop",
        text="",
        reward=reward,
        support_tokens=array("i", [token for piece in support for token in piece]) if support else None,
        support_offsets=array("i", offsets) if support else None,
    )


def group(number: int, prompt: Sequence[int], rollouts: Sequence[Rollout], step: int = 0) -> RolloutGroup:
    return RolloutGroup(GroupRef(RUN_POLICY, "train", number), step, 1, number, array("i", prompt), tuple(rollouts))


def random_group(rng: random.Random, number: int, samples: int = 4, longest: int = 7, top_k: int = 0) -> RolloutGroup:
    """Few distinct tokens, so that rollouts share prefixes and are often equal; masks with holes; staleness noise."""
    rollouts = []
    for _ in range(samples):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, longest))]
        mask = bytes(rng.random() < 0.8 for _ in tokens)
        rollouts.append(
            rollout(
                tokens,
                reward=float(rng.randrange(3)),
                logprobs=[rng.uniform(-4.0, -0.05) * bit for bit in mask],
                loss_mask=mask,
                finish=rng.choice(["stop", "length"]),
                support=[[t, 3, 4, 5][: max(top_k - (t == 0), 1)] for t in tokens] if top_k else None,
            )
        )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
    return group(number, prompt, rollouts)


def loss_tokens(
    behaviour: Sequence[float],
    advantage: Sequence[float],
    sequence: Sequence[int] | None = None,
    lag: Sequence[int] | None = None,
    source: Sequence[int] | None = None,
    reference: Sequence[float] | None = None,
    teacher: Sequence[float] | None = None,
    top: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> LossTokens:
    """In float64, with weights of 1; one source for each sequence, called a, b, c ... `top`: the teacher's and the
    policy's logprobs of the same k tokens, [n, k] each."""
    top = top or (torch.zeros(len(behaviour), 0, dtype=torch.float64),) * 2
    sequence, zeros = sequence or [0] * len(behaviour), [0] * len(behaviour)
    source = source or [0] * (max(sequence) + 1)
    return LossTokens(
        behaviour_n=torch.tensor(behaviour, dtype=torch.float64),
        advantage_n=torch.tensor(advantage, dtype=torch.float64),
        sequence_n=torch.tensor(sequence),
        lag_n=torch.tensor(lag or zeros),
        source_S=torch.tensor(source),
        sources=tuple("abcdefghijklmnopqrstuvwxyz"[: max(source) + 1]),
        weight_n=torch.ones(len(behaviour), dtype=torch.float64),
        reference_n=torch.tensor(reference or zeros, dtype=torch.float64),
        teacher_n=torch.tensor(teacher or zeros, dtype=torch.float64),
        top_teacher_nk=top[0],
        top_policy_nk=top[1],
        entropy_n=torch.ones(len(behaviour), dtype=torch.float64),
        clip_low_n=torch.full((len(behaviour),), math.nan, dtype=torch.float64),
        clip_high_n=torch.full((len(behaviour),), math.nan, dtype=torch.float64),
    )


def data_of(made: RolloutGroup, advantages: Sequence[float] | None = None, version: int = 0) -> list[Datum]:
    """The group's rollouts with loss tokens, with these advantages (.5)."""
    values = advantages or [0.5] * len(made.rollouts)
    return [
        Datum(
            made.prompt_tokens,
            r.tokens,
            r.loss_mask,
            advantages=array("d", [value]) * len(r.tokens),
            behaviour_logprobs=r.logprobs,
            version_spans=() if made.logged else r.version_spans,
            version=version,
            support_tokens=r.support_tokens,
            support_offsets=r.support_offsets,
        )
        for r, value in zip(made.rollouts, values, strict=True)
        if 1 in r.loss_mask
    ]


def gradients(trainer: GrpoClient) -> torch.Tensor:
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trainer.policy.module.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def gradient_of(calls: list[list[RolloutGroup]], layout: Layout = "auto", **options: Any) -> torch.Tensor:
    trainer = GrpoClient(tiny_policy(), config_of(**options), layout)
    for call in calls:
        trainer.forward_backward(call)
    return gradients(trainer)


def weights(trainer: GrpoClient) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in trainer.policy.tensors().items()}


def judge_resume(path: Path, **options: Any) -> None:
    """Assert that a run that is resumed in the middle gets the weights of one that goes on."""
    settings, model = config_of(lr=1e-2, **options), str(model_directory(path / "model"))
    straight, resumed = (GrpoClient(load_policy(model, "float32", "cpu"), settings) for _ in range(2))
    steps(straight, range(2))
    straight.save_state(path / "step_2").result()
    resumed.load_state(path / "step_2")
    for client in (straight, resumed):
        steps(client, range(2, 4))
    assert weights(resumed) == weights(straight)


def steps(trainer: GrpoClient, versions: range) -> None:
    for version in versions:
        rng = random.Random(version)
        groups = [random_group(rng, number) for number in range(4)]
        trainer.forward_backward(groups[:2])
        trainer.forward_backward(groups[2:])
        trainer.optim_step()
