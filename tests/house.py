"""The house rules as functions from source text to complaints: what `test_house_rules.py` runs over the tree.

Every rule is parsed from the syntax tree, never imported, so that a module which cannot be imported is still judged. A
complaint is a string `path:line: what is wrong`. This module is not a linter: ruff and mypy do what they can do.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src"
PACKAGE = "echo2"
GENERATED = ("wire_pb2.py", "wire_pb2_grpc.py", "tinker_pb2.py")

MAX_FUNCTION_LINES = 70  # "under 70": 69 pass
MAX_FILE_LINES = 500
FORBIDDEN_NAMES = frozenset({"utils", "util", "helpers", "helper", "manager", "misc", "common"})

FLOOR_OF_ROOM = {
    **dict.fromkeys(("types", "errors", "documents", "printable", "sandbox", "devices", "disk"), 1),
    **dict.fromkeys(("addresses", "background", "loop_thread", "peft_config", "model_context"), 1),
    "": 1,  # the package itself: its version, and the door to `api`, which it imports when somebody asks
    "config": 2,
    **dict.fromkeys(("control", "tasks", "rollout", "reward", "weights", "transport", "rundir"), 3),
    **dict.fromkeys(("buffer", "learner", "broadcast"), 4),
    "sim": 5,
    "planning": 6,
    "views": 7,
    "runtime": 8,
    **dict.fromkeys(("cli", "__main__", "service", "api", "trl", "demo"), 9),
}
#: Floors within a room. What lies on the room's own floor (`control/machine.py`) is on the ground.
SUBFLOORS = {
    "control": {"capacity": 1, **dict.fromkeys(("head", "worker", "broadcast", "service"), 2)},
    "runtime": {**dict.fromkeys(("head", "learner", "worker"), 1), "launch": 2},
    "learner": {"grpo": 1},
}
TORCH_ROOMS = frozenset({"learner", "rollout", "devices", "demo"})
TORCH_PACKAGES = frozenset({"torch", "transformers", "accelerate", "peft", "vllm"})
# What control/ may import of the standard library: data types and arithmetic, nothing that waits, draws or writes.
CONTROL_STDLIB = frozenset(
    {"__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum", "fractions", "functools"}
    | {"hashlib", "heapq", "itertools", "json", "math", "operator", "re", "statistics", "string", "struct", "types"}
    | {"typing", "zlib"}
)
PORT_LIKE = re.compile(r"port|bound|sockname")
CONTROL_CALLS = frozenset({"print", "open", "input", "exec", "eval", "id", "hash"})  # I/O, or differs between processes
#: Names that two rooms may use: the same message seen from two sides, or the same notion in two rooms.
BARE_TASKS = frozenset({"create_task", "ensure_future"})
UNSAFE_PACKAGES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: `module` is its dotted name (`echo2.control.head.planner`), `path` what complaints call it."""

    module: str
    path: str
    text: str

    @property
    def room(self) -> str:
        return self.module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]

    def parse(self) -> ast.Module:
        return _parsed(self.text, self.path)


@cache
def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, path)


@cache
def package_sources() -> list[Source]:
    """Every hand-written module of the package, in a stable order."""
    paths = [path for path in sorted((SOURCE / PACKAGE).rglob("*.py")) if path.name not in GENERATED]
    return [read_source(path) for path in paths]


