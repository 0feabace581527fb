"""The demo's model, built once a session as `echo2 demo` builds it."""

from __future__ import annotations

import shutil
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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, sort_model: Path) -> Path:
    """A directory as a user has it after `make demo` and `examples/make_data.py`."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(REPOSITORY / "examples", root / "examples")
    shutil.copytree(sort_model, root / "outputs" / "models" / "digit_sorting")
    subprocess.run([sys.executable, "examples/make_data.py"], cwd=root, check=True, capture_output=True)
    return root
