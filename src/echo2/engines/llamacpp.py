"""The engines `llamacpp-q8_0` and `llamacpp-q4_0`: Llama, Qwen2 and Qwen3 with rounded weights (`forms.py`), computed
by llama.cpp in this process.

A worker keeps the published snapshot on disk, as with any engine. For each version this engine derives the form from
it, writes it as a file for llama.cpp, and loads the file, which then has no name any more. An adapter is loaded over
the rounded base model and is not rounded. Tokens are drawn from llama.cpp's logits by echo2's own sampler, with the
head's random numbers, so the engine `compact`, which rounds the same snapshot in the same way, can check them
(`CompactModel.formed`).

llama.cpp also rounds what it multiplies with the weights, to 8 bits on a CPU. So its logits differ from those of
`compact` by more than rounding in 32 bits; `rollouts/verification.py` has the tolerance.

All that llama.cpp has read lies in one context (package `llama-cpp-python`, its low-level functions). A context has
cells, each for the keys and values of one token, in 16 bits. All sequences share them, and copies of a sequence share
its cells. When there are too few, or the weights are new, the sequences move into another context with all that they
have read.

Shape suffixes: B = rows or sequences, V = vocabulary.
"""

from __future__ import annotations

import copy
import ctypes
import shutil
import tempfile
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2.core.errors import UserError
from echo2.core.types import Snapshot, SnapshotRef
from echo2.engines.adapter import Adapter
from echo2.engines.compact import CompactModel, build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine, OutOfMemoryError
from echo2.engines.gguf_file import misfit, write_adapter, write_model
from echo2.engines.model_values import PLAIN_TYPES, Architecture, UnsupportedError, read_architecture
from echo2.engines.rows import Cache
from echo2.engines.torch_engine import META, Model, TorchDecoder
from echo2.weights.format.snapshot_files import read_config

#: Rows of one engine: llama.cpp has at most 256 sequences. Rows, those that join them, and kept turns need one each.
SLOTS_MAX, SEQUENCES_PER_SLOT = 80, 3
#: Tokens that llama.cpp takes in one call.
BATCH_TOKENS = 2048
#: Cells that a context begins with; they double.
FIRST_CELLS = 2048
#: What `llama_decode` returns if there are too few cells.
NO_CELLS = 1
#: Layers given to a GPU: all, if llama.cpp was built for one.
ALL_LAYERS = 1 << 20
#: Lines of llama.cpp's log that an error quotes.
LOG_LINES = 3


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
        self._sequences: Sequences | None = None
        self._make_directory()

    def _make_directory(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="echo2-llamacpp-"))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)

    def successor(self) -> LlamaCppDecoder:
        other = super().successor()
        assert isinstance(other, LlamaCppDecoder)
        other._sequences = None  # a context belongs to its weights; adapters over these go on sharing theirs
        other._make_directory()
        return other

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
        arch = read_architecture(config, PLAIN_TYPES)
        trait = misfit(config["model_type"], arch)
    except UnsupportedError as error:
        trait = error.trait
    if trait:
        raise UserError(f"The engine llamacpp does not support {trait}. Start the worker with --engine auto.")
    return arch


class LlamaCppCache(Cache):
    """Rows that llama.cpp has read: the numbers of their sequences, which are free again when this object is gone."""

    def __init__(self, sequences: Sequences, rows: Sequence[int], token_bytes: int) -> None:
        self._sequences, self.rows, self._token_bytes = sequences, list(rows), token_bytes
        self._end = weakref.finalize(self, sequences.drop, self.rows)

    @property
    def num_bytes(self) -> int:
        return self._token_bytes * sum(self._sequences.length(row) for row in self.rows)

    def copy(self, row: int, length: int) -> LlamaCppCache | None:
        """See `Cache.copy`. None also if there are too many sequences."""
        sequence = self._sequences.copy(self.rows[row], length)
        return None if sequence is None else LlamaCppCache(self._sequences, [sequence], self._token_bytes)

    def select(self, rows: Tensor) -> LlamaCppCache:
        return LlamaCppCache(self._sequences, self._take_rows(rows), self._token_bytes)

    def join(self, rows: Tensor, other: Cache, other_rows: Tensor) -> LlamaCppCache:
        assert isinstance(other, LlamaCppCache)
        return LlamaCppCache(self._sequences, self._take_rows(rows) + other._take_rows(other_rows), self._token_bytes)

    def _take_rows(self, rows: Tensor) -> list[int]:
        """Return the sequences of these rows, and drop the others. A row that comes again is copied."""
        moved_rows, sequences = set[int](), list[int]()
        for row in rows.tolist():
            sequence = self.rows[row]
            if row in moved_rows:
                sequence = _there(self._sequences.copy(sequence, self._sequences.length(sequence)))
            sequences.append(sequence)
            moved_rows.add(row)
        self._end.detach()
        self._sequences.drop(sequence for row, sequence in enumerate(self.rows) if row not in moved_rows)
        self.rows = []
        return sequences


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


