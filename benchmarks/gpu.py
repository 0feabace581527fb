"""All that a GPU is to be asked, in one command of at most nine minutes on one bare CUDA machine.

    python benchmarks/gpu.py --out gpu.json            # everything; `--sections learner,engines` some of it
    python benchmarks/gpu.py --smoke --out gpu.json    # real widths and few layers, in 100 s: does everything run?
    python benchmarks/gpu.py --tiny --out gpu.json     # on the CPU: tests this file, measures nothing

It needs torch 2.11 or newer, transformers 5.10 or newer, and no network; `make gpu-wheels` gathers the rest. Weights
are random and made on the spot. The result is rewritten after every row. A section that fails is recorded with the end
of its traceback, and the next begins; a section that did not run is recorded with the reason. Where an error leaves the
device unusable, a new process goes on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]  # a bare machine has no echo2 installed

from recording import commit, machine  # noqa: E402


@dataclass(frozen=True, slots=True)
class Section:
    """A function of a module of gpu_sections. `seconds`: what it takes at most, in full and as smoke; it does not begin
    with less than a quarter of that."""

    name: str
    module: str
    function: str
    seconds: tuple[float, float]


#: The most valuable first. Even at their longest, all of them fit into the full budget.
SECTIONS = (
    Section("ceilings", "ceilings", "run", (15.0, 10.0)),
    Section("engines", "engines", "run", (45.0, 25.0)),
    Section("learner", "learner", "run", (65.0, 30.0)),
    Section("profile", "profiled", "run", (20.0, 15.0)),
    Section("head", "head", "run", (10.0, 10.0)),
    Section("mismatch", "engines", "mismatch", (30.0, 15.0)),
    Section("weights", "weights", "run", (30.0, 20.0)),
    Section("mixture", "mixture", "run", (50.0, 25.0)),
    Section("low_memory", "learner", "low_memory", (40.0, 15.0)),
    Section("run", "whole", "run", (200.0, 60.0)),
)
BUDGETS = {"full": 540.0, "smoke": 110.0, "tiny": 600.0}
#: Beginning of the messages of errors after which a process can't use the device any more.
LOST_DEVICE = ("CUDA error", "CUDA driver error", "cuBLAS error")


class TimeOver(Exception):
    """The section's time is over."""


class Result:
    """The result file. `lines`: what the table shows."""

    def __init__(self, path: Path, ends_at: float, previous: dict[str, Any] | None) -> None:
        self.path = path
        self.figures: dict[str, Any] = previous or {"benchmark": "gpu", "sections": {}}
        self.figures["ends_at"] = ends_at

    def section(self, name: str) -> dict[str, Any]:
        """Return what is recorded of a section."""
        found: dict[str, Any] = self.figures["sections"].setdefault(name, {"rows": []})
        return found

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        unfinished.write_text(json.dumps(self.figures, indent=1, default=str) + "\n", encoding="utf-8")
        unfinished.replace(self.path)


def shown(row: dict[str, Any]) -> str:
    """Return a row as one line."""

    def value(one: Any) -> str:
        return f"{one:.4g}" if isinstance(one, float) else str(one)

    return "  ".join(f"{name}={value(one)}" for name, one in row.items() if name not in ("said", "logs", "source"))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Inside, TimeOver is raised when the time is over, between two of Python's steps."""

    def over(*_: Any) -> None:
        raise TimeOver

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def device_facts() -> dict[str, Any]:
    """Return what the result was measured with."""
    import torch
    import transformers

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}
    return facts


def run_section(section: Section, bench: Any, result: Result, seconds: float) -> bool:
    """Run one section; return whether the device can still be used."""
    found, began = result.section(section.name), time.monotonic()
    found["not_run"] = "began, and did not end"
    result.write()
    bench.ends_at = began + seconds
    usable = True
    try:
        with at_most(seconds):
            bench.forget_peak()
            getattr(importlib.import_module(f"gpu_sections.{section.module}"), section.function)(bench)
    except TimeOver:
        found["stopped"] = f"after its {seconds:.0f} s"
    except Exception as error:
        found["error"] = traceback.format_exc()[-3000:]
        print(f"   {section.name} failed: {str(error)[:400]}", flush=True)
        usable = not str(error).startswith(LOST_DEVICE)
    del found["not_run"]
    found["seconds"] = round(time.monotonic() - began, 1)
    result.figures["ceilings"] = bench.ceilings
    result.write()
    return usable


