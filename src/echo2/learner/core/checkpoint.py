"""Checkpoints on disk, `checkpoints/step_N/`: for resuming, and directly usable with `from_pretrained`.

    config.json, tokenizer files, model.safetensors     a Hugging Face model directory
    optimizer.safetensors                               AdamW's moments and step counts, by parameter name
    ... of several ranks, each its parts                model.0-of-2.safetensors ..., see `state.py`
    state.json                                          the data of the verbs' client (`client`), and the size and
                                                        BLAKE3 digest of every other file

A checkpoint is written to a temporary directory, synced, and renamed: it exists whole or not at all. No pickle.
There is no random state to keep: the learner draws no random numbers. `trainer.py: save_state` names the files, and
`load_state` reads them; a file here and in the store is any that state.json lists.

`upload` and `fetch` take checkpoints to a run's store and back. Only the newest that the head knows of is kept there.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from echo2.core.documents import PIECE_BYTES, parse_json, safetensors_pieces
from echo2.core.errors import UserError, write_failed
from echo2.core.objects import Objects, pieces_of
from echo2.core.types import StoredTensor

log = logging.getLogger(__name__)

FORMAT = 2
STATE_FILE = "state.json"
#: In the metadata of a file of one rank's parts: name of a tensor -> where the part starts, in each dimension, as JSON.
STARTS = "starts"
#: Of checkpoints in a run's store: `checkpoints/step_N-<digest>/`, state.json being the last file.
_FOLDER = "checkpoints"
_STEP_NAME = re.compile(r"step_(\d+)")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def step_directory(root: Path, version: int) -> Path:
    """Return the directory of a version's checkpoint."""
    return root / f"step_{version}"


def latest(root: Path) -> Path | None:
    """Return the newest whole checkpoint under `root`; torn or damaged ones are skipped. Raises: as `is_whole`."""
    return next((path for path in _newest_first(root) if is_whole(path)), None)


def recover(root: Path) -> Path | None:
    """Return the newest whole checkpoint to resume from; the newer ones, which are damaged, are renamed to
    `damaged_step_N`. Otherwise `prune`, which only compares file sizes, would keep them in its place.

    Raises:
        UserError: a damaged checkpoint can't be renamed, or one can't be read, which may pass.
    """
    for path in _newest_first(root):
        try:
            if is_whole(path):
                return path
        except OSError as error:
            raise UserError(
                f"The checkpoint {path} cannot be read now: {error.strerror}. Try again; if it stays so, move this "
                "directory away, and --resume continues from the one before."
            ) from error
        aside = path.with_name(f"damaged_{path.name}")
        log.warning("the checkpoint %s is damaged; it is kept as %s", path, aside.name)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        except OSError as error:
            raise write_failed(error, f"Cannot rename the damaged checkpoint {path}: {error.strerror}") from error
    return None


def versions(root: Path) -> list[int]:
    """Return the versions of the checkpoints that seem whole (see `read_state`), newest first."""
    return [_version_of(path) for path in _newest_first(root) if read_state(path) is not None]


def prune(root: Path, keep: int, spared: Collection[int] = ()) -> None:
    """Delete all checkpoints older than the newest `keep` whole ones, except those of the `spared` versions."""
    oldest = min(versions(root)[:keep], default=0)
    for path in _newest_first(root):
        if _version_of(path) < oldest and _version_of(path) not in spared:
            shutil.rmtree(path)


def read_state(directory: Path) -> dict[str, Any] | None:
    """Return state.json if it is valid and all files have the sizes it names; else None. Cheap: reads no weights."""
    try:
        return _parsed_state(directory)
    except OSError:
        return None


def _parsed_state(directory: Path) -> dict[str, Any] | None:
    """As `read_state`. Raises OSError: a file is there and can't be read."""
    try:
        state: dict[str, Any] = parse_json((directory / STATE_FILE).read_bytes())
        sizes_fit = all((directory / name).stat().st_size == entry["bytes"] for name, entry in state["files"].items())
        is_described = all("blake3" in entry for entry in state["files"].values())
        is_described = is_described and isinstance(state["client"], dict)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if sizes_fit and is_described and state.get("format") == FORMAT else None


def is_whole(directory: Path) -> bool:
    """Whether every file exists with the digest that state.json names.

    Raises:
        OSError: a file is there and can't be read; this says nothing about what it holds.
    """
    state = _parsed_state(directory)
    if state is None:
        return False
    return all(_digest(directory / name) == entry["blake3"] for name, entry in state["files"].items())


def read_client(directory: Path) -> dict[str, Any]:
    """Return the client's data in the checkpoint in `directory`.

    Raises:
        UserError: there is no whole checkpoint.
    """
    state = read_state(directory)
    if state is None or not is_whole(directory):
        raise UserError(f"{directory} has no complete checkpoint. Name a checkpoints/step_N directory of a run.")
    client: dict[str, Any] = state["client"]
    return client


def write_checkpoint(
    directory: Path,
    client: Mapping[str, Any],
    files: Mapping[str, bytes],
    tensors: Mapping[str, Mapping[str, StoredTensor]],
) -> None:
    """Write a checkpoint to `directory` in one atomic step, replacing one that is already there.

    `tensors`: safetensors file name -> the tensors in it.

    Raises:
        NoRoomError: no room. UserError: the directory cannot be written. An earlier checkpoint there is untouched.
    """
    begin_checkpoint(directory)
    commit_checkpoint(directory, client, write_part(directory, files, tensors))


