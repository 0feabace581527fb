"""Checks whether rollouts were drawn as their worker says, with one prefill under the same snapshot.

echo2's own engines draw by inversion from a stream of random numbers that the head chose (`sampler`, `engine`).
So the random number of each token must lie in that token's interval of the policy's cumulative distribution, up to
rounding. The check does not depend on the worker, its batches or its kernels. Engines that draw otherwise are checked
by their logprobs, and by their surprise: the mean of -logprob must be close to the mean entropy.

Engines keep their keys and values when weights are swapped within a turn, and read everything again before the next
turn. A claimed swap is therefore replayed: the tokens are read under the weights that read them then, at one prefill's
cost. A claim makes no tolerance wider and no check dearer (`readings_of`).

No torch here. Shape suffixes: T = tokens of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from echo2.core.types import Assignment, Rollout, RolloutGroup, SnapshotRef
from echo2.engines.engine import Floats, Ints, Prefill, PrefillRequest, Spans, derived_seed, stream_keys, uniforms
from echo2.transport.routes import unpacked

#: Number of standard deviations that a group's mean surprise may differ from its mean entropy. An honest group in 500
#: million would exceed 6 if surprises were normal; they have a tail, so the limit is wider.
SURPRISE_DEVIATIONS_MAX = 7.0
#: Where a sharp policy turns on rounding, a token may be off by far more than the others: in a real model in bfloat16
#: one of 30,000 was. One token of a group, and one more in each OUTLIER_TOKENS, may miss its interval by up to twice
#: the tolerance if its worker has told another probability of it, too, as one that drew from other logits must have.
OUTLIER_TOKENS = 4096
#: Tokens over which a typical distance is taken; a smaller group counts as one of so many, the others at distance 0.
#: With 256, who moves all random numbers by .15 passes with groups of 64 tokens; with 32, honest groups of a real model
#: in bfloat16 came to two thirds of the limit (of four tokens a rollout).
TYPICAL_TOKENS = 64


@runtime_checkable
class PrefillEngine(Protocol):
    """An engine that can check rollouts: those of this package can, token servers cannot."""

    @property
    def held_refs(self) -> tuple[SnapshotRef, ...]:
        """The snapshots that it can check under."""

    async def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        """Read completions between the decoding steps of running requests. The versions of `reads` are of the history
        of `ref`.

        Raises:
            PeerError: "snapshot_gone", the engine does not hold the weights of `ref`, or of one of `reads`.
        """


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Deviations allowed to an honest group. `interval` (but for outliers), `support`, and the typical ones:
    probability; `logprob` (of a
    token) and `mean_logprob` (mean over a group): nats; `regret` (of a token's routes) and `mean_regret`: shares of the
    distance between a router's own choice and any experts (`engines/routing.py`).
    """

    interval: float
    typical_interval: float
    support: float
    typical_support: float
    logprob: float
    mean_logprob: float
    regret: float
    mean_regret: float


#: By bits of the computing dtype. Set by false-alarm rates (`make bench-hostile_sampling`, docs/security.md).
TOLERANCES = {
    32: Tolerance(1e-3, 1e-6, 1e-3, 1e-5, 0.02, 1e-3, 0.01, 1e-4),
    16: Tolerance(0.2, 1.5e-3, 0.15, 5e-3, 1.5, 0.1, 0.25, 0.03),
}

#: llama.cpp also rounds what it multiplies with rounded weights, so the means of honest groups come near to the limits:
#: of SmolLM2 in 8 bits, three of 128 groups of 64 tokens were outside. They scatter with the root of the number of
#: tokens; groups of fewer than this may be further off by as much. At 64 tokens that is .158 nats and .0024; two groups
#: of 384 tokens at a temperature of .9 came to .161 and .0029, so more leeway could hide that.
ROUNDED_TOKENS = 160