@cache
def other_sources() -> list[Source]:
    """Tests, examples, benchmarks and simulations: code that people read too."""
    folders = ("tests", "examples", "benchmarks", "simulations")
    return [read_source(path) for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def read_source(path: Path) -> Source:
    root = SOURCE if path.is_relative_to(SOURCE) else REPOSITORY
    dotted = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    return Source(dotted, path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8"))


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in the file, inside functions and TYPE_CHECKING too.

    `from echo2.control import events` yields `echo2.control.events`: the most that the import could reach.
    """
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.parse()):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _is_dynamic_import(node: ast.Call) -> bool:
    return ast.unparse(node.func) in {"__import__", "import_module", "importlib.import_module"}


def own_room(name: str) -> str | None:
    """The room of a dotted import of ours (`echo2.control.head.events` -> `control`); None for other packages."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF_ROOM else ""


def floor_complaints(source: Source) -> list[str]:
    """Imports go down only; rooms on one floor do not know each other; a new room must be given its floor."""
    if source.room not in FLOOR_OF_ROOM:
        return [f"{source.path}:1: room {source.room!r} has no floor; give it one in FLOOR_OF_ROOM and in the docs"]
    floor, found = FLOOR_OF_ROOM[source.room], []
    for line, name in imports(source):
        room = own_room(name)
        if room is None or room == source.room or FLOOR_OF_ROOM[room] < floor or (source.room, room) == ("", "api"):
            continue
        if floor == FLOOR_OF_ROOM[room] in (1, 9):  # floor 1, and the top: one household each
            continue
        who = source.room or PACKAGE
        found.append(f"{source.path}:{line}: {who} (floor {floor}) imports {name} (floor {FLOOR_OF_ROOM[room]})")
    return found


def subfloor_complaints(source: Source) -> list[str]:
    """Within a room imports go down too: folders of `control/` and `runtime/` on one floor do not know each other."""
    floors = SUBFLOORS.get(source.room)
    if floors is None:
        return []
    own, found = _folder(source.module), []
    if own not in floors and own:
        return [f"{source.path}:1: folder {own!r} of {source.room} has no floor; give it one in SUBFLOORS"]
    for line, name in imports(source):
        folder = _folder(name)
        if own_room(name) != source.room or folder in ("", own) or floors.get(folder, 0) < floors.get(own, 0):
            continue
        found.append(f"{source.path}:{line}: {source.room}/{own} imports {name}")
    return found


def _folder(name: str) -> str:
    """`echo2.control.head.events` -> `head`; empty for a module that lies on its room's own floor."""
    parts = name.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in SUBFLOORS.get(parts[1], {}) else ""


def control_complaints(source: Source) -> list[str]:
    """control/ decides and does nothing else: no clock, no chance, no I/O, no other people's packages."""
    if source.room != "control":
        return []
    return [
        f"{source.path}:{line}: control/ imports {name}, which is not plain data and arithmetic"
        for line, name in imports(source)
        if own_room(name) is None and name.split(".")[0] not in CONTROL_STDLIB
    ] + [
        f"{source.path}:{node.lineno}: control/ calls {ast.unparse(node.func)}()"
        for node in ast.walk(source.parse())
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CONTROL_CALLS
    ]


def set_iteration_complaints(source: Source) -> list[str]:
    """In control/ and sim/ nothing iterates over a set display: its order would not be the same in every process."""
    if source.room not in ("control", "sim"):
        return []
    loops = (node for node in ast.walk(source.parse()) if isinstance(node, ast.For | ast.comprehension))
    return [
        f"{source.path}:{node.iter.lineno}: iterates over a set; sort it first"
        for node in loops
        if isinstance(node.iter, ast.Set | ast.SetComp)
        or (isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) in {"set", "frozenset"})
    ]


def package_complaints(source: Source) -> list[str]:
    """torch and its kin only in the learner, the engines, and what picks their device; pickle nowhere."""
    found = []
    for line, name in imports(source):
        top = name.split(".")[0]
        if top in TORCH_PACKAGES and source.room not in TORCH_ROOMS:
            found.append(f"{source.path}:{line}: imports {top}; only {', '.join(sorted(TORCH_ROOMS))} may")
        if top in UNSAFE_PACKAGES:
            found.append(f"{source.path}:{line}: imports {top}: it runs what it reads")
    return found


def size_complaints(source: Source) -> list[str]:
    """Functions and files small enough to be read in one go. A function's decorators and docstring count."""
    lines = source.text.count("\n") + (not source.text.endswith("\n"))
    found = [f"{source.path}:1: {lines} lines; split it"] if lines >= MAX_FILE_LINES else []
    for function in functions(source.parse()):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length >= MAX_FUNCTION_LINES:
            found.append(f"{source.path}:{function.lineno}: {function.name}() has {length} lines; split it")
    return found


def name_complaints(source: Source) -> list[str]:
    """Nothing is called by a name that says nothing."""
    words = {word for part in source.module.split(".") for word in part.split("_")}
    modules = [f"{source.path}:1: a module named {word}" for word in sorted(words & FORBIDDEN_NAMES)]
    return modules + [
        f"{source.path}:{node.lineno}: a class named {node.name}"
        for node in ast.walk(source.parse())
        if isinstance(node, ast.ClassDef) and node.name.lower().endswith(tuple(sorted(FORBIDDEN_NAMES)))
    ]


def docstring_complaints(source: Source) -> list[str]:
    """Every module, public class and public function says what it is."""
    tree = source.parse()
    found = [] if ast.get_docstring(tree) else [f"{source.path}:1: no module docstring"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found += [] if ast.get_docstring(node) else [f"{source.path}:{node.lineno}: {node.name} has no docstring"]
    return found


def homonym_complaints(sources: Iterable[Source]) -> list[str]:
    """One noun, one meaning: no two public classes of the package have one name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.parse().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return [
        f"{where[-1]}: {name} is also at {', '.join(where[:-1])}"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def except_complaints(source: Source) -> list[str]:
    """No bare `except:`, and nothing as broad that just passes on in silence."""
    found = []
    for node in ast.walk(source.parse()):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kind = ast.unparse(node.type) if node.type else ""
        if not kind:
            found.append(f"{source.path}:{node.lineno}: bare except")
        elif kind in {"Exception", "BaseException"} and all(isinstance(step, ast.Pass) for step in node.body):
            found.append(f"{source.path}:{node.lineno}: except {kind}: pass hides every mistake")
    return found


def background_complaints(source: Source) -> list[str]:
    """Background work is begun by `background.py` alone, or in a TaskGroup: a bare task fails in silence. What
    `awaited` returns is awaited by somebody, so it is not thrown away, and an `on_error` does something.
    """
    if source.module == f"{PACKAGE}.background":
        return []
    tree, found = source.parse(), []
    groups = {
        ast.unparse(item.optional_vars)
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if item.optional_vars is not None and "TaskGroup(" in ast.unparse(item.context_expr)
    }
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr in BARE_TASKS and ast.unparse(node.value) not in groups) or (
            isinstance(node, ast.Name | ast.alias) and getattr(node, "id", getattr(node, "name", "")) in BARE_TASKS
        ):
            found.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}: use background.py")
        elif isinstance(node, ast.Expr) and ast.unparse(node.value).startswith("awaited("):
            found.append(f"{source.path}:{node.lineno}: nobody awaits {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"spawn", "Background"}:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(one, ast.Lambda) and isinstance(one.body, ast.Constant) for one in given):
                found.append(f"{source.path}:{node.lineno}: the errors of {ast.unparse(node)} reach nobody")
    return found


def annotation_complaints(source: Source) -> list[str]:
    """Public functions and methods say what they take and give back."""
    found = []
    for function in functions(source.parse()):
        if function.name.startswith("_") and not function.name.startswith("__"):
            continue
        named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        stars = [arg for arg in (function.args.vararg, function.args.kwarg) if arg]
        bare = [a.arg for a in [*named, *stars] if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or function.returns is None:
            missing = ", ".join(bare) or "return"
            found.append(f"{source.path}:{function.lineno}: {function.name}() lacks annotations: {missing}")
    return found


def address_complaints(source: Source) -> list[str]:
    """Host and port are joined by `addresses.join`, which writes the brackets of IPv6."""
    if source.room == "addresses":
        return []
    found = []
    for node in ast.walk(source.parse()):
        if not isinstance(node, ast.JoinedStr):
            continue
        parts = node.values
        for colon, port in itertools.pairwise(parts):
            is_colon = isinstance(colon, ast.Constant) and colon.value == ":"
            if is_colon and isinstance(port, ast.FormattedValue) and PORT_LIKE.search(ast.unparse(port.value)):
                found.append(f"{source.path}:{node.lineno}: joins host and port by itself")
    return found


def test_complaints(source: Source) -> list[str]:
    """Tests outside tests/integration/ neither sleep nor mock: they would be slow, or test the mock."""
    if not source.path.startswith(("tests/unit/", "tests/properties/", "tests/simulation/")):
        return []
    sleeps = [
        f"{source.path}:{node.lineno}: a test sleeps"
        for node in ast.walk(source.parse())
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
    ]
    mocks = [f"{source.path}:{line}: imports {name}" for line, name in imports(source) if "mock" in name.split(".")]
    return sleeps + mocks


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


RULES = (
    background_complaints,
    floor_complaints,
    subfloor_complaints,
    control_complaints,
    set_iteration_complaints,
    package_complaints,
    size_complaints,
    name_complaints,
    docstring_complaints,
    except_complaints,
    annotation_complaints,
    address_complaints,
)
RULES_OUTSIDE = (size_complaints, name_complaints, except_complaints, test_complaints)
