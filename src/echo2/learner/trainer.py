"""The trainer: the verbs that everything which trains is a client of.

    forward_backward(groups)          add the groups' gradients; any number of times, any split
    optim_step()                      one AdamW step on what was added; the version grows by one
    save_weights_for_sampler()        weights and files of a snapshot
    save_state / load_state           everything needed to go on, bit for bit

Gradients are *un-normalised sums* over loss tokens. They are divided once, at the step, by N = all loss tokens of the
step, and clipped after that. So a step that was streamed in micro-batches equals the step on the whole batch (up to
the order of float sums). N counts the tokens of zero-variance groups too, although those are not run at all: their
policy gradient is zero. The learning rate, not the gradient, is scaled by sqrt(min(1, ESS / B)) (VCPO, arXiv
2602.17616): Adam would cancel the other.

Same inputs in the same order and calls give the same bits on the same machine (one thread count, one torch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from echo2.errors import UserError
from echo2.learner import checkpoint, losses
from echo2.learner.advantages import Advantage, group_advantages
from echo2.learner.batch import Layout, TrainedGroup, collate
from echo2.learner.checkpoint import Progress
from echo2.learner.logprobs import token_logprobs
from echo2.learner.losses import LossStats
from echo2.learner.model import DTYPES, Policy, tensor_bytes
from echo2.types import RolloutGroup, TensorBytes


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How to train. `max_steps` is where a falling learning rate reaches 0; `temperature` is the sampler's."""

    lr: float = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    loss: Literal["dppo", "ppo"] = "dppo"
    advantage: Advantage = "dr_grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    ess_scaling: bool = True
    mask_truncated: bool = False
    temperature: float = 1.0
    layout: Layout = "auto"
    snapshot_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step. `num_tokens` is N; `grad_norm` is before clipping; `skipped`: nothing to learn from,
    weights and optimizer untouched (the version grew all the same).
    """

    lr: float
    grad_norm: float
    num_tokens: int
    skipped: bool
    losses: LossStats


class Trainer:
    """Owns the policy's gradients and optimizer. `version` = completed training steps."""

    def __init__(self, policy: Policy, options: TrainerOptions) -> None:
        if options.temperature <= 0.0:
            raise UserError(
                f"sampling.temperature = {options.temperature}: greedy rollouts have no logprobs to learn "
                "from. Set it > 0."
            )
        self.policy = policy
        self.options = options
        self.version = 0
        self._loss = losses.dppo if options.loss == "dppo" else losses.ppo(options.clip_low, options.clip_high)
        layout_is_possible = policy.honours_masks or options.layout == "plain"
        self._layout: Layout = options.layout if layout_is_possible else "plain"
        self._parameters: dict[str, torch.nn.Parameter] = dict(policy.module.named_parameters())
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=options.lr,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=policy.device.type in ("cpu", "cuda"),
        )
        self._num_tokens = 0
        self._stats = LossStats()

    def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
        """Add the gradient sums of whole groups; statistics of these groups alone.

        Raises:
            InvariantError: a group is unscored or has an empty prompt.
        """
        trained: list[TrainedGroup] = []
        for group in groups:
            num_tokens, part = self._trained_part(group)
            self._num_tokens += num_tokens
            if part is not None:
                trained.append(part)
        if not trained:
            return LossStats()
        dtype = self.policy.dtype if self.policy.dtype == torch.float64 else torch.float32
        batch = collate(trained, self._layout, self.policy.pair_cost).to(self.policy.device, dtype)
        logp_n = token_logprobs(self.policy.logits(batch), batch, self.options.temperature)
        loss, stats = self._loss(logp_n, batch.loss_tokens)
        loss.backward()
        self._stats += stats
        return stats

    def optim_step(self) -> StepStats:
        """One AdamW step on the gradients added so far.

        Raises:
            UserError: the gradient is not finite (training has diverged); the weights are those of before the step.
        """
        lr = self._scheduled_lr()
        if self.options.ess_scaling:
            lr *= math.sqrt(self._stats.ess_ratio)
        grads = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        grad_norm = self._normalise(grads) if grads else 0.0
        if grads:
            self._optimizer.param_groups[0]["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        result = StepStats(lr, grad_norm, self._num_tokens, not grads, self._stats)
        self._num_tokens, self._stats = 0, LossStats()
        self.version += 1
        return result

    def save_weights_for_sampler(self) -> tuple[Mapping[str, TensorBytes], Mapping[str, bytes]]:
        """A copy of the weights (in `snapshot_dtype`) and the files that make them a model."""
        return self.policy.tensors(DTYPES[self.options.snapshot_dtype]), self.policy.files

    def save_state(self, directory: Path, lineage: int = 0, cursor: int = 0) -> None:
        """Write a checkpoint to `directory`, whole or not at all. To be called between steps.

        Raises:
            UserError: no room; what was there before is untouched.
        """
        contents = {"model.safetensors": self.policy.tensors(), "optimizer.safetensors": self._optimizer_tensors()}
        progress = Progress(self.version, lineage, cursor)
        checkpoint.write_checkpoint(directory, progress, self.policy.files, contents)

    def load_state(self, directory: Path) -> Progress:
        """Go on from a checkpoint: weights, optimizer and version as they were.

        Raises:
            UserError: there is no whole checkpoint, or it is of another model.
        """
        progress = checkpoint.read_progress(directory)
        weights = load_file(directory / "model.safetensors")
        missing = set(self.policy.state()) ^ set(weights)
        if missing:
            raise UserError(f"{directory} is a checkpoint of another model: {sorted(missing)[0]} is not in both.")
        try:
            self.policy.module.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            raise UserError(f"{directory} is a checkpoint of another model: {error}") from error
        self._load_optimizer(load_file(directory / "optimizer.safetensors"))
        self._optimizer.zero_grad(set_to_none=True)
        self._num_tokens, self._stats = 0, LossStats()
        self.version = progress.version
        return progress

    def _trained_part(self, group: RolloutGroup) -> tuple[int, TrainedGroup | None]:
        """The group's loss tokens (they count in N), and what of it has a gradient."""
        advantages = group_advantages([rollout.reward for rollout in group.rollouts], self.options.advantage)
        num_tokens = 0
        kept = []
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            if self.options.mask_truncated and rollout.finish == "length":
                continue
            loss_tokens = rollout.loss_mask.count(1)
            num_tokens += loss_tokens
            if loss_tokens:
                kept.append((rollout, advantage))
        if not kept or not any(advantages):
            return num_tokens, None
        rollouts, kept_advantages = zip(*kept, strict=True)
        return num_tokens, TrainedGroup(group.prompt_tokens, rollouts, kept_advantages)

    def _normalise(self, grads: list[Tensor]) -> float:
        """Divide by N, then clip; the norm before clipping."""
        torch._foreach_div_(grads, float(self._num_tokens))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.options.grad_clip)
        if not bool(norm.isfinite()):
            raise UserError(
                f"The gradient of step {self.version} is not finite ({float(norm)}): training has diverged. Lower "
                "learner.lr and resume from the last checkpoint."
            )
        return float(norm)

    def _scheduled_lr(self) -> float:
        options = self.options
        if self.version < options.warmup_steps:
            return options.lr * (self.version + 1) / options.warmup_steps
        if options.lr_schedule == "constant":
            return options.lr
        done = (self.version - options.warmup_steps) / max(1, options.max_steps - options.warmup_steps)
        left = 1.0 - min(1.0, done)
        return options.lr * (left if options.lr_schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))

    def _optimizer_tensors(self) -> dict[str, TensorBytes]:
        state = self._optimizer.state
        return {
            f"{kind}.{name}": tensor_bytes(state[parameter][kind])
            for name, parameter in self._parameters.items()
            if parameter in state
            for kind in ("exp_avg", "exp_avg_sq", "step")
        }

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        state = {
            index: {kind: tensors[f"{kind}.{name}"] for kind in ("exp_avg", "exp_avg_sq", "step")}
            for index, name in enumerate(self._parameters)
            if f"step.{name}" in tensors
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
