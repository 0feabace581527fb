"""The workers as the planner sees them: who attends, what each has installed, when each counts as lost, and who is
next to get work.

Nothing here looks at every worker when one changes: `file` puts a worker where `granting` will find it, by the
snapshot that it has installed, because workers with the same one may sample the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from echo2.control.deadlines import Deadlines
from echo2.control.ranking import Ranking
from echo2.errors import InvariantError
from echo2.types import SnapshotRef


@dataclass(slots=True)
class Worker:
    """One attending worker. `capacity_groups`: groups it samples together. `detached`: its connection is closed, it
    may return. `ticket`: by which a stranger joined; empty for machines of the run's owner. `standby`: it waits to be
    chosen and gets no leases. `offer`: what it was rented as; `returned`: its machine is being given back. `samples`:
    asked of it and not delivered yet. `rate`: rollouts a second while it has work, 0 until it is known, and its
    variance; the last four are what `gauge` takes them from.
    """

    worker_id: str
    capacity_groups: int
    price_usd_per_hour: float
    installed: SnapshotRef | None
    joined_at: float
    ticket: str = ""
    detached: bool = False
    detached_at: float = 0.0
    failures_in_a_row: int = 0
    idle_since: float | None = None
    standby: bool = False
    standby_since: float | None = None
    offer: str = ""
    returned: bool = False
    samples: int = 0
    rate: float = 0.0
    rate_variance: float = 0.0
    done_samples: int = 0
    busy_seconds: float = 0.0
    busy_since: float | None = None
    unmeasured_samples: int = 0

    @property
    def is_own(self) -> bool:
        """Whether it is a machine of the run's owner."""
        return not self.ticket


#: A worker that fails its leases rests before it gets more: this long, doubled at each failure in a row, up to the
#: last.
REST_SECONDS = (1.0, 60.0)

#: Workers that may be given the same: by what they have installed, and a stranger's ticket ("": the owner's).
Kind = tuple[SnapshotRef | None, str]
#: Where a worker is filed: as free of work (0), or with one batch at most (1), and by its kind.
Place = tuple[int, Kind]


