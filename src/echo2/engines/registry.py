"""Chooses an engine where `workers.engine` leaves that open ("auto"), and makes it. No torch here: an engine's module
is imported when it is made, since torch takes a second to import and transformers' models take three more.

`compact` where it knows the model, on a Mac `mlx` in its place, else `transformers`: a model's config.json decides it,
and the engine `auto` does so once the first snapshot is there. vLLM comes before all where it is installed and has a
GPU for itself; the head allows it to machines of the owner alone, because its rollouts cannot be checked
(`head/serve/claims.py`).

The names are in `config/values.py`, each with a module that has a function `make_engine(device, slots)`. That of
`FORMS` takes the form, too, and that of `SERVERS` the place.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echo2.config import Config
from echo2.config.values import (
    AUTO,
    ENGINES,
    FORMS,
    MLX_FORMS,
    ROUNDING_ENGINES,
    SERVERS,
    STREAM_ENGINES,
    ServerPlace,
    refuse_unknown_engine,
)
from echo2.core.decide.model_config import num_experts, text_part
from echo2.core.devices import this_machine
from echo2.core.errors import LinkError, UserError
from echo2.core.types import Snapshot
from echo2.engines.decode_loop import DEFAULT_SLOTS, DecodeLoop
from echo2.engines.engine import Engine
from echo2.engines.model_values import PLAIN_TYPES, UnsupportedError, read_architecture
from echo2.weights.format.snapshot_files import read_config

if TYPE_CHECKING:
    import torch

    from echo2.engines.torch_engine import Model

log = logging.getLogger(__name__)

#: The default: the server runs in this Python, with temporary files.
NO_PLACE = ServerPlace()
#: Up to so much memory, a Mac's GPU may have two thirds of it.
MAC_SMALL_BYTES = 36 << 30
#: What an engine's module needs beside torch.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "echo2.engines.llamacpp": ("llama_cpp", "gguf"),
    "echo2.engines.mlx": ("mlx", "mlx_lm"),
}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine's name, and why it was chosen."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"engine {self.name}: {self.why}"


def in_worker(config: Mapping[str, Any]) -> EngineChoice:
    """Return the engine within the worker for a model with this config.json."""
    try:
        read_architecture(config)
    except UnsupportedError as error:
        return EngineChoice("transformers", f"compact does not support {error.trait}")
    except UserError:
        return EngineChoice("transformers", "the model's config.json leaves out what compact needs")
    reason = f"it knows {config['model_type']} models"
    if config["model_type"] in PLAIN_TYPES and is_mac() and not missing_packages("mlx"):
        return EngineChoice("mlx", f"{reason}, and uses this Mac's GPU")
    return EngineChoice("compact", reason)


def is_mac() -> bool:
    """Whether this is a Mac with Apple silicon, whose GPU only MLX uses."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def sampling_bytes(memory_bytes: int) -> int:
    """Return what engines can have of a machine's memory. A Mac's system keeps a third of it from the GPU, or a quarter
    of more than 36 GB, and needs that for itself and other programs."""
    if not is_mac():
        return memory_bytes
    return memory_bytes * 2 // 3 if memory_bytes <= MAC_SMALL_BYTES else memory_bytes * 3 // 4


def rounding_engines() -> tuple[str, ...]:
    """Return the engines of `FORMS` that a machine of this kind may choose by itself, the most bits first: MLX's on a
    Mac only, for on other processors it is a test bed."""
    return tuple(engine for engine in FORMS if is_mac() or engine not in MLX_FORMS)


def chosen(config: Config, model: Mapping[str, Any] | None, servers: Sequence[str]) -> EngineChoice:
    """Return the engine of a run's worker. `model`: the model's config.json, None if it is not here; `servers`: that
    the worker has (`servers_here`)."""
    if config.workers.engine != AUTO:
        return EngineChoice(config.workers.engine, "workers.engine names it")
    if servers and not config.run.deterministic:
        return EngineChoice(servers[0], "it is installed, and there is a GPU for it alone")
    if model is None:
        return EngineChoice(AUTO, "compact if it knows the model, else transformers; the model is not here yet")
    return in_worker(model)


def unchecked(config: Config, model: Mapping[str, Any] | None, own: EngineChoice) -> str:
    """Return which rollouts of strangers no machine with the run's engine can check, and what follows; empty: it checks
    all that the run takes. `model`: as in `chosen`; `own`: the engine that it gave. Where the run requires checks, the
    head keeps one machine from choosing vLLM by itself.
    """
    inside = in_worker(model) if model is not None else EngineChoice(AUTO, "")
    is_kept = config.workers.engine == AUTO and config.workers.require_checks
    name = inside.name if is_kept else own.name
    forms = f"workers.forms = {config.workers.forms}, and"
    none = "get no leases" if config.workers.require_checks else "are trained without a check"
    if config.run.deterministic:
        return ""
    if config.workers.forms and inside.name == "transformers":
        return (
            f"{forms} no machine can check rollouts of rounded weights: compact alone computes with them, and "
            f"{inside.why}. New strangers that round {none}. Leave workers.forms out."
        )
    if name not in STREAM_ENGINES or name in FORMS:
        return (
            f"the run's engine, {name}, checks no rollouts of strangers. Unless a machine of yours is started with "
            f"--engine {'compact' if inside.name == AUTO else inside.name}, new strangers {none}."
        )
    if config.workers.forms and name not in ROUNDING_ENGINES:
        return (
            f"{forms} the run's engine, {name}, checks no rollouts of rounded weights. Unless a machine of yours is "
            f"started with --engine compact, new strangers that round {none}."
        )
    if model is not None and not config.learner.routing_replay and _is_mixture_in_16_bits(config, model):
        return (
            "in 16 bits, a machine that checks rollouts of a mixture chooses other experts than their worker did, and "
            "calls honest ones wrong (2 of 4 groups of a tiny one). Set learner.routing_replay = true before you "
            "invite strangers."
        )
    return ""


