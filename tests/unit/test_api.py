"""The Python API without processes: functions of a session as files, settings, rows, models, and reading a run."""

from __future__ import annotations

import functools
import json
import linecache
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import echo2
from echo2 import config
from echo2.api.inputs import named_code, sections, write_resumed, write_run
from echo2.config import Config
from echo2.config.rundir import STOP_WORDS, create
from echo2.core.child import ChildProcess
from echo2.core.errors import Echo2Error, UserError
from echo2.reward.functions import exact_match
from echo2.reward.score import Scorer
from echo2.sandbox.plugins import load_named
from echo2.tasks.environments import load_environment

ROWS = [{"prompt": f"{number}=", "answer": str(number)} for number in range(4)]


def session(name: str, text: str) -> dict[str, Any]:
    """What a cell of a notebook defines: its module has no file, its source is where ipykernel puts it."""
    file = f"<cell {name}>"
    module = ModuleType("__main__")
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__


CELL = """
import re
import statistics as stats
from functools import lru_cache
from typing import Any

PATTERN = re.compile("[0-9]+", re.ASCII)
SCALE = {"right": 2.0, "wrong": -1.0}
model = object()

class Wrong(ValueError):
    pass

@lru_cache
def first_number(text: str) -> str:
    found = PATTERN.search(text)
    if not found:
        raise Wrong(text)
    return found.group()

def score(completions: list[str], answer, **columns: Any) -> "list[float]":
    scores = []
    for text, wanted in zip(completions, answer):
        try:
            scores.append(SCALE["right"] if first_number(text) == wanted else SCALE["wrong"])
        except Wrong:
            scores.append(stats.mean([0.0, -4.0]))
    return scores
"""


def test_a_function_of_a_notebook_scores_in_another_process(tmp_path: Path) -> None:
    names = session("score", CELL)
    spec = named_code(names["score"], tmp_path)
    score = load_named(spec)
    assert score(["7", "8", "?"], ["7", "9", "1"]) == [2.0, -1.0, -2.0]
    text = (tmp_path / "score.py").read_text()
    assert "model" not in text  # it is not used
    assert Scorer([spec]).is_async is False


def outer(offset: float, more: Callable[[float], float]) -> Callable[..., list[float]]:
    def shifted(completions: Sequence[str], **_: Any) -> list[float]:
        def one(text: str) -> float:
            return more(len(text) + offset)

        return [one(text) for text in completions]

    return shifted


def twice(value: float) -> float:
    return 2 * value


def test_a_closure_keeps_its_values(tmp_path: Path) -> None:
    shifted = load_named(named_code(outer(0.5, twice), tmp_path))
    assert shifted(["", "abc"]) == [1.0, 7.0]


