"""What is known of strangers, and when a ticket has lost its credit; `checks` and `strangers` have the other rules. The
results of checks and the running checks are recorded in the ledger and outlive the head. The credit of each ticket, and
the patience left for each worker, outlive connections. Rests and expulsions outlive the head, too; credit, patience and
the learner's measurements start again with it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from echo2.core.decide.lazy_heap import LazyHeap
from echo2.core.types import Backoff, SnapshotRef

#: Clean checks after which a ticket is no longer a newcomer.
NEWCOMER_CHECKS = 4
#: Checks in a row without a verdict after which a ticket is a newcomer again: nothing is known of what it delivers now.
UNCHECKED_MAX = 4
#: Clean checks in a row that end a quarantine.
CLEAN_TO_LEAVE = 8
#: Standard deviations by which the tokens of all checked groups of a ticket together may be more or less surprising
#: than their entropies say: a worker that samples a little too cold passes each check alone. The sums are halved when
#: their variance reaches so many nats^2, so that a bias by rounding, far below the spread, never adds up to a fault.
SURPRISE_MAX, SURPRISE_KEPT = 7.0, 30_000.0
#: Events kept in a ticket's history.
HISTORY_MAX = 16
#: Tickets that are remembered; the least recently updated are dropped first.
TICKETS_MAX = 10_000
#: Refusals that a worker may cause in a burst; refusals added per granted lease; refusals restored per second. An
#: honest worker's result is refused at most once per lease (late, duplicate), or twice if the answer was lost.
PATIENCE, PATIENCE_PER_LEASE, PATIENCE_PER_SECOND = 64.0, 2.0, 0.1
#: Cost of a refusal in patience: for a result that no honest worker sends, and for any other.
MALFORMED_COST, REFUSED_COST = 3.0, 1.0
#: Seconds of the first expulsion, doubled at each further one, up to the second value.
EXPELLED_SECONDS = Backoff(60.0, 3600.0)
#: The largest mean |log ratio| that a worker may have at lag 0, in nats per token, and the tokens that the mean covers.
#: Engines in bfloat16 are at .005, in 8 bits at .02 to .05; wrong weights, or logprobs of another temperature or
#: support than was sampled from, exceed the limit (docs/engines.md).
MISMATCH_MAX, MISMATCH_TOKENS = 0.1, 1024.0
#: The fewest tokens that tell a mismatch. Tokens at lag 0 are rare with a staleness bound, so a mean over fewer than
#: `MISMATCH_TOKENS` counts, too, where it exceeds the limit by the root of how many fewer they are.
MISMATCH_TOKENS_MIN = 128.0
#: The same for workers that round their weights, whatever the form: a coarser one allows no more.
MISMATCH_ROUNDED_MAX = 0.25
#: If the absolute mean surprise over as many tokens exceeds this, in nats per token, all groups of the worker are
#: checked. It is about six standard deviations of honest sampling, but no proof of fraud: groups without a gradient are
#: not measured, and the others contain more rare tokens.
SURPRISE_ODD = 0.3
#: Credit that a ticket loses by a lease without a result; a result earns 1. A ticket with more than a third of its
#: leases failing gets fewer and fewer.
LOST_CREDIT = 2
#: Accepted results that cancel one rest of a ticket: its next rest is half as long.
RESULTS_PER_PARDON = 16
#: Workers whose penalty is remembered; the least recently used are dropped first.
PENALTIES_MAX = 10_000


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
        return replace(self, num_passed=self.num_passed + 1, num_clean=self.num_clean + 1, num_unchecked=0)

    def missed(self, at: float) -> Trust:
        """Return the trust after a check without a verdict. After `UNCHECKED_MAX` in a row it has lapsed."""
        num_unchecked = self.num_unchecked + 1
        trust = replace(self, num_missed=self.num_missed + 1, num_unchecked=num_unchecked)
        if num_unchecked < UNCHECKED_MAX or self.is_new:
            return trust
        reason = f"a newcomer again: {num_unchecked} checks in a row ended without a verdict"
        return replace(trust, num_clean=0).noted(at, reason)

    def failed(self, at: float, reason: str) -> Trust:
        """Return the trust after a check that found a fault: in quarantine."""
        trust = replace(self, num_failed=self.num_failed + 1, num_clean=0, num_unchecked=0, is_quarantined=True)
        trust = replace(trust, surprise=0.0, variance=0.0)
        return trust.noted(at, reason)


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
        """Have this worker check the group; empty: no worker yet."""
        self.checker = worker_id

    def miss(self, worker_id: str) -> None:
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
        """Ask others for the open checks of this worker. A worker that is gone sends no late verdict either."""
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
        self._of.pop(ticket, None)
        self._of[ticket] = trust
        if len(self._of) > TICKETS_MAX:
            del self._of[next(iter(self._of))]

    def all(self) -> dict[str, Trust]:
        """Return the trust in every ticket that has delivered a group."""
        return dict(self._of)


@dataclass(slots=True)
class TicketCredit:
    """The account of one ticket. `credit`: leases that it may hold at once; `num_rests`: rests not cancelled yet."""

    credit: int = 1
    num_held: int = 0
    num_rests: int = 0
    num_good: int = 0


@dataclass(slots=True)
class TicketCredits:
    """The credits by ticket. `rests`: until when each resting ticket rests, in seconds."""

    _of: dict[str, TicketCredit] = field(default_factory=dict)
    _tickets: dict[int, str] = field(default_factory=dict)
    rests: LazyHeap[str, float] = field(default_factory=LazyHeap)

    def of(self, ticket: str) -> TicketCredit:
        """Return the account of this ticket; a new one if the ticket is unknown."""
        return self._of.setdefault(ticket, TicketCredit())

    def opened(self, ticket: str, lease_id: int) -> None:
        self._tickets[lease_id] = ticket
        self.of(ticket).num_held += 1

    def closed(self, lease_id: int) -> str | None:
        """Record the end of a lease and return its ticket; None if it was not a stranger's."""
        ticket = self._tickets.pop(lease_id, None)
        if ticket is not None:
            self.of(ticket).num_held -= 1
        return ticket

    def earn(self, ticket: str, most: int) -> bool:
        """Raise the credit of this ticket, up to `most`. Return whether its results cancelled a rest."""
        account = self.of(ticket)
        account.credit = min(account.credit + 1, most)
        account.num_good += 1
        is_pardoned = account.num_good >= RESULTS_PER_PARDON
        if is_pardoned:
            account.num_good, account.num_rests = 0, max(0, account.num_rests - 1)
        return is_pardoned

    def blame(self, ticket: str, more: int) -> bool:
        """Reduce the credit of this ticket, by `more` beyond the usual. Return whether it must rest now."""
        account = self.of(ticket)
        account.credit = max(0, account.credit - LOST_CREDIT - more)
        account.num_good = 0
        return account.credit == 0 and not self.is_resting(ticket)

    def is_resting(self, ticket: str) -> bool:
        """Whether this ticket gets no leases for a while."""
        return self.rests.get(ticket) is not None

    def restore(self, old: TicketRest, now: float) -> None:
        self.of(old.ticket).num_rests = old.num_rests
        if old.until > now:
            self.rests.set(old.ticket, old.until)

    def recorded(self, ticket: str) -> TicketRest:
        return TicketRest(ticket, self.rests.get(ticket) or 0.0, self.of(ticket).num_rests)

    def rest(self, ticket: str, until: float, is_fault: bool = True) -> None:
        """Give the ticket no leases until then, or until a longer rest ends. `is_fault`: its next rest is longer."""
        self.of(ticket).num_rests += is_fault
        self.rests.set(ticket, max(until, self.rests.get(ticket) or until))

    def end_rests(self, now: float) -> bool:
        """End the rests that are over, so that these tickets may hold a lease again. Return whether there were any."""
        rested = self.rests.pop_until(now)
        for ticket in rested:
            self.of(ticket).credit = max(1, self.of(ticket).credit)
        return bool(rested)


