"""A Hugging Face model directory as it lies: its files, and its weights as a base model, mapped and not read.

A base model is what the directory holds, byte for byte, so learner and workers give it the same name wherever each has
it from. No torch here.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

from echo2.documents import parse_json
from echo2.errors import UserError
from echo2.types import Snapshot, TensorBytes
from echo2.weights.segments import base_model_of

# What a snapshot carries beside the weights, so that a worker needs no hub.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: A header is small; what claims more is no safetensors file.
MAX_HEADER_BYTES = 100 << 20


def find_model(path: str, setting: str = "model.path") -> Path:
    """A model directory, or that of a hub id: from the local cache where it is complete, else downloaded. `setting`:
    where the user wrote it.

    Raises:
        UserError: there is none.
    """
    if Path(path).is_dir():
        return Path(path)
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise UserError(
            f"{setting} = {path!r}: there is no such directory, and it is not a hub id (owner/name). "
            "Give a directory with config.json and model.safetensors, or a hub id."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*MODEL_FILES, "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{setting} = {path!r}: no such directory, and the hub does not give it ({type(error).__name__}; "
            "HF_HUB_OFFLINE or no network?). Check the name, or download the model and give its directory."
        ) from error


def model_files(directory: Path) -> dict[str, bytes]:
    """Those of `MODEL_FILES` that are there."""
    return {name: (directory / name).read_bytes() for name in MODEL_FILES if (directory / name).is_file()}


def map_base_model(directory: Path) -> Snapshot:
    """The base model in a directory. Its bytes are read once, for the name; the tensors are views of mapped files.

    A head that is tied to the embedding is left out where the files hold both: engines make it of the embedding.

    Raises:
        UserError: there is no config.json, or the weights are no safetensors that can be read.
    """
    files, tensors = model_files(directory), dict[str, TensorBytes]()
    try:
        config: dict[str, Any] = parse_json(files["config.json"])
        is_tied = bool(config.get("tie_word_embeddings"))
        for name in _weight_files(directory):
            tensors |= _map_tensors(directory / name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory} holds no model in safetensors that can be read: {error!r}.") from error
    if is_tied and any(name.endswith("embed_tokens.weight") for name in tensors):
        tensors.pop("lm_head.weight", None)
    return Snapshot(base_model_of(tensors, files["config.json"]), tensors, files)


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file; no weights are read.

    Raises:
        UserError: it is none that can be read.
    """
    try:
        with file.open("rb") as opened:
            header, _ = _header(opened.read(8), opened.read)
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no readable safetensors file: {error}.") from error


def _weight_files(directory: Path) -> list[str]:
    """As transformers chooses: one file, else those of the index."""
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    index: dict[str, Any] = parse_json((directory / INDEX).read_bytes())
    names = sorted(set(index["weight_map"].values()))
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{INDEX} names files elsewhere")
    return names


def _header(length: bytes, read: Any) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors header by tensor name, and where the data begins."""
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {size} bytes")
    header: dict[str, Any] = parse_json(read(size))
    header.pop("__metadata__", None)
    return header, len(length) + size


def _map_tensors(file: Path) -> dict[str, TensorBytes]:
    with file.open("rb") as opened:
        header, start = _header(opened.read(8), opened.read)
        data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= len(data) - start or min(entry["shape"], default=0) < 0:
            raise ValueError(f"{file.name}: {name!r} lies outside of the file")
        tensors[name] = TensorBytes(entry["dtype"], tuple(entry["shape"]), data[start + first : start + end])
        if not math.prod(entry["shape"]) and end > first:
            raise ValueError(f"{file.name}: {name!r} has bytes and no items")
    return tensors
