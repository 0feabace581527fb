"""Tasks in Harbor's format: read as rows, played with a shell in a container, and scored by their own tests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_cases import AGENTS_TOKENIZER, ScriptedEngine, sampled, texts, trained
from container_cases import image_for, needs
from echo2.core.errors import UserError
from echo2.core.types import Task
from echo2.engines.engine import Outcome, RequestFailure, SampleRequest
from echo2.sandbox import programs
from echo2.sandbox.containers import IMAGES, Containers, ImageContainer, find_runtime
from echo2.sandbox.programs import ContainerFault, ContainerLimits
from echo2.tasks import harbor_play
from echo2.tasks.base import TaskStream
from echo2.tasks.harbor_play import image_of, reward_in
from echo2.tasks.harbor_rows import COLUMN, HarborRows, HarborTask, packed_files, read_task, unpacked_files
from echo2.tasks.harness_process import is_harness
from echo2.tasks.loopback_model import LoopbackModel, Play
from echo2.tasks.streams import load_tasks
from harness_cases import failure_of, group_of, played

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "terminal" / "tasks"
TOML = "[environment]\nmemory_mb = 64\n[verifier]\ntimeout_sec = 5\n"
TEST = 'echo 1 > "$ECHO2_ROOT/logs/verifier/reward.txt"\n'
#: Deeper than Python goes, larger than a float, and longer than a whole number may be.
HOSTILE = ("[" * 8000, '{"a":' * 3000, "1" + "0" * 400, "1" * 5000)
bubblewrap = needs("bubblewrap")


def make_task(root: Path, name: str = "one", toml: str = TOML, test: str = TEST, **files: str) -> Path:
    folder = root / name
    contents = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": test, **files}
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def calls(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def play_with(runtime: str, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(harbor_play, "find_runtime", lambda: runtime)
    return harbor_play.make_play()


def outcome_of(play: Play, folder: Path, speak: Callable[[str], str], max_turns: int = 6) -> tuple[Any, ScriptedEngine]:
    engine, row = ScriptedEngine(speak), read_task(folder)

    async def plays(model: LoopbackModel, rng: Any) -> float:
        return await play(row, 1, model)

    return played(engine, plays, AGENTS_TOKENIZER, 4000, max_turns), engine


def test_the_examples_are_rows(tmp_path: Path) -> None:
    rows = load_tasks(str(EXAMPLES), {}, seed=0)
    assert [Path(rows.where(at)).name for at in range(len(rows))] == ["add-up", "count-lines", "first-word"]
    task = TaskStream(rows, 0, shuffle=False).task(1)
    assert isinstance(task, Task)
    assert task.prompt[0].content.startswith("Write the number of lines")
    told = task.columns[COLUMN]
    assert (told["memory_bytes"], told["agent_seconds"], told["has_network"]) == (256 << 20, 60.0, False)
    assert set(unpacked_files(told["files"], "environment")) == {"Dockerfile", "names.txt"}
    assert set(unpacked_files(told["files"], "tests")) == {"test.sh"}
    assert is_harness("harbor")


def test_rows_have_a_digest_and_may_not_change(tmp_path: Path) -> None:
    make_task(tmp_path, "a")
    script = make_task(tmp_path, "b") / "tests" / "test.sh"
    rows = HarborRows(tmp_path)
    before = rows.digest()
    assert HarborRows(tmp_path).digest() == before
    script.chmod(0o755)
    assert HarborRows(tmp_path).digest() != before
    with pytest.raises(UserError, match="has changed"):
        rows[1]


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[[steps]]\nname='one'\n", "several steps"),
        ("[environment]\ngpus = 1\n", "gpus"),
        ("[environment]\nos = 'windows'\n", "os"),
        ("[environment]\nmcp_servers = [{name='x'}]\n", "MCP"),
        ("[environment]\nmemory = 'much'\n", "must be like"),
        ("[environment]\nworkdir = '/app/../etc'\n", "absolute path"),
        ("[environment.env]\nKEY = '${KEY}'\n", "no variable of the machine"),
        ("[agent]\nnetwork_mode = 'allowlist'\n", "network_mode"),
        ("[agent]\ntimeout_sec = 'long'\n", "timeout_sec"),
        ("agent = 3\n", "is not a table"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "environment_mode"),
        ("[environment\n", "cannot be read"),
        (f"a = {'[' * 3000}", "cannot be read"),
        ("[environment]\ndocker_image = '--privileged'\n", "names no image"),
        ("[environment]\nstorage = 'much'\n", "must be like"),
    ],
)
def test_the_error_names_unsupported_features(tmp_path: Path, toml: str, why: str) -> None:
    make_task(tmp_path, toml=toml)
    with pytest.raises(UserError, match=why):
        load_tasks(str(tmp_path), {}, seed=0)


def test_limits_are_read_in_both_spellings(tmp_path: Path) -> None:
    old = make_task(tmp_path, "old", "[environment]\nmemory = '1G'\nallow_internet = true\ncpus = 2\n")
    new = make_task(tmp_path, "new", "[environment]\nmemory_mb = 512\nnetwork_mode = 'public'\n")
    none = make_task(tmp_path, "none", "")
    found = [read_task(folder)[COLUMN] for folder in (old, new, none)]
    assert [one["memory_bytes"] >> 20 for one in found] == [1024, 512, 2048]
    assert [one["has_network"] for one in found] == [True, True, False]


def test_a_hostile_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.tasks.harbor_rows.FILES_MAX", 20)
    secret = tmp_path / "secret"
    secret.write_text("told")
    hostile: dict[str, Callable[[Path], object]] = {
        "link": lambda task: (task / "tests" / "data").symlink_to(secret),
        "folder": lambda task: (task / "environment").symlink_to(tmp_path),
        "instruction": lambda task: [(task / "instruction.md").unlink(), (task / "instruction.md").symlink_to(secret)],
        "pipe": lambda task: os.mkfifo(task / "tests" / "pipe"),
        "sparse": lambda task: os.truncate(task / "tests" / "test.sh", 1 << 40),
        "random": lambda task: (task / "tests" / "big").write_bytes(os.urandom(1 << 20)),
        "many": lambda task: [(task / "tests" / str(at)).write_text("") for at in range(21)],
        "compose": lambda task: (task / "environment/docker-compose.yaml").write_text("services: {}"),
        "no tests": lambda task: (task / "tests" / "test.sh").unlink(),
        "binary": lambda task: (task / "instruction.md").write_bytes(b"\xff"),
    }
    for name, spoil in hostile.items():
        task = make_task(tmp_path / name, **({} if name == "folder" else {"environment/x": ""}))
        spoil(task)
        with pytest.raises(UserError, match=str(task)):
            HarborRows(tmp_path / name)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "task").symlink_to(make_task(tmp_path / "real"))
    with pytest.raises(UserError, match="is a link"):
        HarborRows(tmp_path / "linked")


def test_a_lease_contains_no_solution(tmp_path: Path) -> None:
    folder = make_task(tmp_path, **{"solution/solve.sh": "the answer"})
    assert "the answer" not in str(unpacked_files(read_task(folder)[COLUMN]["files"], "solution"))
    assert unpacked_files(read_task(folder)[COLUMN]["files"], "solution") == {}


def test_a_dockerfile_that_only_copies_needs_no_image() -> None:
    task = HarborTask("one")
    files = {name: (name.encode(), False) for name in ("a.txt", "data/b.txt", "data/c/d.txt")}

    def image(*lines: str) -> Any:
        return image_of(task, {**files, "Dockerfile": ("\n".join(lines).encode(), False)}, "bubblewrap")

    made = image("FROM ubuntu:24.04", "# why", "WORKDIR /work", "COPY . .", 'CMD ["bash"]')
    assert (made.directory, set(made.files)) == ("/work", set(files))
    assert set(image("FROM x", "COPY a.txt /app/new.txt", "COPY data/ in/").files) == {
        "new.txt",
        "in/b.txt",
        "in/c/d.txt",
    }
    assert set(image("FROM x", "WORKDIR /app/", "COPY a.txt data/b.txt ./").files) == {"a.txt", "b.txt"}
    for lines in (
        ["RUN apt-get update"],
        ["COPY --from=x a b"],
        ["COPY a.txt /etc/passwd"],
        ["COPY a.txt ../../x"],
        ["COPY nothing ."],
        ["WORKDIR /app/../etc"],
        ["ADD a.txt ."],
        ["COPY 'a.txt ."],
    ):
        with pytest.raises((UserError), match="The task one"):
            image("FROM x", *lines)
    assert image_of(task, {"a.txt": (b"", False)}, "landlock").directory == "/app"
    with pytest.raises(UserError, match="neither"):
        image_of(task, {"a.txt": (b"", False)}, "podman")
    named = image_of(HarborTask("one", image="x:1"), {"a.txt": (b"", False)}, "docker")
    assert (named.name, set(named.files or {})) == ("x:1", {"a.txt"})


@bubblewrap
@pytest.mark.parametrize(
    ("command", "reward"), [("wc -l < names.txt > answer.txt", 1.0), ("wc -w names.txt > answer.txt", 0.0)]
)
def test_the_policy_works_in_a_shell_and_the_tests_give_the_reward(
    command: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speak(prompt: str) -> str:
        return "Done." if "<|im_start|>tool" in prompt else calls(command)

    play = play_with("bubblewrap", monkeypatch)
    outcome, engine = outcome_of(play, EXAMPLES / "count-lines", speak)
    group = group_of(outcome)
    assert trained(group) == sampled(engine.heard)
    for rows, own in zip(group.by_rollout, texts(group), strict=True):
        assert [row.reward_parts for row in rows] == [{"environment": reward}]
        assert "[exit status 0]" in own[0]
        assert "tests" not in own[0]


@pytest.mark.parametrize("runtime", [pytest.param(name, marks=needs(name)) for name in IMAGES])
def test_a_prebuilt_image_is_played_in(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def made() -> str:
        container = await Containers(runtime).open(image_for(runtime), ContainerLimits())
        await container.close()
        assert isinstance(container, ImageContainer)
        return container.image

    toml = f"[environment]\ndocker_image = {json.dumps(asyncio.run(made()))}\nworkdir = '/work'\n"
    test = 'test "$(cat answer.txt)" = 3 && reward=1 || reward=0; echo $reward > /logs/verifier/reward.txt'
    task = make_task(tmp_path, toml=toml, test=test, **{"environment/names.txt": "a\nb\nc\n"})

    def speak(prompt: str) -> str:
        command = "wc -l < names.txt > answer.txt; mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.txt"
        return "Done." if "<|im_start|>tool" in prompt else calls(command)

    group = group_of(outcome_of(play_with(runtime, monkeypatch), task, speak)[0])
    assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {1.0}


@bubblewrap
def test_a_model_without_tools_writes_command_blocks_and_other_text_gets_a_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["```bash\necho one > made\n```", calls("cat made").replace("bash", "python"), calls("cat made"), "Done."]

    def speak(prompt: str) -> str:
        return said[prompt.count("<|im_start|>assistant") - 1]

    test = 'grep -q one made && echo \'{"reward": 0.25, "lines": 3}\' > "$ECHO2_ROOT/logs/verifier/reward.json"'
    play = play_with("bubblewrap", monkeypatch)
    group = group_of(outcome_of(play, make_task(tmp_path, test=test), speak)[0])
    assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {0.25}
    (text,) = texts(group)[0]
    assert "<|im_start|>user\n[exit status 0]" in text
    assert "The tool is bash" in text
    assert "<|im_start|>tool\none\n<|im_end|>" in text


@bubblewrap
@pytest.mark.parametrize(
    "command",
    [
        "tail /dev/zero",
        "yes",
        "b() { b | b & }; b; sleep 20",
        "mkdir -p $ECHO2_ROOT/logs/verifier; echo 1 > /logs/verifier/reward.txt",  # a planted reward
        "ln -sf /etc/passwd /logs/verifier; ln -s /etc /tests",
    ],
)
def test_failures_of_the_policy_cost_the_reward_only(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the reward, as any other wrong answer."""
    test = 'test -e right && reward=1 || reward=0; echo $reward > "$ECHO2_ROOT/logs/verifier/reward.txt"'
    folder = make_task(tmp_path, test=test)

    def speak(prompt: str) -> str:
        return "Done." if "<|im_start|>tool" in prompt else calls(command)

    group = group_of(outcome_of(play_with("bubblewrap", monkeypatch), folder, speak)[0])
    assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {0.0}


