"""The machines that the run rents, and when it reviews its fleet. `standby` decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from echo2.core.types import Backoff
from echo2.head.fleet.decide.activation import ActivationLoop, Candidate, Change

#: Seconds between two reviews of the fleet: the cost of each grows with the fleet.
LOOK_SECONDS = 5.0
#: Seconds after which a rented machine that has not joined is given up.
RENT_SECONDS = 900.0
#: Seconds that a rented machine is on standby, or without its worker, before it is returned.
RETURN_SECONDS = 300.0
#: Seconds between two tries of an offer whose hook fails: the first value, doubled at each failure up to the second.
RETRY_SECONDS = Backoff(15.0, 900.0)


@dataclass(slots=True)
class Rentals:
    """`needed_rate`: rollouts per second, None while it is unknown, infinite if no rate is enough. By offer: when each
    machine was rented that has not joined yet; the hook's failures in a row, and until when the offer is skipped. By
    worker that is lost: the offer of its machine, and the time of the loss.
    """

    next_at: float = 0.0
    needed_rate: float | None = None
    _loop: ActivationLoop = field(default_factory=ActivationLoop)
    _rented: dict[str, list[float]] = field(default_factory=dict)
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)
    _lost: dict[str, tuple[str, float]] = field(default_factory=dict)

    def reviewed(self, now: float) -> None:
        """The fleet was reviewed; the next review is due in a while."""
        self.next_at = now + LOOK_SECONDS

    def need(self, rate: float) -> bool:
        """Set the needed rate. Return whether it is the first one."""
        is_first, self.needed_rate = self.needed_rate is None, rate
        return is_first

    def change(self, rate: float, candidates: Sequence[Candidate], now: float) -> Change:
        """Return whom to activate and to release, with this needed rate."""
        return self._loop.update(now, rate, candidates)

    def rent(self, offer: str, now: float) -> None:
        """A machine of this offer was rented, and is waited for."""
        self._rented.setdefault(offer, []).append(now)

    def join(self, worker_id: str, offer: str, is_known: bool) -> bool:
        """A worker joined. Return whether its machine was just rented. `is_known`: the worker is in the fleet."""
        was_lost = self._lost.pop(worker_id, None) is not None
        if is_known or was_lost or not (rented := self._rented.get(offer)):
            return False
        rented.pop(0)
        self._failures.pop(offer, None)
        return True

    def lose(self, worker_id: str, offer: str, now: float) -> None:
        """The worker of a rented machine is lost."""
        self._lost[worker_id] = (offer, now)

    def fail(self, offer: str, now: float) -> None:
        """The offer's hook failed: skip it for a while, longer after each failure in a row."""
        if rented := self._rented.get(offer):
            rented.pop()
        num_failures = self._failures.get(offer, (0, 0.0))[0] + 1
        seconds = RETRY_SECONDS.after(num_failures)
        self._failures[offer] = (num_failures, now + seconds)

    def is_skipped(self, offer: str, now: float) -> bool:
        """Whether the offer's hook failed and is not tried again yet."""
        return now < self._failures.get(offer, (0, 0.0))[1]

    def num_coming(self, offer: str) -> int:
        """Return how many machines of this offer are rented and have not joined yet."""
        return len(self._rented.get(offer, ()))

    def num_out(self, offer: str, present: Iterable[str]) -> int:
        """Return how many machines of this offer are rented. `present`: the offer of each worker in the fleet."""
        lost = (name for name, _ in self._lost.values())
        return self.num_coming(offer) + sum(name == offer for name in (*present, *lost))

    def pop_overdue(self, now: float) -> list[str]:
        """Give up the machines that have not joined in time. Return the offer of each."""
        overdue = [name for name, at in self._rented.items() for since in at if now - since >= RENT_SECONDS]
        for name in overdue:
            del self._rented[name][0]
        return overdue

    def pop_lost(self, now: float) -> list[tuple[str, str]]:
        """Forget the workers that were lost long ago. Return (worker, offer) of each."""
        lost = self._lost.items()
        gone = [(worker_id, offer) for worker_id, (offer, since) in lost if now - since >= RETURN_SECONDS]
        for worker_id, _ in gone:
            del self._lost[worker_id]
        return gone
