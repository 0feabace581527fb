"""Time in a simulation: a priority queue of (time, sequence, actor, event) and a virtual clock.

Events at the same time happen in the order of posting. An actor that dies and restarts has a new *life*; events on
their way to the old life are dropped, as a kernel drops packets for a closed socket.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from echo2.core.decide.machine import Event

#: Events after which a simulation counts as endless.
MAX_EVENTS = 500_000_000


class Kill(Event):
    """kill -9."""


class Start(Event):
    """The process starts (again), with its durable state only."""


class Actor(ABC):
    """A process: up or down, with a name and a number of lives so far."""

    def __init__(self, world: SimWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.up = False
        world.actors[name] = self

    def post(self, delay_seconds: float, event: object) -> None:
        """Schedule an event for this actor; it is dropped if the actor dies before."""
        self.world.post(delay_seconds, self.name, event)

    @abstractmethod
    def handle(self, event: object) -> None:
        """Handle one event at `world.now`."""

    def starts(self) -> None:
        """Begin a new life. Events for the old life are dropped."""
        self.life += 1
        self.up = True

    def dies(self) -> None:
        """End this life. Events for it are dropped."""
        self.life += 1
        self.up = False


class SimWorld:
    """The clock, the queue, the actors, and the only source of randomness. `check` is called with each state machine of
    the deciders after each of the machine's events.
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
        """Schedule `event` for the current life of `actor` after a delay (never before now)."""
        self._push(delay_seconds, actor, self.actors[actor].life, event)

    def post_always(self, delay_seconds: float, actor: str, event: object) -> None:
        """Likewise, for whatever life the actor is in by then: a fault that strikes the machine."""
        self._push(delay_seconds, actor, None, event)

    def _push(self, delay_seconds: float, actor: str, life: int | None, event: object) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_seconds), self._sequence, actor, life, event))

    def step(self) -> bool:
        """Handle the next event. Return False if none is left, or after `MAX_EVENTS`."""
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
        """Time of the next event, in seconds; infinity if none is left."""
        return self._queue[0][0] if self._queue else float("inf")

    def soon(self, mean_seconds: float) -> float:
        return self.rng.expovariate(1.0 / mean_seconds)

    def around(self, median_seconds: float, spread: float) -> float:
        """Return a log-normal duration; `spread` is the standard deviation of its logarithm."""
        return median_seconds * self.rng.lognormvariate(0.0, spread)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability
