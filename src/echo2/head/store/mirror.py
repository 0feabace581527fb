"""Keeps a run's ledger in a store while it is written, and holds each message of the head back until the records on
which it depends are stored. (The state of the store itself: `log.py`; the rules: `decide/log.py`.)

The head goes on deciding while records are on their way. Only its messages wait, so that a slow store costs latency and
no throughput: what was recorded meanwhile goes with the next entry.

Transactions are numbered, and each is passed on as a record of the statements that changed the ledger. The number is in
the ledger itself and is written in the same transaction, so that a copy made at any moment says which records it has,
and no record is applied twice."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from echo2.config.rundir import RunDir, read_json, write_atomically
from echo2.core.background import spawn
from echo2.core.clock import Clock
from echo2.core.errors import InvariantError, LinkError, PeerError, UserError
from echo2.core.objects import Objects, open_objects, pieces_of
from echo2.core.retries import Retries
from echo2.core.types import Backoff
from echo2.head.ledger.ledger import Ledger
from echo2.head.ledger.schema import open_for_reading, open_for_writing
from echo2.head.store.decide.log import ALIVE_SECONDS, Claim, Entry, LogWriter, Mark, SignOfLife
from echo2.head.store.log import ALIVE_KEY, add_mark, copy_name, decode, encode, entry_key, sealed, send, take_log
from echo2.transport.base import AWAY

log = logging.getLogger(__name__)

_CHANGES = ("INSERT ", "UPDATE ", "DELETE ")
_NUMBER = "log"  # key in the table `meta`
_SET_NUMBER = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
#: Between two looks of an idle head whether another one has taken the run over.
PROBE_SECONDS = 5.0
#: Between two looks of messages that are held back whether the store is in trouble.
LOOK_SECONDS = 1.0
#: A store that has accepted nothing for this long is reported; the head accepts no results while messages wait for it.
TROUBLE_SECONDS = 5.0
#: Time for the last records of a run that ends.
CLOSING_SECONDS = 30.0
#: Lease ids that a takeover leaves out: more than a head grants within any lag.
LEASES_AHEAD = 1 << 20
RETRY_SECONDS = Backoff(0.1, 5.0)


class LoggedLedger(Ledger):
    """`on_record` is called with the number and the record of each transaction that has changed something, once it is
    committed."""

    def __init__(self, path: Path, on_record: Callable[[int, bytes], None]) -> None:
        super().__init__(path)
        self._on_record, self._changes = on_record, list[tuple[str, Sequence[Any]]]()
        self._number = number_of(self._connection)

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE":
            self._changes = []  # of a transaction that was rolled back
        elif sql.startswith(_CHANGES):
            self._changes.append((sql, parameters))
        elif sql == "COMMIT" and self._changes:
            changes, self._changes = self._changes, []
            super()._execute(_SET_NUMBER, (_NUMBER, str(self._number + 1)))
            done = super()._execute(sql)
            self._number += 1
            self._on_record(self._number, msgspec.msgpack.encode(changes))
            return done
        return super()._execute(sql, parameters)


class LedgerFile:
    """A ledger's file that follows the records of another. Its directory exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = open_for_writing(path)

    @property
    def number(self) -> int:
        return number_of(self._connection)

    def apply(self, number: int, record: bytes) -> None:
        """Apply a record.

        Raises:
            InvariantError: it is not a record of changes.
        """
        changes = msgspec.msgpack.decode(record, type=list[tuple[str, list[Any]]])
        for sql, _ in changes:
            if not sql.startswith(_CHANGES):
                raise InvariantError(f"record {number} of the log has the statement {sql[:80]!r}")
        self._connection.execute("BEGIN IMMEDIATE")
        for sql, parameters in changes:
            self._connection.execute(sql, parameters)
        self._connection.execute(_SET_NUMBER, (_NUMBER, str(number)))
        self._connection.execute("COMMIT")

    def load(self, pieces: Iterator[bytes]) -> None:
        """Put a copy in its place."""
        aside = self._path.with_name(f"{self._path.name}.copy")
        with aside.open("wb") as file:
            file.writelines(pieces)
        self.close()
        os.replace(aside, self._path)
        self._connection = open_for_writing(self._path)

    def close(self) -> None:
        """Close the file, whose log is merged into it."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        for name in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}{name}")


def copy_ledger(path: Path, to: Path) -> int:
    """Copy a ledger that another process or thread may be writing. Return the number of its last record."""
    to.unlink(missing_ok=True)
    with closing(open_for_reading(path)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # one file
        return number_of(target)


def number_of(connection: sqlite3.Connection) -> int:
    """Return the number of a ledger's last record; 0: it has none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_NUMBER,)).fetchone()
    return int(row[0]) if row is not None else 0


