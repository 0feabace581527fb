"""What tenants used, what it costs them, and how far they may go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo2.errors import PeerError
from echo2.service.database import Database, bills
from echo2.service.settings import Quotas


class Bills:
    """Dollars by tenant and kind of request. A price that is changed counts from then on."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database, self._quotas = database, quotas

    def charge(self, tenant: str, kind: str, num_tokens: int) -> None:
        """Count a request that was done."""
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
        """Raises PeerError("spent") where the tenant's quota is: what is open already is still done, and charged."""
        quota = self._quotas.quota_usd.get(tenant)
        if quota is not None and (usd := self.of(tenant)["usd"]) >= quota:
            raise PeerError("spent", f"{tenant} has spent ${usd:.4f} of ${quota:g}; ask who runs the service for more.")

    def estimate(self, tenant: str, num_tokens: Mapping[str, int]) -> dict[str, Any]:
        """Dollars of so many tokens by kind of request, in all, and what the tenant may still spend; None: any sum."""
        by_kind = {kind: self._price(kind, count) for kind, count in num_tokens.items()}
        quota = self._quotas.quota_usd.get(tenant)
        left = None if quota is None else max(0.0, quota - self.of(tenant)["usd"])
        return {"usd": sum(by_kind.values()), "usd_by_kind": by_kind, "usd_left": left}

    def of(self, tenant: str) -> dict[str, Any]:
        """A tenant's bill, with the prices as they are now."""
        rows = self._database.select(bills, tenant=tenant)
        used = {row.kind: {"requests": row.requests, "tokens": row.tokens, "usd": row.usd} for row in rows}
        prices = self._quotas.usd_per_million_tokens
        usd, quota = sum(row.usd for row in rows), self._quotas.quota_usd.get(tenant)
        return {"usage": used, "usd": usd, "quota_usd": quota, "usd_per_million_tokens": prices}

    def _price(self, kind: str, num_tokens: int) -> float:
        return num_tokens / 1e6 * self._quotas.usd_per_million_tokens.get(kind, 0.0)
