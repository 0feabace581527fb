"""Forecasts the memory of a learner and a worker, by part, from config.json alone, and the micro-batch that fits.

    learner   weights, gradients and moments of the trained parameters; activations, which grow with the tokens of a
              micro-batch; temporary tensors over the vocabulary (`learner/`'s tiles, gradients of the embedding)
    worker    weights, keys, values and states of the rollouts that it decodes, logits of one token each; from the
              remaining memory, copies of weights and rows kept between turns

A model's layers, and what each keeps of a token for the backward pass, stand in `model_shape.py`;
`tests/unit/test_learner_memory_forecast.py` compares the peak of whole processes with the forecast. With checkpointing
a layer keeps only its input, and one layer at a time is recomputed. Gradients of the vocabulary are made after the
activations are freed, so the larger of the two counts.

All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.learner.decide.model_shape import LayerShape, ModelShape

GB = 1_000_000_000
#: What of training may be in the machine's memory in place of the GPU's: nothing, or these, the first before both.
MOMENTS, GRADIENTS = "moments", "moments and gradients"
OFFLOADS = ("", MOMENTS, GRADIENTS)
#: By `model.snapshot_dtype`.
BYTES_PER_VALUE: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
#: Python, torch and transformers before a model is loaded; on a GPU the context and the kernels' workspaces.
PROCESS_BYTES = 500_000_000
#: Tiles of logits that exist at the same time (`learner/core/output_layer.py`), and tensors computed from them. On a
#: GPU tiles are larger: bytes of a position, and how many positions there are.
LOGITS_BYTES, GPU_LOGITS_TOKEN_BYTES, GPU_LOGITS_TOKENS = 200_000_000, 14 * 8192, 4096
#: Snapshots and checkpoints are written from the weights in segments of 16 MB, a few at a time.
PUBLISHING_BYTES = 200_000_000
#: The learner starts to train when a micro-batch is full. A micro-batch larger than this makes no step faster
#: (benchmarks/learning/microbatch.py).
CPU_MICROBATCH_TOKENS_MAX, GPU_MICROBATCH_TOKENS_MAX = 2048, 16_384
#: On a CPU, the limit of a micro-batch's activations in bytes, but at least CPU_TOKENS_MIN tokens: more gain no speed
#: (benchmarks/learning/microbatch.py), and other processes share the machine's memory.
CPU_ACTIVATIONS_BYTES, CPU_TOKENS_MIN = GB, 256
#: If fewer tokens than this fit, activations are checkpointed where that makes more tokens fit.
CHECKPOINT_BELOW_TOKENS = 2048
#: Shares of a worker's free memory: new weights are loaded beside the old ones if they take no more than this on a CPU,
#: on one whose rollouts keep the weights that they began with, and on a GPU (`engines/torch_engine.py`).
COPY_SHARE, BOTH_SHARE, GPU_SHARE = 1 / 32, 1 / 8, 1 / 2
#: Rows kept between turns take at most this (`engines/rows.py`).
KEPT_SHARE = 1 / 16
#: Bytes of a weight in 4 bits, and of two moments of 8 bits, with the factors of their blocks (`learner/core/`).
NF4_BYTES, MOMENTS_8_BIT_BYTES = 0.5 + 4 / 64, 2 + 8 / 256
#: Bits of a matrix's weight in a form (`engines/forms.py`), with the numbers of its block.
FORM_BITS: Mapping[str, float] = {"q8_0": 8.5, "q4_0": 4.5, "mlx-q8": 9.0, "mlx-q4": 5.0}
#: llama.cpp computes logits of so many tokens at a time, in float32. Its keys and values have 16 bits; their cells
#: double, and both sets are there while they move.
LLAMACPP_TOKENS, LLAMACPP_VALUE_BYTES, LLAMACPP_CELLS = 512, 2, 3
#: The part of offloaded moments on the GPU at a time: values and their gradients (`learner/core/optimizer.py`).
OFFLOADED_BYTES = 12 << 24
#: Share of a device's memory that a forecast may fill. The rest is for fragmentation and unknown consumers.
USABLE = 0.9


def moments_bytes(quantised: str, trained: int) -> int:
    """Bytes of AdamW's moments, by `learner.quantised`."""
    return int((MOMENTS_8_BIT_BYTES if quantised == "moments" else 8) * trained)


