"""Counts the house: files, lines by kind and by room, small files, files that one other imports, circles, files on
three paths, and seconds of CI by target, if `.ci/run` has run in the checkout.

    python benchmarks/count_house.py [TREE] [--run]

TREE: a checkout, also of an older layout (default: this one). `--run`: count copies and writes, too, in a run of this
checkout (`count_copies.py`; a minute). Lines of code are those with a token that is no comment
and no docstring. Imports count wherever they stand, also inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from count_copies import counted
from recording import there

REPOSITORY = Path(__file__).resolve().parent.parent
GENERATED = "_pb2.py"
SMALL_LINES = 80

#: Files that a rollout group goes through from its issue to its gradient.
GROUP = """
echo2.head.decide: granting state planner results events commands groups pacing
echo2.head.ledger: driver ledger
echo2.head.serve: effects connections head reading service results learner_calls
echo2.tasks: streams base
echo2.transport: messages grpc_server door grpc_link
echo2.worker: worker_process decide.scheduler sampling
echo2.rollouts: generate
echo2.engines: tokenizer decode_loop torch_engine rows sampler compact
echo2.reward: reward_processes messages score
echo2.sandbox: code_process pipes child
echo2.learner: link.head_client link.session grpo.loop grpo.feed grpo.data grpo.step_meter
echo2.learner.core: trainer mesh batch model output_layer losses
"""
#: Files that a snapshot goes through from the optimizer to an engine.
SNAPSHOT = """
echo2.learner: grpo.loop core.trainer core.publication link.session link.head_client link.sending
echo2.weights.format: segments planes deltas manifest
echo2.weights.store: archive store content
echo2.weights.broadcast: distribution origin peer edges serving
echo2.weights.broadcast.decide: origin fetcher plan routes origin_messages
echo2.head: serve.learner_calls decide.planner
echo2.transport: messages message_bytes grpc_server door grpc_link
echo2.worker: worker_process weights decide.scheduler
echo2.engines: decode_loop torch_engine snapshot_tensors
"""
#: Files that a call of the service's `forward_backward` goes through, to the learner's trainer.
FORWARD_BACKWARD = """
echo2_service.front: app request_guard requests_api bodies data body_reader dispatch database work
echo2_service: decide.order backend calling tinker_pb2 fleet.machines
echo2_service.learner: call_queue models journal tenants
echo2.learner.core: trainer
"""
#: Words of a topic: files that have one in their code, imports aside, know the topic; others only mention it.
TOPICS = {
    "broadcast": r"\b(Fetcher|OriginNode|PeerNode|Broadcast|plan_routes|stripes?)\b",
    "strangers": r"\b(strangers?|Trust|TicketCredits|penalt(y|ies)|quarantine)\b",
    "engines": r"\b(Engine|make_engine)\b",
    "losses": r"\b(LOSS_PARAMS|loss_params|policy_loss|TokenLoss)\b",
}


def modules(tree: Path) -> dict[str, Path]:
    """Hand-written modules of the packages below src/, by their dotted names."""
    root = tree / "src"
    paths = sorted(path for path in root.glob("echo2*/**/*.py") if not path.name.endswith(GENERATED))
    return {
        path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for path in paths
    }


def by_kind(text: str) -> Counter[str]:
    """The number of lines with code (a token that is no comment and no docstring), and of the others: of docstrings,
    comments alone, and nothing."""
    code, comments, docstrings = set[int](), set[int](), set[int]()
    silent = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines = comments if token.type == tokenize.COMMENT else code
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code -= docstrings
    comments -= code | docstrings
    counts = Counter(code=len(code), docstrings=len(docstrings), comments=len(comments))
    return counts + Counter(blank=text.count("\n") - counts.total())


def code_of(text: str) -> str:
    """The text of a module without imports, docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not _is_silent(each)]
    return ast.unparse(tree)


def _is_silent(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom)


