"""Several policies in one head: one planner for each, and one fleet that they share.

A planner knows nothing of the others: its S, steps, groups, versions and lineages are its policy's. The planners share
the numbering of leases, and the workers: a worker has weights of one policy at a time, so it works for one planner at a
time. This machine passes each event to the planner that it concerns, and moves workers where they are needed most:

    the worker gets no more leases -> its last one ends -> it leaves that planner and joins the other, which announces
    its newest snapshot

With one policy, the commands are exactly those of its planner.

`needs` decides which worker moves, and to which policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from echo2.control.head import commands as do
from echo2.control.head import events as ev
from echo2.control.head.leases import LeaseIds
from echo2.control.head.needs import Need, PostedWorker, donor, frontier_rollouts, num_unleased, typical_rate
from echo2.control.head.planner import Planner
from echo2.control.head.state import PlannerOptions
from echo2.control.machine import StateMachine
from echo2.errors import InvariantError
from echo2.types import SnapshotRef

#: Seconds between two checks of which policies need workers.
LOOK_SECONDS = 1.0


@dataclass(slots=True)
class Post:
    """A worker's assignment: it works for `policy` since `since`; `target`: the policy for which it will work once its
    leases are done. `joined`: its join event, updated with what it has installed now; None after a restart of the head,
    until the worker comes back.
    """

    policy: str
    since: float
    joined: ev.WorkerJoined | None = None
    target: str = ""


class Policies(StateMachine):
    """The planners by policy id, and each worker's post; `ends`: how the finished policies ended. `handle` is the only
    input, as with a planner.
    """

    def __init__(self, options: Iterable[PlannerOptions]) -> None:
        super().__init__()
        ids = LeaseIds()
        self.planners = {one.policy: Planner(one, ids) for one in options}
        if len(self.planners) > 1 and any(planner.activation is not None for planner in self.planners.values()):
            raise InvariantError("machines are rented and activated for a head of one policy only")
        self.posts: dict[str, Post] = {}
        self._wakes: dict[str, float] = {}
        self._look_at = 0.0
        self._moving = ""
        self._served_until = dict.fromkeys(self.planners, 0.0)
        self.ends: dict[str, do.StopRun | do.FinishRun] = {}

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Handle one event at time `now` (seconds, never decreasing) and return the commands, in order."""
        self.begin(event)
        match event:
            case ev.Tick():
                self._wakes.clear()
                self._tell_all(event, now)
            case ev.DiskFull() | ev.DiskFreed() | ev.WorkersHeard():
                self._tell_all(event, now)
            case ev.HeadStarted():
                self._started(event, now)
            case ev.WorkerJoined():
                self._joined(event, now)
            case ev.WorkerReported():
                self._reported(event, now)
            case _:
                self._tell(self._policy_of(event), event, now)
        if len(self.planners) > 1:
            self._look(now)
        self._ask_for_wake()
        return self.out

    def _tell_all(self, event: ev.Event, now: float) -> None:
        for policy in self.planners:
            self._tell(policy, event, now)

    def _tell(self, policy: str, event: ev.Event, now: float) -> None:
        """Pass an event to a planner and adopt its commands, except timers and ends, which concern all policies."""
        planner = self.planners[policy]
        planner.num_events = self.num_events - 1  # its commands then name the current event as their cause
        for command in planner.handle(event, now):
            match command:
                case do.WakeAt():
                    self._wakes[policy] = command.at
                case do.StopRun() | do.FinishRun():
                    self._ended(policy, command)
                case do.WorkerGone():
                    self._gone(command, now)
                case _:
                    self.out.append(command)

    def _policy_of(self, event: ev.Event) -> str:
        """Return the policy that an event concerns. If a worker names a false one, its own planner handles that."""
        match event:
            case ev.GroupDelivered():
                policy = self._holder_of(event.lease_id) or event.group.policy
            case ev.GroupScored() | ev.GroupUnfit() | ev.GroupChecked():
                policy = event.group.policy
            case ev.SnapshotPublished():
                policy = event.ref.policy
            case ev.LeaseFailed() | ev.DeliveryMalformed():
                policy = self._holder_of(event.lease_id)
            case ev.LearnerJoined() | ev.LearnerLost() | ev.GroupsWanted() | ev.StepTrained() | ev.CheckpointSaved():
                if event.policy not in self.planners:
                    raise InvariantError(f"this head has no policy {event.policy}: {event}")
                return event.policy
            case _:
                policy = ""
        if policy in self.planners:
            return policy
        post = self.posts.get(getattr(event, "worker_id", ""))
        return post.policy if post is not None else next(iter(self.planners))

    def _holder_of(self, lease_id: int) -> str:
        """Return the policy of an open lease; "" if no lease with that id is open."""
        return next((name for name, one in self.planners.items() if one.leases.get(lease_id) is not None), "")

    def _ended(self, policy: str, command: do.StopRun | do.FinishRun) -> None:
        """End the run when all policies are over, as a stop if one of them had to stop."""
        self.ends[policy] = command
        if len(self.ends) == len(self.planners):
            stops = [end for end in self.ends.values() if isinstance(end, do.StopRun)]
            self.out.append(stops[0] if stops else command)

    def _ask_for_wake(self) -> None:
        dues = list(self._wakes.values())
        if len(self.planners) > len(self.ends) and len(self.planners) > 1:
            dues.append(self._look_at)
        if dues:
            self.wake_at(min(dues), "next deadline of a lease or of a silent worker")

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _started(self, event: ev.HeadStarted, now: float) -> None:
        """Start a planner. Workers with leases from before the restart stay with the policy of those leases."""
        self._tell(event.policy, event, now)
        for worker in self.planners[event.policy].fleet:
            if worker.worker_id in self.posts:
                other = self.posts[worker.worker_id].policy
                raise InvariantError(f"{worker.worker_id} holds leases of {other} and of {event.policy}")
            self.posts[worker.worker_id] = Post(event.policy, now)

    def _joined(self, event: ev.WorkerJoined, now: float) -> None:
        post = self.posts.get(event.worker_id)
        if post is None:
            post = self.posts[event.worker_id] = Post(self._place(event, now), now)
        post.joined = event
        self._tell(post.policy, self._as_told(post.policy, event), now)

    def _as_told(self, policy: str, event: ev.WorkerJoined) -> ev.WorkerJoined:
        """Return a join event as this planner may see it, without other policies' weights and leases."""
        held = tuple(lease_id for lease_id in event.held_leases if self._holder_of(lease_id) in ("", policy))
        return replace(event, installed=_own(policy, event.installed), held_leases=held)

    def _reported(self, event: ev.WorkerReported, now: float) -> None:
        post = self.posts.get(event.worker_id)
        policy = self._policy_of(event)
        if post is not None and post.joined is not None and post.joined.installed != event.installed:
            post.joined = replace(post.joined, installed=event.installed)
        self._tell(policy, replace(event, installed=_own(policy, event.installed)), now)

    def _gone(self, command: do.WorkerGone, now: float) -> None:
        """Handle a planner's loss of a worker. The head has lost it too, unless the worker only moves."""
        post = self.posts.pop(command.worker_id)
        self._served_until[post.policy] = now
        if command.worker_id != self._moving:
            self.out.append(command)

    def _place(self, event: ev.WorkerJoined, now: float) -> str:
        """Return the policy for a new worker: the neediest one; among equals, the one whose weights it has."""
        mine = event.installed.policy if event.installed is not None else ""
        needs = [need for need in self._needs(now) if need.policy not in self.ends] or self._needs(now)
        return min(needs, key=lambda need: (need.urgency, need.policy != mine)).policy

    # ---- moving workers ----------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Complete moves of workers, and begin one for each policy that wants workers, the neediest first."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        for worker_id, post in list(self.posts.items()):
            worker = self.planners[post.policy].fleet.get(worker_id)
            if post.target and worker is not None and not worker.detached and not worker.samples:
                self._move(worker_id, post, now)
        for policy in [need.policy for need in self._needs(now) if need.num_unleased]:
            needs = {need.policy: need for need in self._needs(now)}
            if not self._is_coming(policy, now):
                chosen = donor(needs.pop(policy), needs.values(), now)
                if chosen is not None:
                    self.posts[chosen].target = policy
                    self._tell(self.posts[chosen].policy, ev.WorkerWithdrawn(chosen), now)

    def _move(self, worker_id: str, post: Post, now: float) -> None:
        target, joined = post.target, post.joined
        assert joined is not None
        self._moving = worker_id
        self._tell(post.policy, ev.WorkerLeft(worker_id, f"it works for {target} from now on"), now)
        self._moving = ""
        self.posts[worker_id] = Post(target, now, joined)
        self._tell(target, self._as_told(target, replace(joined, held_leases=())), now)

    def _is_coming(self, policy: str, now: float) -> bool:
        """Whether a worker is moving to this policy: it still works for another one, or lacks the new weights yet."""
        turn = self.planners[policy].options.lease_seconds
        for worker_id, post in self.posts.items():
            if post.target == policy:
                return True
            if post.policy == policy and not post.target and now - post.since < turn:
                worker = self.planners[policy].fleet.get(worker_id)
                if worker is not None and not worker.detached and worker.installed is None:
                    return True
        return False

    def _needs(self, now: float) -> list[Need]:
        """Return the needs of all policies, the neediest first."""
        typical = typical_rate(worker for planner in self.planners.values() for worker in planner.fleet)
        needs = [self._need(policy, planner, typical, now) for policy, planner in self.planners.items()]
        return sorted(needs, key=lambda need: need.urgency)

    def _need(self, policy: str, planner: Planner, typical: float, now: float) -> Need:
        posted = [(worker, self.posts[worker.worker_id]) for worker in planner.fleet if not worker.detached]
        stay = [(worker, post) for worker, post in posted if not post.target]
        members = tuple(PostedWorker(worker, post.since, worker.rate or typical) for worker, post in stay)
        is_served = any(one.worker.installed is not None or not one.had_turn(planner, now) for one in members)
        return Need(
            policy=policy,
            state=planner,
            members=members,
            num_unleased=num_unleased(planner),
            frontier_rollouts=frontier_rollouts(planner),
            alone_since=math.inf if is_served else self._served_until[policy],
        )

    # ---- queries -----------------------------------------------------------------------------------------------------

    def expelled_until(self, worker_id: str, now: float) -> float | None:
        """Return until when this worker is expelled; None if it is not."""
        conducts = [planner.conducts.expulsion(worker_id, now) for planner in self.planners.values()]
        return max((conduct.expelled_until for conduct in conducts if conduct is not None), default=None)


def _own(policy: str, installed: SnapshotRef | None) -> SnapshotRef | None:
    """Return the snapshot if it belongs to this policy, otherwise None."""
    return installed if installed is not None and installed.policy == policy else None
