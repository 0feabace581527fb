"""Sequences of tokens that llama.cpp has read, in one context (package `llama-cpp-python`, its low-level functions).

A context has a fixed number of sequences, each with a fixed number of cells for keys and values. When either is too
small, or the weights are new, the sequences move into another context with all that they have read. Cells hold keys and
values in 16 bits.

Shape suffixes: B = sequences, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2.core.errors import UserError
from echo2.engines.engine import OutOfMemoryError

#: Tokens that llama.cpp takes in one call.
BATCH_TOKENS = 2048
#: A context begins with so many cells for each sequence, and so many sequences; both double.
FIRST_CELLS, FIRST_SEQUENCES = 256, 16
#: Layers given to a GPU: all, if llama.cpp was built for one.
ALL_LAYERS = 1 << 20
#: Lines of llama.cpp's log that an error quotes.
LOG_LINES = 3


class Library:
    """llama.cpp's functions, and the last lines that it logged as errors.

    Raises:
        UserError: the package is not installed, or does not load.
    """

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
        params.use_extra_bufts = False
        params.n_gpu_layers = ALL_LAYERS if on_gpu else 0
        self.pointer = calls.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise library.failure("did not load the weights")

    def adapter(self, path: Path) -> AdapterWeights:
        """Load an adapter over this model."""
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
        self.vocab_size, self.most, self.cells = vocab_size, most, cells
        params = self.calls.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = most * cells, most, False
        params.n_batch = max(BATCH_TOKENS, most)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.no_perf = True
        self.pointer = self.calls.llama_init_from_model(weights.pointer, params)
        if not self.pointer:
            raise library.failure(f"has no room for {most} sequences of {cells} tokens")
        self.memory = self.calls.llama_get_memory(self.pointer)
        self._batch = self.calls.llama_batch_init(params.n_batch, 0, 1)

    def apply(self, adapter: AdapterWeights | None) -> None:
        """Use this adapter from now on, or none."""
        kind = self.calls.llama_adapter_lora_p_ctypes
        pointers = (kind * 1)(*([adapter.pointer] if adapter is not None else []))
        if self.calls.llama_set_adapters_lora(self.pointer, pointers, adapter is not None, (ctypes.c_float * 1)(1.0)):
            raise self._library.failure("did not take the adapter")

    def decode(self, tokens: Sequence[int], places: Sequence[int], sequences: Sequence[int], wants: bool) -> None:
        """Read one token for each entry, at its place of its sequence. `wants`: logits of all of them are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for at, (token, place, sequence) in enumerate(zip(tokens, places, sequences, strict=True)):
            batch.token[at], batch.pos[at] = token, place
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wants
        failed = self.calls.llama_decode(self.pointer, batch)
        if failed:
            raise self._library.failure(f"could not read {len(tokens)} tokens (llama_decode gave {failed})")

    def logits(self, count: int) -> Tensor:
        """Return the logits [count, V] that the last `decode` asked for, float32."""
        pointer = self.calls.llama_get_logits(self.pointer)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (count, self.vocab_size)).copy())

    def take(self, other: _Context, sequence: int) -> None:
        """Take a sequence with all that it has read from another context."""
        size = other.calls.llama_state_seq_get_size(other.pointer, sequence)
        data = (ctypes.c_uint8 * size)()
        size = other.calls.llama_state_seq_get_data(other.pointer, data, size, sequence)
        if not self.calls.llama_state_seq_set_data(self.pointer, data, size, sequence):
            raise self._library.failure("could not move a sequence to new weights")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.calls.llama_free(self.pointer)
        if hasattr(self, "_batch"):
            self.calls.llama_batch_free(self._batch)


