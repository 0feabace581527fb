"""Determines how many tokens one forward and backward pass may have on this machine."""

from __future__ import annotations

import logging
from dataclasses import replace

from echo2.config import Config
from echo2.control.capacity.fitting import settle
from echo2.control.capacity.memory import MICROBATCH_TOKENS_MAX, read_shape
from echo2.devices import this_machine
from echo2.learner.model import Policy

log = logging.getLogger(__name__)


def microbatch_tokens(policy: Policy, config: Config) -> int:
    """Return the maximum tokens of a micro-batch; switch on activation checkpointing if the memory forecast says so."""
    machine, given = this_machine(), config.learner.tokens_per_microbatch
    if policy.device.type != "cuda":
        machine = replace(machine, gpus=())
    shape = read_shape(policy.module.config.to_dict())
    if shape is None:
        tokens = MICROBATCH_TOKENS_MAX["cpu"] if given == "auto" else given
        log.warning("micro-batches of %d tokens: what memory such a model needs is not known", tokens)
        return tokens
    settled = settle(config, shape, machine)
    checkpointing = settled.checkpointing and policy.checkpoint_activations()
    how = "activations are computed again" if checkpointing else "activations are kept"
    log.info("micro-batches of %d tokens at most; %s", settled.tokens, how)
    return settled.tokens
