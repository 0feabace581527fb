"""Attempts of several turns: what was sampled stays as it was, what the environment wrote is marked, bounds hold."""

from __future__ import annotations

import asyncio
import random
import threading
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import UserError
from echo2.core.types import (
    RUN_POLICY,
    Assignment,
    GroupRef,
    Lease,
    Message,
    Reply,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Task,
)
from echo2.engines.engine import RequestFailure, derived_seed
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import decoded, encode_prompt, load_tokenizer, reply_tokens, tokens_with
from echo2.rollouts.generate import sample_group, sample_groups
from echo2.transport import limits, messages
from rollout_cases import (
    END,
    VOCAB,
    Beside,
    assigned,
    hf_logits,
    hooked,
    load,
    snapshot_of,
    tiny_module,
    tokenizer_files,
    until,
)

ENGINES = ("compact", "transformers", "fake")
TEMPLATE = (
    b"{% for m in messages %}{{ 'h' if m.role == 'user' else 'a' }}={{ m.content }}<eos>{% endfor %}"
    b"{% if add_generation_prompt %}a={% endif %}"
)


class Counting:
    """An environment that answers its n-th turn with `=n` and ends at `last`; remembers what it was told."""

    def __init__(self, last: int = 3, stop: str = "", turn_tokens: int = 4, fails: str = "") -> None:
        self.stop, self._turn_tokens = stop, turn_tokens
        self._last, self._fails = last, fails
        self.actions: dict[int, list[str]] = {}
        self.seeds: list[int] = []
        self.open: set[int] = set()

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        if columns.get("bad") == "begin":
            raise UserError("it does not begin")
        number = len(self.actions)
        self.actions[number] = []
        self.open.add(number)
        self.seeds.append(seed)
        return number

    def turn_tokens(self, attempt: int) -> int:
        return self._turn_tokens

    def step(self, attempt: int, action: str) -> Reply:
        assert attempt in self.actions
        if action.startswith(self._fails) and self._fails:
            raise UserError("it does not like that")
        self.actions[attempt].append(action)
        turns = len(self.actions[attempt])
        return Reply(f"={turns}=", 0.25, turns == self._last)

    def end(self, attempt: int) -> None:
        self.open.remove(attempt)


def assignment(number: int, samples: int = 3, max_turns: int = 5, **changes: Any) -> Assignment:
    lease = Lease(number, GroupRef(RUN_POLICY, "train", number), 7, number, samples, 4, None, 99.0, 30.0, 11 + number)
    columns = changes.pop("columns", {})
    prompt, tokenizer = changes.pop("prompt", "53="), changes.pop("tokenizer", None)
    params = SamplingParams(**({"max_tokens": 40} | changes))
    return assigned(lease, Task(number, prompt, columns), params, "counting", max_turns, tokenizer)


def loaded(name: str, **changes: Any) -> Any:
    snapshot = snapshot_of(tiny_module("qwen3", **changes), version=5, lineage=2)
    engine = make_engine(name, "cpu")
    load(engine, snapshot)
    return engine, load_tokenizer(snapshot.files)


def play(engine: Any, tokenizer: Any, world: Counting, *assignments: Assignment) -> Any:
    groups: dict[int, RolloutGroup] = {}
    failures: dict[int, RequestFailure] = {}
    sampling = sample_groups(
        engine,
        tokenizer,
        assignments,
        "w1",
        on_group=lambda group, lease: groups.__setitem__(lease.lease_id, group),
        on_failed=lambda lease, failure: failures.__setitem__(lease.lease_id, failure),
        environments={"counting": Beside(world)},
    )
    asyncio.run(sampling)
    return groups, failures


def turns_of(rollout: Rollout) -> list[tuple[bool, array[int]]]:
    """(whether the policy wrote it, tokens) of each stretch."""
    stretches: list[tuple[bool, array[int]]] = []
    for token, mask in zip(rollout.tokens, rollout.loss_mask, strict=True):
        if not stretches or stretches[-1][0] != bool(mask):
            stretches.append((bool(mask), array("i")))
        stretches[-1][1].append(token)
    return stretches