def imported(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that a module imports; the packages that this imports on the way are not counted."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name not in ("", "echo2", module):
            found.add(name)
    return found


def circles(knows: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules from each of which every other is reached."""
    reach = {module: _reached(module, knows) for module in knows}
    left, found = set(knows), []
    for module in sorted(knows):
        ring = sorted(other for other in reach[module] & left if module in reach[other])
        if module in left and len(ring) > 1:
            found.append(ring)
            left -= set(ring)
    return found


def _reached(module: str, knows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = knows[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def on_path(listed: str) -> Iterator[str]:
    """The dotted names of a path's files."""
    for line in listed.strip().splitlines():
        package, _, names = line.partition(": ")
        yield from (f"{package}.{name}" for name in names.split())


def settings(code: Mapping[str, str]) -> dict[str, Any]:
    """Files and rooms that read a setting: the median over all settings of config/sections.py, and the most."""
    sections = next((text for module, text in code.items() if module.endswith("config.sections")), "")
    readers: dict[str, set[str]] = {}
    for section in (node for node in ast.parse(sections).body if isinstance(node, ast.ClassDef)):
        word = section.name.removesuffix("Config").lower()
        for field in section.body:
            if word and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                read = re.compile(rf"\b{word}\.{field.target.id}\b")
                readers[f"{word}.{field.target.id}"] = {module for module, text in code.items() if read.search(text)}
    if not readers:
        return {}
    rooms = {name: len({room_of(module) for module in files}) for name, files in readers.items()}
    return {
        "settings": len(readers),
        "files": statistics.median(map(len, readers.values())),
        "rooms": statistics.median(rooms.values()),
        "most": max((count, name) for name, count in rooms.items()),
    }


def floors(knows: Mapping[str, set[str]]) -> int:
    """The longest chain of rooms of which each imports the next; rooms in a circle stand on one floor. Files beside the
    rooms have no floor."""
    folders = Counter(room_of(module) for module in knows if module.count(".") > 1)
    rooms: dict[str, set[str]] = {room: set() for room in folders}
    for module, others in knows.items():
        if (room := room_of(module)) in rooms:
            rooms[room].update(room_of(other) for other in others if room_of(other) in rooms)
    reach = {room: _reached(room, rooms) - {room} for room in rooms}
    below = {room: {other for other in reach[room] if room not in reach[other]} for room in rooms}
    heights: dict[str, int] = {}
    for room in sorted(rooms, key=lambda room: len(below[room])):
        heights[room] = 1 + max((heights[other] for other in below[room]), default=0)
    return max(heights.values())


def room_of(module: str) -> str:
    """The topmost folder, or the file beside the folders; the service is one room."""
    first, *rest = module.split(".")
    return first if first != "echo2" or not rest else rest[0]


def count(tree: Path) -> dict[str, Any]:
    """All counts of a checkout."""
    known = modules(tree)
    texts = {module: path.read_text(encoding="utf-8") for module, path in known.items()}
    knows = {module: imported(module, path, known) for module, path in known.items()}
    importers = Counter(other for others in knows.values() for other in others)
    is_service = {module: module.startswith(("echo2_service", "echo2.service")) for module in known}
    lines = {module: by_kind(text) for module, text in texts.items()}
    rooms: dict[str, Counter[str]] = {}
    for module, counts in lines.items():
        rooms.setdefault(room_of(module), Counter()).update(counts)
    topics, code = {}, {module: code_of(text) for module, text in texts.items()}
    for name, words in TOPICS.items():
        files = [module for module in known if re.search(words, code[module])]
        mentions = sum(bool(re.search(words, text)) for text in texts.values())
        topics[name] = {"files": len(files), "rooms": len({room_of(module) for module in files}), "mentions": mentions}
    topics["a setting"] = settings(code)
    took = tree / "build" / "ci_seconds.json"
    paths = {"group": GROUP, "snapshot": SNAPSHOT, "forward_backward": FORWARD_BACKWARD}
    generated = {"echo2_service.tinker_pb2"}
    return {
        "files": {"core": len(known) - sum(is_service.values()), "service": sum(is_service.values())},
        "code_lines": {
            "core": sum(counts["code"] for module, counts in lines.items() if not is_service[module]),
            "service": sum(counts["code"] for module, counts in lines.items() if is_service[module]),
        },
        "lines": {
            "core": sum(text.count("\n") for module, text in texts.items() if not is_service[module]),
            "service": sum(text.count("\n") for module, text in texts.items() if is_service[module]),
        },
        "lines_by_kind": {
            "all but the service": sum(
                (counts for module, counts in lines.items() if not is_service[module]), Counter()
            ),
            **dict(sorted(rooms.items(), key=lambda item: -item[1].total())),
        },
        f"files_below_{SMALL_LINES}_lines": sum(text.count("\n") < SMALL_LINES for text in texts.values()),
        "files_imported_by_one": sum(count == 1 for count in importers.values()),
        "rooms": len({room_of(module) for module in known}),
        "floors": floors({module: others for module, others in knows.items() if not is_service[module]}),
        "circles": circles(knows),
        "topics": topics,
        "ci_seconds": json.loads(took.read_text()) if took.exists() else {},
        "paths": {name: len(list(on_path(listed))) for name, listed in paths.items()},
        "not_there": [
            module for listed in paths.values() for module in on_path(listed) if module not in known.keys() | generated
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=there, nargs="?", default=REPOSITORY)
    parser.add_argument("--run", action="store_true", help="count copies and writes, too")
    options = parser.parse_args()
    print(json.dumps(count(options.tree) | ({"run": counted()} if options.run else {}), indent=2))
