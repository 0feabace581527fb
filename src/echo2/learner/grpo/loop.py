"""GRPO with bounded staleness, top to bottom: the steps of a run (`train`) and the arithmetic of a step (`GrpoClient`).

The terms are those of ECHO-2 (arXiv 2602.02192). Step t trains version v_t = t of the policy on the R rollouts that are
bound to it, which the versions t - S to t sampled, and makes version t + 1. Every kappa steps the weights are published
as a snapshot. Settings: R = `groups_per_step` times `group_size`, S = `max_staleness`, kappa =
`publish_every`, unless the head says otherwise (`Feed.publish_every`).

`feed.py` waits for groups, checks them, and cuts them into micro-batches; `data.py` has their advantages, `losses.py`
the losses, `teachers.py` a reference and teachers, `trained_policy.py` what a step changes, `saving.py` checkpoints.
docs/how-a-step-is-computed.md has the formulas, in this order.

Four rules of order must hold:

1. the head has *recorded* step t before anything builds on it: the groups of t + 1, its snapshot, its checkpoint;
2. a checkpoint is durable before it is reported, because the head then drops the groups that it covers. It is written
   while the groups of the next step arrive, and the next update waits for it. A stop at any time leaves a checkpoint;
3. a snapshot is read from the weights themselves, in the background, while the next step's gradients are computed. The
   next update waits until the whole snapshot is encoded; it may be sent later;
4. groups are checked again before they are trained on: a group that is too old or out of order is a bug and ends the
   learner; a group that the model can't process is left out and logged.

Torch runs in this thread; networking runs in the thread of `session.HeadSession`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from echo2.config.sections import DistillConfig
from echo2.core.types import RolloutGroup
from echo2.learner.core.losses import LossTokens, PolicyLoss
from echo2.learner.core.optimizer import learning_rate
from echo2.learner.core.trainer import AdamParams
from echo2.learner.grpo.card import LearnerCard
from echo2.learner.grpo.data import divisor_of
from echo2.learner.grpo.feed import Feed
from echo2.learner.grpo.saving import Checkpoints
from echo2.learner.grpo.step_meter import LossStats, StepStats, measure, merged
from echo2.learner.grpo.teachers import joined_divergence, token_kl, towards_teacher
from echo2.learner.grpo.trained_policy import POLICY, REFERENCE, TrainedPolicy
from echo2.learner.link.session import HeadSession


def train(client: GrpoClient, head: HeadSession, checkpoints: Path, card: LearnerCard | None = None) -> str:
    """Train from the current state of `client` and `head` to the last step, or until the head says stop. Return why
    training ended. `checkpoints` is the directory of the step_N directories; `card`: a GPU shared with workers.

    Raises:
        LinkError: the head was away for longer than the session's patience.
        UserError: training diverged, the learner died on several groups in a row, or a checkpoint can't be written (on
            a full disk the learner waits for space).
        InvariantError: the head fed a group that must not be trained on.
    """
    feed, saves = Feed(client, head, checkpoints, card), Checkpoints(checkpoints, client, head)
    with saves.leaving():
        saves.report_again()
        feed.begin_step()
        publish_if_due(client, head, feed.publish_every)
        while client.version < head.max_steps and train_step(client, head, feed, saves):
            feed.begin_step()
            publish_if_due(client, head, feed.publish_every)
            if client.version % client.config.learner.checkpoint_every == 0 or client.version == head.max_steps:
                # A learner that resumes from this checkpoint can make this version's snapshot again, but no earlier
                # one, and later steps may need that.
                with feed.meter.time("publish_wait"):
                    head.finish_publishing(but=client.version)
                saves.begin()
        if not head.stop_reason:
            saves.finish(is_last=True)
            head.doing = "sending the last snapshot"
            head.finish_publishing()
    return head.stop_reason or "all steps are trained"


def train_step(client: GrpoClient, head: HeadSession, feed: Feed, saves: Checkpoints) -> bool:
    """Train version t on the groups of step t, each of them once, and have the head record the step. Return False if
    the head says stop before the step is complete.

    A step of several updates (`updates_per_step`) is cut into as many parts. No micro-batch crosses the border of two
    parts, and each part is an update of its own.
    """
    step = client.version
    while True:
        for groups in feed.microbatches():  # each as soon as its groups have arrived
            client.forward_backward(groups)
        if head.stop_reason:
            return False
        with feed.meter.time("checkpoint"):
            saves.finish()
        with feed.meter.time("publish_wait"):
            client.finish_reading()
        with feed.meter.time("train"):
            stats = client.optim_step(ends_step=feed.is_complete)
        if feed.is_complete:
            break
    metrics = feed.meter.metrics(stats) | {"perf/microbatch": client.tokens_per_microbatch}
    head.report_step(step, feed.meter.numbers, metrics, stats.logprobs)
    saves.recorded(feed.cursor)
    return True


def publish_if_due(client: GrpoClient, head: HeadSession, publish_every: int) -> None:
    """Publish the weights if kappa steps have passed or this is the last step, and they are not published yet.

    After a resume between two publications, the head may have lost the newest snapshot that was due. Then the current
    weights take its place; otherwise workers would wait for ever.
    """
    version, published = client.version, head.published
    newest_due = version - version % publish_every
    is_due = version == newest_due or version == head.max_steps
    if version in published or (not is_due and any(newest_due <= have < version for have in published)):
        return
    head.publish(version, client.save_weights_for_sampler())


class GrpoClient(TrainedPolicy):
    """The arithmetic of a step: gradients of groups, and updates with them. `version` = completed training steps.

    With several ranks each of them makes the same calls, and the trainer divides the work (`learner_process.py`).
    """

    def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
        """Add the gradient sums of whole groups. Return statistics of these groups alone.

        Raises:
            InvariantError: a group is unscored or has an empty prompt.
        """
        learner, temperature = self.config.learner, self.config.sampling.temperature
        # Each rollout's advantage: its reward relative to its group's (`data.py`). Tokens of environments are masked.
        parts = [self.take_data(group) for group in groups]
        data = [datum for part in parts for datum in part.data]
        if self.teachers is not None:  # adds the teacher's logprobs, which `GrpoLoss` uses
            data = self.teachers.taught(groups, parts)
        if learner.reference_kl > 0.0:
            unrouted = [replace(datum, routes=None) for datum in data]  # the reference's routers choose for themselves
            reference = self.trainer.forward(REFERENCE, unrouted, temperature)
            data = [replace(datum, reference_logprobs=logp) for datum, logp in zip(data, reference, strict=True)]
        loss = GrpoLoss(self.loss, learner.reference_kl, self.config.distill)
        done = self.trainer.forward_backward(POLICY, data, loss, temperature)
        if self.teachers is not None:
            self.sums.taught = merged(self.sums.taught, self.teachers.measure(groups, parts, data, done.logprobs))
        return self.add_to_step(groups, parts, done)

    def optim_step(self, ends_step: bool = True) -> StepStats:
        """Make one AdamW step on the gradients added so far. Return statistics of the whole step.

        The last update ends the step: the version grows by one. `ends_step` False: more groups of the step will come.

        Raises:
            UserError: the gradient is not finite (training has diverged); the weights are those before the update.
        """
        # The last part of a step with several updates may be empty: no update then.
        if not (ends_step and self.is_within_step and self.sums.num_rollouts == 0):
            learner = self.config.learner
            lr = learning_rate(learner, self.version, self.config.run.max_steps)
            if learner.loss != "none":  # that is the negative control, which corrects nothing
                # Far off-policy data move the weights less (VCPO, arXiv 2602.17616): `ess_ratio` is the effective share
                # of the sequences. The rate is scaled, not the gradient, because Adam would cancel that.
                lr *= math.sqrt(self.sums.stats.ess_ratio)
            max_tokens = self.config.sampling.max_tokens
            divisor = divisor_of(learner.normalisation, self.sums.num_tokens, self.sums.num_rollouts, max_tokens)
            adam = AdamParams(lr, weight_decay=learner.weight_decay, grad_clip=learner.grad_clip)
            updated = self.trainer.optim_step(POLICY, adam, divisor)
            self.add_update(lr, divisor, updated)
        return self.end_step() if ends_step else self.step_so_far


@dataclass(frozen=True, slots=True)
class GrpoLoss:
    """The policy gradient with importance weights pi / mu, truncated or clipped as `learner.loss` says (`losses.py`),
    plus `reference_kl` times KL(pi || pi_ref), plus the pull of a teacher (both in `teachers.py`). Returns the tokens'
    losses, and statistics of the micro-batch.

    Shape suffixes: n = loss tokens, S = sequences.
    """

    policy_loss: PolicyLoss
    reference_kl: float
    distill: DistillConfig = field(default_factory=DistillConfig)

    def __call__(self, logp_n: Tensor, tokens: LossTokens) -> tuple[Tensor, LossStats]:
        is_taught, divergence = bool(self.distill.teachers), self.distill.in_loss
        if is_taught and divergence is None:
            tokens = towards_teacher(logp_n, tokens, self.distill.weight)
        policy_losses = self.policy_loss(logp_n, tokens)
        loss_n, reference_kl = policy_losses.loss_n, None
        if is_taught and divergence is not None:
            divergence_n = joined_divergence(tokens.top_policy_nk, tokens.top_teacher_nk, divergence.beta)
            loss_n = loss_n + self.distill.weight * ~policy_losses.vetoed_S[tokens.sequence_n] * divergence_n
        if self.reference_kl > 0.0:
            kl_n = token_kl(logp_n, tokens, policy_losses.vetoed_S)
            loss_n, reference_kl = loss_n + self.reference_kl * kl_n, kl_n.detach().sum()
        loss = (loss_n.detach() * tokens.weight_n).sum()  # for the statistics; the trainer weighs the gradient itself
        return loss_n, measure(loss, logp_n, tokens, policy_losses, reference_kl)
