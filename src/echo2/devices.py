"""A device by name, for the learner and for the engines. Loads torch only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.errors import UserError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """A torch device from cpu, cuda, cuda:0 ..., auto (the first GPU if there is one) or auto:N (see `nth_device`).

    Raises:
        UserError: the name is unknown, or there is no such device.
    """
    import torch

    try:
        device = torch.device(nth_device(name, torch.cuda.device_count()))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"The device {name!r} cannot be used: {error}. Use cpu, cuda, cuda:0 or auto.") from error
    return device


def nth_device(name: str, num_gpus: int) -> str:
    """auto:N as the GPU after N others, counted round, so that the processes of one machine share its GPUs; auto is
    auto:0, and without a GPU both are cpu. Other names stay."""
    kind, _, number = name.partition(":")
    if kind != "auto" or not (number or "0").isdecimal():
        return name
    return f"cuda:{int(number or 0) % num_gpus}" if num_gpus else "cpu"
