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

from echo2.core import frames
from echo2.core.child import PACKAGE_ROOT
from echo2.core.errors import PeerError, UserError
from echo2.core.types import Message, Rollout, Task
from echo2.reward import messages
from echo2.reward import reward_processes as reward_process
from echo2.reward.reward_processes import RewardProcesses
from echo2.reward.score import RewardFailure, Scorer
from echo2.sandbox import code_process as sandbox_process
from echo2.sandbox import confinement, pipes
from echo2.tasks.sources import ReasoningGymRows

OWN = """
import asyncio, os, sys, threading, subprocess
CHILD = "import fcntl, sys, threading; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); threading.Event().wait()"
print("imported", flush=True)
def reward(completions, do, **columns):
    act(do[0])
    return [len(c[0]["content"]) + 0.1 for c in completions]
def act(do):
    if do == "hang": threading.Event().wait()
    if do == "hang with a child": subprocess.run([sys.executable, "-c", CHILD, os.path.dirname(__file__) + "/lock"])
    if do == "slow": threading.Event().wait(0.5)
    if do == "exit": os._exit(3)
    if do == "leave": sys.exit("enough")
    if do == "segfault": os.kill(os.getpid(), 11)
    if do == "raise": raise RuntimeError("no")
    if do == "print":
        print("to stdout"); os.write(1, b"raw stdout\\n"); print("to stderr", file=sys.stderr)
        subprocess.run(["echo", "from a child"], check=True)
        assert sys.stdin.read() == ""
    if do == "pid": raise RuntimeError(f"pid {os.getpid()}")
waiting, together = [], asyncio.Event()
async def judged(completions, do, **columns):
    if do[0] == "sleep": await asyncio.Event().wait()
    if do[0] == "cancelled": raise asyncio.CancelledError("by the judge")
    if do[0] == "cancels": asyncio.current_task().cancel(); await asyncio.sleep(0)
    if do[0] != "meet": act(do[0])
    waiting.append(do[0])
    if len(waiting) == 20: together.set()
    if do[0] == "meet": await together.wait()
    return [len(c[0]["content"]) + 0.1 for c in completions]
async def each(solution_str, ground_truth): return {"score": len(solution_str)}
"""


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout(array("i", [5]), array("f", [-0.5]), b"\x01", ((0, 3),), "stop", text) for text in texts]


def task(do: str) -> Task:
    return Task(0, (Message("user", "hé"),), {"do": do})


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def with_process(
    own: Path,
    body: Callable[[RewardProcesses], Awaitable[None]],
    timeout_seconds: float = 60.0,
    num_processes: int = 1,
    function: str = "reward",
) -> None:
    async def run() -> None:
        log = own / "logs" / "reward.log"
        process = RewardProcesses([f"2 * {own}/own.py:{function}"], timeout_seconds, log, num_processes, tries_max=1)
        try:
            await body(process)
        finally:
            await process.close()
        assert process.pids == []

    asyncio.run(run())


def test_the_reward_of_an_environment_reaches_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        process = RewardProcesses(["environment", "0.5 * exact_match"], 60.0, tmp_path / "reward.log")
        try:
            played = [dataclasses.replace(one, reward_parts={"environment": 0.1}) for one in rollouts("a", "b")]
            scored, _ = await process.score(Task(0, "?", {"answer": "b"}), played)
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
        process = RewardProcesses(["reasoning_gym"], 60.0, tmp_path / "reward.log")
        try:
            scored, _ = await process.score(Task(0, row.pop("prompt"), row), rollouts(program, row["answer"]))
            assert [one.reward for one in scored] == [0.0, 1.0]
        finally:
            await process.close()

    asyncio.run(run())
    assert not created.exists()


