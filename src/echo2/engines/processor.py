"""What one core of this machine does in torch, measured in a second: the data sheet of a machine without a GPU. No
table has it: which instructions a product uses depends on the processor, its maker, and torch's libraries, and two
precisions of one machine differ by a factor of five.

Seconds are those that the thread computes, not those that pass, and the least of a few trials counts. So other programs
on the machine matter little. `echo2 run` gives each of its processes one thread (docs/operations.md); they share the
memory's bandwidth, so other cores are kept busy meanwhile.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo2.core.devices import num_cores, require_torch

if TYPE_CHECKING:
    import torch

#: Rows of a micro-batch, and of decoding steps; of these, the second less the first are what more rows cost.
MANY_ROWS, FEW_ROWS, MORE_ROWS = 512, 8, 48
#: Width of the matrices, and how many are read in turn: more than the caches of a core hold.
WIDTH, MATRICES = 1024, 32
#: Bytes of the tensors that pass through memory, and of those that are written to new memory, as activations are.
PASSING_BYTES, FRESH_BYTES = 1 << 26, 1 << 22
#: Rows, key-value heads, queries of each, columns and values of a head, and layers, of the attention that is measured.
ATTENTION, LAYERS = (32, 4, 3, 64, 64), 16
#: Rows and tokens of a vocabulary from which a token is drawn.
DRAWN = (16, 32_768)
TRIALS = 3


@dataclass(frozen=True, slots=True)
class Products:
    """Products of few rows with matrices that come from memory: 10^9 bytes of matrices that are read in a second, and
    10^9 operations a second of further rows.
    """

    gb_per_second: float
    gflops: float


@dataclass(frozen=True, slots=True)
class Processor:
    """`cores`; and of one of them: 10^9 operations a second in products of many rows in float32; products of few rows,
    in bfloat16 and float32; 10^9 bytes a second that it reads and writes, that it writes to memory which is new to the
    process, and of keys and values that attention of one query reads; seconds of an operation on the values of a
    decoding step; and seconds for each token of the vocabulary when one is drawn.
    """

    cores: int
    gflops: float
    bfloat16: Products
    float32: Products
    gb_per_second: float
    fresh_gb_per_second: float
    attention_gb_per_second: float
    operation_seconds: float
    drawn_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.cores} cores; one does {self.gflops:.0f} GFLOP/s in float32, {self.bfloat16.gflops:.0f} in bfloat16"
            f" on {self.bfloat16.gb_per_second:.0f} GB/s of weights, and moves {self.gb_per_second:.0f} GB/s"
        )


def this_processor(processes: int = 1) -> Processor:
    """Measure this machine's processor with one thread, while others compute as `processes` would, this one included.

    Raises:
        UserError: torch is not installed.
    """
    require_torch()
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _busy(min(processes, num_cores()) - 1), torch.inference_mode():
            return _measured()
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Inside, so many other threads multiply matrices from memory."""
    import torch
    from torch.nn import functional

    is_over = threading.Event()

    def compute() -> None:
        weights = [torch.ones(WIDTH, WIDTH) for _ in range(MATRICES)]
        x = torch.ones(MORE_ROWS, WIDTH)
        with torch.inference_mode():
            while not is_over.is_set():
                for weight in weights:
                    functional.linear(x, weight)

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _measured() -> Processor:
    import torch
    from torch.nn import functional

    x, weight = torch.ones(MANY_ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    many_seconds = _least(lambda: functional.linear(x, weight), 8)
    moved, into = (torch.ones(PASSING_BYTES, dtype=torch.uint8) for _ in range(2))
    small, logits = torch.ones(MORE_ROWS, WIDTH, dtype=torch.bfloat16), torch.randn(DRAWN)
    return Processor(
        cores=num_cores(),
        gflops=2.0 * MANY_ROWS * WIDTH * WIDTH / many_seconds / 1e9,
        bfloat16=_products(torch.bfloat16),
        float32=_products(torch.float32),
        gb_per_second=2.0 * PASSING_BYTES / _least(lambda: into.copy_(moved), 1) / 1e9,
        fresh_gb_per_second=FRESH_BYTES / _least(_fill_fresh, 16) / 1e9,
        attention_gb_per_second=_attention_gb_per_second(),
        operation_seconds=_least(lambda: small * small, 500),
        drawn_seconds=_least(lambda: _draw(logits), 1) / logits.numel(),
    )


def _products(dtype: torch.dtype) -> Products:
    import torch
    from torch.nn import functional

    weights = [torch.ones(WIDTH, WIDTH, dtype=dtype) for _ in range(MATRICES)]

    def seconds(rows: int) -> float:
        x = torch.ones(rows, WIDTH, dtype=dtype)
        return _least(lambda: [functional.linear(x, weight) for weight in weights], 1)

    few, more = seconds(FEW_ROWS), seconds(MORE_ROWS)
    values = MATRICES * WIDTH * WIDTH
    row_seconds = max(more - few, 0.05 * more) / (MORE_ROWS - FEW_ROWS)
    reading = max(few - FEW_ROWS * row_seconds, 0.05 * few)
    return Products(values * weights[0].element_size() / reading / 1e9, 2.0 * values / row_seconds / 1e9)


def _fill_fresh() -> None:
    import torch

    with mmap.mmap(-1, FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        values = torch.frombuffer(fresh, dtype=torch.float32)
        values.fill_(1.0)
        del values  # it holds the map


def _attention_gb_per_second() -> float:
    """As the engine `compact` does it for a batch, layer by layer."""
    import torch

    from echo2.engines.compact_cache import attention

    rows, heads, queries, columns, size = ATTENTION
    layers = [torch.ones(2, rows, heads, 2 * columns, size, dtype=torch.bfloat16) for _ in range(LAYERS)]
    query, mask = torch.ones(rows, heads, queries, size, dtype=torch.bfloat16), torch.zeros(rows, 1, 1, columns)

    def attend() -> None:
        for keys, values in layers:
            attention(query, keys[:, :, :columns], values[:, :, :columns], mask)

    return LAYERS * 2 * rows * heads * columns * size * query.element_size() / _least(attend, 1) / 1e9


def _draw(logits: torch.Tensor) -> torch.Tensor:
    import torch

    from echo2.engines.sampler import invert

    return invert(logits.log_softmax(-1), torch.full((len(logits),), 0.5, dtype=torch.float64))[0]


def _least(work: Callable[[], object], times: int) -> float:
    """Return the seconds that the thread computes for this work: the least of a few trials, after one that warms up."""
    work()
    seconds = []
    for _ in range(TRIALS):
        started = time.thread_time()
        for _ in range(times):
            work()
        seconds.append((time.thread_time() - started) / times)
    return max(min(seconds), 1e-12)
