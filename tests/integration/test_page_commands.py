"""Commands of the pages' blocks, run in their order in a directory as a user has it. What is not run says why, here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from real_runs import REPOSITORY, SMALL, echo2
from test_pages import PAGES, command_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

#: Of what follows `echo2`, and why it is not run here.
NOT_RUN = {
    r"worker ": "joins a run of somebody: test_worker_script.py",
    r"(head|learner) ": "a part of a run, alone: test_runs.py",
    r".*--workers\.engine vllm": "needs vLLM: make vllm",
    r"simulate simulations/churn_spot": "takes minutes",
    r".*s3://": "needs a bucket: test_store_real.py",
    r"(plan|probe) examples/smollm/\S+ --(here|json)": "needs the pretrained model: make smollm",
    r"export .*--gguf": "needs the extra llamacpp: make extras",
    r"serve ": "waits for clients: make test-foreign",
    r".*\[": "says what may be written, and is no command",
}
#: Names that stand for something, and numbers of more patience than a test has.
PUT = {
    r"\bDIR\b": "outputs/my",
    r"outputs/(demo-\.\.\.|a|b|sort)(?= |$)": "outputs/my",
    r"plan \.\.\.": "plan run.toml",
    r"--steps 200": "--steps 2",
    r" --push \S+": "",  # test_hub.py
}
#: What else a command gets.
ADDED = {
    "run": [word for key, value in SMALL.items() for word in (f"--{key}", value)],
    "probe": ["--seconds", "1"],
    "plan": ["--train-seconds", "1000"],
}
CONFIG = """
[model]
path = "outputs/models/digit_sorting"
[tasks]
source = "examples/rows.jsonl"
[reward]
functions = ["exact_match"]
[sampling]
max_tokens = 12
"""
COMMANDS = {page: list(dict.fromkeys(command_lines(page))) for page in PAGES}
COMMANDS = {page: commands for page, commands in COMMANDS.items() if commands}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, sort_model: Path) -> Path:
    """A directory with a run that has ended, and the files that the pages name."""
    root = tmp_path_factory.mktemp("desk")
    for folder in ("examples", "simulations", "src/echo2/demo"):
        shutil.copytree(REPOSITORY / folder, root / folder)
    shutil.copytree(sort_model, root / "outputs" / "models" / "digit_sorting")
    script = ("examples/terminal/build_model.py", "--out", "outputs/models/terminal")
    subprocess.run([sys.executable, *script], cwd=root, check=True, capture_output=True)
    for name in ("my.toml", "run.toml"):
        (root / name).write_text(CONFIG)
    shutil.copy(root / "examples" / "offers.toml", root / "offers.toml")
    done = echo2(root, "run", "my.toml", *ADDED["run"])
    assert done.returncode == 0, done.stderr
    shutil.copy(root / "outputs" / "my" / "ticket", root / "ticket")
    return root


def prepared(command: str, number: int) -> list[str]:
    """The words of a command as it is run: what stands for something is put in, and each run has a directory."""
    for pattern, text in PUT.items():
        command = re.sub(pattern, text, command)
    words = command.split()
    if "--help" in words:
        return words
    if words[0] == "run" and "--out" not in words:
        words += ["--out", f"outputs/run-{number}"]
    if "--head.advertise" in words or "--view" in words:
        words.append("--dry-run")  # an address of nobody; and a page is served below
    return words if "--here" in words else [*words, *ADDED.get(words[0], [])]


def look(desk: Path, words: list[str]) -> None:
    """A page that is served until it is told to end."""
    command = [sys.executable, "-m", "echo2", *words]
    with subprocess.Popen(command, cwd=desk, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("open http://127.0.0.1:")
        finally:
            process.terminate()


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_work(page: Path, desk: Path) -> None:
    for number, command in enumerate(COMMANDS[page]):
        if any(re.match(pattern, command) for pattern in NOT_RUN):
            continue
        words = prepared(command, number)
        if words[0] == "view":
            look(desk, words)
            continue
        made = words[words.index("--to") + 1] if "--to" in words else f"outputs/run-{number}"
        shutil.rmtree(desk / made, ignore_errors=True)  # a page may name it in several commands
        done = echo2(desk, *words)
        is_told_wrong = words[0] == "doctor" and done.returncode == 1  # of this machine, or of a run that has ended
        assert done.returncode == 0 or is_told_wrong, f"{page.name}: echo2 {' '.join(words)}\n{done.stderr}"


def test_every_excluded_pattern_matches_a_command() -> None:
    commands = [command for page in COMMANDS.values() for command in page]
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in commands)]
    assert unused == []
    assert sum(not any(re.match(pattern, command) for pattern in NOT_RUN) for command in commands) >= 25
