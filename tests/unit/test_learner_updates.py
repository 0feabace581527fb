"""Whole updates: streamed equals batch for every loss and normalisation, the reference."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.config import Config
from echo2.core.types import Rollout, RolloutGroup
from echo2.learner.core.batch import Layout
from echo2.learner.core.losses import LOSSES
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import StepStats
from learner_cases import (
    config_of,
    gradient_of,
    gradients,
    group,
    judge_resume,
    random_group,
    rollout,
    tiny_policy,
)


def stale(rng: random.Random, groups: list[RolloutGroup], version: int) -> list[RolloutGroup]:
    """The groups with logprobs near the initial policy's range, from versions up to `version`, changing inside."""

    def aged(r: Rollout) -> Rollout:
        first = rng.randint(0, version)
        spans = ((0, first), (len(r.tokens) // 2, rng.randint(first, version)))
        return dataclasses.replace(r, version_spans=spans if len(r.tokens) > 1 else spans[:1])

    workers = [f"w{rng.randrange(3)}" for _ in groups]
    return [
        dataclasses.replace(g, rollouts=tuple(aged(r) for r in g.rollouts), worker_id=worker)
        for g, worker in zip(groups, workers, strict=True)
    ]


@pytest.mark.parametrize("loss", LOSSES)
@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence", "constant"]), st.booleans(), st.data())
@settings(max_examples=2, deadline=None)
def test_streamed_updates_equal_batch_updates(
    loss: str, seed: int, normalisation: str, reference: bool, data: Any
) -> None:
    """Two optimizer steps in float64, in one call each and in calls cut anywhere, in any order and every layout."""
    rng = random.Random(seed)
    batches = [stale(rng, [random_group(rng, number) for number in range(6)], version=6 + step) for step in range(2)]
    cuts = [data.draw(st.permutations(range(6))) for _ in batches], sorted(data.draw(st.sets(st.integers(1, 5))))

    def updated(layout: Layout, streamed: bool) -> tuple[torch.Tensor, list[StepStats]]:
        options: Any = {"loss": loss, "normalisation": normalisation, "temperature": 0.7}
        options |= {"reference_kl": 0.1 * reference, "max_tokens": 9, "lr": 1e-3}
        trainer, steps = GrpoClient(tiny_policy(), config_of(**options), layout), []
        trainer.version = 6
        for groups, order in zip(batches, cuts[0], strict=True):
            ends = cuts[1] if streamed else []
            for start, stop in itertools.pairwise([0, *ends, 6]):
                trainer.forward_backward([groups[i] for i in order[start:stop]] if streamed else groups)
            steps.append(trainer.optim_step())
        return torch.cat([p.detach().flatten() for p in trainer.policy.module.parameters()]), steps

    whole, whole_steps = updated("plain", streamed=False)
    for layout in ("plain", "shared"):
        streamed, streamed_steps = updated(layout, streamed=True)
        torch.testing.assert_close(streamed, whole, rtol=0, atol=1e-9, msg=f"seed {seed}")
        for found, expected in zip(streamed_steps, whole_steps, strict=True):
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-9), seed
            assert found.lr == pytest.approx(expected.lr, rel=1e-9), seed
            assert found.divisor == expected.divisor, seed
            for table in ("by_lag", "by_worker"):
                left, right = getattr(found.losses, table), getattr(expected.losses, table)
                assert left.keys() == right.keys(), seed
                for name in left:
                    assert dataclasses.astuple(left[name]) == pytest.approx(dataclasses.astuple(right[name])), seed


def test_a_step_reports_the_logprobs_of_its_first_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the policy before the update; a group without reward variance has none, and is none of the first."""
    monkeypatch.setattr("echo2.transport.message_bytes.LOGGED_TOKENS", 4 * 2 * 3)  # three first tokens of each rollout
    rng = random.Random(0)
    made = [
        group(
            number, [1, 2], [rollout([rng.randrange(2, 9) for _ in range(5)], float(i * (number != 1))) for i in (0, 1)]
        )
        for number in range(6)
    ]
    masked = dataclasses.replace(made[2].rollouts[0], loss_mask=bytes(5))
    made[2] = dataclasses.replace(made[2], rollouts=(masked, made[2].rollouts[1]))
    trainer = GrpoClient(tiny_policy(), config_of(temperature=0.7, lr=1e-3))

    def first_logprobs(each: Rollout) -> list[float]:
        with torch.no_grad():
            logits = trainer.policy.module(input_ids=torch.tensor([[1, 2, *each.tokens]])).logits[0, 1:-1] / 0.7
        return logits.log_softmax(-1)[range(5), each.tokens.tolist()].tolist()[:3]

    for step in range(2):
        expected = {
            number: [[] if each is masked else first_logprobs(each) for each in made[number].rollouts]
            for number in (0, 2, 3, 4)
        }
        for start, stop in ((0, 1), (1, 4), (4, 6)):
            trainer.forward_backward(made[start:stop])
        found = trainer.optim_step().logprobs
        assert found.keys() == expected.keys(), step
        for number, of_rollouts in expected.items():
            for values, right in zip(found[number], of_rollouts, strict=True):
                assert list(values) == pytest.approx(right, abs=1e-5), (step, number)


def test_normalisations_by_hand() -> None:
    """Three rollouts of 1, 3 and 2 loss tokens, gradients taken rollout by rollout with the others silent."""
    lengths, rewards = [1, 3, 2], [3.0, 1.0, 0.5]

    def only(index: int | None) -> RolloutGroup:
        masks = [bytes([index in (None, i)]) * length for i, length in enumerate(lengths)]
        made = [rollout([2] * n, r, loss_mask=m) for n, r, m in zip(lengths, rewards, masks, strict=True)]
        return group(0, [1], made)

    parts = [gradient_of([[only(index)]], loss="none") for index in range(3)]
    for normalisation, expected in {
        "token": sum(parts) / 6,
        "sequence": sum(part / length for part, length in zip(parts, lengths, strict=True)) / 3,
        "constant": sum(parts) / (3 * 7),
    }.items():
        trainer = GrpoClient(tiny_policy(), config_of(loss="none", normalisation=normalisation, max_tokens=7, lr=1e-3))
        trainer.forward_backward([only(None)])
        found = gradients(trainer)
        step = trainer.optim_step()
        torch.testing.assert_close(found / step.divisor, expected, rtol=1e-9, atol=1e-12)
        assert step.grad_norm == pytest.approx(float(expected.norm()))


def test_zero_variance_groups_count_in_every_divisor() -> None:
    flat = group(9, [1, 2], [rollout([3, 4, 5], reward=1.0), rollout([4], reward=1.0)])
    for normalisation, divisor in {"token": 4, "sequence": 2, "constant": 2 * 256}.items():
        trainer = GrpoClient(tiny_policy(), config_of(normalisation=normalisation))
        trainer.forward_backward([flat])
        assert trainer.optim_step().divisor == divisor


def test_lags_count_from_the_trained_version_by_worker() -> None:
    made = [rollout([2, 3, 4], 1.0), rollout([5], 0.0, version=7)]
    made[0] = dataclasses.replace(made[0], version_spans=((0, 2), (1, 6)), loss_mask=b"\x01\x00\x01")
    trainer = GrpoClient(tiny_policy(), Config())
    trainer.version = 7
    ours = dataclasses.replace(group(0, [1], made), worker_id="w1")
    stats = trainer.forward_backward([ours, dataclasses.replace(group(1, [1], made), worker_id="w2")])
    assert {name: part.tokens for name, part in stats.by_lag.items()} == {"5_8": 2, "1": 2, "0": 2}
    assert {name: part.tokens for name, part in stats.by_worker.items()} == {"w1": 3, "w2": 3}


def test_a_reference_pulls_the_policy() -> None:
    rng = random.Random(8)
    groups = [random_group(rng, number) for number in range(4)]
    flat = group(9, [1, 2], [rollout([3, 4, 5], reward=1.0), rollout([4], reward=1.0)])
    trainer = GrpoClient(tiny_policy(), config_of(reference_kl=0.5, lr=1e-3))
    stats = trainer.forward_backward(groups)
    assert stats.reference_kl == pytest.approx(0.0, abs=1e-9)
    torch.testing.assert_close(gradients(trainer), gradient_of([groups]), rtol=1e-9, atol=1e-11)
    trainer.optim_step()
    assert trainer.forward_backward([flat]).reference_kl > 1e-6, "a group without variance is pulled too"
    pulled = gradients(trainer).norm()
    trainer.optim_step()
    for _ in range(20):
        trainer.forward_backward([flat])
        trainer.optim_step()
    trainer.forward_backward([flat])
    assert gradients(trainer).norm() < 0.5 * pulled, "nothing but the pull: back towards where it began"


def test_the_reference_is_the_model_and_not_the_checkpoint(tmp_path: Path) -> None:
    judge_resume(tmp_path, reference_kl=0.5)


class Watched(tuple[Rollout, ...]):
    """The rollouts of a group; counts how often they are gone through."""

    num_looks = 0

    def __iter__(self) -> Iterator[Rollout]:
        self.num_looks += 1
        return super().__iter__()


def test_the_data_of_a_group_are_made_once() -> None:
    """To learn how long they are, and to train on them; a group that came again is another group."""
    looks = {}
    for is_asked in (False, True):
        rollouts = Watched(random_group(random.Random(1), 0).rollouts)
        one = dataclasses.replace(random_group(random.Random(1), 0), rollouts=rollouts)
        client = GrpoClient(tiny_policy(), config_of(lr=1e-2))
        if is_asked:
            client.num_tokens_run(one)
        before = rollouts.num_looks
        client.forward_backward([one])
        looks[is_asked] = rollouts.num_looks - before
        client.num_tokens_run(dataclasses.replace(one, rollouts=tuple(one.rollouts)[:2]))
        client.forward_backward([one])
        assert client.optim_step().num_tokens == 2 * sum(rollout.loss_mask.count(1) for rollout in one.rollouts)
    assert looks[True] < looks[False]