def tolerance_for(bits: int, form: str, num_tokens: int) -> Tolerance:
    """Return what is allowed to a group of so many tokens. `bits`: of the computing dtype; `form`: to which its worker
    rounds the weights."""
    tolerance = TOLERANCES[bits]
    more = math.sqrt(max(1.0, ROUNDED_TOKENS / max(1, num_tokens))) if form else 1.0
    typical, mean = more * tolerance.typical_interval, more * tolerance.mean_logprob
    return replace(tolerance, typical_interval=typical, mean_logprob=mean)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a group. Of its sampled tokens `num_tokens` were judged; `num_skipped` were not, because
    the engine does not hold weights that they depend on.

    worst_interval  largest distance of a token's random number from its interval; 0: all lie inside
    typical_interval
                    square of the mean root of these distances, which few large ones change little: an engine that draws
                    from slightly other distributions is off by little at most tokens
    worst_support   largest `support_errors`
    typical_support
                    square of their mean root
    worst_logprob   largest |reported logprob - computed logprob|, nats; `mean_logprob`: the mean
    surprise        (sum of -logprob minus sum of entropies) in standard deviations
    variance        of that sum, nats^2
    fault           why the group was not drawn as its worker says; empty: it passes
    worst_regret    largest regret of a token's routes; `mean_regret`: the mean
    """

    num_tokens: int
    num_skipped: int
    worst_interval: float
    typical_interval: float
    worst_support: float
    typical_support: float
    worst_logprob: float
    mean_logprob: float
    surprise: float
    variance: float
    fault: str
    worst_regret: float = 0.0
    mean_regret: float = 0.0


async def check_group(
    engine: PrefillEngine,
    ref: SnapshotRef,
    assignment: Assignment,
    group: RolloutGroup,
    is_from_stream: bool = True,
    form: str = "",
) -> Verdict:
    """Judge a delivered group, as far as the engine holds its weights. `ref`: those of its newest version;
    `is_from_stream`: the worker's engine draws from the head's random streams; `form`: to which it rounds its weights.

    Raises:
        PeerError: as `PrefillEngine.prefill`.
    """
    num_sampled = sum(one.loss_mask.count(1) for one in group.rollouts)
    if group.lineage != ref.lineage or group.logged:  # its versions mean other weights, or none
        return verdict([], num_sampled, TOLERANCES[32])
    draws, is_from_stream = is_from_stream, is_from_stream and shows_turns(assignment)
    held_versions = {one.version for one in engine.held_refs if one.history == ref.history}
    group = unpacked(group)
    readings = [list(readings_of(assignment, rollout, held_versions)) for rollout in group.rollouts]
    requests = [replace(one.request, form=form) for of_rollout in readings for one in of_rollout]
    prefills = iter(await engine.prefill(ref, requests))
    compared, regrets, bits = list[Comparison](), list[Floats](), 32
    for sample, rollout, of_rollout in zip(group.sample_numbers, group.rollouts, readings, strict=True):
        numbers_T, parts, of_routes = numbers_of(assignment, sample, rollout), list[Comparison](), list[Floats]()
        for reading, prefill in zip(of_rollout, prefills, strict=False):
            parts.append(compare(rollout, prefill, numbers_T, reading))
            of_routes.append(prefill.regrets)
            bits = min(bits, prefill.bits)
        compared += nearest(of_rollout, parts)
        regrets.append(regrets_of(of_routes))
    # A token server may compute in 16 bits even if the weights have 32.
    tolerance = tolerance_for(bits if draws else 16, form, num_sampled)
    return with_regrets(verdict(compared, num_sampled, tolerance, is_from_stream), np.concatenate(regrets), tolerance)


@dataclass(frozen=True, slots=True)
class Reading:
    """A prefill, and the places of the sampled tokens that it judges, ascending."""

    request: PrefillRequest
    places: Ints


def readings_of(assignment: Assignment, rollout: Rollout, held_versions: Container[int]) -> Iterator[Reading]:
    """Yield the prefills that judge a rollout under the `held_versions`: one for every turn with a swap, and one for
    all other turns of one version. That is 2 n - 1 at most for n ascending versions, and one for a single turn. The
    tokens of a turn are left out from the first version on that is not held.

    Where turns do not show, another may begin with a swap or behind it. Tokens of a later version are then judged as of
    such a turn, too, and the nearer judgement counts (`nearest`).
    """
    sampled, steady = np.frombuffer(rollout.loss_mask, dtype=np.uint8) == 1, dict[int, list[Ints]]()
    for start, stop in turns_of(assignment, rollout):
        reads, stop = _reads(rollout, start, stop, held_versions)
        places = start + np.flatnonzero(sampled[start:stop])
        if len(reads) == 1:
            steady.setdefault(reads[0][1], []).append(places)
        elif reads:
            yield Reading(_request(assignment, rollout, reads, places), places)
            ends = [*(first for first, _ in reads[2:]), stop]
            for (first, version), end in zip(() if shows_turns(assignment) else reads[1:], ends, strict=False):
                steady.setdefault(version, []).append(places[(places >= first) & (places < end)])
    for version, turns in steady.items():
        places = np.concatenate(turns)
        if len(places):
            yield Reading(_request(assignment, rollout, ((0, version),), places), places)


def _reads(rollout: Rollout, start: int, stop: int, held_versions: Container[int]) -> tuple[Spans, int]:
    """Return the weights of a turn, up to the first that are not held, and the end of the tokens that these drew."""
    reads: list[tuple[int, int]] = []
    for first, version in rollout.version_spans:
        if first >= stop:
            break
        if first <= start:
            reads = [(0, version)]
        elif version != reads[-1][1]:
            reads.append((first, version))
    for at, (first, version) in enumerate(reads):
        if version not in held_versions:
            return tuple(reads[:at]), first if at else start
    return tuple(reads), stop


def numbers_of(assignment: Assignment, sample: int, rollout: Rollout) -> Floats:
    """Return the random number that each token must be drawn with; 0 for environments' tokens."""
    seed, numbers = assignment.lease.seed, np.zeros(len(rollout.tokens))
    for turn, (start, stop) in enumerate(turns_of(assignment, rollout)):
        of_turn = ([derived_seed(seed, sample, turn)], [0]) if assignment.environment else ([seed], [sample])
        keys = np.repeat(stream_keys(*of_turn), stop - start)
        numbers[start:stop] = uniforms(keys, np.arange(stop - start, dtype=np.int64))
    return numbers


