"""Runs that a Python script or a notebook starts: functions of `__main__` score, and the run ends with the script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import echo2
from echo2.core.errors import UserError
from real_runs import REPOSITORY, is_running, pause

SCRIPT = """
import random
import sys

import echo2

chance = random.Random(0)
digits = ["".join(chance.choices("0123456789", k=chance.randint(5, 8))) for _ in range(64)]
rows = [{"prompt": f"{each}=", "answer": "".join(sorted(each))} for each in digits]
EXACT = 1.0

def same(left: str, right: str) -> float:
    return EXACT if left.strip() == right else 0.0

def is_sorted(completions, answer, **columns) -> list[float]:
    return [same(text, wanted) for text, wanted in zip(completions, answer)]

settings = dict(heldout=rows[:16], max_tokens=10, group_size=4, groups_per_step=8, lr=2e-4, seed=1)
settings |= dict(workers={"count": 1}, learner={"checkpoint_every": 2})
"""
TRAIN = """
run = echo2.train(sys.argv[1], rows[16:], is_sorted, out=sys.argv[2], max_steps=3, **settings)
print(run)
"""


def script(where: Path, text: str, *arguments: Path) -> list[str]:
    path = where / "script.py"
    path.write_text(text)
    return [sys.executable, str(path), *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_code_on_the_pages_runs(tmp_path: Path, sort_model: Path) -> None:
    """Of the README and of docs/from-trl.md, as they stand, where `make demo` has made its model; plots aside."""
    (tmp_path / "outputs" / "models").mkdir(parents=True)
    (tmp_path / "outputs" / "models" / "digit_sorting").symlink_to(sort_model)
    for page in ("README.md", "docs/from-trl.md"):
        found = re.search(r"^```python\n(.*?)^```$", (REPOSITORY / page).read_text(), re.DOTALL | re.MULTILINE)
        assert found is not None
        text = re.sub(r"^run\.plot\(\).*$", "", found[1], flags=re.MULTILINE)  # which needs matplotlib
        done = subprocess.run(script(tmp_path, text), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{page}: {done.stderr}"


@pytest.mark.timeout(600)
def test_a_script_trains_and_its_run_goes_on(tmp_path: Path, sort_model: Path) -> None:
    out = tmp_path / "run"
    command = script(tmp_path, SCRIPT + TRAIN, sort_model, out)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished: all steps are trained, step 3, held-out reward" in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    run = echo2.load(out)
    assert run.accuracy is not None
    assert {one["reward"] for one in run.rollouts(1)} <= {0.0, 1.0}
    assert run.cost()["steps"] == 3
    model, tokenizer = run.model()
    prompt = tokenizer("31=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    with pytest.raises(UserError, match=r"cannot change run\.seed"):
        run.resume(seed=2).wait()
    with run.resume(max_steps=4) as longer:
        assert longer.wait().step == 4
    assert [row["step"] for row in run.metrics() if "reward/mean" in row] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ends_with_its_script_and_saves_what_it_has(tmp_path: Path, sort_model: Path, end: int) -> None:
    out = tmp_path / "run"
    command = script(tmp_path, SCRIPT + TRAIN.replace("max_steps=3", "max_steps=1000"), sort_model, out)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (out / "status.json").exists() or echo2.load(out).step < 1:
            assert process.poll() is None, process.stderr
            pause()
        pids = [each["pid"] for each in json.loads((out / "processes.json").read_text())]
        process.send_signal(end)
        process.communicate()
    while any(map(is_running, pids)):
        pause()
    run = echo2.load(out)
    assert run.state.startswith("stopped")
    assert run.checkpoint().name == f"step_{run.step}"


@pytest.mark.timeout(600)
def test_a_mistake_that_only_the_processes_find_is_raised(tmp_path: Path, sort_model: Path) -> None:
    rows = [{"prompt": "1", "answer": "1"}]
    with pytest.raises(UserError, match="there is no such directory"):
        echo2.train("./no-model", rows, "exact_match", out=tmp_path / "run")
    own = tmp_path / "own.py"
    own.write_text("def wants(completions, wanted):\n    return [0.0 for _ in wanted]\n")
    with pytest.raises(UserError, match="needs the column 'wanted'"):
        echo2.train(sort_model, rows, f"{own}:wants", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(600)
def test_a_notebook_trains(tmp_path: Path, sort_model: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    given = f"import sys\nsys.argv = ['', {str(sort_model)!r}, {str(tmp_path / 'run')!r}]"
    cells = [nbformat.v4.new_code_cell(text) for text in (given, *SCRIPT.split("\n\n"), TRAIN, "run.plot()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    os.environ["PYTHONPATH"] = str(REPOSITORY / "src")
    client: Any = nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3")
    client.execute()
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("finished: all steps are trained" in output.get("text", "") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
