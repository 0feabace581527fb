"""Supervised fine-tuning: a policy learns the answers in rows. Gradients are means over the answer tokens.

A step depends on its number and data alone, so a resumed training gives the same result as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from echo2.config import Config
from echo2.core.errors import UserError
from echo2.learner.core.client_losses import client_loss
from echo2.learner.core.datum import Datum
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy
from echo2.learner.core.settings import computes_in_bfloat16, fitted, learning_rate, refuse_vanishing_updates
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.tasks.streams import refuse_changed_rows

POLICY = "policy"


class SupervisedClient:
    """One policy's training on answers. `step`: completed steps of `num_steps`; `rows`: the digests of the sources
    of rows, by name.
    """

    def __init__(self, policy: Policy, config: Config, num_steps: int, rows: Mapping[str, str]) -> None:
        """Raises:
        UserError: updates of `learner.lr` would vanish in the weights' precision.
        """
        self.step, self.num_steps, self._learner, self._rows = 0, num_steps, config.learner, dict(rows)
        policy.computes_in_bfloat16 = computes_in_bfloat16(config.model.compute_dtype, policy.device)
        refuse_vanishing_updates(policy.trained_parameters(), config.learner.lr)
        settled = fitted(policy, config, Mesh())
        self._trainer = Trainer(settled.tokens)
        self._trainer.add(POLICY, policy, True, config.learner.quantised == "moments", settled.offloaded)
        self._loss = client_loss("cross_entropy", {})

    def train(self, data: Sequence[Datum]) -> float:
        """Train one step on these rows. Return the loss before the step, in nats per answer token.

        Raises:
            UserError: memory does not hold one of the rows.
        """
        loss, num_tokens, learner = self._sum(data, adds_gradients=True), _num_taught(data), self._learner
        lr = learning_rate(learner, self.step, self.num_steps)
        adam = AdamParams(lr, weight_decay=learner.weight_decay, grad_clip=learner.grad_clip)
        self._trainer.optim_step(POLICY, adam, num_tokens)
        self.step += 1
        return loss / num_tokens

    def held_out_loss(self, data: Sequence[Datum]) -> float:
        """Return the loss on rows that are not trained on, in nats per answer token."""
        return self._sum(data, adds_gradients=False) / _num_taught(data)

    def save(self, directory: Path) -> None:
        """Write a checkpoint with everything needed to continue. Raises UserError: it can't be written."""
        state = {"step": self.step, "num_steps": self.num_steps, "rows": self._rows}
        self._trainer.save_state(POLICY, directory, state).result()

    def resume(self, directory: Path) -> None:
        """Continue from a checkpoint that `save` wrote.

        Raises:
            UserError: the checkpoint is of another model, or of a training of another number of steps or on other rows.
        """
        kept = self._trainer.load_state(POLICY, directory)
        if kept.get("num_steps") != self.num_steps:
            before, now = kept.get("num_steps"), self.num_steps
            raise UserError(
                f"{directory} belongs to a training of {before} steps, not of {now}, which has other learning rates."
            )
        refuse_changed_rows([*self._rows], [*self._rows.values()], kept.get("rows", {}))
        self.step = kept["step"]

    def _sum(self, data: Sequence[Datum], adds_gradients: bool) -> float:
        done = self._trainer.forward_backward(POLICY, data, self._loss, adds_gradients=adds_gradients)
        return sum(done.outputs)


def _num_taught(data: Sequence[Datum]) -> int:
    return sum(sum(datum.loss_mask) for datum in data)
