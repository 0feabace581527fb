"""Where a benchmark's figures go, and what they were made with."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def save(name: str, figures: dict[str, Any], out: Path | None) -> Path:
    """Write figures with their circumstances to `out`, or to results/<name>-<day>.json."""
    when = datetime.now(UTC)
    path = out or HERE / "results" / f"{name}-{when:%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "when": when.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        **figures,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def commit() -> str:
    """The commit, with `+` when the tree differs from it."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=HERE, capture_output=True, text=True)
    except OSError:
        return ""
    return found.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def quantile(values: list[float], share: float) -> float:
    """The value that this share of the others does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
