"""What the pages name exists: links and their headings, files, constants, settings, and flags of our commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2 import config
from echo2.cli import build_parser
from house import PACKAGE, REPOSITORY, SOURCE

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
#: Pages that tell what was: they may name what is gone.
HISTORY = frozenset({"CHANGELOG.md", "log.md"})
SETTINGS = {f"{section}.{name}" for section, name, *_ in config.all_fields()}
SECTIONS = "|".join(sorted({setting.partition(".")[0] for setting in SETTINGS}))


def heading_anchor(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.strip().replace(" ", "-")


def broken_links(page: Path) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if link.startswith(("http:", "https:")):
            continue
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if target.is_file() and anchor else []
        if not target.exists() or (anchor and anchor not in map(heading_anchor, headings)):
            yield link


def missing_names(page: Path) -> Iterator[str]:
    """`file.py: NAME, NAME` and files in backquotes."""
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        path, _, names = code.partition(": ")
        if not re.fullmatch(r"[\w./-]+\.(py|proto)", path):
            continue
        places = [REPOSITORY / path, SOURCE / PACKAGE / path, *(REPOSITORY / "tests").rglob(path)]
        places += (REPOSITORY / "benchmarks").glob(path)
        found = next((place for place in places if place.is_file()), None)
        if found is None and ("/" in path or path.startswith("test_")):
            yield code
        elif found is not None and names:
            text = found.read_text()
            yield from (f"{path}: {name}" for name in names.split(", ") if not re.search(rf"\b{name}\b", text))


def unknown_settings(page: Path) -> Iterator[str]:
    text = page.read_text()
    for setting in re.findall(rf"(?<![\w./-])(?:--)?((?:{SECTIONS})\.[a-z][a-z_]*)\b(?!/)", text):
        is_file = setting.rpartition(".")[2] in ("py", "toml", "log", "jsonl", "json", "md")
        if setting not in SETTINGS and not is_file:
            yield setting


def unknown_flags(page: Path) -> Iterator[str]:
    """Of `echo2 COMMAND ...`, on one line."""
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for line in re.findall(r"echo2 ([^`\n]+)", page.read_text()):
        parser = commands.get(line.split()[0])  # type: ignore[union-attr]
        if parser is not None:
            known = parser._option_string_actions
            flags = re.findall(r"(?<!\S)\[?(--[a-z-]+)(?![\w.-])", line.partition("#")[0])
            yield from (f"{line.split()[0]} {flag}" for flag in flags if flag not in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    found = list(broken_links(page))
    if page.name not in HISTORY:
        found += [*missing_names(page), *unknown_settings(page), *unknown_flags(page)]
    assert found == []