def test_scores_come_back_exactly_and_printing_harms_nothing(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        for do in ("nothing", "print", "nothing"):
            before = rollouts("", "abc\ud800", "é" * 1000)
            after, _ = await process.score(task(do), before)
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
def test_a_crash_costs_one_group(own: Path, do: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process, "EXIT_SECONDS", 30.0)  # Python's own end may take a while on a loaded machine

    async def body(process: RewardProcesses) -> None:
        with pytest.raises(RewardFailure, match=said):
            await process.score(task(do), rollouts("a"))
        assert (await process.score(task("nothing"), rollouts("a")))[0][0].reward == 2.2

    with_process(own, body)


def test_a_raising_function_keeps_its_process(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        await process.start()
        (first,) = process.pids
        for _ in range(2):
            with pytest.raises(RewardFailure, match=f"pid {first}"):
                await process.score(task("pid"), rollouts("a"))

    with_process(own, body)


@pytest.mark.parametrize("do", ["hang", "hang with a child"])
def test_a_hung_call_is_killed_and_the_next_group_is_scored(own: Path, do: str) -> None:
    async def body(process: RewardProcesses) -> None:
        with pytest.raises(RewardFailure, match=r"longer than 1 s while scoring task 0.*reward.timeout_seconds"):
            await process.score(task(do), rollouts("a"))
        process._timeout_seconds = 60.0  # short for the one that hangs only
        with (own / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits as long as what it started is alive
        assert (await process.score(task("nothing"), rollouts("a")))[0][0].reward == 2.2

    with_process(own, body, timeout_seconds=1.0)


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        await process.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.score(task("hang"), rollouts("a")), 0.1)
        assert (await process.score(task("nothing"), rollouts("ab")))[0][0].reward == 4.2

    with_process(own, body)


def test_groups_asked_for_together_get_their_own_scores(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        groups = [process.score(task("nothing"), rollouts("x" * length)) for length in range(20)]
        assert [scored[0].reward for scored, _ in await asyncio.gather(*groups)] == [2 * (n + 0.1) for n in range(20)]

    with_process(own, body)


def test_a_group_that_ends_the_process_costs_no_other_group(own: Path) -> None:
    deeds = ["nothing", "exit", "nothing", "raise", "hang", *["nothing"] * 20, "segfault", "nothing"]

    async def body(process: RewardProcesses) -> None:
        await process.start()
        calls = [asyncio.ensure_future(process.score(task(deed), rollouts("a"))) for deed in deeds]
        dropped = asyncio.ensure_future(process.score(task("nothing"), rollouts("a")))
        await asyncio.sleep(0)
        dropped.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        for deed, outcome in zip(deeds, found, strict=True):
            if deed == "nothing":
                assert not isinstance(outcome, BaseException), outcome
                assert outcome[0][0].reward == 2.2
            else:
                assert isinstance(outcome, RewardFailure)

    with_process(own, body, timeout_seconds=6.0)  # the quick ones take no such time on any machine


def test_slow_groups_that_were_sent_together_have_their_own_time_each(own: Path) -> None:
    """Those before are quick, so that many are sent with the next."""

    async def body(process: RewardProcesses) -> None:
        for _ in range(3):
            await process.score(task("nothing"), rollouts("a"))
        before = process.pids
        found = await asyncio.gather(*(process.score(task("slow"), rollouts("a")) for _ in range(9)))
        assert all(seconds >= 0.5 for _, seconds in found)
        assert process.pids == before  # none was broken off, and tried again in another

    with_process(own, body, timeout_seconds=3.0)


def test_each_group_has_its_own_seconds_also_of_a_process_that_it_broke_with_others(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        await process.score(task("nothing"), rollouts("a"))
        calls = [process.score(task(do), rollouts("a")) for do in ("hang", "nothing", "slow", "nothing")]
        hung, quick, slow, last = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(hung, RewardFailure)
        assert hung.seconds > 1.9  # twice that where it was sent with the others, which is the scheduler's choice
        assert not any(isinstance(one, BaseException) for one in (quick, slow, last))
        assert quick[1] < 2.0
        assert slow[1] >= 0.5

    with_process(own, body, timeout_seconds=2.0)


def test_groups_that_wait_get_more_processes_and_are_scored_side_by_side(own: Path) -> None:
    """Each of the two holds its process until the other has begun in another: one process could never end them."""
    (own / "meet.py").write_text(
        "import os\n"
        "def reward(completions, do, **columns):\n"
        "    open(f'{do[0]}.{len(completions)}', 'w').close()\n"
        "    while not os.path.exists(f'{do[0]}.{3 - len(completions)}'): os.sched_yield()\n"
        "    return [os.getpid()] * len(completions)\n"
    )

    async def run() -> None:
        process = RewardProcesses([f"{own}/meet.py:reward"], 30.0, own / "reward.log", num_processes=2)
        try:
            calls = (process.score(task(str(own / "met")), rollouts(*"ab"[:size])) for size in (1, 2))
            (one, _), (two, _) = await asyncio.gather(*calls)
            assert {one[0].reward, two[0].reward} == set(process.pids)
            assert len(process.pids) == 2
        finally:
            await process.close()

    asyncio.run(run())


def test_quick_groups_stay_in_one_process(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_process, "GROW_SECONDS", 30.0)  # a machine may stall

    async def body(process: RewardProcesses) -> None:
        await asyncio.gather(*(process.score(task("nothing"), rollouts("a")) for _ in range(50)))
        assert len(process.pids) == 1

    with_process(own, body, num_processes=4)


def test_asynchronous_functions_score_many_groups_at_once_in_one_process(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        calls = [process.score(task("meet"), rollouts("x" * length)) for length in range(20)]
        assert [scored[0].reward for scored, _ in await asyncio.gather(*calls)] == [2 * (n + 0.1) for n in range(20)]
        assert len(process.pids) == 1

    with_process(own, body, function="judged", num_processes=4)


def test_an_asynchronous_function_that_waits_too_long_costs_its_own_group_and_no_process(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        deeds = ["nothing", "sleep", "raise", "nothing"]
        calls = [process.score(task(deed), rollouts("a")) for deed in deeds]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, RewardFailure) for one in found] == [False, True, True, False]
        assert "longer than 1 s for task 0" in str(found[1])
        assert "RuntimeError: no" in str(found[2])
        assert len(process.pids) == 1

    with_process(own, body, timeout_seconds=1.0, function="judged")


def test_an_asynchronous_function_that_is_cancelled_from_within_costs_its_own_group(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        deeds = ["nothing", "cancelled", "cancels", "nothing"]
        calls = [process.score(task(deed), rollouts("a")) for deed in deeds]
        found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 50.0)
        assert [isinstance(one, RewardFailure) for one in found] == [False, True, True, False]
        assert "in judged: asyncio.exceptions.CancelledError: by the judge" in str(found[1])
        assert len(process.pids) == 1

    with_process(own, body, function="judged")


@pytest.mark.parametrize("do", ["exit", "hang"])
def test_a_group_that_ends_a_shared_process_costs_no_other_group(own: Path, do: str) -> None:
    async def body(process: RewardProcesses) -> None:
        deeds = ["sleep", do, "nothing", "nothing"]
        calls = [process.score(task(deed), rollouts("a")) for deed in deeds]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, RewardFailure) for one in found] == [True, True, False, False]
        assert "longer than 1 s for task 0" in str(found[0])

    with_process(own, body, timeout_seconds=1.0, function="judged")


def test_verl_functions_may_be_asynchronous_too(own: Path) -> None:
    async def body(process: RewardProcesses) -> None:
        scored, _ = await process.score(Task(0, "?", {"ground_truth": "b"}), rollouts("a", "bcd"))
        assert [one.reward for one in scored] == [2.0, 6.0]

    with_process(own, body, function="each")


def test_a_function_that_cannot_be_loaded_is_a_user_error(tmp_path: Path) -> None:
    async def run() -> None:
        process = RewardProcesses([f"{tmp_path}/nowhere.py:reward"], 60.0, tmp_path / "reward.log")
        with pytest.raises(UserError, match=r"no file .*nowhere.py"):
            await process.start()
        assert process.pids == []

    asyncio.run(run())


def test_the_child_ends_with_its_parent_even_while_hanging(own: Path) -> None:
    """Its stdin reaching the end is how it learns that the head was killed."""
    environment = {**os.environ, "PYTHONPATH": PACKAGE_ROOT}
    command = [sys.executable, "-m", "echo2.sandbox.child", "echo2.reward.messages:make_handler"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(pipes.encode({"id": 0, "functions": [f"{own}/own.py:reward"], "timeout_seconds": 60.0}))
        child.stdin.flush()
        assert pipes.read(child.stdout) == {"id": 0, "is_async": False, "takes_tokens": True}
        child.stdin.write(pipes.encode({"id": 1, "groups": [messages.group_message(task("hang"), rollouts("a"), "a")]}))
        child.stdin.close()
        try:
            assert child.wait(timeout=30) == 0
        finally:
            child.send_signal(signal.SIGKILL)


def test_tokens_are_sent_as_numbers_and_only_if_a_function_takes_them(own: Path) -> None:
    (sent,) = messages.group_message(task("it"), rollouts("a"), ["a"])["rollouts"]
    assert sent["tokens"] == [5]
    (sent,) = messages.group_message(task("it"), rollouts("a"), ["a"], has_tokens=False)["rollouts"]
    assert "tokens" not in sent
    (own / "seen.py").write_text(
        "def one(completions, completion_ids): return [float(ids[0]) for ids in completion_ids]\n"
        "def none(completions): return [0.0 for _ in completions]\n"
    )
    taken = {"reward": True, "each": False}  # the first by **columns, the second in verl's style
    specs = {f"{own}/own.py:{name}": takes for name, takes in taken.items()}
    specs |= {f"{own}/seen.py:one": True, f"{own}/seen.py:none": False, "exact_match": False}
    for spec, takes in specs.items():
        assert Scorer([spec]).takes_tokens is takes, spec

    async def run() -> None:
        for functions, score in (([f"{own}/seen.py:one"], 5.0), ([f"{own}/seen.py:none"], 0.0)):
            rewards = RewardProcesses(functions, 60.0, own / "log")
            try:
                (scored,), _ = await rewards.score(task("it"), rollouts("a"))
                assert scored.reward == score
            finally:
                await rewards.close()

    asyncio.run(run())


@given(
    prompt=st.text() | st.lists(st.builds(Message, st.text(), st.text()), min_size=1).map(tuple),
    texts=st.lists(st.text(), max_size=3),
    columns=st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False) | st.none() | st.lists(st.text())),
)
def test_a_group_survives_the_pipe(prompt: object, texts: list[str], columns: dict[str, object]) -> None:
    original = Task(7, prompt, columns)  # type: ignore[arg-type]
    message = pipes.read(io.BytesIO(pipes.encode(messages.group_message(original, rollouts(*texts), texts))))
    assert message is not None
    back, attempts = messages.group_of(message)
    assert back == original
    assert [(a.text, a.tokens, a.finish) for a in attempts] == [(t, array("i", [5]), "stop") for t in texts]


def test_frames_are_bounded_and_cut_ones_are_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipes.read(io.BytesIO(pipes.encode({"a": 1})[:-1])) is None
    assert pipes.read(io.BytesIO(b"\x01")) is None
    with pytest.raises(PeerError, match="oversized"):
        pipes.read(io.BytesIO(b"\xff\xff\xff\xff{}"))
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 4)
    with pytest.raises(PeerError, match="oversized"):
        pipes.encode({"a": 1})
