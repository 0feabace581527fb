"""What the operator sees of the service: tenants with their open requests and dollars, machines, and faults.

`echo2 serve status` prints the tenants and machines; `GET /api/v1/owner` tells all of it to a key of the scope `owner`,
and the owner's page shows that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import sqlalchemy as sql
from starlette.requests import Request
from starlette.responses import Response

from echo2.core.printable import printable
from echo2_service import limits
from echo2_service.front.database import OPEN, Database, bills, models, requests, sessions
from echo2_service.front.request_guard import Caller, answer
from echo2_service.front.usage import Storage
from echo2_service.settings import Tariff, of_tenant

Fleet: TypeAlias = Callable[[], Mapping[str, Any]]
NO_FLEET: Mapping[str, Any] = MappingProxyType({"machines": {}, "waiting_samples": 0})
#: Newest different warnings and errors that are kept, and characters of each.
FAULTS_KEPT, FAULT_CHARS = 50, 500


def tenants(database: Database, now: float) -> dict[str, dict[str, Any]]:
    """Return by tenant: live sessions, their models, open requests by kind, oldest wait in seconds, tokens, dollars."""
    by_tenant: dict[str, dict[str, Any]] = {}
    count = sql.func.count()

    def of(tenant: str) -> dict[str, Any]:
        empty = {"sessions": 0, "models": 0, "open": {}, "oldest_wait_seconds": 0.0, "tokens": 0, "usd": 0.0}
        return by_tenant.setdefault(tenant, empty)

    for row in database.grouped(sessions, ["tenant"], {"num": count}, finished=None):
        of(row.tenant)["sessions"] = row.num
    is_live = models.c.session.in_(sql.select(sessions.c.id).where(sessions.c.finished.is_(None)))
    for row in database.grouped(models, ["tenant"], {"num": sql.func.sum(sql.case((is_live, 1), else_=0))}):
        if row.num:
            of(row.tenant)["models"] = row.num
    oldest = {"num": count, "oldest": sql.func.min(requests.c.created)}
    for row in database.grouped(requests, ["tenant", "kind"], oldest, state=OPEN):
        entry = of(row.tenant)
        entry["open"][row.kind] = row.num
        entry["oldest_wait_seconds"] = max(entry["oldest_wait_seconds"], now - row.oldest)
    sums = {"all_tokens": sql.func.sum(bills.c.tokens), "all_usd": sql.func.sum(bills.c.usd)}
    for row in database.grouped(bills, ["tenant"], sums):
        of(row.tenant).update(tokens=int(row.all_tokens), usd=float(row.all_usd))
    return dict(sorted(by_tenant.items()))


class Overview:
    """The endpoint of the owner. `fleet` tells the machines that joined, and the samples for which none has room."""

    def __init__(
        self, database: Database, storage: Storage, tariff: Tariff, fleet: Fleet, clock: Callable[[], float]
    ) -> None:
        self._database, self._storage, self._tariff = database, storage, tariff
        self._fleet, self._clock, self._begun = fleet, clock, clock()
        self.faults = Faults()

    async def show(self, caller: Caller, request: Request, body: bytes) -> Response:
        """Return fleet, tenants, money and faults."""
        now, quotas = self._clock(), self._tariff.quotas
        by_tenant = tenants(self._database, now)
        for name, row in by_tenant.items():
            num_bytes = self._storage.known_bytes(name)
            row["disk_gb"] = None if num_bytes is None else num_bytes / 1e9
            row["quota_usd"] = of_tenant(quotas.quota_usd, name)
            row["quota_disk_gb"] = of_tenant(quotas.quota_disk_gb, name)
        shown = sorted(by_tenant.items(), key=lambda item: (-item[1]["oldest_wait_seconds"], -item[1]["usd"], item[0]))
        rows = [{"tenant": name, **row} for name, row in shown[: limits.PAGE_MAX]]
        fleet = self._fleet()
        return answer(
            {
                "time": now,
                "begun": self._begun,
                "tenants": rows,
                "num_tenants": len(by_tenant),
                "num_open": sum(sum(row["open"].values()) for row in by_tenant.values()),
                "usd": sum(row["usd"] for row in by_tenant.values()),
                "usd_per_million_tokens": quotas.usd_per_million_tokens,
                "usd_per_hour": sum(row["price_usd_per_hour"] for row in fleet["machines"].values()),
                **fleet,
                "faults": self.faults.newest(),
            }
        )


class Faults(logging.Handler):
    """Keeps the newest warnings and errors that this process has logged, one line for those that say the same. What
    strangers cause at will, requests that are not HTTP, is no fault.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._by_text: dict[str, dict[str, Any]] = {}  # the newest last

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line of a record, with the error that it carries."""
        if record.name.startswith("uvicorn") and record.levelno < logging.ERROR:
            return
        error = record.exc_info[1] if record.exc_info else None
        try:
            words = record.getMessage() + (f": {type(error).__name__}: {error}" if error is not None else "")
        except Exception:  # a mistake in a call of the log ends nothing
            self.handleError(record)
            return
        text, level = printable(words, FAULT_CHARS), record.levelname.lower()
        before = self._by_text.pop(text, {"num": 0})
        self._by_text[text] = {"at": record.created, "level": level, "num": before["num"] + 1, "text": text}
        if len(self._by_text) > FAULTS_KEPT:
            del self._by_text[next(iter(self._by_text))]

    def start(self) -> None:
        """Listen to the log."""
        logging.getLogger().addHandler(self)

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)

    def newest(self) -> list[dict[str, Any]]:
        """Return what was kept, the newest first."""
        self.acquire()  # other threads log, too
        try:
            return list(self._by_text.values())[::-1]
        finally:
            self.release()
