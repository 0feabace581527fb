"""The record of possible misbehaviour, as plain data: the credit of each stranger's ticket and the patience left for
each worker. It outlives connections. Rests and expulsions outlive the head, too; credit, patience and what the learner
measured begin anew with it. `strangers` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from echo2.control.head.lazy_heap import LazyHeap

#: Refusals that a worker may cause at once, what each lease that it was granted adds to them, and how many come back
#: in a second. An honest worker's result is refused once for a lease at most (late, duplicate), or twice where the
#: answer was lost.
PATIENCE, PATIENCE_PER_LEASE, PATIENCE_PER_SECOND = 64.0, 2.0, 0.1
#: What a refusal costs of it: of a result that no honest worker sends, and of any other.
MALFORMED_COST, REFUSED_COST = 3.0, 1.0
#: Seconds of the first expulsion, doubled at each further one, up to the last.
EXPELLED_SECONDS = (60.0, 3600.0)
#: The largest mean |log ratio| that a worker may have at lag 0, in nats a token, and the tokens over which it is taken.
#: Engines in bfloat16 are at .005, in 8 bits at .02 to .05; the wrong weights, or logprobs of another temperature or
#: support than was sampled from, are above it (docs/engines.md).
MISMATCH_MAX, MISMATCH_TOKENS = 0.1, 1024.0
#: The mean surprise over as many tokens, in nats a token either way, above which all groups of a worker are checked:
#: some six standard deviations of what is drawn honestly. No proof: groups that teach nothing are not among them, and
#: those that are left hold more of what is rare.
SURPRISE_ODD = 0.3
#: Accepted results that make up for one rest of a ticket: its next one is half as long.
RESULTS_PER_PARDON = 16
#: Workers whose conduct is remembered; those heard of longest ago go first.
CONDUCTS_MAX = 10_000


@dataclass(slots=True)
class Standing:
    """One ticket's. `credit`: leases that it may hold at once; `num_rests`: rests that are not made up for yet."""

    credit: int = 1
    num_held: int = 0
    num_rests: int = 0
    num_good: int = 0


@dataclass(slots=True)
class Standings:
    """By ticket. `rests`: until when those rest that do, in seconds."""

    _of: dict[str, Standing] = field(default_factory=dict)
    _held: dict[int, str] = field(default_factory=dict)
    rests: LazyHeap[str, float] = field(default_factory=LazyHeap)

    def of(self, ticket: str) -> Standing:
        """The standing of this ticket; a new one where nothing is known of it."""
        return self._of.setdefault(ticket, Standing())

    def opened(self, ticket: str, lease_id: int) -> None:
        """A stranger's worker was granted this lease."""
        self._held[lease_id] = ticket
        self.of(ticket).num_held += 1

    def closed(self, lease_id: int) -> str | None:
        """The ticket whose lease this was; None where it was no stranger's."""
        ticket = self._held.pop(lease_id, None)
        if ticket is not None:
            self.of(ticket).num_held -= 1
        return ticket

    def rest(self, ticket: str, until: float) -> None:
        """The ticket gets no leases until then."""
        self.of(ticket).num_rests += 1
        self.rests.set(ticket, until)

    def end_rests(self, now: float) -> bool:
        """Whether the rest of any ticket has ended: it may hold a lease again."""
        rested = self.rests.pop_until(now)
        for ticket in rested:
            self.of(ticket).credit = max(1, self.of(ticket).credit)
        return bool(rested)


