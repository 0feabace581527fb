"""The learner of a service: many adapters over one frozen base model, each with its own optimizer.

An adapter is created, trained, saved, removed from memory and loaded again under a name; no verb on one changes a bit
of what another computes. A forward pass holds data of one adapter: its numbers, to the last bit, depend on its own data
alone, so what was lost with a process can be computed again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from echo2.config.sections import LoraConfig
from echo2.errors import UserError
from echo2.learner.adapters import Adapter, BaseModel
from echo2.learner.batch import microbatches
from echo2.learner.checkpoint import write_checkpoint
from echo2.learner.client_losses import client_loss
from echo2.learner.datum import Datum
from echo2.learner.trainer import AdamParams, OptimStep, Trainer
from echo2.weights.adapter_files import ADAPTER_CONFIG

#: What one pass holds; the longest that another adapter's request waits for.
TOKENS_PER_PASS = 4096


@dataclass(frozen=True, slots=True)
class Losses:
    """`logprobs[i]` is 'd' [T] of datum i; `total` the sum of all weighted token losses."""

    logprobs: list[array[float]]
    total: float


class Tenants:
    """Adapters over one base model. For one thread."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._trainer = Trainer(TOKENS_PER_PASS)
        self._adapters: dict[str, Adapter] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def add(self, name: str, lora: LoraConfig, seed: int) -> None:
        """A new adapter, the same for the same settings and seed.

        Raises:
            UserError: there is one of that name, or a target matches no linear layer.
        """
        adapter = self._base.adapter(lora, seed)
        adapter.files = {ADAPTER_CONFIG: adapter.files[ADAPTER_CONFIG]}  # the others are the base model's
        self._trainer.add(name, adapter)
        self._adapters[name] = adapter

    def remove(self, name: str) -> None:
        """Forget an adapter, its gradients and its optimizer."""
        self._trainer.remove(name)
        self._base.remove(self._adapters.pop(name))

    def warm_up(self) -> None:
        """Pay now for what is slow the first time (seconds of imports), or whoever comes first would."""
        self.add("", LoraConfig(rank=1), 0)
        self.forward_backward("", [Datum(array("i", [0]), array("i", [0]), b"\x01")], "cross_entropy", {})
        self.remove("")

    def num_bytes(self, name: str) -> int:
        """What an adapter takes of memory, with its gradients and moments."""
        return 4 * sum(tensor.nbytes for tensor in self._adapters[name].state().values())

    def passes(self, data: Sequence[Datum]) -> list[list[Datum]]:
        """The data in order, in parts that one pass holds; another adapter's turn may come between two. What is added
        up over the parts does not depend on whether one does.

        Raises:
            UserError: a token that the model does not know, or a sequence longer than its context.
        """
        vocab_size, most = self._base.policy.vocab_size, self._base.policy.max_positions
        for place, datum in enumerate(data):
            length = len(datum.prompt_tokens) + datum.num_inputs
            if most is not None and length > most:
                raise UserError(f"datum {place} has {length} tokens; the model's context is {most}.")
            for tokens in (datum.prompt_tokens, datum.tokens, datum.targets or datum.tokens):
                if min(tokens) < 0 or max(tokens) >= vocab_size:
                    raise UserError(f"datum {place} has a token outside of 0..{vocab_size - 1}, the vocabulary.")
        return microbatches(data, TOKENS_PER_PASS, self._base.policy.honours_masks)

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss: str, params: Mapping[str, float], adds_gradients: bool = True
    ) -> Losses:
        """Add the gradients of the sum of the data's losses, or with `adds_gradients` False only tell the losses.

        Raises:
            UserError: there is no such adapter, loss or parameter, or memory does not hold a datum. Gradients may be of
                a part of the data then.
        """
        function = client_loss(loss, params)
        done = self._trainer.forward_backward(name, data, function, adds_gradients=adds_gradients)
        return Losses(done.logprobs, sum(done.outputs))

    def gradients(self, name: str) -> list[Tensor | None]:
        """A copy of the gradients added since the last step."""
        parameters = self._adapters[name].trained_parameters().values()
        return [each.grad.clone() if each.grad is not None else None for each in parameters]

    def set_gradients(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        """Go back to these."""
        for parameter, grad in zip(self._adapters[name].trained_parameters().values(), gradients, strict=True):
            parameter.grad = grad

    def optim_step(self, name: str, adam: AdamParams) -> OptimStep:
        """One AdamW step on the gradients added since the last, which are forgotten.

        Raises:
            UserError: there is no such adapter, or the gradient is not finite: the weights are as they were.
        """
        return self._trainer.optim_step(name, adam)

    def save(self, name: str, directory: Path, client: Mapping[str, object]) -> None:
        """Write weights and optimizer to `directory`, whole or not at all, and what the client keeps with them.

        Raises:
            UserError: the place cannot be written, or there is no room.
        """
        self._trainer.save_state(name, directory, client).result()

    def load(self, name: str, directory: Path, with_optimizer: bool) -> dict[str, object]:
        """Weights, and if wanted the optimizer, as they were saved; gradients are forgotten. What the client kept.

        Raises:
            UserError: there is no whole checkpoint, or it is of an adapter of another shape or base.
        """
        return self._trainer.load_state(name, directory, with_optimizer)

    def publish(self, name: str, directory: Path) -> None:
        """Write the weights alone, as a PEFT adapter: what a sampler reads.

        Raises: as `save`.
        """
        adapter = self._adapters[name]
        base = {"base_model": self._base.snapshot.ref.policy}
        write_checkpoint(directory, base, adapter.files, {adapter.weights_file: adapter.weights()})
