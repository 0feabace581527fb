"""The house rules as functions from source text to complaints: what `test_house_rules.py` runs over the tree.

Every rule is parsed from the syntax tree, never imported, so that a module which cannot be imported is still judged. A
complaint is a string `path:line: what is wrong`. This module is not a linter: ruff and mypy do what they can do.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeAlias

from floors import FLOOR_OF_ROOM, FOLDERS, ROOM_OF_FILE, SEAMS, SERVICE

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src"
PACKAGE = "echo2"
GENERATED = ("wire_pb2.py", "wire_pb2_grpc.py", "tinker_pb2.py")

MAX_FUNCTION_LINES = 70  # "under 70": 69 pass
MAX_FILE_LINES = 500
FORBIDDEN_NAMES = frozenset({"utils", "util", "helpers", "helper", "manager", "misc", "common"})

TORCH_ROOMS = frozenset({"learner", "engines", "demo"})
TORCH_FILES = frozenset({"echo2.core.devices", "echo2_service.learner.losses", "echo2_service.learner.tenants"})
TORCH_PACKAGES = frozenset({"torch", "transformers", "accelerate", "peft", "vllm"})
#: What deciders may import of the standard library: data types and arithmetic, nothing that waits, draws or writes.
DECIDE_STDLIB = frozenset(
    {"__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum", "fractions", "functools"}
    | {"hashlib", "heapq", "itertools", "json", "math", "operator", "re", "statistics", "string", "struct", "types"}
    | {"typing", "zlib"}
)
DECIDE_CALLS = frozenset({"print", "open", "input", "exec", "eval", "id", "hash"})  # I/O, or differs between processes
#: What deciders may import of ours beside other deciders.
DECIDE_CORE = ("echo2.core.types", "echo2.core.errors")
PORT_LIKE = re.compile(r"port|bound|sockname")
BARE_TASKS = frozenset({"create_task", "ensure_future", "TaskGroup"})
#: Methods that change a container. Verbs of the head's own tables have other names.
MUTATORS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "put_nowait"}
    | {"remove", "setdefault", "update"}
)
PROCESS_STARTERS = frozenset({"Popen", "create_subprocess_exec", "create_subprocess_shell", "killpg"})
#: Files that start processes themselves: the class that does it, and one that runs with the standard library alone.
STARTING_FILES = frozenset({"echo2.core.child", "echo2.engines.servers.guard"})
THREAD_CALLS = frozenset({"call_soon_threadsafe", "run_coroutine_threadsafe", "run_in_executor"})
UNSAFE_PACKAGES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})


Rule: TypeAlias = "Callable[[Source], list[str]]"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: `module` is its dotted name (`echo2.head.decide.planner`), `path` what complaints call it."""

    module: str
    path: str
    text: str

    @property
    def room(self) -> str:
        return room_of(self.module) or ""

    @property
    def decides(self) -> bool:
        return "decide" in self.module.split(".")[1:-1]

    def parse(self) -> ast.Module:
        return _parsed(self.text, self.path)[0]

    def nodes(self) -> tuple[ast.AST, ...]:
        return _parsed(self.text, self.path)[1]


@lru_cache(maxsize=1)  # all rules read one file before the next: trees of all files slow down whoever collects garbage
def _parsed(text: str, path: str) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    tree = ast.parse(text, path)
    return tree, tuple(ast.walk(tree))


@cache
def package_sources() -> list[Source]:
    """Every hand-written module of the two packages, in a stable order."""
    packages = (SOURCE / PACKAGE, SOURCE / SERVICE)
    paths = [path for package in packages for path in sorted(package.rglob("*.py")) if path.name not in GENERATED]
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


