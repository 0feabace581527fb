"""A device by name, for the learner and for the engines. Loads torch only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echo2.errors import UserError

if TYPE_CHECKING:
    import torch


def pick_device(name: str, setting: str) -> torch.device:
    """A torch device from cpu, cuda, cuda:0 ... or auto (the GPU if there is one). `setting` is the key that says so.

    Raises:
        UserError: the name is unknown, or there is no such device.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{setting} = {name!r} cannot be used: {error}. Use cpu, cuda, cuda:0 or auto.") from error
    return device
