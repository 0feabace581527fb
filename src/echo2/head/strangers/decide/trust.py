"""The results of checks for each stranger's ticket, as plain data; `checks` has the rules. The results and the running
checks are recorded in the ledger and outlive the head.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echo2.core.types import SnapshotRef

#: Clean checks after which a ticket is no longer a newcomer.
NEWCOMER_CHECKS = 4
#: Checks in a row without a verdict after which a ticket is a newcomer again: nothing is known of what it delivers now.
UNCHECKED_MAX = 4
#: Clean checks in a row that end a quarantine.
CLEAN_TO_LEAVE = 8
#: Standard deviations by which the tokens of all checked groups of a ticket together may be more or less surprising
#: than their entropies say: somebody that samples a little too cold passes each check alone. The sums are halved when
#: their variance reaches so many nats^2, so that a bias by rounding, far below the spread, never adds up to a fault.
SURPRISE_MAX, SURPRISE_KEPT = 7.0, 30_000.0
#: Events kept in a ticket's history.
HISTORY_MAX = 16
#: Tickets that are remembered; the least recently updated are dropped first.
TICKETS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Trust:
    """The trust in one ticket. `num_missed`: checks without a verdict; `num_unchecked`: those since the last verdict;
    `num_clean`: checks passed since the last fault, or since the trust lapsed; `surprise`, `variance`: sum of -logprob
    less the entropy over the tokens of passed groups, nats, and its variance; `history`: (time in seconds, event).
    """

    num_groups: int = 0
    num_passed: int = 0
    num_failed: int = 0
    num_missed: int = 0
    num_unchecked: int = 0
    num_clean: int = 0
    num_tokens: int = 0
    is_quarantined: bool = False
    surprise: float = 0.0
    variance: float = 0.0
    history: tuple[tuple[float, str], ...] = ()

    @property
    def score(self) -> float:
        """Probability that the next check passes, by Laplace's rule: 1/2 if nothing is known."""
        return (self.num_passed + 1) / (self.num_passed + self.num_failed + 2)

    @property
    def is_new(self) -> bool:
        """Whether too few checks of the ticket have passed since its last fault, or since its trust lapsed."""
        return self.num_clean < NEWCOMER_CHECKS

    @property
    def is_believed(self) -> bool:
        """Whether the ticket's groups may be trained before they are checked."""
        return not (self.is_new or self.is_quarantined)

    def to_plain(self) -> dict[str, Any]:
        """Return a plain dictionary for display and scripts."""
        return {"score": self.score, "is_new": self.is_new, **asdict(self)}

    def noted(self, at: float, what: str) -> Trust:
        """Return a copy with this event in its history."""
        return replace(self, history=(*self.history, (at, what))[-HISTORY_MAX:])

    def with_tokens(self, num_tokens: int, deviations: float, variance: float) -> Trust:
        """Return the trust after a group with so many judged tokens. `deviations`: their surprise in standard
        deviations; `variance`: of that sum.
        """
        share = 0.5 if self.variance > SURPRISE_KEPT else 1.0
        return replace(
            self,
            num_tokens=self.num_tokens + num_tokens,
            surprise=share * self.surprise + deviations * math.sqrt(max(variance, 0.0)),
            variance=share * self.variance + max(variance, 0.0),
        )

    @property
    def deviations(self) -> float:
        """How much more surprising its tokens are than their entropies say, in standard deviations."""
        return self.surprise / math.sqrt(max(self.variance, 1.0))

    def passed(self) -> Trust:
        """Return the trust after a check that found no fault."""
        return replace(self, num_passed=self.num_passed + 1, num_clean=self.num_clean + 1, num_unchecked=0)

    def missed(self, at: float) -> Trust:
        """Return the trust after a check without a verdict. After `UNCHECKED_MAX` in a row it has lapsed."""
        num_unchecked = self.num_unchecked + 1
        found = replace(self, num_missed=self.num_missed + 1, num_unchecked=num_unchecked)
        if num_unchecked < UNCHECKED_MAX or self.is_new:
            return found
        reason = f"a newcomer again: {num_unchecked} checks in a row ended without a verdict"
        return replace(found, num_clean=0).noted(at, reason)

    def failed(self, at: float, reason: str) -> Trust:
        """Return the trust after a check that found a fault: in quarantine."""
        found = replace(self, num_failed=self.num_failed + 1, num_clean=0, num_unchecked=0, is_quarantined=True)
        found = replace(found, surprise=0.0, variance=0.0)
        return found.noted(at, reason)


