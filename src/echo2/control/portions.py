"""One group's attempts at several workers, so that the groups which a step begins with are complete sooner.

A *portion* is the part of a group's attempts that one lease asks for. Most groups have one: all of them. With
`workers_per_group` above 1 a group that an idle worker begins a step with is cut into equal portions, and stays so;
its siblings then are sampled side by side. A group counts as pending as long as a portion is neither leased
nor in, and it is complete when the last one is in.
"""

from __future__ import annotations

from typing import Protocol

from echo2.control.fleet import Worker
from echo2.control.groups import GroupRecord
from echo2.control.state import PlannerState
from echo2.errors import InvariantError
from echo2.types import GroupRef, Portion, joined_names


class Result(Protocol):
    """What counts of a valid result for a group, or for a portion of it."""

    @property
    def worker_id(self) -> str: ...

    @property
    def oldest_version(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


def most_portions(state: PlannerState) -> int:
    """Portions into which a group is to be cut now: as many as are allowed, have a worker, and divide it."""
    size = state.options.group_size
    most = min(state.options.workers_per_group, state.fleet.num_active, size)
    return max((count for count in range(2, most + 1) if size % count == 0), default=1)


def cut(state: PlannerState, record: GroupRecord) -> None:
    """Cut a group, if nobody has tried it yet."""
    if record.num_portions == 1 and not record.attempts:
        record.num_portions = most_portions(state)


def incomplete(state: PlannerState) -> list[GroupRecord]:
    """The groups that are cut and lack attempts."""
    return [record for record in state.groups if record.num_portions > 1 and record.state in ("pending", "leased")]


def num_samples(state: PlannerState, record: GroupRecord) -> int:
    """Attempts of one portion of this group."""
    return state.options.group_size // record.num_portions


def next_unleased(state: PlannerState, record: GroupRecord) -> int | None:
    """The first attempt of the first portion that nobody has and that is not in; None if there is none."""
    if record.num_portions == 1:
        return None if state.leases.of_group(GroupRef("train", record.number)) else 0
    size = num_samples(state, record)
    firsts = (place * size for place in range(record.num_portions))
    return next(
        (first for first in firsts if first not in record.portions_in and not leases_of(state, record, first)), None
    )


def leases_of(state: PlannerState, record: GroupRecord, first_sample: int) -> tuple[int, ...]:
    """The open leases on the portion that begins with this attempt."""
    held = state.leases.of_group(GroupRef("train", record.number))
    if record.num_portions == 1:
        return held
    leases = ((lease_id, state.leases.get(lease_id)) for lease_id in held)
    return tuple(
        lease_id for lease_id, opened in leases if opened is not None and opened[1].first_sample == first_sample
    )


def is_shared_with(state: PlannerState, record: GroupRecord, worker: Worker) -> bool:
    """Whether the worker samples a portion of this group."""
    if record.num_portions == 1:
        return False
    held = map(state.leases.get, state.leases.of_group(GroupRef("train", record.number)))
    return any(opened is not None and opened[0] == worker.worker_id for opened in held)


def put_in(record: GroupRecord, first_sample: int, result: Result) -> bool:
    """Note a valid result for the portion that begins with this attempt. Whether the group has all its attempts now."""
    if record.oldest_version is None:
        record.oldest_version = result.oldest_version
    record.oldest_version = min(record.oldest_version, result.oldest_version)
    record.num_tokens += result.num_tokens
    if record.num_portions == 1:
        record.worker_id = result.worker_id
        return True
    record.worker_id = joined_names(record.worker_id, result.worker_id)
    record.portions_in += (first_sample,)
    return len(record.portions_in) == record.num_portions


def restore(state: PlannerState, old: Portion) -> None:
    """A portion that the ledger has.

    Raises:
        InvariantError: its group is not open.
    """
    record = state.groups.get(old.number)
    if record is None or record.state != "pending":
        raise InvariantError(f"the ledger has attempts of group {old.number}, which is not open")
    record.num_portions = state.options.group_size // old.num_samples
    put_in(record, old.first_sample, old)
