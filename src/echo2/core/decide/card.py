"""Decides which processes of a run have a card on which learner and workers do not fit beside each other.

There are two locks of the system, so a process that dies gives back what it had:

    card   of all that have tensors on the card: the learner alone, or workers
    wish   the learner's, from when it wants the card until it has given it back

The learner wants the card while it can go on without a worker: to start, to train once all groups of a step are there,
and to publish. So it does not wait for workers with the card, and they have it as long as groups are missing: nobody
waits for ever. Workers give it up between two tokens as soon as the learner wants it.
"""

from __future__ import annotations

from enum import Enum

#: Names of the two locks in the directory of a card.
CARD, WISH = "card.lock", "wish.lock"
#: Seconds between two looks at a lock that another process has.
LOOK_SECONDS = 0.02
#: How long a learner on the card waits for groups that the head may have.
QUIET_SECONDS = 0.5


class Act(Enum):
    """What a process does next. TAKE: try to get the lock of the card, and fetch the tensors if it did; LEAVE: put them
    away, and give back all locks; WISH: try to get the lock of the wish; WAIT: look again later, or go on working."""

    WAIT = "wait"
    WISH = "wish"
    TAKE = "take"
    LEAVE = "leave"


def learner_act(wants: bool, has_wish: bool, has_card: bool) -> Act:
    """Return what the learner does next. `wants`: it can go on without a worker; `has_wish`, `has_card`: its locks."""
    if not wants:
        return Act.LEAVE if has_wish else Act.WAIT
    if not has_wish:
        return Act.WISH
    return Act.WAIT if has_card else Act.TAKE


def worker_act(is_wished: bool, has_card: bool) -> Act:
    """Return what the worker does next. `is_wished`: the learner wants the card, or has it; `has_card`: the lock, which
    workers share."""
    if is_wished:
        return Act.LEAVE if has_card else Act.WAIT
    return Act.WAIT if has_card else Act.TAKE


def wants_card(has_all: bool, has_card: bool, quiet_seconds: float, max_staleness: int) -> bool:
    """Return whether the learner can go on without a worker. `has_all`: all groups of the next step are there;
    `quiet_seconds`: since the last of them came, or since it began to wait. Groups that were sampled ahead come at
    once, and with a staleness of 0 there are none."""
    return has_all or (has_card and max_staleness > 0 and quiet_seconds < QUIET_SECONDS)
