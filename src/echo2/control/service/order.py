"""Decides the order in which a model's requests are carried out.

A client numbers them 1, 2, 3, ... and sends several at once, the last chunk of a batch possibly first: a request waits
until those before it are there. A number that was passed already belongs to a client that counts anew (one that loaded
a state into its model does), and such a request goes in the order of its arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: How long a request waits for those before it: clients send a request again for five minutes, then give it up.
GAP_SECONDS = 330.0
#: Requests of a model that wait for one before them.
HELD_MAX = 4096


@dataclass(frozen=True, slots=True)
class Released:
    """A request whose turn it is. `missing`: the number of one before it that never came; 0: there is none."""

    request: str
    missing: int = 0


@dataclass(slots=True)
class ModelOrder:
    """The requests of one model. `next_number`: what the next one is expected to have."""

    next_number: int = 1
    _held: dict[int, tuple[str, float]] = field(default_factory=dict)

    def arrive(self, request: str, number: int | None, now: float) -> list[Released]:
        """A request came; those whose turn it is now, in order."""
        if number is None or number < self.next_number or number in self._held:
            return [Released(request)]
        self._held[number] = (request, now)
        return self._drain()

    @property
    def num_held(self) -> int:
        """How many wait for one before them."""
        return len(self._held)

    def waits_for(self, request: str) -> int:
        """The number that a held request waits for; 0: it isn't held."""
        return self.next_number if any(held == request for held, _ in self._held.values()) else 0

    def expire(self, now: float) -> list[Released]:
        """Those that waited too long, each with the number that never came, and those that waited for them alone."""
        late = [number for number, (_, since) in self._held.items() if now - since >= GAP_SECONDS]
        if not late:
            return []
        missing, upto = self.next_number, max(late)
        out = [Released(self._held.pop(number)[0], missing) for number in sorted(self._held) if number <= upto]
        self.next_number = upto + 1
        return out + self._drain()

    def _drain(self) -> list[Released]:
        out = []
        while self.next_number in self._held:
            out.append(Released(self._held.pop(self.next_number)[0]))
            self.next_number += 1
        return out