def begin_checkpoint(directory: Path) -> None:
    """Make the temporary directory for the parts of a checkpoint; remains of an earlier attempt are deleted.

    Raises: as `write_checkpoint`.
    """
    with _cleaned_up(directory) as partial:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def write_part(
    directory: Path,
    files: Mapping[str, bytes],
    tensors: Mapping[str, Mapping[str, StoredTensor]],
    starts: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Write some files of a checkpoint that was begun. Return their entries for state.json. `starts`: of the tensors
    that are parts, where they start in the whole.

    Raises: as `write_checkpoint`.
    """
    with _cleaned_up(directory) as partial:
        index = {name: _write(partial / name, [data]) for name, data in files.items()}
        for name, content in tensors.items():
            metadata = {STARTS: json.dumps({key: starts[key] for key in content if key in starts})} if starts else {}
            index[name] = _write(partial / name, safetensors_pieces(content, metadata))
        return index


def commit_checkpoint(directory: Path, client: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Commit a checkpoint whose files, those of `index`, are all written.

    Raises: as `write_checkpoint`.
    """
    with _cleaned_up(directory) as partial:
        state = {"format": FORMAT, "client": dict(client), "files": dict(index)}
        _write(partial / STATE_FILE, [json.dumps(state, indent=2).encode()])
        _sync_directory(partial)
        _replace(partial, directory)


@contextmanager
def _cleaned_up(directory: Path) -> Iterator[Path]:
    """Yield the temporary directory of a checkpoint; delete it if writing fails."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        yield partial
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        what = "is out of room" if error.errno in _NO_ROOM else f"cannot be written ({error.strerror})"
        message = (
            f"The checkpoint {directory} was not saved: the disk {what}. Earlier checkpoints are untouched; free "
            "some space (or lower learner.keep_checkpoints) and resume."
        )
        raise write_failed(error, message) from error


def _newest_first(root: Path) -> list[Path]:
    paths = [path for path in root.iterdir() if _STEP_NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(paths, key=_version_of, reverse=True)


def _version_of(path: Path) -> int:
    match = _STEP_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    hasher, size = blake3(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            hasher.update(piece)
            size += memoryview(piece).nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "blake3": hasher.hexdigest()}


def _digest(path: Path) -> str:
    hasher = blake3()
    with path.open("rb") as file:  # mapped, the file would count as the learner's memory
        while piece := file.read(PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _replace(partial: Path, directory: Path) -> None:
    """Rename into place. A directory cannot replace a non-empty one, so an old checkpoint is moved aside first."""
    aside = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if directory.exists():
        directory.rename(aside)
    partial.rename(directory)
    _sync_directory(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def upload(objects: Objects, directory: Path) -> str:
    """Upload a checkpoint, unless it is there. Return its folder in the store.

    Raises:
        LinkError: the store cannot be reached.
    """
    state = (directory / STATE_FILE).read_bytes()
    folder = f"{_FOLDER}/{directory.name}-{blake3(state).hexdigest()[:12]}"
    if objects.get(f"{folder}/{STATE_FILE}") is None:
        for name in parse_json(state)["files"]:
            objects.upload(f"{folder}/{name}", pieces_of(directory / name))
        objects.create(f"{folder}/{STATE_FILE}", state)
    return folder


def keep_only(objects: Objects, folder: str) -> None:
    """Delete all checkpoints but one: the head will ask for no other. Raises LinkError."""
    objects.delete([key for key in objects.keys(_FOLDER) if not key.startswith(f"{folder}/")])


def fetch(objects: Objects, root: Path, version: int) -> int | None:
    """Fetch the newest checkpoint of at most `version` into its step_N directory. Return its version; None: there is
    none.

    Raises:
        LinkError: the store cannot be reached.
        UserError: the disk is full.
    """
    checkpoints: list[tuple[int, int, str, dict[str, Any]]] = []
    for key in objects.keys(_FOLDER):
        if key.endswith(f"/{STATE_FILE}") and (data := objects.get(key)) is not None:
            try:
                state = parse_json(data)
                client = state["client"]
                checkpoints.append((client["version"], client["lineage"], key.rpartition("/")[0], state))
            except (ValueError, KeyError, TypeError):
                log.warning("%s in the store is not a checkpoint's", key)
    for number, _, folder, state in sorted(checkpoints, key=lambda one: one[:2], reverse=True):
        if number > version:
            continue
        directory = step_directory(root, number)
        partial = directory.with_name(f".{directory.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name in (*state["files"], STATE_FILE):
                with (partial / Path(name).name).open("wb") as file:
                    file.writelines(objects.download(f"{folder}/{name}"))
        except FileNotFoundError as error:
            log.warning("the checkpoint %s in the store is not whole: %s", folder, error)
            continue
        except OSError as error:
            raise write_failed(error, f"Cannot write the checkpoint {directory}: {error.strerror}.") from error
        if is_whole(partial):
            shutil.rmtree(directory, ignore_errors=True)
            partial.rename(directory)
            return number
        log.warning("the checkpoint %s in the store is damaged", folder)
    return None
