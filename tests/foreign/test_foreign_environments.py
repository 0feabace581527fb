"""verifiers v1 and OpenEnv, in Pythons of their own (`make verifiers`, `make openenv`); skipped without, saying why."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, RolloutGroup, SamplingParams, Snapshot, SnapshotRef, Task
from echo2.engines.engine import RequestFailure
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.rollouts.generate import assignment_of, sample_group
from echo2.rollouts.harness import HarnessEnvironment
from echo2.sandbox.plugins import own_python
from echo2.tasks.harness_process import HarnessProcess
from echo2.tasks.streams import load_tasks
from real_runs import REPOSITORY

pytestmark = pytest.mark.timeout(240)

# Two turns: a letter is asked for, and again. The letter "!" is out of order; "#" is rewarded by the number of clients.
LETTERS = """
import asyncio
import gc
import verifiers.v1 as vf

class LettersData(vf.TaskData):
    letter: str

class LettersTask(vf.Task[LettersData]):
    pass

class LettersConfig(vf.TasksetConfig):
    letters: str = "ab"

class LettersEnvConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    reader: vf.AgentConfig = vf.AgentConfig()

class LettersEnv(vf.Env[LettersEnvConfig]):
    async def run(self, task, agents):
        if task.data.letter == "!":
            raise ValueError("this letter is out of order")
        if task.data.letter == "~":
            await asyncio.sleep(1000)
        async with agents.writer.interaction(task) as writer, agents.reader.interaction(task) as reader:
            for turn in range(2):
                segment = await writer.turn(f"write {task.data.letter} now")
                await reader.turn("read it")
        clients = [each for each in gc.get_objects() if type(each).__name__ == "EvalClient"]
        writer.trace.record_reward("letters", len(clients) if task.data.letter == "#" else 0.25)

class Letters(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        for letter in self.config.letters:
            yield LettersTask(LettersData(prompt=None, letter=letter), self.config.task)

__all__ = ["Letters", "LettersEnv"]
"""
COUNTDOWN = """
import sys
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Left(Observation):
    text: str = ""

class Countdown(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.left = 0

    def reset(self, seed=None, episode_id=None, left=2, **_):
        self.left = left
        return Left(text=f"{self.left} left", done=False, reward=0.0)

    def step(self, action, **_):
        self.left -= 1
        return Left(text=f"{self.left} left", done=self.left == 0, reward=0.5)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Countdown, Said, Left, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
TEMPLATE = (
    b"{% for m in messages %}{{ m.role[0] }}={{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
OPENING = b"{% if add_generation_prompt %}a={% endif %}"


def foreign(package: str) -> str:
    """The package's Python, or skip."""
    os.chdir(REPOSITORY)  # where `make` puts it
    try:
        return own_python(package)
    except UserError as error:
        pytest.skip(str(error))


def taskset(name: str) -> None:
    """Skip where a taskset of verifiers' repository is not installed."""
    if subprocess.run([foreign("verifiers"), "-c", f"import {name}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{name} is not installed: `make verifiers` could not fetch it from its repository")


def play(model: Path, spec: str, rows: list[Mapping[str, Any]], seconds: float = 60.0) -> list[Any]:
    """A group of four rollouts at each row."""
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".jinja")}
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "max_position_embeddings": 9000}).encode()
    files["chat_template.jinja"] = TEMPLATE + OPENING
    tokenizer = load_tokenizer(files)

    async def scene() -> list[RolloutGroup | RequestFailure]:
        engine = make_engine("fake", "cpu", 64)
        await engine.update_weights(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), {}, files))
        environment = HarnessEnvironment(HarnessProcess(spec))
        await environment.start()

        def group(at: int) -> Any:
            lease = Lease(at + 1, GroupRef(RUN_POLICY, "train", at), 0, at, 4, 0, None, 9e9, seconds, 7 + at)
            task = Task(at, rows[at]["prompt"], {name: rows[at][name] for name in rows[at] if name != "prompt"})
            leased = assignment_of(lease, task, array("i", [1]), SamplingParams(max_tokens=4000), spec, 8)
            return sample_group(engine, tokenizer, leased, "w", {spec: environment})

        try:
            return await asyncio.gather(*(group(at) for at in range(len(rows))))
        finally:
            await environment.close()
            await engine.close()

    return asyncio.run(scene())


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A taskset that verifiers finds."""
    foreign("verifiers")
    (tmp_path / "letters_taskset.py").write_text(LETTERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("letters")
def test_a_verifiers_taskset_is_played_and_what_fails_costs_its_group(sort_model: Path) -> None:
    rows = load_tasks("verifiers:letters_taskset", {"letters": "zab!~c", "first": 1, "agent": "writer"}, 0)
    assert len(rows) == 5
    outcomes = play(sort_model, "verifiers", [rows[at] for at in range(5)], seconds=60.0)
    lost = [isinstance(outcome, RequestFailure) for outcome in outcomes]
    assert lost == [False, False, True, True, False], outcomes
    assert "out of order" in outcomes[2].detail
    assert "took longer than 60 s" in outcomes[3].detail
    for outcome in (outcomes[0], outcomes[1], outcomes[4]):
        for rollout in outcome.rollouts:
            assert rollout.reward_parts == {"environment": 0.25}
            assert 1 + rollout.loss_mask.count(b"\x00\x01") == 2  # the writer's two turns, none of the reader's


@pytest.mark.usefixtures("letters")
def test_verifiers_keeps_one_client_however_many_rollouts_there_are(sort_model: Path) -> None:
    rows = load_tasks("verifiers:letters_taskset", {"letters": "ab#", "agent": "writer"}, 0)
    *_, counted = play(sort_model, "verifiers", [rows[at] for at in range(3)])
    assert isinstance(counted, RolloutGroup), counted
    assert {rollout.reward_parts["environment"] for rollout in counted.rollouts} == {1.0}


@pytest.mark.usefixtures("letters")
def test_the_error_names_what_verifiers_cannot_load() -> None:
    with pytest.raises(UserError, match="no_such_taskset"):
        load_tasks("verifiers:no_such_taskset", {}, 0)
    with pytest.raises(UserError, match="lettres"):
        load_tasks("verifiers:letters_taskset", {"lettres": "ab"}, 0)
    with pytest.raises(UserError, match="first = -1"):
        load_tasks("verifiers:letters_taskset", {"first": -1}, 0)


def test_a_taskset_of_the_verifiers_repository_is_played(sort_model: Path) -> None:
    """Kuhn poker, two seats by turns, both of them the policy."""
    taskset("kuhn_poker")
    rows = load_tasks("verifiers:kuhn_poker", {"size": 3, "agent": "player0"}, 0)
    for outcome in play(sort_model, "verifiers", [rows[at] for at in range(3)]):
        assert isinstance(outcome, RolloutGroup), outcome
        assert {rollout.reward_parts["environment"] for rollout in outcome.rollouts} <= {-2.0, -1.0, 1.0, 2.0}


@contextmanager
def served(script: Path) -> Iterator[str]:
    """An OpenEnv environment, by a script that takes a port; where it is."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([foreign("openenv"), str(script), str(port)]) as server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def countdown(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "countdown.py").write_text(COUNTDOWN)
    with served(tmp_path / "countdown.py") as url:
        yield url


