"""What the pages name exists: files, constants, settings, our commands and their flags."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from echo2 import __version__, config
from echo2.cli import build_parser
from echo2.head.decide.groups import FAILURES, UNINFORMATIVE
from echo2.head.strangers.decide.checks import UNTRUSTED
from echo2.planning.sim.scenario import (
    BroadcastSpec,
    HeadSpec,
    LearnerSpec,
    OutageSpec,
    Scenario,
    WorkersSpec,
    load_study,
)
from echo2.reward.judge import JudgeFailure
from echo2.reward.score import RewardFailure
from house import PACKAGE, REPOSITORY, SOURCE

#: All but those that tell what was: they may name what is gone.
PAGES = [
    page
    for folder in (REPOSITORY, REPOSITORY / "docs")
    for page in sorted(folder.glob("*.md"))
    if page.name not in ("CHANGELOG.md", "log.md")
]
SETTINGS = {f"{section}.{name}" for section, name, *_ in config.all_fields()}
SECTIONS = "|".join(sorted({setting.partition(".")[0] for setting in SETTINGS}))
#: Keys of a scenario that have a table of their own.
TABLES = frozenset({"workers", "learner", "head", "broadcast", "outages"})


def missing_names(page: Path) -> Iterator[str]:
    """`file.py: NAME, NAME` and files in backquotes."""
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        path, _, names = code.partition(": ")
        if not re.fullmatch(r"[\w./-]+\.(py|proto)", path):
            continue
        places = [REPOSITORY / path, SOURCE / PACKAGE / path, *(REPOSITORY / "tests").rglob(path)]
        places += (REPOSITORY / "benchmarks").rglob(path)
        places += [SOURCE / "echo2_service" / path] * (page.name == "service.md")
        found = next((place for place in places if place.is_file()), None)
        if found is None and ("/" in path or path.startswith("test_")):
            yield code
        elif found is not None and names:
            text = found.read_text()
            yield from (f"{path}: {name}" for name in names.split(", ") if not re.search(rf"\b{name}\b", text))


def missing_scripts(page: Path) -> Iterator[str]:
    """Paths below benchmarks/ anywhere on the page, and `make bench-NAME`."""
    text, folder = page.read_text(), REPOSITORY / "benchmarks"
    yield from (path for path in re.findall(r"benchmarks/[\w./*-]*\w", text) if not [*REPOSITORY.glob(path)])
    names = re.findall(r"make bench-([a-z_]+)", text)
    yield from (f"bench-{name}" for name in names if not [*folder.rglob(name + ".py")])


def unknown_settings(page: Path) -> Iterator[str]:
    text = re.sub(
        r"^```python\n.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )  # attributes are no settings
    for setting in re.findall(rf"(?<![\w./-])(?:--)?((?:{SECTIONS})\.[a-z][a-z_]*)\b(?![/(])", text):
        is_file = setting.rpartition(".")[2] in ("py", "toml", "log", "jsonl", "json", "md")
        if setting not in SETTINGS and not is_file:
            yield setting


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def command_lines(page: Path) -> Iterator[str]:
    """What stands behind `echo2` in the blocks of a shell, comments aside."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    shell = [*blocks(page, "bash", "console", "sh", ""), *re.findall(r"^    .*$", prose, re.MULTILINE)]
    for line in "\n".join(shell).replace("\\\n", " ").splitlines():
        for command in re.split(r"&&|;|\|", line.partition(" #")[0]):
            if found := re.match(r"\s*(?:\S+=\S+ )*(?:\S*/|\S*python -m )?echo2 (.*)", command):
                yield found[1]


