"""Removes sessions, models, checkpoints and answers that are no longer needed, and the directories of all these.

A model leaves the disk when its session is finished, or a day after the session fell silent; saved checkpoints stay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from echo2.core.background import spawn
from echo2_service.backend import DeleteCall
from echo2_service.front.database import (
    DONE,
    OPEN,
    TIDIED,
    UNREACHED,
    Database,
    Row,
    checkpoints,
    models,
    requests,
    sessions,
)
from echo2_service.front.dispatch import TRAINING, Dispatcher
from echo2_service.front.usage import TENANT_PREFIX, sampler_directories
from echo2_service.front.work import Work

log = logging.getLogger(__name__)

#: Seconds of silence until a session is ended; seconds for which the rest of it and answers are kept, and answers of a
#: tenant without room for them.
SILENCE_SECONDS = 1800.0
KEPT_SECONDS = 86400.0
ANSWER_SECONDS_MIN = 600.0
#: Subdirectory for tenants' own adapters during their import, and for long bodies while they are read.
ARRIVING = "arriving"
#: Rows that are looked at at a time.
ROWS = 1000
#: Rows that one statement deletes.
DELETED_AT_ONCE = 200
ANYBODY = Path()


class Cleaning:
    """Cleans up, one thing after the other. For one event loop."""

    def __init__(self, work: Work, dispatcher: Dispatcher, ticks: Callable[[], float]) -> None:
        """`ticks`: seconds that never step."""
        self._database, self._backend, self._storage = work.database, work.backend, work.storage
        self._dispatcher, self._ticks = dispatcher, ticks
        self._alive_at: dict[str, float] = {}  # when the clients of live sessions were last heard, in ticks
        self._unnamed_since: dict[Path, int] = {}  # the newest request at that time
        self._cleaning, self._deleting = asyncio.Lock(), set[str]()
        self._untidy = set[str]()  # tenants that have given up something since the last look

    async def sweep(self, now: float) -> None:
        """Clean up everything. A part that fails is logged, and the others are done."""
        async with self._cleaning:
            for part in (
                self._end_silent,
                self._tidy,
                self._delete_rows,
                self._delete_answers,
                self._remove_leftovers,
                self._measure,
            ):
                try:
                    await part(now)
                except UNREACHED as error:
                    log.warning("the database can't be reached, cleaning up later: %s", error)
                except Exception:
                    log.exception("cleaning up later what %s does", part.__name__)

    def note_alive(self, session: str) -> None:
        """The client of a session is there."""
        self._alive_at[session] = self._ticks()

    async def tidy(self, tenant: str, now: float) -> None:
        """Remove what a tenant has just given up, and measure what is left. Models go a little later. What several
        calls gave up while one was under way is removed at once.
        """
        self._untidy.add(tenant)
        async with self._cleaning:
            tenants, self._untidy = self._untidy, set()
            if not tenants:
                return
            await self._tidy(now)
            await self._remove_leftovers()
            for one in tenants:
                await self._storage.measure(one)

    async def _end_silent(self, now: float) -> None:
        self._dispatcher.expire()
        live = [row.id for row in self._database.select(sessions, columns=["id"], finished=None)]
        ticks = self._ticks()
        self._alive_at = {
            session: self._alive_at.get(session, ticks) for session in live
        }  # not while this process was away
        for session in [session for session, alive_at in self._alive_at.items() if alive_at <= ticks - SILENCE_SECONDS]:
            self._dispatcher.end_session(session, f"The session sent nothing for {SILENCE_SECONDS:g} seconds.")

    async def _tidy(self, now: float) -> None:
        """Delete the models of sessions that are done, once no request of theirs is open."""
        find = self._database.older
        done = find(sessions, "finished", math.inf, ROWS, columns=["id"], seen=DONE)
        ended = find(sessions, "finished", now - KEPT_SECONDS, ROWS, columns=["id", "seen"])
        for session in {row.id for row in done} | {row.id for row in ended if row.seen != TIDIED}:
            is_open = self._database.find(requests, columns=["id"], session=session, state=OPEN) is not None
            if not is_open and session not in self._deleting:
                self._deleting.add(session)
                spawn(self._delete_models(session), partial(self._not_deleted, session))

    async def _delete_models(self, session: str) -> None:
        for row in self._database.select(models, columns=["id"], session=session):
            await self._backend.call(DeleteCall(row.id))  # after the calls that it has, which may take a while
            self._dispatcher.forget(row.id)
        self._database.update(sessions, {"id": session}, seen=TIDIED)
        self._deleting.discard(session)

    def _not_deleted(self, session: str, error: Exception) -> None:
        log.warning("the models of the session %s are deleted later: %s", session, error)
        self._deleting.discard(session)

    async def _delete_rows(self, now: float) -> None:
        find = self._database.older
        done = find(sessions, "finished", now - KEPT_SECONDS, ROWS, columns=["id"], seen=TIDIED)
        for some in _parts(done):
            self._database.delete_sessions(some)
            await asyncio.sleep(0)  # others have their turn
        for some in _parts(find(checkpoints, "expires", now, ROWS, columns=["id"])):
            self._database.delete(checkpoints, id=some)
            await asyncio.sleep(0)
        self._database.delete_orphans()

    async def _delete_answers(self, now: float) -> None:
        ages: list[tuple[float, dict[str, Any]]] = [(KEPT_SECONDS, {})]
        ages += [(ANSWER_SECONDS_MIN, {"tenant": tenant}) for tenant in self._storage.answers_exceed()]
        are_gone = False
        for seconds, where in ages:
            while gone := self._database.older(requests, "ended", now - seconds, ROWS, columns=["id"], **where):
                self._database.delete(requests, id=tuple(row.id for row in gone))
                are_gone = True
                await asyncio.sleep(0)  # others have their turn
        if are_gone:
            self._storage.count_requests()

    async def _measure(self, now: float) -> None:
        await self._storage.measure_all()

    async def _remove_leftovers(self, _: float = 0.0) -> None:
        """Remove entries that no checkpoint, no sampler of a live session and no open request refers to.

        A request that was open before an entry became unreferenced may still read it, so the entry is kept until that
        request has ended: one of its tenant, or anybody's that loads a published checkpoint.
        """
        unnamed, since = await asyncio.to_thread(self._unnamed, self._database.beside()), self._unnamed_since
        newest = self._database.select(requests, "-arrival", 1, columns=["arrival"])
        latest = newest[0].arrival if newest else 0
        self._unnamed_since = {path: since.get(path, latest) for path in unnamed}
        may_read = self._oldest_readers() if unnamed else {}
        gone = [path for path, at in self._unnamed_since.items() if at < may_read.get(path.parent, may_read[ANYBODY])]
        await asyncio.to_thread(_remove, gone)

    def _entries(self) -> Iterator[Path]:
        """Yield the entries of tenants' directories; also those that an earlier version left beside these."""
        for path in self._storage.folder.iterdir():
            if path.name.startswith(TENANT_PREFIX):
                yield from path.iterdir()
            elif path.name != ARRIVING:
                yield path

    def _unnamed(self, database: Database) -> list[Path]:
        """Return the entries that are not in use, `NAME/` or `.NAME.partial`, or a file NAME of training data. Runs in
        a thread, while requests begin and end: it looks for names in the order in which they are handed on, from a
        request to a checkpoint to a sampler.
        """
        entries, arriving = list(self._entries()), set(self._storage.arriving)
        kinds = ("save_weights", "save_weights_for_sampler", *TRAINING)
        filed = {row.id for row in database.select(requests, columns=["id"], kind=kinds, state=OPEN)}
        saved = database.values(checkpoints.c.directory)
        named = arriving | filed | {Path(path).name for path in saved | sampler_directories(database)}
        return [path for path in entries if path.name.lstrip(".").split(".")[0] not in named]

    def _oldest_readers(self) -> dict[Path, float]:
        """Return the arrival of the oldest open request that may read a directory: by tenant's directory, where
        requests of that tenant are open; of those that an earlier version left; and `ANYBODY`, of all the others.
        """
        oldest = self._database.grouped(
            requests, ("tenant", "kind"), {"earliest": sql.func.min(requests.c.arrival)}, state=OPEN
        )
        by_directory = {ANYBODY: min((row.earliest for row in oldest if row.kind == "load_weights"), default=math.inf)}
        by_directory[self._storage.folder] = min((row.earliest for row in oldest), default=math.inf)
        for row in oldest:
            directory = self._storage.directory(row.tenant)
            by_directory[directory] = min(by_directory.get(directory, by_directory[ANYBODY]), row.earliest)
        return by_directory


def _parts(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the ids of rows, so many at a time that deleting them takes milliseconds."""
    for begin in range(0, len(rows), DELETED_AT_ONCE):
        yield tuple(row.id for row in rows[begin : begin + DELETED_AT_ONCE])


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
