"""Dollars: what each machine has cost so far, and what of it was wasted, by cause.

A worker costs its price for as long as it attends. Generating time of results that were refused is waste under the
refusal's word; a lease that ended without a result is charged the worker's mean time for a group (never more than the
lease lasted), as an estimate. What is left of a worker's attendance is idle time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class MachineCost:
    """One machine's account, in seconds; `wasted_seconds` by cause."""

    price_usd_per_hour: float = 0.0
    attended_seconds: float = 0.0
    attending_since: float | None = None
    useful_seconds: float = 0.0
    useful_groups: int = 0
    wasted_seconds: dict[str, float] = field(default_factory=dict)

    def seconds(self, now: float) -> float:
        return self.attended_seconds + (now - self.attending_since if self.attending_since is not None else 0.0)

    def usd(self, now: float) -> float:
        return self.seconds(now) / 3600 * self.price_usd_per_hour

    def wasted_usd(self) -> float:
        return sum(self.wasted_seconds.values()) / 3600 * self.price_usd_per_hour


class CostBook:
    """All machines of a run. `to_plain` and the constructor carry it over a restart of the head."""

    def __init__(self, plain: dict[str, Any] | None = None) -> None:
        self.machines = {name: MachineCost(**values) for name, values in (plain or {}).items()}

    def to_plain(self, now: float) -> dict[str, Any]:
        plain = {}
        for name, machine in self.machines.items():
            plain[name] = {**asdict(machine), "attended_seconds": machine.seconds(now), "attending_since": None}
        return plain

    def joined(self, name: str, price_usd_per_hour: float, now: float) -> None:
        machine = self.machines.setdefault(name, MachineCost())
        machine.price_usd_per_hour = price_usd_per_hour
        if machine.attending_since is None:
            machine.attending_since = now

    def left(self, name: str, now: float) -> None:
        machine = self.machines.get(name)
        if machine is not None:
            machine.attended_seconds, machine.attending_since = machine.seconds(now), None

    def useful(self, name: str, seconds: float) -> None:
        machine = self.machines.setdefault(name, MachineCost())
        machine.useful_seconds += seconds
        machine.useful_groups += 1

    def wasted(self, name: str, cause: str, seconds: float) -> None:
        machine = self.machines.setdefault(name, MachineCost())
        machine.wasted_seconds[cause] = machine.wasted_seconds.get(cause, 0.0) + seconds

    def wasted_lease(self, name: str, cause: str, lasted_seconds: float) -> None:
        """A lease that ended without a result: the mean time of this worker's groups, at most what the lease lasted."""
        machine = self.machines.setdefault(name, MachineCost())
        mean = machine.useful_seconds / machine.useful_groups if machine.useful_groups else lasted_seconds
        self.wasted(name, cause, min(mean, lasted_seconds))

    def cum_usd(self, now: float) -> float:
        return sum(machine.usd(now) for machine in self.machines.values())

    def wasted_usd(self) -> float:
        return sum(machine.wasted_usd() for machine in self.machines.values())
