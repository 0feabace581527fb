"""A Hugging Face model directory: its files, and its weights as a base model, read when they are needed.

A base model is the contents of the directory, byte for byte or rounded to bfloat16, so learner and workers give it the
same name wherever they got it. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from echo2.core.decide.model_config import text_part
from echo2.core.documents import parse_json
from echo2.core.errors import UserError
from echo2.core.types import Snapshot, SnapshotRef, StoredTensor, TensorSource
from echo2.weights.format.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from echo2.weights.format.segments import base_model_of

# The files that a snapshot carries besides the weights, so that a worker needs no hub.
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
#: Weights for MLX, whose programs take every file of this ending; transformers shall not take these for its own.
MLX_WEIGHTS = "model-mlx.safetensors"
#: Bytes of two tensors that are compared at a time.
COMPARED_BYTES = 64 << 20
#: Headers are small: a file that claims a larger one is not safetensors.
MAX_HEADER_BYTES = 100 << 20
#: numpy's limit. The product of many more sizes would have millions of digits.
DIMENSIONS_MAX = 64


def find_model(path: str, setting: str = "model.path") -> Path:
    """Return the model directory of a path or a hub id. A hub model comes from the local cache if it is complete there,
    else it is downloaded. `setting`: the setting that has the path, for messages.

    Raises:
        UserError: there is no such model.
    """
    if Path(path).exists():
        _refuse_for_home(Path(path), setting)
    if Path(path).is_dir():
        return Path(path)
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise UserError(
            f"{setting} = {path!r}: there is no such directory, and it is not a hub id (owner/name). "
            "Give a directory with config.json and model.safetensors, or a hub id."
        )
    if reason := hub_refusal(path):
        raise UserError(f"{setting} = {path!r}: there is no such directory, and {reason}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*MODEL_FILES, "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{setting} = {path!r}: no such directory, and the hub does not provide it ({type(error).__name__}; "
            "HF_HUB_OFFLINE or no network?). Check the name, or download the model and give its directory."
        ) from error


def hub_refusal(hub_id: str, is_loaded: bool = True) -> str:
    """Return why a hub id can't be loaded, with a remedy; empty if it can. `is_loaded`: on this machine; others need
    neither the hub nor its package."""
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        return ""
    try:
        if isinstance(try_to_load_from_cache(hub_id, "config.json"), str) or not is_loaded:
            return ""
        if constants.HF_HUB_OFFLINE:
            return (
                "the hub's cache does not hold it while HF_HUB_OFFLINE is set. Unset that to download the model, or "
                "name a model directory."
            )
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json"))
    except HFValidationError as error:
        return f"it is not a hub id: {error}"
    except HfHubHTTPError as error:
        code = f"{error.response.status_code} {error.server_message or ''}".strip()
        return f"the hub does not provide it ({code}). Check the name; a private or gated model needs `hf auth login`."
    except no_answer() as error:
        return f"the hub can't be reached ({error}). See to the network, or name a model directory."
    return ""


def no_answer() -> type[Exception]:
    """Return the error of the hub's package that is raised where the hub does not answer: httpx2's, and httpx's before
    version 2 of the package, which transformers 5.17 and older want."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


def _refuse_for_home(path: Path, setting: str) -> None:
    """Raise UserError for files that programs at home read (`echo2 export --gguf`, `--mlx`)."""
    names = [path.name] if path.is_file() else [entry.name for entry in path.iterdir()]
    if {WEIGHTS, INDEX} & set(names):
        return
    for end, program in ((".gguf", "llama.cpp"), (MLX_WEIGHTS, "MLX")):
        if any(name.endswith(end) for name in names):
            raise UserError(
                f"{setting} = {str(path)!r} is for {program}, rounded or in its own form: neither the learner nor a "
                "worker reads it, for each rounds the run's weights itself. Give the Hugging Face directory (`echo2 "
                "export` without --gguf and --mlx); which form a worker rounds to, --engine says."
            )


def model_files(directory: Path) -> dict[str, bytes]:
    """Return the files of `MODEL_FILES` that the directory has."""
    return {name: (directory / name).read_bytes() for name in MODEL_FILES if (directory / name).is_file()}


def read_base_model(directory: Path) -> Snapshot:
    """Return the base model in a directory. All bytes are read once, for the name. Tensors are read again on demand.

    A head that is tied to the embedding is left out even if the files have it: engines use the embedding.

    Raises:
        UserError: there is no config.json, the weights are not readable safetensors, or `refuse_untied`.
    """
    files = model_files(directory)
    try:
        config: dict[str, Any] = parse_json(files["config.json"])
        is_tied = bool(text_part(config).get("tie_word_embeddings"))
        tensors = stored_weights(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory} holds no model in safetensors that can be read: {error!r}.") from error
    embedding = next((name for name in sorted(tensors) if name.endswith("embed_tokens.weight")), "")
    if is_tied and embedding and (head := tensors.pop("lm_head.weight", None)) is not None:
        refuse_untied("lm_head.weight", head, embedding, tensors[embedding])
    return Snapshot(base_model_of(tensors, files["config.json"]), tensors, files)


