"""The engines `llamacpp-q8_0` and `llamacpp-q4_0`: Llama, Qwen2 and Qwen3 with rounded weights (`forms.py`), computed
by llama.cpp in this process.

A worker keeps the published snapshot on disk, as with any engine. For each version this engine derives the form from
it, writes it as a file for llama.cpp, and loads the file, which then has no name any more. An adapter is loaded over
the rounded base model and is not rounded. Tokens are drawn from llama.cpp's logits by echo2's own sampler, with the
head's random numbers, so the engine `compact`, which rounds the same snapshot in the same way, can check them
(`CompactModel.formed`).

llama.cpp also rounds what it multiplies with the weights, to 8 bits on a CPU. So its logits differ from those of
`compact` by more than rounding in 32 bits; `rollouts/verification.py` has the tolerance.

Shape suffixes: B = rows, V = vocabulary.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.core.errors import UserError
from echo2.core.types import Snapshot, SnapshotRef
from echo2.engines.adapter import Adapter
from echo2.engines.architecture import Architecture, UnsupportedError, read_architecture
from echo2.engines.compact import CompactModel, build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine
from echo2.engines.gguf_file import check_fits, write_adapter, write_model
from echo2.engines.llamacpp_sequences import AdapterWeights, Sequences, Weights, library
from echo2.engines.torch_engine import META, Cache, Model, TorchDecoder
from echo2.weights.format.snapshot_files import read_config

#: Rows of one engine: llama.cpp has at most 256 sequences. Rows, those that join them, and kept turns need one each.
SLOTS_MAX, SEQUENCES_PER_SLOT = 80, 3


def make_engine(device: str, slots: int, form: str) -> Engine:
    """The engines `llamacpp-q8_0` and `llamacpp-q4_0`."""
    return DecodeLoop(LlamaCppDecoder(form, device, min(slots, SLOTS_MAX)), min(slots, SLOTS_MAX))


def check_model(config: Mapping[str, Any], form: str) -> None:
    """Check that these engines can compute a model with this config.json, in any `form`.

    Raises:
        UserError: llama.cpp, or this engine, has no such model.
    """
    _architecture(config)


def has_gpu() -> bool:
    """Whether llama.cpp was built for a GPU.

    Raises:
        UserError: it does not load.
    """
    return bool(library().calls.llama_supports_gpu_offload())


class LlamaCppDecoder(TorchDecoder):
    """A `Decoder` with weights in a form. `device`: "cpu" leaves a GPU alone for which llama.cpp was built."""

    def __init__(self, form: str, device: str = "auto", slots: int = SLOTS_MAX) -> None:
        super().__init__(_outline, "cpu")  # of the sampler
        self._library, self._form, self._on_gpu = library(), form, device != "cpu"
        self._most = SEQUENCES_PER_SLOT * slots
        self._directory = Path(tempfile.mkdtemp(prefix="echo2-llamacpp-"))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._sequences: Sequences | None = None

    def _load_beside(self, ref: SnapshotRef, snapshot: Snapshot, adapter: Adapter) -> bool:
        """Derive the form and load it. The weights before stay until the next step."""
        config, outline = read_config(snapshot.files), _outline(snapshot, META)
        path = self._directory / "model.gguf"
        try:
            write_model(path, snapshot, config["model_type"], read_architecture(config), outline.dtype, self._form)
            weights = Weights(self._library, path, self._on_gpu)
        finally:
            path.unlink(missing_ok=True)  # llama.cpp has it open
        if self._sequences is None:
            self._sequences = Sequences(self._library, outline.limits.vocab_size, self._most)
        whole = LlamaCppModel(outline, config["model_type"], weights, self._sequences, path.with_name("adapter.gguf"))
        self._current = (ref, whole.adapted(adapter), outline.limits)
        return True

    def sleep(self) -> None:
        """See `Decoder.sleep`. Always raises: the tensors are llama.cpp's."""
        raise UserError("The engine llamacpp takes no turns on a GPU (--card): set workers.engine = 'auto'.")


def _outline(snapshot: Snapshot, device: torch.device) -> CompactModel:
    """Return `compact`'s model of a snapshot without weights.

    Raises:
        UserError: llama.cpp, or this engine, has no such model.
    """
    _architecture(read_config(snapshot.files))
    return build_compact(snapshot, META)


