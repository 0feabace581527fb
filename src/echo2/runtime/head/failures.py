"""Failures of the user's code and data, for people: a count for each kind, and the first one in full."""

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

#: Reasons of a failed lease that are nobody's mistake.
HARMLESS = frozenset({"snapshot_gone", "revoked", "busy"})
#: Characters of a message, and of a traceback.
MESSAGE_CHARS = 1000
TRACEBACK_CHARS = 4000
#: Refused snapshots that one worker can have counted and logged: it words them itself.
REFUSALS_PER_WORKER = 10


@dataclass(slots=True)
class Failure:
    """`count` of one kind; `message` and `traceback` of the first of them."""

    kind: str
    count: int
    message: str
    traceback: str = ""


class Failures:
    """Of one run. `plain`: what `to_plain` gave to an earlier head."""

    def __init__(self, plain: list[dict[str, Any]] | None = None) -> None:
        self._by_kind = {entry["kind"]: Failure(**entry) for entry in plain or []}
        self._refusals: dict[str, int] = {}

    def see(self, event: ev.Event, commands: Iterable[do.Command]) -> None:
        """Count what an event says has failed. `commands`: what the planner made of it. The word of a worker for a
        lease that it does not hold closes none, and counts nothing.
        """
        if isinstance(event, ev.GroupUnfit):
            self.add(event.reason, event.detail, event.traceback)
        elif isinstance(event, ev.LeaseFailed) and event.reason not in HARMLESS and _has_closed(event, commands):
            kind = event.reason if event.reason in FAILURES else "engine_failed"
            self.add(kind, f"{event.worker_id}: {event.detail}", event.traceback)

    def refused(self, worker_id: str, what: str) -> None:
        """A worker did not install a snapshot. `what`: which, and why. Only the first few of a worker count."""
        count = self._refusals.get(worker_id, 0)
        if count < REFUSALS_PER_WORKER:
            self._refusals[worker_id] = count + 1
            self.add("snapshot_refused", f"{worker_id} refused snapshot {what}")

    def add(self, kind: str, message: str, traceback: str = "") -> None:
        """Count one more failure of a kind; keep the message and traceback of the first."""
        log.warning("%s: %s", kind, message)  # what repeats is counted there
        if kind in self._by_kind:
            self._by_kind[kind].count += 1
        else:
            first = printable(message, MESSAGE_CHARS), printable_lines(traceback, TRACEBACK_CHARS)
            self._by_kind[kind] = Failure(kind, 1, *first)

    def to_plain(self) -> list[dict[str, Any]]:
        """For the ledger, status.json and the summary; the most frequent first."""
        return [asdict(one) for one in sorted(self._by_kind.values(), key=lambda one: -one.count)]


def _has_closed(event: ev.LeaseFailed, commands: Iterable[do.Command]) -> bool:
    return any(isinstance(one, do.CloseLease) and one.lease_id == event.lease_id for one in commands)
