"""What tenants use, against the limits and the operator's quotas: dollars, rows in the store, and files on the disk.

Everything that a tenant makes the service write is below a directory of that tenant, whose size is therefore what lies
on the disk, whatever refers to it: checkpoints, published adapters, uploads that are being checked, and what is about
to be deleted. To it are added the directories of its models at the back end, its rows, and checkpoints of other tenants
of which it holds copies. What only other tenants' copies keep is not charged.

Saves, uploads, copies and new models end at `SAVES_SHARE` of a quota, training and sampling at the quota itself: so a
tenant without room for another checkpoint can still train for a while, and the quota bounds both. The size is measured
in a thread at each save; what was written since the last measure is estimated from the bytes of requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from echo2.core.disk import allocated_bytes
from echo2.core.errors import PeerError
from echo2_service import limits
from echo2_service.backend import Backend
from echo2_service.front.database import (
    Database,
    bills,
    checkpoints,
    models,
    requests,
    samplers,
    sessions,
    spending,
    steps,
)
from echo2_service.settings import OTHERS, Tariff, of_tenant

SAVES_SHARE = 0.9
#: Part of a quota that answers may have for longer than minutes.
ANSWERS_SHARE = 0.2
#: Bytes charged for a row, with its indexes, and for a point of a curve.
ROW_BYTES, POINT_BYTES = 1024, 192
TENANT_PREFIX = "tenant_"
#: Directories looked up at once.
NAMES_MAX = 1000
ROWS_MAX = {
    "sessions": "SESSIONS_MAX",
    "models": "MODELS_MAX",
    "samplers": "SAMPLERS_MAX",
    "checkpoints": "CHECKPOINTS_MAX",
}
REMEDY = "Delete checkpoints, finish sessions that are no longer used, or ask who runs the service for more."


class Bills:
    """Dollars by tenant and kind of request, and by session. A changed price applies to later requests only."""

    def __init__(self, database: Database, tariff: Tariff) -> None:
        self._database, self._tariff = database, tariff

    @property
    def has_prices(self) -> bool:
        """Whether anything costs anything."""
        return any(self._tariff.quotas.usd_per_million_tokens.values())

    def charge(self, tenant: str, session: str, kind: str, num_tokens: int) -> None:
        """Charge a completed request."""
        usd = self._price(kind, num_tokens)
        with self._database.transaction():
            self._add(bills, {"tenant": tenant, "kind": kind}, requests=1, tokens=num_tokens, usd=usd)
            if usd:
                self._add(spending, {"session": session}, usd=usd)

    def check(self, tenant: str) -> None:
        """Raise PeerError("spent") if the tenant's quota is used up. Open requests are still completed and charged."""
        quota = self._quota(tenant)
        if quota is not None and (usd := self._usd(bills, tenant=tenant)) >= quota:
            raise PeerError("spent", f"{tenant} has spent ${usd:.4f} of ${quota:g}; ask who runs the service for more.")

    def estimate(self, tenant: str, num_tokens: Mapping[str, int]) -> dict[str, Any]:
        """Return the cost of these tokens, in total and by kind of request, and the rest of the tenant's quota (None:
        no quota).
        """
        by_kind = {kind: self._price(kind, count) for kind, count in num_tokens.items()}
        quota = self._quota(tenant)
        usd_left = None if quota is None else max(0.0, quota - self._usd(bills, tenant=tenant))
        return {"usd": sum(by_kind.values()), "usd_by_kind": by_kind, "usd_left": usd_left}

    def of(self, tenant: str) -> dict[str, Any]:
        """Return a tenant's bill, with the current prices."""
        rows, quotas = self._database.select(bills, tenant=tenant), self._tariff.quotas
        return {
            "usage": {row.kind: {"requests": row.requests, "tokens": row.tokens, "usd": row.usd} for row in rows},
            "usd": sum(row.usd for row in rows),
            "quota_usd": self._quota(tenant),
            "usd_per_million_tokens": quotas.usd_per_million_tokens,
            "quota_disk_gb": of_tenant(quotas.quota_disk_gb, tenant),
            "checkpoint_days": of_tenant(quotas.checkpoint_days, tenant),
        }

    def of_session(self, session: str) -> float:
        """Return the dollars that a session has cost so far."""
        return self._usd(spending, session=session)

    def _add(self, table: sql.Table, where: dict[str, str], **values: float) -> None:
        if not self._database.update(table, where, **{name: table.c[name] + by for name, by in values.items()}):
            self._database.insert(table, **where, **values)

    def _quota(self, tenant: str) -> float | None:
        return of_tenant(self._tariff.quotas.quota_usd, tenant)

    def _usd(self, table: sql.Table, **where: Any) -> float:
        return float(sum(row.usd for row in self._database.select(table, columns=["usd"], **where)))

    def _price(self, kind: str, num_tokens: int) -> float:
        return num_tokens / 1e6 * self._tariff.quotas.usd_per_million_tokens.get(kind, 0.0)