@cache
def library() -> Library:
    """llama.cpp in this process. It is never let go: llama.cpp goes on calling what takes its log.

    Raises:
        UserError: the package is not installed, or does not load.
    """
    return Library()


class Library:
    """llama.cpp's functions, and the last lines that it logged as errors. Use `library()`."""

    def __init__(self) -> None:
        try:
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(
                f"The engine llamacpp needs llama.cpp, which does not load here: {error}. Install it with "
                "pip install 'echo2[llamacpp]'; docs/engines.md says how it is built for a GPU."
            ) from error
        self.calls: ModuleType = llama_cpp.llama_cpp
        self._errors: deque[str] = deque(maxlen=LOG_LINES)
        self._callback = self.calls.llama_log_callback(self._logged)
        self.calls.llama_log_set(self._callback, ctypes.c_void_p(0))
        self.calls.llama_backend_init()

    def _logged(self, level: int, text: bytes, _data: Any) -> None:
        if level in (3, 4):  # warnings and errors
            self._errors.append(text.decode(errors="replace").strip())

    def failure(self, what: str) -> OutOfMemoryError:
        """Return the error of a call that gave nothing. It is almost always memory: the files were made here."""
        return OutOfMemoryError(f"llama.cpp {what}: {' / '.join(self._errors) or 'it does not say why'}")


class Weights:
    """A model that llama.cpp has loaded. It is freed with this object."""

    def __init__(self, library: Library, path: Path, on_gpu: bool) -> None:
        self._library, calls = library, library.calls
        params = calls.llama_model_default_params()
        params.use_extra_bufts = False  # else it uses AMX where a virtual machine only claims to have it, and dies
        params.n_gpu_layers = ALL_LAYERS if on_gpu else 0
        self.pointer = calls.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise library.failure("did not load the weights")

    def adapter(self, path: Path) -> AdapterWeights:
        return AdapterWeights(self._library, self, path)

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.calls.llama_model_free(self.pointer)


class AdapterWeights:
    """A LoRA adapter that llama.cpp has loaded over `weights`. It is freed with this object."""

    def __init__(self, library: Library, weights: Weights, path: Path) -> None:
        self._library, self._weights = library, weights
        self.pointer = library.calls.llama_adapter_lora_init(weights.pointer, str(path).encode())
        if not self.pointer:
            raise library.failure("did not load the adapter")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.calls.llama_adapter_lora_free(self.pointer)


