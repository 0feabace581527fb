"""What a benchmark says where a process that it starts fails."""

from __future__ import annotations

import sys
from pathlib import Path

import hostile
import pytest
from recording import last, output_of


def test_the_last_words_of_a_command_that_fails_are_told() -> None:
    said = "import sys; print('figures'); print('first\\n\\nerror: no such thing\\n', file=sys.stderr); sys.exit({})"
    assert output_of([sys.executable, "-c", said.format(0)]) == "figures"
    with pytest.raises(SystemExit, match=r"ended with status 2: first\nerror: no such thing$"):
        output_of([sys.executable, "-c", said.format(2)])
    assert last("") == "it said nothing"


def test_why_a_run_did_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'print(\'{"error": "fleet is no fleet"}\'); raise SystemExit(2)'
    monkeypatch.setattr(hostile, "ECHO2", (sys.executable, "-c", said))
    with pytest.raises(SystemExit, match=r"the run did not start \(status 2\): .*fleet is no fleet"):
        hostile.trial(tmp_path, "", 1, 1, 2, 0)
