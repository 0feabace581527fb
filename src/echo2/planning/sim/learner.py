"""A simulated learner: the protocol of `learner/grpo/loop.py` with the head, with durations in place of gradients.

    join -> publish -> take the step's groups -> train -> report until acknowledged -> publish, checkpoint -> take ...

Its weights are a digest of the previous digest and of the groups it was fed, in deterministic mode in the order of
feeding. If the head goes away before it acknowledges a trained step, the step's groups are taken again; if they are the
same, the step is reported without being trained again. Only the checkpoints outlive a kill. A checkpoint is written
only when every earlier snapshot is published: a learner that resumes from it could not make them again, and in
deterministic mode a step may need just those.
"""

from __future__ import annotations

import hashlib

from echo2.core.decide.machine import Event
from echo2.core.errors import InvariantError
from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import events as ev
from echo2.planning.sim.report import History, StepTimes
from echo2.planning.sim.scenario import Scenario
from echo2.planning.sim.world import (
    LEARNER,
    Actor,
    Answered,
    Fed,
    Kill,
    Ordered,
    Publish,
    Refused,
    SimNetwork,
    SimWorld,
    Start,
    StepDone,
    StreamBroke,
    Take,
    TimedOut,
    Welcome,
)

#: Seconds before a learner that lost the head tries again.
REJOIN_SECONDS = 1.0
FIRST_DIGEST = hashlib.sha256(b"initial weights").digest()


class _Rejoin(Event):
    epoch: int


class _Trained(Event):
    step: int


class _Encoded(Event):
    version: int


