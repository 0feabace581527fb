"""Access control: API keys with scopes, an expiry and a rate limit."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo2.core.errors import PeerError, UserError
from echo2_service.front.database import Database, keys

#: train: models and checkpoints; sample: samplers and samples.
SCOPES = ("train", "sample")
PREFIX = "tml-"  # required by the SDK


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    tenant: str
    key: str
    scopes: frozenset[str]


class ApiKeys:
    """Authenticates callers by their keys and limits their rate."""

    def __init__(
        self, database: Database, clock: Callable[[], float], ticks: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: seconds since 1970, by which keys expire; `ticks`: seconds that never step, for their rates."""
        self._database, self._clock, self._ticks = database, clock, ticks
        self._budgets: dict[str, tuple[float, float]] = {}

    def add_key(
        self, tenant: str, scopes: Sequence[str] = SCOPES, days: float | None = None, per_minute: int = 100_000
    ) -> str:
        """Create a key and return its text. Only a digest is stored, so the text cannot be retrieved later.

        Raises:
            UserError: there is no such scope.
        """
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown:
            raise UserError(f"There is no scope {unknown[0]!r}; there are {', '.join(SCOPES)}.")
        text, now = PREFIX + secrets.token_urlsafe(32), self._clock()
        self._database.insert(
            keys,
            id="key_" + secrets.token_hex(6),
            digest=_digest(text),
            tenant=tenant,
            scopes=list(scopes),
            per_minute=per_minute,
            created=now,
            expires=None if days is None else now + days * 86400.0,
        )
        return text

    def revoke(self, key_id: str) -> None:
        """Refuse this key from now on.

        Raises:
            UserError: there is no such key.
        """
        if not self._database.update(keys, {"id": key_id}, revoked=self._clock()):
            raise UserError(f"There is no key {key_id!r}.")

    def admit(self, text: str) -> Caller:
        """Return the caller with this key.

        Raises:
            PeerError: `unauthenticated`, or `rate` if the key's rate is exceeded.
        """
        row = self._database.find(keys, digest=_digest(text)) if text else None
        now = self._clock()
        if row is None:
            raise PeerError("unauthenticated", "the API key is not known; send it as X-API-Key.")
        if row.revoked is not None or (row.expires is not None and row.expires <= now):
            raise PeerError("unauthenticated", f"the API key {row.id} is {'revoked' if row.revoked else 'expired'}.")
        ticks = self._ticks()
        calls, since = self._budgets.get(row.id, (float(row.per_minute), ticks))
        calls = min(float(row.per_minute), calls + (ticks - since) * row.per_minute / 60.0)
        self._budgets[row.id] = (max(0.0, calls - 1.0), ticks)
        if calls < 1.0:
            raise PeerError("rate", f"the API key {row.id} may make {row.per_minute} calls a minute.")
        return Caller(row.tenant, row.id, frozenset(row.scopes))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
