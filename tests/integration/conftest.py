"""The demo's model, built once a session as `echo2 demo` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import REPOSITORY


@pytest.fixture(scope="session")
def sort_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "digit_sorting"
    command = [sys.executable, "-m", "echo2.demo.digit_sorting", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=REPOSITORY)
    return out
