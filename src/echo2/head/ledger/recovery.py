"""Reads from the ledger's tables what a restarted head must know, and what an error message says of a group."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echo2.head.decide.events import RecoveredGroup, RecoveredLease

_Execute = Callable[[str, Sequence[Any]], sqlite3.Cursor]
#: The columns of a `RecoveredGroup`, in order.
_COLUMNS = "number, step, state, oldest_version, worker_id, coalesce(reason, '') AS why, is_flat"


def groups(
    execute: _Execute, policy: str, version: int, top_ups: Mapping[str, Sequence[int]]
) -> tuple[RecoveredGroup, ...]:
    """Return the groups that a learner at `version` may need, or need again after a fall-back: trained ones until a
    checkpoint covers them, retired ones of steps that may still be trained. `top_ups`: by number, how many rollouts a
    group keeps while it is open, and how often it was opened again.
    """
    # Trained groups whose rollouts are kept: a learner may still fall back to before them.
    mine = "rollouts CROSS JOIN groups USING (policy, number) WHERE policy = ? AND state = 'trained'"
    uncovered = f"SELECT {{}} FROM {mine}"
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
    known: dict[str, Any] = {**dict(row), "is_flat": bool(row["is_flat"])}
    return RecoveredGroup(**known, num_kept=num_kept if known["state"] == "open" else 0, num_top_ups=num_top_ups)


def leases(execute: _Execute, policy: str) -> tuple[RecoveredLease, ...]:
    """Return the leases that are still held."""
    rows = execute(
        "SELECT lease_id, number, worker_id, granted_at, deadline, num_samples FROM leases "
        "WHERE policy = ? AND outcome IS NULL ORDER BY lease_id",
        (policy,),
    ).fetchall()
    return tuple(RecoveredLease(*row) for row in rows)


def next_lease_id(execute: _Execute, last_unrecorded: int) -> int:
    """Return an id that no lease has had. `last_unrecorded`: the last one of an evaluation."""
    granted = int(execute("SELECT coalesce(max(lease_id), 0) FROM leases", ()).fetchone()[0])
    return 1 + max(granted, last_unrecorded)


def lineage(execute: _Execute, policy: str) -> int:
    """Return the lineage of the newest learner; 0: there was none."""
    return int(execute("SELECT coalesce(max(lineage), 0) FROM joins WHERE policy = ?", (policy,)).fetchone()[0])


def version(execute: _Execute, policy: str, lineage: int) -> int:
    """Return the number of steps that are trained in this lineage."""
    mine = (policy, lineage)
    joined = execute("SELECT max(version) FROM joins WHERE policy = ? AND lineage = ?", mine).fetchone()[0]
    step = execute("SELECT max(step) FROM trainings WHERE policy = ? AND lineage = ?", mine).fetchone()[0]
    return max(joined or 0, 0 if step is None else step + 1)


def story(execute: _Execute, policy: str, number: int) -> str:
    """Return all rows about a group."""
    lines = [f"Story of group {number} of {policy}:"]
    for table in ("groups", "leases", "refusals", "trainings"):
        rows = execute(f"SELECT * FROM {table} WHERE policy = ? AND number = ?", (policy, number)).fetchall()
        lines += [f"  {table}: {dict(zip(row.keys(), row, strict=True))}" for row in rows]
    return "\n".join(lines)
