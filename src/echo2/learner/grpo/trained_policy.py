"""What the steps of a run change: the policy with its optimizer, the version, and the sums of the step under way.

The steps themselves are in `loop.py`. Here are the sums over all ranks, and checkpoints: weights, optimizer, and where
the run stands.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import msgspec

from echo2.config import Config
from echo2.core.devices import compute_deterministically
from echo2.core.errors import InvariantError, UserError, counted
from echo2.core.types import GroupRef, RolloutGroup
from echo2.engines.routing import Routing
from echo2.learner.core import checkpoint
from echo2.learner.core.batch import Layout
from echo2.learner.core.fitting import fitted
from echo2.learner.core.losses import make_loss
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy, computes_in_bfloat16
from echo2.learner.core.optimizer import refuse_vanishing_updates
from echo2.learner.core.publication import BorrowedWeights
from echo2.learner.core.state import Saving
from echo2.learner.core.trainer import ForwardBackward, OptimStep, Trainer
from echo2.learner.grpo.data import GroupData, group_data
from echo2.learner.grpo.step_meter import LossStats, StepStats, Taught
from echo2.learner.grpo.teachers import Teachers, reference_of
from echo2.transport.limits import LOGGED_GROUPS
from echo2.transport.message_bytes import logged_tokens

POLICY, REFERENCE = "the policy", "its reference"


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Position of a run: completed training steps, lineage, and the position in the task stream. A checkpoint holds it
    beside the weights.
    """

    version: int
    lineage: int = 0
    cursor: int = 0


@dataclass(slots=True)
class StepSums:
    """What the groups since the last update add up to. `taught`: by teacher."""

    num_tokens: int = 0
    num_rollouts: int = 0
    stats: LossStats = field(default_factory=LossStats)
    taught: Mapping[str, Taught] = field(default_factory=dict)


