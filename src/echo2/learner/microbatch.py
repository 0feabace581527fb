"""Determines how many tokens one forward and backward pass may have on this machine."""

from __future__ import annotations

import logging
from dataclasses import replace

from echo2.config import Config
from echo2.control.capacity.fitting import settle
from echo2.control.capacity.memory import MICROBATCH_TOKENS_MAX, Microbatch, read_shape
from echo2.devices import this_machine
from echo2.learner.mesh import Mesh
from echo2.learner.model import Policy

log = logging.getLogger(__name__)


def microbatch_tokens(policy: Policy, config: Config, mesh: Mesh) -> int:
    """Return the maximum tokens of a micro-batch; switch on activation checkpointing if the memory forecast says so.
    Both are the same on every rank: those of the one with the least memory.
    """
    sized = replace(config, learner=replace(config.learner, ranks=mesh.size))  # torchrun may have set it
    settled = _settled(policy, sized)
    answers = mesh.gather(f"{settled.tokens} {int(settled.checkpointing)}".encode())
    found = [tuple(map(int, answer.split())) for answer in answers]
    tokens = min(each for each, _ in found)
    checkpointing = any(each for _, each in found) and policy.checkpoint_activations()
    how = "activations are computed again" if checkpointing else "activations are kept"
    log.info("micro-batches of %d tokens at most; %s", tokens, how)
    return tokens


def _settled(policy: Policy, config: Config) -> Microbatch:
    machine, given = this_machine(), config.learner.tokens_per_microbatch
    if policy.device.type != "cuda":
        machine = replace(machine, gpus=())
    shape = read_shape(policy.module.config.to_dict())
    if shape is None:
        tokens = MICROBATCH_TOKENS_MAX["cpu"] if given == "auto" else given
        kind = policy.module.config.model_type
        log.warning("no memory forecast for %s: micro-batches have at most %d tokens", kind, tokens)
        return Microbatch(tokens, checkpointing=False)
    return settle(config, shape, machine)
