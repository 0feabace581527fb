"""The groups of a step as they arrive from the head: checked, and cut into micro-batches.

A micro-batch is trained on as soon as another group like the last would not fit into it. The cuts depend on the
arrivals alone: the same arrivals give the same sums, and in deterministic mode the arrivals are in order of issue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from echo2.config.rundir import CRASH_RECORD
from echo2.core.types import RolloutGroup
from echo2.learner.grpo.card import LearnerCard
from echo2.learner.grpo.saving import CrashRecord
from echo2.learner.grpo.step_meter import StepMeter
from echo2.learner.grpo.trained_policy import TrainedPolicy
from echo2.learner.link.session import HeadSession
from echo2.transport import wire_pb2 as wire

log = logging.getLogger(__name__)

STOPPED = "the head stopped the run"
#: Between two looks at whether a stop ends the wait for a teacher.
LOOK_SECONDS = 0.2


class Feed:
    """The groups of one step after the other. `meter` measures the step under way; `is_complete`: all its groups have
    come; `cursor` is the position in the task stream after it. `publish_every`: steps between
    snapshots, as the head says.

    Raises:
        UserError: the learner dies on one group after the other.
    """

    def __init__(
        self, client: TrainedPolicy, head: HeadSession, checkpoints: Path, card: LearnerCard | None = None
    ) -> None:
        """`card`: a GPU shared with workers."""
        self._client, self._head, self._card = client, head, card
        self._crashes = CrashRecord(checkpoints / CRASH_RECORD)
        self._arrivals = head.groups()
        self.meter = StepMeter(client.version, client.config)
        self.is_complete = False
        self.cursor = 0
        self.publish_every = client.config.schedule.publish_every

    def begin_step(self) -> None:
        """Ask for the groups of the next step, unless the run has no more."""
        self.meter = StepMeter(self._client.version, self._client.config)
        self.is_complete = False
        if self._client.version < self._head.max_steps:
            self._head.want_groups(self._client.version)
            self._arrivals = self._head.groups()
            if self._card is not None:
                self._arrivals = self._card.groups(self._head, self._client, self.meter)

    def microbatches(self) -> Iterator[list[RolloutGroup]]:
        """Yield the micro-batches of the next update, and wait for their groups. The caller trains on each. A stop
        ends the iteration (`HeadSession.stop_reason`).

        Raises:
            InvariantError: a group is of another step, too stale, or (deterministic mode) out of order.
        """
        client, numbers = self._client, self.meter.numbers
        schedule, num_updates = client.config.schedule, client.config.learner.updates_per_step
        groups_per_update = schedule.groups_per_step // num_updates
        waiting: list[RolloutGroup] = []
        num_tokens, is_last = 0, not self._are_taught(())  # what a teacher can read is known once it was greeted
        while not is_last and not self._head.stop_reason:
            self._head.doing = f"waiting for groups of step {client.version} ({len(numbers)} came)"
            with self.meter.time("wait_for_batch") if self._card is None else nullcontext():
                item = next(self._arrivals)
            more = 0
            if isinstance(item, wire.StepDone):
                if item.stop:
                    self._head.stop(item.reason or STOPPED)
                    return
                self.is_complete = is_last = True
                self.cursor = item.cursor
                self.publish_every = item.publish_every or self.publish_every
            else:
                is_last = num_updates > 1 and (len(numbers) + 1) % groups_per_update == 0
                if self._is_fit(item):
                    waiting.append(item)
                    more = client.num_tokens_run(item)
                    num_tokens += more
            if waiting and (is_last or num_tokens + more > client.tokens_per_call):
                yield from self._trained_on(waiting)
                waiting, num_tokens = [], 0

    def _is_fit(self, group: RolloutGroup) -> bool:
        problem = self._client.why_unfit(group) or self._crashes.why_unfit(group)
        self.meter.see(group, is_fit=not problem)
        if problem:
            log.warning("%s of %s is left out of step %d: %s", group.group, group.worker_id, group.step, problem)
        return not problem

    def _trained_on(self, groups: list[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
        if not self._are_taught(groups):
            return
        self._head.doing = f"training step {self._client.version}{self._crashes.summary}{self._client.memory_summary}"
        for batch in self._crashes.batches(groups):
            with self.meter.time("train"), self._crashes.training(batch):
                yield batch

    def _are_taught(self, groups: Sequence[RolloutGroup]) -> bool:
        """Wait until teachers that are asked elsewhere have answered about these groups. False: a stop came first.

        Raises:
            UserError: a teacher can't teach the policy, or failed.
        """
        client = self._client
        teachers = client.teachers if client.config.distill.endpoints else None
        while teachers is not None and not self._head.stop_reason:
            with self.meter.time("teacher_wait"):
                reason = teachers.waits_for(groups, LOOK_SECONDS)
            if not reason:
                break
            self._head.doing = f"step {client.version}: {reason}"
        return not self._head.stop_reason
