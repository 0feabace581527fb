"""Decides the order in which a model's requests are carried out, and which tenant of a shared learner comes next.

A client numbers its requests 1, 2, 3, ... and sends several at once, the last chunk of a batch possibly first. A
request waits until all earlier numbers have arrived. A number that was passed already belongs to a client that started
counting again (for example after it loaded a state into its model); such requests run in the order of arrival.

The next tenant is the waiting one that has used the fewest seconds: start-time fair queueing (Goyal, Vin, Cheng 1996)
with pieces of work for packets. Tenants that wait without a gap get equal shares of the seconds, whatever the size of
their pieces; a returning tenant gets no credit for its absence; and no tenant waits longer than one piece of each other
tenant takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: How long a request waits for earlier ones: clients repeat a request for five minutes, then give up.
GAP_SECONDS = 330.0
#: The largest number of a request, and of the next one that is expected: a column of 64 bits holds it.
NUMBER_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Released:
    """A request that may run now. `missing`: the number of an earlier request that never arrived; 0: none."""

    request: str
    missing: int = 0


@dataclass(slots=True)
class ModelOrder:
    """The requests of one model. `next_number`: the expected number of the next request."""

    next_number: int = 1
    _waiting: dict[int, tuple[str, float]] = field(default_factory=dict)

    def arrive(self, request: str, number: int | None, now: float) -> list[Released]:
        """Add a request; return those that may run now, in order."""
        if number is None or number < self.next_number or number in self._waiting:
            return [Released(request)]
        self._waiting[number] = (request, now)
        return self._drain()

    def copy(self) -> ModelOrder:
        """Return an order that can be changed without a change of this one."""
        return ModelOrder(self.next_number, dict(self._waiting))

    @property
    def num_held(self) -> int:
        """How many requests wait for an earlier one."""
        return len(self._waiting)

    def waits_for(self, request: str) -> int:
        """Return the number that a held request waits for; 0 if it is not held."""
        return self.next_number if any(one == request for one, _ in self._waiting.values()) else 0

    def expire(self, now: float) -> list[Released]:
        """Release requests that waited too long, each with the number that never arrived, and those they blocked."""
        late = [number for number, (_, since) in self._waiting.items() if now - since >= GAP_SECONDS]
        if not late:
            return []
        missing, upto = self.next_number, max(late)
        out = [Released(self._waiting.pop(number)[0], missing) for number in sorted(self._waiting) if number <= upto]
        self.next_number = min(upto + 1, NUMBER_MAX)
        return out + self._drain()

    def _drain(self) -> list[Released]:
        out = []
        while self.next_number in self._waiting:
            out.append(Released(self._waiting.pop(self.next_number)[0]))
            self.next_number = min(self.next_number + 1, NUMBER_MAX)
        return out


class FairQueue:
    """Owners of work and the seconds that each has used. An owner is charged whether it is waiting or not."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._now = 0.0  # virtual time: the seconds used by the owner chosen last, at that moment

    def wait(self, owner: str) -> None:
        """The owner has work from now on."""
        if owner not in self._waiting:
            self._used[owner] = max(self._used.get(owner, 0.0), self._now)
            self._waiting.add(owner)

    def rest(self, owner: str) -> None:
        """The owner has no more work. Seconds that it used beyond the virtual time are remembered."""
        self._waiting.discard(owner)
        self._used = {name: used for name, used in self._used.items() if name in self._waiting or used > self._now}

    def charge(self, owner: str, seconds: float) -> None:
        self._used[owner] = self._used.get(owner, 0.0) + seconds

    def next(self) -> str | None:
        """Choose the waiting owner that has used the fewest seconds; None if no owner waits."""
        chosen = min(self._waiting, key=lambda owner: (self._used[owner], owner), default=None)
        if chosen is not None:
            self._now = self._used[chosen]
        return chosen
