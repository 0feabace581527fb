"""The head goes through a rollout in an environment by itself: honest ones come out the same, and no other does."""

from __future__ import annotations

import asyncio
import json
import math
import random
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError, UserError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, Message, Reply, Rollout, RolloutGroup, SamplingParams, Task
from echo2.engines.engine import derived_seed
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer, tokens_with
from echo2.head.decide.granting import LEASE_STRETCH_MAX
from echo2.head.strangers.replay import TurnRules, replay_rollout
from echo2.rollouts.generate import sample_groups
from echo2.rollouts.turns import ENVIRONMENT_SAMPLE
from echo2.transport import messages
from head_cases import OpenHead, delivery, rows, sample, until
from head_cases import settings as head_settings
from rollout_cases import END, Beside, assigned, load, snapshot_of, tiny_module, tokenizer_files
from seeds import examples

TEMPLATE = (
    b"{% for m in messages %}{{ 'h' if m.role == 'user' else 'a' }}={{ m.content }}<eos>{% endfor %}"
    b"{% if add_generation_prompt %}a={% endif %}"
)
CONTEXT = 64  # of the tiny module


class Whimsical:
    """Answers of any length, nothing among them, and an end when it pleases: all by its seed and what was done."""

    def __init__(self, whim: int) -> None:
        rng = random.Random(whim)
        self.stop, self._turn_tokens = rng.choice(["", "3", "="]), rng.choice([0, 1, 5])
        self._whim, self._done = whim, dict[int, tuple[int, list[str]]]()

    def begin(self, columns: Mapping[str, Any], seed: int) -> int:
        self._done[len(self._done)] = (seed, [])
        return len(self._done) - 1

    def turn_tokens(self, attempt: int) -> int:
        return self._turn_tokens

    def step(self, attempt: int, action: str) -> Reply:
        seed, actions = self._done[attempt]
        actions.append(action)
        rng = random.Random(f"{self._whim} {seed} {actions}")
        text = "".join(rng.choices("0123=", k=rng.choice([0, 1, 3, 20])))
        return Reply(text, rng.uniform(-1, 1), rng.random() < 0.2)

    def end(self, attempt: int) -> None:
        """It forgets nothing: its numbers count on."""


def played(whim: int, engine_name: str = "fake") -> tuple[TurnRules, RolloutGroup, Lease]:
    """A group of rollouts as a worker makes it, and the rules by which it did."""
    rng = random.Random(whim)
    max_turns, max_tokens, is_chat = rng.randint(1, 6), rng.choice([1, 2, 10, 60, 200]), rng.random() < 0.5
    snapshot = snapshot_of(tiny_module("qwen3"), version=5, lineage=2)
    engine = make_engine(engine_name, "cpu")
    load(engine, snapshot)
    tokenizer = load_tokenizer(tokenizer_files() | {"chat_template.jinja": TEMPLATE})
    world = Whimsical(whim)
    lease = Lease(1, GroupRef(RUN_POLICY, "train", 1), 7, 1, 3, 4, None, 99.0, 30.0, whim)
    prompt: Any = (Message("user", "53"),) if is_chat else "53="
    params = SamplingParams(max_tokens=max_tokens)
    asked = assigned(lease, Task(1, prompt), params, "whimsical", max_turns, tokenizer)
    found: list[Any] = []
    take = [lambda group, lease: found.append(group), lambda lease, failure: found.append(failure)]
    asyncio.run(sample_groups(engine, tokenizer, [asked], "w1", *take, environments={"whimsical": Beside(world)}))
    assert isinstance(found[0], RolloutGroup), found
    stops = tokens_with(tokenizer, world.stop) if world.stop else frozenset[int]()
    rules = TurnRules(tokenizer, stops | {END}, world.stop, is_chat, max_turns, max_tokens, CONTEXT)
    return rules, found[0], lease


def gone_through(whim: int, rules: TurnRules, group: RolloutGroup, lease: Lease, place: int, rollout: Rollout) -> float:
    world = Whimsical(whim)
    number = world.begin({}, derived_seed(lease.seed, place, ENVIRONMENT_SAMPLE))

    async def step(action: str) -> Reply:
        return world.step(number, action)

    return asyncio.run(replay_rollout(rules, world.turn_tokens(number), len(group.prompt_tokens), rollout, step))


@pytest.mark.parametrize("engine_name", ["fake", "compact"])
@given(whim=st.integers(0, 10**6))
def test_replaying_an_honest_attempt_gives_the_same_result(engine_name: str, whim: int) -> None:
    rules, group, lease = played(whim, engine_name)
    messages.check_turns(group, rules.max_turns)
    for place, rollout in enumerate(group.rollouts):
        reward = gone_through(whim, rules, group, lease, place, rollout)
        assert reward == rollout.reward_parts["environment"]


def cut(rollout: Rollout, length: int) -> Rollout:
    return replace(
        rollout,
        tokens=rollout.tokens[:length],
        logprobs=rollout.logprobs[:length],
        loss_mask=rollout.loss_mask[:length],
    )


