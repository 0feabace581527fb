"""What rollouts of the untrained model say of the lengths in a run."""

from __future__ import annotations

import random

import pytest

from echo2.planning.lengths import SeenGroup, distinct_tokens, seen_lengths


def test_a_shared_prompt_is_computed_once_and_the_last_token_of_an_answer_never() -> None:
    assert distinct_tokens([(1, 2, 3, 4)]) == 3
    assert distinct_tokens([(1, 2, 3), (1, 2, 4)]) == 2
    assert distinct_tokens([(1, 2, 3), (1, 5, 4)]) == 3
    assert distinct_tokens([(1,), (2,)]) == 0


def test_lengths_of_all_and_of_those_that_training_prefers() -> None:
    taught = SeenGroup(40, ((1,) * 10, (2,) * 10, (3,) * 4, (3,) * 4), (0.0, 0.1, 1.0, 1.0))
    flat = SeenGroup(50, ((5,) * 8, (6,) * 8, (7,) * 8, (8,) * 8), (0.0, 0.0, 0.0, 0.0))
    found = seen_lengths([taught, flat], 2)
    assert (found.prompt, found.answer, found.preferred, found.flat, found.longest) == (45.0, 7.5, 4.0, 0.5, 10.0)
    assert found.trained == (9 + 9 + 3 + 4 * 7) / 8
    assert found.preferred_trained == pytest.approx(3 / 4)  # four answers that are all alike: three tokens for all
    assert seen_lengths([flat], 2).preferred == 8.0  # nobody is preferred: all may stay as they are


def test_the_tokens_of_a_group_are_estimated_from_a_few_rollouts() -> None:
    rng, size = random.Random(3), 8
    print("seed 3")

    def answers(count: int) -> tuple[tuple[int, ...], ...]:
        """Four openings of ten tokens, then five that nobody shares."""
        openings = (rng.randrange(4) for _ in range(count))
        return tuple((one,) * 10 + tuple(rng.randrange(1 << 40) for _ in range(5)) for one in openings)

    few = [SeenGroup(1, answers(size), (1.0, 1.0, 1.0) + (0.0,) * 5) for _ in range(300)]
    whole = [distinct_tokens(answers(size)) / size for _ in range(300)]
    assert seen_lengths(few, 6).preferred_trained == pytest.approx(sum(whole) / len(whole), rel=0.05)
