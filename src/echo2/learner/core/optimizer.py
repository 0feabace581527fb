"""AdamW with its moments on the parameters' device, there in 8 bits, or in the machine's memory.

Moments in the machine's memory pass through the device piece by piece in each step, and are updated there by the kernel
that would update them if they stayed: the results are the same. Gradients can go to the machine's memory, too, each as
soon as the backward pass has made it.

Moments of 8 bits (arXiv 2110.02861, bitsandbytes) have a factor for each block of 256, and are not the same.

Weights and moments are float32; matrix products may be bfloat16 (autocast). Trained weights in bfloat16 have 8 bits:
AdamW moves a weight by about the learning rate, and a change below half of the gap between two numbers is rounded away,
every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from echo2.config.sections import LearnerConfig
from echo2.core.devices import require_bitsandbytes
from echo2.core.errors import UserError
from echo2.learner.decide.memory import GRADIENTS

#: Values that pass through the device at a time, a multiple of any vector's length: 16 bytes each there.
PIECE = 1 << 24
#: Of a parameter's moments, by their names in optimizers.
PLAIN = ("exp_avg", "exp_avg_sq", "step")
IN_8_BITS = ("state1", "state2", "absmax1", "absmax2", "step")
KINDS = tuple(dict.fromkeys((*PLAIN, *IN_8_BITS)))
HOST = torch.device("cpu")
#: Number of values of a tensor that are examined.
SAMPLE = 100_000


def learning_rate(learner: LearnerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`."""
    if step < learner.warmup_steps:
        return learner.lr * (step + 1) / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return learner.lr
    done = (step - learner.warmup_steps) / max(1, num_steps - learner.warmup_steps)
    remaining = 1.0 - min(1.0, done)
    return learner.lr * (remaining if learner.lr_schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * remaining))


def refuse_vanishing_updates(parameters: Mapping[str, Tensor], lr: float) -> None:
    """Refuse to train weights in a precision in which the updates of this learning rate would mostly be rounded away.

    Raises:
        UserError: names the tensor, the numbers and what to do.
    """
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            continue
        typical = float(parameter.detach().flatten()[:SAMPLE].float().abs().median())
        least = typical * torch.finfo(parameter.dtype).eps / 4  # half of the gap is at least this
        if 0.0 < lr < least:
            raise UserError(
                f"learner.lr = {lr:g} would change next to nothing: {name} is held in {parameter.dtype}, its weights "
                f"are about {typical:.2g}, and changes below {least:.2g} are rounded away. Hold the weights in float32 "
                "(products may be bfloat16: model.compute_dtype), or train an adapter (lora.rank), which is float32."
            )


class HostAdamW(torch.optim.AdamW):
    """AdamW with moments in the machine's memory. `gradients`: those that are there, too."""

    def __init__(self, parameters: Sequence[nn.Parameter], takes_gradients: bool) -> None:
        super().__init__(parameters, fused=True)
        self.gradients: dict[Tensor, Tensor] = {}
        if takes_gradients:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        new, parameter.grad = parameter.grad.to(HOST), None
        before = self.gradients.get(parameter)
        self.gradients[parameter] = new if before is None else before.add_(new)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure has a loss here
        (group,) = self.param_groups
        for parameter in group["params"]:
            gradient = gradient_of(self, parameter)
            if gradient is not None:
                self._update(parameter, gradient, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, device = self.state[parameter], parameter.device
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=HOST)
        beta1, beta2 = group["betas"]
        whole = parameter.detach().view(-1), gradient.reshape(-1), *(state[kind].view(-1) for kind in PLAIN[:2])
        for start in range(0, parameter.numel(), PIECE):
            pieces = [tensor[start : start + PIECE] for tensor in whole]
            values, grads, mean, square = (piece.to(device) for piece in pieces)
            adamw(
                [values],
                [grads],
                [mean],
                [square],
                [],
                [state["step"].to(device, copy=True)],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
            pieces[2].copy_(mean)
            pieces[3].copy_(square)
        state["step"] += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.gradients.clear()


def make_optimizer(
    parameters: Sequence[nn.Parameter], device: torch.device, in_8_bits: bool = False, offloaded: str = ""
) -> torch.optim.Optimizer:
    """Return the optimizer of parameters on a device. `offloaded`: what is in the machine's memory (`OFFLOADS`)."""
    if in_8_bits:
        require_bitsandbytes("learner.quantised = 'moments'")
        from bitsandbytes.optim import AdamW8bit

        made: torch.optim.Optimizer = AdamW8bit(parameters)
        return made
    if offloaded:
        return HostAdamW(parameters, offloaded == GRADIENTS)
    return torch.optim.AdamW(parameters, fused=device.type in ("cpu", "cuda"))


def gradient_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, wherever it is."""
    gradient = optimizer.gradients.get(parameter) if isinstance(optimizer, HostAdamW) else None
    return parameter.grad if gradient is None else gradient


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the moments of a parameter and its number of steps, by name; none before its first step."""
    state = optimizer.state.get(parameter, {})
    return {kind: torch.as_tensor(state[kind], dtype=_dtype(kind)) for kind in _kinds(optimizer) if kind in state}


def set_moments(optimizer: torch.optim.Optimizer, parameter: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Set what `moments_of` has returned.

    Raises:
        UserError: they are of another kind of optimizer.
    """
    kinds = _kinds(optimizer)
    if kinds[0] not in moments:
        raise UserError(
            f"The checkpoint's moments have {32 if kinds == IN_8_BITS else 8} bits. Set learner.quantised back to "
            f"{'none' if kinds == IN_8_BITS else 'moments'!r}, or start another --out."
        )
    place = HOST if isinstance(optimizer, HostAdamW) else parameter.device
    state: dict[str, Any] = {kind: tensor.to(place) for kind, tensor in moments.items()}
    if kinds == IN_8_BITS:
        state["step"] = int(state["step"])
        if "absmax1" in state:  # small tensors have plain moments
            eight: Any = optimizer
            maps = {"qmap1": eight.name2qmap["dynamic"], "qmap2": eight.name2qmap["udynamic"]}
            state |= {name: values.to(place) for name, values in maps.items()}
    optimizer.state[parameter] = state


def _kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    return PLAIN if isinstance(optimizer, torch.optim.AdamW) else IN_8_BITS


def _dtype(kind: str) -> torch.dtype | None:
    return torch.float32 if kind == "step" else None
