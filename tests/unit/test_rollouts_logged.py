"""Logged rollouts become rollouts: their tokens, their behaviour logprobs, and never a policy's age."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Message,
    RolloutGroup,
    SamplingParams,
    Snapshot,
    Task,
)
from echo2.engines.engine import RequestFailure
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.head.serve.reading import RunTokenizer
from echo2.learner.core.batch import collate
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import StepMeter
from echo2.reward.score import Scorer
from echo2.rollouts.generate import sample_groups
from echo2.rollouts.logged import logged_rollouts
from echo2.transport import messages
from learner_cases import config_of, data_of, tiny_policy
from rollout_cases import END, assigned, load, snapshot_of, tiny_module

PLUS = 29  # the token +
ANSWERS = {"ab": 6, "ac": 3, "d": 3}  # tokens 12 13, 12 14, 15 and the end token behind each


def logged(*texts: str, **more: Any) -> dict[str, Any]:
    return {"rollouts": [{"completion": text, "reward": i / 4, **more} for i, text in enumerate(texts)]}


def assignment(column: Any, samples: int = 2, max_tokens: int = 6, prompt: str = "53=") -> Assignment:
    lease = Lease(7, GroupRef(RUN_POLICY, "train", 3), 7, 9, samples, 4, None, 99.0, 30.0, 11)
    return assigned(lease, Task(9, prompt, {"logged_rollouts": column}), SamplingParams(max_tokens=max_tokens))


def replayed(
    *assignments: Assignment, engine_name: str = "fake", snapshot: Snapshot | None = None
) -> list[RolloutGroup | RequestFailure]:
    snapshot = snapshot or snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine = make_engine(engine_name, "cpu")
    load(engine, snapshot)
    found: list[RolloutGroup | RequestFailure] = []
    tokenizer = load_tokenizer(snapshot.files)
    put_group: Any = lambda group, lease: found.append(group)  # noqa: E731
    asyncio.run(
        sample_groups(engine, tokenizer, assignments, "w1", put_group, lambda lease, failure: found.append(failure))
    )
    return found


def group_of(column: Any, **options: Any) -> RolloutGroup:
    (group,) = replayed(assignment(column, **options))
    assert isinstance(group, RolloutGroup), group
    return group


@pytest.mark.parametrize("engine_name", ["fake", "compact"])
def test_a_group_is_the_logged_rollouts_in_their_order(engine_name: str) -> None:
    (group,) = replayed(assignment(logged("ab", "d") | {"answers": ANSWERS}), engine_name=engine_name)
    assert isinstance(group, RolloutGroup)
    assert group.logged
    assert (group.step, group.cursor, group.lineage, group.prompt_tokens.tolist()) == (7, 9, 2, [7, 5, 28])
    assert [rollout.tokens.tolist() for rollout in group.rollouts] == [[12, 13, END], [15, END]]
    assert [rollout.text for rollout in group.rollouts] == ["ab", "d"]
    assert {rollout.finish for rollout in group.rollouts} == {"stop"}
    assert {rollout.version_spans for rollout in group.rollouts} == {((0, 5),)}
    silent = tuple(replace(rollout, text="") for rollout in group.rollouts)  # text does not travel
    assert messages.parse_group(messages.encode_group(group).SerializeToString()) == replace(group, rollouts=silent)
    scored = Scorer(["logged"]).score_each(Task(9, "", {"logged_rollouts": logged("ab", "d")}), group.rollouts)
    assert [rollout.reward for rollout in scored] == [0.0, 0.25]


def test_probabilities_that_were_not_logged_are_the_logs_frequencies() -> None:
    group = group_of(logged("ab", "ac", "d") | {"answers": ANSWERS}, samples=3)
    found = [[math.exp(value) for value in rollout.logprobs] for rollout in group.rollouts]
    assert found[0] == pytest.approx([9 / 12, 6 / 9, 1.0], rel=1e-6)
    assert found[1] == pytest.approx([9 / 12, 3 / 9, 1.0], rel=1e-6)
    assert found[2] == pytest.approx([3 / 12, 1.0], rel=1e-6)


def test_a_whole_answers_probability_goes_to_the_tokens_that_were_chosen() -> None:
    group = group_of(logged("ab", "d", logprob=math.log(0.1)) | {"answers": ANSWERS})
    for rollout in group.rollouts:
        assert math.fsum(rollout.logprobs) == pytest.approx(math.log(0.1), rel=1e-6)
        assert rollout.logprobs[-1] == 0.0
    shares = [value / math.log(0.1) for value in group.rollouts[0].logprobs]
    assert shares[0] == pytest.approx(math.log(9 / 12) / math.log(6 / 12), rel=1e-6)
    alone = group_of(logged("ab", "ab", logprob=-2.0) | {"answers": {"ab": 8}})
    assert alone.rollouts[0].logprobs.tolist() == pytest.approx([-2 / 3] * 3)
    unknown = group_of(logged("ab", "ab", logprob=-2.0))
    assert unknown.rollouts == alone.rollouts


def test_an_engines_own_log_is_passed_on_unchanged() -> None:
    rollouts = [{"tokens": tokens, "logprobs": [-0.5, -0.25], "reward": 1} for tokens in ([12, 13], [12, END])]
    group = group_of({"rollouts": rollouts})
    assert [rollout.logprobs.tolist() for rollout in group.rollouts] == [[-0.5, -0.25]] * 2
    assert [(rollout.text, rollout.finish) for rollout in group.rollouts] == [("ab", "length"), ("a", "stop")]


@pytest.mark.parametrize(("prompt", "end"), [("53=", END), ((Message("user", "53="),), PLUS)])
def test_an_answer_ends_with_the_end_token_of_the_policy(prompt: Any, end: int) -> None:
    """In a chat with the token that the template writes behind a turn, which need not be the tokenizer's end token."""
    template = b"{% for m in messages %}{{ m.content }}+{% endfor %}"
    ends = json.dumps({"eos_token_id": [END, PLUS]}).encode()
    plain = snapshot_of(tiny_module("qwen3"), version=5)
    files = {**plain.files, "chat_template.jinja": template, "generation_config.json": ends}
    tokenizer = load_tokenizer(files)
    column = logged("ab", "d") | {"answers": ANSWERS}
    column["rollouts"] += [{"tokens": [12, one], "logprobs": [-0.5, -0.25], "reward": 0} for one in (END, PLUS, 13)]
    task = Task(9, prompt, {"logged_rollouts": column})
    lease = Lease(7, GroupRef(RUN_POLICY, "train", 3), 7, 9, 5, 4, None, 99.0, 30.0, 11)
    (group,) = replayed(
        assigned(lease, task, SamplingParams(max_tokens=6), tokenizer=tokenizer), snapshot=replace(plain, files=files)
    )
    assert isinstance(group, RolloutGroup), group
    assert [one.tokens.tolist() for one in group.rollouts[:2]] == [[12, 13, end], [15, end]]
    assert [one.finish for one in group.rollouts] == ["stop"] * 4 + ["length"]
    head = RunTokenizer(files)
    assert [one.tokens for one in head.logged(task, 5, 6, 5)] == [one.tokens for one in group.rollouts]


