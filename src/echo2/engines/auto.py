"""The engine `auto`: what `choice.in_worker` says of the first snapshot's model."""

from __future__ import annotations

import logging

import torch

from echo2.core.types import Snapshot
from echo2.engines.choice import EngineChoice, in_worker
from echo2.engines.compact import build_compact
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.engine import Engine
from echo2.engines.torch_engine import Model, TorchDecoder
from echo2.weights.format.snapshot_files import read_config

log = logging.getLogger(__name__)


def make_engine(device: str, slots: int) -> Engine:
    """The engine `auto`."""
    return DecodeLoop(TorchDecoder(AutoBuilder(device), device), slots)


class AutoBuilder:
    """Builds the models of snapshots, and logs the engine once. Implements `torch_engine.BuildModel`."""

    def __init__(self, device: str = "auto") -> None:
        self._device, self._choice = device, EngineChoice("", "")

    def __call__(self, snapshot: Snapshot, device: torch.device) -> Model:
        """Build the model of a snapshot; its weights are not loaded yet.

        Raises: as `build_compact` and `build_transformers`.
        """
        choice = in_worker(read_config(snapshot.files))
        if choice != self._choice:
            self._choice = choice
            log.info("%s", choice)
        if choice.name == "compact":
            return build_compact(snapshot, device)
        if choice.name == "mlx":
            from echo2.engines.mlx import MlxBuilder

            return MlxBuilder(device=self._device)(snapshot, device)
        from echo2.engines.hf_engine import build_transformers  # transformers' models take three seconds to import

        return build_transformers(snapshot, device)
