"""Every example is run as a user runs it, on local data: real processes, two small steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_runs import REPOSITORY, SMALL, echo2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Neither machines nor a service are a run; three need Pythons of their own (tests/foreign), the last a judge
#: (test_judge_real.py).
OTHERS = {"offers", "serve", "openenv", "reverse_text", "agents", "judge"}
EXAMPLES = sorted({path.stem for path in (REPOSITORY / "examples").glob("*.toml")} - OTHERS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(checkout: Path, name: str) -> None:
    flags = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    done = echo2(checkout, "run", f"examples/{name}.toml", "--out", f"outputs/{name}", "--json", *flags)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["outcome"][0] == "finished"
    assert summary["groups"]["trained"] == 8
    audit = json.loads(echo2(checkout, "audit", f"outputs/{name}", "--json").stdout)
    assert (audit["trained"], audit["lost"], audit["doubled"], audit["retired"]) == (8, 0, 0, {})
    rows = [json.loads(line) for line in (checkout / "outputs" / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
