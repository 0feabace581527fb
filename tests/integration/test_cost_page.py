"""The page that says what a run costs: its commands print what it shows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from first_plans import QWEN3_1_7B, QWEN3_4B, QWEN3_8B
from real_runs import REPOSITORY, echo2

PAGE = (REPOSITORY / "docs" / "what-will-it-cost.md").read_text()
MODELS = {"Qwen3-1.7B": QWEN3_1_7B, "Qwen3-4B": QWEN3_4B, "Qwen3-8B": QWEN3_8B}


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Each command of the page, and the lines that it prints there: each is a part of what it prints."""
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        command, *lines = block.splitlines()
        yield command.removeprefix("$ echo2 "), lines


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the examples and the page's file, and a hub's cache that knows the models' sizes."""
    hub = tmp_path / "hub"
    for name, values in MODELS.items():
        model = hub / f"models--Qwen--{name}"
        (model / "snapshots" / "one").mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("one")
        (model / "snapshots" / "one" / "config.json").write_text(json.dumps(values))
    for variable, value in (("HF_HUB_CACHE", hub), ("HF_HUB_OFFLINE", "1"), ("XDG_CACHE_HOME", tmp_path / "cache")):
        monkeypatch.setenv(variable, str(value))
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    (toml,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "box.toml").write_text(toml)
    return tmp_path


@pytest.mark.parametrize(("command", "lines"), tuple(blocks()))
def test_a_command_of_the_page_prints_what_it_shows(desk: Path, command: str, lines: list[str]) -> None:
    done = echo2(desk, *shlex.split(command))
    printed = " ".join((done.stdout + done.stderr).split())
    for line in lines:
        assert " ".join(line.split()) in printed, printed


def test_each_kind_of_user_has_a_command() -> None:
    planned = [re.search(r"examples/gpu/\w+\.toml", command) for command, _ in blocks()]
    assert len({found.group() for found in planned if found}) == 3
