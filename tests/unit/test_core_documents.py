"""What others wrote is read or refused with a typed error, however deep, long or broken it is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo2 import config
from echo2.config import parse_flag
from echo2.config.offers import load_offers
from echo2.config.rundir import RunDir, read_json, read_metrics
from echo2.core.documents import DEPTH_MAX, parse_json, parse_toml
from echo2.core.errors import Echo2Error, UserError
from echo2.head.ledger.eventlog import replay
from echo2.learner.core import checkpoint
from echo2.learner.core.fitting import snapshot_bytes
from echo2.planning.sim.scenario import load_study
from echo2.tasks.streams import load_tasks
from echo2.weights.format.manifest import Manifest
from echo2.weights.format.snapshot_files import end_tokens, read_config


def deep_json(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)
GARBAGE = (
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.sampled_from([deep_json(depth).encode() for depth in (DEPTH_MAX + 1, 900, 8_000)])
    | st.sampled_from([b'{"a":' * 5_000, b"a = " + b"[" * 8_000, b"a = " + b"{a=" * 5_000, b"[a." * 2_000])
    | st.sampled_from([b"a = 1" + b"0" * 10_000, b"1" * 10_000, b"1e999", b"\xff\xfe", b'"\\ud800"'])
    | st.text(alphabet="[]{}=.\"',\n #a1", max_size=80).map(str.encode)
)


@given(VALUES)
def test_json_is_read_as_the_standard_library_reads_it(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value == parse_json(json.dumps(value).encode())


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 500, 100_000])
def test_deeply_nested_documents_are_refused(depth: int) -> None:
    assert parse_json(deep_json(DEPTH_MAX))
    assert parse_toml("a = " + deep_json(DEPTH_MAX - 1))
    for text in (deep_json(depth), '{"a": ' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="nested deeper than 100"):
            parse_json(text)
    with pytest.raises(ValueError, match="nested deeper than 100"):
        parse_toml("a = " + deep_json(depth))


def test_many_brackets_that_are_not_nested_are_fine() -> None:
    assert len(parse_json("[" + "[], {}, " * 10_000 + "1]")) == 20_001
    assert parse_json("NaN", with_nan=False) is None


def _tasks(path: Path) -> None:
    rows = load_tasks(str(path.rename(path.with_suffix(".jsonl"))), {}, 0)
    for index in range(len(rows)):
        rows[index]


#: Everything that reads a whole file that others may have written.
READERS: dict[str, Callable[[Path], Any]] = {
    "config.toml": lambda path: config.load(path),
    "config.json": lambda path: config.load(path.rename(path.with_suffix(".json"))),
    "flag": lambda path: parse_flag("tasks.params", path.read_bytes().decode("utf-8", "replace")),
    "offers": load_offers,
    "study": load_study,
    "status": read_json,
    "metrics": read_metrics,
    "past run": lambda path: read_metrics(path, refuses_damage=True),
    "tasks": _tasks,
    "run directory": lambda path: RunDir(path.rename(path.with_name("config.json")).parent).read_config(),
    "events": replay,
    "snapshot's config": lambda path: read_config({"config.json": path.read_bytes()}),
    "end tokens": lambda path: end_tokens({"config.json": path.read_bytes()}),
    "manifest": lambda path: Manifest.from_bytes(path.read_bytes()),
    "checkpoint": lambda path: checkpoint.read_state(path.rename(path.with_name("state.json")).parent),
    "model": lambda path: snapshot_bytes(path.rename(path.with_name("x.safetensors")).parent, "float32"),
}


@pytest.mark.parametrize("reader", READERS)
@given(data=GARBAGE)
@example(data=b"")
def test_files_of_others_raise_typed_errors_only(
    reader: str, data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("garbage", numbered=True)
    path = directory / "file.toml"
    if reader == "model":
        data = len(data).to_bytes(8, "little") + data
    path.write_bytes(data)
    with contextlib.suppress(Echo2Error):  # any other error fails the test
        READERS[reader](path)


def test_a_deeply_nested_configuration_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("tasks = { params = { x = " + deep_json(5_000) + " } }")
    with pytest.raises(UserError, match="is not valid TOML: nested deeper than 100"):
        config.load(path)
