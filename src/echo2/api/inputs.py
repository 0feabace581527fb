"""Turns Python arguments into the configuration and data files that `echo2 run` reads; nothing stays in memory only.

A function or class of the user's session is written to a Python file that another process can load: rewards and
environments run in processes of their own (`reward/reward_processes.py`), which cannot see a notebook. Nothing is
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
import json
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeAlias

from echo2 import config as configuration
from echo2.config.rundir import RunDir, write_atomically
from echo2.core.errors import UserError, did_you_mean, write_failed
from echo2.core.printable import shown
from echo2.tasks.base import task_from_row

#: Longest literal that is written for one value.
LITERAL_CHARS_MAX = 1 << 20
HEADER = '"""Written by echo2 from a Python session."""\n\nfrom __future__ import annotations\n'
INSTEAD = "Make it inside the function, or put the function in a file and name that: file.py:name."


class Saves(Protocol):
    """A transformers model or tokenizer: only its `save_pretrained` is used here."""

    def save_pretrained(self, directory: str, /) -> Any: ...


#: A directory or hub id, or a model and its tokenizer.
Model: TypeAlias = str | Path | tuple[Saves, Saves]
#: A value of `tasks.source`, or an iterable of rows: a list of mappings, a Hugging Face Dataset, a generator.
Tasks: TypeAlias = str | Path | Sequence[str] | Iterable[Mapping[str, Any]]
Reward: TypeAlias = str | Callable[..., Any]
#: One reward function, several whose values are added, or several with weights.
Rewards: TypeAlias = Reward | Sequence[Reward] | Mapping[Reward, float]


def sections(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings grouped by section. A keyword names a section with its keys (`eval={"every": 20}`), or a key
    that exists in only one section (`lr=1e-5`).

    Raises:
        UserError: there is no such section or key, or several sections have the key.
    """
    owners: dict[str, list[str]] = {}
    for section, key, *_ in configuration.all_fields():
        owners.setdefault(key, []).append(section)
    names = {section for having in owners.values() for section in having}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name in names:
            if not isinstance(value, Mapping):
                raise UserError(f"{name}={shown(value)}: {name} is a section: give its keys, {name}={{...}}.")
            by_section.setdefault(name, {}).update(value)
            continue
        having = owners.get(name, [])
        if len(having) != 1:
            choices = " or ".join(f'{section}={{"{name}": ...}}' for section in having)
            hint = f" Write {choices}." if having else did_you_mean(name, [*owners, *names])
            raise UserError(f"There is no setting {name!r} of its own.{hint} `echo2 run --help` lists all settings.")
        by_section.setdefault(having[0], {})[name] = value
    return by_section


def write_run(
    folder: Path,
    model: Model,
    tasks: Tasks,
    reward: Rewards,
    heldout: Tasks | Mapping[str, Tasks] | None,
    environment: str | type | None,
    settings: Mapping[str, Any],
) -> Path:
    """Write the configuration file of a run and return its path. Arguments given as Python objects are saved beside the
    file in `folder`.

    Raises:
        UserError: an argument has the wrong type; a setting is wrong; the folder cannot be written.
    """
    tables = sections(settings)

    def put(section: str, key: str, value: Any) -> None:
        if key in tables.setdefault(section, {}):
            raise UserError(f"{section}.{key} is given twice: as an argument and among the settings. Leave one out.")
        tables[section][key] = value

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        put("model", "path", _model(model, folder / "model"))
        if isinstance((distill := tables.get("distill", {})).get("teacher"), Path | tuple):
            distill["teacher"] = _model(distill["teacher"], folder / "teacher")
        put("tasks", "source", _source("tasks", tasks, folder / "rows.jsonl"))
        if environment is not None:
            put("tasks", "environment", named_code(environment, folder))
        put("reward", "functions", _functions(reward, folder) or (["environment"] if environment is not None else []))
        if isinstance(heldout, Mapping):
            paths = {name: folder / f"heldout-{number}.jsonl" for number, name in enumerate(heldout)}
            sets = {name: _source(f"heldout[{name!r}]", each, paths[name]) for name, each in heldout.items()}
            put("eval", "source", sets)
        elif heldout is not None:
            put("eval", "source", _source("heldout", heldout, folder / "heldout.jsonl"))
        configuration.build(tables, "echo2")
        path = folder / "run.json"
        path.write_text(json.dumps(tables, indent=2), encoding="utf-8")
    except OSError as error:
        raise write_failed(error, f"Cannot write {folder}: {error.strerror}.") from error
    return path


