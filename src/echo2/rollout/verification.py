"""Checks whether rollouts were drawn as their worker says, with one prefill under the same snapshot.

echo2's own engines draw by inversion from a stream of random numbers that the head chose (`sampler`, `random_streams`).
So the random number of each token must lie in that token's interval of the policy's cumulative distribution, up to
rounding. The check does not depend on the worker, its batches or its kernels. Engines that draw otherwise are checked
by their logprobs, and by their surprise: the mean of -logprob must be close to the mean entropy.

Tokens after a change of weights were sampled with keys and values of the older weights, which a prefill under the newer
weights does not have. They are judged as loosely as 16-bit numbers (benchmarks/hostile_sampling.py measures their
deviation), and only if the engine holds both sets of weights.

No torch here. Shape suffixes: T = tokens of a rollout.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from echo2.errors import PeerError
from echo2.rollout.random_streams import stream_keys, uniforms
from echo2.rollout.turns import derived_seed
from echo2.types import Assignment, Rollout, RolloutGroup, SamplingParams, SnapshotRef

Floats = npt.NDArray[np.float64]

#: Standard deviations by which a group's mean surprise may differ from its mean entropy. An honest group in 500 million
#: would exceed 6 if surprises were normal; they have a tail, so the limit is wider.
SURPRISE_DEVIATIONS_MAX = 7.0


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A finished completion to check. `support_tokens`, `support_offsets`: as in `Rollout`, of these tokens."""

    prompt_tokens: array[int]
    tokens: array[int]
    params: SamplingParams
    support_tokens: array[int] | None = None
    support_offsets: array[int] | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """A policy's distributions for each of T given tokens, with temperature and narrowing applied; all [T] float64.

    low, high       inversion draws the token for random numbers from `low` to `high`
    logprobs        of the token
    entropies       of the distribution, nats
    variances       of -logprob under the distribution, nats^2
    support_errors  probability by which the reported support is not what top-k and top-p leave
    bits            of the computing dtype: 32 or 16
    """

    low: Floats
    high: Floats
    logprobs: Floats
    entropies: Floats
    variances: Floats
    support_errors: Floats
    bits: int


@runtime_checkable
class PrefillEngine(Protocol):
    """An engine that can check rollouts: those of this package can, token servers cannot."""

    async def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        """Read completions under the weights of `ref`, between the decoding steps of running requests.

        Raises:
            PeerError: "snapshot_gone", the engine does not hold these weights.
        """


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Deviations allowed to an honest group. `interval` and `support`: probability; `logprob` (of a token) and
    `mean_logprob` (mean over a group): nats.
    """

    interval: float
    support: float
    logprob: float
    mean_logprob: float


#: By bits of the computing dtype. Set by false-alarm rates (benchmarks/hostile_sampling.py, docs/security.md).
TOLERANCES = {32: Tolerance(1e-3, 1e-3, 0.02, 1e-3), 16: Tolerance(0.2, 0.15, 1.5, 0.1)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a group. `num_tokens` were judged; `num_skipped` were not, because they are of versions
    that the engine does not hold.

    worst_interval  largest distance of a token's random number from its interval; 0: all lie inside
    worst_support   largest `support_errors`
    worst_logprob   largest |reported logprob - computed logprob|, nats; `mean_logprob`: the mean
    surprise        (sum of -logprob minus sum of entropies) in standard deviations
    fault           why the group was not drawn as its worker says; empty: it passes
    """

    num_tokens: int
    num_skipped: int
    worst_interval: float
    worst_support: float
    worst_logprob: float
    mean_logprob: float
    surprise: float
    fault: str


async def check_group(
    engine: PrefillEngine, ref: SnapshotRef, assignment: Assignment, group: RolloutGroup, is_from_stream: bool = True
) -> Verdict:
    """Judge a delivered group by the weights of `ref` and of earlier versions that the engine holds. `is_from_stream`:
    the worker's engine draws from the head's random streams.

    Raises:
        PeerError: as `PrefillEngine.prefill`, for `ref`.
    """
    num_sampled = sum(one.loss_mask.count(1) for one in group.rollouts)
    if group.lineage != ref.lineage or group.logged:  # its versions mean other weights, or none
        return verdict([], num_sampled, TOLERANCES[32])
    # If an environment's reply may be empty, the loss mask does not show where a turn ends and the next stream begins.
    draws, is_from_stream = is_from_stream, is_from_stream and (assignment.is_chat or not assignment.environment)
    first, later, bits = list[Comparison](), list[Comparison](), 32
    for version in sorted({version for one in group.rollouts for _, version in one.version_spans}):
        spans = list(_spans_of(group, version))
        requests = [_request(assignment, rollout, stop) for _, rollout, _, stop in spans]
        try:
            prefills = await engine.prefill(replace(ref, version=version), requests)
        except PeerError:
            if version == ref.version:
                raise
            continue
        for (sample, rollout, start, stop), found in zip(spans, prefills, strict=True):
            bits = found.bits
            compared = compare(rollout, found, numbers_of(assignment, sample, rollout, stop), start)
            (later if start else first).append(compared)
    # A token server may compute in 16 bits even if the weights have 32.
    exact = verdict(first, num_sampled, TOLERANCES[bits if draws else 16], is_from_stream)
    return merged(exact, verdict(later, num_sampled, TOLERANCES[16], is_from_stream), num_sampled)