#: What the policy leaves for its tests to run; the tests give 0.
PLANTED = {
    "the other file": 'echo 1 > "$ECHO2_ROOT/logs/verifier/reward.json"',
    "a pipe": 'mkfifo "$ECHO2_ROOT/logs/verifier/reward.json"',
    "a device": 'ln -s /dev/zero "$ECHO2_ROOT/logs/verifier/reward.json"',
    "bytes": 'head -c 1M /dev/urandom > "$ECHO2_ROOT/logs/verifier/reward.json"',
    "itself": 'ln -s reward.json "$ECHO2_ROOT/logs/verifier/reward.json"',
    "a folder": 'mkdir "$ECHO2_ROOT/logs/verifier/reward.json"',
    "the end of the tests": "kill -9 $PPID",
    "what comes when they have written theirs": """
        (trap '' HUP; while ! grep -q 0 "$ECHO2_ROOT/logs/verifier/reward.txt"; do :; done
        echo 1 > "$ECHO2_ROOT/logs/verifier/reward.txt") 2>/dev/null &""",
    "the same, and forks all the time": """
        spin() { grep -q 0 "$ECHO2_ROOT/logs/verifier/reward.txt" && echo 1 > "$ECHO2_ROOT/logs/verifier/reward.txt"
        spin & exit; }; spin 2>/dev/null &""",
}