def shows_turns(assignment: Assignment) -> bool:
    """Whether the loss mask shows where each turn ends: not if an environment's reply may be empty."""
    return assignment.is_chat or not assignment.environment


def turns_of(assignment: Assignment, rollout: Rollout) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each turn; of each run of turns where they do not show."""
    if not assignment.environment:
        yield 0, len(rollout.tokens)
        return
    mask = rollout.loss_mask
    start = mask.find(1)
    while start >= 0:
        stop = mask.find(0, start)
        stop = len(mask) if stop < 0 else stop
        yield start, stop
        start = mask.find(1, stop)


def _request(assignment: Assignment, rollout: Rollout, reads: Spans, places: Ints) -> PrefillRequest:
    """Return the prefill that judges the tokens at these places. It reads along the routes of what was read to draw
    them; tokens before a later turn were read again, and these weights choose again."""
    first, stop = int(places[0]), int(places[-1]) + 1
    offsets, behind = rollout.support_offsets, len(assignment.prompt_tokens) - 1
    routes, is_routed = b"", b""
    if rollout.routes:
        token_bytes = len(rollout.routes) // (behind + len(rollout.tokens))
        sampled = np.flatnonzero(np.frombuffer(rollout.loss_mask, dtype=np.uint8))
        drawn_next = sampled[np.searchsorted(sampled, np.arange(-behind, stop))]
        routes, is_routed = rollout.routes[: token_bytes * (behind + stop)], np.isin(drawn_next, places).tobytes()
    return PrefillRequest(
        assignment.prompt_tokens,
        rollout.tokens[:stop],
        assignment.params,
        reads,
        first,
        None if offsets is None or rollout.support_tokens is None else rollout.support_tokens[: offsets[stop]],
        None if offsets is None else offsets[: stop + 1],
        routes,
        is_routed,
    )


def regrets_of(regrets_of_readings: Sequence[Floats]) -> Floats:
    """Return the regret of each token's routes that was judged by a reading of a rollout; the least of several."""
    least = np.full(max(map(len, regrets_of_readings), default=0), np.inf)
    for regrets in regrets_of_readings:
        least[: len(regrets)] = np.minimum(least[: len(regrets)], regrets)
    judged: Floats = least[np.isfinite(least)]
    return judged