@dataclass(frozen=True, slots=True)
class LearnerSetup:
    """What determines a learner's memory, apart from its micro-batch.

    ranks            processes that share weights, gradients and moments
    lora_rank        0: the whole model is trained, in float32; else adapters of this rank over a frozen base, which
                     each rank has whole
    base_bytes       bytes per frozen parameter
    keeps_reference  a second copy of the weights, for `learner.reference_kl`
    teachers         parameters of teachers, which are held in the precision of products
    adapts_experts   whether the experts of a mixture have adapters, too
    quantised        `learner.quantised`: the frozen linear layers, or the moments
    offloaded        what is in the machine's memory (`OFFLOADS`)
    """

    shape: ModelShape
    is_bfloat16: bool = False
    ranks: int = 1
    lora_rank: int = 0
    base_bytes: int = 2
    keeps_reference: bool = False
    teachers: int = 0
    on_gpu: bool = False
    adapts_experts: bool = False
    quantised: str = "none"
    offloaded: str = ""

    def parts(self, tokens: int, checkpointing: bool) -> dict[str, int]:
        """Bytes of each rank by part, with micro-batches of `tokens` tokens."""
        shape, ranks, trained = self.shape, self.ranks, self.trained
        sharing = 1 if self.lora_rank else ranks
        frozen = shape.parameters if self.lora_rank else 0
        packed = shape.linear_parameters if self.quantised == "base" else 0
        frozen_bytes = self.base_bytes * (frozen - packed) + int(NF4_BYTES * packed)
        reference = 4 * shape.parameters if self.keeps_reference and not self.lora_rank else 0
        activations = tokens * self.token_bytes(checkpointing)
        # Of the embedding's and the head's gradients, before they are summed, after the activations are freed.
        vocabulary = 0 if self.lora_rank else 4 * shape.vocabulary * (2 if shape.tied else 1)
        return {
            "process": PROCESS_BYTES,
            "weights": 4 * trained // sharing + frozen_bytes // ranks,
            "reference": reference // ranks,
            "teachers": (2 if self.is_bfloat16 else 4) * self.teachers // ranks,
            "gradients": 0 if self.offloaded == GRADIENTS else 4 * trained // sharing,
            "moments": OFFLOADED_BYTES if self.offloaded else self._moments // sharing,
            "gathered and cast weights": self._copies(checkpointing),
            "gradients of the vocabulary": max(0, vocabulary - activations),
            "activations": activations,
            "log-probabilities": self._logits_bytes(tokens) + 12 * tokens * shape.hidden,
            "publishing": PUBLISHING_BYTES,
        }

    @property
    def trained(self) -> int:
        if not self.lora_rank:
            return self.shape.parameters
        return self.shape.adapter_parameters(self.lora_rank, self.adapts_experts)

    @property
    def host_bytes(self) -> int:
        """Bytes that a learner on a GPU has in the machine's memory."""
        offloaded = {"": 0, MOMENTS: self._moments, GRADIENTS: self._moments + 4 * self.trained}
        return PROCESS_BYTES + PUBLISHING_BYTES + offloaded[self.offloaded]

    @property
    def parked_bytes(self) -> int:
        """Bytes that a learner on a GPU puts into the machine's memory while a worker has the GPU: what it keeps from
        one step to the next."""
        parts = self.parts(0, checkpointing=True)
        parked_parts = ("weights", "reference", "teachers", *(() if self.offloaded else ("moments",)))
        return sum(parts[part] for part in parked_parts)

    @property
    def _moments(self) -> int:
        return moments_bytes(self.quantised, self.trained)

    def needed(self, tokens: int, checkpointing: bool) -> int:
        """Total bytes of each rank."""
        return sum(self.parts(tokens, checkpointing).values())

    def token_bytes(self, checkpointing: bool) -> int:
        """Bytes of activations per token: the tensors kept for the backward pass, and those of one running layer."""
        shape, layers = self.shape, [self.layer_token_bytes(layer) for layer in self.shape.layers]
        residual, running = 4 * shape.hidden, max(layers)
        saved_bytes = len(layers) * residual + running if checkpointing else sum(layers)
        return saved_bytes + running + 4 * residual

    def layer_token_bytes(self, layer: LayerShape) -> int:
        """Bytes that autograd keeps per token in a layer."""
        return layer.kept16 if self.is_bfloat16 else layer.kept

    def _logits_bytes(self, tokens: int) -> int:
        """Bytes of tiles of logits, and of tensors made from them."""
        return max(LOGITS_BYTES, GPU_LOGITS_TOKEN_BYTES * min(tokens, GPU_LOGITS_TOKENS) if self.on_gpu else 0)

    def _copies(self, checkpointing: bool) -> int:
        """Bytes of temporary weights that are gathered or cast. With several ranks or checkpointing: two layers at a
        time, and one embedding; with several ranks also the gradients of one layer before they are shared out.
        Otherwise, in bfloat16: all weights, because the backward pass reads them again."""
        shape = self.shape
        whole = not (self.ranks > 1 or checkpointing)
        parameters = shape.parameters if whole else 2 * shape.largest_layer + shape.vocabulary
        width, is_as_stored = (2, self.lora_rank and self.base_bytes == 2) if self.is_bfloat16 else (4, True)
        if self.quantised == "base":  # a weight is decoded in 16 bits, and perhaps cast
            return 6 * shape.largest_linear + (0 if is_as_stored else width * shape.vocabulary)
        gradients = width * shape.largest_layer if self.ranks > 1 and not self.lora_rank else 0
        return gradients + (0 if is_as_stored and self.ranks == 1 else width * parameters)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """`tokens`: of one forward and backward pass; `checkpointing`: whether activations are recomputed. `offloaded`:
    what is in the machine's memory meanwhile (`OFFLOADS`); `in_turns`: whether workers leave the GPU meanwhile."""

    tokens: int
    checkpointing: bool
    offloaded: str = ""
    in_turns: bool = False


