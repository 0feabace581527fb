"""Estimates for a run whose learner and workers compute on the cores of one machine: seconds of one core for a training
step and for a batch of rollouts, from the model's sizes, lengths, and what a core does (`engines/processor.py`).

Unlike a GPU, a core is kept busy by all that it does, one after the other, so the parts are added: products, memory,
and the operations themselves. The counts of passes and operations are those of this project's learner and engine
`compact`, counted and measured with several models (`benchmarks/planning/forecast.py --parts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.engines.processor import Processor
from echo2.learner.decide.memory import LearnerSetup
from echo2.learner.decide.model_shape import ModelShape

#: Times that as many bytes as autograd keeps of a token are written to new memory: what is kept, what is not, and
#: gradients of both. What is computed meanwhile is hidden by the memory.
ACTIVATION_PASSES = 6.0
#: Bytes of a trained weight that an update passes through memory: gradient, moments and weight, read and written.
UPDATE_BYTES = 40.0
#: Operations of a layer in a decoding step: norms, rotations, the cache, activations; and times that they pass as many
#: bytes through memory as autograd would keep of the tokens.
LAYER_OPERATIONS, DECODING_PASSES = 45, 12.0
#: Share of the rows in a batch that still run, on average between two times that ended ones are dropped
#: (`engines/rows.py: DROP_BELOW`).
RUNNING_SHARE = 0.93
#: Bytes of a snapshot that a core encodes in a second (docs/log.md, 21 November 2026), and seconds of a core for each
#: byte of a payload, from the learner over the head to an installed set of weights (25 November 2026).
ENCODED_PER_SECOND, PAYLOAD_SECONDS = 0.7e9, 10.0 / (1 << 30)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and answers, and tokens that the learner runs for an answer: fewer where answers of a
    group begin alike. `longest`: of a batch's answers.
    """

    prompt: float
    answer: float
    trained: float
    longest: float


def training_seconds(
    shape: ModelShape, lengths: Lengths, groups: float, group_size: int, core: Processor, lora_rank: int = 0
) -> float:
    """Return the seconds of a core for a step of so many groups that are trained on, in float32. A group's prompt is
    run once. With adapters of `lora_rank`, the weights below them have no gradients."""
    trained = shape.adapter_parameters(lora_rank) if lora_rank else shape.parameters
    forward, head, passing = _passes(shape, lengths, groups, group_size, core)
    products = (2.0 if lora_rank else 3.0) * forward + (3.0 if lora_rank else 4.0) * head  # logits are computed twice
    return products + passing + UPDATE_BYTES * trained / (core.gb_per_second * 1e9)


def scoring_seconds(teacher: ModelShape, lengths: Lengths, groups: float, group_size: int, core: Processor) -> float:
    """Return the seconds of a core in which a teacher scores so many groups: a forward pass."""
    forward, head, passing = _passes(teacher, lengths, groups, group_size, core)
    return forward + head + passing / 3.0


def _passes(
    shape: ModelShape, lengths: Lengths, groups: float, group_size: int, core: Processor
) -> tuple[float, float, float]:
    """Return the seconds of the products of one forward pass, in the layers and of the logits, and those in which
    activations of a forward and a backward pass pass through memory."""
    answers = groups * group_size * lengths.trained
    tokens = groups * lengths.prompt + answers
    layers = shape.active - shape.vocabulary * (1 if shape.tied else 2)
    row = lengths.prompt + group_size * lengths.trained
    attention = 2.0 * row * shape.hidden * sum(bool(layer.cache) for layer in shape.layers)
    saved_bytes = LearnerSetup(shape).token_bytes(checkpointing=False) * tokens
    passing = ACTIVATION_PASSES * saved_bytes / (core.fresh_gb_per_second * 1e9)
    products = 2.0 / (core.gflops * 1e9)
    return products * tokens * (layers + attention), products * answers * shape.vocabulary, passing


def decoding_seconds(shape: ModelShape, length: float, rows: float, width: int, core: Processor) -> float:
    """Return the seconds of a core for one more token of so many rows, which have this mean length; `width`: bytes of a
    weight."""
    of = core.bfloat16 if width == 2 else core.float32
    products = width * shape.active / (of.gb_per_second * 1e9) + 2.0 * shape.active * rows / (of.gflops * 1e9)
    values = sum(layer.cache * length + layer.state for layer in shape.layers)
    cache = width * values * rows / (core.attention_gb_per_second * 1e9)
    passing = DECODING_PASSES * width / 4 * LearnerSetup(shape).token_bytes(checkpointing=False) * rows
    operations = LAYER_OPERATIONS * len(shape.layers) * core.operation_seconds + passing / (core.gb_per_second * 1e9)
    return products + cache + operations + rows * shape.vocab * core.drawn_seconds


def batch_seconds(
    shape: ModelShape, lengths: Lengths, groups: float, group_size: int, width: int, core: Processor
) -> float:
    """Return the seconds of a core for a batch of whole groups that begin together. It lasts as long as its longest
    answer; a group's prompt is read once."""
    rows = groups * group_size * lengths.answer / lengths.longest / RUNNING_SHARE  # answers end one by one
    of = core.bfloat16 if width == 2 else core.float32
    reading = 2.0 * shape.active * groups * lengths.prompt / (of.gflops * 1e9)
    length = lengths.prompt + lengths.answer / 2
    return reading + lengths.longest * decoding_seconds(shape, length, rows, width, core)


def first_broadcast_seconds(full_bytes: float) -> float:
    """Return the seconds from the start until workers on this machine have the first weights."""
    return full_bytes / ENCODED_PER_SECOND + full_bytes * PAYLOAD_SECONDS


def broadcast_seconds(full_bytes: float, payload_bytes: float) -> float:
    """Return the seconds until workers on this machine have a new version: it is compared with the one before, and
    laid over it."""
    return 2.0 * full_bytes / ENCODED_PER_SECOND + payload_bytes * PAYLOAD_SECONDS
