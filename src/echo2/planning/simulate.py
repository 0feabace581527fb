"""`echo2 simulate`: runs a scenario file and prints the report."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from echo2.sim import Report, Study, load_study, run_scenario


def run(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: the scenario is wrong.
    """
    study = load_study(options.scenario)
    reports = simulate(study, options.seed, quiet=options.json)
    if options.json:
        print(json.dumps(to_json(study, reports), indent=1))
    elif len(reports) == 1:
        print(reports[0].to_text())
    else:
        print(to_table(study, reports))
    return 0 if all(report.finished for report in reports) else 1


def simulate(study: Study, seed: int, quiet: bool = False) -> list[Report]:
    """Simulate every run of the study with the same seed, and show a progress bar if stderr is a terminal."""
    reports: list[Report] = []
    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("simulating", total=sum(case.scenario.max_steps for case in study.cases))
        for case in study.cases:
            tell = partial(_tell, bar, task, sum(report.steps for report in reports))
            reports.append(run_scenario(case.scenario, seed, keeps_events=False, progress=tell))
    return reports


def _tell(bar: Progress, task: TaskID, done: int, steps: int) -> None:
    bar.update(task, completed=done + steps)


def to_json(study: Study, reports: list[Report]) -> dict[str, Any]:
    """Return all runs as plain values, for `--json`."""
    runs = [
        {"label": case.label, "values": dict(case.values), **report.to_dict()}
        for case, report in zip(study.cases, reports, strict=True)
    ]
    return {"scenario": study.name, "about": study.about, "runs": runs}


def to_table(study: Study, reports: list[Report]) -> str:
    """Return a table with one line per run."""
    width = max(len(str(case)) for case in study.cases)
    head = f"{study.name:<{width}}  workers   idle  s/step  wait/period  staleness mean, max  broadcast    $/step"
    lines = [head]
    for case, report in zip(study.cases, reports, strict=True):
        waits = report.steady_idle_ratio * report.step_seconds * case.scenario.publish_every
        lines.append(
            f"{case!s:<{width}}  {report.max_workers:>7}  {report.steady_idle_ratio:>5.1%}  {report.step_seconds:>6.4g}"
            f"  {waits:>9.1f} s  {report.mean_staleness:>14.2f}, {report.max_staleness:>3}"
            f"  {report.broadcast_seconds:>7.1f} s  {report.usd_per_step:>8.4f}"
            + ("" if report.finished else "  NOT FINISHED")
        )
    lines.append("idle, s/step and wait are of the second half of the steps; the cold start is not in them.")
    return "\n".join(lines)
