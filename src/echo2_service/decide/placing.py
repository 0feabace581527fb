"""Decides which machine samples which call. The tenant with the fewest running sequences is served next, on a machine
of the fleet that has room, or else on this machine.

A machine has room until it has twice as many running sequences as it decodes at once, so that it never waits for the
next call. One tenant may use all but a sixteenth of that, so that the others do not wait until its sequences end. The
machine with room that has the least load for its size is taken. A machine that never sampled from the snapshot counts
as more loaded than it is, because it has to fetch the snapshot."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

#: The service's own sampler process, which is always there.
LOCAL = ""
#: Sequences that a machine decodes at once, unless its owner says otherwise.
SLOTS = 128
#: Part of the slots, and of a machine's room, that no single tenant may use: one in so many.
OTHERS_SHARE = 16
#: Machines of the fleet that may lose or fail a call before only this machine may sample it.
TRIES_MAX = 3
#: Load added to a machine that lacks the snapshot, as a fraction of its slots.
FETCH_LOAD = 0.25
#: Snapshots that a machine is assumed to keep.
HELD_MAX = 64


@dataclass(slots=True)
class _Machine:
    name: str
    slots: int
    used: int = 0
    snapshots: OrderedDict[str, None] = field(default_factory=OrderedDict)
    of_owner: Counter[str] = field(default_factory=Counter)

    def has_room(self, owner: str) -> bool:
        """Whether a call of this owner may begin. What an owner has beyond its part takes no room from the others."""
        room = 2 * self.slots
        most = room - room // OTHERS_SHARE
        return self.of_owner[owner] < most and sum(min(used, most) for used in self.of_owner.values()) < room

    def take(self, owner: str, num_samples: int) -> None:
        """Count running sequences; less than 0: they ended."""
        self.used += num_samples
        self.of_owner[owner] += num_samples
        if not self.of_owner[owner]:
            del self.of_owner[owner]

    def load(self, snapshot: str) -> float:
        """Return the load relative to the machine's size, with the cost of fetching this snapshot if it lacks it."""
        return self.used / self.slots + (0.0 if snapshot in self.snapshots else FETCH_LOAD)


@dataclass(slots=True)
class _Call:
    number: int
    owner: str
    snapshot: str
    num_samples: int
    machine: _Machine | None = None  # where it is sampled (may have left meanwhile); None: the call waits
    failed_at: set[str] = field(default_factory=set)


class Placing:
    """Calls by number, from `arrive` to `ended`; machines by name. `place` assigns waiting calls to machines."""

    def __init__(self, local_slots: int = SLOTS) -> None:
        self._machines = {LOCAL: _Machine(LOCAL, local_slots)}
        self._calls: dict[int, _Call] = {}
        self._waiting: dict[str, deque[_Call]] = {}
        self._used: Counter[str] = Counter()  # running sequences by owner

    def joined(self, machine: str, slots: int) -> None:
        """Add a machine. `slots`: sequences that it decodes at once."""
        self._machines[machine] = _Machine(machine, slots)

    def remove(self, machine: str) -> None:
        """Remove a machine. The caller returns its calls one by one (`came_back`)."""
        del self._machines[machine]

    def arrive(self, number: int, owner: str, snapshot: str, num_samples: int) -> None:
        """Add a call to its owner's queue."""
        call = self._calls[number] = _Call(number, owner, snapshot, num_samples)
        self._waiting.setdefault(owner, deque()).append(call)

    def came_back(self, number: int) -> None:
        """Requeue a call whose machine was lost or failed, first in its owner's queue. It goes to another machine
        if possible.
        """
        call = self._calls[number]
        machine = self._take_from_machine(call)
        call.failed_at.add(machine.name)
        self._waiting.setdefault(call.owner, deque()).appendleft(call)

    def ended(self, number: int) -> None:
        """Remove a call that was answered or cancelled."""
        call = self._calls.pop(number)
        if call.machine is not None:
            self._take_from_machine(call)
            return
        waiting = self._waiting[call.owner]
        waiting.remove(call)
        if not waiting:
            del self._waiting[call.owner]

    def place(self) -> list[tuple[int, str]]:
        """Assign waiting calls as far as there is room. Return (number, machine) for each; it counts as running now."""
        placed = []
        while (next_pair := self._next()) is not None:
            call, machine = next_pair
            waiting = self._waiting[call.owner]
            waiting.popleft()
            if not waiting:
                del self._waiting[call.owner]
            call.machine = machine
            machine.take(call.owner, call.num_samples)
            machine.snapshots[call.snapshot] = None
            machine.snapshots.move_to_end(call.snapshot)
            if len(machine.snapshots) > HELD_MAX:
                machine.snapshots.popitem(last=False)
            self._used[call.owner] += call.num_samples
            placed.append((call.number, machine.name))
        return placed

    @property
    def num_waiting(self) -> int:
        """Calls that no machine has room for."""
        return sum(map(len, self._waiting.values()))

    def under_way(self) -> dict[str, int]:
        """Return the running sequences of each machine."""
        return {name: machine.used for name, machine in self._machines.items()}

    def _next(self) -> tuple[_Call, _Machine] | None:
        for owner in sorted(self._waiting, key=lambda name: (self._used[name], name)):
            call = self._waiting[owner][0]
            if (machine := self._machine_for(call)) is not None:
                return call, machine
        return None

    def _machine_for(self, call: _Call) -> _Machine | None:
        fleet = [
            machine
            for name, machine in self._machines.items()
            if machine.has_room(call.owner) and name != LOCAL and name not in call.failed_at
        ]
        if fleet and len(call.failed_at) < TRIES_MAX:
            return min(fleet, key=lambda machine: machine.load(call.snapshot))
        local = self._machines[LOCAL]
        return local if local.has_room(call.owner) else None

    def _take_from_machine(self, call: _Call) -> _Machine:
        machine = call.machine
        assert machine is not None
        machine.take(call.owner, -call.num_samples)
        call.machine = None
        self._used[call.owner] -= call.num_samples
        if not self._used[call.owner]:
            del self._used[call.owner]
        return machine
