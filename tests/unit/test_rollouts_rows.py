"""Rollouts of several rows: what is sampled is trained on exactly once, and all statistics count rollouts."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from agent_cases import AGENTS_TOKENIZER, ScriptedEngine, sampled, trained
from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, Rollout, RolloutGroup, Task
from echo2.head.ledger.books import eval_metrics
from echo2.head.ledger.rollout_log import group_record
from echo2.learner.grpo.data import group_data
from echo2.tasks.loopback_model import LoopbackModel
from echo2.transport import limits, messages
from echo2.transport.regroup import as_one_row, by_row, joined, with_scores, without
from harness_cases import LEASE, group_of
from harness_cases import played as played_by


@pytest.fixture
def engine() -> ScriptedEngine:
    rng = random.Random(7)
    return ScriptedEngine(lambda prompt: "".join(rng.choices("abc", k=rng.randrange(9))))


def played(engine: ScriptedEngine, plays: Any, max_turns: int = 8) -> RolloutGroup:
    return group_of(played_by(engine, plays, AGENTS_TOKENIZER, max_turns=max_turns))


async def compacted(model: LoopbackModel, rng: random.Random) -> float:
    """Two turns, a summary in place of the history, and two turns more."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "1"}]
    for turn in range(4):
        talk += [await model.chat(talk, max_tokens=3), {"role": "user", "content": str(turn)}]
        if turn == 1:
            talk = [{"role": "user", "content": "0"}]
    return 1.0


async def forked(model: LoopbackModel, rng: random.Random) -> float:
    """Three answers to one prompt at the same time, each of which is continued; one after the other has two forks."""
    first = (await model.generate([2, 3], max_tokens=4))["token_ids"]
    said = [2, 3, *first, 7]
    answers = await asyncio.gather(*(model.generate(said, max_tokens=3) for _ in range(3)))
    for answer in answers:
        await model.generate([*said, *answer["token_ids"], 8], max_tokens=2)
    return 1.0


async def with_judge(model: LoopbackModel, rng: random.Random) -> float:
    """A judge, who is the same model, reads what the policy said: it is asked and is not trained."""
    said = [2, 3, *(await model.generate([2, 3], max_tokens=4))["token_ids"]]
    await model.untrained.generate(said, max_tokens=2)
    await model.generate([*said, 9], max_tokens=4)
    return 1.0


@pytest.mark.parametrize(("plays", "num_rows"), [(compacted, 2), (forked, 3)])
def test_every_sampled_token_of_a_row_is_trained_on_once(engine: ScriptedEngine, plays: Any, num_rows: int) -> None:
    group = played(engine, plays)
    assert [len(rows) for rows in group.by_rollout] == [num_rows] * LEASE.num_samples
    assert trained(group) == sampled(engine.heard)
    messages.check_turns(group, 8, is_played=True)


def test_the_answers_of_a_judge_are_not_trained_on(engine: ScriptedEngine) -> None:
    group = played(engine, with_judge)
    assert group.num_rollouts == len(group.rollouts) == LEASE.num_samples
    judged = [(request, made) for request, made in engine.heard if request.params.max_tokens == 2]
    assert len(judged) == LEASE.num_samples
    assert trained(group) == sampled(engine.heard) - sampled(judged)


