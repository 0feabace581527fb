"""What a wheel installs, tried from an empty directory with none of the checkout in sight (`make test-foreign`)."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from echo2 import __version__
from real_runs import REPOSITORY

VENV = REPOSITORY / ".venv-wheel"
pytestmark = [
    pytest.mark.skipif(
        not (VENV / ".installed").exists(), reason="no wheel is installed: `make test-foreign` installs one"
    ),
    pytest.mark.timeout(400),
]


def echo2(where: Path, *arguments: str, borrowed: str = "") -> subprocess.CompletedProcess[str]:
    """The installed command. `borrowed`: a directory with packages that it was not installed with."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(where), "OMP_NUM_THREADS": "1", "PYTHONPATH": borrowed}
    command = [str(VENV / "bin" / "echo2"), *arguments]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_contains_all_data_files() -> None:
    (package,) = VENV.glob("lib/python*/site-packages/echo2")
    source = REPOSITORY / "src" / "echo2"
    here, there = ({str(path.relative_to(root)) for path in root.rglob("*.*")} for root in (source, package))
    assert {name for name in here - there if "__pycache__" not in name and not name.endswith(".pyi")} == set()


def test_the_service_is_a_wheel_of_its_own(tmp_path: Path) -> None:
    assert list(VENV.glob("lib/python*/site-packages/echo2_service*")) == []
    for words in (["serve", "--port", "1", "serve.toml"], ["keys", str(tmp_path)]):
        done = echo2(tmp_path, *words)
        assert done.returncode == 2
        assert "pip install . ./service" in done.stderr
    beside = f"{VENV / 'service'}{os.pathsep}{sysconfig.get_path('purelib')}"  # sqlalchemy is borrowed
    assert "is not a directory of `echo2 serve`" in echo2(tmp_path, "keys", str(tmp_path), borrowed=beside).stderr
    source = REPOSITORY / "src" / "echo2_service"
    here, there = ({path.name for path in root.rglob("*.*")} for root in (source, VENV / "service" / "echo2_service"))
    assert {name for name in here - there if "__pycache__" not in name and not name.endswith((".pyi", ".pyc"))} == set()


def test_echo2_plans_without_torch_and_says_what_training_needs(tmp_path: Path) -> None:
    assert echo2(tmp_path, "--version").stdout == f"echo2 {__version__}\n"
    done = echo2(tmp_path, "demo")
    assert done.returncode == 2
    assert "pip install 'echo2[train]'" in done.stderr
    found = json.loads(echo2(tmp_path, "doctor", "--json").stdout)
    assert "not installed" in [finding["said"] for finding in found if finding["about"] == "torch"]


@pytest.mark.parametrize(
    ("extra", "brought"),
    [("mlx", {"mlx", "mlx-lm"}), ("llamacpp", {"llama-cpp-python", "gguf"}), ("market", {"gpuhunt"})],
)
def test_an_extra_can_be_installed_beside_the_wheel(extra: str, brought: set[str]) -> None:
    """Resolved, and not installed: llama.cpp would be compiled."""
    (wheel,) = (VENV / "wheel").glob("echo2-*.whl")
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    done = subprocess.run([*command, f"{wheel}[{extra}]"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = {one["metadata"]["name"].lower().replace("_", "-") for one in json.loads(done.stdout)["install"]}
    assert brought <= names, names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_where_torch_is_installed(tmp_path: Path) -> None:
    done = echo2(tmp_path, "demo", "--json", borrowed=sysconfig.get_path("purelib"))
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["steps"] == 80
    assert summary["eval_after"] > summary["eval_before"] + 0.2
    (run,) = (tmp_path / "outputs").glob("demo-*")
    assert echo2(tmp_path, "audit", str(run)).returncode == 0
