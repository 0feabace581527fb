"""A harness of the user's own in its process: many rollouts at once, and one that goes wrong costs itself alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, SamplingParams, Task
from echo2.engines.engine import RequestFailure
from echo2.engines.registry import make_engine
from echo2.rollouts.harness import HarnessEnvironment
from echo2.tasks.harness_process import HarnessProcess, is_harness, load_harness
from rollout_cases import assigned, plain_tokenizer, snapshot_of, tiny_module

OWN = """
import asyncio, json, os, time
import echo2
from echo2.core.errors import UserError

class Own:
    def __init__(self, columns, seed):
        self.do = columns["do"]

    async def run(self, model):
        said = [2, 3]
        for turn in range(3):
            choice = await model.generate(said, max_tokens=3)
            said += [*choice["token_ids"], 7]
            if turn == 1:
                match self.do:
                    case "pair": return 1.0, [2, 3]
                    case "raise": raise KeyError("nothing here")
                    case "never": await asyncio.Event().wait()
                    case "die": os._exit(7)
                    case "hang": time.sleep(1000)
                    case "word": return "1.0"
                    case "nothing": return None
                    case "nan": return float("nan")
                    case "library": json.loads("{")
        return 0.5

class NoRun: pass

class Tool:
    # an agent of a framework: what its tool raises is text for the model
    def __init__(self, columns, seed):
        self.do = columns["do"]

    async def run(self, model):
        choice = await model.generate([2, 3], max_tokens=3)
        try:
            async with echo2.container("python:3.12-slim") as box:
                await box.run("exit 3")
        except Exception as error:
            await model.generate([2, 3, *choice["token_ids"], 7], max_tokens=3)
        return 0.0

class Talker:
    # asks until the rollout has no room for more

    def __init__(self, columns, seed):
        self.do = columns["do"]

    async def run(self, model):
        said = [2, 3]
        try:
            while True:
                said += [*(await model.generate(said, max_tokens=3))["token_ids"], 7]
        except Exception as refusal:
            match self.do:
                case "as it is": raise
                case "as a cause": raise RuntimeError("the agent ended") from refusal
                case "in words": raise RuntimeError("Error code: 400 - {'code': 'context_length_exceeded'}")
                case "in a group": raise ExceptionGroup("sub-agents", [refusal])
                case "a scorer that is down": raise ConnectionRefusedError("port 8000")
                case "a container that died": raise UserError("podman: no space left on device")
                case "a limit of its own": raise TimeoutError("the tests' server")
                case "a group with a fault": raise ExceptionGroup("sub-agents", [refusal, OSError("broken pipe")])
                case "no number": return None
"""


SAYS = {
    "raise": "own.py:18 in run: KeyError: 'nothing here'",
    "word": "returned '1.0' as its reward. Return a finite number from `run`.",
    "nothing": "returned None as its reward.",
    "pair": "returned (1.0, [2, 3]) as its reward.",
    "nan": "returned nan as its reward.",
    "library": "own.py:25 in run: json.decoder.JSONDecodeError",  # not where the library raised it
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return f"harness:{path}:Own"


def test_names_say_what_is_a_harness(own: str) -> None:
    assert is_harness(own)
    assert not is_harness("own.py:Game")
    load_harness(own)
    with pytest.raises(UserError, match="async def run"):
        load_harness(own.replace(":Own", ":NoRun"))
    with pytest.raises(UserError, match="no file"):
        load_harness("harness:nowhere.py:Own")


@pytest.mark.parametrize(
    "bad", [*SAYS, "die", *(pytest.param(bad, marks=pytest.mark.slow) for bad in ("never", "hang"))]
)
def test_a_rollout_that_goes_wrong_costs_itself(own: str, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.tasks.harness_process.GRACE_SECONDS", 1.0)
    seconds = 10.0 if bad in ("never", "hang") else 60.0  # for a rollout: only what hangs is to be given up for it
    lease = Lease(3, GroupRef(RUN_POLICY, "train", 5), 2, 5, 1, 0, None, 9e9, seconds, 77)

    async def scene() -> list[Any]:
        engine = make_engine("compact", "cpu", 32)
        await engine.update_weights(snapshot_of(tiny_module("qwen3")))
        environment = HarnessEnvironment(HarnessProcess(own))
        await environment.start()

        def play(number: int) -> Any:
            task = Task(number, "12", {"do": bad if number == 7 else "play"})
            leased = assigned(lease, task, SamplingParams(max_tokens=40), own, 8)
            return environment.play(engine, plain_tokenizer(), leased, number)

        outcomes = await asyncio.gather(*(play(number) for number in range(24)))
        await environment.close()
        await engine.close()
        return outcomes

    outcomes = asyncio.run(scene())
    assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, RequestFailure)] == [7]
    assert outcomes[7].reason == "environment_failed"
    assert SAYS.get(bad, "") in outcomes[7].detail
    for n, outcome in enumerate(outcomes):
        if n != 7:
            parts: Mapping[str, float] = outcome.rows[0][1].reward_parts
            assert parts == {"environment": 0.5}


async def play_alone(spec: str, do: str, max_tokens: int) -> Any:
    engine = make_engine("compact", "cpu", 32)
    await engine.update_weights(snapshot_of(tiny_module("qwen3")))
    environment = HarnessEnvironment(HarnessProcess(spec))
    await environment.start()
    lease = Lease(3, GroupRef(RUN_POLICY, "train", 5), 2, 5, 1, 0, None, 9e9, 60.0, 77)
    leased = assigned(lease, Task(1, "12", {"do": do}), SamplingParams(max_tokens=max_tokens), spec, 8)
    try:
        return await environment.play(engine, plain_tokenizer(), leased, 0)
    finally:
        await environment.close()
        await engine.close()


def test_a_fault_of_a_container_loses_the_rollout_whatever_the_agent_makes_of_it(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks tell the model what a tool raised, and the agent ends without an answer: that is no zero."""
    monkeypatch.setenv("ECHO2_CONTAINERS", "nothing")
    outcome = asyncio.run(play_alone(own.replace(":Own", ":Tool"), "", 40))
    assert isinstance(outcome, RequestFailure), outcome
    assert outcome.reason == "environment_failed"
    assert "ECHO2_CONTAINERS = 'nothing' gives none" in outcome.detail


@pytest.mark.parametrize(
    ("end", "is_zero"),
    [
        *((end, True) for end in ("as it is", "as a cause", "in words", "in a group")),
        ("a scorer that is down", False),
        ("a container that died", False),
        ("a limit of its own", False),
        ("a group with a fault", False),
        ("no number", False),
    ],
)
def test_only_the_lack_of_room_itself_is_a_zero(own: str, end: str, is_zero: bool) -> None:
    """What fails behind it is nobody's zero: the rollout was cut off, and then a machine was at fault."""
    outcome = asyncio.run(play_alone(own.replace(":Own", ":Talker"), end, 9))
    if is_zero:
        assert [rollout.reward_parts for _, rollout in outcome.rows] == [{"environment": 0.0}]
        assert [rollout.finish for _, rollout in outcome.rows] == ["length"]
    else:
        assert isinstance(outcome, RequestFailure), outcome
        assert outcome.reason == "environment_failed"
        assert "longer than" not in outcome.detail
