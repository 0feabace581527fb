"""The learner of a service: many adapters over one frozen base model, each with its own optimizer.

An adapter is created, trained, saved, removed from memory and loaded again under a name; no verb on one adapter changes
a bit of another's results. A forward pass holds data of one adapter, so its numbers depend, to the last bit, on that
data alone: results lost with a process can be computed again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from echo2.config.sections import LoraConfig
from echo2.core.errors import UserError
from echo2.learner.core.adapters import Adapter, BaseModel
from echo2.learner.core.batch import microbatches
from echo2.learner.core.checkpoint import write_checkpoint
from echo2.learner.core.datum import Datum
from echo2.learner.core.trainer import AdamParams, OptimStep, Trainer
from echo2.weights.format.adapter_files import ADAPTER_CONFIG
from echo2_service.decide.pass_size import PassSize
from echo2_service.learner.losses import client_loss

#: Tokens in one pass: the longest work that another adapter's request waits for.
TOKENS_PER_PASS = 4096


@dataclass(frozen=True, slots=True)
class Losses:
    """`logprobs[i]` is 'd' [T] of datum i; `total` the sum of all weighted token losses."""

    logprobs: list[array[float]]
    total: float


class Tenants:
    """Adapters over one base model. To be used from one thread."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._trainer = Trainer(TOKENS_PER_PASS)
        self._adapters: dict[str, Adapter] = {}
        self._sizes: dict[str, PassSize] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def add(self, name: str, lora: LoraConfig, seed: int) -> None:
        """Create an adapter. The same settings and seed give the same adapter.

        Raises:
            UserError: the name is taken, or a target matches no linear layer.
        """
        adapter = self._base.adapter(lora, seed)
        adapter.files = {ADAPTER_CONFIG: adapter.files[ADAPTER_CONFIG]}  # the other files are the base model's
        try:
            self._trainer.add(name, adapter)
        except BaseException:
            self._base.remove(adapter)
            raise
        self._adapters[name] = adapter
        self._sizes[name] = PassSize(TOKENS_PER_PASS)

    def remove(self, name: str) -> None:
        """Forget an adapter, its gradients and its optimizer."""
        self._trainer.remove(name)
        self._base.remove(self._adapters.pop(name))
        del self._sizes[name]

    def warm_up(self) -> None:
        """Do the slow work of a first request (seconds of imports) now."""
        self.add("", LoraConfig(rank=1), 0)
        self.forward_backward("", [Datum(array("i", [0]), array("i", [0]), b"\x01")], "cross_entropy", {})
        self.remove("")

    def num_bytes(self, name: str) -> int:
        """Return the memory of an adapter in bytes, with its gradients and moments."""
        return 4 * sum(tensor.nbytes for tensor in self._adapters[name].state().values())

    def passes(self, data: Sequence[Datum]) -> list[list[Datum]]:
        """Split the data, in order, into parts of one pass each; another adapter may be served between two parts. The
        sums over the parts do not depend on that.

        Raises:
            UserError: a token is outside of the vocabulary, or a sequence is longer than the model's context.
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
        """Add the gradients of the sum of the data's losses, or with `adds_gradients` False only compute the losses.

        Raises:
            UserError: there is no such adapter, loss or parameter, or memory does not hold a datum. Then gradients of
                only a part of the data may have been added.
        """
        function, size = client_loss(loss, params), self._sizes.get(name, PassSize(TOKENS_PER_PASS))
        self._trainer.tokens_per_microbatch = size.tokens
        try:
            done = self._trainer.forward_backward(name, data, function, adds_gradients=adds_gradients)
        finally:
            size.passed(self._trainer.tokens_per_microbatch)
        return Losses(done.logprobs, sum(done.outputs))

    def gradients(self, name: str) -> list[Tensor | None]:
        """Return a copy of the gradients added since the last step."""
        parameters = self._adapters[name].trained_parameters().values()
        return [each.grad.clone() if each.grad is not None else None for each in parameters]

    def set_gradients(self, name: str, gradients: Sequence[Tensor | None]) -> None:
        """Replace the gradients, for example by an earlier copy."""
        for parameter, grad in zip(self._adapters[name].trained_parameters().values(), gradients, strict=True):
            parameter.grad = grad

    def optim_step(self, name: str, adam: AdamParams) -> OptimStep:
        """Make one AdamW step on the gradients added since the last step, and discard them.

        Raises:
            UserError: there is no such adapter, or the gradient is not finite: the weights are unchanged.
        """
        return self._trainer.optim_step(name, adam)

    def save(self, name: str, directory: Path, client: Mapping[str, object]) -> None:
        """Write weights, optimizer and the client's data to `directory`, whole or not at all.

        Raises:
            UserError: the directory cannot be written, or there is no room.
        """
        self._trainer.save_state(name, directory, client).result()

    def load(self, name: str, directory: Path, with_optimizer: bool) -> dict[str, object]:
        """Load weights, and if wanted the optimizer; discard gradients. Return the client's data in the checkpoint.

        Raises:
            UserError: there is no whole checkpoint, or it is of an adapter of another shape or base.
        """
        return self._trainer.load_state(name, directory, with_optimizer)

    def publish(self, name: str, directory: Path) -> None:
        """Write the weights alone, as a PEFT adapter for samplers.

        Raises: as `save`.
        """
        adapter = self._adapters[name]
        base = {"base_model": self._base.snapshot.ref.policy}
        write_checkpoint(directory, base, adapter.files, {adapter.weights_file: adapter.weights()})
