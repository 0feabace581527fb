"""Environments: what they may answer, and that one of the user's own can neither stall nor kill the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2.core.child import child_environment
from echo2.core.errors import UserError
from echo2.core.types import Reply
from echo2.sandbox import pipes
from echo2.tasks import process_pool
from echo2.tasks.environments import REPLY_CHARS_MAX, EnvironmentProcess, LocalEnvironment, load_environment

OWN = """
import os, sys, time

print("imported")

class Own:
    stop, turn_tokens = "!", 3

    def __init__(self, columns, seed):
        if columns.get("do") == "raise":
            raise ValueError("no such level")
        if "turn" in columns:
            self.turn_tokens = columns["turn"]
        self.said = f"{columns.get('name', '')}{seed}"

    def step(self, action):
        print("raw", file=sys.__stdout__)
        match action:
            case "raise": raise KeyError("nothing here")
            case "hang":
                while True: pass
            case "nap": time.sleep(0.2)
            case "die": os._exit(7)
            case "kill": os.kill(os.getpid(), 9)
            case "read": return sys.stdin.read(), 0, False
            case "pair": return "x", 1.0
            case "number": return 5, 1.0, False
            case "long": return "a" * (1 << 19) + "z" * (1 << 19), 0.5, False
            case "half": return "\\ud800", 0.0, False
            case "nan": return "x", float("nan"), False
            case "huge": return "x", 10**400, False
            case "word": return "x", "much", False
        self.said += action
        return self.said, len(self.said), action == "end"

class NoStep: pass
class LongStop(Own): stop = "ab"
"""
SLOW = """
import asyncio, os, time

class Slow:
    def __init__(self, columns, seed):
        self.said = ""

    async def step(self, action):
        await asyncio.sleep(0.3)
        match action:
            case "raise": raise KeyError("nothing here")
            case "never": await asyncio.Event().wait()
            case "die": os._exit(7)
            case "hang": time.sleep(1000)
        self.said += action
        return self.said, 1.0, False
"""
BAD_ANSWERS = {
    "raise": r"own.py:\d+ in step: KeyError: 'nothing here'",
    "pair": r"not \(text, reward, done\)",
    "number": "said 5",
    "half": "UnicodeEncodeError",
    "nan": "the reward nan",
    "huge": "OverflowError",
    "word": "ValueError",
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return f"{path}:Own"


class Blocking:
    """An environment's process, asked from outside an event loop: what the tests say of one in this process."""

    def __init__(self, spec: str, call_seconds: float = 30.0) -> None:
        self._runner = asyncio.Runner()
        self._asked = EnvironmentProcess(spec, call_seconds)
        try:
            self.stop = self._run(self._asked.start())
        except UserError:
            self._runner.close()
            raise
        self.end = lambda rollout: self._run(self._ended(rollout))

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def _ended(self, rollout: Any) -> None:
        self._asked.end(rollout)
        await asyncio.gather(*self._asked._under_way)

    def begin(self, columns: dict[str, Any], seed: int) -> Any:
        begun = self._asked.begin(columns, seed)
        self.turn_tokens(begun)
        return begun

    def turn_tokens(self, rollout: Any) -> Any:
        return self._run(self._asked.turn_tokens(rollout))

    def step(self, rollout: Any, action: str) -> Any:
        return self._run(self._asked.step(rollout, action))

    @property
    def pid(self) -> int | None:
        return self._asked._pool.members[0].process.pid

    def close(self) -> None:
        self._run(self._asked.close())
        self._runner.close()


