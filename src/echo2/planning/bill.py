"""The bill of a run: dollars by machine and by cause, from the accounts of the head (`runtime/head/accounts.py`).

Causes of a worker: useful (results that were trained on or wait for training), each reason of refusal or loss (stale,
duplicate, late, malformed, expired, lost, failed ...), standby, idle. Causes of the learner: training, idle. For each
machine and for the whole run, the causes add up to the total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEARNER = "learner"
#: Causes that are not wasted work, in the order in which they are shown; the others are shown in between.
FIRST, LAST = ("training", "useful"), ("standby", "idle")
#: Causes that a total always lists, even if they are zero.
ALWAYS = ("useful", "stale", "failed", "duplicate", "idle")


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of one machine, or of all machines. `seconds`: paid time."""

    name: str
    usd: float
    seconds: float
    by_cause: dict[str, float]
    groups: int = 0


def itemise(accounts: Mapping[str, Mapping[str, Any]], learner_idle_ratio: float = 0.0) -> list[Bill]:
    """Return one bill per machine, the learner's first. `learner_idle_ratio`: share of the learner's time spent waiting
    for groups.
    """
    bills = []
    for name, account in accounts.items():
        if name.partition(" ")[0] == LEARNER:
            seconds = float(account["attended_seconds"])
            idle = seconds * min(1.0, max(0.0, learner_idle_ratio))
            bills.append(_bill(name, account, {"training": seconds - idle, "idle": idle}))
        else:
            bills.append(_bill(name, account, worker_seconds(account)))
    return sorted(bills, key=lambda bill: (bill.name.partition(" ")[0] != LEARNER, -bill.usd, bill.name))


def worker_seconds(account: Mapping[str, Any]) -> dict[str, float]:
    """Return a worker's paid seconds by cause. If the causes, some of them estimates, add up to more than the paid
    time, they are scaled down to it.
    """
    paid = float(account["attended_seconds"])
    claimed = {"useful": float(account["useful_seconds"]), "standby": float(account.get("standby_seconds", 0.0))}
    for cause, seconds in account["wasted_seconds"].items():
        claimed[cause] = claimed.get(cause, 0.0) + float(seconds)
    busy = math.fsum(claimed.values())
    if busy > paid:
        claimed = {cause: seconds * (paid / busy) for cause, seconds in claimed.items()}
    return {**claimed, "idle": max(0.0, paid - busy)}


def total(bills: list[Bill]) -> Bill:
    """Return the sum of all bills, with the causes that are always listed."""
    causes = sorted({*ALWAYS, *(cause for bill in bills for cause in bill.by_cause)}, key=_place)
    return Bill(
        name="total",
        usd=math.fsum(bill.usd for bill in bills),
        seconds=math.fsum(bill.seconds for bill in bills),
        by_cause={cause: math.fsum(bill.by_cause.get(cause, 0.0) for bill in bills) for cause in causes},
        groups=sum(bill.groups for bill in bills),
    )


def _bill(name: str, account: Mapping[str, Any], seconds: Mapping[str, float]) -> Bill:
    usd_per_second = float(account["price_usd_per_hour"]) / 3600
    paid = float(account["attended_seconds"])
    by_cause = {cause: seconds[cause] * usd_per_second for cause in sorted(seconds, key=_place) if seconds[cause] > 0}
    return Bill(name, paid * usd_per_second, paid, by_cause, round(account["useful_groups"]))


def _place(cause: str) -> tuple[int, str]:
    return (0 if cause in FIRST else 2 + LAST.index(cause) if cause in LAST else 1, cause)
