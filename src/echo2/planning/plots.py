"""Pictures of simulated runs. Matplotlib is an optional extra; colours are readable on light and on dark pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echo2.errors import UserError
from echo2.sim import Case, Report, Study

#: Of the Okabe-Ito palette, which people with any kind of colour vision can tell apart, the mid-tones.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
#: Readable on white and on black.
INK = "#7f7f7f"


def require_matplotlib() -> None:
    """Raises: UserError: it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("Plots need matplotlib: pip install 'echo2[plot]', or leave out --plot.")


def plot_report(study: Study, report: Report, path: Path) -> None:
    """One run: the learner and what it trained on by step, staleness, dollars, broadcasts, the fleet over time."""
    title = f"{study.name}: learner idle {report.idle_ratio:.1%}, ${report.usd_per_step:.4g} a step"
    figure, axes = _figure(2, 3, title)
    history, total = report.history, max(1, sum(report.staleness.values()))
    steps, trained = [one.step for one in history.steps], [one.train_seconds for one in history.steps]
    axes[0].bar(steps, trained, color=COLOURS[0], label="training")
    waited = [one.wait_seconds for one in history.steps]
    axes[0].bar(steps, waited, bottom=trained, color=COLOURS[1], label="waiting")
    _label(axes[0], "The learner, step by step", "training step", "seconds")
    surviving = sorted(history.surviving().items())
    trained_steps = [step for step, _ in surviving]
    for name, pick, width in (("oldest", max, 3.5), ("youngest", min, 1.5)):
        ages = [pick(step - version for version in done.versions) for step, done in surviving]
        colour = COLOURS[1] if name == "oldest" else COLOURS[5]
        axes[1].step(trained_steps, ages, where="mid", color=colour, label=name, linewidth=width)
    _label(axes[1], "Staleness, step by step", "training step", "policy versions")
    shares = [100 * count / total for count in report.staleness.values()]
    axes[2].bar([str(age) for age in report.staleness], shares, color=COLOURS[2])
    _label(axes[2], "Staleness of all groups", "policy versions", "% of groups")
    bills = {"learner": report.learner_usd, "workers": report.usd}
    axes[3].barh(list(bills), list(bills.values()), color=[COLOURS[0], COLOURS[4]])
    _label(axes[3], "Cost of the run", "US dollars", "")
    axes[4].plot(history.broadcasts, "o", color=COLOURS[3], markersize=4)
    _label(axes[4], "Broadcast to 1/1.1 of the workers", "publication", "seconds")
    times = [at / 3600 for at, _, _ in history.fleet] + [report.seconds / 3600]
    for column, (name, colour) in enumerate((("attending", COLOURS[5]), ("active", COLOURS[0])), start=1):
        counts = [entry[column] for entry in history.fleet]
        axes[5].step(times, [*counts, *counts[-1:]], where="post", color=colour, label=name, linewidth=5 - 2 * column)
    _label(axes[5], "The fleet over time", "hours", "workers")
    for panel in (axes[0], axes[1], axes[4], axes[5]):
        panel.set_ylim(bottom=0, top=1.1 * max(1e-9, panel.get_ylim()[1]))
    for panel in (axes[0], axes[1], axes[5]):
        panel.legend(frameon=False, labelcolor=INK, fontsize=8)
    _save(figure, path)


def plot_study(study: Study, reports: Sequence[Report], path: Path) -> None:
    """Many runs: idle ratio, dollars a step, staleness and broadcast over the last swept number, a line a variant."""
    figure, axes = _figure(2, 2, study.name)
    panels: tuple[tuple[str, str, Callable[[Report], float]], ...] = (
        ("Learner idle (second half)", "% of its time", lambda report: 100 * report.steady_idle_ratio),
        ("Cost", "US dollars a step", lambda report: report.usd_per_step),
        ("Mean staleness", "policy versions", lambda report: report.mean_staleness),
        ("Broadcast to 1/1.1 of the workers", "seconds", lambda report: report.broadcast_seconds),
    )
    swept = study.cases[0].values
    for panel, (title, unit, value) in zip(axes, panels, strict=True):
        lines = _lines(study.cases, [value(report) for report in reports])
        if swept and all(isinstance(x, int | float) for points in lines.values() for x, _ in points):
            for number, (label, points) in enumerate(lines.items()):
                colour = COLOURS[number % len(COLOURS)]
                panel.plot(*zip(*points, strict=True), "o-", color=colour, label=label, markersize=4)
            _label(panel, title, swept[-1][0].replace("_", " "), unit)
        else:
            names = [str(case) for case in study.cases]
            panel.barh(names[::-1], [value(report) for report in reports][::-1], color=COLOURS[0])
            _label(panel, title, unit, "")
            continue
        panel.set_ylim(bottom=0)
        if len(lines) > 1:
            panel.legend(frameon=False, labelcolor=INK, fontsize=8)
    _save(figure, path)


def _lines(cases: Sequence[Case], values: Sequence[float]) -> dict[str, list[tuple[Any, float]]]:
    """(last swept value, y) of each case, by its variant and its other swept values."""
    lines: dict[str, list[tuple[Any, float]]] = {}
    for case, y in zip(cases, values, strict=True):
        others = [f"{key.rpartition('.')[2]} {value}" for key, value in case.values[:-1]]
        x = case.values[-1][1] if case.values else ""
        lines.setdefault(", ".join([case.label, *others] if case.label else others), []).append((x, y))
    return lines


def _figure(rows: int, columns: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    figure.patch.set_alpha(0.0)
    figure.suptitle(title, color=INK, fontweight="bold")
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for panel in axes:
        panel.patch.set_alpha(0.0)
        panel.tick_params(colors=INK, labelsize=8)
        panel.grid(color=INK, alpha=0.25, linewidth=0.5)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            panel.spines[side].set_color(INK)
    return figure, axes


def _label(panel: Any, title: str, x: str, y: str) -> None:
    panel.set_title(title, color=INK, fontsize=10)
    panel.set_xlabel(x, color=INK, fontsize=9)
    panel.set_ylabel(y, color=INK, fontsize=9)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
