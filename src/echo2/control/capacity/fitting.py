"""Checks whether a run's learner and workers fit in their machines' memory (`memory.py`), and sizes the micro-batch.

The learner takes the first GPU, local workers the ones after it, counted round (`devices.nth_device`); on a machine
without one all share its memory. What is settled follows from the configuration, the model and the machine's total
memory alone: the same on every start of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echo2.config import Config
from echo2.control.capacity.memory import (
    GB,
    USABLE,
    LearnerSetup,
    Microbatch,
    ModelShape,
    engine_parts,
    settle_microbatch,
    worker_parts,
)
from echo2.errors import UserError
from echo2.types import Hardware

#: The head's memory: it does not grow with the model.
HEAD_BYTES = 500_000_000
#: Tokens of a prompt where nobody has looked at the tasks.
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes by part that a process needs, `available` to it at most, and where that is."""

    parts: dict[str, int]
    available: int
    place: str

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class LearnerMemoryNeed(MemoryNeed):
    """What the learner needs with its micro-batch."""

    microbatch: Microbatch


def row_tokens(config: Config, shape: ModelShape) -> int:
    """Tokens of the longest row that is trained on: one datum is never cut."""
    return min(shape.max_positions, PROMPT_TOKENS + config.sampling.max_tokens)


def learner_setup(config: Config, shape: ModelShape, on_gpu: bool) -> LearnerSetup:
    """What the learner's memory follows from."""
    return LearnerSetup(
        shape,
        is_bfloat16=config.model.compute_dtype == "bfloat16" or (config.model.compute_dtype == "auto" and on_gpu),
        ranks=config.learner.ranks,
        lora_rank=config.lora.rank,
        base_bytes=shape.stored_bytes if on_gpu else max(4, shape.stored_bytes),
        keeps_reference=config.learner.reference_kl > 0.0,
    )


def settle(config: Config, shape: ModelShape, machine: Hardware) -> Microbatch:
    """The learner's micro-batch on this machine."""
    given = config.learner.tokens_per_microbatch
    setup = learner_setup(config, shape, bool(machine.gpus))
    place: Literal["cpu", "gpu"] = "gpu" if machine.gpus else "cpu"
    room = USABLE * learner_bytes(config, shape, machine)
    return settle_microbatch(setup, room, place, row_tokens(config, shape), None if given == "auto" else given)


def learner_bytes(config: Config, shape: ModelShape, machine: Hardware) -> int:
    """What a learner's process may use of the machine: what head and local workers leave."""
    ranks, count = config.learner.ranks, config.workers.count
    local = worker_need(config, shape, machine).total
    if not machine.gpus:
        return (machine.memory_bytes - HEAD_BYTES - count * local) // ranks
    ranks = min(ranks, len(machine.gpus))  # the others are elsewhere
    sharing = -(-(ranks + count) // len(machine.gpus)) - 1  # of those on the fullest GPU
    return min(machine.gpus) - sharing * local


def worker_need(config: Config, shape: ModelShape, machine: Hardware) -> MemoryNeed:
    """A worker on such a machine: where two copies of the weights don't fit, it takes new ones in place."""
    sampling = config.sampling
    rollouts, length = sampling.groups_per_batch * sampling.group_size, row_tokens(config, shape)
    available = min(machine.gpus, default=machine.memory_bytes)
    bytes_per_value = {"float32": 4, "bfloat16": 2}[config.model.snapshot_dtype]
    parts = worker_parts(shape, bytes_per_value, rollouts, length)
    if config.workers.engine == "compact":
        free = max(0, available - sum(parts.values()))
        packs = not machine.gpus and bytes_per_value == 4
        parts |= engine_parts(parts["weights"], free, packs, bool(config.tasks.environment))
    return MemoryNeed(parts, available, "a GPU" if machine.gpus else "the machine")


def learner_need(config: Config, shape: ModelShape, machine: Hardware) -> LearnerMemoryNeed:
    """The learner on this machine, with the micro-batch it would take, and room for the longest row."""
    microbatch = settle(config, shape, machine)
    setup = learner_setup(config, shape, bool(machine.gpus))
    tokens = max(microbatch.tokens, row_tokens(config, shape))
    parts = setup.parts(tokens, microbatch.checkpointing)
    available = learner_bytes(config, shape, machine)
    return LearnerMemoryNeed(parts, available, "a GPU" if machine.gpus else "the machine", microbatch)


def check_fits(what: str, need: MemoryNeed, remedies: str) -> None:
    """Refuse what cannot fit.

    Raises:
        UserError: with what is needed, the largest parts of it, what there is, and what would help.
    """
    if need.total <= need.available:
        return
    largest = sorted(need.parts.items(), key=lambda part: -part[1])[:3]
    told = ", ".join(f"{name} {num_bytes / GB:.1f}" for name, num_bytes in largest)
    raise UserError(
        f"{what} needs {need.total / GB:.1f} GB ({told}, ...), and {need.place} has {max(0, need.available) / GB:.1f} "
        f"GB for it. {remedies}"
    )
