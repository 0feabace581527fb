"""What must hold of the machines of `decide/` after every event. `check(machine)` says what does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hostile_workers import make_worker

from echo2.core.errors import InvariantError
from echo2.head.decide import pacing
from echo2.head.decide.groups import UNINFORMATIVE, GroupBook, LeaseTable, PlannedGroup
from echo2.head.decide.planner import Planner
from echo2.head.fleet.decide.fleet import Fleet
from echo2.planning.sim.report import Report
from echo2.planning.sim.scenario import Scenario
from echo2.planning.simulate import run_scenario as run_unchecked
from echo2.weights.broadcast.decide.fetcher import Fetcher
from echo2.weights.broadcast.decide.origin import MAX_PLANS, Broadcast
from echo2.weights.broadcast.decide.origin_messages import ORIGIN
from echo2.weights.broadcast.decide.plan import MembersView, RoutePlan
from echo2.weights.broadcast.decide.routes import can_link
from echo2.worker.decide.scheduler import WorkerScheduler

#: Groups, leases and workers up to which the planners of a simulation are checked after every event.
CHECKED_EACH_EVENT = 200
#: Members up to which a simulated broadcast is.
MEMBERS_CHECKED = 50


def run_scenario(
    scenario: Scenario, seed: int, ledger_path: Path = Path(":memory:"), keeps_events: bool = True
) -> Report:
    """As the simulator's, with every machine checked.

    Raises:
        InvariantError: a rule did not hold; the message names the seed and the time.
    """
    return run_unchecked(scenario, seed, ledger_path, keeps_events, check=Checker(), make_worker=make_worker)


class Checker:
    """Checks small machines at each call, large planners so rarely that it costs each event the same."""

    def __init__(self) -> None:
        self._num_unchecked = 0

    def __call__(self, machine: object) -> None:
        if isinstance(machine, Planner):
            size = len(machine.groups) + len(machine.leases) + len(machine.fleet)
            self._num_unchecked += 1
            if size > CHECKED_EACH_EVENT and self._num_unchecked * 10 < size:
                return
            self._num_unchecked = 0
        if not isinstance(machine, Broadcast) or len(machine.members) <= MEMBERS_CHECKED:
            check(machine)


def check(machine: object) -> None:
    """Raises InvariantError on the first rule that does not hold."""
    match machine:
        case Planner():
            check_planner(machine)
        case Fleet():
            check_fleet(machine)
        case GroupBook():
            check_groups(machine)
        case LeaseTable():
            check_leases(machine)
        case WorkerScheduler():
            check_scheduler(machine)
        case Fetcher():
            check_fetcher(machine)
        case Broadcast():
            check_broadcast(machine)
        case _:
            raise InvariantError(f"there are no rules for {machine}")


# ---- the head ----------------------------------------------------------------------------------------------------


def check_planner(planner: Planner) -> None:
    """Raise InvariantError on the first rule that does not hold."""
    check_groups(planner.groups)
    check_leases(planner.leases)
    if not planner.leases.changed:
        check_fleet(planner.fleet)
    overdue_at = [check.until for check in planner.trust.open.values()]
    if overdue_at != sorted(overdue_at):
        raise InvariantError(f"open checks are overdue at {overdue_at}, not the oldest first")
    for worker in planner.fleet:
        if worker.installed is not None and worker.installed.policy != planner.options.policy:
            raise InvariantError(f"{worker.worker_id} has {worker.installed}, which is of no use here")
        if worker.width is not None and not 1 <= worker.width.groups <= worker.width.most:
            raise InvariantError(f"{worker.worker_id} decodes {worker.width.groups} groups at once: {worker.width}")
    if planner.options.publish_every % planner.publish_every:
        raise InvariantError(f"{planner.publish_every} steps lie between snapshots")
    live: dict[int, int] = {}
    for record in planner.groups:
        live[record.step] = live.get(record.step, 0) + (record.state != "retired")
        _check_group(planner, record)
    for step, count in live.items():
        if count > planner.options.groups_per_step:
            raise InvariantError(f"step {step} has {count} live groups of {planner.options.groups_per_step}")
    for worker_id, lease in planner.leases.open_leases():
        if pacing.staleness(lease.step, lease.min_version) > planner.options.max_staleness:
            raise InvariantError(f"{worker_id} may sample {lease} with tokens older than max_staleness")
        held = planner.groups.get(lease.group.number) if lease.group.kind == "train" else None
        if lease.group.kind == "train" and (held is None or held.step != lease.step):
            raise InvariantError(f"lease {lease.lease_id} is of a group that is not open or changed its step")


def _check_group(planner: Planner, record: PlannedGroup) -> None:
    if record.is_held and record.state in ("delivered", "ready") and record.number not in planner.trust.open:
        raise InvariantError(f"group {record.number} is held, and no check of it is under way")
    num_leases = len(planner.leases.of_group(planner.train_group(record.number)))
    if record.state == "pending" and num_leases:
        raise InvariantError(f"group {record.number} is pending and leased")
    if record.state == "leased" and not num_leases:
        raise InvariantError(f"group {record.number} is leased by nobody")
    if record.state == "retired" and num_leases:
        raise InvariantError(f"group {record.number} is retired and leased")
    if record.state == "trained" and record.step >= planner.training.version:
        raise InvariantError(
            f"group {record.number} is trained at step {record.step}; the run stands at {planner.training.version}"
        )
    if record.step < planner.training.version and record.state not in ("trained", "retired"):
        raise InvariantError(f"group {record.number} of step {record.step} was left behind {record.state}")
    if record.state in ("fed", "trained"):
        age = pacing.staleness(record.step, record.oldest_version or 0)
        if age > planner.options.max_staleness:
            raise InvariantError(f"group {record.number} trains step {record.step} at staleness {age}")


def check_fleet(fleet: Fleet) -> None:
    """The files hold what a look at every worker finds."""
    here = [worker for worker in fleet._workers.values() if not worker.detached and not worker.standby]
    free = [worker for worker in here if not worker.samples]
    counts = (
        len(fleet.attending()),
        len(here),
        sum(map(fleet.is_resting, here)),
        len(free),
        sum(map(fleet.share, here)),
    )
    kept = (fleet.num_attending, fleet.num_active, fleet.num_resting, fleet.num_free, fleet.active_groups)
    if counts != kept:
        raise InvariantError(f"the fleet is {counts} and was counted as {kept}")
    if fleet._own != {worker.worker_id: worker for worker in fleet if worker.is_own}:
        raise InvariantError(f"machines of the owner are kept as {fleet._own}")
    filed = {
        worker.worker_id: (depth, (worker.installed, worker.ticket))
        for worker in here
        if not fleet.is_resting(worker) and (depth := fleet._depth_of(worker)) is not None
    }
    if filed != fleet._places:
        raise InvariantError(f"workers are filed as {fleet._places}; they should be as {filed}")
    for worker_id, (depth, kind) in filed.items():
        if fleet._rankings[depth][kind[0]][kind[1]].get(worker_id) is None:
            raise InvariantError(f"{worker_id} is filed under {kind} and not ranked there")


def check_groups(book: GroupBook) -> None:
    """What is counted and queued is what a look at every group finds."""
    for step, of_step in book._by_step.items():
        states = [record.state for record in of_step.records]
        num_ready = sum(record.state == "ready" and not record.is_held for record in of_step.records)
        counts = (len(states) - states.count("retired"), states.count("fed"), num_ready)
        if counts != (of_step.num_live, of_step.num_fed, len(of_step.ready)):
            raise InvariantError(f"step {step}: {counts} groups are live, fed and ready, and counted otherwise")
        supplied: Counter[str] = Counter()
        for record in of_step.records:
            supplied.update(record.supplied_by)
        if dict(supplied) != of_step.supplied or min(supplied.values(), default=1) < 1:
            raise InvariantError(f"step {step}: strangers supply {supplied}, counted as {of_step.supplied}")
        if of_step.num_uninformative != sum(record.why == UNINFORMATIVE for record in of_step.records):
            raise InvariantError(f"step {step}: {of_step.num_uninformative} uninformative groups are counted")
    for record in book._records.values():
        if record.state == "pending" and book.unit_of(record) not in book._is_pending:
            raise InvariantError(f"group {record.number} is pending but not queued")
        if record.state in ("ready", "fed", "trained") and record.oldest_version is None:
            raise InvariantError(f"group {record.number} is {record.state} without a version")


def check_leases(table: LeaseTable) -> None:
    """Every open lease is under its group and its worker."""
    by_group = sum(len(ids) for ids in table._by_group.values())
    by_worker = sum(len(ids) for ids in table._by_worker.values())
    if not len(table._open) == by_group == by_worker:
        raise InvariantError(f"leases: {len(table._open)} open, {by_group} by group, {by_worker} by worker")
    for lease_id, (worker_id, lease) in table._open.items():
        if lease_id not in table._by_group[lease.group] or lease_id not in table._by_worker[worker_id]:
            raise InvariantError(f"lease {lease_id} is not indexed under {lease.group} and {worker_id}")


# ---- workers and broadcast ---------------------------------------------------------------------------------------


def check_scheduler(scheduler: WorkerScheduler) -> None:
    """Raise InvariantError if a lease is in two places, or is sampled without weights."""
    places = [set(scheduler.waiting), set(scheduler.generating), set(scheduler.produced)]
    if sum(map(len, places)) != len(set().union(*places)):
        raise InvariantError(f"a lease is in two places: {places}")
    if scheduler.generating and scheduler.installed is None:
        raise InvariantError("leases are generating without weights")
    if scheduler.missing_base in scheduler.base_models and scheduler.missing_base is not None:
        raise InvariantError(f"{scheduler.missing_base} is here, and is to be fetched")
    running = [held.num_running for held in scheduler.generating.values()]
    largest = max((held.lease.num_samples for held in scheduler.generating.values()), default=0)
    if not scheduler.deterministic and sum(running) >= scheduler.most_slots + max(1, largest):
        raise InvariantError(f"{sum(running)} rollouts are generating in {scheduler.most_slots} slots")


def check_fetcher(fetcher: Fetcher) -> None:
    """Raise InvariantError if a chunk is asked of two, or something is under way and nothing is wanted."""
    asked = [chunk for source in fetcher.sources.values() for chunk in source.requested]
    if len(asked) != len(set(asked)):
        raise InvariantError("a chunk is asked of two sources")
    if fetcher.download is None:
        if asked or fetcher.sources:
            raise InvariantError("something is asked for and nothing is wanted")
        return
    if not fetcher.download.missing:
        raise InvariantError(f"{fetcher.download.payload} is whole and still under way")
    if any(source.is_barred and source.requested for source in fetcher.sources.values()):
        raise InvariantError("a source that is not trusted was asked")


def check_broadcast(broadcast: Broadcast) -> None:
    """Raise InvariantError if routes lead nowhere, a suspect still serves, or state grew past its bounds."""
    fleet = broadcast.fleet
    for plan in broadcast.plans.values():
        check_plan(plan, fleet)
        for source in plan.children:
            if source in broadcast.suspects or source in plan.unusable:
                raise InvariantError(f"{source} still serves {plan.payload}")
    if len(broadcast.plans) > MAX_PLANS or not set(broadcast.holdings) <= set(broadcast.members):
        raise InvariantError("plans or holders that should have been forgotten")


def check_plan(plan: RoutePlan, fleet: MembersView) -> None:
    """Raise InvariantError on a circle, a source nobody knows, too many children, or a count that is off."""
    counted: dict[str, dict[str, int]] = {}
    for worker_id, sources in plan.routes.items():
        if worker_id in plan.whole:
            continue
        for stripe, source in enumerate(sources):
            mine = counted.setdefault(source, {})
            mine[worker_id] = mine.get(worker_id, 0) + 1
            if source == ORIGIN:
                continue
            if source not in fleet.members or not can_link(fleet.members[source], fleet.members[worker_id]):
                raise InvariantError(f"{worker_id} can't take stripe {stripe} of {source}")
            if not plan.leads_to_origin(source, stripe, worker_id, worker_id):
                raise InvariantError(f"stripe {stripe} of {worker_id} goes round in a circle at {source}")
    if counted != plan.children:
        raise InvariantError(f"children {plan.children}, by the routes {counted}")
    for source, mine in plan.children.items():
        if source != ORIGIN and len(mine) > fleet.fan_out:
            raise InvariantError(f"{source} has {len(mine)} children, {fleet.fan_out} allowed")
