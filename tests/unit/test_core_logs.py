"""What processes log and what others wrote: bounded in length, number and rights, and harmless to a terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core import logs
from echo2.core.child import child_environment
from echo2.core.errors import LinkError
from echo2.core.logs import (
    BURST_LINES,
    FORMAT_VARIABLE,
    KINDS_MAX,
    WINDOW_SECONDS,
    CountingHandler,
    JsonLines,
    SafeFormatter,
    last_error,
    last_words,
)
from echo2.core.printable import LINE_CHARS_MAX, printable, printable_lines

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31mred\u202e\u2066\r\nerror: forged\x00\x7f"


def is_harmless(text: str) -> bool:
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


@given(st.text(st.characters(), max_size=300) | st.lists(st.sampled_from([*HOSTILE, "a", "["])).map("".join))
def test_printable_text_is_one_harmless_line_of_bounded_length(text: str) -> None:
    shown = printable(text)
    assert is_harmless(shown)
    assert len(shown) <= LINE_CHARS_MAX
    assert printable(shown) == shown
    assert all(is_harmless(line) for line in printable_lines(text, 50).split("\n"))
    assert len(printable_lines(text, 50)) <= 50


@given(st.text(st.characters(categories=["L", "N", "P", "Sm", "Sc"]), max_size=LINE_CHARS_MAX))
def test_printable_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


def test_escape_sequences_go_whole() -> None:
    assert printable("a\x1b[1;31mb\x1b]8;;http://x\x1b\\c\x1bPq\x1b\\d") == "abcd"
    assert printable("tab\tand\nline") == "tab and line"
    assert printable("x" * 300) == "x" * 199 + "\N{HORIZONTAL ELLIPSIS}"


class Log:
    """A process's log as `core.logs` writes it, at times that the test says."""

    def __init__(self, formatter: logging.Formatter | None = None) -> None:
        self.stream = io.StringIO()
        self.handler = CountingHandler(self.stream)
        self.handler.setFormatter(formatter or SafeFormatter("%(levelname)s %(name)s: %(message)s"))

    def write(self, at: float, text: str, *values: object, **also: object) -> None:
        record = logging.LogRecord("echo2.x", logging.INFO, "x.py", 1, text, values, None)
        record.created = at
        record.__dict__.update(also)
        self.handler.handle(record)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_equal_lines_are_written_once_and_counted() -> None:
    log = Log()
    for _ in range(1000):
        log.write(0.0, "not connected (%s)", "refused")
    log.write(1.0, "not connected (%s)", "timeout")
    log.write(2.0, "connected")
    assert log.lines == [
        "INFO echo2.x: not connected (refused)",
        "INFO echo2.x: not connected (refused) (repeated 999 times)",
        "INFO echo2.x: not connected (timeout)",
        "INFO echo2.x: connected",
    ]


def test_lines_of_one_kind_are_bounded_within_a_window_however_they_differ() -> None:
    log = Log()
    for number in range(100_000):
        log.write(0.0, "lease %d refused: %s", number, "junk")
    assert len(log.lines) == BURST_LINES
    log.write(WINDOW_SECONDS, "lease %d refused: %s", 7, "junk")
    held_back = 100_000 - BURST_LINES
    assert log.lines[BURST_LINES:] == [
        f"INFO echo2.x: lease 99999 refused: junk (repeated {held_back} times)",
        "INFO echo2.x: lease 7 refused: junk",
    ]


def test_a_count_is_written_when_any_line_comes_after_the_window_and_at_the_end() -> None:
    log = Log()
    for _ in range(5):
        log.write(0.0, "a")
        log.write(50.0, "b")
    log.write(WINDOW_SECONDS + 1, "c")
    assert log.lines == ["INFO echo2.x: a", "INFO echo2.x: b", "INFO echo2.x: a (repeated 4 times)", "INFO echo2.x: c"]
    log.handler.close()
    assert log.lines[4:] == ["INFO echo2.x: b (repeated 4 times)"]


def test_kinds_are_bounded_and_no_count_is_lost() -> None:
    log = Log()
    for kind in range(10 * KINDS_MAX):
        for _ in range(3):
            log.write(0.0, f"kind {kind}")
    assert len(log.handler._kinds) <= KINDS_MAX
    log.handler.close()
    assert sum(line.endswith("(repeated 2 times)") for line in log.lines) == 10 * KINDS_MAX


def test_text_from_a_peer_becomes_one_safe_line_of_bounded_length() -> None:
    log = Log()
    log.write(0.0, "refused: %s", HOSTILE + "x" * 100_000)
    try:
        raise ValueError(HOSTILE * 10_000)
    except ValueError:
        log.write(1.0, "failed", exc_info=sys.exc_info())
    assert all(is_harmless(line) for line in log.lines)
    assert not any(line.startswith("error: ") for line in log.lines[:1])
    assert len(log.lines[0]) < 2100
    assert len(log.stream.getvalue()) < 30_000


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def failing(log: Log, words: str) -> None:
    try:
        raise LinkError(words)
    except LinkError:
        log.write(1.0, "failed", exc_info=sys.exc_info())


