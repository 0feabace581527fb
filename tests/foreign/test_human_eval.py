"""HumanEval as the package index has it (`make humaneval`), as tasks in Harbor's format: its own solutions pass in a
container, and an unfinished function, a wrong one and one that ends the tests do not. Skipped without, saying why."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from echo2.core.errors import UserError
from echo2.sandbox.containers import IMAGES, Containers, find_runtime
from echo2.sandbox.plugins import own_python
from echo2.sandbox.programs import ContainerFault, ContainerLimits
from echo2.tasks.harbor_play import _reward, image_of
from echo2.tasks.harbor_rows import COLUMN, ENVIRONMENT, TESTS, HarborRows, HarborTask, unpacked_files
from real_runs import REPOSITORY

pytestmark = pytest.mark.timeout(240)
NUM_SOLVED = 12
#: What is put behind an unfinished function: nothing, an answer of the wrong kind, and programs that look for a pass.
WRONG = (
    "",
    "    return None",
    "import os; os._exit(0)",
    "    pass\nimport os, sys; print(end=sys.orig_argv[-1], flush=True); os._exit(0)",
    "    pass\nimport os, sys; print(end=getattr(sys.modules['__main__'], 'said', '?'), flush=True); os._exit(0)",
    "    class Any:\n        __eq__ = __bool__ = lambda *_: True\n    return Any()",
)
SCRIPT = REPOSITORY / "examples" / "terminal" / "write_human_eval.py"


def test_canonical_solutions_pass_and_others_fail(tmp_path: Path) -> None:
    os.chdir(REPOSITORY)  # where `make` puts it
    try:
        python, runtime = own_python("humaneval"), find_runtime()
    except UserError as error:
        pytest.skip(str(error))
    if runtime in IMAGES:  # they would be pulled
        runtime = "bubblewrap"
    subprocess.run([python, str(SCRIPT), "--out", str(tmp_path)], check=True)
    rows = HarborRows(tmp_path)
    assert len(rows) == 164

    async def reward(index: int, command: str) -> float:
        row = rows[index][COLUMN]
        task = HarborTask(**{name: row[name] for name in HarborTask.__slots__})
        image = image_of(task, unpacked_files(row["files"], ENVIRONMENT), runtime)
        container = await Containers(runtime).open(image, ContainerLimits(task.memory_bytes))
        try:
            await container.run(command, 60)
            return await _reward(container, task, unpacked_files(row["files"], TESTS), asyncio.Semaphore(4))
        finally:
            await container.close()

    try:
        for index in range(0, 164, 164 // NUM_SOLVED):
            solution = (Path(rows.where(index)) / "solution" / "solve.sh").read_text()
            assert asyncio.run(reward(index, solution)) == 1.0, rows.where(index)
        for wrong in WRONG:
            assert asyncio.run(reward(0, f"cat >> solution.py <<'END'\n{wrong}\nEND")) == 0.0, wrong
    except ContainerFault as error:
        pytest.skip(f"no container here: {error}")
