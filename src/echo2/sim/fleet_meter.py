"""Measures the fleet while a simulation runs: connected workers, workers with a lease, duration of broadcasts."""

from __future__ import annotations

from echo2.control.head.planner import Planner
from echo2.sim.history import History


class FleetMeter:
    """Reads the planner's state after each event; this takes constant time unless the fleet has changed."""

    def __init__(self, history: History, pays_active: bool) -> None:
        self._history, self._pays_active = history, pays_active
        self._usd_per_hour = 0.0
        self._counted_at = 0.0
        self._num_active = self._num_free = 0
        self._num_broadcasts = 0

    def look(self, planner: Planner, now: float) -> None:
        """Attribute the time since the last call to its uses."""
        fleet, history = planner.fleet, self._history
        seconds = now - self._counted_at
        history.worker_seconds += seconds * self._num_active
        history.active_usd += seconds / 3600 * self._usd_per_hour
        history.idle_worker_seconds += seconds * self._num_free
        self._counted_at, self._num_active, self._num_free = now, fleet.num_active, fleet.num_free
        if planner.gauge.num_broadcasts > self._num_broadcasts:
            history.broadcasts.append(planner.gauge.broadcasts[-1])
        self._num_broadcasts = planner.gauge.num_broadcasts  # smaller after a restart of the head
        counts = (fleet.num_attending, fleet.num_active)
        if not history.fleet or history.fleet[-1][1:] != counts:
            history.fleet.append((now, *counts))
            if self._pays_active:
                self._usd_per_hour = sum(worker.price_usd_per_hour for worker in fleet.active())