def test_a_json_line_has_the_text_of_the_plain_format() -> None:
    log = Log(JsonLines("head"))
    for _ in range(3):
        log.write(0.0, "refused: %s", HOSTILE)
    failing(log, f"gone {HOSTILE}" + "x" * 50_000)
    log.handler.close()
    first, error, count = map(json.loads, log.lines)
    known = {"level": "INFO", "process": "head", "pid": os.getpid(), "logger": "echo2.x"}
    assert first == known | {"time": "1970-01-01T00:00:00.000+00:00", "message": f"refused: {printable(HOSTILE)}"}
    assert error.keys() - first.keys() == {"error", "traceback"}
    assert error["error"].startswith("echo2.core.errors.LinkError: gone ")
    assert error["traceback"].startswith("Traceback (most recent call last):\n")
    assert count["message"].endswith("(repeated 2 times)")
    assert all(is_harmless(line) and line.isascii() for line in log.lines)
    assert all(is_harmless(line) for line in error["traceback"].split("\n"))
    assert max(map(len, log.lines)) < 40_000


@pytest.mark.parametrize("behind", ["", "error: no room\n", "Killed by something\n", '{"time": "2026-11'])
def test_the_plain_format_ends_with_the_message(behind: str) -> None:
    logs_ = [Log(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")), Log(JsonLines("head"))]
    for log in logs_:
        log.write(0.0, "joined")
        failing(log, "gone for good")
        log.write(2.0, "the run stops")
    text, as_json = ((log.stream.getvalue() + behind).encode() for log in logs_)
    assert last_words(as_json) == last_words(text)
    assert last_error(as_json) == last_error(text)
    if not behind.startswith("error"):
        assert last_words(as_json).endswith(("LinkError: gone for good", "Killed by something"))
        forged = Log(JsonLines("head"))
        failing(forged, f"gone {HOSTILE}")
        assert last_error(forged.stream.getvalue().encode()) is None


@pytest.mark.parametrize(("kind", "status"), [("json", 0), ("text", 0), ("", 0), ("yaml", 1)])
def test_the_environment_chooses_the_format(kind: str, status: int) -> None:
    code = "import logging; from echo2.core import logs; logs.start('worker'); logging.getLogger('x').info('joined')"
    environment = {**child_environment(), FORMAT_VARIABLE: kind}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    if kind == "json":
        told = json.loads(done.stderr)
        assert (told["process"], told["message"]) == ("worker", "joined")
    elif status:
        assert "ECHO2_LOG_FORMAT = 'yaml' in the environment: set it to text or json." in done.stderr
    else:
        assert done.stderr.endswith(" INFO x: joined\n")


def test_a_log_that_is_too_long_is_cut_while_a_process_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "head.log"
    with open(path, "ab", buffering=0) as log:
        for number in range(1, 8):
            log.write(b"%d" % number * 100)
            assert logs.cut_log(path, bytes_max=50, num_kept=3)
            assert not logs.cut_log(path, bytes_max=50, num_kept=3)
        log.write(b"8")
    found = [part.read_bytes()[:1] for part in logs.parts(path)]
    assert found == [b"5", b"6", b"7", b"8"], "oldest first; older ones are gone"
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_files_of_a_run_are_private_to_its_owner(tmp_path: Path, umask: int) -> None:
    """Every process of a run (`logs.start`), and `echo2 run` before it makes the directory."""
    code = """if True:
        import os, sys
        from pathlib import Path
        os.umask(int(sys.argv[2]))
        from echo2.core import logs
        logs.start("head")
        from echo2.head.ledger.ledger import Ledger
        from echo2.config import Config
        from echo2.head.decide.state import PlannerOptions
        from echo2.head.ledger.eventlog import EventLog
        from echo2.head.ledger.metrics import Metrics
        from echo2.config.rundir import create, write_atomically
        from echo2.weights.store.store import ChunkStore
        rundir = create(Path(sys.argv[1]), Config(), resume=False)
        EventLog(rundir.events, PlannerOptions(1, 2, 3)).close()
        Metrics(rundir.metrics).write({"step": 0})
        ledger = Ledger(rundir.ledger)
        ledger.issue(0, 0, 0, 0.0)
        write_atomically(rundir.status, "{}")
        ChunkStore(rundir.snapshots)
    """
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", code, str(run), str(umask)], check=True, timeout=60, env=child_environment())
    modes = {path: path.stat().st_mode & 0o077 for path in (run, *run.rglob("*"))}
    assert len(modes) > 10
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode}


def test_echo2_run_keeps_its_directory_private(tmp_path: Path) -> None:
    code = "import os, sys; from echo2.cli import main; main(sys.argv[1:]); print(oct(os.umask(0)))"
    missing = str(tmp_path / "missing.toml")
    command = [sys.executable, "-c", code, "run", missing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=child_environment(), check=True)
    assert done.stdout.strip() == "0o77"