def unknown_flags(page: Path) -> Iterator[str]:
    """Of `echo2 COMMAND ...`, on one line; and commands of a shell's blocks that we do not have."""
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    yield from (line for line in command_lines(page) if line.split()[0] not in {*commands, "--help", "--version"})  # type: ignore[misc]
    for line in [*re.findall(r"echo2 ([^`\n]+)", page.read_text()), *command_lines(page)]:
        parser = commands.get(line.split()[0])  # type: ignore[union-attr]
        if parser is not None:
            known = parser._option_string_actions
            flags = re.findall(r"(?<!\S)\[?(--[a-z-]+)(?![\w.-])", line.partition("#")[0])
            yield from (f"{line.split()[0]} {flag}" for flag in flags if flag not in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_on_a_page_exist(page: Path) -> None:
    found = (missing_names(page), missing_scripts(page), unknown_settings(page), unknown_flags(page))
    assert [name for names in found for name in names] == []


def test_the_pages_name_every_reason_for_retiring_a_group() -> None:
    docs = REPOSITORY / "docs"
    row = re.search(r"^\| retired \|.*$", (docs / "glossary.md").read_text(), re.MULTILINE)
    entry = re.search(r"\*\*Retired\*\* groups:.*?^- ", (docs / "operations.md").read_text(), re.DOTALL | re.MULTILINE)
    assert row is not None
    assert entry is not None
    named = re.findall(r"`(\w+)`", row[0])
    assert named == re.findall(r"`(\w+)`", entry[0])
    given = {reason for reason, may_pass in FAILURES.items() if not may_pass}
    given |= {RewardFailure.cause, JudgeFailure.cause, UNINFORMATIVE, UNTRUSTED}
    assert given - {*named} == set()


def test_a_command_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nX=1 .venv/bin/echo2 trian my.toml && echo2 run my.toml \\\n  --oot here\n```\n\n    echo2 statsu\n"
    )
    assert list(unknown_flags(page)) == ["trian my.toml ", "statsu", "run --oot"]


def test_a_script_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("    sudo python benchmarks/wan/net.py\n\nmake bench-overlap, bench-NAME, make bench-overlop\n")
    assert list(missing_scripts(page)) == ["benchmarks/wan/net.py", "bench-overlop"]


def cases(page: str) -> dict[str, str]:
    """The settings of each table of docs/settings.md, as TOML, by the heading above it."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    found = {
        text.partition("\n")[0]: re.findall(r"^\| `([a-z_.]+ = [^`]+)` \|", text, re.MULTILINE) for text in sections
    }
    return {name: "\n".join(settings) for name, settings in found.items() if settings}


@pytest.mark.parametrize(("name", "settings"), cases((REPOSITORY / "docs" / "settings.md").read_text()).items())
def test_the_settings_of_a_case_go_together(name: str, settings: str, tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(settings)
    assert config.load(path) != config.Config(), name


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("from-*.md")), ids=lambda page: page.name)
def test_the_configuration_that_a_migration_ends_with_is_one(page: Path, tmp_path: Path) -> None:
    (text,) = blocks(page, "toml")
    path = tmp_path / "migrated.toml"
    path.write_text(text)
    assert config.load(path).model.path


def test_the_scenario_page_has_every_key_with_its_default_and_its_example_is_one(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "scenarios.md").read_text()
    kinds = (Scenario, WorkersSpec, LearnerSpec, HeadSpec, BroadcastSpec, OutageSpec)
    for text, kind in zip(page.split("\n## ")[1:], kinds, strict=False):
        told = {
            name: default for name, default, _ in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", text, re.MULTILINE)
        }
        plain = [entry for entry in fields(kind) if entry.default_factory is MISSING and entry.name not in TABLES]
        assert list(told) == [entry.name for entry in plain]
        for entry in plain:
            if entry.default in (MISSING, None):
                assert told[entry.name] == ("required" if entry.default is MISSING else "absent")
            else:
                assert told[entry.name] == f"`{json.dumps(entry.default)}`", entry.name
    (example,) = blocks(REPOSITORY / "docs" / "scenarios.md", "toml")
    path = tmp_path / "example.toml"
    path.write_text(example)
    assert [str(case) for case in load_study(path).cases] == [
        f"{label}, count {count}" for label in ("no relays", "relays") for count in (2, 4)
    ]


def test_every_page_has_its_place_in_the_site() -> None:
    """`make docs` refuses a page that mkdocs.yml does not name; this says so sooner."""
    docs = REPOSITORY / "docs"
    named = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert set(named) - {"index.md", "changelog.md", "contributing.md"} == {
        str(page.relative_to(docs)) for page in docs.rglob("*.md")
    }


def test_every_extra_has_its_row_and_every_error_names_one_that_exists() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"dev"}
    table = (REPOSITORY / "docs" / "launch.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row]
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == extras
    source = "".join(path.read_text() for path in (SOURCE / PACKAGE).rglob("*.py"))
    said = re.findall(r"'echo2\[([\w,-]+)\]'", source)
    assert {name for names in said for name in names.split(",")} <= extras


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()


def literals(folder: Path) -> Iterator[str]:
    """Every text that the code says, with `…` for what it fills in."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_code_contains_the_messages_quoted_by_the_symptoms_page() -> None:
    """What is in backquotes in a first column is a text of ours, in that order, or a metric of docs/operations.md."""
    page = (REPOSITORY / "docs" / "symptoms.md").read_text()
    quotes = re.findall("`([^`]+)`", "\n".join(re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)))
    metrics = (REPOSITORY / "docs" / "operations.md").read_text()
    said = "\0".join(literals(SOURCE))
    assert len(quotes) > 40
    patterns = {quote: r"[^\0]*".join(map(re.escape, quote.split("…"))) for quote in quotes}
    assert [quote for quote, one in patterns.items() if f"`{quote}" not in metrics and not re.search(one, said)] == []