class SimLearner(Actor):
    """The learner."""

    def __init__(self, world: SimWorld, network: SimNetwork, scenario: Scenario, history: History) -> None:
        super().__init__(world, LEARNER)
        self.network, self.scenario, self.history = network, scenario, history
        self.checkpoints: list[tuple[int, bytes]] = []
        self.epoch = 0
        self._restart()

    def _restart(self) -> None:
        """Reset to the newest checkpoint. `version`: acknowledged by the head; `ahead`: the next step, trained and not
        acknowledged.
        """
        self.version, self.digest = self.checkpoints[-1] if self.checkpoints else (0, FIRST_DIGEST)
        self.lineage, self.publish_every = 0, self.scenario.publish_every
        self.ahead: tuple[tuple[int, ...], bytes] | None = None
        self._busy_seconds = 0.0
        self.fed: list[Fed] = []
        self.taking = False
        self._calls: dict[int, object] = {}
        self._waits_since: float | None = None
        self._unpublished: dict[int, bytes] = {}
        self._unsaved: list[tuple[int, bytes]] = []

    def handle(self, event: object) -> None:
        match event:
            case Start():
                self._restart()
                self._join()
            case Kill():
                self._die()
            case _Rejoin() if event.epoch == self.epoch:
                self._join()
            case StreamBroke() if event.epoch == self.epoch and self.taking:
                self._rejoin_later()
            case Ordered() if event.epoch == self.epoch and self.taking:
                self._ordered(event.body)
            case _Trained():
                self._report_step(event.step)
            case _Encoded():
                if event.version in self._unpublished:
                    ref = SnapshotRef(RUN_POLICY, self.lineage, event.version)
                    self._call(Publish(ref, self._unpublished[event.version]))
            case Answered():
                body = self._calls.pop(event.number, None)
                if body is not None:
                    self._answered(body, event.value)
            case TimedOut():
                body = self._calls.pop(event.number, None)
                if body is not None:
                    self._failed(body)

    def _die(self) -> None:
        self.history.killed[LEARNER] += 1
        self._stop_waiting()
        if self.taking:
            self.network.broke(self.name, self.epoch)
        self.epoch += 1
        self.dies()
        self.post(self.world.around(self.scenario.learner.restart_seconds, 0.3), Start())

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, body: object) -> None:
        self._calls[self.network.call(self.name, body)] = body

    def _join(self) -> None:
        self._call(ev.LearnerJoined(self.version))

    def _rejoin_later(self) -> None:
        """Join again later, because the head is away or does not know this learner. Groups fed so far do not count; the
        learner starts again from `version`.
        """
        self.epoch += 1
        self.taking = False
        self._calls.clear()
        self.post(REJOIN_SECONDS, _Rejoin(self.epoch))

    def _failed(self, body: object) -> None:
        if isinstance(body, ev.LearnerJoined | Take):
            self._rejoin_later()
        else:
            self._call(body)

    def _answered(self, body: object, value: object) -> None:
        if isinstance(value, Refused):
            if value.reason != "unknown_learner" and not isinstance(body, Take):
                raise InvariantError(f"the head refused {body}: {value.reason}")
            self._rejoin_later()
            return
        match body:
            case ev.LearnerJoined():
                assert isinstance(value, Welcome)
                self._welcomed(value)
            case ev.StepTrained() if body.step == self.version:
                self._acknowledged()
            case Publish():
                self._unpublished.pop(body.ref.version, None)
                self._save()

    def _welcomed(self, welcome: Welcome) -> None:
        self.lineage = welcome.lineage
        have = {*welcome.published, *self._unpublished}
        newest_due = self.version - self.version % self.publish_every
        # After a fall-back between two publications, the newest snapshot that was due may be gone; then the current
        # weights take its place.
        if not any(newest_due <= version <= self.version for version in have) or self._is_due(self.version):
            self._unpublished.setdefault(self.version, self.digest)
        for version in self._unpublished:
            self._publish(version)
        if self.checkpoints:
            self._report_checkpoint()
        self._take()

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        if self._waits_since is None:
            self._waits_since = self.world.now
        self.epoch += 1
        self.taking, self.fed = True, []
        self._call(Take(self.epoch, self.version))

    def _ordered(self, body: object) -> None:
        match body:
            case Fed():
                self.fed.append(body)
            case StepDone():
                if body.num_groups != len(self.fed) or body.step != self.version:
                    raise InvariantError(f"{body} came at version {self.version} with {len(self.fed)} groups")
                self.taking, self.publish_every = False, body.publish_every
                self._train()

    def _train(self) -> None:
        waited = self._stop_waiting()
        numbers = tuple(item.number for item in self.fed)
        if self.ahead is not None and self.ahead[0] == tuple(sorted(numbers)):
            self._report_step(self.version)
            return
        items = self.fed if self.scenario.deterministic else sorted(self.fed, key=lambda item: item.number)
        digest = hashlib.sha256(self.digest + b"".join(item.data for item in items)).digest()
        self.ahead = tuple(sorted(numbers)), digest
        seconds = self.world.around(self.scenario.learner.train_seconds, self.scenario.learner.spread)
        self.history.train_seconds += seconds
        self.history.steps.append(StepTimes(self.version, self.world.now, waited, seconds))
        self._busy_seconds = seconds
        self.post(seconds, _Trained(self.version))

    def _report_step(self, step: int) -> None:
        numbers = tuple(item.number for item in self.fed)
        self._call(ev.StepTrained(step, numbers, busy_seconds=self._busy_seconds))

    def _acknowledged(self) -> None:
        assert self.ahead is not None
        self.version, self.digest, self.ahead = self.version + 1, self.ahead[1], None
        is_last = self.version == self.scenario.max_steps
        if self._is_due(self.version):
            self._unpublished[self.version] = self.digest
            self._publish(self.version)
        if is_last or self.version % self.scenario.learner.checkpoint_every == 0:
            self._unsaved.append((self.version, self.digest))
            self._save()
        if is_last:
            self.history.weights = self.digest.hex()
        self._take()

    def _is_due(self, version: int) -> bool:
        return version == self.scenario.max_steps or version % self.publish_every == 0

    def _publish(self, version: int) -> None:
        self.post(self.world.around(self.scenario.learner.publish_seconds, 0.3), _Encoded(version))

    def _save(self) -> None:
        """Write the checkpoints that are due, once every earlier snapshot is published."""
        while self._unsaved and all(version > self._unsaved[0][0] for version in self._unpublished):
            num_kept = self.scenario.learner.keep_checkpoints
            self.checkpoints = [*self.checkpoints, self._unsaved.pop(0)][-num_kept:]
            self._report_checkpoint()

    def _report_checkpoint(self) -> None:
        self._call(ev.CheckpointSaved(self.checkpoints[-1][0], self.checkpoints[0][0]))

    def _stop_waiting(self) -> float:
        waited = self.world.now - self._waits_since if self._waits_since is not None else 0.0
        self.history.wait_seconds += waited
        self._waits_since = None
        return waited
