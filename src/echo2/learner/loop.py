"""The learner's life, on one screen. Read this first.

Step t takes the groups that the head feeds for it, micro-batch by micro-batch as they come, and makes version t + 1.
Four orders must hold:

1. the head has *recorded* step t before anything builds on it: the groups of t + 1, its snapshot, its checkpoint;
2. a checkpoint is durable before the head is told, because it lets go of the groups that it covers;
3. a snapshot is a copy: it is encoded and sent in the background while the next step trains;
4. what was fed is checked again (staleness, order, size) before it is trained on; what can't be is left out and named.

Torch works in this thread; the network lives in `session.HeadSession`'s.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from echo2.errors import NoRoomError
from echo2.learner import checkpoint
from echo2.learner.crash_record import CrashRecord
from echo2.learner.head_client import StepEnd
from echo2.learner.session import HeadSession
from echo2.learner.step_meter import StepMeter
from echo2.learner.trainer import Trainer
from echo2.types import RolloutGroup

log = logging.getLogger(__name__)

#: Beside the checkpoints: what the learner is training on.
CRASH_RECORD = "training.json"
#: Between two tries to save a checkpoint on a full disk.
NO_ROOM_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """`checkpoints` is the directory of the step_N directories. `groups_per_update`: 0, and a step makes one update."""

    checkpoints: Path
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    publish_every: int = 1
    max_staleness: int = 1
    groups_per_microbatch: int = 16
    groups_per_update: int = 0
    deterministic: bool = False


def resume(trainer: Trainer, checkpoints: Path) -> bool:
    """Load the newest whole checkpoint, if there is one."""
    newest = checkpoint.latest(checkpoints)
    if newest is not None:
        trainer.load_state(newest)
    return newest is not None


def run_learner(trainer: Trainer, head: HeadSession, options: LoopOptions) -> str:
    """Train from where `trainer` and `head` stand to the last step, or until the head says stop; why it ended.

    Raises:
        LinkError: the head was away for longer than the session's patience.
        UserError: training diverged, the learner dies on whatever it trains on, or a checkpoint can't be written (room
            is waited for).
        InvariantError: the head fed what must not be trained on.
    """
    _prepare(trainer, options)
    record = CrashRecord(options.checkpoints / CRASH_RECORD)
    meter = StepMeter(trainer.version, options.max_staleness, options.deterministic)
    _report_checkpoints(trainer, head, options)
    if trainer.version < head.max_steps:
        head.want_groups(trainer.version)
    _publish_if_due(trainer, head, options, meter)
    cursor = 0

    while (step := trainer.version) < head.max_steps:
        end = _train_on_groups(trainer, head, options, meter, record)
        if end.stop:
            if not trainer.is_within_step:  # else the checkpoint before is what the run goes on from
                _save(trainer, head, cursor, options)
            return end.reason
        with meter.time("train"):
            stats = trainer.optim_step()
        head.doing = f"reporting step {step}"
        head.report_step(step, meter.numbers, meter.metrics(stats))
        cursor = end.cursor

        meter = StepMeter(trainer.version, options.max_staleness, options.deterministic)
        is_last = trainer.version >= head.max_steps
        if not is_last:
            head.want_groups(trainer.version)
        _publish_if_due(trainer, head, options, meter)
        if is_last or trainer.version % options.checkpoint_every == 0:
            # A learner that comes back to this checkpoint can make this version's snapshot again, but no earlier one,
            # and steps may need it.
            with meter.time("publish_wait"):
                head.finish_publishing(but=trainer.version)
            with meter.time("checkpoint"):
                _save(trainer, head, cursor, options)
                _report_checkpoints(trainer, head, options)

    head.doing = "sending the last snapshot"
    head.finish_publishing()
    return "all steps are trained"


def _train_on_groups(
    trainer: Trainer, head: HeadSession, options: LoopOptions, meter: StepMeter, record: CrashRecord
) -> StepEnd:
    """Gradients of one step, a micro-batch as soon as it is full; what ended the step.

    Micro-batches are cut by arrival, always `groups_per_microbatch` long but for the last: the same arrivals give the
    same sums, and in deterministic mode the arrivals are in order of issue. With `groups_per_update` the step is cut
    into parts in the same way, no micro-batch crosses them, and each is an update of its own; `optim_step` ends the
    last.
    """
    waiting: list[RolloutGroup] = []
    arrivals = head.groups()
    while True:
        head.doing = f"waiting for groups of step {trainer.version} ({len(meter.numbers)} came)"
        with meter.time("wait_for_batch"):
            item = next(arrivals)
        if isinstance(item, RolloutGroup):
            problem = trainer.why_unfit(item) or record.why_unfit(item)
            meter.see(item, is_fit=not problem)
            if problem:
                log.warning("%s of %s is left out of step %d: %s", item.group, item.worker_id, item.step, problem)
            else:
                waiting.append(item)
        is_end = isinstance(item, StepEnd)
        is_part = not is_end and options.groups_per_update and len(meter.numbers) % options.groups_per_update == 0
        if len(waiting) == options.groups_per_microbatch or ((is_end or is_part) and waiting):
            head.doing = f"training step {trainer.version}"
            with meter.time("train"):
                for batch in record.batches(waiting):
                    with record.training(batch):
                        trainer.forward_backward(batch)
            waiting = []
        if is_part:
            with meter.time("train"):
                trainer.update()
        if isinstance(item, StepEnd):
            return item


def _publish_if_due(trainer: Trainer, head: HeadSession, options: LoopOptions, meter: StepMeter) -> None:
    """Send the weights if the schedule asks for it and workers cannot have them yet.

    After a resume between two publications the newest due one may be gone from the head; then the present weights take
    its place, or the workers would wait for ever.
    """
    version, published = trainer.version, head.published
    newest_due = version - version % options.publish_every
    is_due = version == newest_due or version == head.max_steps
    if version in published or (not is_due and any(newest_due <= have < version for have in published)):
        return
    head.doing = f"publishing version {version}"
    with meter.time("publish_wait"):
        head.make_room()
    with meter.time("publish"):
        if version not in head.published:
            tensors, files = trainer.save_weights_for_sampler()
            head.publish(version, tensors, files)


def _save(trainer: Trainer, head: HeadSession, cursor: int, options: LoopOptions) -> None:
    """Save a checkpoint. A full disk is waited for: all since the last checkpoint would be trained again."""
    directory = checkpoint.step_directory(options.checkpoints, trainer.version)
    while not checkpoint.is_whole(directory):  # it is there when nothing was trained since it was saved or loaded
        try:
            trainer.save_state(directory, head.lineage, cursor)
        except NoRoomError as error:
            head.doing = f"waiting for room: {error}"
            log.warning("waiting for room: %s", error)
            time.sleep(NO_ROOM_SECONDS)
    checkpoint.prune(options.checkpoints, options.keep_checkpoints)


def _report_checkpoints(trainer: Trainer, head: HeadSession, options: LoopOptions) -> None:
    """Tell the head which checkpoints there are; after a resume again, because the last report may have been lost."""
    oldest = checkpoint.prune(options.checkpoints, options.keep_checkpoints)
    if checkpoint.read_state(checkpoint.step_directory(options.checkpoints, trainer.version)) is not None:
        head.report_checkpoint(trainer.version, oldest)


def _prepare(trainer: Trainer, options: LoopOptions) -> None:
    if options.deterministic and trainer.policy.device.type == "cuda":  # on the CPU they all are
        torch.use_deterministic_algorithms(True)