@dataclass(slots=True)
class WorkerPenalty:
    """How a worker has behaved. `patience`: its value at time `at`; `num_failed`: a stranger's leases in a row without
    a result; `num_refused`: since the last expulsion; `expelled_for`: reason of the last expulsion. `mismatch`: mean
    |log ratio| at lag 0 over the last judged tokens, None if there were none; `surprise`: likewise the mean of
    -logprob less the entropy; `measured`: number of tokens and both sums since then. `sampled_with`: the
    newest weights of its accepted results.
    """

    patience: float = PATIENCE
    at: float = 0.0
    num_failed: int = 0
    num_refused: int = 0
    num_expelled: int = 0
    expelled_until: float = 0.0
    expelled_for: str = ""
    mismatch: float | None = None
    surprise: float | None = None
    measured: tuple[float, float, float] = (0.0, 0.0, 0.0)
    sampled_with: SnapshotRef | None = None


@dataclass(slots=True)
class WorkerPenalties:
    """The records of workers. `to_expel`: workers to expel now -> reason, until `take_to_expel`."""

    to_expel: dict[str, str] = field(default_factory=dict)
    _of: dict[str, WorkerPenalty] = field(default_factory=dict)

    def of(self, worker_id: str) -> WorkerPenalty:
        """Return the record of this worker; a new one if the worker is unknown."""
        penalty = self._of.pop(worker_id, None) or WorkerPenalty()
        self._of[worker_id] = penalty
        if len(self._of) > PENALTIES_MAX:
            del self._of[next(iter(self._of))]
        return penalty

    def take_to_expel(self) -> list[tuple[str, str]]:
        """Return the workers to expel now, with reasons, once."""
        to_expel = list(self.to_expel.items())
        self.to_expel.clear()
        return to_expel

    def distrust(self, worker_id: str, reason: str) -> None:
        self.to_expel[worker_id] = reason

    def succeed(self, worker_id: str, newest: SnapshotRef | None) -> None:
        """Record an accepted result. `newest`: the newest weights that the worker has had."""
        penalty = self.of(worker_id)
        penalty.num_failed, penalty.sampled_with = 0, newest

    def fail(self, worker_id: str) -> int:
        """Record a lease without a result. Return how many in a row."""
        penalty = self.of(worker_id)
        penalty.num_failed += 1
        return penalty.num_failed

    def restore(self, worker_id: str, num_expelled: int, until: float, reason: str) -> None:
        penalty = self.of(worker_id)
        penalty.num_expelled, penalty.expelled_until, penalty.expelled_for = num_expelled, until, reason

    def granted(self, worker_id: str) -> None:
        """Record a granted lease, which adds to the refusals that the worker may cause."""
        self.of(worker_id).patience += PATIENCE_PER_LEASE

    def refused(self, worker_id: str, cost: float, reason: str, now: float) -> None:
        """Record that a result or report of this worker was refused."""
        penalty = self.of(worker_id)
        back = max(0.0, min(PATIENCE - penalty.patience, (now - penalty.at) * PATIENCE_PER_SECOND))
        penalty.patience += back - cost
        penalty.at, penalty.num_refused = now, penalty.num_refused + 1
        if penalty.patience < 0:
            self.distrust(
                worker_id,
                f"{penalty.num_refused} of its results and reports were refused, too many for its leases; the last: "
                f"{reason}",
            )

    def measured(
        self, worker_id: str, num_tokens: float, abs_log_ratio: float, surprise: float = 0.0, form: str = ""
    ) -> None:
        """Record tokens of this worker at lag 0, with the sums of their |log ratio| to the learner's logprobs and of
        their -logprob less the entropy. `form`: to which it rounds its weights.
        """
        penalty = self.of(worker_id)
        before = penalty.measured
        tokens, total, surprises = before[0] + num_tokens, before[1] + abs_log_ratio, before[2] + surprise
        penalty.measured = (tokens, total, surprises)
        if tokens < MISMATCH_TOKENS_MIN:
            return
        mismatch, is_all = total / tokens, tokens >= MISMATCH_TOKENS
        most = (MISMATCH_ROUNDED_MAX if form else MISMATCH_MAX) * math.sqrt(max(1.0, MISMATCH_TOKENS / tokens))
        if is_all:
            penalty.surprise = surprises / tokens
        if is_all or mismatch > most:
            penalty.mismatch, penalty.measured = mismatch, (0.0, 0.0, 0.0)
        if mismatch > most:
            why = f"The form {form} is too coarse for this model, or its" if form else "Its"
            self.distrust(
                worker_id,
                f"its logprobs are {mismatch:.3g} nats a token away from the learner's for the same weights, "
                f"over {tokens:.0f} tokens; {most:.2g} is allowed. {why} engine samples from other weights, or "
                "reports logprobs of another distribution than it samples from (temperature, top-k, top-p)",
            )

    def expel(self, worker_id: str, reason: str, now: float) -> tuple[float, int]:
        """Expel the worker. Return for how many seconds, and how often it has been expelled."""
        penalty = self.of(worker_id)
        penalty.num_refused, penalty.num_expelled = 0, penalty.num_expelled + 1
        seconds = EXPELLED_SECONDS.after(penalty.num_expelled)
        penalty.patience, penalty.at, penalty.expelled_until = PATIENCE, now, now + seconds
        penalty.expelled_for = reason
        return seconds, penalty.num_expelled

    def mismatch(self, worker_id: str) -> float | None:
        """Return the mean |log ratio| of this worker at lag 0, in nats per token; None if there were too few tokens."""
        penalty = self._of.get(worker_id)
        if penalty is None:
            return None
        if penalty.mismatch is not None:
            return penalty.mismatch
        tokens, total, _ = penalty.measured
        return total / tokens if tokens >= MISMATCH_TOKENS_MIN else None

    def is_odd(self, worker_id: str) -> bool:
        """Whether the worker's tokens are more or less surprising than their entropy predicts."""
        penalty = self._of.get(worker_id)
        return penalty is not None and abs(penalty.surprise or 0.0) > SURPRISE_ODD

    def expulsion(self, worker_id: str, now: float) -> WorkerPenalty | None:
        """Return the record of an expelled worker; None if it is not expelled."""
        penalty = self._of.get(worker_id)
        return penalty if penalty is not None and penalty.expelled_until > now else None

    def expelled(self, now: float) -> list[tuple[str, WorkerPenalty]]:
        return [(name, penalty) for name, penalty in self._of.items() if penalty.expelled_until > now]
