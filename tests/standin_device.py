"""A device that torch knows by a name of its own, has memory of its own, and computes no float64, as a Mac's GPU: its
tensors lie in the memory of the CPU. `python tests/standin_device.py DEVICE` samples with `compact` and `transformers`,
checks what came, and prints both.

It changes torch for a whole process, so tests run it in one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.utils.backend_registration
from torch.utils._pytree import tree_iter, tree_map

NAME = "cells"
CPU = torch.device("cpu")


class Cells(torch.Tensor):
    """A tensor on the device. `inner`: its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Cells:
        shape = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made: Cells = torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=NAME, **shape)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute with the inner values. Tensors of two devices meet in copies alone, and in numbers."""
    given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
    ours = {id(one.inner): one for one in given if isinstance(one, Cells)}
    device = kwargs.get("device")
    is_here = bool(ours) if device is None else device.type == NAME
    is_copy = "copy" in str(func)
    if ours and not is_copy and any(not isinstance(one, Cells) and one.dim() for one in given):
        raise RuntimeError(f"{func}: tensors on two devices")
    kwargs = kwargs if device is None else {**kwargs, "device": CPU}
    args, kwargs = tree_map(lambda one: one.inner if isinstance(one, Cells) else one, (args, kwargs))

    def placed(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or isinstance(one, Cells) or not is_here:
            return one
        if one.dtype == torch.float64:
            raise TypeError(f"{func}: {NAME} have no float64")
        return ours[id(one)] if id(one) in ours else Cells(one)

    return tree_map(placed, func(*args, **kwargs))


class CellsModule:
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


def register() -> torch.library.Library:
    """Make torch know the device, for as long as the library is kept."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, CellsModule())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: compute(op, args, kwargs), "PrivateUse1")
    make = torch.tensor  # it does not know backends in Python
    torch.tensor = lambda data, device=None, **more: make(data, **more).to(device or CPU)  # type: ignore[assignment]
    torch.accelerator.get_memory_info = lambda device=None: (1 << 34, 1 << 34)
    torch.accelerator.memory_reserved = torch.accelerator.memory_allocated = lambda device=None: 0
    return library


def sampled(build_model: Any, device: str) -> dict[str, Any]:
    """What an engine of torch samples, and what it reads of that as a checker."""
    from echo2.engines.decode_loop import DecodeLoop
    from echo2.engines.engine import PrefillRequest
    from echo2.engines.torch_engine import TorchDecoder
    from rollout_cases import load, requests, run, snapshot_of, tiny_module

    decoder = TorchDecoder(build_model, device)
    engine, snapshot = DecodeLoop(decoder, 8), snapshot_of(tiny_module("qwen3"))
    load(engine, snapshot)
    asked = [*requests(1), *requests(2, top_k=3), *requests(3, temperature=0.0)]
    drawn = run(engine, asked)
    whole = [(one, found) for one, found in zip(asked, drawn, strict=True) if not one.params.is_narrow]
    checks = [PrefillRequest(one.prompt_tokens, found.tokens, one.params, found.version_spans) for one, found in whole]
    return {
        "device": decoder._device.type,
        "tokens": [list(one.tokens) for one in drawn],
        "logprobs": [list(one.logprobs) for one in drawn],
        "read": [one.logprobs.tolist() for one in decoder.prefill(snapshot.ref, checks)],
    }


def main(device: str) -> None:
    from echo2.engines.compact import build_compact
    from echo2.engines.hf_engine import build_transformers

    kept = register()
    engines = {"compact": build_compact, "transformers": build_transformers}
    print(json.dumps({name: sampled(build, device) for name, build in engines.items()}))
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