@pytest.mark.parametrize(
    ("column", "options", "said"),
    [
        (logged("ab", "d", "d"), {}, "3 logged rollouts, and 2 are asked for"),
        (logged("ab"), {"samples": 1, "max_tokens": 2}, "3 tokens; sampling.max_tokens is 2"),
        (logged("ab" * 40), {"samples": 1, "max_tokens": 99}, "context is 64"),
        ({"rollouts": [{"tokens": [99], "logprobs": [0.0], "reward": 0}]}, {"samples": 1}, "token 99"),
        ([1, 2], {}, "is reserved for logs"),
        ({"rollouts": [{"reward": 0}]}, {"samples": 1}, "is not what"),
        ({"rollouts": [{"tokens": [1], "logprobs": ["x"], "reward": 0}]}, {"samples": 1}, "is not what"),
        ({"rollouts": [{"tokens": [1 << 40], "logprobs": [0.0], "reward": 0}]}, {"samples": 1}, "token 1099511627776"),
        ({"rollouts": [{"completion": 3, "tokens": [1], "logprobs": [0.0], "reward": 0}]}, {"samples": 1}, "be text"),
    ],
)
def test_untrainable_rows_fail_their_own_lease(column: Any, options: Any, said: str) -> None:
    good = assignment(logged("ab", "d"))
    outcomes = replayed(assignment(column, **options), good)
    (failure,) = [outcome for outcome in outcomes if isinstance(outcome, RequestFailure)]
    assert said in failure.detail
    assert len(outcomes) == 2, "the good group did not come"


