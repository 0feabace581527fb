"""The staleness rule, in one place. Source: ECHO-2 sections 3.2 and 4.1; `docs/staleness.md` derives it.

Symbols: t = the step that a group is bound to when it is issued (it trains version t into t + 1), x = the policy
version of its *oldest* token, S = max_staleness, kappa = publish_every. The rule:  t - x <= S.

It is kept by *pacing at admission*: a group is bound to its step before it is sampled, and leased only to
a worker whose installed version v satisfies t - v <= S; installed versions only grow within a lineage, so every token
gets x >= v and the rule holds however long the group then queues. It is checked when a result comes, when a group is
fed, and by the learner. A count of
groups in flight alone would not bound the age of one straggler; the binding does, because the straggler's step waits
for it.
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
    """The check at consumption."""
    return staleness(step, oldest_version) <= max_staleness


def fixed_version(step: int, max_staleness: int, publish_every: int) -> int:
    """The version that samples this step in deterministic mode: the oldest published one that the bound allows.

    max(0, kappa * ceil((t - S) / kappa)). It never exceeds t where kappa <= S + 1, so waiting for it can't deadlock.
    """
    return max(0, publish_every * -(-(step - max_staleness) // publish_every))
