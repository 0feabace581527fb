"""The house rules hold in the whole tree, and each rule can be broken.

The rules themselves are in `house.py`, one function each; CONTRIBUTING.md says them in words.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import floors
import house
from echo2 import config
from echo2.config.judge import JudgeConfig

MAX_CONFIG_FIELDS = 81
HELP_CPU_SECONDS = 1.5  # `--help` promises one second; half as much again for a loaded machine
MARKDOWN = sorted([*house.REPOSITORY.glob("*.md"), *(house.REPOSITORY / "docs").rglob("*.md")])
CLI = house.SOURCE / house.PACKAGE / "cli"

# What may load torch when imported: the learner and the processes that run one, and the engines. The modules of
# engines/ named below are what every worker has, with whatever engine.
HEAVY_MODULES = re.compile(
    r"echo2\.(learner\.(core|grpo|link)(\..*)?|learner\.learner_process|engines(\..*)?|models\.sft)"
    r"|echo2\.demo\.(digit_sorting|small_models)|echo2_service\.(learner|sampler)(\..*)?"
)
LIGHT_MODULES = (
    *("echo2.engines", "echo2.engines.engine", "echo2.engines.fake_engine", "echo2.engines.model_values"),
    *("echo2.engines.registry", "echo2.engines.tokenizer", "echo2.learner.grpo.data"),
    *("echo2.learner.core.checkpoint", "echo2.learner.core.fitting"),
)


def test_the_package_obeys() -> None:
    assert house.complaints(house.package_sources()) == []


def test_one_noun_has_one_meaning() -> None:
    assert house.homonym_complaints(house.package_sources()) == []
    sources = [
        house.Source(f"echo2.{room}", f"src/echo2/{room}.py", "class Noun: pass") for room in ("tasks", "reward")
    ]
    assert "src/echo2/reward.py:1: Noun is also at src/echo2/tasks.py:1" in house.homonym_complaints(sources)


def test_no_circle_of_files() -> None:
    assert house.circles(house.package_sources()) == []
    texts = {"one": "def f():\n    from echo2.core import two", "two": "from echo2.core.three import x", "four": ""}
    texts["three"] = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from echo2.core.one import f"
    sources = [house.Source(f"echo2.core.{name}", f"src/echo2/core/{name}.py", text) for name, text in texts.items()]
    assert house.circles(sources) == [["echo2.core.one", "echo2.core.three", "echo2.core.two"]]


def test_every_folder_of_modules_is_a_package() -> None:
    """pkgutil, coverage, PyInstaller and the reader of the site's docstrings pass by a folder without this file."""
    packages = {path.parent for path in house.SOURCE.rglob("*.py")}
    assert [package for package in packages if not (package / "__init__.py").exists()] == []


def test_no_file_came_by_mistake() -> None:
    """A shell's `> name` leaves such a file, and `git add -A` takes it along."""
    beside = [path for path in house.REPOSITORY.iterdir() if path.is_file() and not path.name.startswith(".")]
    assert [path.name for path in beside if not path.stat().st_size] == []


def test_the_service_uses_every_seam() -> None:
    """A seam that nothing uses is deleted, so that the list says how much of the core the service needs."""
    sources = [source for source in house.package_sources() if source.room == floors.SERVICE]
    used = {name for source in sources for _, name in house.imports(source)}
    used |= {name.rpartition(".")[0] for name in used}
    assert floors.SEAMS - used == set()
    assert len(floors.FLOORS) <= 9


def test_tests_and_examples_obey() -> None:
    assert house.complaints(house.other_sources(), house.RULES_OUTSIDE) == []


