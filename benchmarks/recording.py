"""Where a benchmark's figures go, and what they were made with."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def there(text: str) -> Path:
    """The type of an argument that names a file or directory to read."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return Path(text)


def machine() -> dict[str, Any]:
    """Where this runs. The load is of the last minute."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit, with `+` when the tree differs from it."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return ""
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "none") + ("+" if git("status", "--porcelain") else "")


#: As a benchmark begins (it imports this): when, with which code, on what.
STARTED = (datetime.now(UTC), time.perf_counter(), commit(), machine())


def child_environment() -> dict[str, str]:
    """The environment of a child that runs a benchmark: it finds the modules that this process finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def output_of(command: Sequence[str | Path], **more: Any) -> str:
    """Return what a command prints. Where it fails, this benchmark ends with what the command said last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if done.returncode:
        words = " ".join(map(str, command))[:300]
        raise SystemExit(f"{words} ended with status {done.returncode}: {last(done.stderr)}")
    return str(done.stdout).strip()


def last(said: str, lines: int = 3) -> str:
    """Return the last lines of what a process said that are not empty."""
    return "\n".join([line for line in said.splitlines() if line.strip()][-lines:]) or "it said nothing"


def save(name: str, figures: dict[str, Any], out: Path | None) -> Path:
    """Write figures with their circumstances to `out`, or to results/<name>-<day>.json."""
    when, began, code, here = STARTED
    path = out or HERE / "results" / f"{name}-{when:%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "when": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "took_seconds": round(time.perf_counter() - began, 1),
        "commit": code,
        "machine": here,
        **figures,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def quantile(values: list[float], share: float) -> float:
    """The value that this share of the others does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
