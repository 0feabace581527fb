"""Estimates what nothing has measured yet, from the model's sizes and data sheets: the seconds of a training step, and
the rollouts that a machine makes in a second. Each is a range, and what a short run measures takes its place.

Training is bound by arithmetic, of which a part is used; decoding by the memory's bandwidth, through which the weights
and all keys and values pass for each token, or, with many rollouts, by arithmetic. The constants are fitted to
public measurements of half of their sources, and judged by the other half (`benchmarks/planning/calibration.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echo2.config.values import FORMS
from echo2.learner.core.fitting import PROMPT_TOKENS
from echo2.learner.decide.model_shape import ModelShape
from echo2.planning.gpus import Gpu

#: Share of a GPU's arithmetic that large matrices use in training, and the width at which half of that is reached by an
#: H100, whose `FAST_TFLOPS` need larger matrices than slower GPUs do.
TRAINING_SHARE, HALF_WIDTH, FAST_TFLOPS = 0.55, 500, 989.0
#: The same for mixtures: each expert has few tokens.
MIXTURE_SHARE = 0.7
#: What this project's learner makes of what such systems do, measured on one H200 at three widths.
OWN_SHARE = 0.65
#: Share of the memory's bandwidth that decoding uses.
BANDWIDTH_SHARE = 0.9
#: Seconds that a decoding step takes besides, by engine; on a GPU `compact` and `transformers` wait for the starts of
#: kernels (docs/log.md, 27 November 2026).
STEP_SECONDS = {"vllm": 0.003, "compact": 0.02, "transformers": 0.048}
#: For engines that round, which were not measured on a GPU, those of `compact`, whose sampler they share.
STEP_SECONDS |= dict.fromkeys(FORMS, STEP_SECONDS["compact"])
#: Share of the arithmetic that decoding and reading prompts use.
DECODING_SHARE = 0.8
#: Nine of ten public measurements are between an estimate divided by this and multiplied by it.
SPREAD = 2.0
#: Mean length of answers, as a share of the longest, where nothing has been sampled.
ANSWER_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run does with a model. `answer_tokens`: mean length of its answers; `bytes_per_weight`: of what workers
    hold; `lora`: whether only adapters are trained; `checkpointing`: whether activations are computed again; `engine`:
    what samples on a GPU.
    """

    shape: ModelShape
    answer_tokens: float
    prompt_tokens: float = PROMPT_TOKENS
    bytes_per_weight: float = 2.0
    lora: bool = False
    checkpointing: bool = False
    engine: str = "vllm"

    @property
    def is_mixture(self) -> bool:
        """Whether a token passes through a part of the weights only."""
        return self.shape.active < 0.9 * self.shape.parameters


def training_share(hidden: int, tflops: float, is_mixture: bool) -> float:
    """Return the share of a GPU's arithmetic that training uses (model FLOPs utilisation), by the model's width."""
    share = OWN_SHARE * TRAINING_SHARE * hidden / (hidden + HALF_WIDTH * tflops / FAST_TFLOPS)
    return share * (MIXTURE_SHARE if is_mixture else 1.0)


def training_flops_per_token(work: Workload) -> float:
    """Return the floating-point operations that training needs for one token of a row.

    Two for each weight in the forward pass, as many for the gradient of its input, and, unless it is frozen, of the
    weight; attention over half of the row on average. An embedding is looked up, not multiplied.
    """
    shape = work.shape
    weights = shape.active - (0 if shape.tied else shape.vocabulary)
    reading = sum(bool(layer.cache) and not layer.window for layer in shape.layers)
    attention = 2 * (work.prompt_tokens + work.answer_tokens) * shape.hidden * reading
    passes = 2 + (0 if work.lora else 1)
    return 2.0 * weights * (passes + work.checkpointing) + attention * (3 + work.checkpointing)


def training_seconds(work: Workload, rollouts: int, gpu: Gpu, count: int) -> float:
    """Return the seconds of a step over these rollouts, on so many GPUs that share it evenly."""
    tokens = rollouts * (work.prompt_tokens + work.answer_tokens)
    share = training_share(work.shape.hidden, gpu.tflops, work.is_mixture)
    return tokens * training_flops_per_token(work) / (count * gpu.tflops * 1e12 * share)


def teacher_seconds(teacher: ModelShape, work: Workload, rollouts: int, gpu: Gpu, count: int) -> float:
    """Return the seconds in which a teacher scores the tokens of a step: a forward pass on the same GPUs."""
    teacher_work = replace(work, shape=teacher)
    tokens = rollouts * (work.prompt_tokens + work.answer_tokens)
    flops = training_flops_per_token(replace(teacher_work, lora=False, checkpointing=False)) / 3.0
    share = training_share(teacher.hidden, gpu.tflops, teacher_work.is_mixture)
    return tokens * flops / (count * gpu.tflops * 1e12 * share)


def touched_weights(shape: ModelShape, rollouts: int) -> float:
    """Return the weights that a decoding step reads: of a mixture, those of the experts that some rollout chose."""
    return shape.parameters * (1 - (1 - shape.active / shape.parameters) ** rollouts)


def tokens_per_second(work: Workload, gpu: Gpu, rollouts: int) -> float:
    """Return the tokens a second of an engine that samples so many rollouts at once."""
    shape = work.shape
    length = work.prompt_tokens + work.answer_tokens / 2
    values = sum(
        layer.cache * (min(length, layer.window) if layer.window else length) + layer.state for layer in shape.layers
    )
    num_bytes = work.bytes_per_weight * touched_weights(shape, rollouts) + 2 * values * rollouts
    reading = num_bytes / (gpu.bandwidth_gb_per_second * 1e9 * BANDWIDTH_SHARE)
    tokens = rollouts * (1 + work.prompt_tokens / work.answer_tokens)  # with those of the prompts that come meanwhile
    computing = 2 * shape.active * tokens / (gpu.tflops * 1e12 * DECODING_SHARE)
    return rollouts / (reading + computing + STEP_SECONDS[work.engine])


def rollouts_per_second(work: Workload, gpu: Gpu, at_once: int) -> float:
    """Return the rollouts a second of a machine with one such GPU, whose memory holds as many as it samples at once."""
    return tokens_per_second(work, gpu, at_once) / work.answer_tokens
