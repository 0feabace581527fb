"""Training steps on scored groups, composed of the trainer's verbs.

    forward_backward(groups)    add the groups' gradients; any number of times, any split
    optim_step()                one AdamW step on the added gradients; the version grows by one
    update()                    the same within a training step: the version stays (`updates_per_step`)
    save_state / load_state     weights, optimizer, and where the run stands

`data.py` turns groups into data, `GrpoLoss` combines the policy loss with the KL penalty towards a reference, and the
learning rate follows from the schedule and the effective sample size. The rate, not the gradient, is scaled by
sqrt(min(1, ESS / B)) (VCPO, arXiv 2602.17616): Adam would cancel a scaling of the gradient.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from echo2.config import Config
from echo2.core.errors import InvariantError, UserError
from echo2.core.types import GroupRef, RolloutGroup
from echo2.learner.core.batch import Layout
from echo2.learner.core.losses import LossTokens, PolicyLoss, log_ratio, make_loss
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy
from echo2.learner.core.publication import LentWeights
from echo2.learner.core.settings import computes_in_bfloat16, learning_rate, microbatch_tokens, refuse_vanishing_updates
from echo2.learner.core.state import Saving
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.learner.grpo.data import GroupData, divisor_of, group_data
from echo2.learner.grpo.loss_stats import LossStats, measure
from echo2.learner.grpo.reference import reference_of, token_kl
from echo2.transport.codecs import LearnerLogprobs, logged_tokens
from echo2.transport.limits import LOGGED_GROUPS

POLICY, REFERENCE = "the policy", "its reference"
#: Output of a micro-batch: its statistics, and the data from which the loss's memory is made.
Output = tuple[LossStats, Tensor | None]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one training step. `num_tokens` is N; `divisor` is the divisor of the sums; `grad_norm` is before
    clipping; `skipped`: nothing to learn from, weights and optimizer unchanged (the version grew all the same).

    `logprobs`: of the first groups of the step, under the policy as it was trained; 0 where a token is not trained on.

    `a + b` merges updates of one step: the later `lr`, the larger `grad_norm`, sums of the rest, no `logprobs`.
    """

    lr: float
    grad_norm: float
    num_tokens: int
    skipped: bool
    losses: LossStats
    divisor: float = 1.0
    num_updates: int = 1
    logprobs: LearnerLogprobs = field(default_factory=dict)

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


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Position of a run: completed training steps, lineage, the position in the task stream, and the loss's memory of
    the last step (`LossKind.remember`). A checkpoint holds it beside the weights.
    """

    version: int
    lineage: int = 0
    cursor: int = 0
    loss_memory: float | None = None


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """A policy loss plus `reference_kl` times the KL penalty towards the reference. Its output for each micro-batch:
    statistics, and log ratios and advantages [2, n] for the loss's memory (None if the loss has no memory).
    """

    policy_loss: PolicyLoss
    reference_kl: float

    def __call__(self, logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, tuple[LossStats, Tensor | None]]:
        found = self.policy_loss(logp_n, tokens)
        loss_n, reference_kl = found.loss_n, None
        if self.reference_kl > 0.0:
            kl_n = token_kl(logp_n, tokens, found.vetoed_S)
            loss_n, reference_kl = loss_n + self.reference_kl * kl_n, kl_n.detach().sum()
        remembered = None
        if self.policy_loss.kind.remember is not None:
            remembered = torch.stack([log_ratio(logp_n.detach(), tokens), tokens.advantage_n]).cpu()
        loss = (loss_n.detach() * tokens.weight_n).sum()
        return loss_n, (measure(loss, logp_n, tokens, found, reference_kl), remembered)


class GrpoClient:
    """One policy's training on scored groups. `version` = completed training steps."""

    def __init__(self, policy: Policy, config: Config, layout: Layout = "auto", mesh: Mesh | None = None) -> None:
        """Raises: UserError, if there is no room for the reference, or the weights' precision is too coarse."""
        self.policy = policy
        self.config = config
        self.version = 0
        self._loss = make_loss(config.learner.loss, config.learner.loss_params)
        self._mesh = mesh or Mesh()
        policy.computes_in_bfloat16 = computes_in_bfloat16(config.model.compute_dtype, policy.device)
        refuse_vanishing_updates(policy.trained_parameters(), config.learner.lr)
        self._settled = microbatch_tokens(policy, config, self._mesh)
        self._trainer = Trainer(self._settled, layout, self._mesh)
        reference = reference_of(policy, config, self._mesh) if config.learner.reference_kl > 0.0 else None
        self._trainer.add(POLICY, policy)
        if reference is not None:
            reference.computes_in_bfloat16 = policy.computes_in_bfloat16
            self._trainer.add(REFERENCE, reference, is_trained=False)
        self._logprobs: dict[int, list[array[float]]] = {}
        self._before: StepStats | None = None  # statistics of this step's updates so far
        self._forget_sums()

    @property
    def tokens_per_call(self) -> int:
        """Number of tokens with which one call of `forward_backward` gives every rank a full micro-batch."""
        return self._trainer.tokens_per_microbatch * self._mesh.size

    def why_unfit(self, group: RolloutGroup) -> str:
        """Return why the model cannot process the group; empty if it can. The head makes the other checks when a result
        arrives, and knows the context length of most models. A group that this check missed would be fed again after
        every death of the learner.
        """
        prompt, longest = len(group.prompt_tokens), max(len(rollout.tokens) for rollout in group.rollouts)
        most = self.policy.max_positions
        if most is None or prompt + longest <= most:
            return ""
        return f"{prompt} + {longest} tokens, where the model has {most} positions"

    def num_tokens_run(self, group: RolloutGroup) -> int:
        """Return the number of tokens, including prompts, that training on the group runs; 0 if it teaches nothing.

        Raises:
            InvariantError: the group is unscored.
        """
        made = self._data_of(group)
        self._made[group.group] = group, made
        return self._trainer.num_tokens_run(POLICY, made.data)

    def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
        """Add the gradient sums of whole groups. Return statistics of these groups alone.

        Raises:
            InvariantError: a group is unscored or has an empty prompt.
        """
        parts = [self._take_data(group) for group in groups]
        self._num_tokens += sum(part.num_tokens for part in parts)
        self._num_rollouts += sum(part.num_rollouts for part in parts)
        data = [datum for part in parts for datum in part.data]
        temperature, stats = self.config.sampling.temperature, LossStats()
        if self.config.learner.reference_kl > 0.0:
            reference = self._trainer.forward(REFERENCE, data, temperature)
            data = [replace(datum, reference_logprobs=logp) for datum, logp in zip(data, reference, strict=True)]
        loss = GrpoLoss(self._loss, self.config.learner.reference_kl)
        done = self._trainer.forward_backward(POLICY, data, loss, temperature)
        self._keep_logprobs(groups, parts, done.logprobs)
        for measured, remembered in self._of_all_ranks(done.outputs):
            if self.is_within_step:  # the weights have moved since, though the version has not
                measured = replace(measured, fresh={})
            stats += measured
            self._stats += measured  # one by one: the same sums however the calls are cut
            if remembered is not None:
                self._remembered.append(remembered)
        return stats

    @property
    def tokens_per_microbatch(self) -> int:
        """The value fixed at the start, or less if memory has run out."""
        return self._trainer.tokens_per_microbatch

    @property
    def memory_summary(self) -> str:
        """Suffix for the learner's activity, for people: says that memory has run out; empty if it has not."""
        left = self.tokens_per_microbatch
        return f"; memory ran out: micro-batches of {left} tokens" if left < self._settled else ""

    @property
    def is_within_step(self) -> bool:
        """Whether the weights belong to no version, because a part of the step has been applied."""
        return self._before is not None

    def optim_step(self) -> StepStats:
        """Make one AdamW step on the gradients added so far, which ends the training step. Return statistics of the
        whole step.

        Raises:
            UserError: the gradient is not finite (training has diverged); the weights are those before the update.
        """
        if self._before is None or self._num_rollouts:
            self._update()
        assert self._before is not None
        result, self._before = replace(self._before, logprobs=self._logprobs), None
        self._logprobs = {}
        self.version += 1
        return result

    def update(self) -> None:
        """Make one AdamW step on the gradients added so far, with more groups of the same training step to come.

        Raises:
            UserError: as `optim_step`.
        """
        self._update()

    def _update(self) -> None:
        learner = self.config.learner
        lr = learning_rate(learner, self.version, self.config.run.max_steps)
        if learner.loss != "none":  # the negative control corrects nothing
            lr *= math.sqrt(self._stats.ess_ratio)
        max_tokens = self.config.sampling.max_tokens
        divisor = divisor_of(learner.normalisation, self._num_tokens, self._num_rollouts, max_tokens)
        adam = AdamParams(lr, weight_decay=learner.weight_decay, grad_clip=learner.grad_clip)
        step = self._trainer.optim_step(POLICY, adam, divisor)
        done = StepStats(
            lr, step.grad_norm, self._num_tokens, not step.updated, self._stats, divisor, int(step.updated)
        )
        if self._remembered:
            self._loss = replace(self._loss, memory=self._loss.remember(*torch.cat(self._remembered, dim=1)))
        self._forget_sums()
        self._before = done if self._before is None else self._before + done

    def save_weights_for_sampler(self) -> LentWeights:
        """Lend the weights (in `snapshot_dtype`) and the other files of the model; the next update waits until they are
        given back."""
        return self._trainer.save_weights_for_sampler(POLICY, self.config.model.snapshot_dtype)

    def finish_reading(self) -> None:
        """Wait until no background reader uses the weights, as the next update would."""
        self._trainer.finish_reading(POLICY)

    def save_state(self, directory: Path, lineage: int = 0, cursor: int = 0) -> Saving:
        """Begin to write a checkpoint to `directory`, whole or not at all; call it between steps. The next step's
        gradients are computed meanwhile; its `optim_step` waits for the checkpoint. The result raises as that of
        `Trainer.save_state`.

        Raises:
            InvariantError: it is called within a step.
        """
        if self.is_within_step:
            raise InvariantError(f"a checkpoint within step {self.version} would be trained on its groups again")
        position = RunPosition(self.version, lineage, cursor, self._loss.memory)
        return self._trainer.save_state(POLICY, directory, asdict(position))

    def load_state(self, directory: Path) -> RunPosition:
        """Continue from a checkpoint: weights, optimizer and version as they were.

        Raises:
            UserError: there is no whole checkpoint, or it is of another model or of no run.
        """
        client = self._trainer.load_state(POLICY, directory)
        try:
            position = msgspec.convert(client, RunPosition)
        except msgspec.ValidationError as error:
            raise UserError(f"{directory} is no checkpoint of a run: {error}. Name a checkpoints/step_N.") from error
        self._forget_sums()
        self._before, self._logprobs = None, {}
        self.version, self._loss = position.version, replace(self._loss, memory=position.loss_memory)
        return position

    def _keep_logprobs(
        self, groups: Sequence[RolloutGroup], parts: Sequence[GroupData], logprobs: Sequence[array[float]]
    ) -> None:
        """Keep the logprobs of the first tokens of the step's first groups."""
        found = iter(logprobs)
        for group, part in zip(groups, parts, strict=True):
            of_data = iter([next(found) for _ in part.data])
            if part.data and len(self._logprobs) < LOGGED_GROUPS:
                room = logged_tokens(len(group.rollouts))
                self._logprobs[group.group.number] = [
                    array("f", next(of_data)[:room] if rollout.loss_mask.count(1) else ()) for rollout in group.rollouts
                ]

    def _of_all_ranks(self, outputs: list[Output]) -> list[Output]:
        """Gather the loss's outputs of every share, the first one's first."""
        if self._mesh.size == 1:
            return outputs
        rows = [(stats, None if kept is None else kept.tolist()) for stats, kept in outputs]
        gathered = self._mesh.gather(msgspec.msgpack.encode(rows))
        decoded = [
            msgspec.msgpack.decode(data, type=list[tuple[LossStats, list[list[float]] | None]]) for data in gathered
        ]
        return [
            (stats, None if kept is None else torch.tensor(kept, dtype=torch.float64))
            for part in decoded
            for stats, kept in part
        ]

    def _forget_sums(self) -> None:
        self._num_tokens, self._num_rollouts, self._stats = 0, 0, LossStats()
        self._remembered: list[Tensor] = []
        # What `num_tokens_run` made of groups that are not trained on yet.
        self._made: dict[GroupRef, tuple[RolloutGroup, GroupData]] = {}

    def _take_data(self, group: RolloutGroup) -> GroupData:
        of, made = self._made.pop(group.group, (None, None))
        return made if made is not None and of is group else self._data_of(group)

    def _data_of(self, group: RolloutGroup) -> GroupData:
        learner = self.config.learner
        keeps_flat = learner.reference_kl > 0.0
        return group_data(group, self.version, learner.advantage, learner.normalisation, keeps_flat)