@pytest.mark.parametrize("name", ENGINES)
def test_policy_and_environment_take_turns(name: str) -> None:
    engine, tokenizer = loaded(name)
    world = Counting(last=3)
    groups, failures = play(engine, tokenizer, world, assignment(0), assignment(1, samples=2))
    assert failures == {}
    assert world.open == set()
    assert len(set(world.seeds)) == 5
    attempts = iter(world.actions.values())
    for group in (groups[0], groups[1]):
        assert group.prompt_tokens == array("i", tokenizer.encode("53=", add_special_tokens=False))
        for rollout in group.rollouts:
            stretches, actions = turns_of(rollout), next(attempts)
            assert [mine for mine, _ in stretches] == [True, False, True, False, True]
            said = [tokenizer.decode(tokens.tolist(), skip_special_tokens=True) for _, tokens in stretches]
            assert said[0::2] == actions
            assert said[1::2] == ["=1=", "=2="]
            assert (rollout.finish, rollout.reward, dict(rollout.reward_parts)) == ("stop", None, {"environment": 0.75})
            assert rollout.version_spans == ((0, 5),)
            silent = [lp for lp, mask in zip(rollout.logprobs, rollout.loss_mask, strict=True) if not mask]
            assert silent == [0.0] * 6
        message = messages.encode_group(group)
        assert messages.parse_group(message.SerializeToString()) == group


@pytest.mark.parametrize("name", ["compact", "transformers"])
@pytest.mark.parametrize("narrowing", [{}, {"top_k": 4, "top_p": 0.9}, {"min_p": 0.1}])
def test_logprobs_are_those_of_the_whole_text_read_at_once(name: str, narrowing: dict[str, Any]) -> None:
    engine, tokenizer = loaded(name)
    module = tiny_module("qwen3")
    groups, _ = play(engine, tokenizer, Counting(last=4), assignment(0, temperature=0.7, **narrowing))
    seen = 0
    for rollout in groups[0].rollouts:
        logits = hf_logits(module, [*groups[0].prompt_tokens, *rollout.tokens]) / 0.7
        for place, (token, mask) in enumerate(zip(rollout.tokens, rollout.loss_mask, strict=True)):
            if not mask:
                continue
            row = logits[len(groups[0].prompt_tokens) + place - 1]
            if narrowing:
                start, stop = rollout.support_offsets[place : place + 2]
                support = torch.tensor(rollout.support_tokens[start:stop].tolist())
                expected = row[token] - row[support].logsumexp(0)
            else:
                expected = row.log_softmax(-1)[token]
            assert rollout.logprobs[place] == pytest.approx(float(expected), abs=2e-4)
            seen += 1
        if narrowing:
            widths = [b - a for a, b in zip(rollout.support_offsets, rollout.support_offsets[1:], strict=False)]
            assert [width > 0 for width in widths] == [bool(mask) for mask in rollout.loss_mask]
    assert seen >= 12
    assert messages.parse_group(messages.encode_group(groups[0]).SerializeToString()) == groups[0]


@pytest.mark.parametrize("name", ENGINES)
def test_an_attempt_does_not_depend_on_its_batch(name: str) -> None:
    engine, tokenizer = loaded(name)
    alone, _ = play(engine, tokenizer, Counting(), assignment(1))
    together, _ = play(engine, tokenizer, Counting(), assignment(0), assignment(1), assignment(2, samples=5))
    assert [r.tokens for r in alone[1].rollouts] == [r.tokens for r in together[1].rollouts]
    assert len({r.tokens.tobytes() for r in together[2].rollouts}) > 1
    again = [derived_seed(11, sample, turn) for sample in range(50) for turn in range(50)]
    assert len(set(again)) == 2500
    assert max(again) < 1 << 63


