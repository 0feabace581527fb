"""A reward function that raises is called again before its group is lost: so often, counted, and not where it cannot
help."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from echo2.core.types import Backoff, Rollout, Score, Task
from echo2.head.ledger.books import Failures
from echo2.reward.reward_processes import BACKOFF, TRIES_MAX, RewardProcesses
from echo2.reward.score import RewardFailure
from echo2.views.status import failure_lines

AT_ONCE = Backoff(0.0, 0.0)
OWN = """
import urllib.error
calls = []
def count(do):
    calls.append(do)
    open(__file__ + "." + do, "a").write("x")
    return calls.count(do)
def reward(completions, do, **columns):
    number = count(do[0])
    if do[0] == "overloaded" and number < 3:
        raise urllib.error.HTTPError("http://judge", 503, "Service Unavailable", {}, None)
    if do[0] == "down": raise RuntimeError(f"the judge is down, call {number}")
    if do[0] == "typo": return undefined
    if do[0] == "wrong": return ["no number"]
    if do[0] == "bad answer" and number < 2: return {}["choices"]
    return [1.0]
async def each(completions, **columns):
    number = count("each")
    return [ValueError("no verdict") if text == "never" or (text == "later" and number == 1) else number
            for text in completions]
def mixed(completions, **columns):
    count("mixed")
    return [float("nan") if text == "odd" else None if text == "none" else 1.0 for text in completions]
async def judged(completions, do, **columns): return reward(completions, do)
"""


def scored(
    own: Path, do: str, function: str = "reward", tries: int = 4
) -> tuple[list[Score] | RewardFailure, int, Failures]:
    """The scores or the failure of a group of one, how often the function was called, and what was counted."""
    (own / "own.py").write_text(OWN)
    failures = Failures()

    async def run() -> list[Score] | RewardFailure:
        def note(message: str, traceback: str) -> None:
            failures.add("reward_retried", message, traceback)

        name, log = f"{own}/own.py:{function}", own / "reward.log"
        processes = RewardProcesses([name], 60.0, log, tries_max=tries, backoff=AT_ONCE, on_retry=note)
        rollouts = [Rollout(array("i", [5]), array("f", [-0.5]), b"\x01", ((0, 3),), "stop", "a")]
        try:
            return list((await processes.scores(Task(0, "?", {"do": do}), rollouts, ["a"]))[0])
        except RewardFailure as failure:
            return failure
        finally:
            await processes.close()

    found = asyncio.run(run())
    return found, len((own / f"own.py.{do}").read_text()), failures


@pytest.mark.parametrize("function", ["reward", "judged"])
@pytest.mark.parametrize(("do", "num_calls"), [("overloaded", 3), ("bad answer", 2)])
def test_a_group_whose_judge_is_overloaded_for_a_moment_is_not_lost(
    tmp_path: Path, function: str, do: str, num_calls: int
) -> None:
    found, called, failures = scored(tmp_path, do, function)
    assert found == [(1.0, {function: 1.0})]
    assert (called, failures.count("reward_retried")) == (num_calls, num_calls - 1)
    (line,) = failure_lines({"failures": failures.to_plain()})
    told = {1: "1 call", 2: "2 calls"}[num_calls - 1]
    assert line.startswith(f"{told} of your reward function raised, then tried again")


def test_a_reward_that_always_raises_is_given_up_with_its_reason(tmp_path: Path) -> None:
    found, called, failures = scored(tmp_path, "down")
    assert isinstance(found, RewardFailure)
    assert "RuntimeError: the judge is down, call 4" in str(found)
    assert str(found).endswith("It was tried 4 times.")
    assert "RuntimeError" in found.traceback
    assert (called, failures.count("reward_retried")) == (4, 3)


@pytest.mark.parametrize(
    ("do", "said"), [("typo", "NameError"), ("wrong", "returned 'no number' (str) as a score, not a float or None")]
)
def test_a_permanent_failure_is_not_retried(tmp_path: Path, do: str, said: str) -> None:
    found, called, failures = scored(tmp_path, do)
    assert isinstance(found, RewardFailure)
    assert said in str(found)
    assert (called, failures.to_plain()) == (1, [])


def test_the_pauses_grow_and_end() -> None:
    pauses = [BACKOFF.after(num) for num in range(1, TRIES_MAX)]
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    lost = 0.06**TRIES_MAX
    assert lost < 1e-6


def test_only_failed_rollouts_are_retried_and_first_scores_stand(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    async def run() -> None:
        name, log = f"{tmp_path}/own.py:each", tmp_path / "reward.log"
        processes = RewardProcesses([name], 60.0, log, tries_max=3, backoff=AT_ONCE)
        rollout = Rollout(array("i", [5]), array("f", [-0.5]), b"\x01", ((0, 3),), "stop", "a")
        try:
            found, _ = await processes.scores(Task(0, "?", {}), [rollout] * 3, ["now", "later", "never"])
            assert found[:2] == [(1.0, {"each": 1.0}), (2.0, {"each": 2.0})]
            assert isinstance(found[2], RewardFailure)
            assert "no verdict" in str(found[2])
            assert "tried 3 times" in str(found[2])
            with pytest.raises(RewardFailure, match="no verdict"):
                await processes.scores(Task(0, "?", {}), [rollout], ["never"])
        finally:
            await processes.close()

    asyncio.run(run())


def test_an_invalid_score_loses_its_rollout_without_a_retry(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    async def run() -> None:
        processes = RewardProcesses([f"{tmp_path}/own.py:mixed"], 60.0, tmp_path / "reward.log", backoff=AT_ONCE)
        rollout = Rollout(array("i", [5]), array("f", [-0.5]), b"\x01", ((0, 3),), "stop", "a")
        try:
            found, _ = await processes.scores(Task(0, "?", {}), [rollout] * 4, ["a", "odd", "b", "none"])
            assert [found[0], found[2]] == [(1.0, {"mixed": 1.0})] * 2
            assert "returned nan as a score" in str(found[1])
            assert "returned None for rollout 3" in str(found[3])
            assert (tmp_path / "own.py.mixed").read_text() == "x"
            with pytest.raises(RewardFailure, match="returned nan as a score"):
                await processes.scores(Task(0, "?", {}), [rollout] * 2, ["odd", "odd"])
        finally:
            await processes.close()

    asyncio.run(run())
