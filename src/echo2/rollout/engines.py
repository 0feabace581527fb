"""Engines by name."""

from __future__ import annotations

from echo2.errors import UserError
from echo2.rollout.engine import Engine, SwapMode


def make_engine(name: str, device: str = "auto", swap: SwapMode = "between") -> Engine:
    """The engine called `name` (compact | transformers | fake) on `device` (cpu | cuda | cuda:0 ... | auto).

    Raises:
        UserError: there is no such engine or device.
    """
    if name == "fake":
        from echo2.rollout.fake_engine import FakeEngine

        return FakeEngine()
    # torch takes a second to import, transformers' models three more: only where they are used.
    if name == "compact":
        from echo2.rollout.compact import build_compact
        from echo2.rollout.torch_engine import TorchEngine

        return TorchEngine(build_compact, device, swap)
    if name == "transformers":
        from echo2.rollout.hf_engine import build_transformers
        from echo2.rollout.torch_engine import TorchEngine

        return TorchEngine(build_transformers, device, swap)
    raise UserError(f"workers.engine = {name!r} is not known. Use compact, transformers or fake.")
