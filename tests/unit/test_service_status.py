"""What the status of a service says, in a terminal and as a page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from echo2_service.commands.status import StatusPage, show, status, tables
from front_service import Service

MACHINE = {"host": "<b>", "device": "cpu", "doing": "samples", "under_way": 3, "sampled": 1234, "price_usd_per_hour": 0}


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    service = Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")
    eve = service.api_keys.add_key("<script>eve\x1b[2J")
    service.session(eve)
    service.model(service.session())
    told = status(service.database, service.now)
    service.end()
    service.database.close()
    return {**told, "machines": {"w-1": MACHINE}, "waiting_samples": 0}


def test_the_page_shows_the_tables_and_runs_nothing_of_what_they_hold(found: dict[str, Any]) -> None:
    client = TestClient(StatusPage(lambda: tables(found), "secret").app, base_url="http://127.0.0.1:8000")
    assert client.get("/").status_code == 403
    page = client.get("/?token=secret")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["refresh"] == "3"
    assert "&lt;script&gt;eve" in page.text
    assert "<script" not in page.text
    assert "\x1b" not in page.text
    for cell in ("<td>ada</td>", "<td>w-1</td>", "<td>&lt;b&gt;</td>", "<td>1,234</td>"):
        assert cell in page.text
    assert client.get("/page.css").headers["content-type"].startswith("text/css")


def test_the_terminal_shows_the_same(found: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    for cell in ("ada", "<script>eve", "w-1", "1,234"):
        assert cell in text
