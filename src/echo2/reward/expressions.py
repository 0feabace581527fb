"""Parses answers as data that scorers would otherwise run as Python.

reasoning-gym passes answers to `eval`, and both reasoning-gym and math-verify pass them to sympy's `parse_expr`, which
evaluates text as well. `disarm` and `disarm_eval` replace the two functions in this process: lists, numbers and
formulas keep their meaning; anything else raises ValueError, which scorers take for a wrong answer. There are more ways
from text to code (sympy's `lambdify` prints the names of symbols into a program), so `forbid_code` blocks all others.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

MAX_EXPRESSION_CHARS = 10_000
_FORMULA = re.compile(r"[A-Za-z0-9_+\-*/%().,\s]*", re.ASCII)  # no quotes, brackets, comments, lambdas or assignments
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
_LITERALS = (*_ARITHMETIC, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_FORMULAS = (*_ARITHMETIC, ast.Name, ast.Call, ast.Tuple, ast.Load)
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot", "atan2"}
    | {"sinh", "cosh", "tanh", "sech", "csch", "coth", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "cbrt"}
    | {"acoth", "asech", "acsch", "sinc", "erf", "erfc", "Ei", "li", "Si", "Ci", "gamma", "loggamma", "Heaviside"}
    | {"Integral", "Rational", "Pow", "root", "Abs", "abs", "sign", "floor", "ceiling", "factorial", "binomial"}
    | {"gcd", "lcm"}
)
#: Modules that generate code from numbers only: a polynomial's number of variables, a series' number of parameters.
_WRITERS = frozenset({"sympy.polys.monomials", "mpmath.libmp.libhyper"})
_is_reading = False  # for the audit hook, which lives as long as the process


@cache
def disarm() -> None:
    """Replace `parse_expr` in sympy. Call this before importing any module that imports `parse_expr` by name.

    Raises:
        ImportError: sympy is not installed.
    """
    import sympy
    from sympy import parsing
    from sympy.parsing import sympy_parser

    original = sympy_parser.parse_expr

    def parse_expr(s: str, *arguments: Any, **options: Any) -> Any:
        _check_formula(s)
        with _reading():
            return original(s, *arguments, **options)

    for module in (sympy, parsing, sympy_parser):
        vars(module)["parse_expr"] = parse_expr


def disarm_eval(package: str) -> None:
    """Replace `eval` in every loaded module of a package: a module's own names come before the built-in ones."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            vars(module)["eval"] = evaluate


def forbid_code() -> None:
    """From now on, let this process compile and run only text that this module has checked, and imported modules."""
    sys.addaudithook(_refuse_code)


def _refuse_code(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("compile", "exec") or _is_reading:
        return
    if event == "exec" and not arguments[0].co_filename.startswith("<"):
        return  # the code of a module
    frame: FrameType | None = sys._getframe(1)
    if frame is not None and frame.f_globals.get("__name__") in _WRITERS:
        return
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return  # modules may generate classes from text while they are imported
        frame = frame.f_back
    raise PermissionError(f"text was about to run as a program ({event})")


@contextmanager
def _reading() -> Iterator[None]:
    global _is_reading
    before, _is_reading = _is_reading, True
    try:
        yield
    finally:
        _is_reading = before


def evaluate(text: str, *_: Any) -> Any:
    """Return the value of a literal, or of arithmetic on literals.

    Raises:
        ValueError: the text is anything else, or too long. SyntaxError, ArithmeticError, TypeError: as Python does.
    """
    tree = _parsed(text, _LITERALS)
    with _reading():
        return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})  # nothing in it can name or call anything


def _check_formula(text: str) -> None:
    if not _FORMULA.fullmatch(text):
        raise ValueError("not a formula: it has characters that formulas do not have")
    for node in ast.walk(_parsed(text.strip(), _FORMULAS)):
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise ValueError(f"no formula: it names {node.id!r}")
        if isinstance(node, ast.Call) and (ast.unparse(node.func) not in _FUNCTIONS or node.keywords):
            raise ValueError("not a formula: it calls something other than a mathematical function")


def _parsed(text: str, allowed: tuple[type[ast.AST], ...]) -> ast.Expression:
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"no expression of at most {MAX_EXPRESSION_CHARS} characters")
    with _reading():
        tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            raise ValueError(f"no plain expression: it holds {type(node).__name__}")
    return tree