def _is_mixture_in_16_bits(config: Config, model: Mapping[str, Any]) -> bool:
    values = text_part(model)
    stored = values.get("dtype") or values.get("torch_dtype")
    is_half = config.model.snapshot_dtype == "bfloat16" or (config.lora.rank > 0 and stored in ("bfloat16", "float16"))
    return is_half and num_experts(values) > 0


def obstacle(engine: str, model: Mapping[str, Any]) -> str:
    """Return why an engine of `FORMS` can't sample with a model of this config.json here; empty: it can."""
    if missing := missing_packages(engine):
        return missing
    try:
        importlib.import_module(ENGINES[engine]).check_model(model, FORMS[engine])
    except UserError as error:
        return str(error)
    return ""


def missing_packages(engine: str) -> str:
    """Return what an engine lacks here, of those that need more than torch; empty: nothing. MLX on a Mac lacks a GPU
    where there is no Metal, as in many virtual machines: on processors it is a test bed."""
    missing = [package for package in PACKAGES[ENGINES[engine]] if importlib.util.find_spec(package) is None]
    extra = engine.partition("-")[0]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install 'echo2[{extra}]')"
    return "there is no GPU that MLX uses (Metal)" if extra == "mlx" and is_mac() and not has_metal() else ""


def has_metal() -> bool:
    """Whether MLX, which is installed, finds a GPU of a Mac."""
    import mlx.core as mx

    return bool(mx.metal.is_available())


def uses_gpu(engine: str, device: str) -> bool:
    """Whether an engine of `FORMS`, whose packages are here, would compute on a GPU."""
    return device != "cpu" and bool(importlib.import_module(ENGINES[engine]).has_gpu())


def servers_here(device: str, python: str = "", url: str = "") -> tuple[str, ...]:
    """Return the token servers that a worker on this device can start with a GPU for itself. `python`: of another
    environment, which has vLLM; else ECHO2_ENGINE_PYTHON or this one counts. `url`: of a server that runs already."""
    if url:
        return ("vllm",)
    python = python or os.environ.get("ECHO2_ENGINE_PYTHON", "")
    is_there = shutil.which(python) is not None if python else importlib.util.find_spec("vllm") is not None
    return ("vllm",) if is_there and _has_own_gpu(device, len(this_machine().gpus)) else ()


def _has_own_gpu(device: str, num_gpus: int) -> bool:
    """Whether a device is a GPU that the other processes of `echo2 run` do not use (`devices.nth_device`)."""
    kind, _, number = device.partition(":")
    at = int(number) if number.isdecimal() else 0
    return at < num_gpus if kind == "auto" else kind != "cpu" and num_gpus > 0


def make_engine(name: str, device: str = "auto", slots: int = DEFAULT_SLOTS, place: ServerPlace = NO_PLACE) -> Engine:
    """Make the engine `name` on `device` (cpu | cuda | cuda:0 | mps | xpu ... | auto), which decodes up to `slots`
    rollouts at a time. `place`: where a token server is.

    Raises:
        UserError: there is no such engine or device.
    """
    refuse_unknown_engine(name)
    if name == AUTO:
        from echo2.engines.torch_engine import TorchDecoder

        has_mlx = is_mac() and not missing_packages("mlx")  # which takes torch's values on the CPU
        return DecodeLoop(TorchDecoder(AutoBuilder(device), "cpu" if has_mlx else device), slots)
    more: list[Any] = [FORMS[name]] if name in FORMS else [place] if name in SERVERS else []
    engine: Engine = importlib.import_module(ENGINES[name]).make_engine(device, slots, *more)
    return engine


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
            from echo2.engines.compact import build_compact

            return build_compact(snapshot, device)
        if choice.name == "mlx":
            from echo2.engines.mlx import MlxBuilder

            return MlxBuilder(device=self._device)(snapshot, device)
        from echo2.engines.hf_engine import build_transformers

        return build_transformers(snapshot, device)


async def load_or_replace(
    engine: Engine, snapshot: Snapshot, base: Snapshot | None, device: str
) -> tuple[Engine, float]:
    """Give a token server that was chosen by default its first weights. If it does not start, the engine `auto` takes
    its place. Return the engine with these weights, and the seconds that generation paused.

    Raises: as `Engine.update_weights`.
    """
    try:
        return engine, await engine.update_weights(snapshot, base)
    except (LinkError, UserError) as error:
        log.warning("no token server, although it is installed here: %s The engine %s takes its place", error, AUTO)
    await engine.close()
    other = await asyncio.to_thread(make_engine, AUTO, device, engine.slots)
    try:
        return other, await other.update_weights(snapshot, base)
    except BaseException:
        await other.close()
        raise