@bubblewrap
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_reward_that_the_tested_program_wrote_does_not_count(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = 'bash given.sh; echo 0 > "$ECHO2_ROOT/logs/verifier/reward.txt"; sleep .1'
    task = make_task(tmp_path, test=test, **{"environment/given.sh": planted})
    monkeypatch.setattr(harbor_play, "COMMAND_SECONDS", 1000.0)  # nothing waits for a pipe
    group = group_of(outcome_of(play_with("bubblewrap", monkeypatch), task, lambda prompt: "Done.")[0])
    assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {0.0}


@pytest.mark.parametrize("runtime", [pytest.param(name, marks=needs(name)) for name in ("bubblewrap", "landlock")])
def test_processes_started_by_the_tests_live_until_they_write_their_reward(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that they ask, also in a pipe, in a function, and with all of the shell's strictness."""
    test = """set -euo pipefail
        sleep 100 & server=$!
        (sleep 100 & echo $!) | { read -r other; kill -0 $other; }
        write() { echo "$1" > "${ECHO2_ROOT:-}/logs/verifier/reward.txt"; }
        write 0; write 0.5
        kill -0 $server || write 0.25"""
    group = group_of(
        outcome_of(play_with(runtime, monkeypatch), make_task(tmp_path, test=test), lambda prompt: "Done.")[0]
    )
    assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {0.5}


@bubblewrap
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the tests of this task are Python's")
def test_the_tests_do_not_begin_with_what_the_policy_left_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = "python3 -c 'import site; print(site.getusersitepackages())'"
    command = f"d=$({find}); mkdir -p $d; echo 'import os; print(1); os._exit(0)' > $d/usercustomize.py"
    test = '/usr/bin/python3 -c "print(0)" > "$ECHO2_ROOT/logs/verifier/reward.txt"'

    def speak(prompt: str) -> str:
        return "Done." if "<|im_start|>tool" in prompt else calls(command)

    outcome, _ = outcome_of(play_with("bubblewrap", monkeypatch), make_task(tmp_path, test=test), speak)
    assert {row.reward_parts["environment"] for rows in group_of(outcome).by_rollout for row in rows} == {0.0}


@bubblewrap
def test_tests_over_a_limit_give_a_wrong_answer_and_tests_without_a_reward_give_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = play_with("bubblewrap", monkeypatch)
    slow = make_task(tmp_path, "slow", TOML.replace("5", "0.5"), "sleep 100")
    hungry = make_task(tmp_path, "hungry", test="tail /dev/zero")
    for folder in (slow, hungry):
        group = group_of(outcome_of(play, folder, lambda prompt: "Done.")[0])
        assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {0.0}
    silent = make_task(tmp_path, "silent", test="echo broken; exit 2")
    failure = failure_of(outcome_of(play, silent, lambda prompt: "Done.")[0])
    assert failure.reason == "environment_failed"
    assert "wrote no reward" in failure.detail
    assert "broken" in failure.detail


@bubblewrap
def test_a_rollout_out_of_room_or_time_is_scored_in_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = play_with("bubblewrap", monkeypatch)
    outcome, _ = outcome_of(play, make_task(tmp_path), lambda prompt: calls("true"), max_turns=2)
    assert {row.reward_parts["environment"] for rows in group_of(outcome).by_rollout for row in rows} == {1.0}
    brief = make_task(tmp_path, "brief", f"{TOML}[agent]\ntimeout_sec = 0.5\n")
    outcome, _ = outcome_of(play, brief, lambda prompt: calls("sleep 100"))
    assert {row.reward_parts["environment"] for rows in group_of(outcome).by_rollout for row in rows} == {1.0}


class Slow(ScriptedEngine):
    """Answers after a second."""

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        answer = super().submit(request)

        async def later() -> Outcome:
            await asyncio.sleep(1.0)
            return await answer

        return asyncio.ensure_future(later())


@bubblewrap
def test_a_slow_model_takes_no_time_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that samples for many rollouts: they would be worth less there."""
    play = play_with("bubblewrap", monkeypatch)
    test = 'test -e made && reward=1 || reward=0; echo $reward > "$ECHO2_ROOT/logs/verifier/reward.txt"'
    row = read_task(make_task(tmp_path, "brief", f"{TOML}[agent]\ntimeout_sec = 0.5\n", test))

    async def plays(model: LoopbackModel, rng: Any) -> float:
        return await play(row, 1, model)

    def speak(prompt: str) -> str:
        return "Done." if "<|im_start|>tool" in prompt else calls("touch made")

    group = group_of(played(Slow(speak), plays, AGENTS_TOKENIZER, 4000))
    assert {row.reward_parts["environment"] for rows in group.by_rollout for row in rows} == {1.0}


@bubblewrap
def test_tests_on_a_machine_that_is_too_busy_are_no_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two programs on one processor, none has it for nine tenths of the time."""
    monkeypatch.setattr(programs, "BUSY_FACTOR", 1.1)
    before = os.sched_getaffinity(0)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        os.sched_setaffinity(other.pid, {min(before)})
        os.sched_setaffinity(0, {min(before)})
        task = make_task(tmp_path, "one", TOML.replace("5", "2"), "while :; do :; done")
        failure = failure_of(outcome_of(play_with("bubblewrap", monkeypatch), task, lambda prompt: "Done.")[0])
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.wait()
    assert failure.reason == "environment_failed"
    assert "The machine is too busy" in failure.detail


def test_a_fault_of_the_runtime_loses_the_rollout_by_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third container does not start: that is no zero."""
    opened = Containers.open
    number = iter(range(1000))

    async def broken(self: Containers, *arguments: Any) -> Any:
        if next(number) % 3 == 0:
            raise ContainerFault("podman: no space left on device")
        return await opened(self, *arguments)

    try:
        runtime = find_runtime()
    except ContainerFault as error:
        pytest.skip(str(error))
    if runtime in ("podman", "docker"):
        runtime = "bubblewrap"
    monkeypatch.setattr(Containers, "open", broken)
    outcome, _ = outcome_of(play_with(runtime, monkeypatch), make_task(tmp_path), lambda prompt: "Done.")
    if isinstance(outcome, RequestFailure):
        assert outcome.reason == "environment_failed"
        return
    assert [(one.cause, "no space left" in one.detail) for one in outcome.lost] == [("environment_failed", True)]
    assert {row.reward_parts["environment"] for rows in outcome.by_rollout for row in rows} == {1.0}


def test_rewards_are_numbers() -> None:
    assert [reward_in(text) for text in ("1\n", "0.5", '{"reward": 2, "x": 1}', '{"score": -1}')] == [
        1.0,
        0.5,
        2.0,
        -1.0,
    ]
    for text in ("", "one", "NaN", "Infinity", "true", "[1]", '{"a": 1, "b": 2}', '{"reward": "1"}', "1 2", *HOSTILE):
        with pytest.raises(ValueError):
            reward_in(text)


def test_a_row_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(b"[" * (300 << 20), 9)).decode()
    with pytest.raises(UserError, match="unpack"):
        unpacked_files(bomb, "tests")


def test_files_survive_packing() -> None:
    files = {"tests/a": (bytes(range(256)), True), "tests/ü": (b"", False), "environment/x": (b"x", False)}
    assert unpacked_files(packed_files(files), "tests") == {"a": files["tests/a"], "ü": files["tests/ü"]}
    assert packed_files(files) == packed_files(dict(reversed(files.items())))
