"""The costs of a run: dollars for each machine, and the wasted part of them, by cause.

A machine of the run's owner costs its price while it attends, a stranger's only for the time of its accepted results.
Time spent on a result is useful, or wasted under the reason of its refusal; groups that are sampled together share the
time of their batch. A lease that ended without a result is charged the worker's mean time for a group (at most the
duration of the lease), as an estimate. The rest is standby or idle. A worker that returns at another price opens a
second account. `head/ledger/costs.py` itemises.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class MachineCost:
    """One machine's account at one price, in seconds; `wasted_seconds` by cause. `counted_until`: time up to here is
    already counted as useful or wasted. `is_own`: a machine of the run's owner. Strangers are paid for accepted results
    only: their `attended_seconds` are the time of these results.
    """

    price_usd_per_hour: float = 0.0
    attended_seconds: float = 0.0
    attending_since: float | None = None
    useful_seconds: float = 0.0
    useful_groups: int = 0
    wasted_seconds: dict[str, float] = field(default_factory=dict)
    standby_seconds: float = 0.0
    standing_by_since: float | None = None
    counted_until: float = float("-inf")
    is_own: bool = True

    def seconds(self, now: float) -> float:
        return self.attended_seconds + (now - self.attending_since if self.attending_since is not None else 0.0)

    def standby(self, now: float) -> float:
        return self.standby_seconds + (now - self.standing_by_since if self.standing_by_since is not None else 0.0)

    def claim(self, seconds: float, now: float | None) -> float:
        """Return the part of the `seconds` up to `now` that no other result has claimed, and claim it."""
        if now is None:
            return seconds
        claimed = max(0.0, min(seconds, now - self.counted_until))
        self.counted_until = max(self.counted_until, now)
        return claimed

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
            values = {**asdict(machine), "attended_seconds": machine.seconds(now), "attending_since": None}
            values |= {"standby_seconds": machine.standby(now), "standing_by_since": None}
            del values["counted_until"]  # the next head counts anew
            plain[name] = values
        return plain

    def useful_groups(self, name: str) -> int:
        """Return the accepted groups of a machine."""
        return self.machines[name].useful_groups if name in self.machines else 0

    def joined(self, name: str, price_usd_per_hour: float, now: float, is_own: bool = True) -> None:
        machine = self.machines.setdefault(name, MachineCost(price_usd_per_hour))
        if machine.price_usd_per_hour != price_usd_per_hour:
            self.left(name, now)
            self._put_away(name)
            machine = self.machines.setdefault(name, MachineCost(price_usd_per_hour))
        machine.is_own = is_own
        if not is_own:
            machine.counted_until = max(machine.counted_until, now)  # time before it joined is not charged again
        elif machine.attending_since is None:
            machine.attending_since = now

    def _put_away(self, name: str) -> None:
        """Move a machine's account at its old price to an account named after that price."""
        machine = self.machines.pop(name)
        old = self.machines.setdefault(
            f"{name} at ${machine.price_usd_per_hour:g}/h", MachineCost(machine.price_usd_per_hour)
        )
        old.attended_seconds += machine.attended_seconds
        old.useful_seconds += machine.useful_seconds
        old.useful_groups += machine.useful_groups
        old.standby_seconds += machine.standby_seconds
        for cause, seconds in machine.wasted_seconds.items():
            old.wasted_seconds[cause] = old.wasted_seconds.get(cause, 0.0) + seconds

    def left(self, name: str, now: float) -> None:
        machine = self.machines.get(name)
        if machine is not None:
            self.activated(name, now)
            machine.attended_seconds, machine.attending_since = machine.seconds(now), None

    def stands_by(self, name: str, now: float) -> None:
        """Record that a connected worker is on standby, without leases."""
        machine = self.machines.get(name)
        if machine is not None and machine.attending_since is not None and machine.standing_by_since is None:
            machine.standing_by_since = now

    def activated(self, name: str, now: float) -> None:
        machine = self.machines.get(name)
        if machine is not None:
            machine.standby_seconds, machine.standing_by_since = machine.standby(now), None

    def useful(self, name: str, seconds: float, now: float | None = None) -> None:
        """Count a result that took `seconds` up to `now` as useful. Without `now`, all of these seconds count."""
        machine = self.machines.setdefault(name, MachineCost())
        claimed = machine.claim(seconds, now)
        machine.useful_seconds += claimed
        machine.useful_groups += 1
        machine.attended_seconds += 0.0 if machine.is_own else claimed

    def wasted(self, name: str, cause: str, seconds: float, now: float | None = None) -> None:
        machine = self.machines.setdefault(name, MachineCost())
        if not machine.is_own:
            return  # strangers are not paid for wasted work
        wasted = machine.claim(seconds, now)
        machine.wasted_seconds[cause] = machine.wasted_seconds.get(cause, 0.0) + wasted

    def wasted_lease(self, name: str, cause: str, lasted_seconds: float) -> None:
        """Count a lease that ended without a result as waste: the mean time of this worker's groups, at most the
        duration of the lease.
        """
        machine = self.machines.setdefault(name, MachineCost())
        mean = machine.useful_seconds / machine.useful_groups if machine.useful_groups else lasted_seconds
        self.wasted(name, cause, min(mean, lasted_seconds))

    def count_as_wasted(self, name: str, cause: str) -> None:
        """Move a result from useful to waste, because it is not trained on after all: the mean time of this worker's
        groups.
        """
        machine = self.machines.setdefault(name, MachineCost())
        if machine.useful_groups:
            seconds = machine.useful_seconds / machine.useful_groups
            machine.useful_seconds -= seconds
            machine.useful_groups -= 1
            machine.wasted_seconds[cause] = machine.wasted_seconds.get(cause, 0.0) + seconds

    def cum_usd(self, now: float) -> float:
        return sum(machine.usd(now) for machine in self.machines.values())

    def wasted_usd(self) -> float:
        return sum(machine.wasted_usd() for machine in self.machines.values())
