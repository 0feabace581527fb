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
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from echo2.core.disk import allocated_bytes
from echo2.core.errors import PeerError
from echo2_service import limits
from echo2_service.backend import Backend
from echo2_service.front.database import Database, bills, checkpoints, models, requests, samplers, sessions
from echo2_service.settings import Quotas

SAVES_SHARE = 0.9
#: Part of a quota that answers may have for longer than minutes.
ANSWERS_SHARE = 0.2
#: Bytes charged for a row, with its indexes.
ROW_BYTES = 1024
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
    """Dollars by tenant and kind of request. A changed price applies to later requests only."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database, self._quotas = database, quotas

    def charge(self, tenant: str, kind: str, num_tokens: int) -> None:
        """Charge a completed request."""
        usd = self._price(kind, num_tokens)
        where = {"tenant": tenant, "kind": kind}
        with self._database.transaction():
            if not self._database.update(
                bills,
                where,
                requests=bills.c.requests + 1,
                tokens=bills.c.tokens + num_tokens,
                usd=bills.c.usd + usd,
            ):
                self._database.insert(bills, **where, requests=1, tokens=num_tokens, usd=usd)

    def check(self, tenant: str) -> None:
        """Raise PeerError("spent") if the tenant's quota is used up. Open requests are still completed and charged."""
        quota = self._quotas.quota_usd.get(tenant)
        if quota is not None and (usd := self._usd(tenant)) >= quota:
            raise PeerError("spent", f"{tenant} has spent ${usd:.4f} of ${quota:g}; ask who runs the service for more.")

    def estimate(self, tenant: str, num_tokens: Mapping[str, int]) -> dict[str, Any]:
        """Return the cost of these tokens, in total and by kind of request, and the rest of the tenant's quota (None:
        no quota).
        """
        by_kind = {kind: self._price(kind, count) for kind, count in num_tokens.items()}
        quota = self._quotas.quota_usd.get(tenant)
        left = None if quota is None else max(0.0, quota - self._usd(tenant))
        return {"usd": sum(by_kind.values()), "usd_by_kind": by_kind, "usd_left": left}

    def of(self, tenant: str) -> dict[str, Any]:
        """Return a tenant's bill, with the current prices."""
        rows = self._database.select(bills, tenant=tenant)
        used = {row.kind: {"requests": row.requests, "tokens": row.tokens, "usd": row.usd} for row in rows}
        prices = self._quotas.usd_per_million_tokens
        usd, quotas = sum(row.usd for row in rows), self._quotas
        return {
            "usage": used,
            "usd": usd,
            "quota_usd": quotas.quota_usd.get(tenant),
            "usd_per_million_tokens": prices,
            "quota_disk_gb": quotas.quota_disk_gb.get(tenant),
        }

    def _usd(self, tenant: str) -> float:
        return float(sum(row.usd for row in self._database.select(bills, tenant=tenant)))

    def _price(self, kind: str, num_tokens: int) -> float:
        return num_tokens / 1e6 * self._quotas.usd_per_million_tokens.get(kind, 0.0)


