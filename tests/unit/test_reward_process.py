"""The reward process, for real: what the user's code does to itself must cost its own group and nothing else."""

import asyncio
import dataclasses
import fcntl
import io
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2 import pipes
from echo2.errors import PeerError, UserError
from echo2.reward import confinement, frames
from echo2.reward.process import RewardProcess
from echo2.reward.score import RewardFailure
from echo2.tasks.gym import ReasoningGymRows
from echo2.types import Message, Rollout, Task

OWN = """
import os, sys, threading, subprocess
CHILD = "import fcntl, sys, threading; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); threading.Event().wait()"
print("imported", flush=True)
def reward(completions, do, **columns):
    act(do[0])
    return [len(c[0]["content"]) + 0.1 for c in completions]
def act(do):
    if do == "hang": threading.Event().wait()
    if do == "hang with a child": subprocess.run([sys.executable, "-c", CHILD, os.path.dirname(__file__) + "/lock"])
    if do == "exit": os._exit(3)
    if do == "leave": sys.exit("enough")
    if do == "segfault": os.kill(os.getpid(), 11)
    if do == "raise": raise RuntimeError("no")
    if do == "print":
        print("to stdout"); os.write(1, b"raw stdout\\n"); print("to stderr", file=sys.stderr)
        subprocess.run(["echo", "from a child"], check=True)
        assert sys.stdin.read() == ""
    if do == "pid": raise RuntimeError(f"pid {os.getpid()}")
"""


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout(array("i", [5]), array("f", [-0.5]), b"\x01", ((0, 3),), "stop", text) for text in texts]


def task(do: str) -> Task:
    return Task(0, (Message("user", "hé"),), {"do": do})


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def with_process(own: Path, body: Callable[[RewardProcess], Awaitable[None]], timeout_seconds: float = 60.0) -> None:
    async def run() -> None:
        process = RewardProcess([f"{own}/own.py:reward"], [2.0], timeout_seconds, own / "logs" / "reward.log")
        try:
            await body(process)
        finally:
            await process.close()
        assert process.pid is None

    asyncio.run(run())


def test_what_an_environment_gave_reaches_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        process = RewardProcess(["environment", "exact_match"], [1.0, 0.5], 60.0, tmp_path / "reward.log")
        try:
            played = [dataclasses.replace(one, reward_parts={"environment": 0.1}) for one in rollouts("a", "b")]
            scored = await process.score(Task(0, "?", {"answer": "b"}), played)
            assert [one.reward for one in scored] == [0.1, 0.6]
        finally:
            await process.close()

    asyncio.run(run())


@pytest.mark.skipif(bool(confinement.missing()), reason=f"no sandbox here: {confinement.missing()}")
def test_a_delivered_completion_runs_nothing_beside_the_head(tmp_path: Path) -> None:
    """The way a worker once ran code as the head's user: its text, through the scorer of the task's generator."""
    created = tmp_path / "created"
    row = dict(ReasoningGymRows("spiral_matrix", {"size": 2}, 0)[1])
    program = f"<answer>[open({str(created)!r}, 'w')]</answer>"

    async def run() -> None:
        process = RewardProcess(["reasoning_gym"], [], 60.0, tmp_path / "reward.log")
        try:
            scored = await process.score(Task(0, row.pop("prompt"), row), rollouts(program, row["answer"]))
            assert [one.reward for one in scored] == [0.0, 1.0]
        finally:
            await process.close()

    asyncio.run(run())
    assert not created.exists()


def test_scores_come_back_exactly_and_printing_harms_nothing(own: Path) -> None:
    async def body(process: RewardProcess) -> None:
        for do in ("nothing", "print", "nothing"):
            before = rollouts("", "abc\ud800", "é" * 1000)
            after = await process.score(task(do), before)
            assert [dict(one.reward_parts) for one in after] == [{"reward": 0.1}, {"reward": 4.1}, {"reward": 1000.1}]
            assert [one.reward for one in after] == [0.2, 8.2, 2000.2]
            assert [(a.tokens, a.logprobs, a.version_spans) for a in after] == [
                (b.tokens, b.logprobs, b.version_spans) for b in before
            ]

    with_process(own, body)
    log = (own / "logs" / "reward.log").read_text()
    for printed in ("imported", "to stdout", "raw stdout", "to stderr", "from a child"):
        assert printed in log


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("exit", "exited with status 3 while scoring task 0"),
        ("leave", "exited with status 1 .*enough"),
        ("segfault", "was killed by SIGSEGV.*Segmentation fault"),
        ("raise", r"reward raised at .*own.py:\d+ in act: RuntimeError: no"),
    ],
)
def test_a_crash_costs_one_group(own: Path, do: str, said: str) -> None:
    async def body(process: RewardProcess) -> None:
        with pytest.raises(RewardFailure, match=said):
            await process.score(task(do), rollouts("a"))
        assert (await process.score(task("nothing"), rollouts("a")))[0].reward == 2.2

    with_process(own, body)


