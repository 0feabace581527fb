"""Environments: what they may answer, and that one of the user's own can neither stall nor kill the worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from echo2 import pipes
from echo2.errors import UserError
from echo2.tasks.environment_process import ProcessWorld, open_world
from echo2.tasks.environments import REPLY_CHARS_MAX, LocalWorld, load_environment
from echo2.types import Reply

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
            case "die": os._exit(7)
            case "kill": os.kill(os.getpid(), 9)
            case "read": return sys.stdin.read(), 0, False
            case "pair": return "x", 1.0
            case "number": return 5, 1.0, False
            case "long": return "x" * (1 << 20), 0.0, False
            case "half": return "\\ud800", 0.0, False
            case "nan": return "x", float("nan"), False
            case "huge": return "x", 10**400, False
            case "word": return "x", "much", False
        self.said += action
        return self.said, len(self.said), action == "end"

class NoStep: pass
class LongStop(Own): stop = "ab"
"""
BAD_ANSWERS = {
    "raise": r"own.py:\d+ in step: KeyError: 'nothing here'",
    "pair": r"not \(text, reward, done\)",
    "number": "said 5",
    "long": f"{REPLY_CHARS_MAX} characters is the most",
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


@pytest.fixture(params=["here", "process"])
def world(own: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    opened = LocalWorld(own) if request.param == "here" else ProcessWorld(own)
    yield opened
    opened.close()


def test_attempts_are_apart(world: Any) -> None:
    first, second = world.begin({"name": "é"}, 5), world.begin({"turn": 7}, 6)
    assert (world.stop, world.turn_tokens(first), world.turn_tokens(second)) == ("!", 3, 7)
    assert world.step(first, "a") == Reply("é5a", 3.0, False)
    assert world.step(second, "b") == Reply("6b", 2.0, False)
    assert world.step(first, "end") == Reply("é5aend", 6.0, True)
    world.end(first)
    assert world.step(second, "c") == Reply("6bc", 3.0, False)
    world.end(second)
    with pytest.raises(UserError, match="no such level"):
        world.begin({"do": "raise"}, 1)
    with pytest.raises(UserError, match="turn_tokens = -1"):
        world.begin({"turn": -1}, 1)


def test_what_is_no_answer_is_named_and_harms_nobody(world: Any) -> None:
    other = world.begin({}, 1)
    for action, complaint in BAD_ANSWERS.items():
        with pytest.raises(UserError, match=complaint):
            world.step(world.begin({}, 2), action)
    assert world.step(other, "x").text == "1x"


def test_a_process_that_hangs_or_dies_is_replaced_and_the_other_attempts_go_on(own: str) -> None:
    world = ProcessWorld(own, call_seconds=6.0)
    try:
        other = world.begin({"name": "o"}, 1)
        assert world.step(other, "a").text == "o1a"
        pids = {world.pid}
        for action, complaint in (
            ("hang", "longer than 6 s"),
            ("die", "exited with status 7"),
            ("kill", "killed by SIGKILL"),
        ):
            doomed = world.begin({}, 2)
            assert world.step(doomed, "x").text == "2x"
            with pytest.raises(UserError, match=complaint):
                world.step(doomed, action)
            assert world.pid is None
            world.end(doomed)
            said = world.step(other, "b").text
            pids.add(world.pid)
        assert said == "o1abbb"
        assert len(pids) == 4
        doomed, pid = world.begin({}, 2), world.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # from outside, between two calls
        world.end(doomed)
        assert world.step(other, "c").text == "o1abbbc"
        assert world.step(world.begin({}, 3), "read").text == ""  # its stdin is not the frames'
    finally:
        world.close()
    with pytest.raises(UserError, match="closed"):
        world.begin({}, 1)


def test_built_ins_run_here_and_others_in_a_process(own: str) -> None:
    assert isinstance(open_world("sokoban"), LocalWorld)
    world = open_world(own)
    assert isinstance(world, ProcessWorld)
    world.close()


def test_what_is_no_environment_is_refused(own: str) -> None:
    path = own.rpartition(":")[0]
    for spec, complaint in (
        ("sokobam", "Did you mean sokoban"),
        ("chess", "no environment 'chess'"),
        (f"{path}:NoStep", "step"),
        (f"{path}:OWN", "OWN"),
        (f"{path}:LongStop", "one ASCII character"),
    ):
        for load in (load_environment, ProcessWorld):
            with pytest.raises(UserError, match=complaint):
                load(spec)


def test_the_child_ends_with_its_parent_even_while_hanging(own: str) -> None:
    command = [sys.executable, "-m", "echo2.tasks.environment_child"]
    environment = pipes.child_environment()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for request in ({"spec": own}, {"begin": {}, "seed": 1}):
            child.stdin.write(pipes.encode(request))
            child.stdin.flush()
            assert pipes.read(child.stdout) is not None
        child.stdin.write(pipes.encode({"step": 1, "action": "hang"}))
        child.stdin.close()
        try:
            assert child.wait(timeout=30) == 0
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_large_row_passes(own: str) -> None:
    world = ProcessWorld(own)
    attempt = world.begin({"name": "n" * (1 << 18) + os.sep}, 1)
    with pytest.raises(UserError, match="characters is the most"):
        world.step(attempt, "x")
    world.close()