class _Context:
    """A context of llama.cpp; it is freed with this object."""

    def __init__(self, library: Library, weights: Weights, vocab_size: int, most: int, cells: int) -> None:
        self._library, self._weights, self.calls = library, weights, library.calls
        self._vocab_size, self.cells = vocab_size, cells
        params = self.calls.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = cells, most, True
        params.n_batch = max(BATCH_TOKENS, most)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.no_perf = True
        self.pointer = self.calls.llama_init_from_model(weights.pointer, params)
        if not self.pointer:
            raise library.failure(f"has no room for keys and values of {cells} tokens")
        self.memory = self.calls.llama_get_memory(self.pointer)
        self._batch = self.calls.llama_batch_init(params.n_batch, 0, 1)

    def apply(self, adapter: AdapterWeights | None) -> None:
        """Use this adapter from now on, or none."""
        kind = self.calls.llama_adapter_lora_p_ctypes
        pointers = (kind * 1)(*([adapter.pointer] if adapter is not None else []))
        if self.calls.llama_set_adapters_lora(self.pointer, pointers, adapter is not None, (ctypes.c_float * 1)(1.0)):
            raise self._library.failure("did not take the adapter")

    def decode(self, tokens: Sequence[int], places: Sequence[int], sequences: Sequence[int], wants: bool) -> bool:
        """Read one token for each entry, at its place of its sequence; False: there are too few cells, and nothing was
        read. `wants`: logits of all of them are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for at, (token, place, sequence) in enumerate(zip(tokens, places, sequences, strict=True)):
            batch.token[at], batch.pos[at] = token, place
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wants
        failed = self.calls.llama_decode(self.pointer, batch)
        if failed not in (0, NO_CELLS):
            raise self._library.failure(f"could not read {len(tokens)} tokens (llama_decode gave {failed})")
        return bool(failed == 0)

    def logits(self, count: int) -> Tensor:
        """Return the logits [count, V] that the last `decode` asked for, float32."""
        pointer = self.calls.llama_get_logits(self.pointer)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (count, self._vocab_size)).copy())

    def take(self, other: _Context, sequence: int) -> None:
        """Take a sequence with all that it has read from another context."""
        size = self.calls.llama_state_seq_get_size(other.pointer, sequence)
        data = (ctypes.c_uint8 * size)()
        size = self.calls.llama_state_seq_get_data(other.pointer, data, size, sequence)
        if not self.calls.llama_state_seq_set_data(self.pointer, data, size, sequence):
            raise self._library.failure("could not move a sequence to another context")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.calls.llama_free(self.pointer)
        if hasattr(self, "_batch"):
            self.calls.llama_batch_free(self._batch)


class Sequences:
    """All sequences of an engine, at most `most`. One thread uses them at a time; `drop` may be called by any."""

    def __init__(self, library: Library, vocab_size: int, most: int) -> None:
        self._library, self._vocab_size = library, vocab_size
        self._most = min(most, library.calls.llama_max_parallel_sequences())
        self._context: _Context | None = None
        self._used: tuple[Weights, AdapterWeights | None] | None = None
        self._lengths: dict[int, int] = {}
        self._dropped: deque[int] = deque()

    def use(self, weights: Weights, adapter: AdapterWeights | None) -> None:
        """Read with these weights from now on; sequences keep what they have read."""
        if self._used == (weights, adapter):
            return
        if self._used is None or self._used[0] is not weights:
            self._move(weights, FIRST_CELLS if self._context is None else self._context.cells)
        self._ready().apply(adapter)
        self._used = weights, adapter

    def new(self) -> int | None:
        """Return a new sequence without tokens; None: there are too many."""
        self._sweep()
        sequence = next((number for number in range(self._most) if number not in self._lengths), None)
        if sequence is not None:
            self._lengths[sequence] = 0
        return sequence

    def drop(self, sequences: Iterable[int]) -> None:
        self._dropped.extend(sequences)

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def copy(self, sequence: int, length: int) -> int | None:
        """Return a new sequence with the first `length` tokens of another one; None: there are too many."""
        target = self.new()
        if target is not None and length:
            context = self._ready()
            context.calls.llama_memory_seq_cp(context.memory, sequence, target, 0, length)
            self._lengths[target] = length
        return target

    def read(self, sequences: Sequence[int], parts: Sequence[array[int]]) -> None:
        """Read more tokens of these sequences; no logits are wanted."""
        todo: list[tuple[int, int, int]] = []
        for sequence, part in zip(sequences, parts, strict=True):
            first = self._lengths[sequence]
            todo += [(token, first + at, sequence) for at, token in enumerate(part)]
        for start in range(0, len(todo), BATCH_TOKENS):
            tokens, places, owners = zip(*todo[start : start + BATCH_TOKENS], strict=True)
            self._decode(tokens, places, owners, wants=False)
            for owner in owners:
                self._lengths[owner] += 1

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Read one more token of each sequence. Returns the logits [B, V] of the next."""
        self._decode(tokens, [self._lengths[sequence] for sequence in sequences], sequences, wants=True)
        for sequence in sequences:
            self._lengths[sequence] += 1
        return self._ready().logits(len(sequences))

    def _decode(self, tokens: Sequence[int], places: Sequence[int], sequences: Sequence[int], wants: bool) -> None:
        self._sweep()
        while not self._ready().decode(tokens, places, sequences, wants):
            assert self._used is not None
            self._move(self._used[0], 2 * self._ready().cells, len(tokens))
            self._ready().apply(self._used[1])

    def _ready(self) -> _Context:
        assert self._context is not None, "no weights are used yet"
        return self._context

    def _sweep(self) -> None:
        """Empty the sequences that were dropped."""
        while self._dropped:
            sequence = self._dropped.popleft()
            if self._lengths.pop(sequence, 0) and self._context is not None:
                self._context.calls.llama_memory_seq_rm(self._context.memory, sequence, -1, -1)

    def _move(self, weights: Weights, cells: int, more: int = 0) -> None:
        """Make another context with at least so many cells, and move what was read into it. Cells that sequences share
        are copied for each of them."""
        self._sweep()
        needed = sum(self._lengths.values()) + more
        while cells < needed:
            cells *= 2
        context = _Context(self._library, weights, self._vocab_size, self._most, cells)
        if self._context is not None:
            for sequence, length in self._lengths.items():
                if length:
                    context.take(self._context, sequence)
        self._context = context
