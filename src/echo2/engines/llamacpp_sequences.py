"""Sequences of tokens that llama.cpp has read, in one context (package `llama-cpp-python`, its low-level functions).

A context has cells, each for the keys and values of one token, in 16 bits. All sequences share them, and copies of a
sequence share its cells. When there are too few, or the weights are new, the sequences move into another context with
all that they have read.

Shape suffixes: B = sequences, V = vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
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
#: Cells that a context begins with; they double.
FIRST_CELLS = 2048
#: What `llama_decode` returns if there are too few cells.
NO_CELLS = 1
#: Layers given to a GPU: all, if llama.cpp was built for one.
ALL_LAYERS = 1 << 20
#: Lines of llama.cpp's log that an error quotes.
LOG_LINES = 3


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
        found = next((number for number in range(self._most) if number not in self._lengths), None)
        if found is not None:
            self._lengths[found] = 0
        return found

    def drop(self, sequences: Iterable[int]) -> None:
        """These sequences are not needed any more."""
        self._dropped.extend(sequences)

    def length(self, sequence: int) -> int:
        """Tokens that a sequence has read."""
        return self._lengths[sequence]

    def copy(self, sequence: int, length: int) -> int | None:
        """Return a new sequence with the first `length` tokens of another one; None: there are too many."""
        found = self.new()
        if found is not None and length:
            context = self._ready()
            context.calls.llama_memory_seq_cp(context.memory, sequence, found, 0, length)
            self._lengths[found] = length
        return found

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