def run_all(names: list[str], options: argparse.Namespace, result: Result) -> None:
    """Run the sections of these names, while there is time."""
    import torch
    from gpu_sections import whole
    from gpu_sections.bench import Bench

    from echo2.core.devices import pick_device

    size = "tiny" if options.tiny else "smoke" if options.smoke else "full"
    device = torch.device("cpu" if options.tiny else "cuda:0")
    current = ""

    def record(row: dict[str, Any]) -> None:
        row = {name: float(f"{one:.5g}") if isinstance(one, float) else one for name, one in row.items()}
        result.section(current)["rows"].append(row)
        print(f"   {shown(row)}", flush=True)
        result.write()

    if not options.tiny and torch.cuda.is_available():
        device = pick_device("cuda:0")  # as an engine and a learner do, with what that switches off
    if "run" in names and not options.tiny:
        whole.begin(whole.HEADS[size])
    bench = Bench(device, size, record, ceilings=dict(result.figures.get("ceilings", {})))  # type: ignore[arg-type]
    for at, section in enumerate(one for one in SECTIONS if one.name in names):
        current = section.name
        limit, left = section.seconds[not bench.is_full], result.figures["ends_at"] - time.time() - 3.0
        if left < (0.0 if options.tiny else limit / 4):
            result.section(current)["not_run"] = f"{left:.0f} s were left"
            result.write()
            continue
        print(f"== {current}, {left:.0f} s left", flush=True)
        if not run_section(section, bench, result, left if options.tiny else min(limit, left)):
            others = names[names.index(section.name) + 1 :] if at + 1 < len(names) else []
            continue_in_new_process(others, options)


def continue_in_new_process(names: list[str], options: argparse.Namespace) -> None:
    """Go on with these sections in a process whose device is fresh."""
    if names:
        sizes = ["--tiny"] * options.tiny + ["--smoke"] * options.smoke
        words = [__file__, "--goes-on", "--sections", ",".join(names), "--out", str(options.out), *sizes]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *words])


def table(result: Result) -> str:
    """Return all rows, and what failed or was not run."""
    lines = []
    for name, found in result.figures["sections"].items():
        state = "not run: " + found["not_run"] if "not_run" in found else f"{found.get('seconds', 0.0)} s"
        lines.append(f"{name} ({state}){' stopped ' + found['stopped'] if 'stopped' in found else ''}")
        for row in found["rows"]:
            lines.append(f"   {shown(row)}")
            lines += [f"      said: {row['said'][-600:]}"] if row.get("said") else []
        if "error" in found:
            lines.append("   FAILED: " + " | ".join(found["error"].strip().splitlines()[-4:])[-700:])
    return "\n".join(lines)


def main() -> int:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("--sections", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--budget-seconds", type=float, help="whole time (default: 540; smoke 100)")
    parser.add_argument("--smoke", action="store_true", help="small sizes on the GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--goes-on", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.json", help="result file")
    options = parser.parse_args()
    wanted = options.sections.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"--sections: there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    size = "tiny" if options.tiny else "smoke" if options.smoke else "full"
    previous = json.loads(options.out.read_text()) if options.goes_on else None
    budget = BUDGETS[size] if options.budget_seconds is None else options.budget_seconds
    ends_at = previous["ends_at"] if previous else began + budget
    result = Result(options.out, ends_at, previous)
    if previous is None:
        result.figures |= {"size": size, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}
        result.figures |= {"machine": machine() | device_facts()}
        for name in names:
            result.section(name)["not_run"] = "not reached" if name in wanted else "not among --sections"
        print(json.dumps(result.figures["machine"]), flush=True)
    result.write()
    run_all([name for name in names if name in wanted], options, result)
    result.figures["took_seconds"] = round(time.time() - ends_at + budget, 1)
    result.write()
    print(f"\n{table(result)}\nwritten to {options.out}")
    return any("error" in found for found in result.figures["sections"].values())


if __name__ == "__main__":
    sys.exit(main())
