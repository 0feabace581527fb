"""The workers as the planner sees them: which are connected, which version each has installed, when each counts as
lost, and which gets work next.

A change of one worker never costs a scan of all: `file` indexes a worker for `granting` by the snapshot that it has
installed, because workers with the same snapshot may sample the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, ValuesView
from dataclasses import dataclass, field

from echo2.core.decide.lazy_heap import LazyHeap
from echo2.core.types import Backoff, SnapshotRef
from echo2.head.decide.groups import Standing
from echo2.head.fleet.decide.returns import Returns
from echo2.head.fleet.decide.throughput import Throughput
from echo2.head.fleet.decide.widths import Spreads, Width

#: Placeholder ticket of a worker whose leases outlived a restart of the head, until the worker comes back.
UNKNOWN = "unknown"
#: Seconds that a worker rests after a failed lease: first value, doubled at each failure in a row, up to the second.
REST_SECONDS = Backoff(1.0, 60.0)
#: Likewise, as multiples of the usual time from lease to result, of a worker whose groups others sampled sooner
#: although they began later: a try costs another worker one group.
LATE_REST = Backoff(2.0, 128.0)
#: Snapshots in a row that a worker installed too late for any group, after which it counts as outrun: the first is
#: whole, and the next may come in a busy moment.
LATE_INSTALLS = 3
#: Reports that the head takes from all workers together: the more there are, the less often each reports. A report
#: takes a millisecond of the head; who works is heard by its results, whose machine is gone the kernel tells, and a
#: group at a worker that hangs goes to another when it is late.
REPORTS_PER_SECOND = 20.0
#: A worker counts as lost when nothing has come from it for this many intervals between its reports, and so many
#: heartbeats more (the shortest interval): a busy machine or a slow link may miss some.
LOST_AFTER_REPORTS, LOST_AFTER_HEARTBEATS = 2, 3
#: Workers of one kind may get the same groups: the installed snapshot, and a stranger's ticket ("": the owner's).
Kind = tuple[SnapshotRef | None, str]
#: Groups that a worker may hold, as a multiple of those that fill its slots. Rollouts of a group end one by one, which
#: frees slots while others of the group still run; and a worker shall not idle for a round trip to the head.
LOOK_AHEAD = 2
#: Workers by load: samples asked for, a stranger's failures in a row, time of joining, worker id.
Rank = tuple[int, int, float, str]
Ranking = LazyHeap[str, Rank]
#: Where a worker is indexed: as having free slots (0), or room for groups that wait (1); and by its kind.
Place = tuple[int, Kind]
#: Workers by snapshot, and then by ticket: what holds for a snapshot is asked once, and not for each of many tickets.
Rankings = dict[SnapshotRef | None, dict[str, Ranking]]


@dataclass(slots=True)
class Worker:
    """One worker of the fleet. `slots`: rollouts that it decodes at once. `first_groups`: limit of groups with which it
    begins a step (`pacing.WidthSearch`), or after it was too slow, until one of them is delivered; None: no limit.
    `detached_at`: when its connection closed, if it has not returned. `ticket`: with which a stranger joined; empty for
    machines of the run's owner. `standby_since`: since when it has waited to be activated; it gets no leases. `offer`:
    from which its machine was rented; `returned`: the machine is being returned. `samples`: leased to it and not
    delivered yet. `refused`: the snapshot that it could not install, and why. `draws`: its engine draws from the head's
    random numbers; `form`: to which it rounds its weights; `rounds`: it can check such weights. `width`: how many
    groups it decodes at once; None: as many as fill its slots. `late_installs`: snapshots in a row that it had too late
    for any group; the learner was `steps_behind` steps ahead of them at most.
    """

    worker_id: str
    slots: int
    price_usd_per_hour: float
    installed: SnapshotRef | None
    joined_at: float
    ticket: str = ""
    detached_at: float | None = None
    failures_in_a_row: int = 0
    late_in_a_row: int = 0
    is_proven: bool = False
    idle_since: float | None = None
    standby_since: float | None = None
    offer: str = ""
    returned: bool = False
    samples: int = 0
    speed: Throughput = field(default_factory=Throughput)
    refused: str = ""
    first_groups: int | None = None
    draws: bool = False
    form: str = ""
    rounds: bool = False
    width: Width | None = None
    announced: SnapshotRef | None = None
    late_installs: int = 0
    steps_behind: int = 0

    def can_check(self, form: str = "") -> bool:
        """Whether its engine can check rollouts that were drawn with weights in this form."""
        return self.draws and not self.form and (self.rounds or not form)

    @property
    def is_own(self) -> bool:
        return not self.ticket

    @property
    def receives(self) -> SnapshotRef | None:
        """The snapshot that it was told of last, while it has not installed it, nor refused to."""
        return None if self.refused or self.announced == self.installed else self.announced

    @property
    def is_outrun(self) -> bool:
        """Whether the learner is always ahead of what it may sample by the time that it has new weights."""
        return self.late_installs >= LATE_INSTALLS

    @property
    def detached(self) -> bool:
        return self.detached_at is not None

    @property
    def standby(self) -> bool:
        return self.standby_since is not None

    def return_machine(self) -> None:
        self.returned = True


@dataclass(slots=True)
class Fleet:
    """The workers by id, in order of joining. `heartbeat_seconds`: the shortest time between two reports of a worker;
    `silence`: when each counts as lost; `rests`: end of the rest of each worker that failed a lease.
    """

    heartbeat_seconds: float
    group_size: int = 1
    groups_per_unit: int = 1
    num_attending: int = 0
    num_active: int = 0
    num_resting: int = 0
    num_free: int = 0
    active_groups: int = 0
    most_groups: int | None = None
    spreads: Spreads = field(default_factory=Spreads)
    returns: Returns = field(init=False)
    _workers: dict[str, Worker] = field(default_factory=dict)
    _own: dict[str, Worker] = field(default_factory=dict)
    silence: LazyHeap[str, float] = field(default_factory=LazyHeap)
    rests: LazyHeap[str, float] = field(default_factory=LazyHeap)
    _places: dict[str, Place] = field(default_factory=dict)
    _rankings: tuple[Rankings, ...] = field(default_factory=lambda: ({}, {}))
    _counted: dict[str, tuple[bool, bool, bool, bool, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.returns = Returns(self.heartbeat_seconds)

    def join(self, worker: Worker, now: float) -> None:
        """Add a worker, replacing an earlier one with its id."""
        before = self._workers.get(worker.worker_id)
        self._workers[worker.worker_id] = worker
        if worker.is_own:
            self._own[worker.worker_id] = worker
        else:
            self._own.pop(worker.worker_id, None)
        self.file(worker)
        self.seen(worker.worker_id, now)
        if before is not None and before.detached:
            self.returns.come(self.num_away, now)

    def expect(self, worker: Worker, now: float) -> None:
        """Add a worker whose leases outlived the last head. It is away until it comes back."""
        self._workers[worker.worker_id] = worker
        self.file(worker)
        self.silence.set(worker.worker_id, now + self.returns.seconds_after_restart(1))
        self.returns.leave(self.num_away, now)

    def recognise(self, worker: Worker) -> None:
        """Record that a worker whose ticket was unknown is a machine of the owner."""
        worker.ticket = ""
        self._own[worker.worker_id] = worker
        self.file(worker)

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    @property
    def num_away(self) -> int:
        """Workers whose connection closed, and that are not lost."""
        return len(self._workers) - self.num_attending

    @property
    def report_seconds(self) -> float:
        """The time between two reports of a worker, which grows with the number of workers. Those that are away count:
        the first to come back to a head would else report as often as in a small fleet, and count as lost as soon.
        """
        return max(self.heartbeat_seconds, len(self._workers) / REPORTS_PER_SECOND)

    def seen(self, worker_id: str, now: float) -> None:
        """Record that the worker is alive: it counts as lost only after another period of silence."""
        seconds = LOST_AFTER_REPORTS * self.report_seconds + LOST_AFTER_HEARTBEATS * self.heartbeat_seconds
        self.silence.set(worker_id, now + seconds)

    def report(self, worker: Worker, installed: SnapshotRef | None, refused: str, now: float) -> bool:
        """Record what a worker says it has installed, and refused. Return whether the installed snapshot changed."""
        self.seen(worker.worker_id, now)
        is_new = installed != worker.installed
        worker.installed, worker.refused = installed, refused
        if is_new:
            self.file(worker)
        return is_new

    def came_in(self, worker: Worker, steps_behind: int, is_late: bool) -> None:
        """Record that a worker has a new snapshot, with the learner so many steps ahead of it. `is_late`: no group is
        left that it could sample.
        """
        worker.steps_behind = max(steps_behind, worker.steps_behind if worker.late_installs else 0)
        worker.late_installs = worker.late_installs + 1 if is_late else 0
        self.file(worker)

    def tell(self, worker_ids: Iterable[str], ref: SnapshotRef) -> None:
        """Record that these workers hear of a snapshot, which they are to fetch."""
        for worker_id in worker_ids:
            if (worker := self._workers.get(worker_id)) is not None:
                worker.announced = ref

    def load(self, worker: Worker, num_samples: int, now: float) -> None:
        worker.samples = num_samples
        self.file(worker)
        worker.speed.use(num_samples, self.at_once(worker) * self.group_size, now)
        if worker.detached_at is None:
            worker.idle_since = None if num_samples else now if worker.idle_since is None else worker.idle_since

    def begin_step(self, worker: Worker, num_groups: int | None) -> None:
        """Limit the groups with which a worker begins a step."""
        worker.first_groups = num_groups

    def deliver(self, worker: Worker, num_samples: int, is_continuous: bool, now: float) -> float:
        """Record an accepted result of a worker. Return the seconds of a batch if its rate was measured, else 0.
        `is_continuous`: slots are refilled one by one.
        """
        worker.failures_in_a_row, worker.late_in_a_row, worker.first_groups = 0, 0, None
        worker.is_proven = True
        num_left = worker.samples if is_continuous else 0
        return worker.speed.deliver(num_samples, self.at_once(worker) * self.group_size, num_left, now)

    def set_failures(self, worker: Worker, num_failures: int) -> None:
        """Set a stranger's failures in a row: other workers of its ticket come before it."""
        worker.failures_in_a_row = num_failures
        self.file(worker)

    def activate(self, worker: Worker) -> None:
        worker.standby_since = None
        self.file(worker)

    def stand_by(self, worker: Worker, now: float) -> None:
        """Give the worker no more leases; it finishes those that it has."""
        worker.standby_since = now
        self.file(worker)

    def detach(self, worker: Worker, now: float) -> None:
        """Record that a connection closed: the worker counts as lost after a while unless it comes back."""
        worker.detached_at = now
        self.file(worker)
        self.silence.set(worker.worker_id, now + self.returns.grace_seconds)
        self.returns.leave(self.num_away, now)

    def waits_on(self, worker: Worker, now: float) -> bool:
        """Wait longer for a worker whose connection closed, if many are away and come back one after the other. Return
        whether there is such a wait.
        """
        if worker.detached_at is None or (until := self.returns.until(worker.detached_at)) <= now:
            return False
        self.silence.set(worker.worker_id, until)
        return True

    def came_late(self, worker: Worker, usual_seconds: float, now: float) -> float:
        """Record that a second lease on a group of this worker was quicker. A worker with as many such groups in a row
        as it decodes at once is too slow to be of use, and rests; then it gets one group, until it comes first with it.
        Return as `rest`. `usual_seconds`: from lease to result, of all workers.
        """
        worker.late_in_a_row += 1
        self.file(worker)
        if worker.late_in_a_row < self.at_once(worker):
            return 0.0
        worker.first_groups = 1
        return self.rest(worker, now, LATE_REST, usual_seconds)

    def standing(self, worker: Worker) -> Standing:
        """Return what is known of the worker. Of strangers new ones are as others, for they may come as often as they
        like.
        """
        if self.is_on_trial(worker):
            return "slow"
        return "known" if worker.is_proven or not worker.is_own else "new"

    def is_on_trial(self, worker: Worker) -> bool:
        """Whether the worker was too slow, and gets one group at a time until it comes first with it."""
        return worker.late_in_a_row >= self.at_once(worker)

    def rest(self, worker: Worker, now: float, backoff: Backoff = REST_SECONDS, unit_seconds: float = 1.0) -> float:
        """Rest a worker that failed a lease, if others are there to get the next leases. Failures of one batch count
        once. Return for how many seconds; 0.0 if it does not begin to rest.
        """
        resting = self.is_resting(worker)
        others = self.num_active - self.num_resting - (not (resting or worker.detached or worker.standby))
        if others <= 0 or resting:
            return 0.0
        worker.failures_in_a_row += 1
        seconds = unit_seconds * backoff.after(worker.failures_in_a_row)
        self.rests.set(worker.worker_id, now + seconds)
        self.file(worker)
        return seconds

    def is_resting(self, worker: Worker) -> bool:
        """Whether the worker gets no leases for a while because it failed one."""
        return self.rests.get(worker.worker_id) is not None

    def end_rests(self, now: float) -> bool:
        """End the rests that are over. Return whether there were any."""
        rested = self.rests.pop_until(now)
        for worker_id in rested:
            if (worker := self._workers.get(worker_id)) is not None:
                self.file(worker)
        return bool(rested)

    def lose(self, worker_id: str) -> None:
        self._own.pop(worker_id, None)
        if self._workers.pop(worker_id, None) is not None:
            self._count(worker_id, (False, False, False, False, 0))
            self._place(worker_id, None)
        self.silence.drop(worker_id)

    # ---- indexes ---------------------------------------------------------------------------------------------------

    def file(self, worker: Worker) -> None:
        """Update the indexes for this worker. Call this whenever one of its fields has changed."""
        attends = worker.detached_at is None
        here = attends and worker.standby_since is None
        free = here and not worker.samples
        resting = here and self.rests.get(worker.worker_id) is not None
        self._count(worker.worker_id, (attends, here, resting, free, self.share(worker) if here else 0))
        depth = self._depth_of(worker) if here and not resting else None
        if depth is None:
            self._place(worker.worker_id, None)
            return
        self._place(worker.worker_id, (depth, (worker.installed, worker.ticket)))
        ranking = self._rankings[depth].setdefault(worker.installed, {}).setdefault(worker.ticket, LazyHeap())
        failures = 0 if worker.is_own else worker.failures_in_a_row
        rank = (worker.samples, failures, worker.joined_at, worker.worker_id)
        ranking.set(worker.worker_id, rank)

    def at_once(self, worker: Worker) -> int:
        """Return how many groups this worker decodes at once now: as many as fill its slots, but at least one unit."""
        groups = self._fill(worker) if worker.width is None else min(self._fill(worker), worker.width.groups)
        return max(self.groups_per_unit, groups if self.most_groups is None else min(groups, self.most_groups))

    def share(self, worker: Worker) -> int:
        """Return how many groups this worker, if it is active, takes of those that are there for all."""
        if self.is_resting(worker) or worker.is_outrun:
            return 0
        return 1 if self.is_on_trial(worker) else self.at_once(worker)

    def _fill(self, worker: Worker) -> int:
        return -(-worker.slots // self.group_size)

    def full_seconds(self, worker: Worker) -> float:
        """Return the seconds that a worker needs for all groups that it may hold, by its measured rate; 0: unknown."""
        samples = LOOK_AHEAD * self.at_once(worker) * self.group_size
        return samples / worker.speed.rate if worker.speed.rate > 0 else 0.0

    def room(self, worker: Worker, depth: int) -> int:
        """Return how many more rollouts this worker may get: to fill its slots (depth 0), or also to wait at the worker
        (depth 1). While `limit` leaves some of its slots free, no group would wait: it would be decoded at once.
        """
        if self.most_groups is not None and self.most_groups < self._fill(worker):
            depth = 0
        groups = (depth + 1) * self.at_once(worker) if worker.first_groups is None else worker.first_groups
        return groups * self.group_size - worker.samples

    def _depth_of(self, worker: Worker) -> int | None:
        """Return the smallest depth at which the worker has room for a unit, or None."""
        unit = self.groups_per_unit * self.group_size
        return next((depth for depth in range(LOOK_AHEAD) if self.room(worker, depth) >= unit), None)

    def take(self, worker: Worker, lease_id: int, now: float) -> None:
        """Record that the worker got a lease."""
        worker.late_installs = 0
        if worker.width is not None:
            worker.width.take(lease_id, now)

    def end(self, worker: Worker, lease_id: int, is_measured: bool, now: float) -> None:
        """Record that a lease of the worker is over. `is_measured`: it brought a whole group."""
        if worker.width is not None:
            worker.width.end(lease_id, is_measured, self.spreads, now)

    def adapt(self, worker: Worker, is_waited_for: bool, now: float) -> bool:
        """Change how many groups the worker decodes at once, if its durations say so. Return whether it changed."""
        if worker.width is None or not worker.width.look(self.spreads, is_waited_for):
            return False
        self.load(worker, worker.samples, now)
        return True

    def limit(self, most_groups: int) -> None:
        """Limit the groups that a worker decodes at once, from now on."""
        if most_groups != self.most_groups:
            self.most_groups = most_groups
            for worker in self._workers.values():
                self.file(worker)

    def _place(self, worker_id: str, place: Place | None) -> None:
        old = self._places.get(worker_id)
        if old == place:
            return
        if old is not None:
            depth, (installed, ticket) = old
            by_ticket = self._rankings[depth][installed]
            by_ticket[ticket].drop(worker_id)
            if not by_ticket[ticket]:
                del by_ticket[ticket]
            if not by_ticket:
                del self._rankings[depth][installed]
        if place is None:
            del self._places[worker_id]
        else:
            self._places[worker_id] = place

    def _count(self, worker_id: str, new: tuple[bool, bool, bool, bool, int]) -> None:
        """Update the totals. `new`: whether the worker is connected, active, resting, idle; and its groups at once."""
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

    def rankings(self, depth: int) -> Rankings:
        """Return, for each kind, the workers that may get a group: with free slots (depth 0), or with room for waiting
        groups (depth 1).
        """
        return self._rankings[depth]

    def first(self, depth: int, kind: Kind) -> Rank | None:
        """Return the rank of the least loaded worker of this kind with room at this depth, which ends with its id."""
        ranking = self._rankings[depth].get(kind[0], {}).get(kind[1])
        return None if ranking is None else ranking.first()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def attending(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if not worker.detached]

    def active(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if not worker.detached and not worker.standby]

    def own(self) -> ValuesView[Worker]:
        return self._own.values()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)
