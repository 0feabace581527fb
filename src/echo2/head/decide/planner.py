"""The planner, the state machine of the head: which worker samples which group, with which version and until when; what
the learner is fed; when the run is over.

`handle(event, now)` is the only input, the returned commands are the only output. The planner uses the tables beside
it: `groups` (the state of each group, and which worker holds what), `fleet` (the workers), the evaluations of `state`,
and the rule in `pacing`. Read `granting` first. Sources: ECHO-2 sections 4 and 4.1 (versioned execution), RolloutPipe
(complete groups, frontier first).

The commands of step t in order:  IssueGroup (bound to t) -> GrantLeases -> AcceptDelivery -> ScoreGroup ->
KeepScores -> FeedGroup -> EndStep -> RecordStep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from echo2.core.errors import InvariantError
from echo2.core.types import SnapshotRef, Wait
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide import granting, pacing, results
from echo2.head.decide.groups import PlannedGroup
from echo2.head.decide.state import PlannerOptions, PlannerState, Training
from echo2.head.decide.waits import list_waits, why_of_no_use
from echo2.head.fleet.decide import standby, workers
from echo2.head.fleet.decide.fleet import UNKNOWN, Worker
from echo2.head.fleet.decide.measurements import learner_wait
from echo2.head.strangers.decide import checks, strangers

#: What comes from a worker at work: as good as a report that it is alive.
_AT_WORK = ev.GroupDelivered | ev.DeliveryMalformed | ev.LeaseFailed | ev.GroupChecked
#: How many lease durations an evaluation waits for a machine of the owner.
EVAL_WAIT_LEASES = 2.0


class Planner(PlannerState):
    """The state, and the effect of each kind of event on it."""

    def __init__(self, options: PlannerOptions) -> None:
        super().__init__(options)
        self._num_passed = 0

    # ---- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Handle one event at time `now` (seconds, never decreasing) and return the commands, in order."""
        self.begin_at(event, now)
        any_change = bool(self.leases.changed) or not isinstance(event, ev.WorkerReported | ev.WorkersHeard)
        if isinstance(event, ev.WorkersHeard):
            workers.workers_heard(self, event.worker_ids, now)
        elif isinstance(event, _AT_WORK):
            workers.workers_heard(self, (event.worker_id,), now)
        if isinstance(event, ev.WorkerReported) and workers.worker_reported(self, event, now):
            any_change = True
        # Deadlines go first: a result that arrives at its deadline is late, whether or not the timer has fired yet.
        if workers.expire(self, now) | checks.expire(self, now) or any_change:
            self._take(event, now)
            self._advance(now)
        standby.look(self, now)
        self._ask_for_wake()
        return self.out

    def _take(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.HeadStarted():
                self._start(event, now)
            case ev.LearnerJoined():
                self._learner_joined(event.version)
            case ev.LearnerLost():
                self.training.lose(now)
            case ev.GroupsWanted():
                self._groups_wanted(event.step, now)
            case ev.StepTrained():
                self._step_trained(event, now)
            case ev.SnapshotPublished():
                self._snapshot_published(event.ref, now)
            case ev.CheckpointSaved():
                self._checkpoint_saved(event)
            case ev.WorkerJoined():
                workers.worker_joined(self, event, now)
            case ev.WorkerDetached():
                if (worker := self.fleet.get(event.worker_id)) is not None:
                    self.fleet.detach(worker, now)
            case ev.WorkerLeft():
                workers.lose_worker(self, event.worker_id, event.reason, now)
            case ev.GroupDelivered() | ev.DeliveryMalformed() | ev.LeaseFailed() if self._is_expelled(event):
                pass  # ignore everything from an expelled worker
            case ev.GroupDelivered():
                results.delivered(self, event, now)
                workers.adapt(self, event.worker_id, now)
            case ev.DeliveryMalformed():
                results.delivery_malformed(self, event)
            case ev.LeaseFailed():
                results.lease_failed(self, event, now)
            case ev.GroupScored():
                results.scored(self, event)
            case ev.GroupUnfit():
                results.give_up(self, event.group, event.reason, event.detail, event.seconds)
            case ev.GroupChecked():
                checks.checked(self, event)
            case ev.RentFailed():
                if self.rentals is not None:
                    self.rentals.fail(event.offer, now)
            case ev.DiskFull():
                self.health.pause(Wait("head", "disk", now, None, event.reason))
            case ev.DiskFreed():
                self.health.pause(None)

    def _advance(self, now: float) -> None:
        """Emit all commands that the event may have made possible."""
        standby.keep_last(self)
        checks.assign(self)
        workers.expel(self, now)
        self._finish_evals(now)
        self.settle(now)
        if self.health.over is None and self.health.paused is None:
            granting.grant_backup_leases(self, now)
            granting.grant(self, now)
            self._feed(now)
        if self.health.over is None:
            self._finish()

    def _ask_for_wake(self) -> None:
        heaps = (self.leases.deadlines, self.fleet.silence, self.fleet.rests, self.credits.rests)
        dues = [at for heap in heaps if (at := heap.first()) is not None]
        if (overdue_at := self.trust.next_at()) is not None:
            dues.append(overdue_at)
        if self.evaluation.rounds and self.evaluation.gives_up_at is not None:
            dues.append(self.evaluation.gives_up_at)
        is_open = self.training.learner_joined and self.health.over is None
        if self.options.offers and self.rentals is not None and is_open:
            dues.append(self.rentals.next_at)  # there may be no worker whose reports wake it
        if self.health.paused is None and (late_at := granting.next_at(self)) is not None:
            dues.append(late_at)
        if self.now < (until := granting.shared_until(self)):
            dues.append(until)
        if dues:
            self.wake_at(min(dues), "next deadline of a lease or of a silent worker")

    # ---- start, learner --------------------------------------------------------------------------------------------

    def _start(self, event: ev.HeadStarted, now: float) -> None:
        self.training = Training(
            event.version, event.lineage, event.checkpoint_version, event.oldest_kept, wanted_since=now
        )
        self.groups.start_at(event.next_number)
        self.leases.start_at(event.next_lease_id)
        if event.next_lease_id > 1:
            self.training.replaces_weights(now)
        self.evaluation.restore(event.evaluated)
        for ticket, trust in event.trust:
            self.trust.put(ticket, trust)
        self._drop(self.snapshots.restore(event.published, event.version), "of a history that was abandoned")
        standby.recover(self, event.machines, now)
        for old in event.groups:
            record = PlannedGroup(**asdict(old) | ({"state": "pending"} if old.state == "open" else {}))
            self.groups.restore(record)
            if record.state == "delivered":
                reason = "delivered before the restart, not scored yet"
                self.emit(do.ScoreGroup, reason, group=self.train_group(old.number), rollouts=None)
        checks.recover(self, event.checks)
        strangers.recover(self, event)
        self.fleet.returns.begin(now)
        num_workers = len({lease.worker_id for lease in event.leases})
        back_at = now + self.fleet.returns.seconds_after_restart(num_workers)
        for lease in event.leases:
            self._restore_lease(lease, now, back_at)
        granting.mend_units(self)
        for record in list(self.groups):
            results.replace_flat(self, record)  # scored, but the head was killed before it was retired
        for ref in self.snapshots.retained.values():
            if self.evaluation.is_due(ref.version):
                self._start_eval(ref, now)

    def _restore_lease(self, old: ev.RecoveredLease, now: float, back_at: float) -> None:
        """Restore a lease after a restart of the head. Its worker may still be sampling, so lease and worker are kept,
        the worker as detached, until it returns or is lost. The deadline is not before `back_at`: until then it may
        have to wait at the head's door with its result.
        """
        record = self.groups.get(old.number)
        if record is None:
            raise InvariantError(f"lease {old.lease_id} is of group {old.number}, which the ledger does not hold open")
        longest = granting.LEASE_STRETCH_MAX * self.options.lease_seconds
        seconds = max(old.deadline - old.granted_at, min(back_at - old.granted_at, longest))
        lease = granting.lease_of(self, record, old.granted_at, seconds, old.num_samples)
        self.open_lease(old.worker_id, replace(lease, lease_id=old.lease_id))
        if record.state == "pending":
            self.groups.move(record, "leased")
        if (worker := self.fleet.get(old.worker_id)) is None:
            worker = Worker(old.worker_id, 1, 0.0, None, now, UNKNOWN, detached_at=now)
            self.fleet.expect(worker, now)
        worker.speed.carry(lease.num_samples)

    def _learner_joined(self, version: int) -> None:
        training = self.training
        if version > training.version:
            reason = (
                f"the learner holds version {version}, the ledger knows {training.version} trained steps: "
                "this checkpoint belongs to another run or to a newer ledger"
            )
            self.emit(do.RefuseLearner, reason)
            return
        if version < training.oldest_kept:
            reason = (
                f"the learner holds version {version}; the groups of steps before {training.oldest_kept} were let go "
                f"when checkpoint {training.oldest_kept} covered them: resume from that one or a later one"
            )
            self.emit(do.RefuseLearner, reason)
            return
        training.join()
        self.cadence.interrupted()
        if self.width_search is not None:
            self.width_search.interrupted()
        if version < training.version:
            self._fall_back(version)
        else:
            reason = f"the learner stands at version {version}"
            self.emit(do.RecordLearner, reason, version=version, lineage=training.lineage)

    def _fall_back(self, version: int) -> None:
        """Handle a learner that fell back: the steps from `version` on are trained again, with the same groups; the old
        results of these steps no longer count.
        """
        reason = f"the learner fell back from version {self.training.version} to its checkpoint {version}"
        self.training.fall_back(version, self.now)
        for record in list(self.groups):
            if record.step >= version and record.state == "trained":
                self.groups.move(record, "ready")
        self._drop(self.snapshots.fall_back(version), "its step is trained again")
        self.evaluation.forget_after(version)
        self.emit(do.RecordLearner, reason, version=version, lineage=self.training.lineage)
        attending = tuple(worker.worker_id for worker in self.fleet.active())
        workers.announce_newest(self, "later ones count no more", attending)

    def _groups_wanted(self, step: int, now: float) -> None:
        version = self.training.version
        if step != version or not self.training.learner_joined:
            self.emit(do.RefuseLearner, f"the learner asks for the groups of step {step}; the run stands at {version}")
            return
        self.training.want(step, now)
        self._num_passed = 0
        for record in self.groups.of_step(step):
            if record.state == "fed":
                self.groups.move(record, "ready")

    def _step_trained(self, event: ev.StepTrained, now: float) -> None:
        training = self.training
        if event.step < training.version:
            return  # a repeated report: the answer to the first one was lost
        fed = tuple(sorted(record.number for record in self.groups.of_step(event.step) if record.state == "fed"))
        if event.step != training.version or tuple(sorted(event.numbers)) != fed or not training.has_all:
            report = f"the learner reports step {event.step} with groups {event.numbers}"
            raise InvariantError(f"{report}; step {training.version} was fed {fed}")
        reason = "the learner finished the step"
        self.emit(do.RecordStep, reason, step=event.step, lineage=training.lineage, numbers=event.numbers)
        for mismatch in event.mismatches:
            worker = self.fleet.get(mismatch.worker_id)
            form = worker.form if worker is not None else ""
            self.penalties.measured(
                mismatch.worker_id, mismatch.num_tokens, mismatch.abs_log_ratio, mismatch.surprise, form
            )
        is_flat = all(record.is_flat for record in self.groups.of_step(event.step) if record.state == "fed")
        self.measurements.step_trained(event.busy_seconds, now, self.groups.num_uninformative(event.step), is_flat)
        if self.width_search is not None:
            before = self.width_search.width
            self.width_search.step_trained(event.step, now)
            self.fleet.limit(self.width_search.width)
            if self.width_search.width != before:
                self.emit(do.LimitGroups, self.width_search.why(), num_groups=self.width_search.width)
        self._space_snapshots(now)
        for number in fed:
            record = self.groups.get(number)
            assert record is not None
            self.groups.move(record, "trained")
        training.train()

    def _space_snapshots(self, now: float) -> None:
        """Change the number of steps between snapshots, if that ends waits of the learner."""
        cadence, train_seconds = self.cadence, self.measurements.typical_train_seconds()
        cadence.step_trained(now)
        if self.options.deterministic or not train_seconds or not cadence.is_due():
            return
        idle_ratios = {count: standby.predicted_idle_ratio(self, now, count) for count in cadence.choices()}
        if cadence.look(now, train_seconds, {count: idle for count, idle in idle_ratios.items() if idle is not None}):
            self.emit(do.SpaceSnapshots, cadence.why(), publish_every=cadence.publish_every)

    def _snapshot_published(self, ref: SnapshotRef, now: float) -> None:
        training = self.training
        if ref.lineage != training.lineage or ref.version > training.version:
            self._drop([ref], f"published for lineage {ref.lineage}; the run is at {training.lineage}")
            return
        if self.snapshots.publish(ref, now):
            training.replaces_weights(now)
        self.measurements.published(ref, now)
        if self.evaluation.is_due(ref.version):
            self._start_eval(ref, now)
        if ref == self.snapshots.newest_retained():
            reason = f"version {ref.version} is published"
            workers.announce_published(self, reason, now)
        self._drop_snapshots()

    def _drop_snapshots(self) -> None:
        """Drop old snapshots, except the newest few, those that an evaluation needs, and in deterministic mode those
        that open steps need.
        """
        options, oldest = self.options, self.training.version
        if options.deterministic:
            oldest = pacing.fixed_version(oldest, options.max_staleness, options.publish_every)
        oldest_installed = self.training.version - options.max_staleness - 2 * options.publish_every
        old = self.snapshots.drop_old(self.evaluation.rounds, options.keep_snapshots, oldest, oldest_installed)
        self._drop(old, "no open step or evaluation needs it")

    def _drop(self, refs: Iterable[SnapshotRef], reason: str) -> None:
        for ref in refs:
            self.emit(do.DropSnapshot, reason, ref=ref)

    def _checkpoint_saved(self, event: ev.CheckpointSaved) -> None:
        training = self.training
        training.save(event.version, event.oldest_kept)
        reason = f"a checkpoint of version {event.version} is durable"
        saved = {"version": training.checkpoint_version, "oldest_kept": training.oldest_kept}
        self.emit(do.RecordCheckpoint, reason, **saved)
        self.groups.forget_below(training.oldest_kept)

    # ---- feeding ---------------------------------------------------------------------------------------------------

    def _feed(self, now: float) -> None:
        """Feed the learner the ready groups of the step that it waits for: in the order in which they became ready, or
        in deterministic mode in issue order.
        """
        step = self.training.open_step
        if step is None or step >= self.options.max_steps:
            return
        while (record := self._next_to_feed(step)) is not None:
            if not pacing.may_train(step, record.oldest_version or 0, self.options.max_staleness):
                self.groups.retire(record, "stale")
                detail = f"its oldest token is of version {record.oldest_version}, {self.options.max_staleness} allowed"
                self.emit(do.RetireGroup, detail, number=record.number, why="stale")
                granting.grant(self, now)
                continue
            self.groups.move(record, "fed")
            self.emit(do.FeedGroup, f"the learner trains step {step}", step=step, number=record.number)
        self._end_step(step, now)

    def _next_to_feed(self, step: int) -> PlannedGroup | None:
        """Return the next group to feed: the first that became ready, or in deterministic mode the next issued one."""
        if not self.options.deterministic:
            return self.groups.first_ready(step)
        while (record := self.groups.nth(step, self._num_passed)) is not None and record.state in ("fed", "retired"):
            self._num_passed += 1
        return record if record is not None and record.state == "ready" else None

    def _end_step(self, step: int, now: float) -> None:
        if granting.room(self, step) > 0 or self.groups.num_fed(step) < self.groups.num_live(step):
            return
        live = [record for record in self.groups.of_step(step) if record.state != "retired"]
        if not live:
            results.stop(self, f"no group of step {step} gave a result: there is nothing to train on")
            return
        for record in live:
            results.release(self, self.train_group(record.number), "its step has all its groups")
        since = now if self.training.wanted_since is None else self.training.wanted_since
        self.training.end_step()
        self.measurements.step_fed(learner_wait(step, self.groups.of_step(step), since, now), now)
        last = self.groups.highest_number(step)
        cursor = self.groups.next_number if last is None else last + 1
        self.emit(
            do.EndStep,
            "every group of the step is fed",
            step=step,
            num_groups=len(live),
            cursor=cursor,
            publish_every=self.publish_every,
        )

    # ---- evaluation, end -------------------------------------------------------------------------------------------

    def _start_eval(self, ref: SnapshotRef, now: float) -> None:
        self.evaluation.start(ref, now)
        if self.width_search is not None:
            self.width_search.interrupted()
        self.emit(do.StartEval, f"version {ref.version} is due for evaluation", ref=ref)

    def _finish_evals(self, now: float) -> None:
        if not self.evaluation.rounds:
            return
        seconds = EVAL_WAIT_LEASES * self.options.lease_seconds
        is_here = any(not (worker.detached or worker.standby) for worker in self.fleet.own())
        if self.evaluation.lacks_machine(is_here, now, seconds):
            reason = f"no machine of the owner has been connected for {seconds:.0f} s, and no other may evaluate"
            for version in self.evaluation.skip_all():
                self.emit(do.SkipEval, reason, version=version)
        for round_ in self.evaluation.pop_finished():
            reason = "every held-out task has a result or has failed"
            self.emit(do.FinishEval, reason, version=round_.ref.version, failed=round_.failed)

    def _finish(self) -> None:
        last, training = self.options.max_steps, self.training
        if training.version >= last and training.checkpoint_version >= last and self.evaluation.is_over:
            self.health.end("all steps are trained")
            self.emit(do.FinishRun, "all steps are trained")

    # ---- queries ---------------------------------------------------------------------------------------------------

    def _is_expelled(self, event: ev.GroupDelivered | ev.DeliveryMalformed | ev.LeaseFailed) -> bool:
        return self.penalties.expulsion(event.worker_id, self.now) is not None

    def waits(self, now: float) -> list[Wait]:
        """Return all waits: who waits for whom, since when, until when, and why."""
        return list_waits(self, now)

    def why_of_no_use(self, worker_id: str) -> str:
        """Return why this worker hardly ever gets a group, and what would help; empty if it does, or is unknown."""
        worker = self.fleet.get(worker_id)
        return "" if worker is None else why_of_no_use(self, worker)
