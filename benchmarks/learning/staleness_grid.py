"""What staleness does to learning, and which loss survives it: held-out accuracy by loss and fixed lag S.

    make bench-staleness_grid ARGS='--out outputs/staleness_grid --jobs 2'      # hours; go on with the same command
    make bench-staleness_grid ARGS='--out outputs/staleness_grid --table'       # what is there so far
    make bench-staleness_grid ARGS='--out outputs/staleness_grid --table --plot docs/staleness_grid.svg'
    make bench-staleness_grid ARGS='--out outputs/try --cells dppo,tv_high=0.1:8:0 dppo:8:0'

A cell is a loss, a lag and a seed: the demo's job (src/echo2/demo/sort.toml) in one process, without network,
every step t sampled by version max(0, t - S) alone (`staleness_cell.py`). Each has max(120, 10 S) steps, and one file
in --out when it is done: a rerun skips it. Cells that matter most come first. `none` is the negative control: no
correction at all, and no scaling of the learning rate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from plots import COLOURS, INK, require_matplotlib
from recording import save, there
from rich.console import Console
from rich.progress import track

from echo2.config import Config, load
from echo2.config.sections import LearnerConfig
from echo2.core.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
WIDE = (0, 1, 2, 4, 8, 16, 32)
NARROW = (0, 8, 32)
FULL_LOSSES = ("dppo", "ppo", "none")
OTHER_LOSSES = ("decoupled", "tis", "icepop", "cispo", "gspo")
FIRST = (("dppo", 0), ("dppo", 8), ("none", 8), ("dppo", 32), ("ppo", 8), ("ppo", 0), ("none", 0), ("ppo", 32))
LEAST_STEPS = 120
STEPS_PER_LAG = 10
SHOWN_STEPS = (60, 120)
#: Of the picture.
CURVE_LAGS = (0, 8, 32)
AFTER_STEPS = LEAST_STEPS  # those that every cell has
STYLES = {"dppo": (COLOURS[0], "o-"), "ppo": (COLOURS[2], "s-"), "none": (COLOURS[1], "x-")}
OTHER_MARKS = ("v", "^", "<", ">", "D", "P")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One training run. `loss` may carry changed parameters: `dppo,tv_high=0.1`."""

    loss: str
    staleness: int
    seed: int

    def __str__(self) -> str:
        return f"{self.loss}:{self.staleness}:{self.seed}"

    def steps(self, least: int) -> int:
        """How long it is trained."""
        return max(least, STEPS_PER_LAG * self.staleness)

    def path(self, out: Path) -> Path:
        return out / f"cell-{self.loss}-{self.staleness}-{self.seed}.json"


def parse_cell(text: str) -> Cell:
    """`dppo:8:0`.

    Raises:
        UserError: it is not LOSS:LAG:SEED.
    """
    loss, _, numbers = text.partition(":")
    lag, _, seed = numbers.partition(":")
    if not (loss and lag.isdecimal() and seed.isdecimal()):
        raise UserError(f"{text!r} is not a cell: expected LOSS:LAG:SEED, such as dppo:8:0.")
    return Cell(loss, int(lag), int(seed))


def all_cells(seeds: Sequence[int]) -> list[Cell]:
    """Every cell once: the important pairs first, for all seeds; then short runs before long ones."""
    wide = [(loss, lag) for lag in WIDE for loss in FULL_LOSSES]
    narrow = [(loss, lag) for lag in (8, 32, 0) for loss in OTHER_LOSSES]
    pairs = list(dict.fromkeys([*FIRST, *wide, *narrow]))
    return [Cell(loss, lag, seed) for loss, lag in pairs for seed in seeds]


def read_cells(out: Path) -> dict[Cell, dict[str, Any]]:
    """Finished cells. An unfinished file has another name, so whatever is here is whole."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("cell-*.json"))]
    return {parse_cell(record["cell"]): record for record in found}


def write_cell(out: Path, cell: Cell, steps: int, figures: dict[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = out / f".unfinished-{os.getpid()}"
    unfinished.write_text(json.dumps({"cell": str(cell), "steps": steps, **figures}) + "\n", encoding="utf-8")
    unfinished.rename(cell.path(out))


def claim(out: Path, settings: dict[str, Any]) -> None:
    """Make `out` the place of cells with these settings.

    Raises:
        UserError: it holds cells with others, which could not be compared.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "settings.json"
    if path.is_file() and (there := json.loads(path.read_text(encoding="utf-8"))) != settings:
        raise UserError(f"{out} holds cells with {there}, not {settings}: give another --out.")
    path.write_text(json.dumps(settings) + "\n", encoding="utf-8")


