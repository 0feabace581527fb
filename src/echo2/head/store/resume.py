"""Fills an empty directory with a run that a store keeps, so that it goes on there as after a restart.

The head that wrote it may still be alive: it is shut out only when a head starts in the new directory.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.core.objects import Objects, open_objects
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.logged import LedgerFile
from echo2.head.store.contents import restore_files, restore_snapshots
from echo2.head.store.log import LogReader
from echo2.head.store.mirror import write_claim
from echo2.learner.core import stored
from echo2.weights.store.store import ChunkStore

log = logging.getLogger(__name__)


def fetch_run(url: str, out: Path) -> RunDir:
    """Fill a directory with the run in the store at `url`.

    Raises:
        UserError: there is a run in the directory, or none in the store; or the disk is full.
        LinkError: the store cannot be reached.
    """
    rundir, objects = RunDir(out), open_objects(url)
    if rundir.config.exists():
        raise UserError(f"--resume-from fills an empty directory, and {out} holds a run. Choose another --out.")
    for folder in (out, rundir.identity, rundir.checkpoints, rundir.snapshots):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(LedgerFile(rundir.ledger)) as ledger:
        reader = LogReader(objects, ledger)
        reader.catch_up()
    if reader.last is None:
        rundir.ledger.unlink()
        raise UserError(f"There is no run in {url}. Give the run's head.store, without ?lag_seconds.")
    write_claim(rundir, reader.last)
    restore(rundir, objects)
    return rundir


def restore(rundir: RunDir, objects: Objects) -> None:
    """Write what the ledger of a directory names: a checkpoint that it can go on from, snapshots, and files.

    Raises: as `fetch_run`.
    """
    with closing(Ledger(rundir.ledger)) as ledger:
        version = ledger.recover().version
        saved = stored.fetch(objects, rundir.checkpoints, version)
        restore_snapshots(objects, ledger, ChunkStore(rundir.snapshots))
        restore_files(rundir, ledger)
    told = "no checkpoint" if saved is None else f"the checkpoint of step {saved}"
    log.warning("fetched a run of %d steps, with %s, into %s", version, told, rundir.path)
