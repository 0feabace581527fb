"""Answers that scorers would run as Python are read as data instead.

reasoning-gym passes answers to `eval`, and both it and math-verify pass them to sympy's `parse_expr`, which evaluates
text as well. `disarm` and `disarm_eval` replace the two in this process: lists, numbers and formulas still mean what
they meant; anything else raises ValueError, which scorers take for a wrong answer.
"""

from __future__ import annotations

import ast
import re
import sys
from typing import Any

MAX_EXPRESSION_CHARS = 10_000
_FORMULA = re.compile(r"[A-Za-z0-9_+\-*/%().,\s]*", re.ASCII)  # no quotes, brackets, comments, lambdas or assignments
_ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Constant,
)
_LITERALS = (*_ARITHMETIC, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_FORMULAS = (*_ARITHMETIC, ast.Name, ast.Call, ast.Load)
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot", "atan2"}
    | {"sinh", "cosh", "tanh", "sech", "csch", "coth", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "cbrt"}
    | {"Integral", "root", "erf", "Abs", "abs", "sign", "floor", "ceiling", "factorial", "binomial", "gcd", "lcm"}
)


def disarm() -> None:
    """Replace `parse_expr` in sympy, before anything that imports it by name is imported.

    Raises:
        ImportError: sympy is not installed.
    """
    import sympy
    from sympy import parsing
    from sympy.parsing import sympy_parser

    original = sympy_parser.parse_expr

    def parse_expr(s: str, *arguments: Any, **options: Any) -> Any:
        _check_formula(s)
        return original(s, *arguments, **options)

    for module in (sympy, parsing, sympy_parser):
        vars(module)["parse_expr"] = parse_expr


def disarm_eval(package: str) -> None:
    """Replace `eval` in every loaded module of a package: a module's own names come before the built-in ones."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            vars(module)["eval"] = evaluate


def evaluate(text: str, *_: Any) -> Any:
    """The value of a literal, or of arithmetic on literals.

    Raises:
        ValueError: it is anything else, or too long. SyntaxError, ArithmeticError, TypeError: as Python does.
    """
    tree = _parsed(text, _LITERALS)
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})  # nothing in it can name or call anything


def _check_formula(text: str) -> None:
    if not _FORMULA.fullmatch(text):
        raise ValueError("no formula: it holds characters that formulas have not")
    for node in ast.walk(_parsed(text.strip(), _FORMULAS)):
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise ValueError(f"no formula: it names {node.id!r}")
        if isinstance(node, ast.Call) and (ast.unparse(node.func) not in _FUNCTIONS or node.keywords):
            raise ValueError("no formula: it calls what is no function of mathematics")


def _parsed(text: str, allowed: tuple[type[ast.AST], ...]) -> ast.Expression:
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"no expression of at most {MAX_EXPRESSION_CHARS} characters")
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            raise ValueError(f"no plain expression: it holds {type(node).__name__}")
    return tree