def test_a_function_of_a_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "own_scores.py").write_text(
        "from own_words import WORD\ndef f(completions): return [WORD]\n"
    )
    (tmp_path / "elsewhere" / "own_words.py").write_text("WORD = 3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    import own_scores  # type: ignore[import-not-found]

    spec = named_code(own_scores.f, tmp_path)
    monkeypatch.undo()
    for name in ("own_scores", "own_words"):
        del sys.modules[name]
    assert load_named(spec)([""]) == [3.0]
    assert named_code(exact_match, tmp_path).endswith("exact_match.py:exact_match")
    assert named_code("math", tmp_path) == "math"


ENVIRONMENT = '''
from dataclasses import dataclass

@dataclass
class Answer:
    text: str
    reward: float = 0.0
    def both(self): return self.text, self.reward

class Base:
    stop = "."
    def __init__(self, columns, seed):
        self.columns, self.seed = columns, seed

class Guess(Base):
    """Higher or lower."""

    limit: int = 3

    def step(self, action: str):
        said = Answer("right", 1.0) if action == self.columns["answer"] else Answer("wrong")
        return (*said.both(), said.reward > 0)

def untyped(missing: "Missing"):
    return missing
'''


def test_an_environment_of_a_notebook(tmp_path: Path) -> None:
    spec = named_code(session("guess", ENVIRONMENT)["Guess"], tmp_path)
    kind = load_environment(spec)
    assert kind.stop == "."
    assert kind({"answer": "4"}, 0).step("4") == ("right", 1.0, True)
    assert kind({"answer": "4"}, 0).step("5") == ("wrong", 0.0, False)


class Judge:
    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [0.0 for _ in completions]


JUDGE = Judge()


def judged(completions: Sequence[str]) -> list[float]:
    return JUDGE(completions)


def test_the_error_names_the_value_that_cannot_be_stored(tmp_path: Path) -> None:
    unfit: list[tuple[Any, str]] = [
        (lambda completions: [0.0], "no name of its own"),
        (functools.partial(twice, 1.0), "no name of its own"),
        (JUDGE, "no name of its own"),
        (outer(0.0, JUDGE), "shifted uses 'more', Judge, which is not a plain value. Make it inside the function"),
        (
            session("undefined", "def f(completions): return nothing(completions)\n")["f"],
            "'nothing', which is not defined",
        ),
    ]
    names: dict[str, Any] = {}
    exec("def typed(completions): return [0.0]", names)
    unfit.append((names["typed"], "The source of typed cannot be read"))
    for thing, message in unfit:
        with pytest.raises(UserError, match=re.escape(message)):
            named_code(thing, tmp_path)


def test_settings_by_name_or_section() -> None:
    assert sections({"lr": 1e-5, "eval": {"every": 5}, "limit": 8, "max_tokens": 4}) == {
        "learner": {"lr": 1e-5},
        "eval": {"every": 5, "limit": 8},
        "sampling": {"max_tokens": 4},
    }
    for wrong, message in (
        ({"learning_rte": 1}, "There is no setting 'learning_rte'"),
        ({"price_usd_per_hour": 1}, 'Write learner={"price_usd_per_hour": ...} or workers={'),
        ({"workers": 2}, "workers is a section: give its keys, workers={...}"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            sections(wrong)


class Saved:
    """A model or a tokenizer: what `save_pretrained` is all about."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save_pretrained(self, directory: str) -> None:
        Path(directory).mkdir(exist_ok=True)
        (Path(directory) / self.name).write_text("{}")


def written(folder: Path, **given: Any) -> Config:
    arguments = {"model": "model", "tasks": ROWS, "reward": twice, "heldout": None, "environment": None, "settings": {}}
    return config.load(write_run(folder, **(arguments | given)))


def test_python_values_become_a_configuration(tmp_path: Path) -> None:
    found = written(
        tmp_path / "inputs",
        model=(Saved("config.json"), Saved("tokenizer.json")),
        reward={twice: 0.5, "exact_match": 1},
        heldout={"easy": iter(ROWS[:1]), "built in": "digit_sorting"},
        settings={"lr": 1e-4, "tasks": {"params": {"chat": True}}},
    )
    folder = tmp_path / "inputs"
    assert folder.stat().st_mode & 0o077 == 0
    assert {path.name for path in (folder / "model").iterdir()} == {"config.json", "tokenizer.json"}
    assert found.model.path == str(folder / "model")
    assert found.reward.functions == [f"0.5 * {folder}/twice.py:twice", "1 * exact_match"]
    assert [json.loads(line) for line in Path(str(found.tasks.source)).read_text().splitlines()] == ROWS
    assert found.eval.source == {"easy": f"{folder}/heldout-0.jsonl", "built in": "digit_sorting"}
    assert (found.learner.lr, found.tasks.params) == (1e-4, {"chat": True})


def test_a_dataset_of_hugging_face_is_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = written(tmp_path, tasks=datasets.Dataset.from_list(ROWS))
    assert [json.loads(line) for line in Path(str(found.tasks.source)).read_text().splitlines()] == ROWS


def test_an_environment_has_its_own_reward(tmp_path: Path) -> None:
    found = written(tmp_path, reward=(), environment=session("guess", ENVIRONMENT)["Guess"])
    assert found.reward.functions == ["environment"]
    assert found.tasks.environment == f"{tmp_path}/Guess.py:Guess"


def test_a_teacher_replaces_a_reward(tmp_path: Path) -> None:
    settings = {"teacher": tmp_path / "large", "advantage": "none"}
    made = config.load(write_run(tmp_path, "model", ROWS, [], None, None, settings))
    assert made.distill.teachers == {"": str(tmp_path / "large")}
    assert made.reward.functions == []


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    for given, message in (
        ({"tasks": ["a", {"prompt": "b"}]}, "Row 0 of tasks is 'a'"),
        ({"tasks": 3}, "tasks = 3: give rows"),
        ({"tasks": [{"prompt": "b", "x": {1}}]}, "Row 0 of tasks: column 'x' = {1} cannot be sent as JSON"),
        (
            {"tasks": [*ROWS, {"prompt": None}]},
            "Row 4 of tasks: 'prompt' must be text or a list of chat messages, got N",
        ),
        ({"tasks": [{"question": "b", "x": {1}}]}, "Row 0 of tasks is not JSON"),
        ({"heldout": [{"prompt": " "}]}, "Row 0 of heldout: 'prompt' is empty"),
        ({"heldout": {"easy": ROWS, "hard": [3]}}, "Row 0 of heldout['hard'] is 3"),
        ({"model": Saved("config.json")}, "model=(model, tokenizer)"),
        ({"settings": {"lr": "fast"}}, "learner.lr = 'fast'"),
        ({"settings": {"tasks": {"source": "x"}}}, "tasks.source is given twice"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            written(tmp_path, **given)


def made_run(path: Path) -> echo2.Run:
    rundir = create(path, Config(), resume=False)
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75, "eval/accuracy": 0.5},
    ]
    rundir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = {
        "group": 3,
        "worker": "w-1",
        "prompt": "4=",
        "rollouts": [{"text": "4", "reward": 1.0}, {"text": "5", "reward": 0.0}],
    }
    (rundir.rollouts / "step_2.jsonl").write_text(json.dumps(group) + "\n" + '{"group": 4, "wor')
    rundir.outcome.write_text(json.dumps({"kind": "finished", "reason": "all steps are trained"}))
    return echo2.load(path)


def test_a_run_is_read(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert (run.accuracy, [row["step"] for row in run.metrics()]) == (0.5, [0, 1, 2])
    assert [(one["prompt"], one["text"], one["group"]) for one in run.rollouts()] == [("4=", "4", 3), ("4=", "5", 3)]
    with pytest.raises(UserError, match="no rollouts of step 7"):
        run.rollouts(7)
    assert [line.get_label() for line in run.plot().axes[0].lines] == ["reward", "held-out reward"]
    assert run.wait() is run  # it is over
    run.stop()  # likewise
    with pytest.raises(UserError, match="no config"):
        echo2.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason", "status", "error"),
    [
        ("finished", "all steps are trained", 0, None),
        ("stopped", STOP_WORDS[signal.SIGINT], 130, None),
        ("stopped", STOP_WORDS[signal.SIGTERM], 130, None),
        ("stopped", "8 groups failed in a row; the last: reward raised", 2, UserError),
        ("stopped", "the budget of $5 is spent", 2, UserError),
        ("user_error", "no such file", 2, UserError),
        ("failed", "learner died 5 times in a row", 1, Echo2Error),
    ],
)
def test_a_run_that_failed_raises_as_the_command_exits(
    tmp_path: Path, kind: str, reason: str, status: int, error: type[Echo2Error] | None
) -> None:
    run = made_run(tmp_path / "run")
    run.rundir.outcome.write_text(json.dumps({"kind": kind, "reason": reason}))
    (run.rundir.logs / "run.log").write_text(f"error: {reason}\n" if error else "")
    log = (run.rundir.logs / "run.log").read_text()
    code = f"print({log!r}, end=''); raise SystemExit({status})"
    command = ChildProcess([sys.executable, "-c", code], log_path=run.rundir.logs / "run.log")
    command.wait()
    for ended in (run, echo2.Run(run.path, command)):  # of another session, and of this one
        if error is None:
            assert ended.wait() is ended
        else:
            with pytest.raises(error, match=re.escape(reason)) as caught:
                ended.wait()
            assert type(caught.value) is error


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    rundir = create(tmp_path / "run", Config(), resume=False)
    found = config.load(write_resumed(rundir, {"max_steps": 7, "learner": {"loss_params": {"tv_low": 0.1}}}))
    assert (found.run.max_steps, found.learner.loss_params) == (7, {"tv_low": 0.1})
    assert found.model == Config().model


def test_a_directory_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already"):
        echo2.start("model", ROWS, twice, out=tmp_path / "run")
    assert not (tmp_path / "run" / "inputs").exists()


def test_a_mistaken_call_makes_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "inputs").mkdir(parents=True)
    kept = tmp_path / "mine" / "inputs" / "rows.txt"
    kept.write_text("of mine")
    for out in (None, "new", "mine"):
        with pytest.raises(UserError, match="There is no setting 'learning_rte'"):
            echo2.start("model", ROWS, twice, out=out, learning_rte=1.0)
        with pytest.raises(UserError, match="Row 1 of tasks is 3"):
            echo2.start("model", [ROWS[0], 3], twice, out=out)  # type: ignore[list-item]
    with pytest.raises(UserError, match=re.escape("model.path = './no-model': there is no such directory")):
        echo2.start("./no-model", ROWS, twice, out="new")  # `echo2 run` finds it
    assert kept.read_text() == "of mine"
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "outputs").iterdir()) == []


def test_an_unknown_attribute_of_the_package_raises() -> None:
    assert {"train", "start", "load", "Run"} <= set(dir(echo2))
    with pytest.raises(AttributeError, match="tain"):
        echo2.tain  # noqa: B018