@dataclass(slots=True)
class Fleet:
    """Attending workers by id, in order of joining, with one silence deadline each."""

    lost_after_seconds: float
    group_size: int = 1
    num_attending: int = 0
    num_active: int = 0
    num_resting: int = 0
    num_free: int = 0
    active_groups: int = 0
    most_groups: int | None = None
    strangers: dict[str, None] = field(default_factory=dict)
    _workers: dict[str, Worker] = field(default_factory=dict)
    _silence: Deadlines[str] = field(default_factory=Deadlines)
    _resting: Deadlines[str] = field(default_factory=Deadlines)
    _places: dict[str, Place] = field(default_factory=dict)
    _rankings: tuple[dict[Kind, Ranking], ...] = field(default_factory=lambda: ({}, {}))
    _counted: dict[str, tuple[bool, bool, bool, bool, int]] = field(default_factory=dict)

    def join(self, worker: Worker, now: float) -> None:
        self._workers[worker.worker_id] = worker
        self.strangers.pop(worker.worker_id, None)
        self.strangers.update({} if worker.is_own else {worker.worker_id: None})
        self.heard(worker.worker_id, now)
        self.file(worker)

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def heard(self, worker_id: str, now: float) -> None:
        self._silence.set(worker_id, now + self.lost_after_seconds)

    def detach(self, worker: Worker, now: float, grace_seconds: float) -> None:
        """Its connection closed: it counts as lost after the grace period unless it comes back."""
        worker.detached, worker.detached_at = True, now
        self._silence.set(worker.worker_id, now + grace_seconds)
        self.file(worker)

    def rest(self, worker: Worker, now: float) -> None:
        """It failed a lease: others, where there are any, get the next ones. The failures of one batch count once."""
        resting = self.is_resting(worker)
        others = self.num_active - self.num_resting - (not (resting or worker.detached or worker.standby))
        if others > 0 and not resting:
            seconds = min(REST_SECONDS[1], REST_SECONDS[0] * 2.0 ** min(worker.failures_in_a_row, 10))
            worker.failures_in_a_row += 1
            self._resting.set(worker.worker_id, now + seconds)
            self.file(worker)

    def is_resting(self, worker: Worker) -> bool:
        return self._resting.get(worker.worker_id) is not None

    def end_rests(self, now: float) -> bool:
        """Whether anybody's rest has ended."""
        rested = self._resting.pop_due(now)
        for worker_id in rested:
            if (worker := self._workers.get(worker_id)) is not None:
                self.file(worker)
        return bool(rested)

    def remove(self, worker_id: str) -> None:
        self.strangers.pop(worker_id, None)
        if self._workers.pop(worker_id, None) is not None:
            self._count(worker_id, (False, False, False, False, 0))
            self._place(worker_id, None)
        self._silence.drop(worker_id)

    def pop_silent(self, now: float) -> list[str]:
        return self._silence.pop_due(now)

    def earliest_deadline(self) -> float | None:
        dues = [at for at in (self._silence.earliest(), self._resting.earliest()) if at is not None]
        return min(dues, default=None)

    def silence_deadline(self, worker_id: str) -> float | None:
        return self._silence.get(worker_id)

    # ---- the files -------------------------------------------------------------------------------------------------

    def file(self, worker: Worker) -> None:
        """Put it where it belongs now: to be called whenever one of its fields has changed."""
        here = not worker.detached and not worker.standby
        free = here and not worker.samples
        resting = here and self._resting.get(worker.worker_id) is not None
        self._count(worker.worker_id, (not worker.detached, here, resting, free, worker.capacity_groups if here else 0))
        if not here or resting or worker.samples > self.at_once(worker) * self.group_size:
            self._place(worker.worker_id, None)
            return
        place = _place_of(worker)
        self._place(worker.worker_id, place)
        ranking = self._rankings[place[0]].get(place[1])
        if ranking is None:
            ranking = self._rankings[place[0]][place[1]] = Ranking()
        failures = 0 if worker.is_own else worker.failures_in_a_row
        ranking.put((worker.samples, failures, worker.joined_at, worker.worker_id))

    def at_once(self, worker: Worker) -> int:
        """Groups that are one batch of this worker now."""
        return worker.capacity_groups if self.most_groups is None else min(worker.capacity_groups, self.most_groups)

    def limit(self, most_groups: int) -> None:
        """A batch has so many groups at most, from now on."""
        if most_groups != self.most_groups:
            self.most_groups = most_groups
            for worker in self._workers.values():
                self.file(worker)

    def _place(self, worker_id: str, place: Place | None) -> None:
        old = self._places.get(worker_id)
        if old == place:
            return
        if old is not None:
            ranking = self._rankings[old[0]][old[1]]
            ranking.drop(worker_id)
            if not ranking:
                del self._rankings[old[0]][old[1]]
        if place is None:
            del self._places[worker_id]
        else:
            self._places[worker_id] = place

    def _count(self, worker_id: str, new: tuple[bool, bool, bool, bool, int]) -> None:
        """`new`: whether it attends, is active, rests, has nothing to do; and its capacity if it is active."""
        old = self._counted.get(worker_id, (False, False, False, False, 0))
        if old == new:
            return
        self.num_attending += new[0] - old[0]
        self.num_active += new[1] - old[1]
        self.num_resting += new[2] - old[2]
        self.num_free += new[3] - old[3]
        self.active_groups += new[4] - old[4]
        if new[0]:
            self._counted[worker_id] = new
        else:
            self._counted.pop(worker_id, None)

    def rankings(self, depth: int) -> dict[Kind, Ranking]:
        """By kind, who may be given a batch: those without any (0), or with at most one (1)."""
        return self._rankings[depth]

    def check_invariants(self) -> None:
        """The files hold what a look at every worker finds."""
        here = [worker for worker in self._workers.values() if not worker.detached and not worker.standby]
        free = [worker for worker in here if not worker.samples]
        counts = (
            len(self.attending()),
            len(here),
            sum(map(self.is_resting, here)),
            len(free),
            sum(w.capacity_groups for w in here),
        )
        kept = (self.num_attending, self.num_active, self.num_resting, self.num_free, self.active_groups)
        if counts != kept:
            raise InvariantError(f"the fleet is {counts} and was counted as {kept}")
        filed = {
            worker.worker_id: _place_of(worker)
            for worker in here
            if worker.samples <= self.at_once(worker) * self.group_size and not self.is_resting(worker)
        }
        if filed != self._places:
            raise InvariantError(f"workers are filed as {self._places}; they should be as {filed}")
        for worker_id, (depth, kind) in filed.items():
            if worker_id not in self._rankings[depth][kind]:
                raise InvariantError(f"{worker_id} is filed under {kind} and not ranked there")

    # ---- looking in ------------------------------------------------------------------------------------------------

    def attending(self) -> list[Worker]:
        """Workers that can be sent something, in order of joining."""
        return [worker for worker in self._workers.values() if not worker.detached]

    def active(self) -> list[Worker]:
        """Those of them that work, or would if there were any."""
        return [worker for worker in self._workers.values() if not worker.detached and not worker.standby]

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)


def _place_of(worker: Worker) -> Place:
    return (1 if worker.samples else 0), (worker.installed, worker.ticket)
