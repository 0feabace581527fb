"""What the operator sees of the service: tenants with their open requests and dollars, machines, and faults.

`echo2 serve status` prints the tenants and machines; `GET /api/v1/owner` tells all of it to a key of the scope `owner`,
and the owner's page shows that.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import sqlalchemy as sql

from echo2.core.printable import printable
from echo2_service.front.database import OPEN, Database, bills, models, requests, sessions

#: Newest warnings and errors that are kept, and characters of each.
FAULTS_KEPT, FAULT_CHARS = 50, 500


def tenants(database: Database, now: float) -> dict[str, dict[str, Any]]:
    """Return by tenant: live sessions, their models, open requests by kind, oldest wait in seconds, tokens, dollars."""
    found: dict[str, dict[str, Any]] = {}
    count = sql.func.count()

    def of(tenant: str) -> dict[str, Any]:
        empty = {"sessions": 0, "models": 0, "open": {}, "oldest_wait_seconds": 0.0, "tokens": 0, "usd": 0.0}
        return found.setdefault(tenant, empty)

    for row in database.grouped(sessions, ["tenant"], {"num": count}, finished=None):
        of(row.tenant)["sessions"] = row.num
    is_live = models.c.session.in_(sql.select(sessions.c.id).where(sessions.c.finished.is_(None)))
    for row in database.grouped(models, ["tenant"], {"num": sql.func.sum(sql.case((is_live, 1), else_=0))}):
        if row.num:
            of(row.tenant)["models"] = row.num
    oldest = {"num": count, "oldest": sql.func.min(requests.c.created)}
    for row in database.grouped(requests, ["tenant", "kind"], oldest, state=OPEN):
        mine = of(row.tenant)
        mine["open"][row.kind] = row.num
        mine["oldest_wait_seconds"] = max(mine["oldest_wait_seconds"], now - row.oldest)
    sums = {"all_tokens": sql.func.sum(bills.c.tokens), "all_usd": sql.func.sum(bills.c.usd)}
    for row in database.grouped(bills, ["tenant"], sums):
        of(row.tenant).update(tokens=int(row.all_tokens), usd=float(row.all_usd))
    return dict(sorted(found.items()))


class Faults(logging.Handler):
    """Keeps the newest warnings and errors that this process has logged, for people."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._newest: deque[dict[str, Any]] = deque(maxlen=FAULTS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of a record, with the error that it carries."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f": {type(error).__name__}: {error}" if error is not None else "")
        self._newest.appendleft(
            {"at": record.created, "level": record.levelname.lower(), "text": printable(text, FAULT_CHARS)}
        )

    def start(self) -> None:
        """Listen to the log."""
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)

    def told(self) -> list[dict[str, Any]]:
        """Return what was kept, the newest first."""
        return list(self._newest)
