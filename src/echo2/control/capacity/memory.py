"""Forecasts the memory of a learner and a worker, by part, from config.json alone, and the micro-batch that fits.

    learner   weights, gradients and moments of the trained parameters; activations, which grow with the tokens of a
              micro-batch; what is done with the vocabulary at once (`learner/`'s tiles, gradients of the embedding)
    worker    weights, keys and values of the rollouts that it decodes, logits of one token each; of what is left,
              copies of weights and rows kept between turns

Activations are what transformers' decoders of the Llama and Qwen kind keep for the backward pass, tensor by tensor
(`tests/unit/test_capacity_memory.py` counts them in real ones, and holds the peak of whole processes against the
forecast). With checkpointing a layer keeps its input, and one layer at a time is computed again. Gradients of the
vocabulary are made when the activations are gone, so the larger of the two counts.

Bytes everywhere. D hidden, F feed-forward, H and K values of all heads' queries and keys, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GB = 1_000_000_000
#: Python, torch and transformers before a model; on a GPU its context and kernels' workspaces.
PROCESS_BYTES = 500_000_000
#: Tiles of logits that are made at once (`learner/output_layer.py`), and what becomes of them.
LOGITS_BYTES = 200_000_000
#: Snapshots and checkpoints are read from the weights by segments of 16 MB, a few at a time.
PUBLISHING_BYTES = 200_000_000
#: The learner begins to train when a micro-batch is full, and more than fill a device make no step faster
#: (benchmarks/microbatch.py).
MICROBATCH_TOKENS_MAX: Mapping[str, int] = {"cpu": 2048, "gpu": 16_384}
#: On a CPU no more tokens than have so many bytes of activations, but at least so many tokens: more gain no speed
#: (benchmarks/microbatch.py), and the machine's memory is others' too.
CPU_ACTIVATIONS_BYTES, CPU_TOKENS_MIN = GB, 256
#: Below this many tokens activations are checkpointed, where that makes more fit.
CHECKPOINT_BELOW_TOKENS = 2048
#: Of a worker's free memory: where weights take no more on a CPU, they are copied (`rollout/torch_engine.py`); and the
#: most that rows take which are kept between turns (`rollout/kept_rows.py`).
COPY_SHARE, KEPT_SHARE = 1 / 32, 1 / 16
#: Of a device's memory: what a forecast may fill. The rest is fragments, and what it does not know.
USABLE = 0.9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `heads_width`, `kv_width`: values of all heads' queries, and keys, of a token (H and K);
    `stored_bytes`: of a parameter, as the model is stored.
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
        """Parameters in all."""
        return self.layers * self.layer_parameters + self.vocabulary * (1 if self.tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        """Of low-rank adapters on every linear layer but the head."""
        d, h, k, f = self.hidden, self.heads_width, self.kv_width, self.ffn
        return self.layers * rank * (2 * (d + h) + 2 * (d + k) + 3 * (d + f))


def read_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes in config.json; None where they are not those of a plain decoder (experts, other names, nonsense)."""
    if any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        is_qwen3 = config.get("model_type") == "qwen3"
        head_dim = int(config.get("head_dim") or (128 if is_qwen3 else hidden // heads))
        sizes = [int(config[name]) for name in ("vocab_size", "intermediate_size", "num_hidden_layers")]
        kv_heads = int(config.get("num_key_value_heads") or heads)
        max_positions = int(config.get("max_position_embeddings") or 1 << 20)
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
    """What a learner's memory follows from, apart from its micro-batch.

    ranks            processes that share weights, gradients and moments
    lora_rank        0: the whole model is trained, in float32; else adapters of this rank over a frozen base
    base_bytes       of a frozen parameter
    keeps_reference  a second copy of the weights, for `learner.reference_kl`
    """

    shape: ModelShape
    is_bfloat16: bool = False
    ranks: int = 1
    lora_rank: int = 0
    base_bytes: int = 2
    keeps_reference: bool = False

    def parts(self, tokens: int, checkpointing: bool) -> dict[str, int]:
        """Bytes by part, of each rank, with micro-batches of so many tokens."""
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
            "log-probabilities": LOGITS_BYTES + 12 * tokens * shape.hidden,
            "publishing": PUBLISHING_BYTES,
        }

    def needed(self, tokens: int, checkpointing: bool) -> int:
        """Bytes in all, of each rank."""
        return sum(self.parts(tokens, checkpointing).values())

    def token_bytes(self, checkpointing: bool) -> int:
        """Activations of a token: what the backward pass needs of each layer, and as much again of one under way."""
        shape, layer = self.shape, self.layer_token_bytes
        residual = 4 * shape.hidden
        kept = shape.layers * residual + layer if checkpointing else shape.layers * layer
        return kept + layer + 4 * residual

    @property
    def layer_token_bytes(self) -> int:
        """What autograd keeps of a token in a layer. Norms: input and normed value of two; products: their inputs;
        attention: queries, keys and values (as many heads each, under a mask of our own) and the result."""
        shape = self.shape
        d, f, h, k = shape.hidden, shape.ffn, shape.heads_width, shape.kv_width
        norms = h + k if shape.qk_norm else 0
        if self.is_bfloat16:  # norms stay float32; the input of every product is cast for itself
            return 26 * d + 8 * f + 6 * norms + 2 * 4 * h
        return 4 * (6 * d + 4 * f + 2 * norms + 4 * h)

    @property
    def _vocabulary_gradients(self) -> int:
        """Of embedding and head before they are added up, which is when the activations are gone."""
        return 0 if self.lora_rank else 4 * self.shape.vocabulary * (2 if self.shape.tied else 1)

    def _copies(self, checkpointing: bool) -> int:
        """Weights in another place or precision than they are kept: two layers at a time of those that are cut over
        ranks, and the vocabulary; in bfloat16 what the backward pass will read again, which is all but what is
        computed again."""
        shape = self.shape
        whole = not (self.ranks > 1 or checkpointing)
        parameters = shape.parameters if whole else 2 * shape.layer_parameters + shape.vocabulary
        if self.is_bfloat16:
            is_as_stored = self.lora_rank and self.base_bytes == 2
            return 0 if is_as_stored and self.ranks == 1 else 2 * parameters
        return 4 * parameters if self.ranks > 1 else 0


@dataclass(frozen=True, slots=True)
class Microbatch:
    """`tokens` of a forward and backward pass; `checkpointing`: whether activations are computed again."""

    tokens: int
    checkpointing: bool


def settle_microbatch(
    setup: LearnerSetup, memory_bytes: float, place: Literal["cpu", "gpu"], longest: int, given: int | None = None
) -> Microbatch:
    """The micro-batch for a rank that may use so many bytes: `given` tokens, or as many as fit, and no fewer than the
    longest row has, which is never cut. Activations are checkpointed where too few fit without. What does not fit at
    all is told by `needed`.
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
    """Bytes by part of a worker that decodes so many rollouts of `length` tokens, prompts included. A swap needs the
    weights again where there is room for them, and nothing in place.
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
    """Bytes that an engine in the worker takes of `free` ones for speed: never more than there are. `packs`: it is on a
    CPU, in float32. While new weights come, there are two copies of them and as many packed ones.
    """
    return {
        "packed and coming weights": 3 * weights if packs and weights <= COPY_SHARE * free else 0,
        "rows kept between turns": int(KEPT_SHARE * free) if is_in_turns else 0,
    }