def with_regrets(verdict: Verdict, regrets: Floats, tolerance: Tolerance) -> Verdict:
    """Return the verdict with that on the group's routes."""
    if not len(regrets):
        return verdict
    worst, mean, fault = float(regrets.max()), float(regrets.mean()), verdict.fault
    if worst > tolerance.regret or mean > tolerance.mean_regret:  # the logprobs along such routes say little
        fault = (
            f"its experts are not those that its weights choose: {mean:.3g} off on average and {worst:.3g} at worst, "
            f"where any experts are about 1; {tolerance.mean_regret:g} and {tolerance.regret:g} are allowed"
        )
    return replace(verdict, fault=fault, worst_regret=worst, mean_regret=mean)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Deviations of sampled tokens, [N] each: distance of the random number from the token's interval, error of the
    support, |reported - computed logprob|, the same of the probability, -logprob minus entropy, and the variance of
    -logprob."""

    intervals: Floats
    supports: Floats
    logprobs: Floats
    shifts: Floats
    surprises: Floats
    variances: Floats


def compare(rollout: Rollout, prefill: Prefill, numbers_T: Floats, reading: Reading) -> Comparison:
    """Compare what the worker reported with the prefill of a reading."""
    claimed = np.frombuffer(rollout.logprobs, dtype=np.float32).astype(np.float64)[reading.places]
    numbers, at = numbers_T[reading.places], reading.places - reading.request.first
    return Comparison(
        np.maximum(0.0, np.maximum(prefill.low[at] - numbers, numbers - prefill.high[at])),
        prefill.support_errors[at],
        np.abs(claimed - prefill.logprobs[at]),
        np.abs(np.exp(claimed) - np.exp(prefill.logprobs[at])),
        (-prefill.logprobs - prefill.entropies)[at],
        prefill.variances[at],
    )


def nearest(readings: Sequence[Reading], parts: Sequence[Comparison]) -> list[Comparison]:
    """Keep one comparison of each token of a rollout: that with the smallest deviation of logprobs."""
    if len(readings) < 2:
        return list(parts)
    places = np.concatenate([reading.places for reading in readings])
    whole = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Comparison.__slots__}
    order = np.lexsort((whole["logprobs"], places))
    is_first = np.diff(places[order], prepend=-1) > 0
    return [Comparison(**{name: values[order[is_first]] for name, values in whole.items()})]


def verdict(
    parts: Sequence[Comparison], num_sampled: int, tolerance: Tolerance, is_from_stream: bool = True
) -> Verdict:
    """Return the verdict on a group of `num_sampled` tokens, from the parts that were compared."""
    if not parts:
        return Verdict(0, num_sampled, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "")
    intervals, supports, logprobs, shifts, surprises, variances = (
        np.concatenate([getattr(part, name) for part in parts]) for name in Comparison.__slots__
    )
    if not is_from_stream:
        intervals = np.zeros_like(intervals)
    variance = max(float(variances.sum()), 1.0)
    figures = {
        "worst_interval": float(intervals.max()),
        "typical_interval": _typical(intervals),
        "worst_support": float(supports.max()),
        "typical_support": _typical(supports),
        "worst_logprob": float(logprobs.max()),
        "mean_logprob": float(logprobs.mean()),
        "surprise": float(surprises.sum()) / math.sqrt(variance),
        "variance": variance,
    }
    fault = ""
    if num := _num_off(intervals, shifts, tolerance.interval):
        fault = f"{num} of {len(intervals)} tokens are not those that its random numbers draw from these weights"
    elif figures["typical_interval"] > tolerance.typical_interval:
        fault = (
            f"its random numbers typically miss its tokens by {figures['typical_interval']:.2g}; "
            f"{tolerance.typical_interval:g} is allowed"
        )
    elif figures["worst_support"] > tolerance.support or figures["typical_support"] > tolerance.typical_support:
        fault = "a token was drawn from others than top-k and top-p leave"
    elif figures["worst_logprob"] > tolerance.logprob or figures["mean_logprob"] > tolerance.mean_logprob:
        fault = (
            f"its logprobs are off by {figures['mean_logprob']:.3g} nats on average and "
            f"{figures['worst_logprob']:.3g} at worst; {tolerance.mean_logprob:g} and {tolerance.logprob:g} are allowed"
        )
    elif abs(figures["surprise"]) > SURPRISE_DEVIATIONS_MAX:
        fault = f"its tokens are {figures['surprise']:+.1f} standard deviations more surprising than the entropy says"
    return Verdict(num_tokens=len(intervals), num_skipped=num_sampled - len(intervals), fault=fault, **figures)


def _num_off(intervals: Floats, shifts: Floats, limit: float) -> int:
    """Return how many tokens are further from their intervals than `limit`; 0 if these are no more than outliers."""
    is_off = intervals > limit
    is_outlier = is_off & (intervals <= 2 * limit) & (shifts >= intervals / 2)
    is_honest = is_off.sum() == is_outlier.sum() <= 1 + len(intervals) // OUTLIER_TOKENS
    return 0 if is_honest else int(is_off.sum())


def _typical(values: Floats) -> float:
    """Return the square of the mean root."""
    return float(np.sqrt(values).sum() / max(len(values), TYPICAL_TOKENS)) ** 2