@cache
def imports(source: Source) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything imported anywhere in the file, inside functions and TYPE_CHECKING too.

    `from echo2.head.decide import events` yields `echo2.head.decide.events`: the most that the import could reach.
    """
    return tuple(_imports(source))


def _imports(source: Source) -> Iterator[tuple[int, str]]:
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in source.nodes():
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
    return dotted(node.func) in {"__import__", "import_module", "importlib.import_module"}


def room_of(name: str) -> str | None:
    """The room of a dotted name of ours (`echo2.head.decide.events` -> `head`); the service is one room; None for other
    packages, and "" for the package itself.
    """
    first, *rest = name.split(".")
    if first == SERVICE:
        return SERVICE
    if first != PACKAGE:
        return None
    room = rest[0] if rest else ""
    return ROOM_OF_FILE.get(room, room)


def folder_of(name: str, room: str) -> str:
    """The folder within its room of a dotted name: `echo2.head.fleet.decide.measurements` -> `fleet.decide`."""
    parts = name.split(".")[1 if room == SERVICE else 2 :]
    known = {folder for floor in FOLDERS.get(room, ()) for folder in floor}
    return next((".".join(parts[:n]) for n in (2, 1) if ".".join(parts[:n]) in known and len(parts) >= n), "")


def floor_complaints(source: Source) -> list[str]:
    """Imports go down only; rooms on one floor do not know each other; a new room must be given its floor."""
    room = source.room
    if room in ("", SERVICE):  # the package itself imports `api` when somebody asks; the service has a rule of its own
        return []
    if room not in FLOOR_OF_ROOM:
        return [f"{source.path}:1: room {room!r} has no floor; give it one in floors.py and in CONTRIBUTING.md"]
    found = []
    for line, name in imports(source):
        other = room_of(name)
        if other == SERVICE:
            found.append(f"{source.path}:{line}: imports {name}: nothing in {PACKAGE} knows the service")
        elif other in FLOOR_OF_ROOM and other != room and FLOOR_OF_ROOM[other] >= FLOOR_OF_ROOM[room]:
            floors = f"{room} (floor {FLOOR_OF_ROOM[room]}) imports {name} (floor {FLOOR_OF_ROOM[other]})"
            found.append(f"{source.path}:{line}: {floors}")
    return found


def folder_complaints(source: Source) -> list[str]:
    """Within a room imports go down too: folders on one floor do not know each other, the planner's three aside."""
    room = source.room
    floors = {folder: floor for floor, folders in enumerate(FOLDERS.get(room, ())) for folder in folders}
    if not floors:
        return []
    parent = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    own, found = folder_of(source.module, room), []
    if parent.count(".") >= (1 if room == SERVICE else 2) and not own:
        return [f"{source.path}:1: this folder of {room} has no floor; give it one in floors.py"]
    for line, name in imports(source):
        folder = folder_of(name, room) if room_of(name) == room else own
        if (
            folder != own
            and floors[folder] >= floors[own]
            and not (folder.endswith("decide") and own.endswith("decide"))
        ):
            found.append(f"{source.path}:{line}: {room}/{own} imports {name}")
    return found


def seam_complaints(source: Source) -> list[str]:
    """The service uses the core only through the modules, and all of the rooms, named in SEAMS."""
    if source.room != SERVICE:
        return []
    return [
        f"{source.path}:{line}: imports {name}, which is no seam"
        for line, name in imports(source)
        if room_of(name) not in (None, SERVICE) and not any(f"{name}.".startswith(f"{seam}.") for seam in SEAMS)
    ]