def forgeries(rollout: Rollout, rng: random.Random) -> list[Rollout]:
    """The environment's words changed, cut and claimed; the rollout ended early; its end called another."""
    found = [replace(rollout, finish="length" if rollout.finish == "stop" else "stop")]
    theirs = [at for at, is_mine in enumerate(rollout.loss_mask) if not is_mine]
    if theirs:
        at = rng.choice(theirs)
        other = array("i", rollout.tokens)
        other[at] = 2 + (other[at] - 1) % 28
        found.append(replace(rollout, tokens=other))
        without = [i for i in range(len(rollout.tokens)) if i != at]
        tokens, mask = array("i", [rollout.tokens[i] for i in without]), bytes(rollout.loss_mask[i] for i in without)
        found.append(replace(rollout, tokens=tokens, loss_mask=mask))
        found.append(cut(rollout, theirs[0]))
        found.append(replace(cut(rollout, theirs[0]), finish="stop"))
    return found


@given(whim=st.integers(0, 10**6))
@examples(80)
def test_other_attempts_do_not_time_out(whim: int) -> None:
    rules, group, lease = played(whim)
    rng = random.Random(whim)
    for place, rollout in enumerate(group.rollouts):
        for forged in forgeries(rollout, rng):
            with pytest.raises(PeerError, match="a rollout in an environment"):
                gone_through(whim, rules, group, lease, place, forged)


# ---- at a real head --------------------------------------------------------------------------------------------------

OWN = """
import asyncio, os, time

class Parrot:
    stop, turn_tokens = "=", 4
    def __init__(self, columns, seed):
        assert columns["secret"] == "xyzzy"
        self.turns = 0
    def step(self, action):
        self.turns += 1
        if action == "666": os._exit(3)
        if action == "777": time.sleep(600)
        return action[::-1], float(len(action)), self.turns == 2

class Together(Parrot):
    async def step(self, action):
        if action == "777": await asyncio.sleep(600)
        return super().step(action)
"""


def parrot(path: Path, name: str = "Parrot", lease_seconds: float = 120.0) -> OpenHead:
    own = path / "own.py"
    own.write_text(OWN)
    raw = head_settings(
        rows(path / "rows.jsonl", "53="),
        tasks={"environment": f"{own}:{name}"},
        reward={"functions": ["environment"]},
        sampling={"max_turns": 3},
        schedule={"lease_seconds": lease_seconds},
    )
    return OpenHead(path, raw, tokenizer_files() | {"config.json": b'{"max_position_embeddings": 64}'})


def playing(open_head: OpenHead, path: Path, name: str = "Parrot") -> Any:
    return open_head.attending(environments=[f"{path}/own.py:{name}"])


# 5 3 =  ->  the parrot says 3 5, its reward is 2;  7 =  ->  over, its reward is 1.   (ids: digit + 2, "=" is 28)
TOLD = [7, 5, 28, 5, 7, 9, 28]


def attempt(tokens: list[int] = TOLD, theirs: tuple[int, ...] = (3, 4), finish: str = "stop") -> Any:
    mask = bytes(at not in theirs for at in range(len(tokens)))
    logprobs = array("f", [-0.5 if mine else 0.0 for mine in mask]).tobytes()
    return sample(tokens, loss_mask=mask, logprobs=logprobs, finish=finish)


