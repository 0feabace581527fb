"""The ledger's tables, the life of a group as a table, and messages for
SQLite's errors.

Every row names the run's policy.

    groups     one row per training group: its step, cursor, state, and the versions and cost of its delivery
    rollouts   the rollouts as delivered, kept until a checkpoint covers them (separate, so that scans of `groups` stay
               small)
    scores     the rewards, kept as long as the rollouts (separate, because they are written later)
    leases     every lease ever granted; outcome NULL = still held
    refusals   every refused delivery, with its reason
    trainings  one row for each (group, step, lineage) trained. Not unique, so that the audit can find double trainings
    joins      every learner that joined: from `version` on, steps of earlier lineages are void
    meta       small JSON values by key

WAL with synchronous=NORMAL: a committed transaction survives ``kill -9``. A power failure may lose the last few
transactions, but never the file's consistency.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from echo2.core.errors import NoRoomError, UserError

SCHEMA_VERSION = 4
BUSY_SECONDS = 5.0  # how long a transaction waits for another process's lock before it fails

TRANSITIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "open": {"deliver": "delivered", "retire": "retired"},
        "delivered": {"score": "ready", "top_up": "open", "retire": "retired"},
        "ready": {"train": "trained", "retire": "retired"},
        "trained": {"fall_back": "ready"},
        "retired": {},
    }
)
"""state -> event -> next state. Any other transition is a bug of echo2."""

_TABLES = (
    """CREATE TABLE groups (policy TEXT NOT NULL, number INTEGER NOT NULL, step INTEGER NOT NULL,
       cursor INTEGER NOT NULL, state TEXT NOT NULL, issued_at REAL NOT NULL, worker_id TEXT NOT NULL DEFAULT '',
       oldest_version INTEGER, newest_version INTEGER, num_tokens INTEGER NOT NULL DEFAULT 0,
       seconds REAL NOT NULL DEFAULT 0, delivered_at REAL, scored_at REAL, retired_at REAL, reason TEXT,
       is_flat INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (policy, number)) WITHOUT ROWID""",
    "CREATE INDEX groups_by_state ON groups (policy, state, step)",
    """CREATE TABLE rollouts (policy TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
       PRIMARY KEY (policy, number))""",
    """CREATE TABLE scores (policy TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
       PRIMARY KEY (policy, number)) WITHOUT ROWID""",
    """CREATE TABLE leases (lease_id INTEGER PRIMARY KEY, policy TEXT NOT NULL, number INTEGER NOT NULL,
       worker_id TEXT NOT NULL, granted_at REAL NOT NULL, deadline REAL NOT NULL, num_samples INTEGER NOT NULL,
       outcome TEXT, closed_at REAL)""",
    "CREATE INDEX leases_by_outcome ON leases (policy, outcome)",
    """CREATE TABLE refusals (lease_id INTEGER, policy TEXT NOT NULL, number INTEGER, worker_id TEXT NOT NULL,
       reason TEXT NOT NULL, num_tokens INTEGER NOT NULL, seconds REAL NOT NULL, at REAL NOT NULL)""",
    """CREATE TABLE trainings (policy TEXT NOT NULL, number INTEGER NOT NULL, step INTEGER NOT NULL,
       lineage INTEGER NOT NULL, at REAL NOT NULL)""",
    "CREATE INDEX trainings_by_step ON trainings (policy, lineage, step)",
    "CREATE TABLE joins (policy TEXT NOT NULL, lineage INTEGER NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL)",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
)

MAX_INTEGER = (1 << 63) - 1  # SQLite's


def storable(number: int) -> int | None:
    """Return the number, or None if SQLite can't store it."""
    return number if 0 <= number <= MAX_INTEGER else None


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create a ledger.

    Raises:
        UserError: the file cannot be used, is not a ledger, or has another schema version.
    """
    try:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        check_schema(connection, path)
        connection.row_factory = sqlite3.Row
    except sqlite3.Error as error:
        connection.close()
        raise unusable(path, error) from error
    except UserError:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a ledger read-only. Another process may be writing it, or it may be a copy.

    Raises:
        UserError: the file does not exist, cannot be read, is not a ledger, or has another schema version.
    """
    if not path.is_file():
        raise UserError(f"There is no ledger {path}. Give the directory of a run that was started.")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        return _open_uri(uri, path)
    except sqlite3.OperationalError as error:
        # In a read-only directory SQLite cannot create its shared-memory index. A ledger that no process writes does
        # not need one; a WAL file beside it may hold transactions, so this fallback is not used then.
        has_log = path.with_name(path.name + "-wal").exists()
        if has_log:
            raise unusable(path, error) from error
    except sqlite3.Error as error:
        raise unusable(path, error) from error
    try:
        return _open_uri(f"{uri}&immutable=1", path)
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def _open_uri(uri: str, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        check_schema(connection, path)
    except (sqlite3.Error, UserError):
        connection.close()
        raise
    return connection


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Check that a database is a ledger of this schema version.

    Raises:
        UserError: it is not; the message names both versions.
    """
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != SCHEMA_VERSION:
        what = f"a ledger of schema version {found}" if found else "not a ledger of echo2"
        raise UserError(f"{path} is {what}; this echo2 reads version {SCHEMA_VERSION}. Use the echo2 that wrote it.")


def unusable(path: Path, error: Exception) -> UserError:
    """Return the error to show the user for a failed transaction: full disk, lock, permissions, damaged file."""
    is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return (NoRoomError if is_full else UserError)(
        f"Cannot use the ledger {path}: {error}. Nothing that was recorded is lost. "
        "Check for free space, permissions and a second process using this directory, then continue with --resume."
    )
