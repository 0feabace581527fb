"""The documentation site as `make docs` builds it: it is whole, and no page of it asks another host for anything."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from house import REPOSITORY

SITE = REPOSITORY / "build" / "docs"
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="build/docs is not there: `make docs` builds it")


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


def attributes(page: Path) -> set[tuple[str, str]]:
    """(attribute, value) of each link and source; code that a page shows is escaped, so it has none."""
    return {(name, unescape(value)) for name, value in re.findall(r'\b(href|src)="([^"]*)"', page.read_text())}


def test_every_link_leads_to_a_file_and_a_heading_of_the_site() -> None:
    identifiers: dict[Path, set[str]] = {}
    broken = []
    for page in pages():
        for _, link in attributes(page):
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link) or page.name == "404.html":
                continue
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if target.suffix == ".html" and target.is_file() and target not in identifiers:
                identifiers[target] = set(re.findall(r'\bid="([^"]*)"', target.read_text()))
            if not target.is_file() or (anchor and anchor not in identifiers.get(target, {anchor})):
                broken.append(f"{page.relative_to(SITE)}: {link}")
    assert len(identifiers) > 30, "the site is not whole"
    assert broken == []


def test_no_page_asks_another_host() -> None:
    """Links that a reader clicks may lead out; what a browser fetches by itself may not."""
    fetched = r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]*)"'
    outside = {found for page in pages() for found in re.findall(fetched, page.read_text())}
    styles = {str(path) for path in SITE.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", path.read_text())}
    assert (outside, styles) == (set(), set())


def test_the_reference_says_what_the_docstrings_say() -> None:
    text = re.sub(r"<[^>]+>|\s+", " ", (SITE / "python.html").read_text())
    for words in ("Train a model on this machine", "Show a progress bar", "cost in dollars:"):
        assert words in re.sub(r" +", " ", text)
