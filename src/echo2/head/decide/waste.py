"""Decides how many of the head's seconds a stranger's group wasted, by its rewards or by its replay in the environment.

Wasted are the seconds beyond `FAR` times the usual ones. Usual is the mean of the owner's groups, which no stranger can
raise; until there is one, the mean of all groups that wasted nothing. Each whole second costs the ticket a lease of its
credit, as when a reward fails.
"""

from __future__ import annotations

from echo2.head.decide import events as ev
from echo2.head.decide.groups import PlannedGroup
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.measurements import UsualSeconds
from echo2.head.strangers.decide import strangers

#: A stranger's group may take this many times the usual seconds: some honest texts take longer than others.
FAR = 10.0


def scored(state: PlannerState, event: ev.GroupScored) -> None:
    """Record how long the rewards of a group took, and blame the stranger that wasted some of it."""
    record = state.groups.get(event.group.number) if event.group.kind == "train" else None
    worker = state.fleet.get(record.worker_id) if record is not None else None
    is_own = event.group.kind == "eval" or (worker is not None and worker.is_own)
    ticket = sole_supplier(state, record) if record is not None else None
    _spent(state, state.measurements.rewards, event.seconds, is_own, ticket, "rewards")


def replayed(state: PlannerState, worker_id: str, seconds: float, is_failed: bool = False) -> None:
    """Record how long the environment's replay of a worker's result took, likewise. One that failed wasted it all."""
    worker = state.fleet.get(worker_id)
    if worker is None or seconds <= 0:
        return
    if not is_failed:
        ticket = None if worker.is_own else worker.ticket
        _spent(state, state.measurements.replay, seconds, worker.is_own, ticket, "replay in the environment")
    elif not worker.is_own and seconds >= 1.0:
        strangers.blame(state, worker.ticket, seconds, int(seconds))


def sole_supplier(state: PlannerState, record: PlannedGroup) -> str | None:
    """Return the ticket of the stranger that supplied all rollouts of a delivered group; None if nobody did alone."""
    if len(record.supplied_by) == 1 and sum(record.supplied_by.values()) >= state.options.group_size:
        return next(iter(record.supplied_by))
    return None


def _spent(
    state: PlannerState, time: UsualSeconds, seconds: float, is_own: bool, ticket: str | None, what: str
) -> None:
    usual = time.usual
    wasted = 0.0 if is_own or usual is None else seconds - FAR * usual
    if wasted < 1.0:
        time.add(seconds, is_own)
    elif ticket is not None:
        reason = f"the {what} of its group took {seconds:.1f} s, where {usual:.2g} s are usual"
        strangers.blame(state, ticket, wasted, int(wasted), reason)
