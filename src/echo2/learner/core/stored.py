"""Checkpoints in a run's store: `checkpoints/step_N-<digest>/`, state.json being the last file. Only the newest that
the head knows of is kept."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from blake3 import blake3

from echo2.core.documents import parse_json
from echo2.core.errors import write_failed
from echo2.core.objects import Objects, pieces_of
from echo2.learner.core import checkpoint
from echo2.learner.core.checkpoint import STATE_FILE

log = logging.getLogger(__name__)

_FOLDER = "checkpoints"


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
    found: list[tuple[int, int, str, dict[str, Any]]] = []
    for key in objects.keys(_FOLDER):
        if key.endswith(f"/{STATE_FILE}") and (data := objects.get(key)) is not None:
            state = parse_json(data)
            client = state["client"]
            found.append((client["version"], client["lineage"], key.rpartition("/")[0], state))
    for number, _, folder, state in sorted(found, key=lambda one: one[:2], reverse=True):
        if number > version:
            continue
        directory = checkpoint.step_directory(root, number)
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
        if checkpoint.is_whole(partial):
            shutil.rmtree(directory, ignore_errors=True)
            partial.rename(directory)
            return number
        log.warning("the checkpoint %s in the store is damaged", folder)
    return None
