"""The directories of published adapters; deletes those, and checkpoints, that nothing refers to any more."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from echo2.service.database import OPEN, Database, checkpoints, models, requests, samplers, sessions

#: Maximum number removed at once, so that the front is not blocked.
REMOVED_MAX = 64
#: Subdirectory for tenants' own adapters during their import.
ARRIVING = "arriving"


class Leftovers:
    """The entries of `folder`, identified by the first part of their names: `NAME/`, `NAME.tar`, `.NAME.partial`."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database, self._folder = database, folder
        self._unnamed_since: dict[Path, float] = {}

    def remove(self, now: float) -> None:
        """Remove entries that no checkpoint, no sampler of a live session and no open request refers to.

        A request that was open before an entry became unreferenced may still read it, so the entry is kept until that
        request has ended.
        """
        named = self._named()
        unnamed = [path for path in self._folder.iterdir() if path.name.lstrip(".").split(".")[0] not in named]
        self._unnamed_since = {path: self._unnamed_since.get(path, now) for path in unnamed}
        oldest = self._database.select(requests, "created", 1, columns=["created"], state=OPEN) if unnamed else []
        before = oldest[0].created if oldest else math.inf
        for path in [path for path, since in self._unnamed_since.items() if since < before][:REMOVED_MAX]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _named(self) -> set[str]:
        find = self._database.select
        saves = find(requests, columns=["id"], kind=("save_weights", "save_weights_for_sampler"), state=OPEN)
        directories = {row.directory for row in find(checkpoints)} | sampler_directories(self._database)
        return {Path(path).name for path in directories} | {ARRIVING} | {row.id for row in saves}


def sampler_directories(database: Database, **where: Any) -> set[str]:
    """Return the directories that samplers of live sessions read; `where`: of these samplers and models alone."""
    live = tuple(row.id for row in database.select(sessions, finished=None))
    read = [row.directory for row in database.select(samplers, session=live, model=None, **where)]
    read += [row.inflight for row in database.select(models, session=live, **where)]
    return {path for path in read if path}
