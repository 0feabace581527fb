"""The ledger's tables, the life of a group as a table, messages for SQLite's errors; and what a restarted head must
know of the tables. Every row names the run's policy.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echo2.core.errors import NoRoomError, UserError
from echo2.head.decide.events import RecoveredGroup, RecoveredLease

SCHEMA_VERSION = 4
BUSY_SECONDS = 5.0  # how long a transaction waits for another process's lock before it fails

TRANSITIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "open": {"deliver": "delivered", "top_up": "open", "retire": "retired"},
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
_Execute = Callable[[str, Sequence[Any]], sqlite3.Cursor]
#: The columns of a `RecoveredGroup`, in order.
_COLUMNS = "number, step, state, oldest_version, worker_id, coalesce(reason, '') AS why, is_flat"


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
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        what = f"a ledger of schema version {version}" if version else "not a ledger of echo2"
        raise UserError(f"{path} is {what}; this echo2 reads version {SCHEMA_VERSION}. Use the echo2 that wrote it.")


def unusable(path: Path, error: Exception) -> UserError:
    """Return the error to show the user for a failed transaction: full disk, lock, permissions, damaged file."""
    is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return (NoRoomError if is_full else UserError)(
        f"Cannot use the ledger {path}: {error}. Nothing that was recorded is lost. "
        "Check for free space, permissions and a second process using this directory, then continue with --resume."
    )


def read_groups(
    execute: _Execute, policy: str, version: int, top_ups: Mapping[str, Sequence[int]]
) -> tuple[RecoveredGroup, ...]:
    """Return the groups that a learner at `version` may need, or need again after a fall-back: trained ones until a
    checkpoint covers them, retired ones of steps that may still be trained. `top_ups`: by number, how many rollouts a
    group keeps while it is open, and how often it was opened again.
    """
    # Trained groups whose rollouts are kept: a learner may still fall back to before them.
    trained_with_rollouts = "rollouts CROSS JOIN groups USING (policy, number) WHERE policy = ? AND state = 'trained'"
    uncovered = f"SELECT {{}} FROM {trained_with_rollouts}"
    oldest = execute(uncovered.format("min(step)"), (policy,)).fetchone()[0]
    rows = execute(
        f"SELECT {_COLUMNS} FROM groups WHERE policy = ? AND state IN ('open', 'delivered', 'ready') "
        f"UNION ALL {uncovered.format(_COLUMNS)} "
        f"UNION ALL SELECT {_COLUMNS} FROM groups WHERE policy = ? AND state = 'retired' AND step >= ? "
        "ORDER BY number",
        (policy, policy, policy, version if oldest is None else min(version, oldest)),
    ).fetchall()
    return tuple(_group(row, *top_ups.get(str(row["number"]), (0, 0))) for row in rows)


def _group(row: sqlite3.Row, num_kept: int, num_top_ups: int) -> RecoveredGroup:
    columns: dict[str, Any] = {**dict(row), "is_flat": bool(row["is_flat"])}
    return RecoveredGroup(**columns, num_kept=num_kept if columns["state"] == "open" else 0, num_top_ups=num_top_ups)


def read_leases(execute: _Execute, policy: str) -> tuple[RecoveredLease, ...]:
    """Return the leases that are still held."""
    rows = execute(
        "SELECT lease_id, number, worker_id, granted_at, deadline, num_samples FROM leases "
        "WHERE policy = ? AND outcome IS NULL ORDER BY lease_id",
        (policy,),
    ).fetchall()
    return tuple(RecoveredLease(*row) for row in rows)


def read_next_lease_id(execute: _Execute, last_unrecorded: int) -> int:
    """Return an id that no lease has had. `last_unrecorded`: the last one of an evaluation."""
    granted = int(execute("SELECT coalesce(max(lease_id), 0) FROM leases", ()).fetchone()[0])
    return 1 + max(granted, last_unrecorded)


def read_lineage(execute: _Execute, policy: str) -> int:
    """Return the lineage of the newest learner; 0: there was none."""
    return int(execute("SELECT coalesce(max(lineage), 0) FROM joins WHERE policy = ?", (policy,)).fetchone()[0])


def read_version(execute: _Execute, policy: str, lineage: int) -> int:
    """Return the number of steps that are trained in this lineage."""
    parameters = (policy, lineage)
    joined = execute("SELECT max(version) FROM joins WHERE policy = ? AND lineage = ?", parameters).fetchone()[0]
    step = execute("SELECT max(step) FROM trainings WHERE policy = ? AND lineage = ?", parameters).fetchone()[0]
    return max(joined or 0, 0 if step is None else step + 1)


def story(execute: _Execute, policy: str, number: int) -> str:
    """Return all rows about a group."""
    lines = [f"Story of group {number} of {policy}:"]
    for table in ("groups", "leases", "refusals", "trainings"):
        rows = execute(f"SELECT * FROM {table} WHERE policy = ? AND number = ?", (policy, number)).fetchall()
        lines += [f"  {table}: {dict(zip(row.keys(), row, strict=True))}" for row in rows]
    return "\n".join(lines)