def test_no_delivery_ends_a_run_with_an_environment_or_takes_the_place_of_the_holders(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            four = [attempt()] * 4
            with pytest.raises(PeerError, match="lease_id"):
                await open_head.deliver(delivery(leases[0], four, lease_id=2**53 + 1))
            penalty = open_head.head.planner.penalties.of(open_head.peer("w-3").peer_id)
            penalty.num_expelled, penalty.expelled_until, penalty.expelled_for = 1, math.inf, "a test"
            with pytest.raises(PeerError, match="may come back"):
                await open_head.deliver(delivery(leases[0], four), name="w-3")
            thief, holder = await asyncio.gather(
                open_head.deliver(delivery(leases[0], four), name="w-2"), open_head.deliver(delivery(leases[0], four))
            )
            assert not thief[0][0]
            assert holder[0][0], holder
            assert open_head.head.ending.outcome is None

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_the_head_gives_the_environments_rewards_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            assert b"xyzzy" in leases[0].columns_json.encode()
            other = attempt([4, 28, 4, 28], (2,))
            replies = await open_head.deliver(delivery(leases[0], [attempt(), attempt(), attempt(), other]))
            assert replies[0][0], replies
            await until(lambda: open_head.fed)
            assert [rollout.reward for rollout in open_head.fed[0].rollouts] == [3.0, 3.0, 3.0, 1.0]
            (line,) = (open_head.head.rundir.rollouts / "step_1.jsonl").read_text().splitlines()
            assert json.loads(line)["rollouts"][0]["text"] == "53=357="

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


LIES: dict[str, tuple[Any, str]] = {
    "words that it did not say": (attempt([7, 5, 28, 7, 5, 9, 28]), "the environment did not say this after turn 1"),
    "fewer words": (attempt([7, 5, 28, 5, 9, 28], (3,)), "the environment did not say this after turn 1"),
    "more words": (attempt([7, 5, 28, 5, 7, 7, 9, 28], (3, 4, 5)), "the environment did not say this after turn 1"),
    "its words for the policy's": (attempt(TOLD, ()), "the environment did not say this after turn 1"),
    "an early end": (attempt(TOLD[:3], (), "length"), "it ends after turn 1, where it was not over"),
    "an end for a cut": (attempt(finish="length"), "it was over, but is reported as cut off"),
    "no end": (attempt([*TOLD, 28, 9, 28], (3, 4, 7)), "it goes on after turn 2, with which it was over"),
}


@pytest.mark.parametrize(("lie", "detail"), LIES.values(), ids=LIES)
def test_replies_that_the_environment_did_not_give_are_refused(tmp_path: Path, lie: Any, detail: str) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], [attempt()] * 3 + [lie]))
            assert (accepted, reason) == (False, f"malformed: a rollout in an environment: {detail}")

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_fewer_attempts_than_leased_are_refused_before_the_environment_is_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            replies = await open_head.deliver(delivery(leases[0], [attempt()] * 3))
            assert replies == [(False, "malformed: leased 4 rollouts, got 3")]

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_an_attempt_that_kills_the_environment_costs_one_rollout_of_a_machine_of_the_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            deadly = attempt([8, 8, 8, 28, 9, 28], ())
            twice = [delivery(leases[0], [attempt()] * 3 + [deadly])] * 2
            together = await asyncio.gather(*(open_head.deliver(one) for one in twice))
            assert [accepted for ((accepted, _),) in together] == [True, True], "both calls heard of one result"
            assert open_head.head.ending.outcome is None
            await until(lambda: open_head.fed)
            assert open_head.fed[0].samples == (0, 1, 2)
            assert open_head.head.ledger.counts()["lost"] == {"environment_failed": 1}

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


HANGS = attempt([9, 9, 9, 28, 9, 28], ())


def test_a_replay_ends_with_the_first_rollout_that_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path, "Together") as open_head, playing(open_head, tmp_path, "Together") as leases:
            await until(lambda: leases)
            lie, detail = LIES["no end"]
            ((_, reason),) = await open_head.deliver(delivery(leases[0], [HANGS, attempt(), attempt(), lie]))
            assert reason == f"malformed: a rollout in an environment: {detail}"

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_replay_ends_with_its_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path, lease_seconds=0.25) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            ((_, reason),) = await open_head.deliver(delivery(leases[0], [HANGS] * 4))
            assert reason.startswith("late: ")
            granted_at = leases[0].deadline - leases[0].seconds
            assert open_head.head.clock.now() - granted_at >= LEASE_STRETCH_MAX * 0.25  # so long its worker may hold it

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_replay_lasts_as_long_as_its_lease_is_open(tmp_path: Path) -> None:
    """A worker whose rate has risen may hold less than it was given; what it was given stays."""

    async def scenario() -> None:
        # Until its worker's rate is known the lease lasts eight times as long: time enough for the next lines.
        async with parrot(tmp_path, lease_seconds=0.5) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            planner, clock = open_head.head.planner, open_head.head.clock
            open_until = clock.now() + 1.0
            planner.leases.prolong(leases[0].lease_id, open_until)
            for worker in planner.fleet.own():
                worker.speed.rate = 1000.0
            ((_, reason),) = await open_head.deliver(delivery(leases[0], [HANGS] * 4))
            assert reason.startswith("late: ")
            assert clock.now() >= open_until

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_the_planner_gets_the_seconds_of_the_environment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            await open_head.deliver(delivery(leases[0], [attempt()] * 4))
            assert (open_head.head.planner.measurements.replay.own or 0.0) > 0

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_result_that_is_read_for_longer_than_its_call_lasts_is_not_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with parrot(tmp_path) as open_head, playing(open_head, tmp_path) as leases:
            await until(lambda: leases)
            one = delivery(leases[0], [attempt()] * 4)
            call = asyncio.ensure_future(open_head.deliver(one))
            await asyncio.sleep(0)
            call.cancel()
            again = await open_head.deliver(one)
            assert again[0][0] or again[0][1].startswith("duplicate")
            await until(lambda: open_head.fed)
            assert [rollout.reward for rollout in open_head.fed[0].rollouts] == [3.0] * 4

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_rewards_that_add_up_to_no_reward_are_the_environments_failure() -> None:
    tokenizer = load_tokenizer(tokenizer_files())
    rules = TurnRules(tokenizer, frozenset({END}), "", False, 2, 12, 0)
    rollout = Rollout(array("i", [5, END, 7, END]), array("f", [-0.5] * 4), b"\1" * 4, ((0, 0),), "stop", "")

    async def step(_: str) -> Reply:
        return Reply("", 6e5, False)

    with pytest.raises(UserError, match=r"add up to 1\.2e\+06"):
        asyncio.run(replay_rollout(rules, 0, 1, rollout, step))
