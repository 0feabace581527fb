"""Writes a snapshot as a model directory for a token server, which can read weights only from files.

The directory of the served weights stays until other weights are served. A server is restarted from it, and the old
weights are restored from it if new ones cannot be loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from echo2.core.decide.model_config import context_length, has_two_ropes, num_chosen, num_experts, routed_layers
from echo2.core.documents import safetensors_pieces
from echo2.core.errors import PeerError, UserError, write_failed
from echo2.core.types import Snapshot, SnapshotRef, StoredTensor, TensorSource
from echo2.engines.model_values import read_text_values
from echo2.transport.routes import RouteShape
from echo2.weights.format.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from echo2.weights.format.snapshot_files import end_tokens, read_config, read_factors

DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
#: Unsigned integer type and exponent mask of each float dtype: only NaN and infinity have all exponent bits set.
EXPONENTS: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF << 52),
    "F32": (np.uint32, 0xFF << 23),
    "BF16": (np.uint16, 0xFF << 7),
    "F16": (np.uint16, 0x1F << 10),
}
RANK_MAX = 512
#: Name of the link to the served adapter's directory.
LINK = "adapter"
HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight")
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The routes of a mixture. `places`: its layers with a router, among all `num_layers`; `shape`: of their routes."""

    shape: RouteShape
    places: tuple[int, ...]
    num_layers: int

    @property
    def token_bytes(self) -> int:
        """Largest size of a token's routes in an answer, base64."""
        return 2 * self.num_layers * self.shape.chosen * self.shape.dtype.itemsize


@dataclass(frozen=True)
class ServedModel:
    """The policy of a server: the whole model in `directory`, and over it the adapter in `adapter` (None: no adapter),
    of this `rank`. `shapes`: dtype and shape of the snapshot's tensors, by name."""

    ref: SnapshotRef
    base_model: SnapshotRef | None
    directory: Path
    adapter: Path | None
    rank: int
    dtype: str
    vocab_size: int
    max_positions: int
    end_tokens: frozenset[int]
    config: bytes
    shapes: Shapes

    @cached_property
    def routes(self) -> RoutedLayers | None:
        """The layers of a mixture that have a router; None: a dense model, or one that does not say which they are."""
        values = read_text_values({"config.json": self.config})
        experts, chosen = num_experts(values), num_chosen(values)
        places = routed_layers(values)
        if not places or not 0 < chosen < experts:
            return None
        return RoutedLayers(RouteShape(len(places), chosen, experts), places, int(values["num_hidden_layers"]))

    @property
    def has_experts(self) -> bool:
        return num_experts(read_text_values({"config.json": self.config})) > 0

    @property
    def has_two_ropes(self) -> bool:
        return has_two_ropes(read_config({"config.json": self.config}))

    @property
    def adapts_experts(self) -> bool:
        """Whether the adapter has factors of a mixture's experts, which are PEFT's two for all experts."""
        return self.adapter is not None and any(".experts." in name for name in self.shapes)

    @property
    def label(self) -> str:
        """The server's name of these weights, in characters that vLLM accepts in a cache salt too."""
        return f"{self.ref.policy}-{self.ref.lineage}.{self.ref.version}"