def accuracy_at(record: dict[str, Any], step: int) -> float | None:
    """Held-out accuracy after `step` steps. A run that diverged keeps what it had."""
    before = [point["accuracy"] for point in record["points"] if point["step"] <= step]
    reached = record["points"][-1]["step"] >= step or record["diverged"]
    return before[-1] if reached else None


def summary(cells: dict[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each loss and lag: accuracy over seeds, and the mismatch of the second half of the run."""
    rows = []
    for loss, lag in sorted({(cell.loss, cell.staleness) for cell in cells}):
        mine = {cell: record for cell, record in cells.items() if (cell.loss, cell.staleness) == (loss, lag)}
        end = next(iter(mine.values()))["steps"]
        row: dict[str, Any] = {"loss": loss, "staleness": lag, "steps": end, "seeds": sorted(c.seed for c in mine)}
        row["diverged"] = sum(record["diverged"] is not None for record in mine.values())
        for name, step in [*((str(step), step) for step in SHOWN_STEPS), ("end", end)]:
            row[f"accuracy_{name}"] = spread(accuracy_at(record, step) for record in mine.values())
        late = [p for r in mine.values() for p in r["points"] if p["step"] > end / 2]
        for name in ("abs_log_ratio", "k3", "ess", "dropped_positive", "dropped_negative", "vetoed", "lr"):
            row[name] = statistics.fmean(point[name] for point in late) if late else None
        rows.append(row)
    return rows


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, least and most."""
    known = [value for value in values if value is not None]
    return {"mean": statistics.fmean(known), "min": min(known), "max": max(known)} if known else None


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table as Markdown, so that it can be put into a page as it is."""
    print("| loss | S | steps | seeds | at 60 | at 120 | end (least to most) | mean abs log ratio | ESS | dropped |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        at_60, at_120, end = (_mean(row[f"accuracy_{name}"]) for name in ("60", "120", "end"))
        ends = row["accuracy_end"]
        limits = f" ({ends['min']:.2f} to {ends['max']:.2f})" if ends else ""
        noise = "| - | - | -"
        if row["ess"] is not None:
            dropped = row["dropped_positive"] + row["dropped_negative"]
            noise = f"| {row['abs_log_ratio']:.3f} | {row['ess']:.2f} | {dropped:.1%}"
        head = f"| {row['loss']} | {row['staleness']} | {row['steps']} | {len(row['seeds'])} "
        print(f"{head}| {at_60} | {at_120} | {end}{limits} {noise} |")


def show_matrix(cells: dict[Cell, dict[str, Any]], step: int) -> None:
    """Accuracy after `step` steps, losses down and lags across: mean over seeds, least to most below it."""
    lags = sorted({cell.staleness for cell in cells})
    print(f"\n| after {step} steps, S = | {' | '.join(map(str, lags))} |\n| --- |{' --- |' * len(lags)}")
    for loss in dict.fromkeys((*FULL_LOSSES, *OTHER_LOSSES, *sorted(cell.loss for cell in cells))):
        row = []
        for lag in lags:
            mine = [record for cell, record in cells.items() if (cell.loss, cell.staleness) == (loss, lag)]
            found = spread(accuracy_at(record, step) for record in mine)
            row.append(f"{found['mean']:.2f} ({found['min']:.2f} to {found['max']:.2f})" if found else "")
        if any(row):
            print(f"| `{loss}` | {' | '.join(row)} |")


def _mean(found: dict[str, float] | None) -> str:
    return f"{found['mean']:.2f}" if found else "-"


def job_config(options: argparse.Namespace) -> Config:
    """The demo's job with this grid's batch."""
    config = load(options.config)
    return replace(
        config,
        model=replace(config.model, path=str(options.model)),
        schedule=replace(config.schedule, groups_per_step=options.groups),
        eval=replace(config.eval, every=20, limit=256),
    )


def with_changes(learner: LearnerConfig, spec: str) -> LearnerConfig:
    """The learner's settings for a cell's loss: `dppo`, or `dppo,tv_high=0.1,lr=1e-4` with parameters of the loss and
    settings of [learner] changed.
    """
    loss, *changes = spec.split(",")
    own = {field.name for field in fields(LearnerConfig)}
    pairs = [(name, value) for name, _, value in (change.partition("=") for change in changes)]
    settings: dict[str, Any] = {"loss": loss} | {name: _number_or_word(value) for name, value in pairs if name in own}
    params = {name: float(value) for name, value in pairs if name not in own}
    return replace(learner, loss_params=params, **settings)


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def run_cell(config: Config, cell: Cell, steps: int, out: Path) -> None:
    """In a process of its own: torch is only imported here. Another run on the same --out may have been sooner."""
    if cell.path(out).is_file():
        return
    from staleness_cell import train_cell

    config = replace(config, learner=with_changes(config.learner, cell.loss))
    write_cell(out, cell, steps, train_cell(config, cell.staleness, cell.seed, steps))


def run_cells(config: Config, cells: Sequence[Cell], options: argparse.Namespace, console: Console) -> None:
    """Train what is missing, `jobs` cells at a time."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the children read it before they import torch
    there = read_cells(options.out)
    missing = [cell for cell in cells if cell not in there]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        running = [
            pool.submit(run_cell, config, cell, cell.steps(options.least_steps), options.out) for cell in missing
        ]
        title = f"{len(cells)} cells, {len(cells) - len(missing)} there"
        for done in track(as_completed(running), title, total=len(running), console=console):
            done.result()


def plot(cells: dict[Cell, dict[str, Any]], path: Path) -> None:
    """One wide panel and one for each of CURVE_LAGS, to an SVG that reads on light and dark pages.

    Raises:
        UserError: there is no cell, or no matplotlib.
    """
    if not cells:
        raise UserError("There are no finished cells to draw.")
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "staleness"  # the same data, the same file
    figure = Figure(figsize=(11.0, 7.2), layout="constrained")
    figure.patch.set_alpha(0.0)
    grid = figure.add_gridspec(2, len(CURVE_LAGS))
    _by_lag(_clean(figure.add_subplot(grid[0, :])), cells)
    for column, lag in enumerate(CURVE_LAGS):
        _by_step(_clean(figure.add_subplot(grid[1, column])), cells, lag)
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
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished cells")
    parser.add_argument("--config", type=there, default=REPOSITORY / "src" / "echo2" / "demo" / "sort.toml")
    parser.add_argument("--model", type=there, default=REPOSITORY / "outputs" / "models" / "digit_sorting")
    parser.add_argument("--groups", type=int, default=64, help="groups a step")
    parser.add_argument("--least-steps", type=int, default=LEAST_STEPS, help="steps of a cell with a short lag")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", help="only these, as LOSS:LAG:SEED")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one core each")
    parser.add_argument("--table", action="store_true", help="train nothing, show what is there")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="also draw accuracy over the lag, and over steps")
    parser.add_argument("--save", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    console = Console()
    cells = [parse_cell(text) for text in options.cells] if options.cells else all_cells(options.seeds)
    config = job_config(options)
    settings = {"groups": options.groups, "group_size": config.sampling.group_size, "lr": config.learner.lr}
    settings["least_steps"] = options.least_steps
    if not options.table:
        claim(options.out, settings)
        run_cells(config, cells, options, console)
    done = read_cells(options.out)
    show(summary(done))
    for step in dict.fromkeys((options.least_steps, max((record["steps"] for record in done.values()), default=0))):
        show_matrix(done, step)
    if options.plot:
        plot(done, options.plot)
    if options.save:
        curves = {str(cell): [(p["step"], round(p["accuracy"], 4)) for p in done[cell]["points"]] for cell in done}
        figures = {"settings": settings, "summary": summary(done), "curves": curves}
        print(f"written to {save('staleness_grid', figures, options.save)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
