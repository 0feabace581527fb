"""When a worker is turned away because its logprobs are not the learner's: over how many tokens, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.types import RUN_POLICY, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.strangers.decide.trust import MISMATCH_MAX, MISMATCH_TOKENS, MISMATCH_TOKENS_MIN, WorkerPenalties
from planner_cases import of, running

FIRST = SnapshotRef(RUN_POLICY, 1, 0)


def measured(penalties: WorkerPenalties, worker_id: str, means: Sequence[float], tokens: float) -> None:
    for mean in means:
        penalties.measured(worker_id, tokens, mean * tokens)


@given(st.lists(st.floats(0.0, MISMATCH_MAX), min_size=1), st.floats(1.0, 5e4))
def test_logprobs_within_the_allowed_mismatch_expel_no_worker(means: list[float], tokens: float) -> None:
    penalties = WorkerPenalties()
    measured(penalties, "w", means, tokens)
    assert not penalties.to_expel or max(means) > MISMATCH_MAX * (1 - 1e-9)  # rounding


@given(st.lists(st.floats(0.11, 20.0), min_size=1), st.floats(1.0, 5e4))
def test_wrong_logprobs_expel_after_enough_tokens_and_not_before(means: list[float], tokens: float) -> None:
    penalties = WorkerPenalties()
    measured(penalties, "w", means, tokens)
    if not MISMATCH_TOKENS_MIN <= tokens * len(means) < MISMATCH_TOKENS:
        assert bool(penalties.to_expel) == (tokens * len(means) >= MISMATCH_TOKENS)


@pytest.mark.parametrize(
    ("tokens", "mean", "form", "is_expelled"),
    [
        (MISMATCH_TOKENS_MIN - 1, 20.0, "", False),
        (MISMATCH_TOKENS_MIN, 0.91, "q4_0", True),  # SmolLM2 in 4 bits
        (MISMATCH_TOKENS_MIN, 0.6, "q4_0", False),
        (MISMATCH_TOKENS / 4, 0.21, "", True),
        (MISMATCH_TOKENS / 4, 0.19, "", False),
    ],
)
def test_of_few_tokens_only_a_large_mismatch_expels(tokens: float, mean: float, form: str, is_expelled: bool) -> None:
    """With a staleness bound, tokens at lag 0 are rare: a worker may have no more for a whole run."""
    penalties = WorkerPenalties()
    for _ in range(4):  # in parts, as steps bring them
        penalties.measured("w", tokens / 4, mean * tokens / 4, form=form)
    assert bool(penalties.to_expel) == is_expelled
    is_known = tokens >= MISMATCH_TOKENS_MIN
    assert penalties.mismatch("w") == (pytest.approx(mean) if is_known else None)


def test_the_tolerance_for_rounded_weights_is_the_same_for_all_forms_and_too_coarse_forms_are_named() -> None:
    for form in ("q8_0", "q4_0"):
        penalties = WorkerPenalties()
        penalties.measured("w", MISMATCH_TOKENS, 0.2 * MISMATCH_TOKENS, form=form)
        assert not penalties.to_expel
        penalties.measured("w", MISMATCH_TOKENS, 0.26 * MISMATCH_TOKENS, form=form)
        assert f"The form {form} is too coarse for this model" in penalties.to_expel["w"]
    desk = running()
    desk.tell(ev.WorkerJoined("a", 16, 0.5, FIRST, draws=True, form="q8_0"))
    assert not of(do.ExpelWorker, desk.train(0, (ev.WorkerMismatch("a", 2000, 400.0),)))


def test_an_engine_that_samples_from_other_weights_is_turned_away_with_the_figure() -> None:
    desk = running()
    (expelled,) = of(do.ExpelWorker, desk.train(0, (ev.WorkerMismatch("a", 2000, 700.0),)))
    assert expelled.worker_id == "a"
    assert "0.35 nats a token" in expelled.reason
    assert "2000 tokens" in expelled.reason
    assert not list(desk.planner.leases.of_worker("a"))
    assert desk.planner.penalties.mismatch("a") == pytest.approx(0.35)
    assert any(one.waiter == "a" and "0.35" in one.reason for one in desk.planner.waits(desk.now))
