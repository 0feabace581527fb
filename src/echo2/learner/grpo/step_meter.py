"""Measures a training step: its data and the time of its parts. These are the learner's columns of `metrics.jsonl`.

A step's window runs from the report of the previous step to its own report, so the parts add up: `time/step` =
`time/wait_for_batch` + `time/train` + `time/publish_wait` (the wait, before the update, until the snapshot is encoded,
which itself waits for the previous publication) + `time/checkpoint` + a little rest. A learner that shares its card
with workers also has `time/card_wait` and `time/card_move`, one that asks a teacher elsewhere `time/teacher_wait`.

A mean over nothing is absent: 0 would be a measurement. Where all groups are flat, no token is in the loss.

`LossStats` says what the loss did, and how far the data was from the policy; any split of a step adds up. k3 is
Schulman's estimate of KL(mu || pi), r - 1 - l; all log ratios are clamped to +-20. Statistics are kept for the step,
for each range of lags and for each worker: one bad machine, or one bad lag, does not show in a mean over all.

Shape suffixes: n = loss tokens, S = sequences, q = quantities of `Mismatch`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from echo2.config import Config
from echo2.config.rundir import FRESH_MISMATCH, FRESH_SURPRISE, FRESH_TOKENS
from echo2.core.errors import InvariantError
from echo2.core.types import RolloutGroup
from echo2.learner.core.losses import LOGGED_LAG, LossTokens, TokenLosses, log_ratio
from echo2.transport.message_bytes import LearnerLogprobs
from echo2.transport.regroup import as_one_row
from echo2.transport.routes import num_routed

#: Maximum number of reward functions with a column of their own.
PARTS_NAMED_MAX = 64
PARTS = ("wait_for_batch", "train", "publish_wait", "checkpoint")
LAG_BOUNDS = (LOGGED_LAG, 0, 1, 2, 4, 8, 16, 32)
LAG_NAMES = ("logged", "0", "1", "2", "3_4", "5_8", "9_16", "17_32", "33_up")
LOG_WEIGHT_LIMIT = math.log(10.0)  # of a sequence's log weight, in the effective sample size
MAX_WORKERS_NAMED = 8
TABLES = ("by_lag", "by_worker", "fresh")

S = TypeVar("S", "Mismatch", "Taught")


class StepMeter:
    """Collects the measurements of one step. The clock starts when it is created."""

    def __init__(self, step: int, config: Config) -> None:
        self._step = step
        self._max_staleness = config.schedule.max_staleness
        self._in_order = config.run.deterministic
        self._has_reference = config.learner.reference_kl > 0.0
        self._replays = config.learner.routing_replay
        self._started = time.monotonic()
        self._seconds = dict.fromkeys((*PARTS, *(["teacher_wait"] if config.distill.endpoints else [])), 0.0)
        self._rewards: list[list[float]] = []
        self._parts: dict[str, list[float]] = {}
        self._staleness: list[int] = []
        self._lengths: list[int] = []
        self._num_truncated = 0
        self._num_logged = 0
        self._num_unfit = 0
        self._num_replayed = self._num_routed = self._route_bytes = 0
        self.numbers: list[int] = []

    def add_card_time(self, wait_seconds: float, move_seconds: float) -> None:
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


def merged(first: Mapping[str, S], second: Mapping[str, S]) -> dict[str, S]:
    """Return both by name, added up."""
    return {**first, **{name: first[name] + one if name in first else one for name, one in second.items()}}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over some of the tokens. `dropped_*`: tokens without a policy gradient, by sign of the advantage.
    `surprise`: -logprob minus the entropy of the distribution that the token was drawn from; 0 on average if it was
    drawn from the policy.
    """

    tokens: float = 0.0
    abs_log_ratio: float = 0.0
    k3: float = 0.0
    dropped_positive: float = 0.0
    dropped_negative: float = 0.0
    surprise: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class LossStats(Mismatch):
    """Sums over loss tokens and sequences (and two maxima): `a + b` describes both parts together.

    `loss` is weighted according to the normalisation. `weight*` are sums of the sequences' importance weights and their
    squares, for the effective sample size. The keys of `by_lag` are from `LAG_NAMES`. `fresh` is by worker too, for
    tokens at lag 0 only: under the weights that sampled them, the log ratio shows only how the engines differ.
    """

    sequences: float = 0.0
    entropy: float = 0.0
    loss: float = 0.0
    capped: float = 0.0
    vetoed_sequences: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    reference_kl: float = 0.0
    ratio_max: float = 0.0
    k3_max: float = 0.0
    by_lag: Mapping[str, Mismatch] = field(default_factory=dict)
    by_worker: Mapping[str, Mismatch] = field(default_factory=dict)
    fresh: Mapping[str, Mismatch] = field(default_factory=dict)

    def __add__(self, other: Self) -> Self:
        maxima = {name: max(getattr(self, name), getattr(other, name)) for name in ("ratio_max", "k3_max")}
        tables = {name: merged(getattr(self, name), getattr(other, name)) for name in TABLES}
        special = maxima | tables
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name not in special}
        return type(self)(**sums, **special)

    @property
    def ess_ratio(self) -> float:
        """Effective sample size over the number of sequences, (sum w)^2 / (B sum w^2), at most 1; 1 without
        sequences.
        """
        if self.weight_squared == 0.0:
            return 1.0
        return min(1.0, self.weight**2 / (self.weight_squared * self.sequences))


