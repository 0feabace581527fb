"""From a version's publication to its first tokens, and what generation pauses for it, in runs of the demo; for each
engine in turn.

    python benchmarks/new_weights.py [--engines compact,vllm] [--steps 40] [--out FILE]

`ECHO2_ENGINE_PYTHON` names vLLM's Python. One worker on this machine. Publication: the snapshot is whole in the head's
store. Installed: the worker says so, and its next decode step draws from the new weights. Delivered: the first group
that has a token of them, all of it, is at the head; its first token is between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import recording

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "src" / "echo2" / "demo" / "sort.toml"
WARM_VERSIONS = 2  # the first snapshots come before anything runs


def main() -> None:
    """One run an engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="compact,vllm")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = {}
    for engine in options.engines.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            settings = {"run.max_steps": options.steps, "eval.every": 0, "workers.count": 1, "workers.engine": engine}
            flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
            command = [sys.executable, "-m", "echo2", "run", str(DEMO), "--out", str(out), "--json", *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
            figures[engine] = measured(out)
            print(engine, figures[engine], flush=True)
    print(f"figures are in {recording.save('new_weights', {'engines': figures}, options.out)}")


def measured(out: Path) -> dict[str, Any]:
    """Of one run directory: seconds, shares and counts."""
    published: dict[int, float] = {}
    installed: dict[int, float] = {}
    delivered: dict[int, float] = {}
    groups = mixed = 0
    for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        event, now = row.get("event", {}), row.get("now", 0.0)
        match event.get("type"):
            case "SnapshotPublished":
                published[event["ref"]["version"]] = now
            case "WorkerReported" if event["installed"]:
                installed.setdefault(event["installed"]["version"], now)
            case "GroupDelivered":
                groups += 1
                mixed += event["oldest_version"] != event["newest_version"]
                delivered.setdefault(event["newest_version"], now)
    pauses = [
        json.loads(line).get("broadcast/pause_seconds")
        for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    totals = [pause for pause in pauses if pause is not None]
    spread: dict[str, list[float]] = {
        "published_to_installed": [installed[v] - published[v] for v in published if v in installed],
        "published_to_delivered": [delivered[v] - published[v] for v in published if v in delivered],
        "pause_a_step": [after - before for before, after in pairwise(totals)],
    }
    return {
        **{
            f"{name}_p{part}_seconds": round(recording.quantile(values[WARM_VERSIONS:], part / 100), 4)
            for name, values in spread.items()
            for part in (50, 95)
        },
        "versions": len(published),
        "groups": groups,
        "groups_of_several_versions": mixed,
    }


if __name__ == "__main__":
    main()
