"""The demo's model, built once a session by the script that users run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import REPOSITORY


@pytest.fixture(scope="session")
def sort_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "digit_sorting"
    script = REPOSITORY / "examples" / "digit_sorting" / "build_model.py"
    subprocess.run([sys.executable, str(script), "--out", str(out)], check=True, capture_output=True, cwd=REPOSITORY)
    return out