@dataclass(frozen=True, slots=True)
class Taught:
    """What a teacher said of some tokens: how many, the sum of log pi - log rho, and the seconds that it took."""

    tokens: int = 0
    log_ratio: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(self.tokens + other.tokens, self.log_ratio + other.log_ratio, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one training step. `num_tokens` is N; `divisor` is the divisor of the sums; `grad_norm` is before
    clipping; `skipped`: nothing to learn from, weights and optimizer unchanged (the version grew nevertheless).

    `logprobs`: of the first groups of the step, under the policy as it was trained; 0 where a token is not trained on.
    `taught`: by teacher.

    `a + b` merges updates of one step: the later `lr`, the larger `grad_norm`, sums of the rest, no `logprobs`.
    """

    lr: float
    grad_norm: float
    num_tokens: int
    skipped: bool
    losses: LossStats
    divisor: float = 1.0
    num_updates: int = 1
    logprobs: LearnerLogprobs = field(default_factory=dict)
    taught: Mapping[str, Taught] = field(default_factory=dict)

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(
            lr=other.lr,
            grad_norm=max(self.grad_norm, other.grad_norm),
            num_tokens=self.num_tokens + other.num_tokens,
            skipped=self.skipped and other.skipped,
            losses=self.losses + other.losses,
            divisor=self.divisor + other.divisor,
            num_updates=self.num_updates + other.num_updates,
            taught=merged(self.taught, other.taught),
        )


@torch.no_grad()
def measure(
    loss: Tensor, logp_n: Tensor, tokens: LossTokens, losses: TokenLosses, reference_kl: Tensor | None
) -> LossStats:
    """Return the statistics of one forward pass. `loss` and `reference_kl` are the sums of the pass."""
    log_n = log_ratio(logp_n, tokens).double()
    ratio_n = log_n.exp()
    k3_n = ratio_n - 1.0 - log_n
    up_n, down_n = losses.dropped_n & (tokens.advantage_n > 0), losses.dropped_n & (tokens.advantage_n < 0)
    surprise_n = -logp_n.double() - tokens.entropy_n.double()
    quantities_nq = torch.stack(
        [torch.ones_like(log_n), log_n.abs(), k3_n, up_n.double(), down_n.double(), surprise_n], dim=1
    )
    bounds = torch.tensor(LAG_BOUNDS, device=log_n.device)
    lags = _table(quantities_nq, torch.bucketize(tokens.lag_n, bounds), len(LAG_NAMES))
    worker_n = tokens.source_S[tokens.sequence_n]
    workers = _table(quantities_nq, worker_n, len(tokens.sources))
    fresh = _table(quantities_nq * (tokens.lag_n == 0).unsqueeze(1), worker_n, len(tokens.sources))
    log_weight_S = log_n.new_zeros(tokens.num_sequences).index_add_(0, tokens.sequence_n, log_n)
    # Clamped: a single sequence of extreme weight must not stop the learning.
    weight_S = log_weight_S.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    scalars = {
        "entropy": tokens.entropy_n.sum().double(),
        "loss": loss.double(),
        "capped": losses.capped_n.sum().double(),
        "vetoed_sequences": losses.vetoed_S.sum().double(),
        "weight": weight_S.sum(),
        "weight_squared": weight_S.square().sum(),
        "reference_kl": log_n.new_zeros(()) if reference_kl is None else reference_kl.double(),
        "ratio_max": ratio_n.max(),
        "k3_max": k3_n.max(),
    }
    # One transfer from the device for all of them.
    values: list[float] = torch.cat(
        [*map(torch.flatten, (lags, workers, fresh)), torch.stack([*scalars.values()])]
    ).tolist()
    by_lag, values = _take(values, LAG_NAMES)
    by_worker, values = _take(values, tokens.sources)
    of_fresh, values = _take(values, tokens.sources)
    total = sum(by_lag.values(), Mismatch())
    return LossStats(
        sequences=float(tokens.num_sequences),
        by_lag=by_lag,
        by_worker=by_worker,
        fresh=of_fresh,
        **{f.name: getattr(total, f.name) for f in fields(Mismatch)},
        **dict(zip(scalars, values, strict=True)),
    )


def breakdown(stats: LossStats) -> dict[str, float]:
    """Return the mismatch by lag and by worker, as means per token, under the names of `metrics.jsonl`.

    The workers that add most to the step's mismatch are named; the rest is `others`. At lag 0, the workers with the
    largest mean mismatch plus surprise are named: the head judges their engines by these numbers.
    """
    ranked = sorted(stats.by_worker, key=lambda name: (-stats.by_worker[name].abs_log_ratio, name))
    named = {name: stats.by_worker[name] for name in ranked[:MAX_WORKERS_NAMED]}
    rest = sum((stats.by_worker[name] for name in ranked[MAX_WORKERS_NAMED:]), Mismatch())
    parts = {f"lag_{name}": part for name, part in stats.by_lag.items()}
    parts |= {f"worker/{name}": part for name, part in named.items()} | {"worker/others": rest}
    row: dict[str, float] = {}
    for name, part in parts.items():
        if part.tokens:
            row[f"mismatch_kl/{name}"] = part.k3 / part.tokens
            row[f"mismatch/abs_log_ratio/{name}"] = part.abs_log_ratio / part.tokens
            row[f"loss/dropped_positive/{name}"] = part.dropped_positive / part.tokens
            row[f"loss/dropped_negative/{name}"] = part.dropped_negative / part.tokens
    means = {name: part.abs_log_ratio / part.tokens for name, part in stats.fresh.items()}
    odd = {name: means[name] + abs(part.surprise) / part.tokens for name, part in stats.fresh.items()}
    for name in sorted(odd, key=lambda name: (-odd[name], name))[:MAX_WORKERS_NAMED]:
        row[FRESH_MISMATCH + name] = means[name]
        row[FRESH_TOKENS + name] = stats.fresh[name].tokens
        row[FRESH_SURPRISE + name] = stats.fresh[name].surprise / stats.fresh[name].tokens
    return row


def teacher_metrics(by_teacher: Mapping[str, Taught]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a step: the mean of log pi - log rho over tokens that pi sampled, an estimate of
    KL(pi || rho), of all teachers and of each; and the seconds."""
    total = sum(by_teacher.values(), Taught())
    yield "time/teacher", total.seconds
    for name, one in (("mean", total), *(sorted(by_teacher.items()) if len(by_teacher) > 1 else ())):
        if one.tokens:
            yield f"distill/reverse_kl/{name}", one.log_ratio / one.tokens


def _table(quantities_nq: Tensor, row_n: Tensor, num_rows: int) -> Tensor:
    return quantities_nq.new_zeros(num_rows, quantities_nq.shape[1]).index_add_(0, row_n, quantities_nq)


def _take(values: list[float], names: tuple[str, ...]) -> tuple[dict[str, Mismatch], list[float]]:
    """Return the first rows of `values` by name, without empty ones, and the rest of `values`."""
    width = len(fields(Mismatch))
    rows = {name: Mismatch(*values[i * width : (i + 1) * width]) for i, name in enumerate(names)}
    return {name: row for name, row in rows.items() if row.tokens}, values[len(names) * width :]