def _spans_of(group: RolloutGroup, version: int) -> Iterator[tuple[int, Rollout, int, int]]:
    """Yield (sample, rollout, start, stop) of the spans of this version."""
    for sample, rollout in enumerate(group.rollouts):
        ends = [start for start, _ in rollout.version_spans[1:]] + [len(rollout.tokens)]
        for (start, of_span), stop in zip(rollout.version_spans, ends, strict=True):
            if of_span == version:
                yield sample, rollout, start, stop


def numbers_of(assignment: Assignment, sample: int, rollout: Rollout, count: int) -> Floats:
    """Return the random number that each of the first `count` tokens must be drawn with; 0 for environments' tokens."""
    seed, found = assignment.lease.seed, np.zeros(count)
    for turn, (start, stop) in enumerate(_turns(rollout.loss_mask)):
        if start >= count:
            break
        keys = stream_keys([derived_seed(seed, sample, turn)], [0]) if assignment.environment else None
        keys = stream_keys([seed], [sample]) if keys is None else keys
        length = min(stop, count) - start
        found[start : start + length] = uniforms(np.repeat(keys, length), np.arange(length, dtype=np.int64))
    return found


def _turns(loss_mask: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of sampled tokens: the turns, if no reply of the environment is empty."""
    start = loss_mask.find(1)
    while start >= 0:
        stop = loss_mask.find(0, start)
        stop = len(loss_mask) if stop < 0 else stop
        yield start, stop
        start = loss_mask.find(1, stop)


def _request(assignment: Assignment, rollout: Rollout, count: int) -> PrefillRequest:
    offsets = rollout.support_offsets
    return PrefillRequest(
        assignment.prompt_tokens,
        rollout.tokens[:count],
        assignment.params,
        None if offsets is None or rollout.support_tokens is None else rollout.support_tokens[: offsets[count]],
        None if offsets is None else offsets[: count + 1],
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Deviations of a rollout's sampled tokens, [N] each: distance of the random number from the token's interval,
    error of the support, |reported - computed logprob|, -logprob minus entropy, and the variance of -logprob."""

    intervals: Floats
    supports: Floats
    logprobs: Floats
    surprises: Floats
    variances: Floats


def compare(rollout: Rollout, found: Prefill, numbers_T: Floats, start: int = 0) -> Comparison:
    """Compare what the worker reported with the prefill, for the tokens from `start` on."""
    count = len(numbers_T)
    sampled = np.frombuffer(rollout.loss_mask, dtype=np.uint8)[:count] == 1
    sampled &= np.arange(count) >= start
    said = np.frombuffer(rollout.logprobs, dtype=np.float32)[:count].astype(np.float64)
    outside = np.maximum(0.0, np.maximum(found.low - numbers_T, numbers_T - found.high))
    return Comparison(
        outside[sampled],
        found.support_errors[sampled],
        np.abs(said - found.logprobs)[sampled],
        (-found.logprobs - found.entropies)[sampled],
        found.variances[sampled],
    )


def merged(one: Verdict, other: Verdict, num_sampled: int) -> Verdict:
    """Merge the verdicts on two parts of a group."""
    if not (one.num_tokens and other.num_tokens):
        return one if one.num_tokens else other
    num = one.num_tokens + other.num_tokens
    return Verdict(
        num_tokens=num,
        num_skipped=num_sampled - num,
        worst_interval=max(one.worst_interval, other.worst_interval),
        worst_support=max(one.worst_support, other.worst_support),
        worst_logprob=max(one.worst_logprob, other.worst_logprob),
        mean_logprob=(one.mean_logprob * one.num_tokens + other.mean_logprob * other.num_tokens) / num,
        surprise=max(one.surprise, other.surprise, key=abs),
        fault=one.fault or other.fault,
    )


def verdict(
    parts: Sequence[Comparison], num_sampled: int, tolerance: Tolerance, is_from_stream: bool = True
) -> Verdict:
    """Return the verdict on a group of `num_sampled` tokens, from the parts that were compared."""
    if not parts:
        return Verdict(0, num_sampled, 0.0, 0.0, 0.0, 0.0, 0.0, "")
    intervals, supports, logprobs, surprises, variances = (
        np.concatenate([getattr(part, name) for part in parts]) for name in Comparison.__slots__
    )
    deviation = math.sqrt(max(float(variances.sum()), 1e-9))
    found = {
        "worst_interval": float(intervals.max()) if is_from_stream else 0.0,
        "worst_support": float(supports.max()),
        "worst_logprob": float(logprobs.max()),
        "mean_logprob": float(logprobs.mean()),
        "surprise": float(surprises.sum()) / max(deviation, 1.0),
    }
    fault = ""
    if found["worst_interval"] > tolerance.interval:
        num = int((intervals > tolerance.interval).sum())
        fault = f"{num} of {len(intervals)} tokens are not those that its random numbers draw from these weights"
    elif found["worst_support"] > tolerance.support:
        fault = "a token was drawn from others than top-k and top-p leave"
    elif found["worst_logprob"] > tolerance.logprob or found["mean_logprob"] > tolerance.mean_logprob:
        fault = (
            f"its logprobs are off by {found['mean_logprob']:.3g} nats on average and {found['worst_logprob']:.3g} at "
            f"worst; {tolerance.mean_logprob:g} and {tolerance.logprob:g} are allowed"
        )
    elif abs(found["surprise"]) > SURPRISE_DEVIATIONS_MAX:
        fault = f"its tokens are {found['surprise']:+.1f} standard deviations more surprising than the entropy says"
    return Verdict(num_tokens=len(intervals), num_skipped=num_sampled - len(intervals), fault=fault, **found)