class Mirror:
    """The store of one head, which has taken its log. `objects`: the place. `has_caught_up`: the ledger was behind the
    store, after a power failure or because another head went on while its run was fetched."""

    def __init__(
        self, objects: Objects, url: str, lag_seconds: float, writer: LogWriter, ledger: Path, has_caught_up: bool
    ) -> None:
        self.objects, self.lag_seconds, self.has_caught_up = objects, lag_seconds, has_caught_up
        self._url, self._writer, self._ledger, self.epoch = url, writer, ledger, writer.epoch
        self._clock, self._began_at = Clock(), math.inf
        self._changed = asyncio.Event()  # what is stored, and who may write; replaced at each change
        self._send_request = asyncio.Event()  # there is something to send
        self._error = ""
        self._copying: asyncio.Task[None] | None = None
        self._copy_bytes = 0
        self._num_waits, self._waited_seconds = 0, 0.0
        self._over = ""  # why the run is over: no standby shall take over then
        self._sign, self._signed_at = SignOfLife(writer.head, writer.epoch, 0), -math.inf
        self._record: Callable[[], None] = lambda: None

    @staticmethod
    def open(rundir: RunDir, url: str, lag_seconds: float) -> Mirror:
        """Take the log of the run in this directory.

        Raises:
            UserError: another head has the run, or the store is of no known kind.
            LinkError: the store cannot be reached.
        """
        objects, ledger = open_objects(url), LedgerFile(rundir.ledger)
        try:
            number = ledger.number
            writer = take_log(objects, ledger, read_claim(rundir), partial(_copied, rundir.ledger))
            has_caught_up = ledger.number > number
        finally:
            ledger.close()
        log.info("this is head %d of the run in %s", writer.epoch, url)
        return Mirror(objects, url, lag_seconds, writer, rundir.ledger, has_caught_up)

    def open_ledger(self) -> LoggedLedger:
        """Open the ledger that is kept in the store."""
        ledger = LoggedLedger(self._ledger, self._add)
        if self.lag_seconds:  # the store may not know of the last leases, and no id is used twice
            ledger.use_lease_ids(ledger.recover().next_lease_id + LEASES_AHEAD)
        return ledger

    def record_first(self, record: Callable[[], None]) -> None:
        """Call `record` before a message leaves: it records what is not in the ledger yet."""
        self._record = record

    def _add(self, number: int, record: bytes) -> None:
        self._writer.add(number, record, self._clock.now())
        self._send_request.set()  # waiting messages are not told: no record lets them go

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def covered(self) -> None:
        """Wait until a message that follows from the ledger's state may leave the head. Raises as `check`."""
        await self.stored(self.lag_seconds)

    async def stored(self, lag_seconds: float = 0.0) -> None:
        """Wait until the store has the ledger's state, or is at most so far behind. Raises as `check`."""
        self._record()
        number, started = self._writer.added, self._clock.now()
        while not self._writer.may_leave(number, self._clock.now(), lag_seconds):
            self.check()
            await _came(self._changed, LOOK_SECONDS)
        self._num_waits += 1
        self._waited_seconds += self._clock.now() - started

    def check(self) -> None:
        """Raises PeerError if this head may not answer now: the store takes nothing, or another head has the run."""
        if self._writer.fenced is not None:
            raise PeerError(AWAY, "this head's run was taken over by another one")
        if self.trouble:
            raise PeerError(AWAY, self.trouble)

    @property
    def trouble(self) -> str:
        """Why messages wait, if they have waited for long; else empty. What a head records while it starts waits for
        the head, not for the store."""
        now = self._clock.now()
        seconds = min(self._writer.behind_seconds(now), now - self._began_at)
        if seconds < self.lag_seconds + TROUBLE_SECONDS:
            return ""
        state = f"{seconds:.0f} s behind, and nothing is acknowledged"
        return f"the store {self._url} is {state}: {self._error or 'it is slow'}"

    def metrics(self) -> dict[str, float]:
        """Return how far the store is behind, and the mean wait of a message since the last call."""
        num, seconds = self._num_waits, self._waited_seconds
        self._num_waits, self._waited_seconds = 0, 0.0
        behind = self._writer.behind_seconds(self._clock.now())
        return {"store/behind_seconds": behind, "store/wait_seconds": seconds / num if num else 0.0}

    def status(self) -> dict[str, Any]:
        return {
            "url": self._url,
            "head": self._writer.epoch,
            "lag_seconds": self.lag_seconds,
            "behind_seconds": self._writer.behind_seconds(self._clock.now()),
            "behind_records": self._writer.added - self._writer.stored,
            "error": self._error,
        }

    async def run(self, fail: Callable[[Exception], object]) -> None:
        """Send what is recorded. When another head takes the run over, call `fail` and end."""
        retries, self._began_at = Retries(RETRY_SECONDS), self._clock.now()
        while self._writer.fenced is None:
            try:
                await self._step(fail)
                if self._writer.fenced is None:
                    await self._show_alive()
            except LinkError as error:
                if not self._error:
                    log.warning("%s", error)
                self._error = str(error)
                await retries.pause()
                continue
            if self._error:
                log.info("the store can be used again")
            self._error = ""
            retries.succeeded()
        self._notify()
        by = self._writer.fenced
        fail(
            UserError(
                f"Another head has taken this run over (head {by.epoch}, of directory {by.head}), and this one stops. "
                f"What it has acknowledged is in {self._url}. Do not start it again."
            )
        )

    async def _show_alive(self) -> None:
        now = self._clock.now()
        if now >= self._signed_at + ALIVE_SECONDS or self._over != self._sign.over:
            sign = SignOfLife(self._writer.head, self.epoch, self._sign.number + 1, self._over)
            await asyncio.to_thread(self.objects.upload, ALIVE_KEY, [encode(sign)])
            self._sign, self._signed_at = sign, now
            self._notify()

    async def _step(self, fail: Callable[[Exception], object]) -> None:
        sending, position = self._writer.to_send(), self._writer.position
        if sending is None:
            self._send_request.clear()
            is_quiet = not await _came(self._send_request, PROBE_SECONDS)
            if is_quiet and (there := await asyncio.to_thread(self.objects.get, entry_key(position))) is not None:
                self._writer.answered(decode(there, Entry))
            return
        self._writer.answered(await asyncio.to_thread(send, self.objects, position, sending))
        self._notify()
        if self._writer.is_copy_due(self._copy_bytes) and (self._copying is None or self._copying.done()):
            self._writer.bytes_since_copy = 0
            self._copying = spawn(self._copy(), fail)

    async def _copy(self) -> None:
        """Copy the ledger, and delete the log before it. A failure is repeated when the next copy is due."""
        position, aside = self._writer.position - 1, self._ledger.with_name("ledger.copy")
        try:
            number = await asyncio.to_thread(copy_ledger, self._ledger, aside)
            name = copy_name(number, self._writer.head, self.epoch)
            await asyncio.to_thread(self.objects.upload, f"copies/{name}", sealed(pieces_of(aside)))
            self._copy_bytes = aside.stat().st_size
            while self._writer.stored < number and self._writer.fenced is None:
                await _came(self._changed, LOOK_SECONDS)
            if self._writer.fenced is None:
                await asyncio.to_thread(add_mark, self.objects, Mark(name, number, position, self._writer.beginnings))
        except (LinkError, UserError, OSError) as error:
            log.warning("the log in the store is not shortened now: %s", error)
        finally:
            aside.unlink(missing_ok=True)

    async def close(self, over: str) -> None:
        """Wait until the last records are stored; then, if the run is `over`, until a standby can know it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                while self._writer.to_send() is not None:
                    await self._changed.wait()
                self._over = over
                while self._sign.over != over and self._writer.fenced is None:
                    self._send_request.set()
                    await self._changed.wait()


async def _came(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event. Return False if it did not come for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


def _copied(ledger: Path) -> Iterator[bytes]:
    aside = ledger.with_name("ledger.copy")
    copy_ledger(ledger, aside)
    yield from pieces_of(aside)
    aside.unlink()


def read_claim(rundir: RunDir) -> Claim:
    """Return the claim of a run directory to its log; a new directory gets a name of its own."""
    plain = read_json(rundir.claim)
    return write_claim(rundir, None) if plain is None else msgspec.convert(plain, Claim)


def write_claim(rundir: RunDir, last: Entry | None) -> Claim:
    """Give the directory a name, to take over the log whose last entry is `last`."""
    claim = Claim(secrets.token_hex(6), None if last is None else (last.head, last.epoch))
    write_atomically(rundir.claim, msgspec.json.encode(claim).decode(), 0o600)
    return claim
