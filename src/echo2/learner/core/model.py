"""The policy network: a Hugging Face causal language model that is loaded once and trained in place.

The forward pass is transformers' own. This module adds what training needs and generation does not: logprobs under the
sampler's own distribution, at chosen positions only, prefix-tree rows, weights as bytes, and the other files of a model
directory. Code that comes with a model (`trust_remote_code`) is never run.

The sampler divides logits by the temperature and may narrow them (top-k, top-p). The ratio of the learner's to the
sampler's probability is meaningful only if the learner does the same: a narrowed token's log-softmax runs over the
support in the rollout, because no token outside of it could have been drawn.

Shape suffixes: B = rows, T = row length, D = hidden size, V = vocabulary, u = positions that predict something,
n = loss tokens, m = loss tokens with a support, or without, W = widest support, k = a teacher's most likely tokens
(only without a support).
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echo2.core.decide.model_config import context_length
from echo2.core.devices import Beside, is_out_of_memory, pick_device
from echo2.core.errors import UserError
from echo2.core.types import SnapshotRef, StoredTensor, TensorBytes
from echo2.engines.hub_layout import HALVES, META, HubLayout, TensorPart, identity_layout
from echo2.engines.model_values import values_of
from echo2.engines.routing import Routing
from echo2.learner.core.batch import PackedBatch
from echo2.learner.core.experts import follow_autocast
from echo2.learner.core.loading import SAFETENSORS_NAMES, load_module, outline_module
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.output_layer import (
    Choice,
    OutputLayer,
    Scores,
    plain_likely,
    plain_scores,
    tiled_likely,
    tiled_scores,
)
from echo2.learner.core.quantised import num_weights
from echo2.weights.format.model_files import find_model, model_files, stored_weights
from echo2.weights.format.segments import passing_bytes

log = logging.getLogger(__name__)

#: (choices, whether the normaliser over the vocabulary is wanted) -> the policy's scores at the batch's positions.
Scorer = Callable[[Sequence[Choice], bool], Scores]
#: (number of tokens, size of the vocabulary that is looked at) -> the most likely tokens, and their logprobs.
LikelyTokens = Callable[[int, int], tuple[Tensor, Tensor]]
# Decoders known to honour a custom mask and position ids. Others run in the plain layout.
MASKED_DECODERS = frozenset(
    {"arcee", "ernie4_5", "gemma", "glm", "glm4", "granite", "helium", "hunyuan_v1_dense", "llama", "mistral"}
    | {"mixtral", "olmo", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"}
    | {"stablelm", "starcoder2"}
)
# Attention costs more per floating-point operation than a matrix product (softmax, memory traffic).
ATTENTION_SLOWDOWN = 3.0
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def computes_in_bfloat16(setting: Literal["auto", "float32", "bfloat16"], device: torch.device) -> bool:
    """Whether matrix products on this device are bfloat16 under `model.compute_dtype`."""
    if setting == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return setting == "bfloat16"


def token_logprobs(scorer: Scorer, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each loss token its log-probability [n], the entropy [n, without gradient] of the distribution at the
    token, and the log-probabilities [n, k] of the teacher's candidates."""
    is_wide_n = torch.ones_like(batch.position_n, dtype=torch.bool)
    for support in batch.supports:
        is_wide_n[support.rows_m] = False
    wide_m = is_wide_n.nonzero()[:, 0]
    candidates_nW = batch.candidates_nW
    choices = [Choice(batch.position_n[wide_m], candidates_nW[wide_m])] + [
        Choice(batch.position_n[rows], torch.cat([candidates_nW[rows, :1], support.tokens_mW], dim=1))
        for support in batch.supports
        for rows in (support.rows_m,)
    ]
    scores = scorer(choices, len(wide_m) > 0)
    logits_mW, *narrowed = scores.chosen
    position_m = batch.position_n[wide_m]
    logp_mW = logits_mW - scores.log_total_u[position_m, None]
    logp_n = logits_mW.new_zeros(len(candidates_nW)).index_copy(0, wide_m, logp_mW[:, 0])
    top_nk = logits_mW.new_zeros(candidates_nW[:, 1:].shape).index_copy(0, wide_m, logp_mW[:, 1:])
    entropy_n = torch.zeros_like(logp_n.detach()).index_copy_(0, wide_m, scores.entropy_u[position_m])
    for support, logits_mW in zip(batch.supports, narrowed, strict=True):
        allowed_mW = logits_mW[:, 1:].masked_fill(~support.valid_mW, float("-inf"))
        log_total_m = allowed_mW.logsumexp(-1)
        logp_n = logp_n.index_copy(0, support.rows_m, logits_mW[:, 0] - log_total_m)
        entropy_n.index_copy_(0, support.rows_m, _entropy(allowed_mW.detach()))
    return logp_n, entropy_n, top_nk