def test_a_raising_function_keeps_its_process(own: Path) -> None:
    async def body(process: RewardProcess) -> None:
        await process.start()
        first = process.pid
        for _ in range(2):
            with pytest.raises(RewardFailure, match=f"pid {first}"):
                await process.score(task("pid"), rollouts("a"))

    with_process(own, body)


@pytest.mark.parametrize("do", ["hang", "hang with a child"])
def test_a_hung_call_is_killed_and_the_next_group_is_scored(own: Path, do: str) -> None:
    async def body(process: RewardProcess) -> None:
        with pytest.raises(RewardFailure, match=r"longer than 1 s for scoring task 0.*reward.timeout_seconds"):
            await process.score(task(do), rollouts("a"))
        with (own / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits as long as what it started is alive
        assert (await process.score(task("nothing"), rollouts("a")))[0].reward == 2.2

    with_process(own, body, timeout_seconds=1.0)


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(own: Path) -> None:
    async def body(process: RewardProcess) -> None:
        await process.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.score(task("hang"), rollouts("a")), 0.1)
        assert (await process.score(task("nothing"), rollouts("ab")))[0].reward == 4.2

    with_process(own, body)


def test_groups_asked_for_together_get_their_own_scores(own: Path) -> None:
    async def body(process: RewardProcess) -> None:
        groups = [process.score(task("nothing"), rollouts("x" * length)) for length in range(20)]
        assert [scored[0].reward for scored in await asyncio.gather(*groups)] == [2 * (n + 0.1) for n in range(20)]

    with_process(own, body)


def test_what_ends_the_process_costs_its_own_group_and_none_that_was_sent_with_it(own: Path) -> None:
    deeds = ["nothing", "exit", "nothing", "raise", "hang", *["nothing"] * 20, "segfault", "nothing"]

    async def body(process: RewardProcess) -> None:
        await process.start()
        calls = [asyncio.ensure_future(process.score(task(deed), rollouts("a"))) for deed in deeds]
        dropped = asyncio.ensure_future(process.score(task("nothing"), rollouts("a")))
        await asyncio.sleep(0)
        dropped.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        for deed, outcome in zip(deeds, found, strict=True):
            if deed == "nothing":
                assert not isinstance(outcome, BaseException), outcome
                assert outcome[0].reward == 2.2
            else:
                assert isinstance(outcome, RewardFailure)

    with_process(own, body, timeout_seconds=2.0)


def test_a_function_that_cannot_be_loaded_is_a_user_error(tmp_path: Path) -> None:
    async def run() -> None:
        process = RewardProcess([f"{tmp_path}/nowhere.py:reward"], [], 60.0, tmp_path / "reward.log")
        with pytest.raises(UserError, match=r"no file .*nowhere.py"):
            await process.start()
        assert process.pid is None

    asyncio.run(run())


def test_the_child_ends_with_its_parent_even_while_hanging(own: Path) -> None:
    """Its stdin reaching the end is how it learns that the head was killed."""
    environment = {**os.environ, "PYTHONPATH": pipes.PACKAGE_ROOT}
    command = [sys.executable, "-m", "echo2.reward.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(pipes.encode({"specs": [f"{own}/own.py:reward"], "weights": []}))
        child.stdin.flush()
        assert pipes.read(child.stdout) == {"ready": True}
        child.stdin.write(pipes.encode(frames.group_message(task("hang"), rollouts("a"))))
        child.stdin.close()
        try:
            assert child.wait(timeout=30) == 0
        finally:
            child.send_signal(signal.SIGKILL)


@given(
    prompt=st.text() | st.lists(st.builds(Message, st.text(), st.text()), min_size=1).map(tuple),
    texts=st.lists(st.text(), max_size=3),
    columns=st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False) | st.none() | st.lists(st.text())),
)
def test_a_group_survives_the_pipe(prompt: object, texts: list[str], columns: dict[str, object]) -> None:
    original = Task(7, prompt, columns)  # type: ignore[arg-type]
    message = pipes.read(io.BytesIO(pipes.encode(frames.group_message(original, rollouts(*texts)))))
    assert message is not None
    back, attempts = frames.group_of(message)
    assert back == original
    assert [(a.text, a.tokens, a.finish) for a in attempts] == [(t, array("i", [5]), "stop") for t in texts]


def test_frames_are_bounded_and_cut_ones_are_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipes.read(io.BytesIO(pipes.encode({"a": 1})[:-1])) is None
    assert pipes.read(io.BytesIO(b"\x01")) is None
    with pytest.raises(PeerError, match="oversized"):
        pipes.read(io.BytesIO(b"\xff\xff\xff\xff{}"))
    monkeypatch.setattr(pipes, "MAX_FRAME_BYTES", 4)
    with pytest.raises(PeerError, match="oversized"):
        pipes.encode({"a": 1})
