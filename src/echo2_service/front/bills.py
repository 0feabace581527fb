"""Usage, costs and quotas of tenants. The quota of disk is in `storage.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo2.core.errors import PeerError
from echo2_service.front.database import Database, bills
from echo2_service.settings import Quotas


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
