"""The house rules hold in the whole tree, and each rule can be broken.

The rules themselves are in `house.py`, one function each; CONTRIBUTING.md says them in words.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import house
from echo2 import config

MAX_CONFIG_FIELDS = 62
HELP_CPU_SECONDS = 1.5  # `--help` promises one second; half as much again for a loaded machine
MARKDOWN = sorted([*house.REPOSITORY.glob("*.md"), *(house.REPOSITORY / "docs").rglob("*.md")])
CLI = house.SOURCE / house.PACKAGE / "cli.py"

# What may load torch when imported: the learner and the process that runs it, and the engines. The modules of rollout/
# named below are what every worker has, with whatever engine.
HEAVY_MODULES = re.compile(
    r"echo2\.(learner(\..*)?|rollout\..*|(runtime|service)\.learner(\..*)?|service\.sampler(\..*)?"
    r"|demo\.(digit_sorting|small_models)|runtime\.launch\.sft)"
)
LIGHT_ROLLOUT = ("echo2.rollout", "echo2.rollout.engine", "echo2.rollout.fake_engine", "echo2.rollout.generate")

Rule = Callable[[house.Source], list[str]]


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__.removesuffix("_complaints"))
def test_package_obeys(rule: Rule) -> None:
    complaints = [complaint for source in house.package_sources() for complaint in rule(source)]
    assert not complaints, "\n".join(["", (rule.__doc__ or "").strip(), *complaints])


def test_one_noun_has_one_meaning() -> None:
    assert house.homonym_complaints(house.package_sources()) == []
    sources = [
        house.Source(f"echo2.{room}", f"src/echo2/{room}.py", "class Noun: pass") for room in ("tasks", "reward")
    ]
    assert "src/echo2/reward.py:1: Noun is also at src/echo2/tasks.py:1" in house.homonym_complaints(sources)


@pytest.mark.parametrize("rule", house.RULES_OUTSIDE, ids=lambda rule: rule.__name__.removesuffix("_complaints"))
def test_tests_and_examples_obey(rule: Rule) -> None:
    complaints = [complaint for source in house.other_sources() for complaint in rule(source)]
    assert not complaints, "\n".join(["", (rule.__doc__ or "").strip(), *complaints])


LONG_BODY = "\n".join(["    x = 1"] * house.MAX_FUNCTION_LINES)
BROKEN = [
    (house.floor_complaints, "echo2.weights.segments", "from echo2.control import machine"),  # same floor
    (house.floor_complaints, "echo2.control.head.planner", "import echo2.runtime.clock"),  # upward
    (
        house.floor_complaints,
        "echo2.weights.segments",
        "def f():\n    from echo2.learner import model",
    ),  # inside a function
    (house.floor_complaints, "echo2.weights.segments", "from ..learner import model"),  # relative
    (
        house.floor_complaints,
        "echo2.weights.segments",
        "import importlib\nimportlib.import_module('echo2.cli')",
    ),  # dynamic
    (house.floor_complaints, "echo2.kitchen.sink", "import math"),  # a room without a floor
    (house.control_complaints, "echo2.control.head.planner", "import time"),
    (house.control_complaints, "echo2.control.head.planner", "from random import Random"),
    (house.control_complaints, "echo2.control.head.planner", "import numpy as np"),
    (house.control_complaints, "echo2.control.head.planner", "print('hello')"),
    (house.set_iteration_complaints, "echo2.control.head.planner", "for x in set(y): pass"),
    (house.package_complaints, "echo2.runtime.head.head", "def f():\n    import torch"),
    (house.package_complaints, "echo2.buffer.ledger", "import pickle"),
    (house.size_complaints, "echo2.types", f"def f() -> None:\n{LONG_BODY}"),
    (house.size_complaints, "echo2.types", "x = 1\n" * house.MAX_FILE_LINES),
    (house.name_complaints, "echo2.runtime.text_utils", ""),
    (house.name_complaints, "echo2.runtime.head.head", "class RunManager: pass"),
    (house.docstring_complaints, "echo2.types", "x = 1"),
    (house.docstring_complaints, "echo2.types", '"""A module."""\ndef f() -> None: ...'),
    (house.docstring_complaints, "echo2.types", '"""A module."""\nclass A: ...'),
    (house.except_complaints, "echo2.types", "try:\n    pass\nexcept:\n    raise"),
    (house.except_complaints, "echo2.types", "try:\n    pass\nexcept Exception:\n    pass"),
    (house.address_complaints, "echo2.service.door", "address = f'{host}:{self.port}'"),
    (house.background_complaints, "echo2.types", "import asyncio\nasyncio.ensure_future(f())"),
    (house.background_complaints, "echo2.types", "t = loop.create_task(f())"),
    (house.background_complaints, "echo2.types", "from asyncio import create_task"),
    (house.background_complaints, "echo2.types", "made(asyncio.ensure_future)"),
    (house.background_complaints, "echo2.types", "awaited(f())"),
    (house.background_complaints, "echo2.types", "spawn(f(), lambda error: None)"),
    (house.annotation_complaints, "echo2.types", "def f(x) -> int: return x"),
    (house.annotation_complaints, "echo2.types", "class A:\n    async def f(self, x: int): return x"),
]


@pytest.mark.parametrize(
    ("rule", "module", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value)[-30:])
)
def test_rule_can_be_broken(rule: Rule, module: str, text: str) -> None:
    source = house.Source(module, f"src/{module.replace('.', '/')}.py", text)
    assert rule(source)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("echo2.control.head.planner", "from echo2.control import events\nfrom echo2.types import Lease\nimport heapq"),
        (
            "echo2.runtime.head.head",
            "from echo2.control.head.planner import Planner\nfrom echo2.sim import links\nimport asyncio",
        ),
        ("echo2.learner.model", "import torch"),
        ("echo2.sim.world", "for x in sorted(set([2, 1])): pass"),
        ("echo2.views.watch", "async def _f():\n    async with asyncio.TaskGroup() as group: group.create_task(_f())"),
        ("echo2.views.watch", "task = spawn(f(), self.fail)\nother = awaited(f())"),
    ],
)
def test_rules_leave_good_code_alone(module: str, text: str) -> None:
    source = house.Source(module, f"src/{module.replace('.', '/')}.py", f'"""What this is."""\n{text}\n')
    assert [complaint for rule in house.RULES for complaint in rule(source)] == []


def test_light_modules_import_without_torch() -> None:
    """A training step cannot stall a heartbeat, and `--help` cannot wait for torch: nothing light ever loads it."""
    modules = [source.module for source in house.package_sources()]
    light = [name for name in modules if not HEAVY_MODULES.fullmatch(name) or name in LIGHT_ROLLOUT]
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
    assert len(every) <= MAX_CONFIG_FIELDS
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