class Sequences:
    """All sequences of an engine. One thread uses them at a time; `drop` may be called by any.

    cells_max  tokens that a sequence can have: the context of the model
    """

    def __init__(self, library: Library, vocab_size: int, cells_max: int) -> None:
        self._library, self._vocab_size, self._cells_max = library, vocab_size, cells_max
        self._most = min(FIRST_SEQUENCES, library.calls.llama_max_parallel_sequences())
        self._cells = min(FIRST_CELLS, cells_max)
        self._context: _Context | None = None
        self._used: tuple[Weights, AdapterWeights | None] | None = None
        self._lengths: dict[int, int] = {}
        self._dropped: deque[int] = deque()

    def use(self, weights: Weights, adapter: AdapterWeights | None) -> None:
        """Read with these weights from now on; sequences keep what they have read."""
        if self._used == (weights, adapter):
            return
        if self._used is None or self._used[0] is not weights:
            self._move(weights, self._most, self._cells)
        assert self._context is not None
        self._context.apply(adapter)
        self._used = weights, adapter

    def new(self, count: int) -> list[int]:
        """Return new sequences without tokens."""
        self._sweep()
        free = [number for number in range(self._most) if number not in self._lengths]
        if count > len(free):
            limit = self._library.calls.llama_max_parallel_sequences()
            if len(self._lengths) + count > limit:
                raise UserError(f"llama.cpp has room for {limit} sequences at most. Give the worker fewer --slots.")
            self._resize(min(limit, max(2 * self._most, len(self._lengths) + count)), self._cells)
            free = [number for number in range(self._most) if number not in self._lengths]
        self._lengths |= dict.fromkeys(free[:count], 0)
        return free[:count]

    def drop(self, sequences: Iterable[int]) -> None:
        """These sequences are not needed any more."""
        self._dropped.extend(sequences)

    def length(self, sequence: int) -> int:
        """Tokens that a sequence has read."""
        return self._lengths[sequence]

    def copy(self, sequence: int, length: int) -> int:
        """Return a new sequence with the first `length` tokens of another one."""
        (found,) = self.new(1)
        if length:
            context = self._ready()
            context.calls.llama_memory_seq_cp(context.memory, sequence, found, -1, -1)
            context.calls.llama_memory_seq_rm(context.memory, found, length, -1)
            self._lengths[found] = length
        return found

    def read(self, sequences: Sequence[int], parts: Sequence[array[int]]) -> None:
        """Read more tokens of these sequences; no logits are wanted."""
        tokens, places, owners = list[int](), list[int](), list[int]()
        for sequence, part in zip(sequences, parts, strict=True):
            self._reserve(self._lengths[sequence] + len(part))
            places += range(self._lengths[sequence], self._lengths[sequence] + len(part))
            tokens += part
            owners += [sequence] * len(part)
        for start in range(0, len(tokens), BATCH_TOKENS):
            piece = slice(start, start + BATCH_TOKENS)
            self._ready().decode(tokens[piece], places[piece], owners[piece], wants=False)
        for sequence, part in zip(sequences, parts, strict=True):
            self._lengths[sequence] += len(part)

    def step(self, sequences: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Read one more token of each sequence. Returns the logits [B, V] of the next."""
        self._reserve(1 + max(self._lengths[sequence] for sequence in sequences))
        context, places = self._ready(), [self._lengths[sequence] for sequence in sequences]
        context.decode(tokens, places, sequences, wants=True)
        for sequence in sequences:
            self._lengths[sequence] += 1
        return context.logits(len(sequences))

    def _ready(self) -> _Context:
        assert self._context is not None, "no weights are used yet"
        return self._context

    def _sweep(self) -> None:
        """Empty the sequences that were dropped."""
        while self._dropped:
            sequence = self._dropped.popleft()
            if self._lengths.pop(sequence, 0) and self._context is not None:
                self._context.calls.llama_memory_seq_rm(self._context.memory, sequence, -1, -1)

    def _reserve(self, cells: int) -> None:
        """Make room for so many tokens in a sequence. A row that ended may be stepped once past the context's end."""
        if cells > self._cells:
            self._sweep()
            self._resize(self._most, max(cells, min(2 * self._cells, self._cells_max)))

    def _resize(self, most: int, cells: int) -> None:
        if self._used is not None:
            self._move(self._used[0], most, cells)
            assert self._context is not None
            self._context.apply(self._used[1])
        self._most, self._cells = most, cells

    def _move(self, weights: Weights, most: int, cells: int) -> None:
        """Make another context, and move what was read into it."""
        self._sweep()
        context = _Context(self._library, weights, self._vocab_size, most, cells)
        if self._context is not None:
            for sequence, length in self._lengths.items():
                if length:
                    context.take(self._context, sequence)
        self._context = context