def test_turns_and_rows_of_a_rollout_are_bounded_in_all(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def many(model: LoopbackModel, rng: random.Random) -> float:
        for first in range(100):
            await model.generate([2, first % 20, 3 + first // 20], max_tokens=1)
        return 1.0

    for rollout in as_one_row(played(engine, many, 5)):
        assert (rollout.loss_mask.count(1), rollout.finish, rollout.reward_parts) == (5, "length", {"environment": 0.0})
    monkeypatch.setattr("echo2.rollouts.recorded.ROWS_MAX", 3)
    assert {len(rows) for rows in played(engine, many, 50).by_rollout} == {3}
    monkeypatch.setattr("echo2.rollouts.recorded.GROUP_TOKENS_MAX", 3 * 8)  # [2, 0, 3], its token, and as many again
    assert {len(rows) for rows in played(engine, many, 50).by_rollout} == {2}


def row(tokens: list[int], mask: bytes, finish: Any = "stop", version: int = 1) -> Rollout:
    logprobs = array("f", [-0.5 * counts for counts in mask])
    return Rollout(array("i", tokens), logprobs, mask, ((0, version),), finish, reward_parts={"environment": 1.0})


def rows_group(**changes: Any) -> RolloutGroup:
    """Three rollouts of 3, 1 and 2 rows, with 4, 2 and 3 loss tokens."""
    rollouts = (
        *(row([5, 6], b"\1\1"), row([7, 8], b"\0\1"), row([9], b"\1")),
        row([5, 6], b"\1\1", "length"),
        *(row([5], b"\1", version=2), row([7, 8, 9], b"\0\1\1")),
    )
    made = RolloutGroup(GroupRef(RUN_POLICY, "train", 5), 2, 1, 5, array("i", [2, 3]), rollouts, "w-1", by_harness=True)
    return replace(made, samples=(0, 0, 0, 1, 2, 2), **changes)


def scored(group: RolloutGroup, *rewards: float) -> RolloutGroup:
    return with_scores(group, by_row(group, [(reward, {"environment": reward}) for reward in rewards]))


@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_statistics_of_a_group_count_rollouts(normalisation: Any) -> None:
    """By hand: rewards 0, 3, 6 of three rollouts. By `sequence`, the tokens of each add up to a weight of 1."""
    made = group_data(scored(rows_group(), 0.0, 3.0, 6.0), 2, "dr_grpo", normalisation, False)
    assert (made.num_tokens, made.num_rollouts) == (9, 3)
    assert [datum.advantages[0] for datum in made.data] == [-3.0, -3.0, -3.0, 0.0, 3.0, 3.0]
    weights = [datum.weights[-1] if datum.weights else None for datum in made.data]
    shares = [0.25, 0.25, 0.25, 0.5, 1 / 3, 1 / 3]
    assert weights == (shares if normalisation == "sequence" else [None] * 6)
    if normalisation == "sequence":
        totals = [weight * one.loss_mask.count(1) for weight, one in zip(shares, rows_group().rollouts, strict=True)]
        assert sum(totals[:3]) == sum(totals[3:4]) == sum(totals[4:]) == pytest.approx(1.0)


def test_a_rollout_of_one_row_counts_as_before() -> None:
    group = rows_group()
    one = replace(group, rollouts=group.rollouts[:3], samples=())
    assert (one.num_rollouts, [len(rows) for rows in one.by_rollout]) == (3, [1, 1, 1])
    assert as_one_row(one) == one.rollouts


def test_rows_travel_to_the_head_and_through_its_ledger() -> None:
    group = rows_group()
    lease = replace(LEASE, group=group.group)
    sent = messages.encode_delivery(lease.lease_id, group)
    got = messages.decode_played(sent, lease, "w-1")
    assert (got.samples, got.rollouts, got.num_rollouts) == (group.samples, group.rollouts, 3)
    stored = messages.encode_group(scored(got, 1.0, 2.0, 3.0)).SerializeToString()
    assert messages.parse_group(stored).by_rollout == scored(got, 1.0, 2.0, 3.0).by_rollout


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([3, 1], "leased 3 rollouts, got 2"),
        ([3, 1, 1], r"of \[3, 1, 1\] rows; 6 rows are there"),
        ([6, 0, 0], r"of \[6, 0, 0\] rows"),
        ([1, 1, 1, 1, 1, 1], "leased 3 rollouts, got 6"),
    ],
)
def test_rows_that_do_not_fit_the_lease_are_refused(rows: list[int], complaint: str) -> None:
    sent = messages.encode_delivery(LEASE.lease_id, rows_group())
    del sent.rows[:]
    sent.rows.extend(rows)
    with pytest.raises(PeerError, match=complaint):
        messages.decode_played(sent, LEASE, "w-1")


def test_a_rollout_of_too_many_rows_or_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = messages.encode_delivery(LEASE.lease_id, rows_group())
    monkeypatch.setattr(limits, "ROWS_MAX", 2)
    with pytest.raises(PeerError, match="2 may be"):
        messages.decode_played(sent, LEASE, "w-1")
    monkeypatch.setattr(limits, "ROWS_MAX", 3)
    monkeypatch.setattr(limits, "TOKENS_MAX", 4)
    with pytest.raises(PeerError, match="have 5 tokens; the limit is 4"):
        messages.decode_played(sent, LEASE, "w-1")
    with pytest.raises(PeerError, match="3 turns; 2"):
        messages.check_turns(rows_group(), 2, is_played=True)


def test_a_lost_rollout_loses_all_its_rows() -> None:
    from echo2.core.types import LostRollout

    left = without(rows_group(), [LostRollout(0, "reward_failed")])
    assert (left.samples, [len(rows) for rows in left.by_rollout]) == ((1, 2, 2), [1, 2])


def test_rollouts_of_a_top_up_share_what_their_prompts_share() -> None:
    """A harness may begin each prompt with its own words: what all begin with is the group's prompt."""
    kept = rows_group()
    new = replace(kept, prompt_tokens=array("i", [2, 9]), rollouts=kept.rollouts[:2], samples=(3, 3))
    whole = joined(kept, new)
    assert (whole.prompt_tokens, whole.samples) == (array("i", [2]), (0, 0, 0, 1, 2, 2, 3, 3))
    assert [list(one.tokens) for one in whole.rollouts[-2:]] == [[9, 5, 6], [9, 7, 8]]
    assert whole.rollouts[-1].loss_mask == b"\0\0\1"
    other = replace(new, prompt_tokens=array("i", [4]))
    assert joined(kept, other) == other


def test_people_and_evaluations_see_rollouts() -> None:
    group = scored(rows_group(), 1.0, 0.0, 1.0)
    record = group_record(group, Task(5, "1"), "dr_grpo", lambda tokens: [str(token) for token in tokens])
    first, second, third = record["rollouts"]
    assert [one.get("rows") for one in (first, second, third)] == [[2, 2, 1], None, [1, 3]]
    assert first["tokens"] == ["5", "6", "7", "8", "9"]
    assert first["environment"] == [[2, 3]]
    assert third["versions"] == [[0, 2], [1, 1]]
    assert [one["reward"] for one in (first, second, third)] == [1.0, 0.0, 1.0]
    metrics = eval_metrics([group], 0, lambda cursor: "")
    assert (metrics["eval/accuracy"], metrics["eval/pass@2"]) == (pytest.approx(2 / 3), 1.0)
    assert metrics["eval/mean_length"] == pytest.approx((5 + 2 + 4) / 3)


def test_leases_are_for_rollouts() -> None:
    lease = Lease(3, GroupRef(RUN_POLICY, "train", 5), 2, 5, 3, 0, None, 9e9, 60.0, 77, first_sample=8)
    group = replace(rows_group(), samples=(8, 8, 8, 9, 10, 10))
    got = messages.decode_played(messages.encode_delivery(3, group), lease, "w-1")
    assert got.samples == group.samples