class TrainedPolicy:
    """A policy, its reference and teachers, and its optimizer. `trainer` computes on all ranks of `mesh`, under the
    names POLICY and REFERENCE; `sums`: of the groups since the last update.
    """

    def __init__(self, policy: Policy, config: Config, layout: Layout = "auto", mesh: Mesh | None = None) -> None:
        """Raises: UserError, if there is no room for the reference, the weights' precision is too coarse, or there are
        no routes to replay."""
        self.policy = policy
        self.config = config
        self.version = 0
        self.loss = make_loss(config.learner.loss, config.learner.loss_params)
        self.mesh = mesh or Mesh()
        # On a CPU all algorithms are deterministic.
        if config.run.deterministic and policy.device.type == "cuda":
            compute_deterministically()
        policy.computes_in_bfloat16 = computes_in_bfloat16(config.model.compute_dtype, policy.device)
        refuse_vanishing_updates(policy.trained_parameters(), config.learner.lr)
        settled = fitted(policy, config, self.mesh)
        self._settled = settled.tokens
        self.trainer = Trainer(self._settled, layout, self.mesh)
        reference = reference_of(policy, config, self.mesh) if config.learner.reference_kl > 0.0 else None
        if config.learner.routing_replay:
            policy.routing = Routing(policy.module)
        self.trainer.add(POLICY, policy, True, config.learner.quantised == "moments", settled.offloaded)
        if reference is not None:
            reference.computes_in_bfloat16 = policy.computes_in_bfloat16
            self.trainer.add(REFERENCE, reference, is_trained=False)
        self.teachers = Teachers(policy, POLICY, config, self.trainer, self.mesh) if config.distill.teachers else None
        self._logprobs: dict[int, list[array[float]]] = {}
        self._before: StepStats | None = None  # statistics of this step's updates so far
        self._forget_sums()

    @property
    def tokens_per_call(self) -> int:
        """Number of tokens with which one call of `forward_backward` gives every rank a full micro-batch."""
        return self.trainer.tokens_per_microbatch * self.mesh.size

    def why_unfit(self, group: RolloutGroup) -> str:
        """Return why the model cannot process the group; empty if it can. The head makes the other checks when a result
        arrives, and knows the context length of most models. A group that this check missed would be fed again after
        every death of the learner.
        """
        prompt, longest = len(group.prompt_tokens), max(len(rollout.tokens) for rollout in group.rollouts)
        most = self.policy.max_positions
        if most is not None and prompt + longest > most:
            return f"{prompt} + {longest} tokens, where the model has {most} positions"
        return "" if self.teachers is None else self.teachers.why_unfit(group)

    def prepare(self, group: RolloutGroup) -> None:
        """Begin what can begin before a group is trained on. For any thread."""
        if self.teachers is not None:
            self.teachers.ask_early(group)

    def num_tokens_run(self, group: RolloutGroup) -> int:
        """Return the number of tokens, including prompts, that training on the group runs; 0 if it teaches nothing.

        Raises:
            InvariantError: the group is unscored.
        """
        made = self._data_of(group)
        self._made[group.group] = group, made
        return self.trainer.num_tokens_run(POLICY, made.data)

    @property
    def tokens_per_microbatch(self) -> int:
        """The value fixed at the start, or less if memory has run out."""
        return self.trainer.tokens_per_microbatch

    @property
    def memory_summary(self) -> str:
        """Suffix for the learner's activity, for people: says that memory has run out; empty if it has not."""
        tokens = self.tokens_per_microbatch
        return f"; memory ran out: micro-batches of {counted(tokens, 'token')}" if tokens < self._settled else ""

    @property
    def is_within_step(self) -> bool:
        """Whether the weights belong to no version, because a part of the step has been applied."""
        return self._before is not None

    @property
    def step_so_far(self) -> StepStats:
        """Statistics of the updates of the step under way, of which there is at least one."""
        assert self._before is not None
        return self._before

    def take_data(self, group: RolloutGroup) -> GroupData:
        """Return the group's data, made before by `num_tokens_run` or now.

        Raises:
            InvariantError: the group is unscored.
        """
        of, made = self._made.pop(group.group, (None, None))
        return made if made is not None and of is group else self._data_of(group)

    def add_to_step(
        self, groups: Sequence[RolloutGroup], parts: Sequence[GroupData], done: ForwardBackward[LossStats]
    ) -> LossStats:
        """Add what a pass over the groups gave to the sums of the step. Return statistics of these groups alone."""
        self.sums.num_tokens += sum(part.num_tokens for part in parts)
        self.sums.num_rollouts += sum(part.num_rollouts for part in parts)
        self._keep_logprobs(groups, parts, done.logprobs)
        stats = LossStats()
        for measured in self._of_all_ranks(done.outputs):
            if self.is_within_step:  # the weights have moved since, though the version has not
                measured = replace(measured, fresh={})
            stats += measured
            self.sums.stats += measured  # one by one: the same sums however the calls are cut
        return stats

    def add_update(self, lr: float, divisor: float, step: OptimStep) -> None:
        """Add an update to the statistics of the step, and begin new sums."""
        sums = self.sums
        done = StepStats(
            lr,
            step.grad_norm,
            sums.num_tokens,
            not step.updated,
            sums.stats,
            divisor,
            int(step.updated),
            taught=sums.taught,
        )
        self._forget_sums()
        self._before = done if self._before is None else self._before + done

    def end_step(self) -> StepStats:
        """The policy has the next version. Return statistics of the step."""
        result = replace(self.step_so_far, logprobs=self._logprobs)
        self._before, self._logprobs = None, {}
        if self.teachers is not None:
            self.teachers.end_step(self.version)
        self.version += 1
        return result

    def save_weights_for_sampler(self) -> BorrowedWeights:
        """Lend the weights (in `snapshot_dtype`) and the other files of the model; the next update waits until they are
        given back."""
        return self.trainer.save_weights_for_sampler(POLICY, self.config.model.snapshot_dtype)

    def finish_reading(self) -> None:
        """Wait until no background reader uses the weights, as the next update would."""
        self.trainer.finish_reading(POLICY)

    def save_state(self, directory: Path, lineage: int = 0, cursor: int = 0) -> Saving:
        """Begin to write a checkpoint to `directory`, whole or not at all; call it between steps. The next step's
        gradients are computed meanwhile; its `optim_step` waits for the checkpoint. The result raises as that of
        `Trainer.save_state`.

        Raises:
            InvariantError: it is called within a step.
        """
        if self.is_within_step:
            raise InvariantError(f"a checkpoint within step {self.version} would be trained on its groups again")
        position = RunPosition(self.version, lineage, cursor)
        return self.trainer.save_state(POLICY, directory, asdict(position))

    def resume(self, checkpoints: Path) -> bool:
        """Load the newest whole checkpoint; damaged newer ones are set aside. Return whether there was one."""
        newest = checkpoint.recover(checkpoints)
        if newest is not None:
            self.load_state(newest)
        return newest is not None

    def load_state(self, directory: Path) -> RunPosition:
        """Continue from a checkpoint: weights, optimizer and version as they were.

        Raises:
            UserError: there is no whole checkpoint, or it is of another model or of no run.
        """
        client = self.trainer.load_state(POLICY, directory)
        try:
            position = msgspec.convert(client, RunPosition)
        except msgspec.ValidationError as error:
            raise UserError(f"{directory} is not a checkpoint of a run: {error}. Name a checkpoints/step_N.") from error
        self._forget_sums()
        self._before, self._logprobs = None, {}
        self.version = position.version
        return position

    def _keep_logprobs(
        self, groups: Sequence[RolloutGroup], parts: Sequence[GroupData], logprobs: Sequence[array[float]]
    ) -> None:
        """Keep the logprobs of the first tokens of the step's first groups."""
        logprobs_by_datum = iter(logprobs)
        for group, part in zip(groups, parts, strict=True):
            of_data = iter([next(logprobs_by_datum) for _ in part.data])
            if part.data and len(self._logprobs) < LOGGED_GROUPS:
                room = logged_tokens(group.num_rollouts)
                self._logprobs[group.group.number] = [
                    array("f", chain.from_iterable(next(of_data) for row in rows if 1 in row.loss_mask))[:room]
                    for rows in group.by_rollout
                ]

    def _of_all_ranks(self, outputs: list[LossStats]) -> list[LossStats]:
        """Gather the loss's outputs of every share, the first one's first."""
        if self.mesh.size == 1:
            return outputs
        gathered = self.mesh.gather(msgspec.msgpack.encode(outputs))
        return [stats for data in gathered for stats in msgspec.msgpack.decode(data, type=list[LossStats])]

    def _forget_sums(self) -> None:
        self.sums = StepSums()
        # What `num_tokens_run` made of groups that are not trained on yet.
        self._made: dict[GroupRef, tuple[RolloutGroup, GroupData]] = {}

    def _data_of(self, group: RolloutGroup) -> GroupData:
        learner = self.config.learner
        keeps_flat = learner.reference_kl > 0.0 or self.teachers is not None
        routes = None if self.policy.routing is None else self.policy.routing.shape
        return group_data(group, self.version, learner.advantage, learner.normalisation, keeps_flat, routes)
