"""Sums with a tool: the policy may ask a calculator before it answers. Used by calculator.toml.

A line that begins with `?` is a call: the rest is calculated in a process without rights, and the policy reads the
result. Any other line is the answer, and ends the rollout. Both have two digits: `7*8=`, `?7*8`, `56`, `56`.
"""

import asyncio
import random
import resource
import sys
from collections.abc import Mapping
from typing import Any

TOOL_SECONDS = 2.0
TOOL_BYTES = 1 << 30
#: What the tool's process runs: a line in, a line out. Digits and three operators are all that it takes.
TOOL = """
import ast, operator, sys
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
def value(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError
for line in sys.stdin:
    try:
        print(f"{value(ast.parse(line[:100].strip(), mode='eval').body):02d}"[:8], flush=True)
    except (ValueError, SyntaxError, RecursionError):
        print("??", flush=True)
"""


class Sums:
    """Rows: two digits and an operator; those whose first digit is 7 are held out."""

    def __init__(self, split: str = "train", size: int = 4096, seed: int = 0) -> None:
        self.split, self.size, self.seed = split, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.split} {self.seed} {index}")
        first = 7 if self.split == "heldout" else rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 9])
        second, operation = rng.randrange(10), rng.choice("+*")
        answer = first + second if operation == "+" else first * second
        return {"prompt": f"{first}{operation}{second}=", "answer": f"{answer:02d}"}


def _confine() -> None:
    """In the tool's process, before it runs: no files, no children, little memory."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (TOOL_BYTES, TOOL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Tool:
    """One process for all rollouts here, which is replaced when it hangs or dies."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def ask(self, line: str) -> str:
        """What the calculator says to one line."""
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", TOOL),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={},
                    preexec_fn=_confine,
                )
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line.encode() + b"\n")
            try:
                async with asyncio.timeout(TOOL_SECONDS):
                    said = await process.stdout.readline()
            except TimeoutError:
                process.kill()
                return "??"
            return said.decode().strip() or "??"


TOOLS: dict[int, Tool] = {}


class Calculator:
    """One rollout. `async def step`: while one waits for the tool, others go on."""

    stop = "\n"
    turn_tokens = 6

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        self.answer = columns["answer"]

    async def step(self, action: str) -> tuple[str, float, bool]:
        """What the policy reads next, the reward of this turn, and whether the rollout is over."""
        if not action.startswith("?"):
            return "", float(action == self.answer), True
        tool = TOOLS.setdefault(0, Tool())
        return f"{await tool.ask(action[1:])}\n", 0.0, False