LONG_BODY = "\n".join(["    x = 1"] * house.MAX_FUNCTION_LINES)
BROKEN = [
    (house.floor_complaints, "echo2.weights.format.segments", "from echo2.tasks import base"),  # same floor
    (house.floor_complaints, "echo2.head.decide.planner", "import echo2.launch.start"),  # upward
    (
        house.floor_complaints,
        "echo2.weights.format.segments",
        "def f():\n    from echo2.learner.core import model",
    ),  # inside a function
    (house.floor_complaints, "echo2.weights.store.store", "from ...learner.core import model"),  # relative
    (
        house.floor_complaints,
        "echo2.weights.format.segments",
        "import importlib\nimportlib.import_module('echo2.cli')",
    ),  # dynamic
    (house.floor_complaints, "echo2.kitchen.sink", "import math"),  # a room without a floor
    (house.floor_complaints, "echo2.cli", "from echo2_service.commands import serve"),  # the service
    (house.floor_complaints, "echo2.trl", "from echo2.cli import main"),  # a file that belongs to another room
    (house.folder_complaints, "echo2.head.decide.planner", "from echo2.head.serve import head"),  # upward
    (house.folder_complaints, "echo2.head.fleet.machines", "from echo2.head.ledger import ledger"),  # same floor
    (house.folder_complaints, "echo2.worker.decide.scheduler", "from echo2.worker.worker_process import run_worker"),
    (house.folder_complaints, "echo2.learner.core.model", "from echo2.learner.grpo import loop"),
    (house.folder_complaints, "echo2.weights.attic.old", ""),  # a folder without a floor
    (house.folder_complaints, "echo2_service.learner.models", "from echo2_service.front import app"),
    (house.seam_complaints, "echo2_service.front.app", "from echo2.head.decide import planner"),
    (house.decide_complaints, "echo2.head.decide.planner", "import time"),
    (house.decide_complaints, "echo2.head.decide.planner", "from random import Random"),
    (house.decide_complaints, "echo2.head.fleet.decide.measurements", "import numpy as np"),
    (house.decide_complaints, "echo2.worker.decide.scheduler", "print('hello')"),
    (house.decide_complaints, "echo2.head.decide.planner", "from echo2.core.disk import num_bytes"),
    (house.decide_complaints, "echo2_service.decide.order", "from echo2_service.limits import BODY_BYTES_MAX"),
    (house.set_iteration_complaints, "echo2.head.decide.planner", "for x in set(y): pass"),
    (house.package_complaints, "echo2.head.serve.head", "def f():\n    import torch"),
    (house.package_complaints, "echo2.head.ledger.ledger", "import pickle"),
    (house.size_complaints, "echo2.core.types", f"def f() -> None:\n{LONG_BODY}"),
    (house.size_complaints, "echo2.core.types", "x = 1\n" * house.MAX_FILE_LINES),
    (house.name_complaints, "echo2.launch.text_utils", ""),
    (house.name_complaints, "echo2.head.serve.head", "class RunManager: pass"),
    (house.docstring_complaints, "echo2.core.types", "x = 1"),
    (house.docstring_complaints, "echo2.core.types", '"""A module."""\ndef f() -> None: ...'),
    (house.docstring_complaints, "echo2.core.types", '"""A module."""\nclass A: ...'),
    (house.except_complaints, "echo2.core.types", "try:\n    pass\nexcept:\n    raise"),
    (house.except_complaints, "echo2.core.types", "try:\n    pass\nexcept Exception:\n    pass"),
    (house.address_complaints, "echo2_service.fleet.server", "address = f'{host}:{self.port}'"),
    (house.owned_complaints, "echo2.core.types", "import subprocess\nsubprocess.Popen(['true'])"),
    (house.owned_complaints, "echo2.core.types", "from asyncio import create_subprocess_exec"),
    (house.background_complaints, "echo2.core.types", "import asyncio\nasyncio.ensure_future(f())"),
    (house.background_complaints, "echo2.core.types", "t = loop.create_task(f())"),
    (house.background_complaints, "echo2.core.types", "from asyncio import create_task"),
    (house.background_complaints, "echo2.core.types", "async with asyncio.TaskGroup() as group: f(group)"),
    (house.background_complaints, "echo2.core.types", "made(asyncio.ensure_future)"),
    (house.background_complaints, "echo2.core.types", "awaited(f())"),
    (house.owned_complaints, "echo2.core.types", "loop.call_soon_threadsafe(f)"),
    (house.owned_complaints, "echo2.core.types", "await loop.run_in_executor(threads, f)"),
    (house.owned_complaints, "echo2.core.child", "asyncio.run_coroutine_threadsafe(f(), loop)"),
    (house.background_complaints, "echo2.core.types", "spawn(f(), lambda error: None)"),
    (house.background_complaints, "echo2.core.types", "for link in links:\n    await link.close()"),
    (house.ownership_complaints, "echo2.head.decide.results", "state.training.version = 3"),
    (house.ownership_complaints, "echo2.head.decide.results", "state.version += 1"),
    (house.ownership_complaints, "echo2.head.decide.planner", "class P:\n    def f(self): self.groups.next_number = 3"),
    (house.ownership_complaints, "echo2.head.decide.results", "state.snapshots.published[3] = ref"),
    (house.ownership_complaints, "echo2.head.decide.results", "del state.rounds[3]"),
    (house.ownership_complaints, "echo2.head.serve.claims", "head.books.turned_away.pop(worker_id, None)"),
    (house.progress_complaints, "echo2.models.sft", "from rich.progress import track"),
    (house.annotation_complaints, "echo2.core.types", "def f(x) -> int: return x"),
    (house.annotation_complaints, "echo2.core.types", "class A:\n    async def f(self, x: int): return x"),
]


