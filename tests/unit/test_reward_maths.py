"""The `math` reward on answers as models write them, right, wrong and hostile."""

from array import array

import pytest

from echo2.core.types import Rollout, Task
from echo2.reward.score import Scorer
from echo2.reward.text_scorers import MAX_MATH_CHARS

pytest.importorskip("math_verify")

GOLD = "Half of 48 is <<48/2=24>>24.\n48 + 24 = 72 and 3 are left over.\n#### "


def scores(answer: str, *texts: str) -> list[float | None]:
    rollouts = [Rollout(array("i", [1]), array("f", [0.0]), b"\x01", ((0, 0),), "stop", text) for text in texts]
    return [rollout.reward for rollout in Scorer(["math"]).score_each(Task(0, "?", {"answer": answer}), rollouts)]


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("72", ("#### 72", "so 3 * 24 = 72\n#### 72.00\n", "\\boxed{72}", "It is 72.", "$72$", "72 apples"), "#### 24"),
        ("1,234", ("#### 1234", "#### 1,234", "\\boxed{1,234}", "\\boxed{\\$1{,}234}"), "#### 234"),
        (
            "-5",
            ("#### -5", "#### \u22125", "It is \u22125.", "$\u22125$", "it fell to $-5$ degrees", "\\boxed{-5}"),
            "#### 5",
        ),
        ("\u22125", ("#### -5", "#### \u22125"), "#### 5"),
        ("15.50", ("#### 15.5", "#### $15.50", "\\boxed{\\frac{31}{2}}", "\\boxed{15.50 \\text{ dollars}}"), "#### 15"),
        ("1/4", ("#### 1/4", "#### 0.25", "\\boxed{\\frac14}"), "#### 4"),
        ("18", ("#### 4\nno:\n#### 18", "18 is it. #### 18 of them"), "#### 18\n#### 4"),
        ("7", ("\\boxed{7}\n#### 8", "#### 8\n\\boxed{7}"), "no answer at all"),
    ],
)
def test_written_answers_are_recognised(answer: str, right: tuple[str, ...], wrong: str) -> None:
    assert scores(GOLD + answer, *right, wrong, "", "####") == [1.0] * len(right) + [0.0] * 3


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("$x>3$", "$(3,\\infty)$"),
        ("$1/2$", "$\\int_0^1 x dx$"),
        ("$\\sin^2 x+\\cos^2 x$", "$1$"),
        ("$x^2-1$", "$(x-1)(x+1)$"),
        ("0.310268", "$\\int_0^1 \\sin(x^2) dx$"),
    ],
)
def test_formulas_that_sympy_must_simplify(answer: str, completion: str) -> None:
    """It compiles programs for polynomials and integrals: the only ones that run where completions are read."""
    assert scores(answer, completion, "$x+17$") == [1.0, 0.0]


def test_several_boxes_are_one_set() -> None:
    """math-verify's reading: guessing in many boxes earns nothing."""
    assert scores("4", "\\boxed{3} or \\boxed{4}", "\\boxed{4}") == [0.0, 1.0]
    assert scores("$\\{3, 4\\}$", "\\boxed{3} and \\boxed{4}") == [1.0]


def test_a_completion_uses_no_more_than_its_limits() -> None:
    """A tower that no comparison ends, boxes and brackets beyond number, text without end: all wrong, all bounded."""
    hostile = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{" * 20_000, "9" * 200_000, "1," * 50_000, "$" + "(" * 5_000 + "$"]
    assert scores("42", *hostile, "#### 42") == [0.0] * len(hostile) + [1.0]


def test_only_the_end_of_a_long_completion_is_read() -> None:
    assert scores("42", "#### 42" + " " * MAX_MATH_CHARS, " " * MAX_MATH_CHARS + "#### 42") == [0.0, 1.0]
