"""The built-in rewards against hand-made answers."""

from array import array
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import UserError
from echo2.core.types import Message, Rollout, Task
from echo2.reward.functions import last_number
from echo2.reward.score import RewardFailure, Scorer
from echo2.tasks.sources import ReasoningGymRows


def rollout(text: str) -> Rollout:
    return Rollout(array("i", [1]), array("f", [0.0]), b"\x01", ((0, 0),), "stop", text)


def scores(function: str, columns: dict[str, Any], *texts: str, prompt: Any = "?") -> list[float | None]:
    scored = Scorer([function]).score_each(Task(0, prompt, columns), [rollout(text) for text in texts])
    return [one.reward for one in scored]


def test_exact_match() -> None:
    assert scores("exact_match", {"answer": " 1359"}, "1359\n", "13 59", "", "1359.") == [1.0, 0.0, 0.0, 0.0]
    assert scores("exact_match", {"answer": 7}, "7", "8") == [1.0, 0.0]


def test_chat_completions_are_read_too() -> None:
    assert scores("exact_match", {"answer": "yes"}, "yes", "no", prompt=(Message("user", "?"),)) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("#### 1,234,567", "1234567"),
        ("$1,234.50", "1234.5"),
        ("12,34", "34"),
        ("it is -5", "-5"),
        ("10-3", "3"),
        ("it is \u22125", "-5"),
        ("10\u22123", "3"),
        ("(2) -3", "-3"),
        ("x = .5", "0.5"),
        ("1e3 m", "1000"),
        ("2.50", "2.5"),
        ("v1.2.3", "3"),
        ("none", None),
        ("", None),
        ("-", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.text())
def test_last_number_reads_any_text(text: str) -> None:
    last_number(text)


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=3), st.text(st.characters(categories=["L", "Zs"])))
def test_a_number_at_the_end_is_found(number: Decimal, words: str) -> None:
    assert last_number(f"{words} {number:,}") == number


def test_numeric_match() -> None:
    assert scores("numeric_match", {"answer": "9 * 8 = #### 72"}, "72.0 it is", "27", "") == [1.0, 0.0, 0.0]
    with pytest.raises(RewardFailure, match="numeric_match finds no number in the column 'answer': 'none'"):
        scores("numeric_match", {"answer": "none"}, "1")


def test_math() -> None:
    pytest.importorskip("math_verify")
    texts = ("The answer is $\\frac{2}{4}$.", "so \\boxed{0.5}", "\\boxed{2}", "no idea")
    for answer in ("1/2", "\\frac{1}{2}", "$\\frac12$"):
        assert scores("math", {"answer": answer}, *texts) == [1.0, 1.0, 0.0, 0.0]


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    row = dict(ReasoningGymRows("number_sorting", {}, 0)[3])
    prompt, answer = row.pop("prompt"), row["answer"]
    texts = (answer, f"Let me think. <answer>x</answer> No: <answer> {answer} </answer>", "<answer>[]</answer>", "zzz")
    right, tagged, wrong, nonsense = scores("reasoning_gym", row, *texts, prompt=prompt)
    assert (right, tagged) == (1.0, 1.0)
    assert wrong is not None
    assert wrong < 1.0
    assert nonsense == 0.0


def test_the_error_names_missing_and_null_columns() -> None:
    with pytest.raises(
        RewardFailure, match=r"exact_match takes 'answer', a column that this task lacks \(it has \['reply'\]\)"
    ):
        scores("exact_match", {"reply": "1"}, "1")
    with pytest.raises(RewardFailure, match="null in the column 'answer'"):
        scores("exact_match", {"answer": None}, "None")


def test_the_error_about_a_misspelt_reward_suggests_its_name() -> None:
    with pytest.raises(UserError, match=r"no reward 'exact_mach'. Did you mean exact_match\?"):
        Scorer(["exact_mach"])


def test_an_environments_reward_is_what_it_gave() -> None:
    parts = [replace(rollout("ab"), reward_parts={"environment": part}) for part in (0.5, 2.0)]
    task = Task(0, "level", {"answer": "ab"})
    scored = Scorer(["2.0 * environment", "exact_match"]).score_each(task, parts)
    assert [(r.reward, dict(r.reward_parts)) for r in scored] == [
        (2.0, {"environment": 0.5, "exact_match": 1.0}),
        (5.0, {"environment": 2.0, "exact_match": 1.0}),
    ]
    assert [r.reward for r in Scorer(["exact_match"]).score_each(task, parts)] == [1.0, 1.0]
    with pytest.raises(UserError, match=r"tasks\.environment"):
        Scorer(["environment"]).score_each(task, [parts[0], rollout("ab")])