@dataclass(frozen=True, slots=True)
class DrawnCheck:
    """A check of a group, as the ledger stores it. `ref`: the newest weights that the worker says it sampled with;
    `holds`: the group is not trained before the verdict; `is_from_stream`: the worker's engine draws from the head's
    random numbers; `form`: to which it rounds its weights.
    """

    number: int
    worker_id: str
    ticket: str
    ref: SnapshotRef
    holds: bool
    is_from_stream: bool
    form: str = ""


@dataclass(frozen=True, slots=True)
class TicketRest:
    """The rest of a ticket. It gets no leases until `until` (seconds; may be past). `num_rests`: not cancelled yet."""

    ticket: str
    until: float
    num_rests: int


@dataclass(slots=True)
class OpenCheck:
    """A drawn check without a verdict. `until`: when it is overdue, or is given up if it is; `checker`: who checks it;
    empty: no worker yet; `missed_by`: who could not.
    """

    drawn: DrawnCheck
    until: float
    checker: str = ""
    missed_by: tuple[str, ...] = ()

    def give_to(self, worker_id: str) -> None:
        """Have this worker check the group; empty: nobody yet."""
        self.checker = worker_id

    def miss(self, worker_id: str) -> None:
        """Record that this worker could not check it."""
        self.missed_by += (worker_id,)


@dataclass(slots=True)
class TrustBook:
    """The trust by ticket, and the checks by group, the oldest first, which also ends first: the open ones, and the
    late ones, whose group is no longer held and whose verdict may still come.
    """

    open: dict[int, OpenCheck] = field(default_factory=dict)
    late: dict[int, OpenCheck] = field(default_factory=dict)
    _of: dict[str, Trust] = field(default_factory=dict)
    _num_held: dict[str, int] = field(default_factory=dict)

    def begin(self, check: OpenCheck) -> None:
        """Add an open check."""
        self.open[check.drawn.number] = check
        if check.drawn.holds:
            self._num_held[check.drawn.ticket] = self.num_held(check.drawn.ticket) + 1

    def end(self, number: int) -> OpenCheck | None:
        """Remove an open check and return it; None if there is none of this group."""
        check = self.open.pop(number, None)
        if check is not None and check.drawn.holds:
            self._num_held[check.drawn.ticket] -= 1
            if not self._num_held[check.drawn.ticket]:
                del self._num_held[check.drawn.ticket]
        return check

    def asked(self, number: int, checker: str) -> OpenCheck | None:
        """Return the check of this group, open or late, if this worker does it."""
        check = self.open.get(number) or self.late.get(number)
        return check if check is not None and check.checker == checker else None

    def interrupt(self, worker_id: str, is_gone: bool) -> None:
        """Ask others for the open checks of this worker. Of one that is gone no late verdict comes either."""
        for check in self.open.values():
            if check.checker == worker_id:
                check.give_to("")
        if is_gone:
            self.late = {number: one for number, one in self.late.items() if one.checker != worker_id}

    def wait_longer(self, check: OpenCheck, until: float) -> None:
        """Wait until then for the late verdict of an overdue check."""
        check.until = until
        self.late[check.drawn.number] = check

    def end_late(self, number: int) -> bool:
        """Forget a late check. Return whether there was one of this group."""
        return self.late.pop(number, None) is not None

    def expire_late(self, now: float) -> bool:
        """Give up the late checks that are overdue again. Return whether there were any."""
        num_before = len(self.late)
        while self.late and self.late[number := next(iter(self.late))].until <= now:
            del self.late[number]
        return len(self.late) < num_before

    def next_at(self) -> float | None:
        """Return the time at which the next check becomes overdue or is given up, or None."""
        firsts = [next(iter(checks.values())).until for checks in (self.open, self.late) if checks]
        return min(firsts, default=None)

    def num_held(self, ticket: str) -> int:
        """Return how many groups of the ticket wait for a verdict before they may be trained."""
        return self._num_held.get(ticket, 0)

    def of(self, ticket: str) -> Trust:
        """Return the trust in this ticket; a newcomer's if the ticket is unknown."""
        return self._of.get(ticket) or Trust()

    def put(self, ticket: str, trust: Trust) -> None:
        """Set the trust in this ticket."""
        self._of.pop(ticket, None)
        self._of[ticket] = trust
        if len(self._of) > TICKETS_MAX:
            del self._of[next(iter(self._of))]

    def all(self) -> dict[str, Trust]:
        """Return the trust in every ticket that has delivered a group."""
        return dict(self._of)