def settle_microbatch(
    setup: LearnerSetup, memory_bytes: float, longest: int, set_tokens: int | None = None
) -> Microbatch:
    """Return the micro-batch for a rank that may use `memory_bytes`: `set_tokens` tokens, or as many as fit but at
    least `longest`, because a row is never cut. Activations are checkpointed if too few tokens fit without. The result
    may still not fit; `needed` tells.
    """
    most = GPU_MICROBATCH_TOKENS_MAX if setup.on_gpu else CPU_MICROBATCH_TOKENS_MAX
    if not setup.on_gpu:
        most = min(most, max(CPU_TOKENS_MIN, CPU_ACTIVATIONS_BYTES // setup.token_bytes(checkpointing=False)))
    most_tokens = max(longest, most if set_tokens is None else set_tokens)

    def fitting(checkpointing: bool) -> int:
        low, high = 0, most_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if setup.needed(middle, checkpointing) <= memory_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    plain, checkpointed = fitting(False), fitting(True)
    enough = max(longest, min(most_tokens, CHECKPOINT_BELOW_TOKENS)) if set_tokens is None else most_tokens
    checkpointing = plain < enough and checkpointed >= plain
    fits = max(longest, checkpointed if checkpointing else plain)
    return Microbatch(fits if set_tokens is None else set_tokens, checkpointing, setup.offloaded)


def worker_parts(shape: ModelShape, bytes_per_value: int, rollouts: int, length: int) -> dict[str, int]:
    """Bytes by part of a worker that decodes `rollouts` rollouts of `length` tokens, prompts included. A second set of
    weights: `engine_parts`. Not counted: on a GPU a swap takes one if there is room, and nothing if it works in place.
    """
    weights, length = bytes_per_value * shape.parameters, min(length, shape.max_positions)
    cache_values = (layer.cache * min(length, layer.window or length) for layer in shape.layers)
    state = 4 * sum(layer.state for layer in shape.layers)  # recurrent states stay float32
    cache = rollouts * (bytes_per_value * sum(cache_values) + state)
    return {
        "process": PROCESS_BYTES,
        "weights": weights,
        "keys and values": cache,
        "logits": 16 * rollouts * shape.vocab,
    }


def form_bytes(shape: ModelShape, form: str) -> int:
    """Bytes of a model's weights in a form: the embedding and the output layer have 8 bits in all of them."""
    outer = shape.vocabulary * (1 if shape.tied else 2)
    return int((FORM_BITS[form] * (shape.parameters - outer) + FORM_BITS[form.replace("q4", "q8")] * outer) / 8)


def rounded_parts(shape: ModelShape, form: str, has_adapter: bool, rollouts: int, length: int) -> dict[str, int]:
    """Bytes by part of a worker that decodes with weights in a form, by llama.cpp; MLX takes less. Without an adapter
    each version brings all weights, and is loaded beside the one before.
    """
    parts = worker_parts(shape, LLAMACPP_VALUE_BYTES, rollouts, length)
    return {
        "process": parts["process"],
        "weights": form_bytes(shape, form) * (1 if has_adapter else 2),
        "keys and values": LLAMACPP_CELLS * parts["keys and values"],
        "logits": parts["logits"] + 4 * LLAMACPP_TOKENS * shape.vocab,
    }


def engine_parts(weights: int, free: int, copies: int, is_in_turns: bool, share: float = COPY_SHARE) -> dict[str, int]:
    """Bytes of the `free` memory that an engine in the worker uses for speed, at most all of it. `copies`: sets of
    weights that it has beside the installed one, if one of them takes at most this `share`: those that arrive, or that
    rollouts began with, and packed ones of both.
    """
    return {
        "second and packed weights": copies * weights if weights <= share * free else 0,
        "rows kept between turns": int(KEPT_SHARE * free) if is_in_turns else 0,
    }
