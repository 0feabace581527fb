"""The training loop of the learner, on one screen. Read this first.

Step t trains on the groups that the head feeds for it, micro-batch by micro-batch as they arrive, and makes version
t + 1. Four rules of order must hold:

1. the head has *recorded* step t before anything builds on it: the groups of t + 1, its snapshot, its checkpoint;
2. a checkpoint is durable before the head is told, because the head then drops the groups that it covers. It is written
   while the groups of the next step arrive, and the next update waits for it. A stop at any time leaves a checkpoint;
3. a snapshot is read from the weights themselves, in the background while the next step's gradients are computed: the
   update waits until all of it is encoded (but not sent);
4. groups are checked again before they are trained on: a group that is too old or out of order is a bug and ends the
   learner; a group that can't be trained on is left out and logged.

Torch runs in this thread; networking runs in the thread of `session.HeadSession`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from echo2.config.rundir import CRASH_RECORD
from echo2.core.devices import compute_deterministically
from echo2.core.errors import LinkError, PeerError
from echo2.core.types import RolloutGroup
from echo2.learner.core import checkpoint
from echo2.learner.grpo.client import GrpoClient
from echo2.learner.grpo.saving import Checkpoints, CrashRecord
from echo2.learner.grpo.step_meter import StepMeter
from echo2.learner.link.head_client import OVER
from echo2.learner.link.session import HeadSession
from echo2.transport import wire_pb2 as wire

log = logging.getLogger(__name__)


def resume(client: GrpoClient, checkpoints: Path) -> bool:
    """Load the newest whole checkpoint; damaged newer ones are set aside. Return whether there was one."""
    newest = checkpoint.recover(checkpoints)
    if newest is not None:
        client.load_state(newest)
    return newest is not None


def train(client: GrpoClient, head: HeadSession, checkpoints: Path) -> str:
    """Train from the current state of `client` and `head` to the last step, or until the head says stop. Return why
    training ended. `checkpoints` is the directory of the step_N directories.

    Raises:
        LinkError: the head was away for longer than the session's patience.
        UserError: training diverged, the learner died on several groups in a row, or a checkpoint can't be written (on
            a full disk the learner waits for space).
        InvariantError: the head fed a group that must not be trained on.
    """
    # On a CPU all algorithms are deterministic.
    if client.config.run.deterministic and client.policy.device.type == "cuda":
        compute_deterministically()
    saves = Checkpoints(checkpoints, client, head)
    recorded = _Recorded(client.version)
    try:
        reason = _train_steps(client, head, CrashRecord(checkpoints / CRASH_RECORD), saves, recorded)
    except (LinkError, PeerError) as error:
        _leave(client, saves, recorded)
        reason = head.stop_reason or (error.detail if isinstance(error, PeerError) and error.reason == OVER else "")
        if not reason:
            raise
        return reason
    _leave(client, saves, recorded)
    return reason


@dataclass(slots=True)
class _Recorded:
    """The version that the last recorded step made, and the position in the task stream after that step."""

    version: int
    cursor: int = 0


def _leave(client: GrpoClient, saves: Checkpoints, recorded: _Recorded) -> None:
    """Save what was trained since the last checkpoint. A step under way is dropped. A version whose step the head has
    not recorded is not saved, because a run can't continue from it.
    """
    if client.is_within_step or client.version != recorded.version:
        log.warning(
            "no checkpoint of the step under way: %s; the run goes on from the newest one before",
            "it has had a part of its updates" if client.is_within_step else "the head has not recorded it",
        )
        return
    saves.save_last(recorded.cursor)


def _train_steps(
    client: GrpoClient, head: HeadSession, record: CrashRecord, saves: Checkpoints, recorded: _Recorded
) -> str:
    config = client.config
    meter = StepMeter(client.version, config)
    saves.report_again()
    if client.version < head.max_steps:
        head.want_groups(client.version)
    _publish_if_due(client, head)

    while (step := client.version) < head.max_steps:
        end = _train_on_groups(client, head, meter, record, saves)
        with meter.time("checkpoint"):
            saves.finish(tells_head=not end.stop)
        if end.stop or head.stop_reason:
            return head.stop_reason or end.reason
        with meter.time("publish_wait"):
            client.finish_reading()
        with meter.time("train"):
            stats = client.optim_step()
        head.doing = f"reporting step {step}"
        metrics = meter.metrics(stats) | {"perf/microbatch": client.tokens_per_microbatch}
        head.report_step(step, meter.numbers, metrics, stats.logprobs)
        recorded.version, recorded.cursor = client.version, end.cursor

        meter = StepMeter(client.version, config)
        is_last = client.version >= head.max_steps
        if not is_last:
            head.want_groups(client.version)
        _publish_if_due(client, head)
        if is_last or client.version % config.learner.checkpoint_every == 0:
            # A learner that resumes from this checkpoint can make this version's snapshot again, but no earlier one,
            # and later steps may need that.
            with meter.time("publish_wait"):
                head.finish_publishing(but=client.version)
            saves.begin(recorded.cursor)

    saves.finish()
    head.doing = "sending the last snapshot"
    head.finish_publishing()
    return "all steps are trained"


def _train_on_groups(
    client: GrpoClient, head: HeadSession, meter: StepMeter, record: CrashRecord, saves: Checkpoints
) -> wire.StepDone:
    """Compute the gradients of one step. A micro-batch is run as soon as another group like the last would not fit into
    it. Return the StepDone that ended the step.

    The cuts depend on the arrivals alone: the same arrivals give the same sums, and in deterministic mode the arrivals
    are in order of issue. A step with several updates is cut into as many parts. No micro-batch crosses the border of
    two parts, and each part is an update of its own; `optim_step` ends the last one.
    """
    learner = client.config.learner
    groups_per_update = client.config.schedule.groups_per_step // learner.updates_per_step
    waiting: list[RolloutGroup] = []
    num_tokens = 0
    arrivals = head.groups()
    while True:
        if head.stop_reason:
            return wire.StepDone(stop=True, reason=head.stop_reason)
        head.doing = f"waiting for groups of step {client.version} ({len(meter.numbers)} came)"
        with meter.time("wait_for_batch"):
            item = next(arrivals)
        is_full = is_end = isinstance(item, wire.StepDone)
        if isinstance(item, RolloutGroup):
            problem = client.why_unfit(item) or record.why_unfit(item)
            meter.see(item, is_fit=not problem)
            if problem:
                log.warning("%s of %s is left out of step %d: %s", item.group, item.worker_id, item.step, problem)
            else:
                waiting.append(item)
                more = client.num_tokens_run(item)
                num_tokens += more
                is_full = num_tokens + more > client.tokens_per_call
        is_part = learner.updates_per_step > 1 and not is_end and len(meter.numbers) % groups_per_update == 0
        if waiting and (is_full or is_part):
            head.doing = f"training step {client.version}{record.summary}{client.memory_summary}"
            with meter.time("train"):
                for batch in record.batches(waiting):
                    with record.training(batch):
                        client.forward_backward(batch)
            waiting, num_tokens = [], 0
        if is_part:
            with meter.time("checkpoint"):
                saves.finish()
            with meter.time("publish_wait"):
                client.finish_reading()
            with meter.time("train"):
                client.update()
        if isinstance(item, wire.StepDone):
            return item


def _publish_if_due(client: GrpoClient, head: HeadSession) -> None:
    """Publish the weights if the schedule asks for it and they are not published yet.

    After a resume between two publications, the head may have lost the newest snapshot that was due. Then the current
    weights take its place; otherwise workers would wait for ever.
    """
    version, published = client.version, head.published
    newest_due = version - version % client.config.schedule.kappa
    is_due = version == newest_due or version == head.max_steps
    if version in published or (not is_due and any(newest_due <= have < version for have in published)):
        return
    head.doing = f"publishing version {version}"
    head.publish(version, client.save_weights_for_sampler())