@pytest.mark.parametrize("name", ENGINES)
def test_a_turn_ends_at_the_stop_character_which_the_action_lacks(name: str) -> None:
    engine, tokenizer = loaded(name)
    world = Counting(last=4, stop="7", turn_tokens=30)
    groups, _ = play(engine, tokenizer, world, assignment(0, samples=8, max_tokens=50))
    (seven,) = tokens_with(tokenizer, "7")
    stopped = 0
    for rollout in groups[0].rollouts:
        for mine, tokens in turns_of(rollout):
            assert not mine or not {seven, END} & set(tokens[:-1])
            stopped += mine and tokens[-1] == seven
    assert stopped > 0
    assert not any("7" in action for actions in world.actions.values() for action in actions)


def test_the_vocabulary_is_searched_for_the_stop_character_beside_the_event_loop() -> None:
    """It takes a second or two where the vocabulary is large, in which a worker would miss its heartbeat."""
    engine, tokenizer = loaded("fake")
    searched: set[int] = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, tokens: list[int], **options: Any) -> str:
            if threading.current_thread() is not threading.main_thread():
                searched.update(tokens)
            text: str = tokenizer.decode(tokens, **options)
            return text

    groups, _ = play(engine, Watched(), Counting(last=4, stop="7"), assignment(0))
    assert groups
    assert searched == set(range(len(tokenizer)))


@pytest.mark.parametrize("name", ENGINES)
def test_bounds_cut_an_attempt_off_behind_a_token_of_its_own(name: str) -> None:
    engine, tokenizer = loaded(name)
    prompt = 3
    for bounds, longest in (
        ({"max_turns": 2}, 4 + 3 + 4),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 1000}, 64 - prompt),  # the context
        ({"max_tokens": 1}, 1),
    ):
        groups, failures = play(engine, tokenizer, Counting(last=99), assignment(0, **({"max_turns": 50} | bounds)))
        assert failures == {}
        for rollout in groups[0].rollouts:
            assert rollout.finish == "length"
            assert len(rollout.tokens) <= longest
            assert rollout.loss_mask[-1] == 1
            policy_turns = sum(mine for mine, _ in turns_of(rollout))
            assert rollout.reward_parts["environment"] == 0.25 * policy_turns  # a cut-off rollout keeps what it has
        if bounds == {"max_tokens": 1000}:
            assert max(len(rollout.tokens) for rollout in groups[0].rollouts) >= longest - 8


