"""Deletes directories of checkpoints and published adapters that nothing refers to any more."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from echo2.service.database import Database, checkpoints, models, requests, samplers, sessions
from echo2.service.dispatch import OPEN

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
        live = tuple(row.id for row in find(sessions, finished=None))
        saves = find(requests, columns=["id"], kind=("save_weights", "save_weights_for_sampler"), state=OPEN)
        directories = [row.directory for row in find(checkpoints)]
        directories += [row.directory for row in find(samplers, session=live, model=None)]
        directories += [row.inflight for row in find(models, session=live)]
        return {Path(path).name for path in directories if path} | {ARRIVING} | {row.id for row in saves}
