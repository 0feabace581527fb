"""The trainer: the verbs that everything which trains is a client of.

    forward_backward(groups)          add the groups' gradients; any number of times, any split
    optim_step()                      one AdamW step on what was added; the version grows by one
    update()                          the same within a training step: the version stays (`minibatches_per_round`)
    save_weights_for_sampler()        weights and files of a snapshot
    save_state / load_state           everything needed to go on, bit for bit

Gradients are *un-normalised sums* over loss tokens. They are divided once, at the step, and clipped after that. So a
step that was streamed in micro-batches equals the step on the whole batch (up to the order of float sums). The divisor:

    token      N, the loss tokens of the step
    sequence   B, its rollouts, each token weighted by 1 / (loss tokens of its rollout)
    constant   B * max_tokens

N and B count zero-variance groups too, although those are not run at all: their policy gradient is zero. (With
`reference_kl` they are run: the pull towards the reference has a gradient.) The learning rate, not the gradient, is
scaled by sqrt(min(1, ESS / B)) (VCPO, arXiv 2602.17616): Adam would cancel the other.

Same inputs in the same order and calls give the same bits on the same machine (one thread count, one torch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from echo2.errors import InvariantError, UserError
from echo2.learner import checkpoint
from echo2.learner.advantages import Advantage, group_advantages
from echo2.learner.batch import Layout, TrainedGroup, collate
from echo2.learner.checkpoint import Progress
from echo2.learner.logprobs import token_logprobs
from echo2.learner.loss_stats import LossStats, measure
from echo2.learner.losses import log_ratio, make_loss
from echo2.learner.model import DTYPES, Policy, tensor_bytes
from echo2.learner.normalisation import Normalisation, divisor_of, weigh
from echo2.learner.reference import frozen_copy, token_kl
from echo2.types import RolloutGroup, TensorBytes


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How to train. `max_steps` is where a falling learning rate reaches 0; `temperature` and `max_tokens` are the
    sampler's; `reference_kl` weighs the divergence from the policy that the trainer is made with (0: none is kept).
    """

    lr: float = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    loss: str = "dppo"
    loss_params: Mapping[str, float] = field(default_factory=dict)
    normalisation: Normalisation = "token"
    reference_kl: float = 0.0
    advantage: Advantage = "dr_grpo"
    ess_scaling: bool = True
    mask_truncated: bool = False
    temperature: float = 1.0
    max_tokens: int = 256
    layout: Layout = "auto"
    snapshot_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class StepStats:
    """One training step. `num_tokens` is N; `divisor` is what the sums were divided by; `grad_norm` is before
    clipping; `skipped`: nothing to learn from, weights and optimizer untouched (the version grew all the same).

    Of `num_updates` in one step, `a + b`: the later `lr`, the larger `grad_norm`, sums of the rest.
    """

    lr: float
    grad_norm: float
    num_tokens: int
    skipped: bool
    losses: LossStats
    divisor: float = 1.0
    num_updates: int = 1

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(
            lr=other.lr,
            grad_norm=max(self.grad_norm, other.grad_norm),
            num_tokens=self.num_tokens + other.num_tokens,
            skipped=self.skipped and other.skipped,
            losses=self.losses + other.losses,
            divisor=self.divisor + other.divisor,
            num_updates=self.num_updates + other.num_updates,
        )


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
        self._loss = make_loss(options.loss, options.loss_params)
        self._loss_memory: float | None = None
        self._reference = frozen_copy(policy) if options.reference_kl > 0.0 else None
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
        self._before: StepStats | None = None  # of the updates that this step has had
        self._forget_sums()

    def why_unfit(self, group: RolloutGroup) -> str:
        """Why the model can't read the group; empty: it can. The head checks the rest when a result comes in, and knows
        the context of most models; one that it missed would be fed again after every death of the learner.
        """
        prompt, longest = len(group.prompt_tokens), max(len(rollout.tokens) for rollout in group.rollouts)
        most = self.policy.max_positions
        if most is None or prompt + longest <= most:
            return ""
        return f"{prompt} + {longest} tokens, where the model has {most} positions"

    def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
        """Add the gradient sums of whole groups; statistics of these groups alone.

        Raises:
            InvariantError: a group is unscored or has an empty prompt.
        """
        trained: list[TrainedGroup] = []
        for group in groups:
            lengths, part = self._trained_part(group)
            self._num_tokens += sum(lengths)
            self._num_rollouts += len(lengths)
            if part is not None:
                trained.append(part)
        if not trained:
            return LossStats()
        dtype = self.policy.dtype if self.policy.dtype == torch.float64 else torch.float32
        batch = collate(trained, self._layout, self.policy.pair_cost).to(self.policy.device, dtype)
        tokens = replace(batch.loss_tokens, memory=self._loss_memory)
        logp_n = token_logprobs(self.policy.logits(batch), batch, self.options.temperature)
        found = self._loss(logp_n, tokens)
        loss_n, reference_kl = found.loss_n, None
        if self._reference is not None:
            with torch.no_grad():
                reference_n = token_logprobs(self._reference.logits(batch), batch, self.options.temperature)
            kl_n = token_kl(logp_n, reference_n, tokens, found.vetoed_S)
            loss_n, reference_kl = loss_n + self.options.reference_kl * kl_n, kl_n.detach().sum()
        loss = weigh(loss_n, tokens, self.options.normalisation).sum()
        loss.backward()
        if self._loss.kind.remember is not None:
            self._remembered.append(torch.stack([log_ratio(logp_n.detach(), tokens), tokens.advantage_n]).cpu())
        stats = measure(loss, logp_n, tokens, found, reference_kl)
        self._stats += stats
        return stats

    @property
    def is_within_step(self) -> bool:
        """Whether the weights are no version's: a step has been updated with a part of its groups."""
        return self._before is not None

    def optim_step(self) -> StepStats:
        """One AdamW step on the gradients added so far, which ends the training step; statistics of all of it.

        Raises:
            UserError: the gradient is not finite (training has diverged); the weights are those of before the update.
        """
        if self._before is None or self._num_rollouts:
            self.update()
        assert self._before is not None
        result, self._before = self._before, None
        self.version += 1
        return result

    def update(self) -> None:
        """One AdamW step on the gradients added so far, with more groups of the same training step to come.

        Raises:
            UserError: as `optim_step`.
        """
        lr = self._scheduled_lr()
        if self.options.ess_scaling:
            lr *= math.sqrt(self._stats.ess_ratio)
        grads = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        divisor = divisor_of(self.options.normalisation, self._num_tokens, self._num_rollouts, self.options.max_tokens)
        grad_norm = self._normalise(grads, divisor) if grads else 0.0
        if grads:
            self._optimizer.param_groups[0]["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        done = StepStats(lr, grad_norm, self._num_tokens, not grads, self._stats, divisor, int(bool(grads)))
        if self._remembered:
            self._loss_memory = self._loss.remember(*torch.cat(self._remembered, dim=1))
        self._forget_sums()
        self._before = done if self._before is None else self._before + done

    def save_weights_for_sampler(self) -> tuple[Mapping[str, TensorBytes], Mapping[str, bytes]]:
        """A copy of the weights (in `snapshot_dtype`) and the files that make them a model."""
        return self.policy.tensors(DTYPES[self.options.snapshot_dtype]), self.policy.files

    def save_state(self, directory: Path, lineage: int = 0, cursor: int = 0) -> None:
        """Write a checkpoint to `directory`, whole or not at all. To be called between steps.

        Raises:
            UserError: no room; what was there before is untouched.
            InvariantError: it is called within a step.
        """
        if self.is_within_step:
            raise InvariantError(f"a checkpoint within step {self.version} would be trained on its groups again")
        contents = {"model.safetensors": self.policy.tensors(), "optimizer.safetensors": self._optimizer_tensors()}
        progress = Progress(self.version, lineage, cursor, self._loss_memory)
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
        self._forget_sums()
        self._before = None
        self.version, self._loss_memory = progress.version, progress.loss_memory
        return progress

    def _forget_sums(self) -> None:
        self._num_tokens, self._num_rollouts, self._stats = 0, 0, LossStats()
        self._remembered: list[Tensor] = []

    def _trained_part(self, group: RolloutGroup) -> tuple[list[int], TrainedGroup | None]:
        """How many loss tokens each rollout has that counts in N and B, and what of the group has a gradient."""
        advantages = group_advantages([rollout.reward for rollout in group.rollouts], self.options.advantage)
        lengths, kept = [], []
        for rollout, advantage, worker in zip(group.rollouts, advantages, group.workers, strict=True):
            if self.options.mask_truncated and rollout.finish == "length":
                continue
            num_tokens = rollout.loss_mask.count(1)
            if num_tokens:
                lengths.append(num_tokens)
                kept.append((rollout, advantage, worker))
        if not kept or not (any(advantages) or self._reference):
            return lengths, None
        rollouts, kept_advantages, workers = zip(*kept, strict=True)
        part = TrainedGroup(group.prompt_tokens, rollouts, kept_advantages, self.version, workers, group.logged)
        return lengths, part

    def _normalise(self, grads: list[Tensor], divisor: float) -> float:
        """Divide, then clip; the norm before clipping."""
        torch._foreach_div_(grads, divisor)
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
