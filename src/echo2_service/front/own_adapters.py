"""Imports PEFT adapters of tenants: checks them against the base model, and writes them in the form that the service
itself publishes. No torch here.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from echo2.config.sections import LoraConfig
from echo2.core.documents import parse_json
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Snapshot, StoredTensor, TensorBytes, TensorSource
from echo2.learner.core.checkpoint import write_checkpoint
from echo2.weights.format.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, lora_factors
from echo2.weights.format.model_files import read_adapter, read_base_model
from echo2_service import limits
from echo2_service.backend import BaseInfo, ModelSpec
from echo2_service.front.bodies import check_parts

ALPHA_MAX = 1_000_000
#: Bytes of JSON in each file of an adapter: its configuration, and the list of its tensors.
JSON_BYTES_MAX = 4 << 20
#: Bytes of what stands before an entry of a tar file: long names, and other properties.
PROPERTIES_BYTES_MAX = 16 << 10
#: Kinds of such properties.
_PROPERTIES = (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
#: PEFT's names of a linear layer's factors A and B.
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def take_adapter(archive: bytes, base: BaseInfo, owner: str, to: Path) -> ModelSpec:
    """Write the adapter in a tar file to `to`, in float32, and return the spec of a model created from it.

    Raises:
        UserError: the adapter is not a LoRA adapter of this base model, or has a value that is not finite.
        PeerError: the archive is not a tar file, or has too many parts.
    """
    with TemporaryDirectory(dir=to.parent) as unpacked:
        _unpack(archive, Path(unpacked))
        _check_json(Path(unpacked))
        model = _base_model(base.directory)
        snapshot = read_adapter(Path(unpacked), model.ref, model.ref)
        rank, alpha = _read_config(snapshot.files[ADAPTER_CONFIG], base.name, model.ref.policy)
        targets = _check_shapes(snapshot, model, rank, base.name)
        tensors = {name: _floats(name, tensor) for name, tensor in snapshot.tensors.items()}
    config = adapter_config(LoraConfig(rank, alpha, targets), targets, model.ref)
    files, weights = {ADAPTER_CONFIG: config}, {ADAPTER_WEIGHTS: tensors}
    write_checkpoint(to, {"base_model": model.ref.policy}, files, weights)
    return ModelSpec(base.name, owner, rank, alpha, targets=tuple(targets))


@cache
def _base_model(directory: str) -> Snapshot:
    """Read the base model once: its policy id is computed from all its bytes."""
    return read_base_model(Path(directory))


class _Entry(tarfile.TarInfo):
    """An entry whose properties are few, and whose data stand in the file as they are: lists of properties, or of
    holes, would take many times the memory of the file."""

    def _proc_member(self, file: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type == tarfile.GNUTYPE_SPARSE or (self.type in _PROPERTIES and self.size > PROPERTIES_BYTES_MAX):
            raise tarfile.ReadError(f"an entry has holes, or more than {PROPERTIES_BYTES_MAX} bytes of properties")
        entry: tarfile.TarInfo = super()._proc_member(file)  # type: ignore[misc]
        return entry

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("an entry has holes")


def _unpack(archive: bytes, to: Path) -> None:
    try:
        with tarfile.open(fileobj=BytesIO(archive), mode="r:", tarinfo=_Entry) as file:
            for number, entry in enumerate(file):
                if number >= limits.ENTRIES_MAX:
                    raise PeerError("malformed", f"the tar file has more than {limits.ENTRIES_MAX} entries.")
                name = PurePosixPath(entry.name).name
                if name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) and entry.isreg() and entry.size <= len(archive):
                    data = file.extractfile(entry)
                    assert data is not None
                    (to / name).write_bytes(data.read())
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise PeerError("malformed", f"the body is not a tar file: {error}.") from error
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (to / name).is_file():
            both = f"{ADAPTER_CONFIG} {ADAPTER_WEIGHTS}"
            raise UserError(f"The tar file holds no {name}: make it with tar -c -C DIR {both}.")


def _check_json(directory: Path) -> None:
    """Refuse JSON that would take much more memory than the adapter."""
    weights = (directory / ADAPTER_WEIGHTS).read_bytes()
    tensors = weights[8 : 8 + int.from_bytes(weights[:8], "little")]
    for name, text in {ADAPTER_CONFIG: (directory / ADAPTER_CONFIG).read_bytes(), ADAPTER_WEIGHTS: tensors}.items():
        if len(text) > JSON_BYTES_MAX:
            raise UserError(f"{name} has {len(text)} bytes of JSON; {JSON_BYTES_MAX} are taken.")
        check_parts(text)


def _read_config(text: bytes, base: str, policy: str) -> tuple[int, int]:
    """Check the adapter's configuration, and return rank and alpha."""
    try:
        config: Any = parse_json(text)
    except ValueError as error:
        raise UserError(f"{ADAPTER_CONFIG} is not JSON: {error}.") from error
    factors = lora_factors(config, is_trained=True)
    rank, alpha = _whole(factors.rank, limits.RANK_MAX), _whole(factors.alpha, ALPHA_MAX)
    if not rank or not alpha:
        raise UserError(
            f"{ADAPTER_CONFIG} has r = {factors.rank}, lora_alpha = {factors.alpha:g}; whole numbers are taken, r up "
            f"to {limits.RANK_MAX} and lora_alpha up to {ALPHA_MAX}."
        )
    named = str(config.get("base_model_name_or_path"))
    if re.fullmatch(r"base-[0-9a-f]{16}", named) and named != policy:  # the form that services and runs write
        raise UserError(f"The adapter is of the base model {named}; {base} is {policy}.")
    return rank, alpha