def write_resumed(rundir: RunDir, settings: Mapping[str, Any]) -> Path:
    """Write the configuration file of a resumed run and return its path: the run's own configuration with these
    settings changed.

    Raises:
        UserError: this is not a run directory, or a setting is wrong.
    """
    tables = asdict(rundir.read_config())
    for section, keys in sections(settings).items():
        tables[section] |= keys
    configuration.build(tables, "echo2")
    rundir.inputs.mkdir(mode=0o700, exist_ok=True)
    path = rundir.inputs / "resumed.json"
    write_atomically(path, json.dumps(tables, indent=2))
    return path


def _model(model: Any, directory: Path) -> str:
    if isinstance(model, str | Path):
        return str(model)
    if not isinstance(model, tuple) or len(model) != 2 or not all(hasattr(one, "save_pretrained") for one in model):
        raise UserError(
            f"model = {shown(model)}: give a directory, a hub id, or a model of transformers with its tokenizer: "
            "model=(model, tokenizer)."
        )
    for one in model:
        one.save_pretrained(str(directory))
    return str(directory)


def _source(name: str, tasks: Any, path: Path) -> str | list[str]:
    """Return the value of `tasks.source`: the given text unchanged, or the path of the file that the rows go to.
    `name`: the argument's name, for errors.
    """
    if isinstance(tasks, str | Path):
        return str(tasks)
    if isinstance(tasks, list | tuple) and tasks and all(isinstance(each, str) for each in tasks):
        return list(tasks)
    if not isinstance(tasks, Iterable) or isinstance(tasks, Mapping):
        raise UserError(f"{name} = {shown(tasks)}: give rows, a list of {{'prompt': ...}}, or the name of a source.")
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(tasks):
            where = f"Row {number} of {name}"
            if not isinstance(row, Mapping):
                raise UserError(f"{where} is {shown(row)}: it must be a mapping with a 'prompt'.")
            if "prompt" in row:  # else `tasks.params` may make it, and `echo2 run` checks it
                task_from_row(row, number, where)
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise UserError(f"{where} is not JSON: {error}. {shown(row)}") from error
    return str(path)


def _functions(reward: Rewards, folder: Path) -> list[str]:
    if isinstance(reward, Mapping):
        return [f"{weight!r} * {named_code(one, folder)}" for one, weight in reward.items()]
    several = reward if isinstance(reward, list | tuple) else [reward]
    return [named_code(one, folder) for one in several]


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
        source, own = _code(value), value.__name__
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


def _code(thing: Any) -> str:
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
    functions = list(_methods(thing))
    yield from ((function.__code__.co_filename, function.__code__.co_firstlineno) for function in functions)
    module = sys.modules.get(thing.__module__)
    if isinstance(thing, type) and not functions:
        yield from ((file, None) for file in [getattr(module, "__file__", None)] if file)
        cached: dict[str, Any] = linecache.cache
        yield from ((file, None) for file, entry in reversed(cached.items()) if entry[1:2] == (None,))  # notebook cells


def _methods(thing: Any) -> Iterator[FunctionType]:
    """Yield a function itself, or the methods of a class."""
    for part in [thing] if isinstance(thing, FunctionType) else vars(thing).values():
        function = inspect.unwrap(getattr(part, "__func__", part))
        if isinstance(function, FunctionType):
            yield function


def _names_seen(thing: Any) -> Mapping[str, Any]:
    """Return the global and closure variables visible to a function or to the methods of a class, by name."""
    values: dict[str, Any] = dict(vars(sys.modules.get(thing.__module__, builtins)))
    for function in _methods(thing):
        around = inspect.getclosurevars(function).nonlocals
        values |= function.__globals__ | {name: value for name, value in around.items() if name != "__class__"}
    return values


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations: the file never evaluates them, so names used only in annotations are not dependencies."""

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
    names = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced()}
    scopes = [*module.get_children()]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        names |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return {name for name in names - bound if not (name.startswith("__") and name.endswith("__"))}
