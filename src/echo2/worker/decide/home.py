"""Chooses what a machine samples with: an engine, the form of its weights, and how many rollouts at once.

The published weights come first, then forms with fewer bits, each only if the memory that the machine's owner gives has
no room for the one before. `worker/joining.py` finds out what is installed, and what the head allows.

Decides, too, when a machine at home samples: not while its owner's programs need the processors, nor on battery. It
stops when that lasts, at once on battery, and begins again only after a while of calm, below a lower threshold. So it
never changes more often than twice in `CALM_SECONDS`, whatever the measurements do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2.core.errors import UserError
from echo2.learner.decide.memory import GB, rounded_parts, worker_parts
from echo2.learner.decide.model_shape import ModelShape

#: An engine that has room for fewer rollouts than this is not chosen: each step reads all weights for them.
SLOTS_MIN = 4
#: Shares of all processors that other programs use: from the first on the machine is busy, below the second it is calm.
BUSY_SHARE, CALM_SHARE = 0.5, 0.25
#: How long it must be busy before sampling stops, and calm before it begins again.
BUSY_SECONDS, CALM_SECONDS = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class SamplingNeed:
    """What a run asks for. `slots`: rollouts at once; `length`: tokens of the longest, with its prompt; `value_bytes`:
    of a published weight; `has_adapter`: versions are adapters over one model."""

    shape: ModelShape
    slots: int
    length: int
    value_bytes: int
    has_adapter: bool


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """An engine that a machine might use. `form`: to which it rounds the weights, empty: not at all; `memory_bytes`:
    what it may use; `obstacle`: why this machine or this run can't use it, apart from memory; empty: nothing."""

    engine: str
    form: str
    memory_bytes: int
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """What was chosen. `why`: for the machine's owner."""

    engine: str
    slots: int
    why: str

    def __str__(self) -> str:
        return f"engine {self.engine}, {self.slots} rollouts at once: {self.why}"


def need_of(need: SamplingNeed, form: str, slots: int) -> Mapping[str, int]:
    """Return the bytes that an engine needs, by part."""
    if form:
        return rounded_parts(need.shape, form, need.has_adapter, slots, need.length)
    return worker_parts(need.shape, need.value_bytes, slots, need.length)


def slots_in(need: SamplingNeed, candidate: EngineCandidate) -> int:
    """Return how many rollouts the candidate has room for, at most as many as the run asks for; 0: too few."""
    counts = range(min(SLOTS_MIN, need.slots), need.slots + 1)
    num_fitting = bisect_right(counts, candidate.memory_bytes, key=lambda slots: _bytes(need, candidate, slots))
    return counts[num_fitting - 1] if num_fitting else 0


def choose(need: SamplingNeed, candidates: Sequence[EngineCandidate], named: str = "") -> WorkerChoice:
    """Return the first candidate that has room, or the `named` one.

    Raises:
        UserError: it has none, or an obstacle; the error names the next one that has room.
    """
    tried = next((at for at, one in enumerate(candidates) if one.engine == named), None)
    if tried is not None and (refusal := _refusal(need, candidates[tried])):
        others = [*candidates[tried + 1 :], *candidates[:tried]]
        fitting = next((one for one in others if not _refusal(need, one)), None)
        remedy = "None of its engines has room: give it more memory, or a larger machine."
        if fitting is not None:
            remedy = f"--engine {fitting.engine} would do: it needs {_need(need, fitting, slots_in(need, fitting))}."
        raise UserError(f"This machine can't sample with --engine {named}: {refusal}. {remedy}")
    reasons = []
    for one in candidates if tried is None else candidates[tried : tried + 1]:
        if refusal := _refusal(need, one):
            reasons.append(f"{one.engine}: {refusal}")
            continue
        slots = slots_in(need, one)
        reason = f"it needs {_need(need, one, slots)} of {_gb(one.memory_bytes)} GB"
        return WorkerChoice(one.engine, slots, "; ".join([reason, *reasons]))
    raise UserError(
        f"This machine has no engine with room for the run's model. {'; '.join(reasons)}. Give it more memory "
        "(--max-memory-gb), install what is missing, or take a larger machine."
    )


def _refusal(need: SamplingNeed, one: EngineCandidate) -> str:
    if one.obstacle:
        return one.obstacle
    if slots_in(need, one):
        return ""
    fewest = min(SLOTS_MIN, need.slots)
    return f"it needs {_need(need, one, fewest)} for {fewest} rollouts, and may use {_gb(one.memory_bytes)} GB"


def _need(need: SamplingNeed, one: EngineCandidate, slots: int) -> str:
    return f"{_gb(_bytes(need, one, slots))} GB"


def _bytes(need: SamplingNeed, one: EngineCandidate, slots: int) -> int:
    return sum(need_of(need, one.form, slots).values())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f}"


class Presence:
    """`paused`: why the machine does not sample; empty: it does."""

    def __init__(self) -> None:
        self.paused = ""
        self._since: float | None = None  # since when each measurement has spoken for a change

    def measured(self, others_share: float, on_battery: bool, now: float) -> None:
        """Take a measurement: the share of all processors that other programs use, and whether there is no mains."""
        if not self.paused and on_battery:
            self._change("the machine is on battery")
            return
        is_for_change = not on_battery and others_share < CALM_SHARE if self.paused else others_share >= BUSY_SHARE
        if not is_for_change:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= (CALM_SECONDS if self.paused else BUSY_SECONDS):
            self._change("" if self.paused else f"other programs use {others_share:.0%} of the processors")

    def _change(self, paused: str) -> None:
        self.paused, self._since = paused, None
