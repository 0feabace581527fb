"""What scored rollouts of the untrained model say of the lengths in a run: prompts, answers, and the tokens that the
learner runs. Of answers of a group that begin alike, it runs the common beginning once (`learner/core/batch.py`), and
a group whose rewards are all equal not at all.

Training moves the policy towards the rollouts with more reward than their group's mean. Those are shorter or longer
than the others and more alike, and the run begins with the one kind of answers and ends with the other. So means of a
run are taken to lie in the middle.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """Tokens of a group's prompt and answers, and the answers' rewards."""

    prompt: int
    answers: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]

    @property
    def preferred(self) -> tuple[tuple[int, ...], ...]:
        """Answers with more reward than the mean: none where all earn the same."""
        if self.is_flat:
            return ()
        mean = statistics.fmean(self.rewards)
        return tuple(one for one, reward in zip(self.answers, self.rewards, strict=True) if reward > mean)

    @property
    def is_flat(self) -> bool:
        return max(self.rewards) == min(self.rewards)


@dataclass(frozen=True, slots=True)
class SeenLengths:
    """Mean tokens of prompts and answers, of answers with more reward, and of the tokens that the learner runs for an
    answer of either kind; `flat`: share of groups that teach nothing; `longest`: of a batch, the mean.
    """

    prompt: float
    answer: float
    preferred: float
    trained: float
    preferred_trained: float
    flat: float
    longest: float


def seen_lengths(groups: Sequence[SeenGroup], groups_per_batch: int) -> SeenLengths:
    """Return the lengths of these groups, of which there is at least one, as they were sampled."""
    longest = [max(map(len, group.answers)) for group in groups]
    batches = [longest[at : at + groups_per_batch] for at in range(0, len(longest), groups_per_batch)]
    answers = [one for group in groups for one in group.answers]
    taught = [group.preferred for group in groups if not group.is_flat] or [group.answers for group in groups]
    preferred = [one for family in taught for one in family]
    size = max(len(group.answers) for group in groups)
    return SeenLengths(
        prompt=statistics.fmean(group.prompt for group in groups),
        answer=statistics.fmean(map(len, answers)),
        preferred=statistics.fmean(map(len, preferred)),
        trained=sum(distinct_tokens(group.answers) for group in groups) / len(answers),
        preferred_trained=_distinct_of(taught, size),
        flat=statistics.fmean(group.is_flat for group in groups),
        longest=statistics.fmean(map(max, batches)),
    )


def distinct_tokens(answers: Sequence[Sequence[int]]) -> int:
    """Return the tokens that the learner runs for answers to one prompt: the last of an answer is never run, and a
    common beginning once."""
    return len({tuple(one[:end]) for one in answers for end in range(1, len(one))})


def _distinct_of(families: Sequence[Sequence[Sequence[int]]], size: int) -> float:
    """Return the tokens that are run for one of `size` answers of which pairs are as alike as in these families.

    Of so many draws from kinds of answers, two of which are the same with a probability q, 1 / q kinds that are equally
    likely give (1 - (1 - q)^size) / q different ones.
    """
    total, depth = 0.0, 0
    while True:
        deep = [[tuple(one[: depth + 1]) for one in family if len(one) > depth + 1] for family in families]
        alive = sum(map(len, deep))
        if not alive:
            return total
        pairs = sum(len(family) * (len(family) - 1) for family in families)
        alike = sum(len(family) * (len(family) - 1) for family in _equals(deep))
        share = alive / sum(map(len, families))
        chance = min(1.0, max(alike / pairs / share**2, 1e-9)) if pairs else 1e-9
        total += share * (1.0 - (1.0 - chance) ** size) / chance / size
        depth += 1


def _equals(families: Sequence[Sequence[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """Return the members of each family that are equal, together."""
    equals: list[list[tuple[int, ...]]] = []
    for family in families:
        kinds: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for one in family:
            kinds.setdefault(one, []).append(one)
        equals += kinds.values()
    return equals
