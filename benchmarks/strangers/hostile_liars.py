"""Simulated strangers that lie in any field of a delivery, in runs whose checks are the real ones.

A `Lie` is a point in the space of what a stranger may choose: how it draws tokens, which versions it says drew them and
from which token on, the logprobs it reports, when it delivers, what it says of its engine, and how long it is honest
first. The attacks are not listed: `random_lie` draws one, `mutated` changes it, and `hostile_fleet.py --search` looks
for the worst. The rollouts are real ones, of a toy policy whose distributions depend on the version, the position and
the token before. They are encoded and parsed as on the wire, and judged by `rollouts.verification`.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from echo2.core.errors import PeerError
from echo2.core.types import Assignment, Lease, Rollout, RolloutGroup, SamplingParams, SnapshotRef
from echo2.engines.engine import Prefill, PrefillRequest, stream_keys, uniforms
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.planning.sim.fleet import SimWorker
from echo2.planning.sim.scenario import WorkersSpec
from echo2.rollouts.verification import check_group
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire

VOCAB, TOKENS, BEST_OF = 16, 12, 8
PROMPT = array("i", [1])
PARAMS = SamplingParams(max_tokens=TOKENS)
#: Distance of a random number from its token's interval from which on the token is wrong, and not rounded.
WRONG = 1e-3
Floats = npt.NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lie:
    """What a stranger does. `drawing`, `where`: how its wrong tokens are drawn, and which are; `spans`: the versions
    that it names; `logprobs`: those of the named versions, or all 0; `share`: of its groups that are wrong, after
    `patience` right ones; `delay`: share of the lease that it lets pass; `draws`: what it says of its engine.
    """

    drawing: Literal["noise", "cold", "hot", "likely", "best"] = "noise"
    where: Literal["all", "later", "last"] = "all"
    spans: Literal["true", "each", "twice", "falling", "oldest", "newest", "random"] = "true"
    logprobs: Literal["named", "zero"] = "named"
    share: float = 1.0
    patience: int = 0
    delay: float = 0.0
    draws: bool = True


CHOICES: dict[str, tuple[Any, ...]] = {
    "drawing": ("noise", "cold", "hot", "likely", "best"),
    "where": ("all", "later", "last"),
    "spans": ("true", "each", "twice", "falling", "oldest", "newest", "random"),
    "logprobs": ("named", "named", "zero"),
    "share": (1.0, 1.0, 0.5, 0.1),
    "patience": (0, 0, 4, 12),
    "delay": (0.0, 0.0, 0.2, 0.7, 0.95),
    "draws": (True, True, False),
}


def random_lie(rng: random.Random) -> Lie:
    """Return a lie with every field drawn."""
    return Lie(**{name: rng.choice(values) for name, values in CHOICES.items()})


def mutated(rng: random.Random, lie: Lie) -> Lie:
    """Return the lie with one or two fields drawn again."""
    names = rng.sample([one.name for one in fields(Lie)], rng.choice((1, 2)))
    return replace(lie, **{name: rng.choice(CHOICES[name]) for name in names})


# ---- the toy policy --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1 << 16)
def probabilities(version: int, position: int, before: int) -> Floats:
    """Return the distribution [V] of the token at this position. Versions differ about as much as a step changes."""
    logits = 1.5 * np.random.default_rng((position, before)).standard_normal(VOCAB)
    logits += 0.3 * np.random.default_rng((version + 1, position, before)).standard_normal(VOCAB)
    probs: Floats = np.exp(logits - np.logaddexp.reduce(logits))
    return probs


def inverted(probs: Floats, number: float) -> int:
    """Return the token that inversion draws for this random number."""
    return min(int(np.searchsorted(np.cumsum(probs), number, side="right")), VOCAB - 1)


def version_at(spans: Sequence[tuple[int, int]], place: int) -> int:
    """Return the version of the last span that begins at or before this token."""
    return next(version for start, version in reversed(spans) if start <= place)


def stream(seed: int, sample: int) -> Floats:
    """Return the random numbers [T] of a rollout."""
    return uniforms(np.repeat(stream_keys([seed], [sample]), TOKENS), np.arange(TOKENS, dtype=np.int64))


class ToyEngine:
    """A `PrefillEngine` of the toy policy. `num_read`: tokens read so far."""

    def __init__(self, held: tuple[SnapshotRef, ...]) -> None:
        self.held_refs, self.num_read = held, 0

    async def prefill(self, ref: SnapshotRef, requests: Sequence[PrefillRequest]) -> list[Prefill]:
        """See `PrefillEngine.prefill`. Also takes requests as they were before swaps were replayed."""
        known = {one.version for one in self.held_refs if one.history == ref.history}
        found = []
        for request in requests:
            reads = getattr(request, "reads", ((0, ref.version),))
            if not {version for _, version in reads} <= known:
                raise PeerError("snapshot_gone", "these weights are not held")
            self.num_read += len(request.tokens)
            found.append(_prefill(request.tokens, reads, getattr(request, "first", 0)))
        return found


def _prefill(tokens: array[int], reads: Sequence[tuple[int, int]], first: int) -> Prefill:
    rows = []
    for place in range(first, len(tokens)):
        probs = probabilities(version_at(reads, place), place, tokens[place - 1] if place else 0)
        token, nats = tokens[place], np.log(probs)
        low = float(probs[:token].sum())
        entropy = -float(probs @ nats)
        rows.append((low, low + probs[token], nats[token], entropy, float(probs @ nats**2) - entropy**2, 0.0))
    columns: Floats = np.array(rows).T.reshape(6, -1)
    return Prefill(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], 32)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def drawn(lie: Lie | None, seed: int, sample: int, true: Sequence[tuple[int, int]], rng: random.Random) -> array[int]:
    """Return the tokens of a rollout that these versions draw, or that the lie draws in their place."""
    numbers, tokens = stream(seed, sample), array("i")
    if lie is not None and lie.drawing == "best":
        numbers = stream(rng.getrandbits(62), sample)
    for place in range(TOKENS):
        probs = probabilities(version_at(true, place), place, tokens[-1] if place else 0)
        is_wrong = lie is not None and (lie.where == "all" or place >= {"later": 1, "last": TOKENS - 1}[lie.where])
        if lie is None or not is_wrong or lie.drawing == "best":
            token = inverted(probs, numbers[place])
        elif lie.drawing == "noise":
            token = rng.randrange(VOCAB)
        elif lie.drawing == "likely":
            token = int(probs.argmax())
        else:
            other = probs ** {"cold": 2.0, "hot": 0.5}[lie.drawing]
            token = inverted(other / other.sum(), numbers[place])
        tokens.append(token)
    return tokens


def named(
    lie: Lie, true: Sequence[tuple[int, int]], least: int, most: int, rng: random.Random
) -> list[tuple[int, int]]:
    """Return the spans that the lie names, of versions from `least` to `most`; `true` is what drew the tokens."""
    first = true[0][1]
    match lie.spans:
        case "each":
            return [(place, first) for place in range(TOKENS)]
        case "twice":
            return [(0, first), (1, first)]
        case "falling":
            return [(0, most), (TOKENS // 2, least)]
        case "oldest":
            return [(0, least)]
        case "newest":
            return [(0, first), (1, most)] if most > first else [(0, first)]
        case "random":
            versions = sorted(rng.sample(range(least, most + 1), min(rng.randint(1, 3), most + 1 - least)))
            starts = [0, *sorted(rng.sample(range(1, TOKENS), len(versions) - 1))]
            return list(zip(starts, versions, strict=True))
        case _:
            return list(true)


def told(tokens: array[int], spans: Sequence[tuple[int, int]], is_zero: bool) -> Rollout:
    """Return the rollout as it is delivered, with the logprobs of the named versions."""
    logprobs = array("f")
    for place, token in enumerate(tokens):
        probs = probabilities(version_at(spans, place), place, tokens[place - 1] if place else 0)
        logprobs.append(0.0 if is_zero else float(np.log(probs[token])))
    return Rollout(tokens, logprobs, b"\x01" * len(tokens), tuple(spans), "length")


def is_wrong(seed: int, sample: int, rollout: Rollout) -> bool:
    """Whether a token is not the one that its random number draws from the version that is named for it."""
    numbers = stream(seed, sample)
    found = _prefill(rollout.tokens, rollout.version_spans, 0)
    return bool(np.maximum(found.low - numbers, numbers - found.high).max() > WRONG)


# ---- workers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Book:
    """The truth about the deliveries of a run's liars: wrong or not, by worker and group; and the dearest check, as
    tokens read for each token that was sampled."""

    wrong: dict[tuple[str, int], bool] = field(default_factory=dict)
    dearest: float = 0.0


@dataclass(frozen=True, slots=True)
class LiarSpec(WorkersSpec):
    """Strangers that lie so; with None they are honest, and their rollouts are real all the same."""

    lie: Lie | None = None
    book: Book = field(default_factory=Book, compare=False)


class Liar(SimWorker):
    """As any worker, but for what it delivers."""

    def __init__(self, *args: Any) -> None:
        self._leases: dict[int, Lease] = {}
        self._groups: dict[int, tuple[Assignment, RolloutGroup]] = {}
        self._num_right = 0
        super().__init__(*args)
        assert isinstance(self.spec, LiarSpec)
        self.lie, self.book = self.spec.lie, self.spec.book

    def _sample(self, lease: Lease, numbers: tuple[int, ...]) -> None:
        self._leases[lease.lease_id] = lease
        super()._sample(lease, numbers)

    def _deliver(self, lease_id: int, result: ev.GroupDelivered) -> None:
        delay = (self.lie.delay if self.lie else 0.0) * self.scenario.lease_seconds
        group = self._made(self._leases[lease_id], result)
        try:
            delivery = messages.encode_delivery(lease_id, group)
            read = messages.decode_delivery(
                wire.Delivery.FromString(delivery.SerializeToString()), self._leases[lease_id], PROMPT, self.name
            )
        except PeerError as error:
            self._call(ev.DeliveryMalformed(self.name, lease_id, error.reason, error.detail))
            return
        number, seed = group.group.number, self._leases[lease_id].seed
        self.book.wrong[self.name, number] = any(is_wrong(seed, at, one) for at, one in enumerate(read.rollouts))
        self._groups[number] = (Assignment(self._leases[lease_id], PROMPT, PARAMS), read)
        versions = sorted({version for one in read.rollouts for _, version in one.version_spans})
        changed = replace(
            result,
            oldest_version=versions[0],
            newest_version=versions[-1],
            versions_between=tuple(versions[1:-1]),
        )
        self.claims[number] = changed
        self.world.post(delay, self.name, _Late(changed))

    def handle(self, event: object) -> None:
        if isinstance(event, _Late):
            self._call(event.result, self.scenario.tokens_per_group * self.scenario.bytes_per_token)
        else:
            super().handle(event)

    def _made(self, lease: Lease, result: ev.GroupDelivered) -> RolloutGroup:
        rng, lie = self.world.rng, self.lie
        place = rng.randrange(1, TOKENS)
        true = [(0, result.oldest_version)]
        if result.newest_version > result.oldest_version:
            true.append((place, result.newest_version))
        lies = lie is not None and self._num_right >= lie.patience and rng.random() < lie.share
        self._num_right += not lies
        newest = max(result.newest_version, self.scheduler.newest.version if self.scheduler.newest else 0)
        rollouts = []
        for sample in range(lease.num_samples):
            if lie is None or not lies:
                rollouts.append(told(drawn(None, lease.seed, sample, true, rng), true, is_zero=False))
                continue
            tries = [drawn(lie, lease.seed, sample, true, rng) for _ in range(BEST_OF if lie.drawing == "best" else 1)]
            tokens = max(tries, key=lambda one: sum(one))
            spans = named(lie, true, min(lease.min_version, newest), newest, rng)
            rollouts.append(told(tokens, spans, lie.logprobs == "zero"))
        return RolloutGroup(
            lease.group, lease.step, result.lineage, lease.cursor, PROMPT, tuple(rollouts), self.name, result.seconds
        )

    def judged(self, command: do.CheckGroup, held: tuple[SnapshotRef, ...]) -> tuple[float, ev.GroupChecked]:
        """See `SimWorker.judged`: by the real check."""
        assignment, group = self._groups[command.group.number]
        engine, num_sampled = ToyEngine(held), group.num_tokens
        try:
            verdict = _now(check_group(engine, command.ref, assignment, group, command.is_from_stream))
        except PeerError as error:
            return 0.0, ev.GroupChecked("", command.group, missed=str(error))
        self.book.dearest = max(self.book.dearest, engine.num_read / num_sampled)
        found = ev.GroupChecked("", command.group, verdict.num_tokens, verdict.fault, num_skipped=verdict.num_skipped)
        return engine.num_read / num_sampled, found


@dataclass(frozen=True, slots=True)
class _Late:
    result: ev.GroupDelivered


def _now(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the toy engine waits for nothing")