def _entropy(logits_mW: Tensor) -> Tensor:
    """Return the entropy of softmax over each row; entries of -inf contribute nothing."""
    logp_mW = logits_mW.log_softmax(-1)
    minus_mW = logp_mW.exp() * logp_mW.clamp(min=torch.finfo(logp_mW.dtype).min)
    return -minus_mW.sum(-1)


class Policy:
    """A causal language model on a device, with its files. Never in training mode: dropout would make the learner's
    logprobs differ from the sampler's.

    `weights_file`: name of the weights in a checkpoint. `base_model`: the frozen base model, if these weights are an
    adapter's. `routing`: its routers, if they replay the sampler's choices. `layout`: where stored tensors lie in the
    module; without it, they have the module's names. `others`: stored tensors of the model that the module does not
    have.
    """

    weights_file = "model.safetensors"
    base_model: SnapshotRef | None = None
    routing: Routing | None = None

    def __init__(
        self,
        module: nn.Module,
        files: Mapping[str, bytes],
        device: torch.device,
        layout: HubLayout | None = None,
        others: Mapping[str, StoredTensor] = MappingProxyType({}),
    ) -> None:
        tensors = itertools.chain(module.parameters(), module.buffers())
        is_there = all(tensor.device == device for tensor in tensors)  # a sharded module must not move
        self.module: Any = (module if is_there else module.to(device)).eval()
        follow_autocast(self.module)
        self.device = device
        self.layout = layout or identity_layout(module)
        self.others = others
        self.files = dict(files)
        config: Any = module.config
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        self.honours_masks = (
            config.model_type in MASKED_DECODERS and set(layer_types) == {"full_attention"} and not sliding
        )
        self.max_positions = context_length(values_of(config))
        self.pair_cost = _pair_cost(self.module)
        self.computes_in_bfloat16 = False

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.module.parameters()).dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        module: Any = self.module
        return int(module.get_input_embeddings().num_embeddings)

    def checkpoint_activations(self) -> bool:
        """Switch on activation checkpointing: keep only the inputs of layers for the backward pass, and recompute the
        rest: a third more time, the same gradients. Return whether the model has layers that support it.

        transformers' own switch works in training mode only, which enables dropout.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [layer for layer in self.module.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for layer in layers:
            again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            layer.forward = again  # on this layer only: hooks stay outside
        return bool(layers)

    def replaying(self, batch: PackedBatch) -> AbstractContextManager[None]:
        """Return the context for a pass over `batch`, and for its backward pass: routers choose the experts that the
        sampler's chose, as far as they are known."""
        if self.routing is None or batch.routes_BTLk is None:
            return nullcontext()
        return self.routing.replaying(batch.routes_BTLk.flatten(0, 1))

    def logprobs(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability [n] of each loss token of `batch`, the entropy [n] of the distribution at the
        token, and the log-probabilities [n, k] of a teacher's most likely tokens (see `token_logprobs`).
        `batch` is on this device; logits are divided by `temperature`.
        """
        with self._computing():
            return token_logprobs(self._scorers(batch, temperature)[0], batch)

    def likely(self, batch: PackedBatch, temperature: float, top_k: int, num_tokens: int) -> tuple[Tensor, ...]:
        """Return the log-probability [n] of each loss token, and at each the most likely of the first `num_tokens`
        tokens of the vocabulary and their log-probabilities, [n, k]. For a `top_k` of 0 these have no columns."""
        with self._computing():
            scorer, likely = self._scorers(batch, temperature)
            logp_n, *_ = token_logprobs(scorer, batch)
            tokens_uk, logp_uk = likely(top_k, num_tokens)
            return logp_n, tokens_uk.int()[batch.position_n], logp_uk.float()[batch.position_n]

    def _computing(self) -> AbstractContextManager[Any]:
        """Return the context of a pass. Weights are cast on use, once a pass: autocast's cache of all cast weights
        would be a copy of the model."""
        enabled = self.computes_in_bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _scorers(self, batch: PackedBatch, temperature: float) -> tuple[Scorer, LikelyTokens]:
        """Run the decoder. Return what computes scores from its last hidden states."""
        inputs: dict[str, Any] = {"input_ids": batch.tokens_BT, "use_cache": False}
        if batch.positions_BT is not None and batch.ends_BT is not None:
            inputs["attention_mask"] = _tree_mask(batch.ends_BT, _compute_dtype(self.dtype, self.device))
            inputs["position_ids"] = batch.positions_BT
        with nullcontext() if self.routing is None else self.routing.paused():
            ends_with_output_layer = self.ends_with_output_layer  # found by a pass of its own, the first time
        if ends_with_output_layer:
            layer = self.output_layer().with_late_gradients()
            hidden_BTD: Tensor = self.module.base_model(**inputs).last_hidden_state
            hidden_uD = hidden_BTD.flatten(0, 1)[batch.predict_u]
            return (
                lambda choices, wants_total: tiled_scores(hidden_uD, layer, choices, temperature, wants_total),
                lambda top_k, num_tokens: tiled_likely(hidden_uD, layer, top_k, num_tokens, temperature),
            )
        logits_uV: Tensor = self.module(**inputs).logits.flatten(0, 1)[batch.predict_u]
        return (
            lambda choices, wants_total: plain_scores(logits_uV, choices, temperature),
            lambda top_k, num_tokens: plain_likely(logits_uV, top_k, num_tokens, temperature),
        )

    def output_layer(self) -> OutputLayer:
        """Return the layer after the last hidden states, for a model that `ends_with_output_layer`. Its weight is the
        whole parameter itself.
        """
        config, linear = self.module.config.get_text_config(), self.module.get_output_embeddings()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return OutputLayer(linear.weight, linear.bias, scale, softcap or None)

    @cached_property
    def ends_with_output_layer(self) -> bool:
        """Whether logits are `output_layer` of the last hidden states and nothing else: then they need not be held all
        at once.

        Tested by a pass over two tokens in which known numbers replace the layer's products.
        """
        linear: Any = self.module.get_output_embeddings()
        states: dict[str, Any] = {}

        def replace_product(_: nn.Module, inputs: tuple[Tensor, ...], product: Tensor) -> Any:
            states.update(
                read=inputs[0], product=torch.linspace(-50, 50, product.shape[-1]).to(product).expand_as(product)
            )
            return states["product"]

        def note_hidden(_: nn.Module, __: Any, output: Any) -> None:
            states.update(made=getattr(output, "last_hidden_state", None))

        hooks = [
            linear.register_forward_hook(replace_product),
            self.module.base_model.register_forward_hook(note_hidden),
        ]
        try:
            with torch.no_grad():
                logits = self.module(torch.tensor([[0, 1]], device=self.device), use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        close = 4 * torch.finfo(logits.dtype).eps
        is_all = (
            isinstance(linear, nn.Linear)
            and states.get("made") is not None
            and torch.equal(states["made"].to(linear.weight.dtype), states["read"].to(linear.weight.dtype))
            and torch.allclose(self.output_layer().finish(states["product"]).to(logits), logits, rtol=close, atol=close)
        )
        if not is_all:
            log.warning(
                "A %s makes more of its last hidden states than its output layer does: all logits of a pass are held, "
                "%d values a token",
                self.module.config.model_type,
                self.vocab_size,
            )
        return is_all

    def held(self) -> dict[str, Tensor]:
        """Return the weights themselves by the module's names; tied weights once, under their first name."""
        tied = dict(self.module.named_parameters(remove_duplicate=False)).keys() - dict(self.module.named_parameters())
        return {name: tensor for name, tensor in self.module.state_dict().items() if name not in tied}

    def places(self) -> dict[str, TensorPart]:
        """Return where stored tensors lie in `held`, by stored name."""
        return dict(self.layout.places)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of the model by stored name: views of the weights, and the others as they are stored."""
        held = self.held()
        others = {name: tensor_of(one) for name, one in self.others.items()}
        return {name: place.of(held[place.name]) for name, place in self.places().items()} | others

    def stored_dtype(self, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype that a stored tensor has in a model of `dtype`; None: that of the weights. What transformers
        keeps in float32 in a model of 16 bits stays so."""
        return None if dtype in HALVES and name in self.layout.float32_names else dtype

    def weights(self, dtype: torch.dtype | None = None) -> dict[str, StoredTensor]:
        """Return all tensors of the model by stored name, as bytes that are read on demand. Floating-point weights are
        cast to `dtype` when read; the others are as they are stored."""
        held, tensors = self.held(), dict[str, StoredTensor]()
        for name, place in self.places().items():
            tensors[name] = stored(place.of(held[place.name]), self.stored_dtype(name, dtype))
        return tensors | dict(self.others)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that an optimizer changes, by name."""
        return dict(self.module.named_parameters())

    def engaged(self) -> AbstractContextManager[None]:
        """Return the context for forward and backward passes: policies that share a module take turns."""
        return nullcontext()

    def check_checkpoint(self, directory: Path, base_model: str | None) -> None:
        """Refuse a checkpoint that does not fit this policy. `base_model`: the one that the checkpoint names.

        Raises:
            UserError: says what the checkpoint holds.
        """
        stem, suffix = self.weights_file.split(".")
        if not any(directory.glob(f"{stem}*.{suffix}")):
            what = "a whole model" if base_model is None else f"an adapter over {base_model}"
            raise UserError(
                f"{directory} is a checkpoint of {what}, and holds no {self.weights_file}. Set lora.rank back, or "
                "start another --out."
            )

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, TensorBytes]:
        """Return a copy of the weights as bytes, floating-point ones cast to `dtype`."""
        return {
            name: TensorBytes(tensor.dtype, tensor.shape, bytes(tensor.read(0, tensor.num_bytes)))
            for name, tensor in self.weights(dtype).items()
        }


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of attention: autocast's if it is on, else that of the weights."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def _tree_mask(ends_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive attention mask [B, 1, T, T]: 0 where `PackedBatch.ends_BT` lets a token attend, else -inf.

    It has the scores' dtype, because SDPA would convert a boolean mask in every layer. It is filled row by row, because
    a boolean mask of all rows beside it would take a quarter more memory.
    """
    num_rows, length = ends_BT.shape
    mask_B1TT = torch.full((num_rows, 1, length, length), float("-inf"), dtype=dtype, device=ends_BT.device)
    at_T1 = torch.arange(length, device=ends_BT.device)[:, None]
    for mask_TT, ends_T in zip(mask_B1TT[:, 0], ends_BT, strict=True):
        mask_TT.masked_fill_((at_T1 < ends_T).tril_(), 0.0)
    return mask_B1TT


def stored(tensor: Tensor, dtype: torch.dtype | None = None) -> StoredTensor:
    """Return the tensor for writing to a file or sending, as the work queued so far leaves it. It is read on demand,
    and copied only if it is on a device, not contiguous, or cast to `dtype` as a floating-point tensor.
    """
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    width, beside = dtype.itemsize, Beside(tensor.device)

    def read(start: int, stop: int) -> memoryview:
        with beside.work():
            items = tensor.detach().reshape(-1)[start // width : stop // width]
            if items.device.type == "cpu" and items.dtype == dtype:
                return _raw_bytes(items)
            buffer = passing_bytes(stop - start)
            torch.frombuffer(buffer, dtype=dtype).copy_(items)
            return buffer

    return StoredTensor(SAFETENSORS_NAMES[dtype], tuple(tensor.shape), tensor.numel() * width, read)


def tensor_of(stored: StoredTensor) -> Tensor:
    """Return a stored tensor, read."""
    dtype = next(dtype for dtype, name in SAFETENSORS_NAMES.items() if name == stored.dtype)
    return torch.frombuffer(bytearray(stored.read(0, stored.num_bytes)), dtype=dtype).view(stored.shape)


def _raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, row-major; a view if the tensor is contiguous."""
    raw: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _pair_cost(module: Any) -> float:
    """Return the cost of attending one pair of tokens, in units of one token's pass through the weights (see
    `batch.collate`).
    """
    values = values_of(module.config)
    heads = values.get("num_attention_heads") or 1
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    pair_flops = 4 * values["num_hidden_layers"] * heads * head_dim
    token_flops = 2 * num_weights(module)
    return float(ATTENTION_SLOWDOWN * pair_flops / token_flops)


def load_policy(path: str, dtype: str, device: str, mesh: Mesh | None = None, in_4_bits: bool = False) -> Policy:
    """Load a model directory, or a hub id (from the local cache where it is complete, else downloaded). `dtype`: one of
    `DTYPES`, or "stored": as the weights are stored. `mesh`: the ranks that the model is sharded over.
    `in_4_bits`: its linear layers are frozen and quantised (`quantised.py`).

    Raises:
        UserError: the model or the device is not usable, or there are more ranks than the model can be cut into.
    """
    place = pick_device(device)
    directory = find_model(path)
    with _readable(path, directory):
        module, layout = load_module(directory, DTYPES.get(dtype), place, mesh or Mesh(), in_4_bits)
    files = model_files(directory)
    if dtype in DTYPES:
        files["config.json"] = with_dtype(files["config.json"], dtype)
    tensors = stored_weights(directory)
    policy = Policy(module, files, place, layout, {name: tensors[name] for name in sorted(layout.others)})
    if mesh is None or mesh.size == 1:  # ranks pass together, once the model is there on each of them
        check_pass(policy, path, Mesh())
    return policy


def check_pass(policy: Policy, path: str, mesh: Mesh) -> None:
    """Refuse a model whose first pass would fail: transformers builds some from values that do not fit together. Every
    rank must call it.

    Raises:
        UserError: in transformers' words.
    """
    failed: Exception | None = None
    try:
        with torch.no_grad():
            mesh.shard(policy.module)(lambda: policy.ends_with_output_layer)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        failed = error
    mesh.gather(b"")  # raises if another rank is gone, which is no fault of config.json
    if failed is not None:
        words = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
        raise UserError(
            f"model.path = {path!r}: transformers' {type(policy.module).__name__} cannot compute with what config.json "
            f"says: {words}. Compare config.json with the one that the model came with."
        ) from failed


def outline_policy(path: str) -> Policy:
    """Return the policy of a model directory without memory for weights: what `load_policy` refuses, this refuses, but
    for values and memory.

    Raises:
        UserError: the model is not usable.
    """
    directory = find_model(path)
    with _readable(path, directory):
        module, layout = outline_module(directory)
    return Policy(module, model_files(directory), META, layout)


@contextmanager
def _readable(path: str, directory: Path) -> Iterator[None]:
    """Inside, what libraries raise about a model becomes a UserError."""
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the learner's stderr is a log file
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model.path = {path!r}: {directory} does not hold a causal language model that transformers can load: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. It needs config.json and "
            "model.safetensors; models with code of their own are not supported."
        ) from error


def with_dtype(config: bytes, dtype: str) -> bytes:
    """Return config.json with the actual dtype of the weights, so that loading a checkpoint does not round them."""
    values = json.loads(config)
    values.pop("torch_dtype", None)
    return json.dumps(values | {"dtype": dtype}, indent=2, sort_keys=True).encode()
