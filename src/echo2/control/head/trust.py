"""The results of checks for each stranger's ticket, as plain data; `checks` has the rules. They are recorded and
outlive the head, as checks under way do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echo2.types import SnapshotRef

#: Clean checks after which a ticket is no newcomer.
NEWCOMER_CHECKS = 4
#: Clean checks in a row that end a quarantine.
CLEAN_TO_LEAVE = 8
#: Events of a ticket's history that are kept.
HISTORY_MAX = 16
#: Tickets that are remembered; those heard of longest ago go first.
TICKETS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Trust:
    """Of one ticket. `num_missed`: checks without a verdict; `num_clean`: passed since the last fault; `history`: when,
    in seconds, and what.
    """

    num_groups: int = 0
    num_passed: int = 0
    num_failed: int = 0
    num_missed: int = 0
    num_clean: int = 0
    num_tokens: int = 0
    is_quarantined: bool = False
    history: tuple[tuple[float, str], ...] = ()

    @property
    def score(self) -> float:
        """Probability that the next check passes, by Laplace's rule: 1/2 where nothing is known."""
        return (self.num_passed + 1) / (self.num_passed + self.num_failed + 2)

    @property
    def is_new(self) -> bool:
        """Whether too little is known of it."""
        return self.num_passed < NEWCOMER_CHECKS

    def to_plain(self) -> dict[str, Any]:
        """For people and scripts."""
        return {"score": self.score, "is_new": self.is_new, **asdict(self)}

    def noted(self, at: float, what: str) -> Trust:
        """With this in its history."""
        return replace(self, history=(*self.history, (at, what))[-HISTORY_MAX:])

    def passed(self) -> Trust:
        """After a check that found nothing."""
        return replace(self, num_passed=self.num_passed + 1, num_clean=self.num_clean + 1)

    def failed(self, at: float, reason: str) -> Trust:
        """After a check that found something: in quarantine, if it was not there."""
        return replace(self, num_failed=self.num_failed + 1, num_clean=0, is_quarantined=True).noted(at, reason)


@dataclass(frozen=True, slots=True)
class DrawnCheck:
    """Of a group, which the worker sampled with `ref`, as the ledger keeps it. `holds`: the group is not trained before
    the verdict; `is_from_stream`: its worker's engine draws from the head's random numbers.
    """

    number: int
    worker_id: str
    ticket: str
    ref: SnapshotRef
    holds: bool
    is_from_stream: bool


@dataclass(frozen=True, slots=True)
class TicketRest:
    """Until when, in seconds, the ticket gets no leases; in the past: it may have them. `num_rests` not made up for."""

    ticket: str
    until: float
    num_rests: int


@dataclass(slots=True)
class OpenCheck:
    """A drawn check that is under way: until when, and by whom (`checker`; empty: nobody yet)."""

    drawn: DrawnCheck
    until: float
    checker: str = ""
    num_tries: int = 0


@dataclass(slots=True)
class TrustBook:
    """By ticket; and the checks under way, by group, the oldest first: it is overdue first, too."""

    open: dict[int, OpenCheck] = field(default_factory=dict)
    _of: dict[str, Trust] = field(default_factory=dict)

    def of(self, ticket: str) -> Trust:
        """The trust in this ticket; a newcomer's where nothing is known of it."""
        return self._of.get(ticket) or Trust()

    def put(self, ticket: str, trust: Trust) -> None:
        """So much is known of it now."""
        self._of.pop(ticket, None)
        self._of[ticket] = trust
        if len(self._of) > TICKETS_MAX:
            del self._of[next(iter(self._of))]

    def first_open(self) -> OpenCheck | None:
        """The check that is overdue first."""
        return next(iter(self.open.values()), None)

    def all(self) -> dict[str, Trust]:
        """Of every ticket of which there was a group."""
        return dict(self._of)