def circles(sources: Iterable[Source]) -> list[list[str]]:
    """Modules that import each other in a circle, also inside functions and under TYPE_CHECKING. That a package is
    imported with its modules is not counted.
    """
    sources = list(sources)
    known = {source.module for source in sources}
    knows = {source.module: sorted(_modules(source, known)) for source in sources}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in knows[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            place = stack.index(module)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for module in knows:
        if module not in index:
            visit(module)
    return found


def _modules(source: Source, known: set[str]) -> set[str]:
    found = set()
    for _, name in imports(source):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name not in ("", PACKAGE, source.module):
            found.add(name)
    return found


def decide_complaints(source: Source) -> list[str]:
    """What lies in decide/ decides and does nothing else: no clock, no chance, no I/O, no other people's packages."""
    if not source.decides:
        return []
    return [
        f"{source.path}:{line}: decide/ imports {name}, which is no decider, and no plain data and arithmetic"
        for line, name in imports(source)
        if not _may_be_known_by_deciders(name)
    ] + [
        f"{source.path}:{node.lineno}: decide/ calls {ast.unparse(node.func)}()"
        for node in source.nodes()
        if isinstance(node, ast.Call) and dotted(node.func) in DECIDE_CALLS
    ]


def _may_be_known_by_deciders(name: str) -> bool:
    if room_of(name) is None:
        return name.split(".")[0] in DECIDE_STDLIB
    return "decide" in name.split(".")[1:] or name.startswith(tuple(f"{module}." for module in DECIDE_CORE))


def set_iteration_complaints(source: Source) -> list[str]:
    """In decide/ and sim/ nothing iterates over a set display: its order would not be the same in every process."""
    if not source.decides and not source.module.startswith("echo2.planning.sim."):
        return []
    loops = (node for node in source.nodes() if isinstance(node, ast.For | ast.comprehension))
    return [
        f"{source.path}:{node.iter.lineno}: iterates over a set; sort it first"
        for node in loops
        if isinstance(node.iter, ast.Set | ast.SetComp)
        or (isinstance(node.iter, ast.Call) and dotted(node.iter.func) in {"set", "frozenset"})
    ]


def package_complaints(source: Source) -> list[str]:
    """torch and its kin only in the learner, the engines, and what picks their device; pickle nowhere."""
    found = []
    for line, name in imports(source):
        top = name.split(".")[0]
        if top in TORCH_PACKAGES and source.room not in TORCH_ROOMS and source.module not in TORCH_FILES:
            found.append(f"{source.path}:{line}: imports {top}; only {', '.join(sorted(TORCH_ROOMS))} may")
        if top in UNSAFE_PACKAGES:
            found.append(f"{source.path}:{line}: imports {top}: it runs what it reads")
    return found


def size_complaints(source: Source) -> list[str]:
    """Functions and files small enough to be read in one go. A function's decorators and docstring count."""
    lines = source.text.count("\n") + (not source.text.endswith("\n"))
    found = [f"{source.path}:1: {lines} lines; split it"] if lines >= MAX_FILE_LINES else []
    for function in functions(source):
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
        for node in source.nodes()
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
        for found in re.finditer(r"^class ([^\W_]\w*)", source.text, re.MULTILINE):
            line = source.text.count("\n", 0, found.start()) + 1
            places.setdefault(found[1], []).append(f"{source.path}:{line}")
    return [
        f"{where[-1]}: {name} is also at {', '.join(where[:-1])}"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def except_complaints(source: Source) -> list[str]:
    """No bare `except:`, and nothing as broad that just passes on in silence."""
    found = []
    for node in source.nodes():
        if not isinstance(node, ast.ExceptHandler):
            continue
        kind = dotted(node.type) if node.type else ""
        if not node.type:
            found.append(f"{source.path}:{node.lineno}: bare except")
        elif kind in {"Exception", "BaseException"} and all(isinstance(step, ast.Pass) for step in node.body):
            found.append(f"{source.path}:{node.lineno}: except {kind}: pass hides every mistake")
    return found


def ownership_complaints(source: Source) -> list[str]:
    """In the head, an object's fields are written in the file of its class, by its verbs. Other files read them."""
    if source.room != "head" or not (source.decides or ".serve." in source.module):
        return []
    stores = (n for n in source.nodes() if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    own = {store.attr for store in stores if dotted(store.value) == "self"}
    for node in source.nodes():
        if isinstance(node, ast.ClassDef):
            own |= {ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
    found = []
    for node in source.nodes():
        target: ast.AST = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        elif not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and dotted(target.value) != "self" and target.attr not in own:
            found.append(f"{source.path}:{target.lineno}: writes a field of another file's object: {ast.unparse(node)}")
    return found


def owned_complaints(source: Source) -> list[str]:
    """`ChildProcess` alone starts processes that somebody watches; threads call into loops by `loop_thread.py`."""
    found = frozenset() if source.module in STARTING_FILES else PROCESS_STARTERS
    found |= frozenset() if source.module == "echo2.core.loop_thread" else THREAD_CALLS
    return [
        f"{source.path}:{node.lineno}: {ast.unparse(node)}: use core/child.py or core/loop_thread.py"
        for node in source.nodes()
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))) in found
    ]


def background_complaints(source: Source) -> list[str]:
    """Background work is begun by `background.py` alone, or in a group of its `together`: a bare task fails in silence.
    What `awaited` returns is awaited, an `on_error` does something, and closes are no loop that a failing one ends.
    """
    if source.module == "echo2.core.background":
        return []
    found = []
    groups = {
        ast.unparse(item.optional_vars)
        for node in source.nodes()
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if item.optional_vars is not None and dotted(getattr(item.context_expr, "func", item)) == "together"
    }
    for node in source.nodes():
        if (isinstance(node, ast.Attribute) and node.attr in BARE_TASKS and dotted(node.value) not in groups) or (
            isinstance(node, ast.Name | ast.alias) and getattr(node, "id", getattr(node, "name", "")) in BARE_TASKS
        ):
            found.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}: use background.py")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) == "awaited":
            found.append(f"{source.path}:{node.lineno}: nobody awaits {ast.unparse(node)}")
        elif isinstance(node, ast.For) and re.search(r"await \S+\.a?close\(\)$", ast.unparse(node)):
            found.append(f"{source.path}:{node.lineno}: one that fails leaves the rest open: use close_all")
        elif isinstance(node, ast.Call) and dotted(node.func) in {"spawn", "Background"}:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(isinstance(one, ast.Lambda) and isinstance(one.body, ast.Constant) for one in given):
                found.append(f"{source.path}:{node.lineno}: the errors of {ast.unparse(node)} reach nobody")
    return found


