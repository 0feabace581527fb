"""Evaluations: the owner's machines sample each held-out task with one exact version. Eval groups are numbered
version * size + position. They are bound to no training step, and the ledger does not store them: after a restart of
the head an unfinished evaluation starts again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from echo2.core.types import GroupRef, SnapshotRef


@dataclass(slots=True)
class EvalRound:
    """One running evaluation. A position is waiting, leased, being scored, or done. `failed`: by reason, how many tasks
    were given up.
    """

    ref: SnapshotRef
    size: int
    started_at: float = 0.0
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    done: set[int] = field(default_factory=set)
    failed: dict[str, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    failed_by: dict[int, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.update(dict.fromkeys(range(self.size)))


@dataclass(slots=True)
class Evaluation:
    """The evaluations of one policy: of `size` tasks (0: never), before the first and after the last step, and every
    `every` steps if that is not 0. `gives_up_at`: until when they wait for a machine of the owner, while there is none.
    """

    policy: str
    size: int
    every: int
    max_steps: int
    gives_up_at: float | None = None
    evaluated: set[int] = field(default_factory=set)
    _rounds: dict[int, EvalRound] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)

    @property
    def rounds(self) -> Mapping[int, EvalRound]:
        """The running evaluations by version."""
        return self._rounds

    @property
    def is_over(self) -> bool:
        """Whether nothing is evaluated now, and the last step has been, if it shall be."""
        return not self._rounds and (not self.size or self.max_steps in self.evaluated | self._skipped)

    def restore(self, evaluated: Iterable[int]) -> None:
        """These versions were evaluated under an earlier head."""
        self.evaluated.update(evaluated)

    def is_due(self, version: int) -> bool:
        """Whether this version shall be evaluated and its evaluation has not started yet."""
        if not self.size or version in self.evaluated or version in self._skipped or version in self._rounds:
            return False
        return version in (0, self.max_steps) or bool(self.every and version % self.every == 0)

    def start(self, ref: SnapshotRef, now: float) -> None:
        """Begin the evaluation of this snapshot."""
        self._rounds[ref.version] = EvalRound(ref, self.size, now)

    def forget_after(self, version: int) -> None:
        """After the learner fell back to `version`: forget evaluations of later weights, which no longer count."""
        for later in [v for v in self._rounds if v > version]:
            del self._rounds[later]
        self.evaluated = {v for v in self.evaluated if v <= version}
        self._skipped = {v for v in self._skipped if v <= version}

    def pop_finished(self) -> list[EvalRound]:
        """Remove the rounds in which every task has a result or was given up, and return them."""
        finished = [version for version, round_ in self._rounds.items() if len(round_.done) == self.size]
        self.evaluated.update(finished)
        return [self._rounds.pop(version) for version in finished]

    def skip_all(self) -> list[int]:
        """Give up all running evaluations and return their versions."""
        skipped = list(self._rounds)
        self._skipped.update(skipped)
        self._rounds.clear()
        return skipped

    def lacks_machine(self, is_here: bool, now: float, patience_seconds: float) -> bool:
        """Whether no machine of the owner has been here for so long. `is_here`: whether one is now."""
        if is_here:
            self.gives_up_at = None
        elif self.gives_up_at is None:
            self.gives_up_at = now + patience_seconds
        return self.gives_up_at is not None and now >= self.gives_up_at

    def group(self, version: int, position: int) -> GroupRef:
        """Return the name of the group that samples this task with this version."""
        return GroupRef(self.policy, "eval", version * self.size + position)

    def _locate(self, group: GroupRef) -> tuple[EvalRound, int] | None:
        """Return the round and position of an eval group that has no result yet, or None."""
        round_ = self._rounds.get(group.number // self.size) if self.size else None
        position = group.number % self.size if round_ is not None else 0
        return None if round_ is None or position in round_.done else (round_, position)

    def is_done(self, group: GroupRef) -> bool:
        """Whether no further result is expected for this group."""
        return self._locate(group) is None

    def take(self, installed_version: int, num_groups: int) -> tuple[int, list[int]] | None:
        """Take positions for a worker with this version from the oldest round whose version it has reached. Return that
        version and the positions, or None.
        """
        for version in sorted(self._rounds):
            waiting = self._rounds[version].waiting
            if waiting and version <= installed_version:
                return version, [waiting.popitem(last=False)[0] for _ in range(min(num_groups, len(waiting)))]
        return None

    def put_back(self, group: GroupRef) -> int:
        """Requeue a group whose lease ended without a result. Return how often this has happened."""
        if (place := self._locate(group)) is None:
            return 0
        round_, position = place
        round_.waiting.setdefault(position)
        round_.attempts[position] = round_.attempts.get(position, 0) + 1
        return round_.attempts[position]

    def finish(self, group: GroupRef, why: str = "") -> bool:
        """Record that a group has a result, or was given up (`why`: the reason). Return False if it was done before."""
        if (place := self._locate(group)) is None:
            return False
        round_, position = place
        round_.done.add(position)
        if why:
            round_.failed[why] = round_.failed.get(why, 0) + 1
            round_.waiting.pop(position, None)
        return True

    def fail(self, group: GroupRef, voice: str) -> dict[str, None]:
        """Record who reported that this group can't be produced. Return all who did."""
        if (place := self._locate(group)) is None:
            return {}
        voices = place[0].failed_by.setdefault(place[1], {})
        voices[voice] = None
        return voices
