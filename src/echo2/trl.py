"""TRL's `AsyncGRPOTrainer` with rollouts of echo2's workers: TRL trains; echo2 runs the head, the workers and the
rewards.

    fleet = echo2.trl.RolloutFleet(model, dataset, reward, args)
    AsyncGRPOTrainer(model, args=args, train_dataset=dataset, rollout_worker=fleet, weight_transfer=fleet).train()

A `RolloutFleet` implements both protocols of TRL 1.16, `RolloutWorkerProtocol` and `WeightTransferProtocol`, and acts
as the run's learner towards the head:

    TRL                                          here
    weight sync number v, from 0                 version v is published
    the samples trained on between two syncs     step v: `groups_per_step` whole groups

TRL reads a micro-batch ahead of its training. So the groups of step v + 1 are handed out when version v is published,
while TRL trains on step v, and a step counts as trained when all its groups are in TRL's queue. If the trainer dies, at
most two steps were handed out and not trained on.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echo2.api.inputs import Rewards, Tasks, sections, write_run
from echo2.api.run import POLL_SECONDS, Run, begin, new_directory
from echo2.config.rundir import RunDir
from echo2.core.errors import Echo2Error, LinkError, UserError
from echo2.core.types import RolloutGroup
from echo2.transport import wire_pb2 as wire

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    from echo2.learner.link.session import HeadSession
    from echo2.transport.base import Link

#: Number of steps of a run whose end only TRL knows.
NO_END = 1_000_000
#: Steps that the run has beyond TRL's last one, because groups are handed out ahead of TRL's training.
STEPS_AHEAD = 2


class Buffer(queue.Queue["RolloutSample"]):
    """The queue that the trainer drains; it measures how long the trainer waits."""

    _waited_seconds = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """As `queue.Queue.get`."""
        started = time.monotonic()
        try:
            return super().get(block, timeout)
        finally:
            self._waited_seconds += time.monotonic() - started

    def take_waited_seconds(self) -> float:
        """Return the seconds that the trainer has waited since the last call."""
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds


class RolloutFleet:
    """Workers that make rollouts for `AsyncGRPOTrainer`. Create one on every rank; the first rank starts the run.

    rollout_buffer, metrics_queue   queues that the trainer drains; the second stays empty: `run` has the metrics
    run                             the run, with its ticket for more machines; None on the other ranks
    """

    def __init__(
        self,
        model: str | Path,
        tasks: Tasks,
        reward: Rewards,
        args: Any,
        *,
        heldout: Tasks | dict[str, Tasks] | None = None,
        environment: str | type | None = None,
        out: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Check everything and write the run directory; the run starts with the training.

        Args:
            model: directory or hub id, the same as the trainer's.
            tasks, reward, heldout, environment, out, settings: as in `echo2.train`. Rewards are computed here: TRL's
                `reward_funcs` are not called.
            args: the trainer's `AsyncGRPOConfig`. Sampling, group size, staleness and batches follow it.

        Raises:
            UserError: an argument is wrong, or arguments contradict each other.
        """
        self.rollout_buffer, self.metrics_queue = Buffer(), queue.Queue[dict[str, float]]()
        self.run: Run | None = None
        derived = _settings(args, tasks)
        self._copies = args.world_size > 1  # a tensor that FSDP gathers is whole only for a moment
        self._session: HeadSession | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._published, self._handed_out, self._is_over = -1, 0, False
        self._failure: Exception | None = None
        self._behind = 0  # TRL's number of the last version, minus the version here
        self._last_sign = time.monotonic()
        if args.process_index:
            return
        tables = sections(settings)
        for section, key, value, name in derived:
            if key in tables.setdefault(section, {}):
                raise UserError(
                    f"{section}.{key} follows args.{name} = {value!r}: set it there, and leave it out here."
                )
            tables[section][key] = value
        tables.setdefault("learner", {}).setdefault("advantage", "grpo")  # the same as TRL's
        with new_directory(out) as path:
            self._config = write_run(RunDir(path).inputs, str(model), tasks, reward, heldout, environment, tables)
        self.run = Run(path)

    # ---- WeightTransferProtocol --------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Start head and workers, and join as the learner.

        Raises:
            UserError, Echo2Error: the run did not start; the message says why.
        """
        from echo2.learner.core.publication import Publisher
        from echo2.learner.link.head_client import LearnerInfo
        from echo2.learner.link.session import HeadSession
        from echo2.weights.format.model_files import find_model, model_files

        assert self.run is not None
        self.run = run = begin(self.run.path, self._config, "--no-learner")
        while not run.rundir.learner_ticket.is_file():
            if not run.goes_on():
                run.check_end()
                raise Echo2Error(f"The run in {run.path} has ended before TRL could join: {run.state}.")
            time.sleep(POLL_SECONDS)
        self._rules = run.rundir.read_config()
        directory = find_model(self._rules.model.path)
        self._files = model_files(directory)
        info = LearnerInfo("TRL", _vocab_size(directory))
        self._session = HeadSession(self._connect, 0, info, Publisher(run.rundir.path / "learner"))

    def pause(self) -> None:
        """Do nothing: workers take new weights while they sample."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publish the weights, given as (name, tensor) pairs. Returns when they are encoded: they may change from then
        on, while the upload continues in the background.

        Raises:
            Echo2Error: the run has failed.
        """
        from echo2.learner.core.model import DTYPES, stored, with_dtype
        from echo2.learner.core.publication import BorrowedWeights

        session, version = self._joined(), self._published + 1
        session.doing = f"publishing version {version}"
        dtype = self._rules.model.snapshot_dtype
        tensors = {
            name: stored(tensor.detach().to("cpu", DTYPES[dtype]) if self._copies else tensor, DTYPES[dtype])
            for name, tensor in iterator
        }
        files = self._files | {"config.json": with_dtype(self._files["config.json"], dtype)}
        self._wait_for(lambda: self._handed_out >= version)
        lent = BorrowedWeights(tensors, files)
        self._joined().publish(version, lent)
        lent.returned.result()
        session.doing = "TRL trains"
        with self._changed:
            self._published = version
            self._changed.notify_all()

    def resume(self) -> None:
        """Do nothing: see `pause`."""

    def destroy(self) -> None:
        """Leave the head, and end the run."""
        self.stop()
        if self._session is not None:
            self._session.close()
            self._session = None
        if self.run is not None:
            self.run.stop()

    # ---- RolloutWorkerProtocol ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to hand out rollouts."""
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._hand_out, name="echo2-fleet", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop handing out rollouts."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._session is not None:
            self._session.stop("TRL has ended")
        if self._thread is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Record TRL's number of the version that was published last."""
        self._behind = model_version - self._published

    def check_health(self, stale_after_s: float) -> None:
        """Check the run when the trainer has nothing to train on.

        Raises:
            Echo2Error: the run has failed, or ended.
            LinkError: no group came for `stale_after_s` seconds; the message says who waits for whom.
        """
        assert self.run is not None
        if self._failure is not None:
            raise self._failure
        if not self.run.goes_on():
            self.run.check_end()
            raise Echo2Error(f"The run in {self.run.path} is over ({self.run.state}), and TRL asks for more rollouts.")
        seconds = time.monotonic() - self._last_sign
        if seconds > stale_after_s:
            waits = "; ".join(
                f"{wait.waiter} waits for {wait.waits_for}: {wait.reason}" for wait in self.run.view.waits
            )
            raise LinkError(f"No rollouts for {seconds:.0f} s. {waits or self.run.state}. See echo2 status.")

    # ---- the learner's part ------------------------------------------------------------------------------------

    async def _connect(self) -> Link:
        from echo2.transport.grpc_link import connect

        assert self.run is not None
        link, _ = await connect(f"@{self.run.rundir.learner_ticket}", self.run.path / "learner")
        return link

    def _joined(self) -> HeadSession:
        if self._failure is not None:
            raise self._failure
        if self._session is None:
            raise UserError("Call init_weight_transfer() first, as TRL's trainer does.")
        return self._session

    def _wait_for(self, is_so: Callable[[], bool]) -> bool:
        """Wait until `is_so()` holds or the fleet is over. Return False if the fleet is over."""
        with self._changed:
            self._changed.wait_for(lambda: is_so() or self._is_over)
            return not self._is_over

    def _hand_out(self) -> None:
        """Hand out step after step, in a thread of its own, until the fleet is over or has failed."""
        try:
            while self._hand_out_step():
                pass
        except Exception as error:  # raised later in the trainer's thread
            self._failure = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _hand_out_step(self) -> bool:
        """Hand out one step. Return whether another may follow."""
        from echo2.learner.grpo.step_meter import StepMeter

        session, step = self._joined(), self._handed_out
        meter = StepMeter(step, self._rules)
        if not self._wait_for(lambda: self._published >= step - 1):
            return False
        session.want_groups(step)
        for item in session.groups():
            if isinstance(item, wire.StepDone):
                if item.stop and not self._is_over:
                    raise Echo2Error(f"The run has ended: {session.stop_reason or item.reason}")
                if item.stop:
                    return False
                break
            meter.see(item)
            for sample in self._samples(item):
                self.rollout_buffer.put(sample)
            self._last_sign = time.monotonic()
        meter.waited(self.rollout_buffer.take_waited_seconds())
        session.report_step(step, meter.numbers, meter.rollout_metrics(), {})
        session.report_checkpoint(step + 1, step + 1, ())  # TRL writes its own checkpoints: drop the groups
        with self._changed:
            self._handed_out = step + 1
            self._changed.notify_all()
        return True

    def _samples(self, group: RolloutGroup) -> Iterator[RolloutSample]:
        """Yield a group's rollouts as TRL's trainer reads them, without texts: those are in the run directory."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        from echo2.learner.grpo.data import group_advantages

        advantages = group_advantages(group.rewards, self._rules.learner.advantage)
        std = float(np.std(group.rewards, ddof=1))
        prompt = np.frombuffer(group.prompt_tokens, np.int32).astype(np.int64)
        pairs = zip(group.by_rollout, advantages, strict=True)
        for rollout, advantage in ((row, value) for rows, value in pairs for row in rows):
            none = np.zeros(len(prompt), np.int64)
            parts = {f"rewards/{name}": value for name, value in rollout.reward_parts.items()}
            yield RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.concatenate([prompt, np.frombuffer(rollout.tokens, np.int32)]),
                completion_mask=np.concatenate([none, np.frombuffer(rollout.loss_mask, np.uint8)]),
                old_log_probs=np.concatenate([none.astype(np.float32), np.frombuffer(rollout.logprobs, np.float32)]),
                advantage=advantage,
                model_version=rollout.oldest_version + self._behind,
                group_id=group.group.number,
                metrics={"reward": rollout.reward or 0.0, "reward_std": std, **parts},
                enqueued_at=time.time(),
            )


def _settings(args: Any, tasks: Any) -> list[tuple[str, str, Any, str]]:
    """Return (section, key, value, name in `args`) of all settings that follow the trainer's arguments.

    Raises:
        UserError: a value that a fleet cannot support.
    """
    if args.token_budget != 0:
        raise UserError(
            f"args.token_budget = {args.token_budget}: a weight sync must have a fixed number of groups. Set it to 0, "
            "and per_device_train_batch_size to what fits the GPU."
        )
    if args.max_staleness < 1:
        raise UserError("args.max_staleness = 0: the trainer reads ahead of its own weights. Set it to 1 or more.")
    if args.repetition_penalty != 1.0:
        raise UserError(
            f"args.repetition_penalty = {args.repetition_penalty}: workers do not support it. Set it to 1.0."
        )
    a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    num_groups, rest = divmod(a_step * args.weight_sync_steps, args.num_generations)
    if rest:
        raise UserError(
            f"A weight sync has {a_step * args.weight_sync_steps} samples (per_device_train_batch_size * "
            f"gradient_accumulation_steps * ranks * weight_sync_steps), which is not a multiple of "
            f"args.num_generations = {args.num_generations}: groups cannot be split. Change one of them."
        )
    syncs = args.max_steps / args.weight_sync_steps
    if args.max_steps <= 0:
        syncs = args.num_train_epochs * len(tasks) / num_groups if isinstance(tasks, Sized) else NO_END
    return [
        ("run", "seed", args.seed, "seed"),
        ("learner", "ranks", args.world_size, "world_size"),  # local workers take the GPUs after the ranks'
        ("run", "max_steps", math.ceil(syncs) + STEPS_AHEAD, "max_steps"),
        ("model", "chat_template_args", dict(args.chat_template_kwargs or {}), "chat_template_kwargs"),
        ("sampling", "group_size", args.num_generations, "num_generations"),
        ("sampling", "min_group", args.num_generations, "num_generations"),  # its batches are of whole groups
        ("sampling", "max_tokens", args.max_completion_length, "max_completion_length"),
        ("sampling", "temperature", args.temperature, "temperature"),
        ("sampling", "top_p", args.top_p, "top_p"),
        ("sampling", "top_k", args.top_k, "top_k"),
        ("sampling", "min_p", args.min_p or 0.0, "min_p"),
        ("schedule", "groups_per_step", num_groups, "per_device_train_batch_size"),
        ("schedule", "max_staleness", args.max_staleness, "max_staleness"),
        ("schedule", "publish_every", 1, "weight_sync_steps"),
    ]


def _vocab_size(directory: Path) -> int:
    """Return the number of rows of the model's embedding."""
    from echo2.engines.model_values import text_values
    from echo2.learner.core.fitting import model_config

    num_tokens = text_values(model_config(str(directory)) or {}).get("vocab_size")
    if not isinstance(num_tokens, int):
        raise UserError(
            f"{directory}/config.json does not say how large the vocabulary is: name a causal language model."
        )
    return num_tokens
