"""Evaluations: the owner's machines sample each held-out task with one exact version. Tracks which versions are being
evaluated, and which tasks still lack a result.

Eval groups are numbered version * size + position. They are bound to no training step, and the ledger does not store
them: after a restart of the head an unfinished evaluation starts again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from echo2.types import GroupRef, SnapshotRef


@dataclass(slots=True)
class EvalRound:
    """One running evaluation. A position is waiting, leased, being scored, or done. `failed`: by reason, how many tasks
    were given up.
    """

    ref: SnapshotRef
    size: int
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    done: set[int] = field(default_factory=set)
    failed: dict[str, int] = field(default_factory=dict)
    started_at: float = 0.0
    attempts: dict[int, int] = field(default_factory=dict)
    failed_by: dict[int, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.update(dict.fromkeys(range(self.size)))

    @property
    def is_finished(self) -> bool:
        """Whether every task has a result or was given up."""
        return len(self.done) == self.size


@dataclass(slots=True)
class Evaluation:
    """The evaluations of one policy: of `size` tasks (0: never), before the first and after the last step, and every
    `every` steps if that is not 0.
    """

    policy: str
    size: int
    every: int
    max_steps: int
    evaluated: set[int] = field(default_factory=set)
    rounds: dict[int, EvalRound] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def is_due(self, version: int) -> bool:
        """Whether this version shall be evaluated and its evaluation has not started yet."""
        if not self.size or version in self.evaluated or version in self.skipped or version in self.rounds:
            return False
        return version in (0, self.max_steps) or bool(self.every and version % self.every == 0)

    def start(self, ref: SnapshotRef, now: float) -> None:
        """Begin the evaluation of this snapshot."""
        self.rounds[ref.version] = EvalRound(ref, self.size, started_at=now)

    def forget_after(self, version: int) -> None:
        """After the learner fell back to `version`: forget evaluations of later weights, which no longer count."""
        for later in [v for v in self.rounds if v > version]:
            del self.rounds[later]
        self.evaluated = {v for v in self.evaluated if v <= version}
        self.skipped = {v for v in self.skipped if v <= version}

    def skip(self, version: int) -> None:
        """Give up this evaluation, because no machine of the owner is connected."""
        del self.rounds[version]
        self.skipped.add(version)

    def group(self, version: int, position: int) -> GroupRef:
        """Return the name of the group that samples this task with this version."""
        return GroupRef(self.policy, "eval", version * self.size + position)

    def locate(self, group: GroupRef) -> tuple[EvalRound, int] | None:
        """Return the round and position of an eval group, or None if its round is not open."""
        round_ = self.rounds.get(group.number // self.size) if self.size else None
        return None if round_ is None else (round_, group.number % self.size)

    def take(self, installed_version: int, num_groups: int) -> tuple[EvalRound, list[int]] | None:
        """Take positions for a worker with this version from the oldest round whose version it has reached, or None."""
        for version in sorted(self.rounds):
            round_ = self.rounds[version]
            if round_.waiting and version <= installed_version:
                return round_, [
                    round_.waiting.popitem(last=False)[0] for _ in range(min(num_groups, len(round_.waiting)))
                ]
        return None

    def put_back(self, group: GroupRef) -> int:
        """Requeue a group whose lease ended without a result. Return how often this has happened."""
        place = self.locate(group)
        if place is None or place[1] in place[0].done:
            return 0
        round_, position = place
        round_.waiting.setdefault(position)
        round_.attempts[position] = round_.attempts.get(position, 0) + 1
        return round_.attempts[position]
