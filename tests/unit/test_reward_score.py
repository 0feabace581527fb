"""Loading the user's reward functions, both styles, and everything they can do wrong."""

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import UserError
from echo2.core.types import Message, Rollout, Task
from echo2.reward.score import RewardFailure, Scorer
from echo2.transport.limits import REWARD_MAX

OWN = """
import numpy as np, re
seen = {}
def trl(completions, answer, prompts=None, **columns):
    seen.update(columns, prompts=prompts, completions=completions)
    return [float(c == a) for c, a in zip(completions, answer)]
def few(completions, completion_ids):
    return [len(ids) for ids in completion_ids]
def chat(prompts, completions, **kw):
    return [len(p) + (c[0]["role"] == "assistant") * len(c[0]["content"]) for p, c in zip(prompts, completions)]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    extra_info["touched"] = extra_info.get("touched", 0) + 1
    return {"score": float(solution_str == ground_truth and data_source == "gsm8k") * extra_info["touched"], "acc": 1}
def verl_dict(data_source, solution_str, ground_truth, extra_info):
    right = solution_str == ground_truth
    return {"score": float(right), "length": len(solution_str), "right": right, "why": "text", "odd": float("nan")}

def verl_short(solution_str, ground_truth):
    return solution_str == ground_truth
def writes(completions, tags):
    for tag in tags:
        tag.append(1)
    return [float(len(tag)) for tag in tags]
def array_of(completions, **kw): return np.ones(len(completions), dtype=np.float32)
def none(completions, **kw): return [None] * len(completions)
def sometimes(completions, **kw): return [1.0 if c == "a" else None for c in completions]
def nan_of_b(completions, **kw): return [float("nan") if c == "b" else 1.0 for c in completions]
def raises(completions, **kw): raise KeyError("oops")
def nan(completions, **kw): return [float("nan")] * len(completions)
def inf(completions, **kw): return [float("inf")] * len(completions)
def huge(completions, **kw): return [10**400] * len(completions)
def big(completions, **kw): return [-1e12] * len(completions)
def short(completions, **kw): return [1.0]
def text(completions, **kw): return ["1.0"] * len(completions)
def number(completions, **kw): return 1.0
def nothing(completions, **kw): pass
def takes_text(completions, **kw): return [float(c.strip() == "a") for c in completions]
def searches(completions, **kw): return [float(re.search("a", c) is not None) for c in completions]
def takes_chat(completions, **kw): return [float(c[0]["content"] == "a") for c in completions]
def other(completions, **kw): return [float(len(3)) for c in completions]
def strange(data): return 1.0
not_callable = 3
class Judge:
    def __call__(self, completions, **kw): return [0.5] * len(completions)
judge = Judge()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def rollouts(*texts: str) -> list[Rollout]:
    return [
        Rollout(array("i", range(len(t))), array("f", [0.0] * len(t)), b"\x01" * len(t), ((0, 0),), "stop", t)
        for t in texts
    ]


def rewards(entries: list[str], task: Task, *texts: str) -> list[float | None]:
    """The rewards; raises the failure of the first rollout that has one."""
    found = []
    for scored in Scorer(entries).score_each(task, rollouts(*texts)):
        if isinstance(scored, RewardFailure):
            raise scored
        found.append(scored.reward)
    return found


def test_trl_style_gets_columns_as_lists(own: str) -> None:
    task = Task(0, "sort", {"answer": "ab", "level": 3})
    assert rewards([f"{own}:trl"], task, "ab", "ba") == [1.0, 0.0]
    from echo2.sandbox.plugins import load_named

    assert load_named(f"{own}:seen") == {
        "level": [3, 3],
        "prompts": ["sort", "sort"],
        "completions": ["ab", "ba"],
        "completion_ids": [[0, 1], [0, 1]],
    }


def test_trl_style_gets_only_what_it_takes(own: str) -> None:
    assert rewards([f"{own}:few"], Task(0, "x", {"answer": "ab"}), "ab", "abc", "") == [2.0, 3.0, 0.0]


def test_trl_style_chat(own: str) -> None:
    task = Task(0, (Message("system", "s"), Message("user", "u")), {})
    assert rewards([f"{own}:chat"], task, "abc") == [5.0]


def test_other_return_values_of_a_verl_function_are_kept_without_weight(own: str) -> None:
    (scored,) = Scorer([f"0.5 * {own}:verl_dict"]).score_each(Task(0, "x", {"ground_truth": "2"}), rollouts("2"))
    assert scored.reward == 0.5
    assert scored.reward_parts == {"verl_dict": 1.0, "verl_dict.length": 1.0, "verl_dict.right": 1.0}


SCALARS = ("np.bool_(True)", "np.float16(1)", "np.array(1)", "torch.tensor(1.0)", "torch.tensor(True)", "Decimal(1)")


@pytest.mark.parametrize("scalar", SCALARS)
def test_scores_may_be_scalars_of_any_library(scalar: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np, torch\nfrom decimal import Decimal\n"
        f"def listed(completions): return [{scalar} for _ in completions]\n"
        f"def verl(solution_str, ground_truth): return {scalar}\n"
        "def fields(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return {{'score': {scalar}, 'part': {scalar}, 'pair': np.ones(2), 'text': '1.0'}}\n"
    )
    entries = [f"{tmp_path}/own.py:{name}" for name in ("listed", "verl", "fields")]
    (scored,) = Scorer(entries).score_each(Task(0, "x", {"ground_truth": "2"}), rollouts("2"))
    assert scored.reward == 3.0
    assert scored.reward_parts == {"listed": 1.0, "verl": 1.0, "fields": 1.0, "fields.part": 1.0}


def test_functions_are_timed_by_name(own: str) -> None:
    scorer = Scorer(["exact_match", f"{own}:verl_short"])
    scorer.score_each(Task(0, "x", {"ground_truth": "2", "answer": "2"}), rollouts("2"))
    taken = scorer.take_seconds()
    assert taken.keys() == {"exact_match", "verl_short"}
    assert min(taken.values()) > 0.0
    assert scorer.take_seconds() == {}


def test_verl_style(own: str) -> None:
    columns = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {}}
    assert rewards([f"{own}:compute_score"], Task(0, "x", columns), "2", "3", "2") == [1.0, 0.0, 1.0]
    assert columns["extra_info"] == {}
    flat = {"data_source": "gsm8k", "ground_truth": "2", "extra_info": {}}
    assert rewards([f"{own}:compute_score"], Task(0, "x", flat), "2") == [1.0]
    assert rewards([f"{own}:verl_short"], Task(0, "x", flat), "2", "") == [1.0, 0.0]
    with pytest.raises(RewardFailure, match=r"compute_score needs reward_model\.ground_truth or ground_truth"):
        rewards([f"{own}:compute_score"], Task(0, "x", {}), "2")


def test_output_of_a_function_stays_with_its_attempt(own: str) -> None:
    task = Task(0, "x", {"tags": []})
    assert rewards([f"{own}:writes"], task, "a", "b") == [1.0, 1.0]
    assert task.columns == {"tags": []}


def test_package_function_and_callable_object(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(own).parent)
    Path("scores_of_a_package.py").write_text(OWN)  # a name that no other test has made importable
    assert rewards(["2 * scores_of_a_package:array_of", "4*own.py:judge"], Task(0, "x"), "a") == [4.0]


def test_parts_weights_and_not_applicable(own: str) -> None:
    scorer = Scorer([f"2.0 * {own}:sometimes", "0.5 * exact_match"])
    scored = scorer.score_each(Task(0, "x", {"answer": "b"}), rollouts("a", "b"))
    assert [dict(one.reward_parts) for one in scored] == [{"sometimes": 1.0, "exact_match": 0.0}, {"exact_match": 1.0}]
    assert [one.reward for one in scored] == [2.0, 0.5]
    assert [one.text for one in scored] == ["a", "b"]


@given(
    weights=st.lists(st.floats(-10, 10), min_size=2, max_size=2),
    answers=st.lists(st.sampled_from(["1", "2", "3"]), min_size=1, max_size=8),
)
def test_reward_is_the_weighted_sum_of_its_parts(weights: list[float], answers: list[str]) -> None:
    entries = [f"{weights[0]} * exact_match", f"{weights[1]}*numeric_match"]
    scored = Scorer(entries).score_each(Task(0, "x", {"answer": "2"}), rollouts(*answers))
    for one in scored:
        expected = weights[0] * one.reward_parts["exact_match"] + weights[1] * one.reward_parts["numeric_match"]
        assert one.reward == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"raised at .*own.py:\d+ in raises: KeyError: 'oops'"),
        ("nan", "returned nan as a score"),
        ("inf", "returned inf as a score"),
        ("huge", "must be finite"),
        ("big", r"returned -1e\+12 as a score; \+-1e\+06 is the most"),
        ("short", "returned 1 scores for 2 completions"),
        ("text", r"returned '1.0' \(str\) as a score"),
        ("number", r"returned 1\.0 \(float\), not a list"),
        ("nothing", r"returned None \(NoneType\), not a list"),
        ("none", "returned None for rollout 0"),
    ],
)
def test_the_error_names_the_bad_function_and_its_result(own: str, name: str, said: str) -> None:
    with pytest.raises(RewardFailure, match=said) as caught:
        rewards([f"{own}:{name}"], Task(4, "Sort these " + "9" * 1000), "a", "b")
    message = str(caught.value)
    assert name in message or name == "none"
    assert "Prompt (task 4): 'Sort these 999" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("name", "is_chat", "said"),
    [
        ("takes_text", True, "prompts are chats, so each completion is a list of messages: completion[0]"),
        ("searches", True, "prompts are chats, so each completion is a list of messages: completion[0]"),
        ("takes_chat", False, "prompts are texts, so each completion is a text"),
        ("other", True, ""),
        ("other", False, ""),
    ],
)
def test_the_error_says_which_form_of_completions_a_function_gets(
    own: str, name: str, is_chat: bool, said: str
) -> None:
    with pytest.raises(RewardFailure) as caught:
        rewards([f"{own}:{name}"], Task(0, (Message("user", "u"),) if is_chat else "u"), "a")
    assert said in str(caught.value)
    assert ("prompts are" in str(caught.value)) == bool(said)


#: What a function may return for one rollout, and what is said of it.
NO_SCORES = {
    "float('nan')": "returned nan as a score; scores must be finite",
    "float('-inf')": "returned -inf as a score; scores must be finite",
    "np.float32('nan')": "returned nan as a score",
    "torch.tensor(float('nan'))": "returned nan as a score",
    "Decimal('sNaN')": "returned Decimal('sNaN') (Decimal) as a score, not a float or None",
    "10**400": "returned inf as a score",
    "-1e9": "returned -1e+09 as a score; +-1e+06 is the most",
    "None": "returned None for rollout 1: no function scores it",
    "{'score': None}": "returned None for rollout 1: no function scores it",
    "{'score': float('nan')}": "returned nan as a score",
    "{'reward': 1.0}": "returned {'reward': 1.0} (dict) as a score",
    "'1.0'": "returned '1.0' (str) as a score",
    "np.str_('1.0')": "(str_) as a score",
    "b'1'": "returned b'1' (bytes) as a score",
    "1j": "returned 1j (complex) as a score",
    "np.complex64(1j)": "(complex64) as a score",
    "torch.tensor(1j)": "(Tensor) as a score",
    "[1.0]": "returned [1.0] (list) as a score",
    "np.ones(1)": "(ndarray) as a score",
    "torch.ones(1)": "(Tensor) as a score",
    "torch.ones((), device='meta')": "(Tensor) as a score",
    "float": "returned <class 'float'> (type) as a score",
    "Odd()": "returned a value of the type Odd as a score",
    "ValueError('no verdict')": "raised ValueError: no verdict",
    "asyncio.CancelledError()": "returned CancelledError() (CancelledError) as a score",
}


@pytest.mark.parametrize("value", NO_SCORES)
@pytest.mark.parametrize("style", ["trl", "verl"])
def test_an_invalid_score_costs_its_rollout_only(value: str, style: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import asyncio, numpy as np, torch\nfrom decimal import Decimal\n"
        "class Odd:\n    def __float__(self): raise RuntimeError\n    def __repr__(self): raise RuntimeError\n"
        f"def verl(solution_str, ground_truth): return {value} if solution_str == 'bad' else 1.0\n"
        "def trl(completions, **columns): return [verl(text, '') for text in completions]\n"
    )
    task = Task(0, "x", {"ground_truth": "2"})
    first, lost, last = Scorer([f"{tmp_path}/own.py:{style}"]).score_each(task, rollouts("good", "bad", "good"))
    assert isinstance(first, Rollout)
    assert isinstance(last, Rollout)
    assert (first.reward, last.reward) == (1.0, 1.0)
    assert isinstance(lost, RewardFailure)
    assert NO_SCORES[value] in str(lost)
    assert "Prompt (task 0)" in str(lost)


def test_none_of_one_function_is_left_out_and_nan_costs_the_rollout(own: str) -> None:
    """None beside another function's score is left out; NaN beside one costs the rollout."""
    task = Task(0, "x", {"answer": "b"})
    first, second = Scorer([f"{own}:sometimes", "exact_match"]).score_each(task, rollouts("a", "b"))
    assert isinstance(second, Rollout)
    assert second.reward == 1.0
    first, second = Scorer([f"{own}:nan_of_b", "exact_match"]).score_each(task, rollouts("a", "b"))
    assert isinstance(first, Rollout)
    assert first.reward == 1.0
    assert isinstance(second, RewardFailure)
    first, second = Scorer([f"{REWARD_MAX} * {own}:few"]).score_each(Task(0, "x"), rollouts("a", "bb"))
    assert isinstance(first, Rollout)
    assert "adds up to 2000000.0; +-1e+06 is the most" in str(second)


