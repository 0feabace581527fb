"""Puts tensors away: from a device into the machine's memory, and back to where they were.

The memory of tensors is put away, not the tensors: parameters, views and references to them stay what they
are, and have no memory meanwhile. They must not be used before they are back.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: Types that are not searched for tensors: code, and values.
PASSED_OVER = (
    *(str, bytes, int, float, type, type(None), partial, torch.dtype, torch.device),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


class Parked:
    """The memory of all tensors on a `device` that objects refer to, in the machine's memory until `fetch`. If the
    machine has no room, they are where they were."""

    def __init__(self, device: torch.device, *holders: Any) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # streams beside this thread's, too
        memories = {one.data_ptr(): one for one in map(_memory, _tensors(holders, {})) if one is not None}
        self._copies = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]()
        try:
            for memory in memories.values():
                if memory.device == device and memory.resizable():
                    self._copies.append((memory, _copy(memory)))
                    memory.resize_(0)
        except BaseException:  # the machine has no room
            self.fetch()
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes() for _, copy in self._copies)

    def fetch(self) -> None:
        """Put the tensors' memory back on the device.

        Raises:
            RuntimeError: the device has no room; what is back stays, and another call goes on.
        """
        while self._copies:
            memory, copy = self._copies[-1]
            memory.resize_(copy.nbytes())
            memory.copy_(copy)
            self._copies.pop()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _copy(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(memory.nbytes())
    copy.copy_(memory)
    return copy


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None: it has none of its own, as those that libraries pack."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return tensor.untyped_storage()


def _tensors(holder: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an object refers to, and their gradients. `seen`: objects by id, and alive, for another
    one could get the id of one that is gone.
    """
    if isinstance(holder, PASSED_OVER) or id(holder) in seen:
        return
    seen[id(holder)] = holder
    if isinstance(holder, Tensor):
        yield holder
        if holder.grad is not None:
            yield holder.grad
    elif isinstance(holder, Mapping):
        for key, value in holder.items():
            yield from _tensors(key, seen)
            yield from _tensors(value, seen)
    elif isinstance(holder, list | tuple | set | frozenset):
        for one in holder:
            yield from _tensors(one, seen)
    else:
        slots = [name for kind in type(holder).__mro__ for name in vars(kind).get("__slots__", ())]
        yield from _tensors([getattr(holder, name, None) for name in slots], seen)
        yield from _tensors(getattr(holder, "__dict__", {}), seen)
