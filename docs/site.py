"""Hooks of MkDocs: what lies outside docs/ becomes pages, so that every link leads somewhere without a network.

README.md is the first page. A file of the repository that a page links to is a page with its text, a directory one with
its list. The pages themselves are written for GitHub and say nothing of this.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

REPOSITORY = Path(__file__).resolve().parent.parent
#: Pages outside docs/, by where they are in the site.
MOVED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
SHOWN_CHARS_MAX = 200_000
NOT_IN_NAV = InclusionLevel.NOT_IN_NAV


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, then one page for each other file that any page links to."""
    pages = [REPOSITORY / path for path in MOVED]
    pages += [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for path, uri in MOVED.items():
        files.append(File.generated(config, uri, content=_with_links(REPOSITORY / path, uri)))
    for target in sorted({target for page in pages for target in _shown_targets(page)}):
        files.append(File.generated(config, _shown_uri(target), content=_shown(target), inclusion=NOT_IN_NAV))
    return files


def on_page_read_source(page: object, config: MkDocsConfig) -> str | None:
    """The text of a page below docs/, with its links to what lies outside."""
    file: File = page.file  # type: ignore[attr-defined]
    return None if file.generated_by or not file.abs_src_path else _with_links(Path(file.abs_src_path), file.src_uri)


def _targets(page: Path) -> Iterator[Path]:
    for _, link, _ in LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        if target.is_relative_to(REPOSITORY) and target.exists():
            yield target


def _shown_targets(page: Path) -> Iterator[Path]:
    docs = REPOSITORY / "docs"
    for target in _targets(page):
        moved = str(target.relative_to(REPOSITORY)) in MOVED
        if not moved and (target.is_dir() or not target.is_relative_to(docs)):
            yield target


def _shown_uri(target: Path) -> str:
    return f"repository/{target.relative_to(REPOSITORY)}.md"


def _with_links(page: Path, uri: str) -> str:
    """The page's text as it is at `uri` in the site."""
    shown = set(_shown_targets(page))

    def moved(link: re.Match[str]) -> str:
        target = (page.parent / link[2]).resolve()
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            return link[0]
        path = str(target.relative_to(REPOSITORY))
        place = _shown_uri(target) if target in shown else MOVED.get(path, path.removeprefix("docs/"))
        return f"{link[1]}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{link[3]}"

    return LINK.sub(moved, page.read_text())


def _shown(target: Path) -> str:
    name = target.relative_to(REPOSITORY)
    head = f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n"
    if target.is_dir():
        return head + "".join(f"- `{path.name}`\n" for path in sorted(target.iterdir()) if path.name[0] not in "._")
    text = target.read_text()[:SHOWN_CHARS_MAX]
    fence = "`" * max(4, *(len(run) + 1 for run in re.findall("`+", text)), 4)
    return f"{head}{fence}{LANGUAGES.get(target.suffix, 'text')}\n{text}\n{fence}\n"
