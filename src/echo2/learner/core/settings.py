"""What the learner derives from settings: the learning rate, the micro-batch, the precision.

Weights and moments are float32; matrix products may be bfloat16 (autocast). Trained weights in bfloat16 have 8 bits:
AdamW moves a weight by about the learning rate, and a change below half of the gap between two numbers is rounded away,
every time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from echo2.config import Config
from echo2.config.sections import LearnerConfig
from echo2.core.devices import this_machine
from echo2.core.errors import UserError
from echo2.engines.model_values import values_of
from echo2.learner.core.fitting import settle
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy
from echo2.learner.decide.memory import CPU_MICROBATCH_TOKENS_MAX, Microbatch
from echo2.learner.decide.model_shape import read_shape

log = logging.getLogger(__name__)

#: Number of values of a tensor that are examined.
SAMPLE = 100_000


def learning_rate(learner: LearnerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`."""
    if step < learner.warmup_steps:
        return learner.lr * (step + 1) / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return learner.lr
    done = (step - learner.warmup_steps) / max(1, num_steps - learner.warmup_steps)
    left = 1.0 - min(1.0, done)
    return learner.lr * (left if learner.lr_schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def fitted(policy: Policy, config: Config, mesh: Mesh) -> Microbatch:
    """Return the micro-batch that fits; switch on activation checkpointing if the memory forecast says so. Both are the
    same on every rank: those of the one with the least memory.
    """
    sized = replace(config, learner=replace(config.learner, ranks=mesh.size))  # torchrun may have set it
    settled = _settled(policy, sized)
    answers = mesh.gather(f"{settled.tokens} {int(settled.checkpointing)}".encode())
    found = [tuple(map(int, answer.split())) for answer in answers]
    tokens = min(each for each, _ in found)
    checkpointing = any(each for _, each in found) and policy.checkpoint_activations()
    how = "activations are computed again" if checkpointing else "activations are kept"
    log.info("micro-batches of %d tokens at most; %s", tokens, how)
    if settled.offloaded:
        log.info("%s are in the machine's memory, and pass through the GPU in each step", settled.offloaded)
    if settled.in_turns:
        log.info("the GPU has no room for local workers beside this learner: they take turns (--card)")
    return Microbatch(tokens, checkpointing, settled.offloaded, settled.in_turns)


def _settled(policy: Policy, config: Config) -> Microbatch:
    machine, given = this_machine(), config.learner.tokens_per_microbatch
    if policy.device.type != "cuda":
        machine = replace(machine, gpus=())
    shape = read_shape(values_of(policy.module.config))
    if shape is None:
        tokens = CPU_MICROBATCH_TOKENS_MAX if given == "auto" else given
        kind = policy.module.config.model_type
        log.warning("no memory forecast for %s: micro-batches have at most %d tokens", kind, tokens)
        return Microbatch(tokens, checkpointing=False)
    return settle(config, shape, machine)


def computes_in_bfloat16(setting: Literal["auto", "float32", "bfloat16"], device: torch.device) -> bool:
    """Whether matrix products on this device are bfloat16 under `model.compute_dtype`."""
    if setting == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return setting == "bfloat16"


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