def test_logged_and_sampled_tasks_share_a_batch() -> None:
    plain = assigned(assignment({}).lease, Task(9, "53=", {}), SamplingParams(max_tokens=4))
    groups = replayed(plain, assignment(logged("ab", "d")))
    assert sorted(group.logged for group in groups if isinstance(group, RolloutGroup)) == [False, True]


# ---- at the learner --------------------------------------------------------------------------------------------------


def scored_group(is_logged: bool) -> RolloutGroup:
    group = group_of(logged("0", "1") | {"answers": {"0": 2, "1": 6}}, prompt="53")
    rollouts = tuple(replace(r, reward=float(i)) for i, r in enumerate(group.rollouts))
    return replace(group, logged=is_logged, rollouts=rollouts, step=5)


def test_a_logged_token_has_no_lag() -> None:
    for is_logged, lag in ((True, -1), (False, 3)):
        group = scored_group(is_logged)
        for layout in ("plain", "shared"):
            batch = collate(data_of(group, version=8), layout, 0.01)  # type: ignore[arg-type]
            assert set(batch.loss_tokens.lag_n.tolist()) == {lag}


def test_a_logged_group_is_measured_apart_and_never_counts_as_on_policy() -> None:
    trainer = GrpoClient(tiny_policy(), config_of(lr=1e-3))
    trainer.version = 5
    rows = []
    for kinds in ((True,), (True, False), (False,)):
        meter = StepMeter(trainer.version, config_of(max_staleness=9))
        for is_logged in kinds:
            group = scored_group(is_logged)
            group = replace(group, step=trainer.version)
            meter.see(group)
            trainer.forward_backward([group])
        rows.append(meter.metrics(trainer.optim_step()))
    assert [row["off_policy/logged"] for row in rows] == [1.0, 0.5, 0.0]
    assert ["off_policy/mean" in row for row in rows] == [False, True, True]
    assert ["mismatch_kl/lag_logged" in row for row in rows] == [True, True, False]
    assert not [name for name in rows[0] if "/lag_" in name and not name.endswith("lag_logged")]


class Letters:
    """A tokenizer of the learner cases' vocabulary, one letter a token and no end token."""

    eos_token_id = None
    model_ends = ()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ["abcdefghijklm".index(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("abcdefghijklm"[token] for token in token_ids)


def test_estimated_probabilities_give_the_gradient_of_the_policys_expectation() -> None:
    """Whoever wrote it, as long as it has every answer: sum over the log of r A grad log pi = n grad E_pi[reward]."""
    counts = {letter: 1 + 3 * place % 7 for place, letter in enumerate("abcdefghijklm")}
    worth = {letter: (5 * place % 11) / 4 for place, letter in enumerate("abcdefghijklm")}
    texts = [letter for letter, count in counts.items() for _ in range(count)]
    column = logged(*texts) | {"answers": counts}
    rollouts = logged_rollouts(column, len(texts), 6, Letters(), 0, False)  # type: ignore[arg-type]
    prompt = array("i", [3, 7, 5])
    scored = tuple(replace(rollout, reward=worth[rollout.text]) for rollout in rollouts)
    policy = tiny_policy()
    trainer = GrpoClient(policy, config_of(loss="tis", loss_params={"cap": 1e9}))
    trainer.forward_backward([RolloutGroup(GroupRef(RUN_POLICY, "train", 0), 0, 1, 0, prompt, scored, logged=True)])
    found = {name: parameter.grad.clone() for name, parameter in policy.module.named_parameters()}
    policy.module.zero_grad()
    chances = policy.module(input_ids=torch.tensor([prompt.tolist()])).logits[0, -1].softmax(dim=-1)
    expected = -len(texts) * (chances * torch.tensor(list(worth.values()), dtype=chances.dtype)).sum()
    expected.backward()
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 0.1
    for name, parameter in policy.module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)  # logprobs travel as float32