def _whole(value: float, most: int) -> int:
    """Return the value if it is a whole number from 1 to `most`, else 0."""
    return int(value) if 1 <= value <= most and value % 1 == 0 else 0


def _check_shapes(adapter: Snapshot, model: Snapshot, rank: int, base: str) -> list[str]:
    """Return the targets: suffixes of the names of layers. All such layers of the base model must have factors."""
    ends = {name.removesuffix(DOWN).rpartition(".")[2] for name in adapter.tensors if name.endswith(DOWN)}
    expected: dict[str, Sequence[int]] = {}
    for name, tensor in model.tensors.items():
        layer = name.removesuffix(".weight")
        if layer != name and len(tensor.shape) == 2 and layer.rpartition(".")[2] in ends:
            expected[PREFIX + layer + DOWN] = (rank, tensor.shape[1])
            expected[PREFIX + layer + UP] = (tensor.shape[0], rank)
    adapter_shapes: Mapping[str, Sequence[int]] = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    for name in sorted(expected.keys() | adapter_shapes.keys()):
        ours, theirs = (shapes.get(name) for shapes in (expected, adapter_shapes))
        if ours is None or theirs is None or tuple(ours) != tuple(theirs):
            two = [str(list(shape)) if shape is not None else "no such tensor" for shape in (theirs, ours)]
            raise UserError(f"The adapter is not of {base}: {name[:200]} is {two[0]}; rank {rank} makes it {two[1]}.")
    if not expected:
        raise UserError(f"The adapter has no factors of a linear layer of {base}.")
    return sorted(ends)


def _floats(name: str, tensor: TensorSource) -> StoredTensor:
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    try:
        values = np.frombuffer(tensor.read(0, tensor.num_bytes), kinds[tensor.dtype]).reshape(tensor.shape)
    except (KeyError, ValueError) as error:
        raise UserError(f"{name[:200]} has {tensor.num_bytes} bytes of {tensor.dtype}: {error}.") from error
    if tensor.dtype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    if not np.isfinite(values).all():
        raise UserError(f"{name[:200]} has values that are not finite.")
    stored = TensorBytes("F32", tensor.shape, values.astype("<f4").tobytes())
    return StoredTensor(stored.dtype, stored.shape, stored.num_bytes, stored.read)
