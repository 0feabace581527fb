"""The machine provider: workers with an `offer` do not exist until the planner rents them."""

from __future__ import annotations

from echo2.core.decide.machine import Event
from echo2.head.decide.events import RecoveredMachine
from echo2.planning.sim.scenario import Scenario
from echo2.planning.sim.world import SimWorld, Start


class Returned(Event):
    """The machine goes back to the provider and no longer costs anything."""


class Provider:
    """Starts the first machine of an offer that is not up, `restart_seconds` after the request."""

    def __init__(self, world: SimWorld, scenario: Scenario) -> None:
        self._world = world
        self._delay: dict[str, float] = {}
        self._machines: dict[str, list[str]] = {}
        self._coming: dict[str, float] = {}
        for kind, spec in enumerate(scenario.workers):
            if spec.offer:
                self._delay[spec.offer] = spec.restart_seconds
                names = [f"w{kind}-{index}" for index in range(spec.count)]
                self._machines.setdefault(spec.offer, []).extend(names)

    def rent(self, offer: str) -> None:
        """Rent a machine of the offer; do nothing if all of them are rented."""
        world = self._world
        for name in self._machines[offer]:
            if not world.actors[name].up and self._coming.get(name, -1.0) < world.now:
                self._coming[name] = world.now + self._delay[offer]
                world.post(self._delay[offer], name, Start())
                return

    def out(self) -> tuple[RecoveredMachine, ...]:
        """Return the machines that are up, or on their way."""
        found = []
        for offer, names in self._machines.items():
            for name in names:
                if self._world.actors[name].up:
                    found.append(RecoveredMachine(offer, name))
                elif self._coming.get(name, -1.0) >= self._world.now:
                    found.append(RecoveredMachine(offer))
        return tuple(found)

    def take_back(self, worker_id: str) -> None:
        """Return this worker's machine to the provider."""
        self._world.post(0.0, worker_id, Returned())
