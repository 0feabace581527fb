"""Forecasts the memory of a learner and a worker, by part, from config.json alone, and the micro-batch that fits.

    learner   weights, gradients and moments of the trained parameters; activations, which grow with the tokens of a
              micro-batch; temporary tensors over the vocabulary (`learner/`'s tiles, gradients of the embedding)
    worker    weights, keys and values of the rollouts that it decodes, logits of one token each; from the remaining
              memory, copies of weights and rows kept between turns

Activations are the tensors that transformers' decoders of the Llama and Qwen kind keep for the backward pass
(`tests/unit/test_learner_memory_forecast.py` counts them in real models, and compares the peak of whole processes with
the forecast). With checkpointing a layer keeps only its input, and one layer at a time is recomputed. Gradients of the
vocabulary are made after the activations are freed, so the larger of the two counts.

All sizes are in bytes. D hidden, F feed-forward, H and K values of all heads' queries and keys, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echo2.core.decide.model_config import context_length

GB = 1_000_000_000
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
MICROBATCH_TOKENS_MAX: Mapping[str, int] = {"cpu": 2048, "gpu": 16_384}
#: On a CPU, the limit of a micro-batch's activations in bytes, but at least CPU_TOKENS_MIN tokens: more gain no speed
#: (benchmarks/learning/microbatch.py), and other processes share the machine's memory.
CPU_ACTIVATIONS_BYTES, CPU_TOKENS_MIN = GB, 256
#: If fewer tokens than this fit, activations are checkpointed where that makes more tokens fit.
CHECKPOINT_BELOW_TOKENS = 2048
#: Shares of a worker's free memory: on a CPU, weights are copied if they take no more than the first
#: (`engines/torch_engine.py`); rows kept between turns take at most the second (`engines/rows.py`).
COPY_SHARE, KEPT_SHARE = 1 / 32, 1 / 16
#: Share of a device's memory that a forecast may fill. The rest is for fragmentation and unknown consumers.
USABLE = 0.9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `heads_width`, `kv_width`: values of all heads' queries, and keys, of a token (H and K);
    `stored_bytes`: bytes per parameter in the stored model.
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads_width: int
    kv_width: int
    tied: bool
    qk_norm: bool
    max_positions: int
    stored_bytes: int = 4

    @property
    def vocabulary(self) -> int:
        """Parameters of one embedding."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer; norms and biases, less than a thousandth, are left out."""
        return self.hidden * (2 * self.heads_width + 2 * self.kv_width + 3 * self.ffn)

    @property
    def parameters(self) -> int:
        """Parameters in total."""
        return self.layers * self.layer_parameters + self.vocabulary * (1 if self.tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters on every linear layer except the output head."""
        d, h, k, f = self.hidden, self.heads_width, self.kv_width, self.ffn
        return self.layers * rank * (2 * (d + h) + 2 * (d + k) + 3 * (d + f))


def read_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Read the sizes from config.json. None if it is not a plain dense decoder (experts, other names, bad values)."""
    if any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        is_qwen3 = config.get("model_type") == "qwen3"
        head_dim = int(config.get("head_dim") or (128 if is_qwen3 else hidden // heads))
        sizes = [int(config[name]) for name in ("vocab_size", "intermediate_size", "num_hidden_layers")]
        kv_heads = int(config.get("num_key_value_heads") or heads)
        max_positions = context_length(config) or 1 << 20
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    vocab, ffn, layers = sizes
    if min(vocab, hidden, ffn, layers, heads, kv_heads, head_dim, max_positions) < 1:
        return None
    tied = bool(config.get("tie_word_embeddings", False))
    stored = 2 if str(config.get("dtype") or config.get("torch_dtype")).endswith(("float16", "bfloat16")) else 4
    widths = heads * head_dim, kv_heads * head_dim
    return ModelShape(vocab, hidden, ffn, layers, *widths, tied, is_qwen3, max_positions, stored)


@dataclass(frozen=True, slots=True)
class LearnerSetup:
    """What determines a learner's memory, apart from its micro-batch.

    ranks            processes that share weights, gradients and moments
    lora_rank        0: the whole model is trained, in float32; else adapters of this rank over a frozen base
    base_bytes       bytes per frozen parameter
    keeps_reference  a second copy of the weights, for `learner.reference_kl`
    """

    shape: ModelShape
    is_bfloat16: bool = False
    ranks: int = 1
    lora_rank: int = 0
    base_bytes: int = 2
    keeps_reference: bool = False

    def parts(self, tokens: int, checkpointing: bool) -> dict[str, int]:
        """Bytes of each rank by part, with micro-batches of `tokens` tokens."""
        shape, ranks = self.shape, self.ranks
        trained = shape.adapter_parameters(self.lora_rank) if self.lora_rank else shape.parameters
        frozen = shape.parameters if self.lora_rank else 0
        reference = 4 * shape.parameters if self.keeps_reference and not self.lora_rank else 0
        activations = tokens * self.token_bytes(checkpointing)
        return {
            "process": PROCESS_BYTES,
            "weights": (4 * trained + self.base_bytes * frozen) // ranks,
            "reference": reference // ranks,
            "gradients": 4 * trained // ranks,
            "moments": 8 * trained // ranks,
            "gathered and cast weights": self._copies(checkpointing),
            "gradients of the vocabulary": max(0, self._vocabulary_gradients - activations),
            "activations": activations,
            "log-probabilities": self._logits_bytes(tokens) + 12 * tokens * shape.hidden,
            "publishing": PUBLISHING_BYTES,
        }

    def needed(self, tokens: int, checkpointing: bool) -> int:
        """Total bytes of each rank."""
        return sum(self.parts(tokens, checkpointing).values())

    def token_bytes(self, checkpointing: bool) -> int:
        """Bytes of activations per token: the tensors kept for the backward pass, and those of one running layer."""
        shape, layer = self.shape, self.layer_token_bytes
        residual = 4 * shape.hidden
        kept = shape.layers * residual + layer if checkpointing else shape.layers * layer
        return kept + layer + 4 * residual

    @property
    def layer_token_bytes(self) -> int:
        """Bytes that autograd keeps per token in a layer. Two norms: their inputs and normed values; matrix products:
        their inputs; attention: queries, keys, values (each with all heads, because of our own mask) and the result."""
        shape = self.shape
        d, f, h, k = shape.hidden, shape.ffn, shape.heads_width, shape.kv_width
        norms = h + k if shape.qk_norm else 0
        if self.is_bfloat16:  # norms stay float32; the input of every product is cast for itself
            return 26 * d + 8 * f + 6 * norms + 2 * 4 * h
        return 4 * (6 * d + 4 * f + 2 * norms + 4 * h)

    def _logits_bytes(self, tokens: int) -> int:
        """Bytes of tiles of logits, and of tensors made from them. In bfloat16 the learner is taken to be on a GPU."""
        on_gpu = GPU_LOGITS_TOKEN_BYTES * min(tokens, GPU_LOGITS_TOKENS) if self.is_bfloat16 else 0
        return max(LOGITS_BYTES, on_gpu)

    @property
    def _vocabulary_gradients(self) -> int:
        """Bytes of the embedding's and the head's gradients before they are summed, after the activations are freed."""
        return 0 if self.lora_rank else 4 * self.shape.vocabulary * (2 if self.shape.tied else 1)

    def _copies(self, checkpointing: bool) -> int:
        """Bytes of temporary weights that are gathered or cast. With several ranks or checkpointing: two layers at a
        time, and one embedding. Otherwise, in bfloat16: all weights, because the backward pass reads them again."""
        shape = self.shape
        whole = not (self.ranks > 1 or checkpointing)
        parameters = shape.parameters if whole else 2 * shape.layer_parameters + shape.vocabulary
        if self.is_bfloat16:
            is_as_stored = self.lora_rank and self.base_bytes == 2
            return 0 if is_as_stored and self.ranks == 1 else 2 * parameters
        return 4 * parameters if self.ranks > 1 else 0


@dataclass(frozen=True, slots=True)
class Microbatch:
    """`tokens`: of one forward and backward pass; `checkpointing`: whether activations are recomputed."""

    tokens: int
    checkpointing: bool


def settle_microbatch(
    setup: LearnerSetup, memory_bytes: float, place: Literal["cpu", "gpu"], longest: int, given: int | None = None
) -> Microbatch:
    """Return the micro-batch for a rank that may use `memory_bytes`: `given` tokens, or as many as fit but at least
    `longest`, because a row is never cut. Activations are checkpointed if too few tokens fit without. The result may
    still not fit; `needed` tells.
    """
    most = MICROBATCH_TOKENS_MAX[place]
    if place == "cpu":
        most = min(most, max(CPU_TOKENS_MIN, CPU_ACTIVATIONS_BYTES // setup.token_bytes(checkpointing=False)))
    wanted = max(longest, most if given is None else given)

    def fitting(checkpointing: bool) -> int:
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if setup.needed(middle, checkpointing) <= memory_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    plain, checkpointed = fitting(False), fitting(True)
    enough = max(longest, min(wanted, CHECKPOINT_BELOW_TOKENS)) if given is None else wanted
    checkpointing = plain < enough and checkpointed >= plain
    fits = max(longest, checkpointed if checkpointing else plain)
    return Microbatch(fits if given is None else given, checkpointing)


def worker_parts(shape: ModelShape, bytes_per_value: int, rollouts: int, length: int) -> dict[str, int]:
    """Bytes by part of a worker that decodes `rollouts` rollouts of `length` tokens, prompts included. Not counted: a
    swap needs the weights a second time if there is room, and nothing if it works in place.
    """
    weights = bytes_per_value * shape.parameters
    cache = 2 * shape.layers * shape.kv_width * bytes_per_value * rollouts * min(length, shape.max_positions)
    return {
        "process": PROCESS_BYTES,
        "weights": weights,
        "keys and values": cache,
        "logits": 16 * rollouts * shape.vocab,
    }


def engine_parts(weights: int, free: int, packs: bool, is_in_turns: bool) -> dict[str, int]:
    """Bytes of the `free` memory that an engine in the worker uses for speed, at most all of it. `packs`: it runs on a
    CPU, in float32. While new weights arrive, there are two copies of them and as many packed ones.
    """
    return {
        "packed and coming weights": 3 * weights if packs and weights <= COPY_SHARE * free else 0,
        "rows kept between turns": int(KEPT_SHARE * free) if is_in_turns else 0,
    }