class Storage:
    """The store and the directory `folder` as tenants use them. For one event loop."""

    def __init__(self, database: Database, backend: Backend, folder: Path, tariff: Tariff) -> None:
        self._database, self._backend, self._tariff = database, backend, tariff
        self.folder = folder
        self.arriving = set[str]()  # names of directories whose rows are about to be stored
        self._on_disk: dict[str, int] = {}  # by the last measure
        self._since = Counter[str]()  # bytes written since then, as estimated
        self._in_requests = Counter[str]()
        self._measuring = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._begun, self._ended = Counter[str](), Counter[str]()  # measures; of those that told something the newest
        self.count_requests()

    def directory(self, tenant: str) -> Path:
        """Return the directory that holds all files of a tenant."""
        directory = self.folder / f"{TENANT_PREFIX}{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"
        directory.mkdir(exist_ok=True)
        return directory

    def data_file(self, tenant: str, request: str) -> Path:
        """Return the file with the data of an open request, if they are long training data."""
        return self.directory(tenant).absolute() / request

    def check_rows(self, table: sql.Table, tenant: str) -> None:
        """Raise PeerError("too_many") if the tenant may have no other row."""
        most: int = getattr(limits, ROWS_MAX[table.name])
        num_rows = self._database.count(table, tenant=tenant)
        if table in (sessions, models):
            if num_rows >= limits.ENDED_MAX:
                kept = f"{limits.ENDED_MAX} {table.name}, those that ended within a day included"
                raise PeerError("too_many", f"you have {kept}, and no more are taken. Begin fewer, or go on tomorrow.")
            num_rows = self._database.count_untidied(table, tenant) if num_rows >= most else num_rows
        if num_rows >= most:
            raise PeerError("too_many", f"you have {most} {table.name}, and no more are taken. {REMEDY}")

    def check(self, tenant: str, share: float = SAVES_SHARE, num_bytes: int = 0) -> None:
        """Raise PeerError("disk_quota") if this many bytes more exceed a share of the tenant's quota."""
        quota = self._quota(tenant)
        if quota is not None and (used := self.num_bytes(tenant) + num_bytes) >= quota * share:
            raise PeerError(
                "disk_quota",
                f"{tenant} would have {used / 1e6:,.2f} MB on the disk, of {quota / 1e6:,.2f} MB that are allowed; "
                f"{'the last tenth is for training' if share < 1.0 else 'no more is taken'}. {REMEDY}",
            )

    def check_refusals(self, tenant: str) -> None:
        """Raise PeerError("rate") if even requests that are refused find no room any more."""
        quota = self._quota(tenant)
        if quota is not None and self.num_bytes(tenant) >= quota + limits.REFUSED_BYTES_MAX:
            raise PeerError("rate", f"{tenant} has no room on the disk, and too many requests were refused. {REMEDY}")

    async def check_measured(self, tenant: str, num_bytes: int = 0) -> None:
        """Measure, if the tenant has a quota, and `check`."""
        if self._quota(tenant) is not None:
            await self.measure(tenant)
            self.check(tenant, num_bytes=num_bytes)

    def known_bytes(self, tenant: str) -> int | None:
        """Return as `num_bytes`; None if the tenant was never measured."""
        return self.num_bytes(tenant) if tenant in self._on_disk else None

    def num_bytes(self, tenant: str) -> int:
        """Return the bytes that the tenant keeps, as far as they are known without a look at the disk."""
        return self._on_disk.get(tenant, 0) + self._since[tenant] + self._in_requests[tenant]

    def written(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that the back end writes for a request, until the next measure."""
        self._since[tenant] += num_bytes

    def stored(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a request and its answer in the store; less than 0: they were removed."""
        self._in_requests[tenant] += num_bytes

    def answers_exceed(self) -> list[str]:
        """Return the tenants whose stored answers are to go early: they are many, or a large part of the quota."""
        tenants = []
        for tenant, size in self._in_requests.items():
            quota = self._quota(tenant)
            room = math.inf if quota is None else quota
            if (
                size > min(limits.ANSWERS_BYTES_MAX, room * ANSWERS_SHARE)
                or self.num_bytes(tenant) >= room * SAVES_SHARE
            ):
                tenants.append(tenant)
        return tenants

    def count_requests(self) -> None:
        """Count the bytes of all stored requests."""
        size = sql.func.sum(
            sql.func.coalesce(sql.func.length(requests.c.body), 0)
            + sql.func.coalesce(sql.func.length(requests.c.answer), 0)
            + ROW_BYTES
        )
        with self._database.transaction() as connection:
            rows = connection.execute(sql.select(requests.c.tenant, size).group_by(requests.c.tenant))
            self._in_requests = Counter({tenant: int(count) for tenant, count in rows})

    async def measure(self, tenant: str) -> int:
        """Measure what the tenant keeps, and return its bytes. What several callers wait for is measured once."""
        num_begun = self._begun[tenant]
        async with self._measuring[tenant]:
            if self._ended[tenant] <= num_begun:  # none has begun since, and told
                self._begun[tenant] += 1
                number, before = self._begun[tenant], self._since[tenant]
                self._on_disk[tenant] = await asyncio.to_thread(self._look, self._database.beside(), tenant)
                self._since[tenant] -= before
                self._ended[tenant] = number
        return self.num_bytes(tenant)

    def _look(self, database: Database, tenant: str) -> int:
        """Return the bytes of the tenant's rows, requests aside, and files. Runs in a thread: there may be 100,000."""
        elsewhere, others = self._held(database, tenant)
        rows = sum(_row_bytes(database, table, tenant) for table in (sessions, models, samplers, checkpoints))
        rows += database.count(steps, tenant=tenant) * POINT_BYTES
        own_bytes = allocated_bytes(self.directory(tenant)) - sum(map(allocated_bytes, others))
        elsewhere_bytes = sum(map(allocated_bytes, elsewhere))
        names = database.values(models.c.id, tenant=tenant)
        return rows + max(0, own_bytes) + elsewhere_bytes + sum(map(self._backend.num_bytes, names))

    async def measure_all(self) -> None:
        """Measure the tenants that have quotas, and of those that share one the tenants that have written since."""
        quotas, wrote = self._tariff.quotas.quota_disk_gb, [name for name, size in self._since.items() if size]
        for tenant in [name for name in {*quotas, *wrote} if name != OTHERS and self._quota(name) is not None]:
            await self.measure(tenant)

    def expiry(self, tenant: str, now: float, ttl_seconds: float | None, saved: float | None = None) -> float | None:
        """Return when a checkpoint expires that is to be kept for so long from now (None: for ever). `saved`: None:
        now.
        """
        days = of_tenant(self._tariff.quotas.checkpoint_days, tenant)
        last = None if days is None else (now if saved is None else saved) + days * 86400.0
        ends = [one for one in (None if ttl_seconds is None else now + ttl_seconds, last) if one is not None]
        return min(ends, default=None)

    def _quota(self, tenant: str) -> float | None:
        quota = of_tenant(self._tariff.quotas.quota_disk_gb, tenant)
        return None if quota is None else quota * 1e9

    def _held(self, database: Database, tenant: str) -> tuple[list[Path], list[Path]]:
        """Return the directories of others that the tenant's copies and samplers keep, and its own that only those of
        others keep.
        """
        find, own = database.select, self.directory(tenant)
        named = database.values(checkpoints.c.directory, tenant=tenant)
        named |= sampler_directories(database, tenant=tenant)
        unnamed = tuple({str(path) for path in own.iterdir()} - named)[:NAMES_MAX]
        others = {row.directory for row in find(checkpoints, columns=["directory"], directory=unnamed)}
        others |= {row.directory for row in find(samplers, columns=["directory"], directory=unnamed)}
        return _paths(one for one in named if Path(one).parent != own), _paths(others)


def _row_bytes(database: Database, table: sql.Table, tenant: str) -> int:
    labels = table.c.get("labels")
    size = ROW_BYTES + (0 if labels is None else sql.func.coalesce(sql.func.length(sql.cast(labels, sql.Text)), 0))
    query = sql.select(sql.func.coalesce(sql.func.sum(size), 0)).where(table.c.tenant == tenant)
    with database.transaction() as connection:
        return int(connection.execute(query).scalar_one())


def sampler_directories(database: Database, **where: Any) -> set[str]:
    """Return the directories that samplers of live sessions read; `where`: of these samplers and models alone."""
    live = sql.select(sessions.c.id).where(sessions.c.finished.is_(None))  # no list: PostgreSQL takes 65,535
    directories = set[str]()
    with database.transaction() as connection:
        for column, more in ((samplers.c.directory, (samplers.c.model.is_(None),)), (models.c.inflight, ())):
            of = column.table.c
            these = (of.session.in_(live), column.is_not(None), *(of[name] == value for name, value in where.items()))
            directories |= set(connection.execute(sql.select(column).where(*these, *more)).scalars())
    return directories


def _paths(names: Iterable[str]) -> list[Path]:
    return [Path(name) for name in sorted(set(names))]
