"""Measures a training step: its data and the time of its parts. These are the learner's columns of `metrics.jsonl`.

A step's window runs from the report of the previous step to its own report, so the parts add up: `time/step` =
`time/wait_for_batch` + `time/train` + `time/publish_wait` (the wait, before the update, until the snapshot is encoded,
which itself waits for the previous publication) + `time/checkpoint` + a little rest. A learner that shares its card
with workers also has `time/card_wait` and `time/card_move`.

A mean over nothing is absent: 0 would be a measurement. Where all groups are flat, no token is in the loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from echo2.config import Config
from echo2.core.errors import InvariantError
from echo2.core.types import RolloutGroup
from echo2.learner.grpo.loss_stats import StepStats, breakdown, teacher_metrics
from echo2.transport.regroup import as_one_row
from echo2.transport.routes import num_routed

#: Maximum number of reward functions with a column of their own.
PARTS_NAMED_MAX = 64
PARTS = ("wait_for_batch", "train", "publish_wait", "checkpoint")


class StepMeter:
    """Collects the measurements of one step. The clock starts when it is created."""

    def __init__(self, step: int, config: Config) -> None:
        self._step = step
        self._max_staleness = config.schedule.max_staleness
        self._in_order = config.run.deterministic
        self._has_reference = config.learner.reference_kl > 0.0
        self._replays = config.learner.routing_replay
        self._started = time.monotonic()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._rewards: list[list[float]] = []
        self._parts: dict[str, list[float]] = {}
        self._staleness: list[int] = []
        self._lengths: list[int] = []
        self._num_truncated = 0
        self._num_logged = 0
        self._num_unfit = 0
        self._num_replayed = self._num_routed = self._route_bytes = 0
        self.numbers: list[int] = []

    def took_turn(self, wait_seconds: float, move_seconds: float) -> None:
        """Add the time for which the learner waited for a card that it shares, and moved its tensors."""
        for part, seconds in (("card_wait", wait_seconds), ("card_move", move_seconds)):
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def waited(self, seconds: float) -> None:
        """Set how long the trainer waited for groups, by its own clock."""
        self._seconds["wait_for_batch"] = seconds

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time spent inside to `part`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] += time.monotonic() - started

    def see(self, group: RolloutGroup, is_fit: bool = True) -> None:
        """Count a scored group, and check once more that it may be trained on now. A group that is not fit counts only
        as unfit.

        Raises:
            InvariantError: the group is of another step, too stale, or (deterministic mode) out of order.
        """
        staleness = [self._step - rollout.oldest_version for rollout in group.rollouts]
        if group.step != self._step or max(staleness) > self._max_staleness or min(staleness) < 0:
            raise InvariantError(
                f"{group.group} (step {group.step}, versions {group.oldest_version}..{group.newest_version}) was fed "
                f"to step {self._step} with max_staleness {self._max_staleness}"
            )
        if self._in_order and self.numbers and group.group.number <= self.numbers[-1]:
            raise InvariantError(f"{group.group} came after train-{self.numbers[-1]} in deterministic mode")
        self.numbers.append(group.group.number)
        if not is_fit:
            self._num_unfit += 1
            return
        if group.logged:
            self._num_logged += group.num_rollouts
        else:
            self._staleness += staleness
        if group.routes:
            self._num_replayed += group.num_rollouts
            self._num_routed += sum(num_routed(group))
            self._route_bytes += len(group.routes)
        self._rewards.append(group.rewards)
        for rollout in as_one_row(group):
            self._lengths.append(len(rollout.tokens))
            self._num_truncated += rollout.finish == "length"
            for name, value in rollout.reward_parts.items():
                if name in self._parts or len(self._parts) < PARTS_NAMED_MAX:
                    self._parts.setdefault(name, []).append(value)

    def metrics(self, stats: StepStats) -> dict[str, float]:
        """Return all numbers of the step, under the names of `metrics.jsonl`."""
        return {
            **self.rollout_metrics(),
            **(self._token_means(stats) if stats.losses.tokens else {}),
            "loss/vetoed_sequences": stats.losses.vetoed_sequences,
            **breakdown(stats.losses),
            **dict(teacher_metrics(stats.taught) if stats.taught else ()),
            "optim/lr": stats.lr,
            "optim/grad_norm": stats.grad_norm,
            "optim/skipped": float(stats.skipped),
            "optim/updates": stats.num_updates,
        }

    def _token_means(self, stats: StepStats) -> dict[str, float]:
        """Return what is measured on loss tokens, of which there is at least one."""
        losses = stats.losses
        per_token = 1.0 / losses.tokens
        return {
            "mismatch_kl/mean": losses.k3 * per_token,
            "mismatch_kl/max": losses.k3_max,
            "mismatch/abs_log_ratio": losses.abs_log_ratio * per_token,
            "mismatch/ratio_max": losses.ratio_max,
            "ess": losses.ess_ratio,
            "entropy/mean": losses.entropy * per_token,
            **({"kl/mean": losses.reference_kl * per_token} if self._has_reference else {}),
            "loss/mean": losses.loss / stats.divisor,
            "loss/dropped_positive": losses.dropped_positive * per_token,
            "loss/dropped_negative": losses.dropped_negative * per_token,
            "clip_ratio/mean": (losses.dropped_positive + losses.dropped_negative) * per_token,
            "loss/capped": losses.capped * per_token,
        }

    def rollout_metrics(self) -> dict[str, float]:
        """Return the numbers of the step that do not come from the trainer's arithmetic."""
        seconds = time.monotonic() - self._started
        return {
            "groups/unfit": self._num_unfit,
            **(self._reward_metrics() if self._rewards else {}),
            "time/step": seconds,
            **{f"time/{part}": value for part, value in self._seconds.items()},
            "perf/tokens_per_s": sum(self._lengths) / max(seconds, 1e-9),
            "learner/idle_ratio": self._seconds["wait_for_batch"] / max(seconds, 1e-9),
        }

    def _reward_metrics(self) -> dict[str, float]:
        """Return what is measured on scored groups that are fit, of which there is at least one."""
        rewards = [reward for group in self._rewards for reward in group]
        num_flat = sum(1 for group in self._rewards if max(group) == min(group))
        return {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "reward/frac_zero_std": num_flat / len(self._rewards),
            **{f"reward/{name}/mean": statistics.fmean(values) for name, values in sorted(self._parts.items())},
            **self._off_policy(),
            **self._routes(),
            "completions/mean_length": statistics.fmean(self._lengths),
            "completions/clipped_ratio": self._num_truncated / len(self._lengths),
        }

    def _routes(self) -> dict[str, float]:
        """Return what share of the rollouts was trained with the sampler's experts, and the bytes of these per token
        that was read, prompts included."""
        if not self._replays:
            return {}
        share = {"routes/replayed_share": self._num_replayed / len(self._lengths)}
        return share | ({"routes/bytes_per_token": self._route_bytes / self._num_routed} if self._num_routed else {})

    def _off_policy(self) -> dict[str, float]:
        """Return the staleness numbers. Logged rollouts have no staleness: 0 would mean on-policy."""
        share = {"off_policy/logged": self._num_logged / len(self._lengths)}
        if not self._staleness:
            return share
        return share | {
            "off_policy/mean": statistics.fmean(self._staleness),
            "off_policy/max": max(self._staleness),
        }