class Storage:
    """The store and the directory `folder` as tenants use them. For one event loop."""

    def __init__(self, database: Database, backend: Backend, folder: Path, quotas: Quotas) -> None:
        self._database, self._backend, self._quotas = database, backend, quotas
        self.folder = folder
        self._on_disk: dict[str, int] = {}  # by the last measure
        self._since = Counter[str]()  # bytes written since then, as estimated
        self._in_requests = Counter[str]()
        self.count_requests()

    def directory(self, tenant: str) -> Path:
        """Return the directory that holds all files of a tenant."""
        directory = self.folder / f"{TENANT_PREFIX}{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"
        directory.mkdir(exist_ok=True)
        return directory

    def check_rows(self, table: sql.Table, tenant: str) -> None:
        """Raise PeerError("too_many") if the tenant may have no other row."""
        most: int = getattr(limits, ROWS_MAX[table.name])
        if self._database.count(table, tenant=tenant) >= most:
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
        found = []
        for tenant, size in self._in_requests.items():
            quota = self._quota(tenant)
            room = math.inf if quota is None else quota
            if (
                size > min(limits.ANSWERS_BYTES_MAX, room * ANSWERS_SHARE)
                or self.num_bytes(tenant) >= room * SAVES_SHARE
            ):
                found.append(tenant)
        return found

    def count_requests(self) -> None:
        """Count the bytes of all stored requests."""
        size = sql.func.sum(
            sql.func.coalesce(sql.func.length(requests.c.body), 0)
            + sql.func.coalesce(sql.func.length(requests.c.answer), 0)
            + ROW_BYTES
        )
        with self._database.transaction() as connection:
            found = connection.execute(sql.select(requests.c.tenant, size).group_by(requests.c.tenant))
            self._in_requests = Counter({tenant: int(count) for tenant, count in found})

    async def measure(self, tenant: str) -> int:
        """Measure what the tenant keeps, and return its bytes."""
        elsewhere, others = self._held(tenant)
        names = [row.id for row in self._database.select(models, columns=["id"], tenant=tenant)]
        rows = sum(self._row_bytes(table, tenant) for table in (sessions, models, samplers, checkpoints))
        before, directory = self._since[tenant], self.directory(tenant)

        def on_disk() -> int:
            mine = allocated_bytes(directory) - sum(map(allocated_bytes, others))
            held = sum(map(allocated_bytes, elsewhere))
            return max(0, mine) + held + sum(map(self._backend.num_bytes, names))

        self._on_disk[tenant] = rows + await asyncio.to_thread(on_disk)
        self._since[tenant] -= before
        return self.num_bytes(tenant)

    async def measure_all(self) -> None:
        """Measure the tenants that have quotas."""
        for tenant in self._quotas.quota_disk_gb:
            await self.measure(tenant)

    def _quota(self, tenant: str) -> float | None:
        quota = self._quotas.quota_disk_gb.get(tenant)
        return None if quota is None else quota * 1e9

    def _held(self, tenant: str) -> tuple[list[Path], list[Path]]:
        """Return the directories of others that the tenant's copies and samplers keep, and its own that only those of
        others keep.
        """
        find, own = self._database.select, self.directory(tenant)
        named = {row.directory for row in find(checkpoints, columns=["directory"], tenant=tenant)}
        named |= sampler_directories(self._database, tenant=tenant)
        unnamed = tuple({str(path) for path in own.iterdir()} - named)[:NAMES_MAX]
        others = {row.directory for row in find(checkpoints, columns=["directory"], directory=unnamed)}
        others |= {row.directory for row in find(samplers, columns=["directory"], directory=unnamed)}
        return _paths(one for one in named if Path(one).parent != own), _paths(others)

    def _row_bytes(self, table: sql.Table, tenant: str) -> int:
        labels = table.c.get("labels")
        size = ROW_BYTES + (0 if labels is None else sql.func.coalesce(sql.func.length(sql.cast(labels, sql.Text)), 0))
        query = sql.select(sql.func.coalesce(sql.func.sum(size), 0)).where(table.c.tenant == tenant)
        with self._database.transaction() as connection:
            return int(connection.execute(query).scalar_one())


def sampler_directories(database: Database, **where: Any) -> set[str]:
    """Return the directories that samplers of live sessions read; `where`: of these samplers and models alone."""
    live = tuple(row.id for row in database.select(sessions, columns=["id"], finished=None))
    find = database.select
    read = [row.directory for row in find(samplers, columns=["directory"], session=live, model=None, **where)]
    read += [row.inflight for row in find(models, columns=["inflight"], session=live, **where)]
    return {path for path in read if path}


def _paths(names: Iterable[str]) -> list[Path]:
    return [Path(name) for name in sorted(set(names))]
