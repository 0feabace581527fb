"""Checkpoints on disk, `checkpoints/step_N/`: for resuming, and directly usable with `from_pretrained`.

    config.json, tokenizer files, model.safetensors     a Hugging Face model directory
    optimizer.safetensors                               AdamW's moments and step counts, by parameter name
    ... of several ranks, each its rows                 model.0-of-2.safetensors ..., see `shard_files.py`
    state.json                                          what the client of the verbs keeps (`client`), and the size and
                                                        BLAKE3 digest of every other file

A checkpoint is written beside its place, synced, and renamed into it: it is there whole or not at all. No pickle.
There is no random state to keep: the learner draws no random numbers.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from echo2.documents import parse_json, safetensors_pieces
from echo2.errors import UserError, write_failed
from echo2.types import StoredTensor

log = logging.getLogger(__name__)

FORMAT = 2
STATE_FILE = "state.json"
_STEP_NAME = re.compile(r"step_(\d+)")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def step_directory(root: Path, version: int) -> Path:
    """Where the checkpoint of a version lies."""
    return root / f"step_{version}"


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`; torn or damaged ones are passed over."""
    return next((path for path in _newest_first(root) if is_whole(path)), None)


def recover(root: Path) -> Path | None:
    """As `latest`, for whom training goes on from it: the newer ones, which are damaged, are renamed to
    `damaged_step_N`. `prune` counts files of the right size as whole, and would keep them in its place.

    Raises:
        UserError: one can't be renamed.
    """
    for path in _newest_first(root):
        if is_whole(path):
            return path
        aside = path.with_name(f"damaged_{path.name}")
        log.warning("the checkpoint %s is damaged; it is kept as %s", path, aside.name)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        except OSError as error:
            raise write_failed(error, f"Cannot rename the damaged checkpoint {path}: {error.strerror}") from error
    return None


def versions(root: Path) -> list[int]:
    """Of the checkpoints that seem whole (see `read_state`), the newest first."""
    return [_version_of(path) for path in _newest_first(root) if read_state(path) is not None]


def prune(root: Path, keep: int, spared: Collection[int] = ()) -> None:
    """Delete all checkpoints that are older than the newest `keep` whole ones, but those of the `spared` versions."""
    oldest = min(versions(root)[:keep], default=0)
    for path in _newest_first(root):
        if _version_of(path) < oldest and _version_of(path) not in spared:
            shutil.rmtree(path)


def read_state(directory: Path) -> dict[str, Any] | None:
    """state.json if it can be read and all files have the sizes it names; else None. Cheap: reads no weights."""
    try:
        state: dict[str, Any] = parse_json((directory / STATE_FILE).read_bytes())
        sizes_fit = all((directory / name).stat().st_size == entry["bytes"] for name, entry in state["files"].items())
        is_described = all("blake3" in entry for entry in state["files"].values())
        is_described = is_described and isinstance(state["client"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if sizes_fit and is_described and state.get("format") == FORMAT else None


def is_whole(directory: Path) -> bool:
    """Whether every file is there with the digest that state.json names."""
    state = read_state(directory)
    if state is None:
        return False
    return all(_digest(directory / name) == entry["blake3"] for name, entry in state["files"].items())


def read_client(directory: Path) -> dict[str, Any]:
    """What the client kept with the checkpoint in `directory`.

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
        NoRoomError: no room. UserError: the place cannot be written. What was there before is untouched.
    """
    begin_checkpoint(directory)
    commit_checkpoint(directory, client, write_part(directory, files, tensors))


def begin_checkpoint(directory: Path) -> None:
    """Make the place where the parts of a checkpoint are written; what an attempt before left there is gone.

    Raises: as `write_checkpoint`.
    """
    with _cleaned_up(directory) as partial:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def write_part(
    directory: Path, files: Mapping[str, bytes], tensors: Mapping[str, Mapping[str, StoredTensor]]
) -> dict[str, Any]:
    """Write some files of a checkpoint that was begun; the entries of state.json for them.

    Raises: as `write_checkpoint`.
    """
    with _cleaned_up(directory) as partial:
        index = {name: _write(partial / name, [data]) for name, data in files.items()}
        return index | {name: _write(partial / name, safetensors_pieces(content)) for name, content in tensors.items()}


def commit_checkpoint(directory: Path, client: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Make a checkpoint of which all files are written, those of `index`, one that is there.

    Raises: as `write_checkpoint`.
    """
    with _cleaned_up(directory) as partial:
        state = {"format": FORMAT, "client": dict(client), "files": dict(index)}
        _write(partial / STATE_FILE, [json.dumps(state, indent=2).encode()])
        _sync_directory(partial)
        _replace(partial, directory)


@contextmanager
def _cleaned_up(directory: Path) -> Iterator[Path]:
    """Where the checkpoint is written; what is there goes if that fails."""
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
    return blake3().update_mmap(path).hexdigest()


def _replace(partial: Path, directory: Path) -> None:
    """Rename into place. A directory cannot replace a full one, so an old one steps aside first."""
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