def annotation_complaints(source: Source) -> list[str]:
    """Public functions and methods say what they take and give back."""
    found = []
    for function in (one for one in functions(source) if not re.match("_[^_]", one.name)):
        named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        stars = [arg for arg in (function.args.vararg, function.args.kwarg) if arg]
        bare = [a.arg for a in [*named, *stars] if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or function.returns is None:
            missing = ", ".join(bare) or "return"
            found.append(f"{source.path}:{function.lineno}: {function.name}() lacks annotations: {missing}")
    return found


def address_complaints(source: Source) -> list[str]:
    """Host and port are joined by `addresses.join`, which writes the brackets of IPv6."""
    if source.module == "echo2.core.addresses":
        return []
    found = []
    for node in source.nodes():
        if not isinstance(node, ast.JoinedStr):
            continue
        for colon, port in itertools.pairwise(node.values):
            is_colon = isinstance(colon, ast.Constant) and colon.value == ":"
            if is_colon and isinstance(port, ast.FormattedValue) and PORT_LIKE.search(ast.unparse(port.value)):
                found.append(f"{source.path}:{node.lineno}: joins host and port by itself")
    return found


def progress_complaints(source: Source) -> list[str]:
    """What shows a bar on a terminal prints lines where there is none; `RunDisplay` has its own."""
    tells = "PlainLines" in source.text or source.module == "echo2.views.display"
    return [f"{source.path}: no PlainLines"] if "from rich.progress import" in source.text and not tells else []


def test_complaints(source: Source) -> list[str]:
    """Tests outside tests/integration/ neither sleep nor mock: they would be slow, or test the mock."""
    if not source.path.startswith(("tests/unit/", "tests/properties/", "tests/simulation/")):
        return []
    sleeps = [
        f"{source.path}:{node.lineno}: a test sleeps"
        for node in source.nodes()
        if isinstance(node, ast.Call) and dotted(node.func) == "time.sleep"
    ]
    mocks = [f"{source.path}:{line}: imports {name}" for line, name in imports(source) if "mock" in name.split(".")]
    return sleeps + mocks


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in source.nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression that is one name after the other; else an empty text. `ast.unparse` is slow."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


RULES = (
    background_complaints,
    ownership_complaints,
    owned_complaints,
    floor_complaints,
    folder_complaints,
    seam_complaints,
    decide_complaints,
    set_iteration_complaints,
    package_complaints,
    size_complaints,
    name_complaints,
    docstring_complaints,
    except_complaints,
    annotation_complaints,
    address_complaints,
    progress_complaints,
)
RULES_OUTSIDE = (size_complaints, name_complaints, except_complaints, test_complaints)


def complaints(sources: Iterable[Source], rules: Iterable[Rule] = RULES) -> list[str]:
    return [f"{rule.__name__}: {found}" for source in sources for rule in rules for found in rule(source)]
