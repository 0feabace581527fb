"""The `math` reward on answers as models write them, right, wrong and hostile."""

import subprocess
import sys
from array import array

import pytest

from echo2.reward import functions
from echo2.reward.functions import MATH_CHARS, MATH_GROUP_SECONDS
from echo2.reward.score import Scorer
from echo2.types import Rollout, Task

pytest.importorskip("math_verify")

GOLD = "Half of 48 is <<48/2=24>>24.\n48 + 24 = 72 and 3 are left over.\n#### "


def scores(answer: str, *texts: str) -> list[float | None]:
    rollouts = [Rollout(array("i", [1]), array("f", [0.0]), b"\x01", ((0, 0),), "stop", text) for text in texts]
    return [rollout.reward for rollout in Scorer(["math"]).score(Task(0, "?", {"answer": answer}), rollouts)]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("72", ("#### 72", "so 3 * 24 = 72\n#### 72.00\n", "\\boxed{72}", "It is 72.", "$72$", "72 apples"), "#### 24"),
        ("1,234", ("#### 1234", "#### 1,234", "\\boxed{1,234}", "\\boxed{\\$1{,}234}"), "#### 234"),
        ("-5", ("#### -5", "it fell to $-5$ degrees", "\\boxed{-5}"), "#### 5"),
        ("15.50", ("#### 15.5", "#### $15.50", "\\boxed{\\frac{31}{2}}", "\\boxed{15.50 \\text{ dollars}}"), "#### 15"),
        ("1/4", ("#### 1/4", "#### 0.25", "\\boxed{\\frac14}"), "#### 4"),
        ("18", ("#### 4\nno:\n#### 18", "18 is it. #### 18 of them"), "#### 18\n#### 4"),
        ("7", ("\\boxed{7}\n#### 8", "#### 8\n\\boxed{7}"), "no answer at all"),
    ],
)
def test_answers_as_they_are_written(answer: str, right: tuple[str, ...], wrong: str) -> None:
    assert scores(GOLD + answer, *right, wrong, "", "####") == [1.0] * len(right) + [0.0] * 3


def test_several_boxes_are_one_set() -> None:
    """math-verify's reading: guessing in many boxes earns nothing."""
    assert scores("4", "\\boxed{3} or \\boxed{4}", "\\boxed{4}") == [0.0, 1.0]
    assert scores("$\\{3, 4\\}$", "\\boxed{3} and \\boxed{4}") == [1.0]


HOSTILE = """
from echo2.reward import functions
hostile = ["\\\\boxed{9^{9^{9^{9}}}}", "\\\\boxed{" * 20_000, "9" * 200_000, "1," * 50_000, "$" + "(" * 5_000 + "$"]
functions.MATH_SECONDS = 1
assert functions.math_match(hostile, ["42"] * len(hostile)) == [0.0] * len(hostile)
functions.MATH_SECONDS = 60
assert functions.math_match(["#### 42"], ["42"]) == [1.0]
"""


def test_a_completion_costs_no_more_than_its_limits() -> None:
    """A tower that no comparison ends, boxes and brackets beyond number, text without end: all wrong, all bounded. In a
    process of its own: limits are alarms, and this one has an alarm of its own."""
    subprocess.run([sys.executable, "-c", HOSTILE], check=True, timeout=100)


def test_a_group_that_has_cost_enough_gets_a_second_for_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    given: list[object] = []
    clock = iter([0.0, 0.0, MATH_GROUP_SECONDS, 2 * MATH_GROUP_SECONDS])
    parse = math_verify.parse
    monkeypatch.setattr(functions.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(math_verify, "verify", lambda *_, timeout_seconds: bool(given.append(timeout_seconds)))
    monkeypatch.setattr(math_verify, "parse", lambda text, parsing_timeout: parse(text, parsing_timeout=30))
    functions.math_match(["1", "2", "3"], ["1"] * 3)
    assert given == [functions.MATH_SECONDS, 1, 1]


def test_only_the_end_of_a_long_completion_is_read() -> None:
    assert scores("42", "#### 42" + " " * MATH_CHARS, " " * MATH_CHARS + "#### 42") == [0.0, 1.0]