@pytest.mark.parametrize(
    ("rule", "module", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value)[-30:])
)
def test_rule_can_be_broken(rule: house.Rule, module: str, text: str) -> None:
    source = house.Source(module, f"src/{module.replace('.', '/')}.py", text)
    assert rule(source)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "echo2.head.decide.planner",
            "from echo2.head.strangers.decide import checks\nfrom echo2.core.types import Lease\nimport heapq",
        ),
        (
            "echo2.head.serve.head",
            "from echo2.head.decide.planner import Planner\nfrom echo2.tasks import streams\nimport asyncio",
        ),
        ("echo2.learner.core.model", "import torch"),
        ("echo2.planning.sim.world", "for x in sorted(set([2, 1])): pass"),
        ("echo2_service.front.app", "from echo2.core.errors import UserError\nfrom echo2_service import limits"),
        ("echo2.views.watch", "async def _f():\n    async with together() as group: group.create_task(_f())"),
        ("echo2.views.watch", "task = spawn(f(), self.fail)\nother = awaited(f())"),
    ],
)
def test_rules_leave_good_code_alone(module: str, text: str) -> None:
    source = house.Source(module, f"src/{module.replace('.', '/')}.py", f'"""What this is."""\n{text}\n')
    assert house.complaints([source]) == []


def test_light_modules_import_without_torch() -> None:
    """A training step cannot stall a heartbeat, and `--help` cannot wait for torch: nothing light ever loads it."""
    modules = [source.module for source in house.package_sources()]
    assert set(LIGHT_MODULES) <= set(modules)
    light = [name for name in modules if not HEAVY_MODULES.fullmatch(name) or name in LIGHT_MODULES]
    light = [name for name in light if not name.endswith("__main__")]
    script = (
        "import importlib, sys\n"
        "wrong = []\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        wrong.append(f'{name}: {error}')\n"
        "    for heavy in sorted({'torch', 'transformers'} & set(sys.modules)):\n"
        "        wrong.append(f'{name}: loads {heavy}')\n"
        "        del sys.modules[heavy]\n"
        "sys.exit('\\n'.join(wrong) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *light], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not CLI.exists(), reason="no command line yet")
def test_help_answers_within_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "import sys; from echo2.cli import main; sys.exit(main())", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_seconds < HELP_CPU_SECONDS


def test_config_is_small_and_explained() -> None:
    every = list(config.all_fields())
    assert len(every) - 1 + len(JudgeConfig.__struct_fields__) <= MAX_CONFIG_FIELDS  # reward.judge is a table of them
    for page in ("AGENTS.md", "CONTRIBUTING.md"):
        assert f"at most {MAX_CONFIG_FIELDS}" in (house.REPOSITORY / page).read_text(encoding="utf-8")
    assert [f"{section}.{name}" for section, name, _, _, description in every if not description.strip()] == []


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(house.REPOSITORY)))
def test_links_resolve(page: Path) -> None:
    broken = [link for link in _links(page.read_text(encoding="utf-8")) if not _resolves(page, link)]
    assert broken == []


def test_readme_says_the_two_commands() -> None:
    readme = (house.REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(house.SOURCE), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _links(text: str) -> list[str]:
    """Targets of [text](target) that are not on the web, outside code blocks."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def _resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or not target.is_relative_to(house.REPOSITORY):
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target.read_text(encoding="utf-8"))


def _anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+\s+(.+?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
