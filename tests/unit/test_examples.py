"""Every example loads: its settings are allowed, its tasks can be read, its rewards give the right answer full marks.

Running them, with processes and a model, is an integration test's part.
"""

import importlib.util
import random
from array import array
from pathlib import Path

import pytest

from echo2 import config
from echo2.config.values import weighted
from echo2.core.types import Rollout
from echo2.reward.judge_words import question
from echo2.reward.score import Scorer
from echo2.tasks.base import TaskStream
from echo2.tasks.environments import LocalEnvironment
from echo2.tasks.streams import load_tasks

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
#: Machines, a service, and what needs a Python of its own (tests/foreign/test_foreign_environments.py runs it).
OTHERS = ("offers", "serve", "openenv", "reverse_text")
PATHS = [
    REPOSITORY / "src" / "echo2" / "demo" / "sort.toml",
    *sorted(path for path in EXAMPLES.glob("*.toml") if path.stem not in OTHERS),
    *sorted((EXAMPLES / "smollm").glob("*.toml")),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that looks like the repository's root after `python examples/make_data.py`."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "examples").symlink_to(EXAMPLES)
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLES / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    make_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_data)
    make_data.make_data(root / "outputs" / "data")
    return root


def test_every_way_has_an_example() -> None:
    ways = {
        "sort",
        "jsonl",
        "parquet",
        "hf_dataset",
        "reasoning_gym",
        "own_class",
        "trl_reward",
        "verl_reward",
        "dials",
        "knights_knaves",
        "grade_school_maths",
        "poker",
        "sokoban",
        "own_environment",
    }
    assert ways | {"chat"} <= {path.stem for path in PATHS}


@pytest.mark.parametrize("path", sorted((EXAMPLES / "gpu").glob("*.toml")), ids=lambda path: path.stem)
def test_configurations_for_larger_machines_load(path: Path) -> None:
    settings = config.load(path)
    Scorer(settings.reward.functions)
    assert settings.tasks.source.startswith("hub:")


def test_the_example_of_a_judge_shows_it_the_right_answer(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    settings = config.load(Path("examples/judge.toml"))
    task = TaskStream(load_tasks(settings.tasks.source, settings.tasks.params, 0), 0, True).task(0)
    assert settings.reward.judge_config is not None
    asked = question(settings.reward.judge_config.rubric, task, ["x"])
    assert task.columns["answer"] in asked[0]["content"]


@pytest.mark.parametrize("name", ["sokoban", "own_environment"])
def test_example_can_be_played(name: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    settings = config.load(Path(f"examples/{name}.toml"))
    assert settings.reward.functions == ["environment"]
    tasks = TaskStream(load_tasks(settings.tasks.source, settings.tasks.params, 0), 0, True)
    environment, rng, solved = LocalEnvironment(settings.tasks.environment), random.Random(0), 0
    for cursor in range(40):
        attempt = environment.begin(tasks.task(cursor).columns, seed=cursor)
        for _ in range(settings.sampling.max_turns):
            reply = environment.step(attempt, rng.choice({"sokoban": "lr", "own_environment": "123456789"}[name]))
            if reply.done:
                assert reply.reward == 1.0
                solved += 1
                break
    assert 0 < solved < 40


# A log's rollouts are right or wrong already (test_examples_poker.py looks at them); others are played, as above.
# A judge is asked in test_judge_real.py, shells are worked in by test_tasks_harbor.py and test_examples_own_shell.py,
# and an agent plays in test_agents.py.
NOT_ANSWERED = ("poker", "sokoban", "own_environment", "own_shell", "calculator", "terminal", "judge", "agents")
ANSWERED = [path for path in PATHS if path.stem not in NOT_ANSWERED]
NAMES = [str(path.relative_to(path.parents[1]).with_suffix("")) for path in ANSWERED]


@pytest.mark.parametrize("path", ANSWERED, ids=NAMES)
def test_example_is_whole(path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    settings = config.load(path)
    tasks = TaskStream(load_tasks(settings.tasks.source, settings.tasks.params, 0), 0, shuffle=True)
    scorer = Scorer(settings.reward.functions)
    for cursor in range(8):
        task = tasks.task(cursor)
        answer = task.columns.get("answer") or task.columns["reward_model"]["ground_truth"]
        right, wrong = scorer.score_each(task, [attempt(str(answer)), attempt("zzz")])
        assert right.reward == pytest.approx(sum(weight for weight, _ in map(weighted, settings.reward.functions)))
        assert wrong.reward == 0.0
    if settings.eval.source:
        held_out = TaskStream(load_tasks(settings.eval.source, settings.eval.params, 0), 0, False)
        trained_on = {tasks.task(cursor).prompt for cursor in range(64)}
        assert not trained_on & {held_out.task(i).prompt for i in range(min(8, len(held_out)))}


def attempt(text: str) -> Rollout:
    return Rollout(array("i", [1]), array("f", [0.0]), b"\x01", ((0, 0),), "stop", text)
