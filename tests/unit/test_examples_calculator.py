"""The calculator of examples/calculator: what it calculates and refuses, and that a rollout may ask it and answer."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "calculator" / "calculator.py"


@pytest.fixture(scope="module")
def calculator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calculator", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TOOL_SECONDS = 60.0  # the first answer waits for a Python to start, on whatever machine
    return module


def test_the_calculator_computes_and_runs_no_code(calculator: ModuleType) -> None:
    asked = {
        "7*8": "56",
        "7+8": "15",
        "0*9": "00",
        "9-1": "08",
        "7*": "??",
        "": "??",
        "open('x')": "??",
        "().__class__": "??",
        "2**9": "??",
        "1.5+1": "??",
        "9" * 99: "9" * 8,
    }

    async def ask() -> dict[str, str]:
        tool = calculator.Tool()
        said = {line: await tool.ask(line) for line in asked}
        tool._process.kill()
        await tool._process.wait()
        return said

    assert asyncio.run(ask()) == asked


def test_a_rollout_asks_and_answers(calculator: ModuleType) -> None:
    row = calculator.Sums("heldout")[3]
    assert row["prompt"].startswith("7")
    assert not any(calculator.Sums()[i]["prompt"].startswith("7") for i in range(200))

    async def play() -> list[tuple[str, float, bool]]:
        rollout = calculator.Calculator(row, 0)
        said = [await rollout.step(f"?{row['prompt'].removesuffix('=')}"), await rollout.step(row["answer"])]
        process = calculator.TOOLS.pop(0)._process
        process.kill()
        await process.wait()
        return said

    assert asyncio.run(play()) == [(f"{row['answer']}\n", 0.0, False), ("", 1.0, True)]
