"""The staleness rule, in one place. Source: ECHO-2 sections 3.2 and 4.1; `docs/staleness.md` derives it.

Symbols: t = the step that a group is bound to when it is issued (it trains version t into t + 1), x = the policy
version of its *oldest* token, S = max_staleness, kappa = publish_every. The rule:  t - x <= S.

The rule is enforced by *pacing at admission*: a group is bound to its step before it is sampled, and leased only to a
worker whose installed version v satisfies t - v <= S. Installed versions only grow within a lineage, so every token
has x >= v, and the rule holds however long the group is queued afterwards. It is checked when a result arrives, when a
group is fed, and by the learner. A limit of groups in flight alone would not bound the age of a straggler; the binding
does, because the straggler's step waits for it.
"""

from __future__ import annotations


def staleness(step: int, oldest_version: int) -> int:
    """Age, in policy versions, of a group's oldest token when step `step` trains on it."""
    return step - oldest_version


def min_version(step: int, max_staleness: int) -> int:
    """The oldest version that may still contribute a token to this step."""
    return max(0, step - max_staleness)


def last_step(installed_version: int, max_staleness: int) -> int:
    """The last step that a worker with this version may sample for."""
    return installed_version + max_staleness


def may_train(step: int, oldest_version: int, max_staleness: int) -> bool:
    """Whether a group may be trained on: the check when it is fed."""
    return staleness(step, oldest_version) <= max_staleness


def fixed_version(step: int, max_staleness: int, publish_every: int) -> int:
    """The version that samples this step in deterministic mode: the oldest published one that the bound allows.

    max(0, kappa * ceil((t - S) / kappa)). It never exceeds t if kappa <= S + 1, so waiting for it can't deadlock.
    """
    return max(0, publish_every * -(-(step - max_staleness) // publish_every))
