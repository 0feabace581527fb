"""The command that measures a GPU, at a tiny size on the CPU: every row is there, and a fault costs one section."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import gpu
from house import REPOSITORY

COMMAND = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu.py")]
SECTIONS = tuple(section.name for section in gpu.SECTIONS)


def measured(out: Path, *flags: str, environment: dict[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    env = os.environ | (environment or {})
    done = subprocess.run([*COMMAND, "--out", str(out), *flags], capture_output=True, text=True, env=env)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_gives_its_rows(tmp_path: Path) -> None:
    status, result, told = measured(tmp_path / "gpu.json", "--tiny")
    assert status == 0, told
    sections = result["sections"]
    assert tuple(sections) == SECTIONS
    assert not [name for name, found in sections.items() if "error" in found or not found["rows"]]
    names = {name: {key for row in found["rows"] for key in row} for name, found in sections.items()}
    assert {"tflops", "copy_gb_s"} <= names["ceilings"]
    assert {"tokens_s", "mfu_of_measured", "peak_gb", "forecast_gb"} <= names["learner"]
    assert {"tokens_s", "peak_gb", "forecast_gb", "offloaded"} <= names["low_memory"]
    assert {"wall_ms", "busy", "operations"} <= names["profile"]
    assert {"seconds", "beside_gb"} <= names["head"]
    assert {"tokens_s", "of_bound", "prefill_tokens_s"} <= names["engines"]
    assert {"encode_gb_s", "apply_gb_s", "pause_seconds", "to_first_token_seconds"} <= names["weights"]
    assert {"mean_log_ratio", "largest_log_ratio"} <= names["mismatch"]
    assert [row["status"] for row in sections["run"]["rows"]] == [0]
    assert {"steps", "to_first_step_seconds", "learner_idle_ratio", "staleness_mean"} <= names["run"]
    exact = [row for row in sections["mismatch"]["rows"] if row["dtype"] == "float32"]
    assert exact[0]["largest_log_ratio"] < 1e-4
    routes = {"replayed", "route_bytes_a_token"}
    assert names["learner"] | names["engines"] | names["mismatch"] >= names["mixture"] - routes - {"experts"}
    apart = [row for row in sections["mixture"]["rows"] if "replayed" in row]
    assert [(row["dtype"], row["replayed"]) for row in apart] == list(product(("bfloat16", "float32"), (False, True)))
    assert all(row["largest_log_ratio"] < 1e-4 for row in apart if row["dtype"] == "float32")
    assert all(row["route_bytes_a_token"] == 4 for row in apart if row["replayed"])  # two layers, two experts each


def test_a_section_that_fails_costs_no_other_one(tmp_path: Path) -> None:
    """Without a GPU no section of the smoke size finds its device; each is recorded."""
    flags = "--smoke", "--sections", "ceilings,head"
    status, result, told = measured(tmp_path / "gpu.json", *flags, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert status == 1, told
    sections = result["sections"]
    errors = [found["error"].splitlines()[-1] for found in sections.values() if "error" in found]
    assert len(errors) == 2
    assert all(error in told for error in errors)
    assert "not_run" not in sections["ceilings"] | sections["head"]
    others = {found["not_run"] for name, found in sections.items() if name not in ("ceilings", "head")}
    assert others == {"not among --sections"}
    assert tuple(sections) == SECTIONS


def test_the_report_names_a_section_that_got_no_time(tmp_path: Path) -> None:
    flags = "--tiny", "--sections", "head", "--budget-seconds", "0"
    status, result, told = measured(tmp_path / "gpu.json", *flags)
    assert "s were left" in result["sections"]["head"]["not_run"]
    assert result["sections"]["head"]["not_run"] in told
    assert status == 0


def test_all_sections_at_their_longest_fit_into_nine_minutes() -> None:
    assert sum(section.seconds[0] for section in gpu.SECTIONS) < gpu.BUDGETS["full"] - 10.0 <= 530.0
