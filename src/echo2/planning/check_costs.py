"""Estimates the cost of checking strangers' groups, and what a cheat can expect to be paid."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.control.head.checks import CHECK_SHARE

#: Cost of a check over the cost of sampling the same group, measured on a CPU (benchmarks/hostile_sampling.py).
CHECK_PER_SAMPLED = 0.89
#: Mean number of groups, all of them false, that a trusted ticket delivers until one is checked.
GROUPS_UNTIL_FOUND = 1.0 / CHECK_SHARE


@dataclass(frozen=True, slots=True)
class CheckCosts:
    """Costs in dollars. `checks_usd`: of the checks; `cheat_usd`: paid to a trusted ticket for false groups until the
    first of them is found."""

    checks_usd: float
    cheat_usd: float


def check_costs(num_checks: float, usd_per_group: float) -> CheckCosts:
    """Return the costs for this number of checks and this price of sampling a group."""
    return CheckCosts(num_checks * CHECK_PER_SAMPLED * usd_per_group, GROUPS_UNTIL_FOUND * usd_per_group)