def _architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the sizes of a model that this engine has. Raises UserError as `_outline`."""
    try:
        arch = read_architecture(config)
    except UnsupportedError as error:
        raise UserError(
            f"The engine llamacpp does not support {error.trait}. Start the worker with --engine auto."
        ) from error
    check_fits(config["model_type"], arch)
    return arch


class LlamaCppCache:
    """Rows that llama.cpp has read: the numbers of their sequences, which are free again when this object is gone."""

    can_join = True

    def __init__(self, sequences: Sequences, rows: Sequence[int], token_bytes: int) -> None:
        self._sequences, self.rows, self._token_bytes = sequences, list(rows), token_bytes
        self._end = weakref.finalize(self, sequences.drop, self.rows)

    @property
    def num_bytes(self) -> int:
        return self._token_bytes * sum(self._sequences.length(row) for row in self.rows)

    def copy(self, row: int, length: int) -> LlamaCppCache | None:
        """See `Cache.copy`. None also if there are too many sequences."""
        found = self._sequences.copy(self.rows[row], length)
        return None if found is None else LlamaCppCache(self._sequences, [found], self._token_bytes)

    def routes(self, row: int, length: int) -> bytes:
        """See `Cache.routes`. The models of this engine have no experts."""
        return b""

    def select(self, rows: Tensor) -> LlamaCppCache:
        return LlamaCppCache(self._sequences, self._taken(rows), self._token_bytes)

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> LlamaCppCache:
        assert isinstance(other, LlamaCppCache)
        return LlamaCppCache(self._sequences, self._taken(rows) + other._taken(other_rows), self._token_bytes)

    def _taken(self, rows: Tensor) -> list[int]:
        """Return the sequences of these rows, and drop the others. A row that comes again is copied."""
        taken, found = set[int](), list[int]()
        for row in rows.tolist():
            sequence = self.rows[row]
            if row in taken:
                sequence = _there(self._sequences.copy(sequence, self._sequences.length(sequence)))
            found.append(sequence)
            taken.add(row)
        self._end.detach()
        self._sequences.drop(sequence for row, sequence in enumerate(self.rows) if row not in taken)
        self.rows = []
        return found


def _there(sequence: int | None) -> int:
    if sequence is None:
        raise UserError("llama.cpp has no sequence left for another rollout. Give the worker fewer --slots.")
    return sequence


class LlamaCppModel(Model):
    """One policy in a form."""

    def __init__(
        self, outline: CompactModel, model_type: str, weights: Weights, sequences: Sequences, adapter_path: Path
    ) -> None:
        self._outline, self._model_type, self._weights = outline, model_type, weights
        self._sequences, self._adapter_path = sequences, adapter_path
        self._adapter: AdapterWeights | None = None
        self.limits, self.architecture, self.dtype = outline.limits, outline.architecture, outline.dtype
        self.places, self.linears = outline.places, outline.linears
        arch = outline.architecture[0]
        self._token_bytes = 4 * arch.num_layers * arch.num_kv_heads * arch.head_dim

    def adapted(self, adapter: Adapter) -> LlamaCppModel:
        model = copy.copy(self)
        model._adapter = self._loaded(adapter) if adapter else None
        return model

    def _loaded(self, adapter: Adapter) -> AdapterWeights:
        try:
            write_adapter(self._adapter_path, adapter, self._model_type, self._outline.architecture[0])
            return self._weights.adapter(self._adapter_path)
        finally:
            self._adapter_path.unlink(missing_ok=True)

    def prefill(
        self, prompts: Sequence[array[int]], known: Sequence[Cache | None] = (), keeps_routes: bool = False
    ) -> LlamaCppCache:
        self._sequences.use(self._weights, self._adapter)
        rows, parts = list[int](), list["array[int]"]()
        for prompt, one in zip(prompts, known or [None] * len(prompts), strict=True):
            if isinstance(one, LlamaCppCache):
                rows.append(_there(self._sequences.copy(one.rows[0], self._sequences.length(one.rows[0]))))
            else:
                rows.append(_there(self._sequences.new()))
            parts.append(prompt[self._sequences.length(rows[-1]) :])
        self._sequences.read(rows, parts)
        return LlamaCppCache(self._sequences, rows, self._token_bytes)

    def step(self, cache: Cache, tokens_B: Tensor) -> Tensor:
        assert isinstance(cache, LlamaCppCache)
        self._sequences.use(self._weights, self._adapter)
        return self._sequences.step(cache.rows, tokens_B.tolist())
