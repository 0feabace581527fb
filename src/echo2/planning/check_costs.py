"""Estimates the cost of checking strangers' groups, and what a cheat can expect to be paid."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control.head.checks import CHECK_SHARE

#: What a check costs of sampling the same group, measured on a CPU (benchmarks/hostile_sampling.py).
CHECK_PER_SAMPLED = 0.89
#: Groups that a ticket which was found good delivers on average, if all are false, until one is checked.
GROUPS_UNTIL_FOUND = 1.0 / CHECK_SHARE


@dataclass(frozen=True, slots=True)
class CheckCosts:
    """Dollars. `checks_usd`: reading groups again; `cheat_usd`: what is paid for false groups until the first is found,
    whose ticket was found good before."""

    checks_usd: float
    cheat_usd: float


def check_costs(num_checks: float, usd_per_group: float) -> CheckCosts:
    """Of so many checks, where sampling a group costs so much."""
    return CheckCosts(num_checks * CHECK_PER_SAMPLED * usd_per_group, GROUPS_UNTIL_FOUND * usd_per_group)
