"""Collects failures of the user's code and data for display: a count per kind, and the first failure in full."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.control.head.leases import FAILURES
from echo2.printable import printable, printable_lines

log = logging.getLogger(__name__)

#: Reasons of a failed lease that are not errors.
HARMLESS = frozenset({"snapshot_gone", "revoked", "busy"})
#: Maximum characters of a message, and of a traceback.
MESSAGE_CHARS = 1000
TRACEBACK_CHARS = 4000
#: Maximum number of refused snapshots counted and logged per worker, which chooses the text of the message.
REFUSALS_PER_WORKER = 10


@dataclass(slots=True)
class Failure:
    """Number of failures of one kind, with message and traceback of the first."""

    kind: str
    count: int
    message: str
    traceback: str = ""


class Failures:
    """The failures of one run. `plain`: the result of an earlier head's `to_plain`."""

    def __init__(self, plain: list[dict[str, Any]] | None = None) -> None:
        self._by_kind = {entry["kind"]: Failure(**entry) for entry in plain or []}
        self._refusals: dict[str, int] = {}

    def see(self, event: ev.Event, commands: Iterable[do.Command]) -> None:
        """Count the failure that an event reports, if any. `commands`: the planner's answer. A worker's report on a
        lease that it does not hold closes no lease, and is not counted.
        """
        if isinstance(event, ev.GroupUnfit):
            self.add(event.reason, event.detail, event.traceback)
        elif isinstance(event, ev.LeaseFailed) and event.reason not in HARMLESS and _has_closed(event, commands):
            kind = event.reason if event.reason in FAILURES else "engine_failed"
            self.add(kind, f"{event.worker_id}: {event.detail}", event.traceback)

    def refused(self, worker_id: str, what: str) -> None:
        """Count a snapshot that a worker refused to install. `what`: which, and why. Only the first few per worker
        count."""
        count = self._refusals.get(worker_id, 0)
        if count < REFUSALS_PER_WORKER:
            self._refusals[worker_id] = count + 1
            self.add("snapshot_refused", f"{worker_id} refused snapshot {what}")

    def add(self, kind: str, message: str, traceback: str = "") -> None:
        """Count one more failure of a kind; keep the message and traceback of the first."""
        log.warning("%s: %s", kind, message)  # the log handler collapses repetitions
        if kind in self._by_kind:
            self._by_kind[kind].count += 1
        else:
            first = printable(message, MESSAGE_CHARS), printable_lines(traceback, TRACEBACK_CHARS)
            self._by_kind[kind] = Failure(kind, 1, *first)

    def count(self, kind: str) -> int:
        """Return how many failures of this kind there were."""
        return self._by_kind[kind].count if kind in self._by_kind else 0

    def to_plain(self) -> list[dict[str, Any]]:
        """Return plain values for the ledger, status.json and the summary; the most frequent kind first."""
        return [asdict(one) for one in sorted(self._by_kind.values(), key=lambda one: -one.count)]


def _has_closed(event: ev.LeaseFailed, commands: Iterable[do.Command]) -> bool:
    return any(isinstance(one, do.CloseLease) and one.lease_id == event.lease_id for one in commands)