@dataclass(slots=True)
class Conduct:
    """One worker's. `patience` as it was at `at`; `num_failed`: leases in a row without a result, of a stranger;
    `num_refused` since it was last expelled; `expelled_for`: why it was. `mismatch`: the mean |log ratio| at lag 0 over
    the last tokens that it was measured on, None while there were too few; `surprise`: likewise the mean of -logprob
    less the entropy; `measured`: tokens and sums of those since.
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


@dataclass(slots=True)
class Conducts:
    """By worker. `to_expel`: who is to be expelled now, and why."""

    to_expel: dict[str, str] = field(default_factory=dict)
    _of: dict[str, Conduct] = field(default_factory=dict)

    def of(self, worker_id: str) -> Conduct:
        """The conduct of this worker; a new one where nothing is known of it."""
        conduct = self._of.pop(worker_id, None) or Conduct()
        self._of[worker_id] = conduct
        if len(self._of) > CONDUCTS_MAX:
            del self._of[next(iter(self._of))]
        return conduct

    def granted(self, worker_id: str) -> None:
        """The worker got a lease, and may cause the refusals that one may bring."""
        self.of(worker_id).patience += PATIENCE_PER_LEASE

    def refused(self, worker_id: str, cost: float, reason: str, now: float) -> None:
        """Something that this worker sent was refused."""
        conduct = self.of(worker_id)
        back = max(0.0, min(PATIENCE - conduct.patience, (now - conduct.at) * PATIENCE_PER_SECOND))
        conduct.patience += back - cost
        conduct.at, conduct.num_refused = now, conduct.num_refused + 1
        if conduct.patience < 0:
            self.to_expel[worker_id] = (
                f"{conduct.num_refused} of its results and reports were refused, too many for its leases; the last: "
                f"{reason}"
            )

    def measured(self, worker_id: str, num_tokens: float, abs_log_ratio: float, surprise: float = 0.0) -> None:
        """Tokens of this worker at lag 0, and the sums of their |log ratio| to the learner's logprobs and of how much
        more surprising they were than the entropy says.
        """
        conduct = self.of(worker_id)
        before = conduct.measured
        tokens, total, surprises = before[0] + num_tokens, before[1] + abs_log_ratio, before[2] + surprise
        conduct.measured = (tokens, total, surprises)
        if tokens < MISMATCH_TOKENS:
            return
        conduct.mismatch, conduct.surprise, conduct.measured = total / tokens, surprises / tokens, (0.0, 0.0, 0.0)
        if conduct.mismatch > MISMATCH_MAX:
            self.to_expel[worker_id] = (
                f"its logprobs are {conduct.mismatch:.3g} nats a token away from the learner's for the same weights, "
                f"over {tokens:.0f} tokens; {MISMATCH_MAX:g} is allowed. Its engine samples from other weights, or "
                "reports logprobs of another distribution than it samples from (temperature, top-k, top-p)"
            )

    def expel(self, worker_id: str, reason: str, now: float) -> float:
        """For how many seconds it is to stay away."""
        conduct = self.of(worker_id)
        seconds = min(EXPELLED_SECONDS[1], EXPELLED_SECONDS[0] * 2.0 ** min(conduct.num_expelled, 10))
        conduct.num_refused, conduct.num_expelled = 0, conduct.num_expelled + 1
        conduct.patience, conduct.at, conduct.expelled_until = PATIENCE, now, now + seconds
        conduct.expelled_for = reason
        return seconds

    def mismatch(self, worker_id: str) -> float | None:
        """The mean |log ratio| of this worker at lag 0, in nats a token; None: too few tokens to tell."""
        conduct = self._of.get(worker_id)
        return None if conduct is None else conduct.mismatch

    def is_odd(self, worker_id: str) -> bool:
        """Whether its tokens are more or less surprising than the entropy says."""
        conduct = self._of.get(worker_id)
        return conduct is not None and abs(conduct.surprise or 0.0) > SURPRISE_ODD

    def expulsion(self, worker_id: str, now: float) -> Conduct | None:
        """The conduct of a worker that is expelled; None if it is not."""
        conduct = self._of.get(worker_id)
        return conduct if conduct is not None and conduct.expelled_until > now else None

    def expelled(self, now: float) -> list[tuple[str, Conduct]]:
        """Who is."""
        return [(name, conduct) for name, conduct in self._of.items() if conduct.expelled_until > now]
