"""Collects who waits for whom, since when, until when, and why: the table that `echo2 status` prints."""

from __future__ import annotations

from echo2.core.errors import counted
from echo2.core.types import SnapshotRef, Wait
from echo2.head.decide import granting
from echo2.head.decide.state import PlannerState
from echo2.head.fleet.decide.fleet import Worker
from echo2.head.strangers.decide import checks, strangers


def list_waits(state: PlannerState, now: float) -> list[Wait]:
    """Return all waits: a pause of the run, the learner's waits, missing valid results of strangers, waits for detached
    workers, waits of idle and standby workers, and those of evaluations.
    """
    waits = [state.health.paused] if state.health.paused else []
    waits += [*_learner_waits(state), *_waits_for_good_work(state, now)]
    for worker in state.fleet:
        until = state.fleet.silence.get(worker.worker_id)
        if worker.detached_at is not None:
            reason = "its connection is closed; its leases go to others if it does not come back"
            waits.append(Wait("head", worker.worker_id, worker.detached_at, until, reason))
        elif worker.standby_since is not None:
            reason = "it stands by: the active workers suffice"
            waits.append(Wait(worker.worker_id, "head", worker.standby_since, None, reason))
        elif worker.idle_since is not None:
            name, reason = _why_idle(state, worker)
            waits.append(Wait(worker.worker_id, name, worker.idle_since, None, reason))
    return waits + _evaluation_waits(state) + granting.waits_for_slow(state, now)