class Whimsical(Counting):
    """Answers of any length, nothing among them, and an end when it pleases."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(stop=rng.choice(["", "3", "="]), turn_tokens=rng.choice([0, 1, 5]))
        self._rng = rng

    def step(self, attempt: int, action: str) -> Reply:
        assert not self.stop or self.stop not in action
        text = "".join(self._rng.choices("0123=", k=self._rng.choice([0, 1, 3, 20])))
        return Reply(text, self._rng.uniform(-1, 1), self._rng.random() < 0.2)


@given(st.integers(0, 10**6))
def test_the_head_accepts_the_rollouts_of_any_environment(seed: int) -> None:
    rng = random.Random(seed)
    engine, tokenizer = loaded("fake")
    max_turns, max_tokens = rng.randint(1, 6), rng.choice([1, 2, 10, 60, 200])
    world = Whimsical(rng)
    asked = [assignment(number, rng.randint(1, 3), max_turns, max_tokens=max_tokens) for number in range(2)]
    groups, failures = play(engine, tokenizer, world, *asked)
    assert (set(groups), failures, world.open) == ({0, 1}, {}, set())
    for group in groups.values():
        assert messages.parse_group(messages.encode_group(group).SerializeToString()) == group
        messages.check_lengths(group, max_tokens)
        messages.check_turns(group, max_turns)
        messages.check_vocabulary(group, VOCAB)
        for rollout in group.rollouts:
            assert len(group.prompt_tokens) + len(rollout.tokens) <= 64
            assert rollout.finish in ("stop", "length")


def test_an_environment_that_fails_costs_its_own_group_only() -> None:
    engine, tokenizer = loaded("compact")
    world = Counting()
    bad = assignment(1, columns={"bad": "begin"})
    groups, failures = play(engine, tokenizer, world, assignment(0), bad, assignment(2))
    assert (set(groups), failures[1]) == ({0, 2}, RequestFailure("environment_failed", "it does not begin"))
    first = next(iter(world.actions.values()))[0]
    picky = Counting(fails=first)
    groups, failures = play(engine, tokenizer, picky, assignment(0), assignment(5, samples=1))
    assert (failures, set(groups)) == ({}, {0, 5})
    assert 0 < len(groups[0].rollouts) < 3
    assert {(one.cause, one.detail) for one in groups[0].lost} == {("environment_failed", "it does not like that")}
    assert len(groups[0].lost) + len(groups[0].rollouts) == 3
    assert world.open == picky.open == set()


def test_an_evaluation_has_all_its_rollouts_or_fails_and_so_does_a_group_without_any() -> None:
    engine, tokenizer = loaded("compact")
    world = Counting()
    play(engine, tokenizer, world, assignment(0))
    first = next(iter(world.actions.values()))[0]
    asked = assignment(0)
    held_out = replace(asked, lease=replace(asked.lease, group=GroupRef(RUN_POLICY, "eval", 0)))
    groups, failures = play(engine, tokenizer, Counting(fails=first), held_out, assignment(1, columns={"bad": "begin"}))
    assert (groups, failures[0].reason, failures[1].reason) == ({}, "environment_failed", "environment_failed")


def test_samples_in_place_of_others_are_drawn_from_numbers_of_their_own() -> None:
    engine, tokenizer = loaded("compact")
    asked, world = assignment(0, samples=5), Counting()
    groups, _ = play(engine, tokenizer, world, asked)
    more = replace(asked, lease=replace(asked.lease, lease_id=1, num_samples=2, first_sample=3))
    found, _ = play(engine, tokenizer, Counting(), more)
    assert [one.tokens for one in found[1].rollouts] == [one.tokens for one in groups[0].rollouts[3:]]


def test_rewards_that_add_up_to_more_than_the_wire_takes_are_the_environments_fault() -> None:
    class Generous(Counting):
        def step(self, attempt: int, action: str) -> Reply:
            return replace(super().step(attempt, action), reward=-0.4 * limits.REWARD_MAX)

    engine, tokenizer = loaded("compact")
    groups, failures = play(engine, tokenizer, Generous(last=2), assignment(0))
    assert ([r.reward_parts["environment"] for r in groups[0].rollouts], failures) == ([-0.8e6] * 3, {})
    _, failures = play(engine, tokenizer, Generous(last=3), assignment(0))
    assert failures[0].reason == "environment_failed"
    assert "rewards add up to -1.2e+06 over a rollout; +-1e+06 is the most" in failures[0].detail


def test_a_prompt_that_cannot_be_read_fails_as_ever() -> None:
    engine, tokenizer = loaded("compact")
    world = Counting()
    groups, failures = play(engine, tokenizer, world, assignment(0, prompt="1" * 64))
    assert (groups, failures[0].reason) == ({}, "prompt_too_long")
    assert world.open == set()


def test_a_cancelled_group_forgets_its_rollouts_and_leaves_the_engine() -> None:
    """The decode thread stops in the second turn, so that the group is under way however quick the machine is."""
    go_on = threading.Event()
    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine, _ = hooked("compact", lambda step: step != 6 or go_on.wait(60), snapshot)
    tokenizer, world = load_tokenizer(snapshot.files), Counting(last=9)

    async def cancelled() -> None:
        asked = sample_group(engine, tokenizer, assignment(0), "w1", {"counting": Beside(world)})
        group = asyncio.ensure_future(asked)
        await until(lambda: any(map(len, list(world.actions.values()))))
        group.cancel()
        await asyncio.wait([group])
        assert group.cancelled()
        go_on.set()
        await until(lambda: engine.free_slots == 64)

    asyncio.run(asyncio.wait_for(cancelled(), 60.0))
    assert 0 < sum(map(len, world.actions.values())) < 9 * 3
    assert world.open == set()


def test_a_slow_environment_holds_up_no_other_group() -> None:
    """Neither the event loop nor the decode thread waits for it."""
    engine, tokenizer = loaded("compact")
    asked, answered = threading.Event(), threading.Event()

    class Slow(Counting):
        def step(self, attempt: int, action: str) -> Reply:
            asked.set()
            assert answered.wait(60)
            return super().step(attempt, action)

    slow, quick = Beside(Slow(last=1)), Beside(Counting(last=3))

    async def both() -> tuple[Any, Any]:
        first = asyncio.ensure_future(
            sample_group(engine, tokenizer, assignment(0, samples=1), "w1", {"counting": slow})
        )
        await asyncio.to_thread(asked.wait)
        second = await sample_group(engine, tokenizer, assignment(1), "w1", {"counting": quick})
        assert not first.done()
        answered.set()
        return await first, second

    first, second = asyncio.run(asyncio.wait_for(both(), 60.0))
    assert (len(first.rollouts), len(second.rollouts)) == (1, 3)


@pytest.mark.parametrize("name", ENGINES)
def test_new_weights_may_come_between_turns_and_within_one(name: str) -> None:
    def newer(step: int) -> None:
        if step in (3, 9):
            decoder.load(snapshot_of(tiny_module("qwen3", seed=step), version=6 + step // 9, lineage=2))

    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine, decoder = hooked(name, newer, snapshot)
    world = Counting(last=4, turn_tokens=4)
    groups, failures = play(engine, load_tokenizer(snapshot.files), world, assignment(0, samples=6))
    assert failures == {}
    assert {version for r in groups[0].rollouts for _, version in r.version_spans} == {5, 6, 7}
    for rollout in groups[0].rollouts:
        starts, versions = zip(*rollout.version_spans, strict=True)
        assert starts[0] == 0
        assert list(versions) == sorted(set(versions))
        assert all(rollout.loss_mask[start] for start in starts)  # a version begins with a token it sampled
        assert messages.parse_group(messages.encode_group(groups[0]).SerializeToString()) == groups[0]


def test_a_new_lineage_ends_the_group() -> None:
    def fall_back(step: int) -> None:
        if step == 6:
            decoder.load(snapshot_of(tiny_module("qwen3", seed=1), version=4, lineage=3))

    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine, decoder = hooked("compact", fall_back, snapshot)
    groups, failures = play(engine, load_tokenizer(snapshot.files), Counting(), assignment(0))
    assert groups == {}
    assert failures[0].reason == "snapshot_gone"


def test_the_chat_template_gets_the_runs_arguments() -> None:
    thinks = b"{{ messages[0].content }}{% if thinks is defined and not thinks %}0{% endif %}{{ sign }}="
    files = tokenizer_files() | {"chat_template.jinja": thinks}
    plain, told = load_tokenizer(files), load_tokenizer(files, {"thinks": False, "sign": "1"})
    task = Task(0, (Message("user", "53"),))
    assert decoded(plain, encode_prompt(task, plain)) == "53="
    assert decoded(told, encode_prompt(task, told)) == "5301="


def test_a_reply_in_a_chat_is_the_users_next_message() -> None:
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": TEMPLATE})
    world = Counting(last=3)
    engine, _ = loaded("compact")
    chat = assignment(0, prompt=(Message("user", "53"),), samples=4, tokenizer=tokenizer)
    groups, _ = play(engine, tokenizer, world, replace(chat, max_turns=5))
    shown = tokenizer.decode(groups[0].prompt_tokens.tolist(), skip_special_tokens=False)
    assert shown == "h=53<eos>a="
    for rollout in groups[0].rollouts:
        for number, ((_, mine), (_, reply)) in enumerate(
            zip(turns_of(rollout)[0::2], turns_of(rollout)[1::2], strict=False), start=1
        ):
            opening = "" if mine[-1] == END else "<eos>"  # the end of the answer is written once
            written = tokenizer.decode(reply.tolist(), skip_special_tokens=False)
            assert written == f"{opening}h=={number}=<eos>a="


def test_a_template_that_drops_earlier_answers_is_refused() -> None:
    forgetful = b"{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": forgetful})
    with pytest.raises(UserError, match="drops earlier answers"):
        reply_tokens(tokenizer, True, "5", END)
    single = b"{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": single})
    with pytest.raises(UserError, match="one message only"):
        reply_tokens(tokenizer, True, "5", END)
