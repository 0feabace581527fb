"""The precision of the learner's computation, and the precisions in which trained weights must not be held.

Weights and moments are float32; matrix products may be bfloat16 (autocast). Trained weights in bfloat16 have 8 bits:
AdamW moves a weight by about the learning rate, and a change below half of the gap between two numbers is rounded away,
every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from echo2.errors import UserError

#: Number of values of a tensor that are examined.
SAMPLE = 100_000


def computes_in_bfloat16(setting: Literal["auto", "float32", "bfloat16"], device: torch.device) -> bool:
    """Whether matrix products on this device are bfloat16 under `model.compute_dtype`."""
    if setting == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return setting == "bfloat16"


def refuse_vanishing_updates(parameters: Mapping[str, Tensor], lr: float) -> None:
    """Refuse to train weights in a precision in which the updates of this learning rate would mostly be rounded away.

    Raises:
        UserError: names the tensor, the numbers and what to do.
    """
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            continue
        typical = float(parameter.detach().flatten()[:SAMPLE].float().abs().median())
        least = typical * torch.finfo(parameter.dtype).eps / 4  # half of the gap is at least this
        if 0.0 < lr < least:
            raise UserError(
                f"learner.lr = {lr:g} would change next to nothing: {name} is held in {parameter.dtype}, its weights "
                f"are about {typical:.2g}, and changes below {least:.2g} are rounded away. Hold the weights in float32 "
                "(products may be bfloat16: model.compute_dtype), or train an adapter (lora.rank), which is float32."
            )
