"""Pictures of what staleness does. Of the grid: held-out accuracy over the lag, and over training steps at three lags.
Of the time to accuracy: held-out accuracy over seconds, a line a seed.

    make bench-staleness_plot ARGS='outputs/staleness_grid docs/staleness_grid.svg'
    make bench-staleness_plot ARGS='RESULTS/staleness_time-staleness-...-paced.json docs/staleness_time.svg'
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plots import COLOURS, INK, require_matplotlib
from staleness_grid import LEAST_STEPS, OTHER_LOSSES, WIDE, Cell, accuracy_at, read_cells

from echo2.core.errors import UserError

CURVE_LAGS = (0, 8, 32)
AFTER_STEPS = LEAST_STEPS  # those that every cell has
STYLES = {"dppo": (COLOURS[0], "o-"), "ppo": (COLOURS[2], "s-"), "none": (COLOURS[1], "x-")}
OTHER_MARKS = ("v", "^", "<", ">", "D", "P")


def plot(cells: dict[Cell, dict[str, Any]], path: Path) -> None:
    """One wide panel and one for each of CURVE_LAGS, to an SVG that reads on light and dark pages.

    Raises:
        UserError: there is no cell, or no matplotlib.
    """
    if not cells:
        raise UserError("There are no finished cells to draw.")
    figure = _figure(11.0, 7.2)
    grid = figure.add_gridspec(2, len(CURVE_LAGS))
    _by_lag(_clean(figure.add_subplot(grid[0, :])), cells)
    for column, lag in enumerate(CURVE_LAGS):
        _by_step(_clean(figure.add_subplot(grid[1, column])), cells, lag)
    _save(figure, path)


def plot_times(figures: dict[str, Any], path: Path) -> None:
    """Accuracy over seconds by variant, from the results of `staleness_time.py`; the dashed line is its threshold."""
    figure = _figure(8.0, 4.2)
    panel = _clean(figure.add_subplot())
    names = list(dict.fromkeys(curve["variant"] for curve in figures["curves"]))
    for curve in figures["curves"]:
        place = names.index(curve["variant"])
        seconds = [0.0, *(point[1] for point in curve["points"])]
        accuracy = [figures["start_accuracy"], *(point[2] for point in curve["points"])]
        label = curve["variant"] if curve["seed"] == figures["seeds"][0] else None
        panel.plot(seconds, accuracy, color=COLOURS[place % len(COLOURS)], linewidth=1.2, label=label)
    panel.axhline(figures["threshold"], color=INK, linewidth=0.8, linestyle="--")
    _label(panel, f"{figures['steps']} steps of the same job with the same fleet, a line a seed", "seconds")
    panel.legend(frameon=False, labelcolor=INK, fontsize=8, loc="lower right")
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "staleness"  # the same data, the same file
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    return figure


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _by_lag(panel: Any, cells: dict[Cell, dict[str, Any]]) -> None:
    """Accuracy after AFTER_STEPS over S, the bar from the worst to the best seed."""
    for loss, (colour, style) in STYLES.items():
        known = [(float(place), ends) for place, lag in enumerate(WIDE) if (ends := _after(cells, loss, lag))]
        _bars(panel, known, colour, style, loss, 1.8)
    for number, loss in enumerate(OTHER_LOSSES):
        shift = 0.09 * (number + 1)
        known = [(WIDE.index(lag) + shift, ends) for lag in CURVE_LAGS if (ends := _after(cells, loss, lag))]
        _bars(panel, known, COLOURS[3 + number % 3], OTHER_MARKS[number], loss, 0.8)
    panel.set_xticks(range(len(WIDE)), [str(lag) for lag in WIDE])
    panel.set_ylim(0.0, 1.0)
    _label(
        panel, f"After {AFTER_STEPS} steps, by staleness (mean, least and most of the seeds)", "staleness S, versions"
    )
    panel.legend(frameon=False, labelcolor=INK, fontsize=8, ncols=3, loc="lower left")


def _bars(
    panel: Any, found: Sequence[tuple[float, list[float]]], colour: str, style: str, label: str, width: float
) -> None:
    if not found:
        return
    places = [place for place, _ in found]
    middle = [statistics.fmean(ends) for _, ends in found]
    below = [centre - min(ends) for centre, (_, ends) in zip(middle, found, strict=True)]
    above = [max(ends) - centre for centre, (_, ends) in zip(middle, found, strict=True)]
    errors = [below, above]
    panel.errorbar(
        places, middle, errors, fmt=style, color=colour, label=label, linewidth=width, markersize=4, capsize=2
    )


def _by_step(panel: Any, cells: dict[Cell, dict[str, Any]], lag: int) -> None:
    """Accuracy while training, a line a seed."""
    for loss, (colour, _) in STYLES.items():
        for cell, record in cells.items():
            if (cell.loss, cell.staleness) == (loss, lag):
                steps = [point["step"] for point in record["points"]]
                panel.plot(steps, [point["accuracy"] for point in record["points"]], color=colour, linewidth=1.0)
    panel.set_ylim(0.0, 1.0)
    _label(panel, f"S = {lag}, a line a seed", "training step")


def _after(cells: dict[Cell, dict[str, Any]], loss: str, lag: int) -> list[float]:
    mine = ((cell, record) for cell, record in cells.items() if (cell.loss, cell.staleness) == (loss, lag))
    ends = (accuracy_at(record, AFTER_STEPS) for _, record in mine)
    return [accuracy for accuracy in ends if accuracy is not None]


def _clean(panel: Any) -> Any:
    panel.patch.set_alpha(0.0)
    panel.tick_params(colors=INK, labelsize=8)
    panel.grid(color=INK, alpha=0.25, linewidth=0.5)
    panel.set_axisbelow(True)
    for side, spine in panel.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    return panel


def _label(panel: Any, title: str, x: str) -> None:
    panel.set_title(title, color=INK, fontsize=10)
    panel.set_xlabel(x, color=INK, fontsize=9)
    panel.set_ylabel("held-out accuracy", color=INK, fontsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the grid's --out, or a file that staleness_time.py wrote")
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    if options.source.is_dir():
        plot(read_cells(options.source), options.svg)
    else:
        plot_times(json.loads(options.source.read_text(encoding="utf-8")), options.svg)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
