"""`echo2 simulate`: run a scenario file, print what came out, plot it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from echo2.errors import UserError
from echo2.planning.plots import plot_report, plot_study, require_matplotlib
from echo2.sim import Case, Report, Study, load_study, run_scenario


def run(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: the scenario is wrong, or a plot was asked for and cannot be drawn.
    """
    study = load_study(options.scenario)
    if options.plot is not None:
        require_matplotlib()
    reports = simulate(study, options.seed, quiet=options.json)
    if options.json:
        print(json.dumps(to_json(study, reports), indent=1))
    elif len(reports) == 1:
        print(reports[0].to_text())
    else:
        print(to_table(study, reports))
    if options.plot is not None:
        draw(study, reports, options.plot)
    return 0 if all(report.finished for report in reports) else 1


def simulate(study: Study, seed: int, quiet: bool = False) -> list[Report]:
    """Every run of the study, with the same seed; a bar on the terminal says how far it is."""
    num_steps = sum(case.scenario.max_steps for case in study.cases)
    show = not quiet and sys.stderr.isatty()
    reports: list[Report] = []
    for case in study.cases:
        done = sum(report.steps for report in reports)

        def progress(steps: int, case: Case = case, done: int = done) -> None:
            if show:
                share = (done + min(steps, case.scenario.max_steps)) / num_steps
                bar = "#" * int(30 * share)
                print(f"\r[{bar:<30}] {share:4.0%}  {case!s:<40.40}", end="", file=sys.stderr, flush=True)

        reports.append(run_scenario(case.scenario, seed, keeps_events=False, progress=progress))
    if show:
        print("\r" + " " * 80 + "\r", end="", file=sys.stderr, flush=True)
    return reports


def to_json(study: Study, reports: list[Report]) -> dict[str, Any]:
    runs = [
        {"label": case.label, "values": dict(case.values), **report.to_dict()}
        for case, report in zip(study.cases, reports, strict=True)
    ]
    return {"scenario": study.name, "about": study.about, "runs": runs}


def to_table(study: Study, reports: list[Report]) -> str:
    """One line a run."""
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


def draw(study: Study, reports: list[Report], path: Path) -> None:
    """Raises: UserError: the file cannot be written in the format that its name asks for."""
    try:
        if len(reports) == 1:
            plot_report(study, reports[0], path)
        else:
            plot_study(study, reports, path)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot write the plot {path}: {error}.") from error