@pytest.fixture(params=["here", "process"])
def environment(own: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "here":
        yield LocalEnvironment(own)
        return
    opened = Blocking(own)
    yield opened
    opened.close()


def test_attempts_do_not_share_state(environment: Any) -> None:
    first, second = environment.begin({"name": "é"}, 5), environment.begin({"turn": 7}, 6)
    assert (environment.stop, environment.turn_tokens(first), environment.turn_tokens(second)) == ("!", 3, 7)
    assert environment.step(first, "a") == Reply("é5a", 3.0, False)
    assert environment.step(second, "b") == Reply("6b", 2.0, False)
    assert environment.step(first, "end") == Reply("é5aend", 6.0, True)
    environment.end(first)
    assert environment.step(second, "c") == Reply("6bc", 3.0, False)
    environment.end(second)
    with pytest.raises(UserError, match="no such level"):
        environment.begin({"do": "raise"}, 1)
    with pytest.raises(UserError, match="turn_tokens = -1"):
        environment.begin({"turn": -1}, 1)


def test_the_error_names_an_invalid_answer_of_an_environment_and_others_go_on(environment: Any) -> None:
    other = environment.begin({}, 1)
    for action, complaint in BAD_ANSWERS.items():
        with pytest.raises(UserError, match=complaint):
            environment.step(environment.begin({}, 2), action)
    assert environment.step(other, "x").text == "1x"


def test_a_text_that_is_too_long_loses_its_middle_and_says_so(environment: Any) -> None:
    """As when the policy reads a large file: its rollout goes on."""
    reply = environment.step(environment.begin({}, 1), "long")
    first, said, last = reply.text.split("\n")
    assert (first, last) == ("a" * (REPLY_CHARS_MAX // 2), "z" * (REPLY_CHARS_MAX // 2))
    assert said == f"[... {(1 << 20) - REPLY_CHARS_MAX} characters left out ...]"
    assert (reply.reward, reply.done) == (0.5, False)


def test_a_process_that_hangs_or_dies_is_replaced_and_the_other_attempts_go_on(own: str) -> None:
    environment = Blocking(own, call_seconds=6.0)
    try:
        other = environment.begin({"name": "o"}, 1)
        assert environment.step(other, "a").text == "o1a"
        pids = {environment.pid}
        for action, complaint in (
            ("hang", "longer than 6 s"),
            ("die", "exited with status 7"),
            ("kill", "killed by SIGKILL"),
        ):
            doomed = environment.begin({}, 2)
            assert environment.step(doomed, "x").text == "2x"
            with pytest.raises(UserError, match=complaint):
                environment.step(doomed, action)
            assert environment.pid is None
            environment.end(doomed)
            said = environment.step(other, "b").text
            pids.add(environment.pid)
        assert said == "o1abbb"
        assert len(pids) == 4
        doomed, pid = environment.begin({}, 2), environment.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # from outside, between two calls
        environment.end(doomed)
        assert environment.step(other, "c").text == "o1abbbc"
        assert environment.step(environment.begin({}, 3), "read").text == ""  # its stdin is not the frames'
    finally:
        environment.close()


def test_an_invalid_environment_is_refused(own: str) -> None:
    path = own.rpartition(":")[0]
    for spec, complaint in (
        ("chess", "'chess' is not a reference to code"),
        (f"{path}:NoStep", "step"),
        (f"{path}:OWN", "OWN"),
        (f"{path}:LongStop", "one ASCII character"),
    ):
        for load in (load_environment, Blocking):
            with pytest.raises(UserError, match=complaint):
                load(spec)


def test_the_child_ends_with_its_parent_even_while_hanging(own: str) -> None:
    command = [sys.executable, "-m", "echo2.sandbox.child", "echo2.tasks.environments:make_handler"]
    variables = child_environment()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for request in ({"id": 0, "spec": own}, {"id": 1, "begin": {}, "seed": 1}):
            child.stdin.write(pipes.encode(request))
            child.stdin.flush()
            assert pipes.read(child.stdout) is not None
        child.stdin.write(pipes.encode({"id": 2, "step": 1, "action": "hang"}))
        child.stdin.close()
        try:
            assert child.wait(timeout=30) == 0
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_large_row_passes(own: str) -> None:
    environment = Blocking(own)
    attempt = environment.begin({"name": "n" * (1 << 18) + os.sep}, 1)
    assert environment.step(attempt, "x").text.endswith(f"{os.sep}1x")
    environment.close()


def test_a_step_that_was_given_up_ends_by_itself_and_the_process_goes_on(own: str) -> None:
    async def story() -> None:
        environment = EnvironmentProcess(own)
        given_up, other = environment.begin({"name": "g"}, 1), environment.begin({"name": "o"}, 2)
        assert await environment.turn_tokens(given_up) == 3
        pid = environment._pool.members[0].process.pid
        step = asyncio.ensure_future(environment.step(given_up, "nap"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        step.cancel()
        environment.end(given_up)
        assert (await environment.step(other, "x")).text == "o2x"
        assert environment._pool.members[0].process.pid == pid
        await environment.close()
        for work in (environment.start(), environment.step(other, "x")):
            with pytest.raises(UserError, match="closed"):
                await work

    asyncio.run(story())


PLAIN = """
import os, time

class Plain:
    def __init__(self, columns, seed):
        self.said = columns.get("begin", "")

    def step(self, action):
        match action:
            case "raise": raise KeyError("nothing here")
            case "die": os._exit(7)
            case "hang": time.sleep(1000)
        time.sleep({seconds})
        self.said += action
        return f"{{self.said}} {{os.getpid()}}", 1.0, False
"""


async def played(asked: EnvironmentProcess, number: int, bad: str = "", turns: int = 4) -> tuple[str, set[str]]:
    """What a rollout's steps add up to, and the processes that answered them."""
    begun, pids = asked.begin({"begin": "<"}, number), set()
    try:
        assert await asked.turn_tokens(begun) == 0
        for turn in range(turns):
            said, _, pid = (await asked.step(begun, bad if bad and turn == 2 else f"{number},")).text.partition(" ")
            pids.add(pid)
    finally:
        asked.end(begun)
    return said, pids


@pytest.mark.parametrize("bad", ["die", *(pytest.param(bad, marks=pytest.mark.slow) for bad in ("raise", "hang"))])
def test_slow_plain_steps_are_spread_over_processes_and_fail_alone(
    tmp_path: Path, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty rollouts of four steps of .1 s. In the third step one goes wrong, and only that one is lost; each of the
    others has its steps in one process, or begun anew where that died."""
    monkeypatch.setattr(process_pool, "PROCESSES_MAX", 4)
    monkeypatch.setattr(process_pool, "available_memory_bytes", lambda: 1 << 40)
    (tmp_path / "plain.py").write_text(PLAIN.format(seconds=0.1))
    call_seconds = 6.0 if bad == "hang" else 30.0  # only what hangs is to be given up for its time

    async def scene() -> tuple[list[Any], list[int]]:
        asked = EnvironmentProcess(f"{tmp_path}/plain.py:Plain", call_seconds)
        await asked.start()
        rollouts = (played(asked, number, bad if number == 7 else "") for number in range(40))
        outcomes = await asyncio.gather(*rollouts, return_exceptions=True)
        await asyncio.gather(*asked._under_way, return_exceptions=True)
        left = [member.num_rollouts for member in asked._pool.members]
        await asked.close()
        return outcomes, left

    outcomes, left = asyncio.run(scene())
    assert isinstance(outcomes[7], UserError)
    assert [outcome[0] for n, outcome in enumerate(outcomes) if n != 7] == [
        "<" + f"{n}," * 4 for n in range(40) if n != 7
    ]
    pids = set().union(*(outcome[1] for n, outcome in enumerate(outcomes) if n != 7))
    assert 1 < len(left) <= 4  # each is started only where calls wait and are slow
    assert len(pids) > 1
    assert left == [0] * len(left)
    if bad == "raise":
        assert all(len(outcome[1]) == 1 for n, outcome in enumerate(outcomes) if n != 7)


def test_quick_plain_steps_have_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits for many others here, for longer than a slow one takes; only the time in the code counts."""
    monkeypatch.setattr(process_pool, "LONG_SECONDS", float("inf"))  # a machine may stall
    monkeypatch.setattr(process_pool, "SLOW_SECONDS", 0.1)  # the mean, which one stall of 1.6 s would raise to this
    (tmp_path / "plain.py").write_text(PLAIN.format(seconds=0))

    async def scene() -> int:
        asked = EnvironmentProcess(f"{tmp_path}/plain.py:Plain")
        await asked.start()
        await asyncio.gather(*(played(asked, number, turns=4) for number in range(300)))
        num = len(asked._pool.members)
        await asked.close()
        return num

    assert asyncio.run(scene()) <= 2  # one; another only where the machine itself stalled


@pytest.mark.parametrize(
    "bad", ["never", *(pytest.param(bad, marks=pytest.mark.slow) for bad in ("raise", "die", "hang"))]
)
def test_asynchronous_steps_wait_together_and_fail_alone(tmp_path: Path, bad: str) -> None:
    """Sixty rollouts of five steps; in the third step one of them goes wrong, and only that one is lost."""
    (tmp_path / "slow.py").write_text(SLOW)
    call_seconds = 6.0 if bad in ("never", "hang") else 30.0

    async def one(asked: EnvironmentProcess, number: int) -> str:
        begun = asked.begin({}, number)
        for turn in range(5):
            is_bad = number == 7 and turn == 2
            reply = await asked.step(begun, bad if is_bad else f"{number},")
        asked.end(begun)
        return reply.text

    async def scene() -> list[Any]:
        asked = EnvironmentProcess(f"{tmp_path}/slow.py:Slow", call_seconds)
        await asked.start()
        outcomes = await asyncio.gather(*(one(asked, number) for number in range(60)), return_exceptions=True)
        await asked.close()
        return outcomes

    started = time.monotonic()
    outcomes = asyncio.run(scene())
    assert time.monotonic() - started < 60  # one after the other: 90 s of waiting alone
    assert [n for n, said in enumerate(outcomes) if said != f"{n}," * 5] == [7]
    assert isinstance(outcomes[7], UserError)