def test_an_openenv_environment_is_played(sort_model: Path, countdown: str) -> None:
    columns = {"action": "message", "observation": "text", "prompt_text": "count: "}
    rows = [{"prompt": "-", "reset": {"left": left}, **columns} for left in (1, 3)]
    short, long = play(sort_model, f"openenv:{countdown}", rows)
    for outcome, turns in ((short, 1), (long, 3)):
        assert isinstance(outcome, RolloutGroup), outcome
        for rollout in outcome.rollouts:
            assert rollout.reward_parts == {"environment": 0.5 * turns}
            assert 1 + rollout.loss_mask.count(b"\x00\x01") == turns


def test_an_openenv_server_that_is_not_there_costs_its_groups(sort_model: Path) -> None:
    foreign("openenv")
    (outcome,) = play(sort_model, "openenv:http://127.0.0.1:9", [{"prompt": "-"}])
    assert isinstance(outcome, RequestFailure)
    assert outcome.reason == "environment_failed"


def trained(name: str, model: Path, out: Path, *settings: str) -> dict[str, Any]:
    """The summary of an example's run, as a user starts it."""
    command = [sys.executable, "-m", "echo2", "run", f"examples/{name}.toml", "--out", str(out), "--json"]
    words = ["--model.path", str(model), "--workers.count", "1", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["groups"]["trained"] == summary["groups"]["issued"] == 16 * summary["steps"]
    assert summary["groups"]["retired"] == {}
    return summary


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_learns_in_an_openenv_environment(sort_model: Path, tmp_path: Path) -> None:
    """About .25 to .58 of the held-out tasks, in 40 steps."""
    foreign("openenv")
    model = tmp_path / "model"
    shutil.copytree(sort_model, model)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    with served(REPOSITORY / "examples" / "openenv" / "server.py") as url:
        summary = trained("openenv", model, tmp_path / "run", "--tasks.environment", f"openenv:{url}")
    assert summary["eval_after"] > summary["eval_before"] + 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_learns_on_a_verifiers_taskset(tmp_path: Path) -> None:
    """The taskset is verifiers' own; only its words are ours."""
    taskset("reverse_text")
    model, words = tmp_path / "model", tmp_path / "words"
    script = REPOSITORY / "examples" / "reverse_text" / "build_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(model), "--data", str(words)], check=True)
    train = f'{{dataset_name = "{words}", size = 512}}'
    held_out = f'{{dataset_name = "{words}", dataset_split = "test", size = 128}}'
    summary = trained("reverse_text", model, tmp_path / "run", "--tasks.params", train, "--eval.params", held_out)
    assert summary["eval_after"] > summary["eval_before"] + 0.05
