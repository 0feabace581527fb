"""Time in a simulation: a priority queue of (time, sequence, actor, event) and a virtual clock.

Ties fall in the order of posting. An actor that dies and comes back has a new *life*; what was on its way to the old
one is dropped, as a kernel drops what comes for a closed socket.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from echo2.control.machine import Event

#: Events after which a simulation counts as running in circles.
MAX_EVENTS = 500_000_000


class Kill(Event):
    """kill -9."""


class Start(Event):
    """The process starts (again), with nothing but what was durable."""


class Actor(ABC):
    """A process: up or down, with a name and a number of lives so far."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.up = False
        world.actors[name] = self

    def post(self, delay_seconds: float, event: object) -> None:
        """Tell myself later, if I still live then."""
        self.world.post(delay_seconds, self.name, event)

    @abstractmethod
    def handle(self, event: object) -> None:
        """Take one event at `world.now`."""

    def starts(self) -> None:
        """A new life: what was sent to the dead is not for the living."""
        self.life += 1
        self.up = True

    def dies(self) -> None:
        """The life ends; what was sent to it is dropped."""
        self.life += 1
        self.up = False


class SimWorld:
    """The clock, the queue, the actors, and the one source of chance. `check` is shown each machine of `control/` after
    each of its events.
    """

    def __init__(self, seed: int, check: Callable[[object], None] = lambda machine: None) -> None:
        self.now = 0.0
        self.check = check
        self.rng = random.Random(seed)
        self.actors: dict[str, Actor] = {}
        self.num_events = 0
        self._queue: list[tuple[float, int, str, int | None, object]] = []
        self._sequence = 0

    def post(self, delay_seconds: float, actor: str, event: object) -> None:
        """Let `event` happen to this life of `actor` after a delay (never before now)."""
        self._push(delay_seconds, actor, self.actors[actor].life, event)

    def post_always(self, delay_seconds: float, actor: str, event: object) -> None:
        """Likewise, whatever life it is in then: a fault that strikes the machine."""
        self._push(delay_seconds, actor, None, event)

    def _push(self, delay_seconds: float, actor: str, life: int | None, event: object) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_seconds), self._sequence, actor, life, event))

    def step(self) -> bool:
        """Let the next event happen; False when nothing is left."""
        if not self._queue or self.num_events >= MAX_EVENTS:
            return False
        self.now, _, name, life, event = heapq.heappop(self._queue)
        self.num_events += 1
        actor = self.actors[name]
        if life in (None, actor.life) and actor.up != isinstance(event, Start):
            if isinstance(event, Start):
                actor.starts()
            actor.handle(event)
        return True

    @property
    def next_at(self) -> float:
        """Time of the next event, in seconds; infinity when nothing is left."""
        return self._queue[0][0] if self._queue else float("inf")

    def soon(self, mean_seconds: float) -> float:
        """A waiting time without memory."""
        return self.rng.expovariate(1.0 / mean_seconds)

    def around(self, median_seconds: float, spread: float) -> float:
        """A log-normal duration; `spread` is the standard deviation of its logarithm."""
        return median_seconds * self.rng.lognormvariate(0.0, spread)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return probability > 0 and self.rng.random() < probability
