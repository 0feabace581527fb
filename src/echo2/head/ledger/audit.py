"""`echo2 audit`: counts a run's groups from the ledger's raw tables, and judges them. It shares no code with `Ledger`,
so that it can find errors of `Ledger`.

Invariant: issued = trained + retired + open + lost. Each term is counted independently:

    issued    group numbers from 0 to the largest in any table (refusals excluded)
    trained   groups with a surviving training
    retired   groups in state retired, by reason
    open      groups in state open; groups in state delivered or ready whose rollouts are stored
    lost      group numbers without a row; groups in state trained without a surviving training; groups in state
              delivered or ready whose rollouts are gone
    doubled   groups trained at more than one step, or more than once in one lineage

After a fall-back, steps are trained again under a higher lineage. The training of step t in lineage L *survives* when
no higher lineage trained step t and no learner of a higher lineage joined at a version <= t.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echo2.config.rundir import RunDir
from echo2.core.types import RUN_POLICY
from echo2.head.ledger.schema import open_for_reading, unusable

_SURVIVING = """
    SELECT DISTINCT number, step FROM trainings AS t
    WHERE NOT EXISTS (SELECT 1 FROM best WHERE best.step = t.step AND best.lineage > t.lineage)
      AND NOT EXISTS (SELECT 1 FROM joins AS j WHERE j.lineage > t.lineage AND j.version <= t.step)
"""
#: Shadows each table by the rows of the policy that a run trains.
_MINE = "WITH " + ", ".join(
    f"{table} AS (SELECT * FROM main.{table} WHERE policy = :policy)"
    for table in ("groups", "rollouts", "leases", "refusals", "trainings", "joins")
)
_WITH = f""",
         best AS MATERIALIZED (SELECT step, max(lineage) AS lineage FROM trainings GROUP BY step),
         surviving AS MATERIALIZED ({_SURVIVING})
"""
_WAITING = "groups.state IN ('delivered', 'ready')"
_HAS_ROLLOUTS = "groups.number IN (SELECT number FROM rollouts)"


@dataclass(frozen=True, slots=True)
class Audit:
    """Outcome of every training group. `retired` and `refused` by reason, `leases` by outcome ("held" while held).

    `max_staleness`: the largest (step - version of the oldest token) over surviving trainings; 0 before the first.
    """

    issued: int
    trained: int
    retired: dict[str, int]
    open: int
    lost: int
    doubled: int
    max_staleness: int
    refused: dict[str, int]
    leases: dict[str, int]

    @property
    def is_balanced(self) -> bool:
        """Whether issued = trained + retired + open + lost."""
        return self.issued == self.trained + sum(self.retired.values()) + self.open + self.lost

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def audit(path: Path) -> Audit:
    """Audit the groups of the ledger at `path`, read-only. The ledger may be a copy, or in use by a head.

    Raises:
        UserError: there is no such file, or it is not a readable ledger.
    """
    connection = open_for_reading(path)
    try:
        # One read transaction, so that all counts are of the same instant.
        connection.execute("BEGIN")
        rows = _Rows(connection)
        issued = _count_issued(rows)
        return Audit(
            issued=issued,
            trained=rows.integer(f"{_WITH} SELECT count(DISTINCT number) FROM surviving JOIN groups USING (number)"),
            retired=rows.by("SELECT reason, count(*) FROM groups WHERE state = 'retired' GROUP BY reason"),
            open=rows.integer(
                f"SELECT count(*) FROM groups WHERE state = 'open' OR ({_WAITING} AND {_HAS_ROLLOUTS})",
            ),
            lost=_count_lost(rows, issued),
            doubled=rows.integer(
                "SELECT count(*) FROM (SELECT number FROM trainings GROUP BY number "
                "HAVING count(DISTINCT step) > 1 OR count(*) > count(DISTINCT lineage))",
            ),
            max_staleness=rows.integer(
                f"{_WITH} SELECT coalesce(max(surviving.step - oldest_version), 0) "
                "FROM surviving JOIN groups USING (number)",
            ),
            refused=rows.by("SELECT reason, count(*) FROM refusals GROUP BY reason"),
            leases=rows.by("SELECT coalesce(outcome, 'held'), count(*) FROM leases GROUP BY 1"),
        )
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise unusable(path, error) from error
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Queries over the run's rows. A query may begin with further common table expressions (`_WITH`)."""

    connection: sqlite3.Connection

    def integer(self, sql: str) -> int:
        return int(self._execute(sql).fetchone()[0])

    def by(self, sql: str) -> dict[str, int]:
        """Return the rows (name, count) as a dict; a row without a name counts as "unknown"."""
        return dict(sorted((str(name or "unknown"), int(count)) for name, count in self._execute(sql)))

    def meta(self, key: str) -> Any:
        """Return the run's `meta` value of this key, or None."""
        query = "SELECT value FROM meta WHERE key = ?"
        row = self.connection.execute(query, (f"{RUN_POLICY}.{key}",)).fetchone()
        return None if row is None else json.loads(row[0])

    def _execute(self, sql: str) -> sqlite3.Cursor:
        return self.connection.execute(f"{_MINE} {sql}", {"policy": RUN_POLICY})


def _count_issued(rows: _Rows) -> int:
    # Refusals are excluded: a stranger can send an invented group number.
    tables = ("groups", "rollouts", "leases", "trainings")
    next_numbers = [rows.integer(f"SELECT coalesce(max(number) + 1, 0) FROM {table}") for table in tables]
    return max(*next_numbers, int((rows.meta("counts") or {"issued": 0})["issued"]))


def _count_lost(rows: _Rows, issued: int) -> int:
    missing = issued - rows.integer("SELECT count(*) FROM groups WHERE number >= 0")
    untrained = rows.integer(
        f"{_WITH} SELECT count(*) FROM groups WHERE state = 'trained' AND number NOT IN (SELECT number FROM surviving)",
    )
    emptied = rows.integer(f"SELECT count(*) FROM groups WHERE {_WAITING} AND NOT {_HAS_ROLLOUTS}")
    return missing + untrained + emptied


def run(options: argparse.Namespace) -> int:
    """The command. Returns 0 if no group is lost, doubled or was trained above the staleness bound, else 1."""
    rundir = RunDir(options.directory)
    report = audit(rundir.ledger)
    bound = rundir.read_config().schedule.max_staleness if rundir.config.is_file() else None
    is_too_old = bound is not None and report.max_staleness > bound
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        for key, value in report.to_dict().items():
            counts = value.items() if isinstance(value, dict) else ()
            print(f"{key:>14}  {', '.join(f'{count} {why}' for why, count in counts) or value or 0}")
    if is_too_old:
        print(f"error: a group was trained {report.max_staleness} versions old; the bound is {bound}", file=sys.stderr)
    return 0 if report.lost == report.doubled == 0 and not is_too_old else 1
