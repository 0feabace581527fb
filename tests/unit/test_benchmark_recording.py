"""What a benchmark says where a process that it starts fails, and how the house is counted."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from count_copies import Finder
from count_house import by_kind, floors, settings
from recording import HERE, child_environment, last, output_of, there

#: Other benchmarks start these, with one argument in JSON.
NODES = {"overlap_nodes", "idle_nodes", "broadcast_node", "lines"}
#: Other benchmarks start these, too, with flags.
PARTS = {"held_out", "trl_grpo", "distillation", "joining", "hostile_worker"}


def test_every_benchmark_knows_its_flags_and_gives_help() -> None:
    scripts = [path for path in HERE.rglob("*.py") if "__main__" in path.read_text() and path.stem not in NODES]
    assert len(scripts) >= 20
    assert [path.name for path in scripts if "rgument" not in path.read_text()] == []
    words = (sys.executable, str(HERE / "count_house.py"), "--help")
    done = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: count_house.py")


def test_every_benchmark_that_a_person_starts_has_a_page_that_names_it_or_its_results() -> None:
    folders = (HERE.parent, HERE.parent / "docs", HERE.parent / "docs" / "decisions")
    pages = [page for folder in folders for page in folder.glob("*.md") if page.name not in ("log.md", "CHANGELOG.md")]
    text = "\n".join(page.read_text() for page in pages)
    names = {path.stem for path in HERE.rglob("*.py") if "__main__" in path.read_text()} - NODES - PARTS
    named = {name for name in names if re.search(rf"bench-{name}\b|\b{name}(\.py\b|-20\d{{6}})", text)}
    assert len(names) > 20
    assert names - named == set()


def test_the_error_about_a_missing_input_of_a_benchmark_is_one_line(tmp_path: Path) -> None:
    assert there(str(tmp_path)) == tmp_path
    with pytest.raises(argparse.ArgumentTypeError, match=r"there is no .*/missing$"):
        there(str(tmp_path / "missing"))


def test_the_error_of_a_failing_command_has_its_last_lines() -> None:
    said = "import sys; print('figures'); print('first\\n\\nerror: no such thing\\n', file=sys.stderr); sys.exit({})"
    assert output_of([sys.executable, "-c", said.format(0)]) == "figures"
    with pytest.raises(SystemExit, match=r"ended with status 2: first\nerror: no such thing$"):
        output_of([sys.executable, "-c", said.format(2)])
    assert last("") == "it said nothing"


def test_a_copy_is_memory_and_a_view_is_none() -> None:
    tokens = array("i", [3, 1, 4, 1, 5, 9])
    finder, group = Finder(), {"of": tokens}
    finder.marker = tokens.tobytes()
    for found in ((tokens, memoryview(tokens), np.frombuffer(tokens, np.int32)), tokens[1:], group):
        finder._find(found, "place", 0)
    assert [words for words, _ in finder.copies.values()] == ["array in place"]
    for found in (b"0000" + tokens.tobytes(), list(tokens), np.array([0, *tokens])):
        finder._find(found, "place", 0)
    assert len(finder.copies) == 4
    wide = np.array([0, *tokens, *tokens], np.int64)
    for found in (wide, wide[7:]):
        finder._find(found, "place", 0)
    assert len(finder.copies) == 5


def test_lines_are_counted_by_kind() -> None:
    text = '"""What\nit is."""\n\nA = 1  # one\n# two\nB = """\n\n"""\n\n\ndef f():\n    """It."""\n    return A\n'
    assert by_kind(text) == {"code": 6, "docstrings": 3, "comments": 1, "blank": 3}
    assert by_kind("") == {}


def test_floors_are_the_longest_chain_of_rooms() -> None:
    knows = {"echo2.cli.x": {"echo2.head.a"}, "echo2.head.a": {"echo2.worker.b", "echo2.core.c"}}
    assert floors({**knows, "echo2.worker.b": {"echo2.core.c"}, "echo2.core.c": set()}) == 4
    assert floors({**knows, "echo2.worker.b": {"echo2.head.a"}, "echo2.core.c": set()}) == 3  # a circle


def test_a_settings_readers_are_counted() -> None:
    sections = "class RunConfig:\n    seed: int = 0\n    name: str = ''\nclass Config:\n    run: RunConfig"
    code = {"echo2.config.sections": sections, "echo2.head.a": "config.run.seed", "echo2.worker.b": "c.run.seed_of"}
    assert settings(code) == {"settings": 2, "files": 0.5, "rooms": 0.5, "most": (1, "run.seed")}
