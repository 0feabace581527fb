"""Writes a function or class of the user's session to a Python file that another process can load.

Rewards and environments run in processes of their own (`reward/process.py`), which cannot see a notebook. Nothing is
pickled: the file holds the source of the function and of its dependencies. The run directory thus records what scored
the run, and a later `echo2 eval` or a resumed run can load it. Dependencies are handled by kind:

    a module, or an attribute of a module    imported by its name
    a function or class of the session       its source, and its own dependencies in turn
    numbers, texts, lists, dicts, patterns   written as literals with their current values

Any other dependency is refused by name. The file stays on the owner's machines and is never sent to other people's
workers.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from echo2.config.rundir import write_atomically
from echo2.core.errors import UserError
from echo2.core.printable import shown

#: Longest literal that is written for one value.
LITERAL_CHARS_MAX = 1 << 20
HEADER = '"""Written by echo2 from a Python session."""\n\nfrom __future__ import annotations\n'
INSTEAD = "Make it inside the function, or put the function in a file and name that: file.py:name."


def named_code(thing: Any, folder: Path) -> str:
    """Write a function or class to a file and return its name in a setting, `file.py:name`. A text is returned as is.

    Raises:
        UserError: `thing` has no name or no source, or depends on a value that cannot be written as a literal.
    """
    if isinstance(thing, str):
        return thing
    name = getattr(thing, "__name__", "")
    if not isinstance(inspect.unwrap(thing), FunctionType | type) or not name.isidentifier():
        raise UserError(f"{shown(thing)} has no name of its own: give a function or class made by `def` or `class`.")
    writing = _Writing()
    writing.add(name, thing, f"{name}")
    path = folder / f"{name}.py"
    write_atomically(path, HEADER + writing.text())
    return f"{path}:{name}"


class _Writing:
    """The contents of the file; every definition comes after its dependencies."""

    def __init__(self) -> None:
        self._added: dict[str, Any] = {}
        self._places: dict[str, None] = {}  # an ordered set
        self._imports: list[str] = []
        self._bodies: list[str] = []

    def text(self) -> str:
        places = ["import sys", "", *(f"sys.path.append({place!r})" for place in self._places)] if self._places else []
        parts = ["\n".join(lines) for lines in (places, self._imports) if lines]
        return "\n".join(["", "\n\n".join(parts), "\n", "\n\n\n".join(self._bodies), ""])

    def add(self, name: str, value: Any, user: str) -> None:
        """Add the import, source or literal that gives `name` this value. `user`: the function that needs it."""
        if name in self._added:
            if self._added[name] is not value:
                raise UserError(f"{user} and what it uses mean two things by {name!r}. Rename one.")
            return
        self._added[name] = value
        if (line := self._import(name, value)) is not None:
            self._imports.append(line)
        elif isinstance(inspect.unwrap(value), FunctionType | type):
            self._add_source(name, value)
        else:
            if isinstance(value, re.Pattern):
                self.add("re", re, user)
            self._bodies.append(f"{name} = {_literal(name, value, user)}")

    def _import(self, name: str, value: Any) -> str | None:
        """Return the line that imports a module, or an object from its home module; None if neither is possible."""
        if isinstance(value, ModuleType):
            self._find(value)
            return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
        own, home = getattr(value, "__name__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
        if home is None or home.__name__ in ("__main__", "__mp_main__") or getattr(home, own or "", None) is not value:
            return None
        self._find(home)
        return f"from {home.__name__} import {own}" + ("" if own == name else f" as {name}")

    def _find(self, module: ModuleType) -> None:
        """Record the directory that a module was imported from, unless every process of this Python can import it."""
        file = getattr(module, "__file__", None)
        if file is None or Path(file).is_relative_to(sys.prefix) or Path(file).is_relative_to(sys.base_prefix):
            return
        path, name = Path(file).resolve(), module.__name__
        depth = name.count(".") + (path.name == "__init__.py")
        self._places[str(path.parents[depth])] = None

    def _add_source(self, name: str, value: Any) -> None:
        value = inspect.unwrap(value)
        source, own = _source(value), value.__name__
        self._added.setdefault(own, value)
        values = _names_seen(value)
        for used in sorted(_free_names(source) - {own}):
            if used in values:
                self.add(used, values[used], own)
            elif not hasattr(builtins, used):
                raise UserError(f"{own} uses {used!r}, which is not defined. Define it before the run is started.")
        self._bodies.append(source if own == name else f"{source}\n\n\n{name} = {own}")


def _literal(name: str, value: Any, user: str) -> str:
    if isinstance(value, re.Pattern):
        return f"re.compile({value.pattern!r}, {int(value.flags)})"
    try:
        text = repr(value)
        is_literal = len(text) <= LITERAL_CHARS_MAX and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        is_literal = False
    if not is_literal:
        raise UserError(f"{user} uses {name!r}, {type(value).__name__}, which is not a plain value. {INSTEAD}")
    return text


def _source(thing: Any) -> str:
    """Return the source of a function or class from its first decorator on, dedented.

    Raises:
        UserError: the source is not available, for example if it was typed into a bare `python` prompt.
    """
    for file, line in _places(thing):
        lines = linecache.getlines(file)
        for node in _definitions("".join(lines), thing.__name__):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            is_inside = line is None or first <= line <= (node.end_lineno or first)
            if line == first or (is_inside and isinstance(thing, type)):
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    raise UserError(f"The source of {thing.__name__} cannot be read. {INSTEAD}")


def _definitions(text: str, name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    try:
        nodes = ast.walk(ast.parse(text))
    except SyntaxError:  # the file has changed since it was loaded
        return []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node for node in nodes if isinstance(node, kinds) and node.name == name]


def _places(thing: Any) -> Iterator[tuple[str, int | None]]:
    """Yield file and first line of a function or of a class's methods; for a class without methods, candidate files
    with line None.
    """
    functions = list(_functions(thing))
    yield from ((function.__code__.co_filename, function.__code__.co_firstlineno) for function in functions)
    module = sys.modules.get(thing.__module__)
    if isinstance(thing, type) and not functions:
        yield from ((file, None) for file in [getattr(module, "__file__", None)] if file)
        cached: dict[str, Any] = linecache.cache
        yield from ((file, None) for file, entry in reversed(cached.items()) if entry[1:2] == (None,))  # notebook cells


def _functions(thing: Any) -> Iterator[FunctionType]:
    """Yield a function itself, or the methods of a class."""
    for part in [thing] if isinstance(thing, FunctionType) else vars(thing).values():
        function = inspect.unwrap(getattr(part, "__func__", part))
        if isinstance(function, FunctionType):
            yield function


def _names_seen(thing: Any) -> Mapping[str, Any]:
    """Return the global and closure variables visible to a function or to the methods of a class, by name."""
    values: dict[str, Any] = dict(vars(sys.modules.get(thing.__module__, builtins)))
    for function in _functions(thing):
        around = inspect.getclosurevars(function).nonlocals
        values |= function.__globals__ | {name: value for name, value in around.items() if name != "__class__"}
    return values


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations: the file never evaluates them, so names used only in annotations are no dependencies."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.generic_visit(ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno))


def _free_names(source: str) -> set[str]:
    """Return the names that a definition reads but does not bind."""
    plain = ast.unparse(ast.fix_missing_locations(_WithoutAnnotations().visit(ast.parse(source))))
    module = symtable.symtable(plain, "<session>", "exec")
    bound = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned()}
    found = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced()}
    scopes = [*module.get_children()]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        found |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return {name for name in found - bound if not (name.startswith("__") and name.endswith("__"))}
