"""Rows from logs: each rollout at most once an epoch, what has no probabilities only where answers repeat; and prompts
made of columns."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echo2 import config
from echo2.core.errors import UserError
from echo2.tasks.base import TaskStream
from echo2.tasks.logs import MAX_ANSWERS_CHARS, LoggedRollouts
from echo2.tasks.streams import load_tasks


def write(path: Path, lines: list[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"logs:{path}"


def rollouts(prompt: Any, count: int, answers: int = 2) -> list[Mapping[str, Any]]:
    """`reward` tells them apart."""
    return [{"prompt": prompt, "completion": f"a{i % answers}", "reward": i} for i in range(count)]


def test_a_rollout_is_in_at_most_one_row_with_rollouts_of_its_kind(tmp_path: Path) -> None:
    lines = rollouts("p", 21) + rollouts("q", 3) + rollouts([{"role": "user", "content": "p"}], 8)
    rows = load_tasks(write(tmp_path / "log.jsonl", lines), {"rollouts": 4}, 0)
    assert isinstance(rows, LoggedRollouts)
    assert len(rows) == 5 + 0 + 2
    assert rows.num_left_out == 1 + 3
    seen: dict[str, list[float]] = {}
    for i in range(len(rows)):
        column = rows[i]["logged_rollouts"]
        assert len(column["rollouts"]) == 4
        assert sum(column["answers"].values()) == (21 if rows[i]["prompt"] == "p" else 8)
        seen.setdefault(str(rows[i]["prompt"]), []).extend(a["reward"] for a in column["rollouts"])
    assert [len(set(rewards)) for rewards in seen.values()] == [20, 8]
    assert seen["p"] != sorted(seen["p"])
    again, other = (load_tasks(f"logs:{tmp_path}/log.jsonl", {"rollouts": 4}, seed) for seed in (0, 1))
    assert [again[i] for i in range(7)] == [rows[i] for i in range(7)]
    assert [other[i] for i in range(7)] != [rows[i] for i in range(7)]
    task = TaskStream(rows, 0, True).task(3)
    assert set(task.columns) == {"logged_rollouts"}


def test_logged_probabilities_travel_with_the_logged(tmp_path: Path) -> None:
    whole = [{"prompt": "p", "completion": f"x{i}", "reward": 0.5, "logprob": -float(i)} for i in range(4)]
    tokens = [{"prompt": "q", "tokens": [5, i], "logprobs": [-1, -0.5], "reward": i} for i in range(4)]
    rows = load_tasks(write(tmp_path / "log.jsonl", whole + tokens), {"rollouts": 4}, 0)
    by_text = {a["completion"]: a["logprob"] for a in rows[0]["logged_rollouts"]["rollouts"]}
    assert by_text == {f"x{i}": -float(i) for i in range(4)}
    assert Counter(rows[0]["logged_rollouts"]["answers"].values()) == {1: 4}
    assert "answers" not in rows[1]["logged_rollouts"]
    assert {tuple(a["tokens"]) for a in rows[1]["logged_rollouts"]["rollouts"]} == {(5, i) for i in range(4)}


GOOD = {"prompt": "p", "completion": "a", "reward": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"completion": "a", "reward": 1}, "no 'prompt'"),
        ({"prompt": "p", "completion": "a"}, "no 'reward'"),
        ({**GOOD, "reward": "1"}, "reward = '1': expected a finite number"),
        ({**GOOD, "reward": True}, "finite number"),
        ({**GOOD, "completion": 4}, "completion = 4: expected text"),
        ({**GOOD, "logprob": 0.1}, "<= 0"),
        ({**GOOD, "logprobs": [0.0]}, r"logprobs = \[0.0\], and no tokens"),
        ({**GOOD, "tokens": [1, 2], "logprobs": [0.0]}, r"tokens = \[1, 2\], logprobs = \[0.0\]: .* one length"),
        ({**GOOD, "tokens": [-1], "logprobs": [0.0]}, r"tokens = \[-1\]: expected token ids"),
        ({**GOOD, "tokens": [1], "logprobs": ["x"]}, r"logprobs = \['x'\]: expected finite numbers"),
        ({**GOOD, "logprob": -1.0}, "some have none"),
    ],
)
def test_the_error_names_a_bad_line_of_a_log(tmp_path: Path, line: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"log.jsonl:2: .*{said}"):
        load_tasks(write(tmp_path / "log.jsonl", [GOOD, line]), {}, 0)


def test_an_infinite_reward_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"prompt": "p", "completion": "a", "reward": Infinity}\n')
    with pytest.raises(UserError, match=r"log.jsonl:1: reward = inf"):
        load_tasks(f"logs:{tmp_path}/log.jsonl", {}, 0)


def test_probabilities_are_estimated_only_where_answers_repeat(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="8 rollouts at this prompt gave 3 different answers"):
        load_tasks(write(tmp_path / "log.jsonl", rollouts("p", 8, answers=3)), {}, 0)
    assert len(load_tasks(write(tmp_path / "log.jsonl", rollouts("p", 12, answers=3)), {}, 0)) == 1
    long = {"prompt": "p", "completion": "x" * (MAX_ANSWERS_CHARS + 1), "reward": 0}
    with pytest.raises(UserError, match="no more than"):
        load_tasks(write(tmp_path / "log.jsonl", [long] * 8), {}, 0)
    rows = load_tasks(write(tmp_path / "log.jsonl", [{**long, "logprob": -9.0}] * 8), {}, 0)
    assert "answers" not in rows[0]["logged_rollouts"]


@pytest.mark.parametrize("params", [{}, {"rollouts": 5}])
def test_a_log_without_enough_rollouts_is_refused(tmp_path: Path, params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="at most 4"):
        load_tasks(write(tmp_path / "log.jsonl", rollouts("p", 4, answers=1)), params, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": {"group_size": 4}}, "Set both to the same number"),
        ({"eval": {"source": "logs:x.jsonl"}}, "cannot show what the policy does"),
    ],
)
def test_settings_that_a_log_excludes(changes: dict[str, Any], said: str) -> None:
    tasks = {"tasks": {"source": "logs:x.jsonl"}}
    config.build(tasks, "t")
    with pytest.raises(UserError, match=said):
        config.build({**tasks, **changes}, "t")


# ---- prompts made of columns -----------------------------------------------------------------------------------------


def test_a_prompt_is_made_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How {many}?", "answer": "4", "n": 2}\n')
    rows = load_tasks(str(path), {"prompt": "{{{n}}} {question}\nA: "}, 0)
    assert rows[0] == {"question": "How {many}?", "answer": "4", "n": 2, "prompt": "{2} How {many}?\nA: "}
    chat = load_tasks(str(path), {"prompt": "{question}", "chat": True}, 0)
    assert chat[0]["prompt"] == [{"role": "user", "content": "How {many}?"}]
    with pytest.raises(UserError, match=r"rows.jsonl:1: no column 'q' for the prompt \(columns: question, answer, n\)"):
        load_tasks(str(path), {"prompt": "{q}"}, 0)[0]


@pytest.mark.parametrize(
    "params",
    [
        *({"prompt": template} for template in ("{a.b}", "{0}", "{a!r}", "{a:4}", "{", 4)),
        *({"size": 3}, {"chat": True}, {"prompt": "x", "chat": "yes"}),
    ],
)
def test_a_bad_template_is_refused(tmp_path: Path, params: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": "b"}\n')
    with pytest.raises(UserError, match="prompt"):
        load_tasks(f"{tmp_path}/rows.jsonl", params, 0)