class ModelDirectories:
    """The model directories below `root`, which nothing else writes to. `unties`: a tied output layer is written as a
    tensor of its own beside the embedding (`VllmServer.unties`)."""

    def __init__(self, root: Path, unties: bool = False) -> None:
        self._root, self._count, self._unties = root, 0, unties
        shutil.rmtree(root, ignore_errors=True)  # left by an earlier process
        root.mkdir(parents=True)

    def write(self, snapshot: Snapshot, base: Snapshot | None, before: ServedModel | None) -> ServedModel:
        """Check a snapshot, and write the files that a server reads. `before`: the model that is served now.

        Raises:
            PeerError: it is not a model, holds NaN or infinity, or has another architecture than the one before.
            UserError: the disk is full, or token servers do not support the model's dtype.
        """
        whole = snapshot if snapshot.base_model is None else base
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in snapshot.tensors.items()}
        if whole is None:
            if before is None or before.base_model != snapshot.base_model:
                raise PeerError("base_model", f"{snapshot.ref} is over {snapshot.base_model}, which is not served")
            model = before.directory, before.config, before.dtype
        else:
            written = _untied(whole) if self._unties and whole is snapshot else whole
            model = self._write(written, "model.safetensors", "config.json"), whole.files["config.json"], _dtype(whole)
        directory, config_json, dtype = model
        config = read_text_values({"config.json": config_json})
        is_like_before = before is not None and before.base_model == snapshot.base_model
        if before is not None and is_like_before and (before.shapes, before.config) != (shapes, config_json):
            raise PeerError("architecture", f"snapshot {snapshot.ref} has another architecture than the one before")
        is_adapter = snapshot.base_model is not None
        return ServedModel(
            ref=snapshot.ref,
            base_model=snapshot.base_model,
            directory=directory,
            adapter=self._write(snapshot, ADAPTER_WEIGHTS, ADAPTER_CONFIG) if is_adapter else None,
            rank=_rank(snapshot) if is_adapter else 0,
            dtype=dtype,
            vocab_size=_size(config, "vocab_size"),
            max_positions=_context(config),
            end_tokens=frozenset(end_tokens(snapshot.files)),
            config=config_json,
            shapes=shapes,
        )

    def keep_only(self, model: ServedModel | None) -> None:
        own_paths = (model.directory, model.adapter) if model is not None else ()
        for path in self._root.iterdir():
            if path not in own_paths and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, snapshot: Snapshot, weights: str, config: str) -> Path:
        self._count += 1
        directory = self._root / str(self._count)
        checked = {name: _checked(name, tensor) for name, tensor in snapshot.tensors.items()}
        if config not in snapshot.files:
            raise PeerError("bad_snapshot", f"{config} is missing")
        try:
            directory.mkdir()
            (directory / config).write_bytes(snapshot.files[config])
            with (directory / weights).open("wb") as file:
                file.writelines(safetensors_pieces(checked))
        except OSError as error:
            message = (
                f"Cannot write the model for the token server into {directory}: {error.strerror}. Make room there."
            )
            raise write_failed(error, message) from error
        return directory


def _untied(snapshot: Snapshot) -> Snapshot:
    """Return the same model with its output layer as a tensor of its own.

    Raises:
        UserError: its output layer is tied to an embedding of unknown name.
    """
    if HEAD in snapshot.tensors:
        return snapshot
    embedding = next((name for name in snapshot.tensors if name.endswith(EMBEDDINGS)), None)
    if embedding is None:
        raise UserError(
            f"{snapshot.ref} has no {HEAD} and no embedding called {' or '.join(EMBEDDINGS)}; without either, vLLM on "
            "a CPU would keep its first output layer. Use the engine transformers."
        )
    config = {**read_config(snapshot.files), "tie_word_embeddings": False}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {**text, "tie_word_embeddings": False}
    tensors = {**snapshot.tensors, HEAD: snapshot.tensors[embedding]}
    return replace(snapshot, tensors=tensors, files={**snapshot.files, "config.json": json.dumps(config).encode()})


def _checked(name: str, tensor: TensorSource) -> StoredTensor:
    """Return the tensor with a check: reading it raises PeerError if it holds NaN or infinity."""
    return StoredTensor(tensor.dtype, tensor.shape, tensor.num_bytes, partial(_read_finite, name, tensor))


def _read_finite(name: str, tensor: TensorSource, start: int, stop: int) -> bytes | memoryview:
    data = tensor.read(start, stop)
    if tensor.dtype in EXPONENTS:
        unsigned, exponent = EXPONENTS[tensor.dtype]
        bits = np.frombuffer(data, unsigned)
        if ((bits & unsigned(exponent)) == exponent).any():
            raise PeerError("bad_snapshot", f"{name} holds NaN or infinity")
    return data


def _dtype(snapshot: Snapshot) -> str:
    largest = max(snapshot.tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    if largest is None or largest.dtype not in DTYPE_NAMES:
        dtype = "none" if largest is None else largest.dtype
        raise UserError(f"A token server takes weights of {', '.join(DTYPE_NAMES)}; {snapshot.ref} has {dtype}.")
    return DTYPE_NAMES[largest.dtype]


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PeerError("bad_snapshot", f"{key} in config.json is {value!r}")
    return value


def _context(config: Mapping[str, Any]) -> int:
    positions = context_length(config)
    if positions is None or positions < 1:
        raise PeerError("bad_snapshot", f"config.json names no context length: max_position_embeddings is {positions}")
    return positions


def _rank(snapshot: Snapshot) -> int:
    rank = read_factors(snapshot).rank
    if rank > RANK_MAX:
        raise PeerError("bad_adapter", f"r in {ADAPTER_CONFIG} of {snapshot.ref} is {rank}; 1 to {RANK_MAX} can be")
    return rank