def test_a_sum_out_of_range_is_refused(own: str) -> None:
    for weight in (2 * REWARD_MAX, 1e308):
        with pytest.raises(RewardFailure, match=r"adds up to .*; \+-1e\+06 is the most"):
            rewards([f"{weight} * {own}:array_of"], Task(0, "x"), "a")
    assert rewards([f"{REWARD_MAX} * {own}:array_of"], Task(0, "x"), "a") == [REWARD_MAX]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (":strange", "fits neither style"),
        (":not_callable", "is not a function: its type is int"),
        (":jugde", "Did you mean judge"),
    ],
)
def test_functions_that_cannot_be_rewards(own: str, spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Scorer([own + spec])


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import json\nx = 1 / 0\n")
    with pytest.raises(UserError, match=r"bad.py could not be imported: .*bad.py:2 in <module>: ZeroDivisionError"):
        Scorer([f"{tmp_path}/bad.py:f"])
    with pytest.raises(UserError, match=r"no file nowhere\.py"):
        Scorer(["nowhere.py:f"])


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["much * exact_match"], "a weight and a name"),
        (["nan * exact_match"], "a weight and a name"),
        (["* exact_match"], "a weight and a name"),
        (["2 *"], "There is no reward ''"),
        (["exact_match", "2 * exact_match"], "one name"),
    ],
)
def test_settings_that_cannot_be(entries: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Scorer(entries)


def test_scoring_changes_nothing_else() -> None:
    before: list[Any] = rollouts("1", "2")
    after = Scorer(["exact_match"]).score_each(Task(0, "x", {"answer": "1"}), before)
    assert [one.tokens for one in after] == [one.tokens for one in before]
    assert all(one.reward is None for one in before)