def refuse_untied(name: str, one: TensorSource, source: str, other: TensorSource) -> None:
    """Refuse weights that config.json ties and the files store with different values: transformers would untie them,
    engines would use the embedding for both, and the numbers of one would be wrong.

    Raises:
        UserError: the values differ.
    """
    if not _are_equal(one, other):
        raise UserError(
            f"config.json ties {name} to {source}, and the model's files store both, {name} with other values. Which "
            'is right? If both are, as transformers takes it, write "tie_word_embeddings": false into config.json; if '
            f"the embedding is, save the model without {name}."
        )


def _are_equal(one: TensorSource, other: TensorSource) -> bool:
    if (one.dtype, one.shape, one.num_bytes) != (other.dtype, other.shape, other.num_bytes):
        return False
    pieces = ((first, min(first + COMPARED_BYTES, one.num_bytes)) for first in range(0, one.num_bytes, COMPARED_BYTES))
    return all(one.read(*piece) == other.read(*piece) for piece in pieces)


def rounded(
    base: Snapshot, float32_names: Collection[str] = (), replaced: Mapping[str, TensorSource] = MappingProxyType({})
) -> Snapshot:
    """Return a base model with its weights of 32 bits, except `float32_names`, rounded to bfloat16, and with other
    tensors in place of those `replaced`, which gives it another name."""
    tensors = {name: tensor if name in float32_names else _in_bfloat16(tensor) for name, tensor in base.tensors.items()}
    tensors |= {name: replaced[name] for name in tensors if name in replaced}
    return Snapshot(base_model_of(tensors, base.files["config.json"]), tensors, base.files)


def _in_bfloat16(tensor: TensorSource) -> TensorSource:
    if tensor.dtype != "F32":
        return tensor

    def read(start: int, stop: int) -> memoryview:
        """Round to the nearest value, to the even one of two equally near, as torch does."""
        bits = np.frombuffer(tensor.read(2 * start, 2 * stop), "<u4")
        high = ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype("<u2")
        high[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0  # not a number: rounding up could make it another
        return memoryview(high.view(np.uint8))

    return StoredTensor("BF16", tensor.shape, tensor.num_bytes // 2, read)


def stored_weights(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model directory by name. They are read on demand.

    Raises: OSError, ValueError, KeyError, TypeError, AttributeError: they are not readable safetensors.
    """
    return {key: each for name in _weight_files(directory) for key, each in _stored_tensors(directory / name).items()}


def read_adapter(directory: Path, ref: SnapshotRef, base_model: SnapshotRef) -> Snapshot:
    """Return the PEFT adapter in a directory as the snapshot `ref`. Its tensors are read on demand.

    Raises:
        UserError: there is no readable adapter.
    """
    try:
        files = {ADAPTER_CONFIG: (directory / ADAPTER_CONFIG).read_bytes()}
        return Snapshot(ref, _stored_tensors(directory / ADAPTER_WEIGHTS), files, base_model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{directory} holds no PEFT adapter that can be read: {error!r}.") from error


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file; no weights are read.

    Raises:
        UserError: the file is not readable safetensors.
    """
    try:
        with file.open("rb") as opened:
            header, _ = _header(opened.read(8), opened.read)
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}.") from error


def linear_layers(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the linear layers in a local model's files by name, without its head and without experts,
    which are one tensor for all in the module.

    Raises:
        UserError: a file is not readable safetensors.
    """
    shapes = {name: shape for file in directory.glob("*.safetensors") for name, shape in tensor_shapes(file).items()}
    ends = ("embed_tokens.weight", "lm_head.weight")
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if len(shape) == 2 and ".experts." not in name and not name.endswith(ends)
    }


def _weight_files(directory: Path) -> list[str]:
    """Return the weight files that transformers would choose: the single file, else those of the index."""
    if (directory / WEIGHTS).is_file():
        return [WEIGHTS]
    index: dict[str, Any] = parse_json((directory / INDEX).read_bytes())
    names = sorted(set(index["weight_map"].values()))
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{INDEX} names files elsewhere")
    return names


def _header(length: bytes, read: Any) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors header by tensor name, and the offset of the data."""
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {size} bytes")
    header: dict[str, Any] = parse_json(read(size))
    header.pop("__metadata__", None)
    return header, len(length) + size


def _stored_tensors(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as opened:
        header, start = _header(opened.read(8), opened.read)
    num_bytes, tensors = file.stat().st_size - start, {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= num_bytes or min(entry["shape"], default=0) < 0:
            raise ValueError(f"{file.name}: {name!r} lies outside of the file")
        if len(entry["shape"]) > DIMENSIONS_MAX:
            raise ValueError(f"{file.name}: {name!r} has {len(entry['shape'])} sizes")
        if not math.prod(entry["shape"]) and end > first:
            raise ValueError(f"{file.name}: {name!r} has bytes and no items")
        read = partial(_read, file, start + first)
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), end - first, read)
    return tensors


def _read(file: Path, offset: int, start: int, stop: int) -> memoryview:
    """Read bytes without mapping the file: mapped pages count as the process's memory while any memory is free."""
    data = np.fromfile(file, np.uint8, stop - start, offset=offset + start)
    if data.size != stop - start:
        raise UserError(f"{file} became shorter while it was read, probably because it is being replaced. Start again.")
    return data.data