def _evaluation_waits(state: PlannerState) -> list[Wait]:
    """Return the waits of evaluations for tasks that are not sampled yet, and for rewards of sampled ones."""
    waits = []
    leases = [lease for _, lease in state.leases.open_leases() if lease.group.kind == "eval"]
    for version, round_ in state.evaluation.rounds.items():
        of_round = [lease for lease in leases if lease.group.number // round_.size == version]
        num_unsampled = len(round_.waiting) + len(of_round)
        num_unscored = round_.size - len(round_.done) - num_unsampled
        what = f"evaluation of version {version}: {{}} of {round_.size} tasks"
        if num_unsampled:
            until = min((lease.deadline for lease in of_round), default=None)
            reason = f"{what.format(num_unsampled)} not yet sampled"
            waits.append(Wait("head", "workers", round_.started_at, until, reason))
        if num_unscored:
            reason = f"{what.format(num_unscored)} sampled, {_for_rewards(state)}"
            waits.append(Wait("head", "rewards", round_.started_at, None, reason))
    return waits


def _learner_waits(state: PlannerState) -> list[Wait]:
    training = state.training
    if not training.learner_joined and training.version >= state.options.max_steps:
        return []  # the learner has ended; the last evaluation is running
    if not training.learner_joined:
        return [Wait("head", "learner", training.wanted_since or 0.0, None, "no learner is connected")]
    step, since = training.wanted_step, training.wanted_since
    if step is None or since is None:
        return []
    if step >= state.options.max_steps:
        return [Wait("learner", "workers", since, None, "all steps are trained; the last evaluation is under way")]
    missing: dict[str, tuple[int, float | None]] = {}
    num_missing = num_unheld = state.options.groups_per_step - state.groups.num_live(step)
    num_unscored = 0
    for record in state.groups.of_step(step):
        if record.state in ("pending", "leased", "delivered"):
            num_missing += 1
            num_unheld += record.state == "pending"
            num_unscored += record.state == "delivered"
            for lease_id in state.leases.of_group(state.train_group(record.number)):
                worker_id, lease = state.leases.get(lease_id) or ("", None)
                count, until = missing.get(worker_id, (0, None))
                deadline = lease.deadline if lease is not None else None
                missing[worker_id] = (count + 1, deadline if until is None else min(until, deadline or until))
    waits = [
        Wait(
            "learner",
            worker_id,
            since,
            until,
            f"step {step}: {worker_id} holds {count} of {num_missing} missing groups",
        )
        for worker_id, (count, until) in missing.items()
    ]
    if num_unheld:
        reason = f"step {step}: {counted(num_unheld, 'group')} not yet sampled by any worker"
        reason += " (no worker is connected)" if not state.fleet.attending() else ""
        waits.append(Wait("learner", "workers", since, None, reason))
    for group, check in checks.held_groups(state, step):
        reason = f"step {step}: {group} of {check.drawn.worker_id} is being checked"
        waits.append(Wait("learner", check.checker or "head", since, check.until, reason))
    if num_unscored:
        waits.insert(0, Wait("learner", "rewards", since, None, _why_unscored(state, step, num_unscored)))
    return waits


def _why_unscored(state: PlannerState, step: int, num_unscored: int) -> str:
    later = range(step + 1, step + state.options.max_staleness + 1)
    num_later = sum(record.state == "delivered" for ahead in later for record in state.groups.of_step(ahead))
    groups = f"{num_unscored} group{'s' * (num_unscored > 1)} sampled"
    groups += f" ({num_unscored + num_later} with those of later steps)" if num_later else ""
    return f"step {step}: {groups}, {_for_rewards(state)}"


def _for_rewards(state: PlannerState) -> str:
    seconds = state.measurements.rewards.mean
    each = f" ({seconds:.3g} s each)" if seconds is not None else ""
    return f"waiting for {state.options.scored_by}{each}"


def _waits_for_good_work(state: PlannerState, now: float) -> list[Wait]:
    """Return the waits for results that strangers fail to deliver, and for expelled workers."""
    waits, health = [], state.health
    if health.num_failed_at_strangers >= state.options.max_failures:
        reason = (
            f"{counted(health.num_failed_at_strangers, 'group')} failed at strangers' machines in a row; the last: "
        )
        waits.append(Wait("head", "workers", state.training.wanted_since or 0.0, None, reason + health.last_failure))
    return waits + [
        Wait(name, "head", one.at, one.expelled_until, f"it is expelled: {one.expelled_for}")
        for name, one in state.penalties.expelled(now)
    ]


def _coming(worker: Worker, newest: SnapshotRef) -> str:
    """Explain why a worker lacks the newest snapshot."""
    if worker.refused:
        return f"it did not install {worker.refused}"
    return f"it is still receiving the weights of version {newest.version}"


def why_of_no_use(state: PlannerState, worker: Worker) -> str:
    """Return why a worker hardly ever gets a group, and what would help, in words that stay the same while it is so;
    empty if it is of use. Its own terminal shows them, too.
    """
    if worker.is_outrun:
        most, behind = state.options.max_staleness, worker.steps_behind
        return (
            f"new weights reach it too late: when it had its last versions, the learner was up to {behind} steps ahead "
            f"of them, and schedule.max_staleness = {most} lets it sample for {counted(most, 'step')} ahead at most. "
            f"To get groups it needs schedule.max_staleness >= {behind + 1}, larger steps (schedule.groups_per_step), "
            "or a faster link or disk"
        )
    return _too_slow(worker, "a while") if worker.late_in_a_row and state.fleet.is_resting(worker) else ""


def _too_slow(worker: Worker, how_long: str) -> str:
    is_paid = worker.price_usd_per_hour > 0 and not worker.offer
    cost = f". It costs ${worker.price_usd_per_hour:.4g} an hour until you stop it" if is_paid else ""
    why = f"others began its last {worker.late_in_a_row} groups later and had them sooner"
    return f"it is too slow: {why}, and come first for {how_long}{cost}"


def _why_idle(state: PlannerState, worker: Worker) -> tuple[str, str]:
    """Return whom an idle worker waits for, and why."""
    installed = worker.installed
    newest = state.snapshots.newest()
    if newest is None:
        return "learner", "no snapshot is published yet"
    if worker.is_outrun:
        return "head", why_of_no_use(state, worker)
    if installed is None or not state.snapshots.has(installed):
        return "head", _coming(worker, newest)
    last = installed.version + state.options.max_staleness
    if not worker.is_own and (until := state.credits.rests.get(worker.ticket)) is not None:
        return (
            "head",
            f"its ticket gets no leases for {max(0.0, until - state.now):.0f} s: its leases brought no results",
        )
    if (until := state.fleet.rests.get(worker.worker_id)) is not None:
        seconds = max(0.0, until - state.now)
        if worker.late_in_a_row:
            return "head", _too_slow(worker, f"{seconds:.0f} s")
        return "head", f"its last lease brought no result, and others come first for {seconds:.0f} s"
    if unchecked := strangers.why_unchecked(state, worker):
        return "head", unchecked
    if last >= state.options.max_steps:
        return "learner", "every group of the run is sampled or leased"
    if installed.version < newest.version:
        return "head", f"it has version {installed.version}; {_coming(worker, newest)}"
    return (
        "learner",
        f"every group up to step {last} (version {installed.version} + max_staleness) is sampled or leased",
    )
