"""metrics.jsonl, one object a training step, and the optional TensorBoard and Weights & Biases copies.

A row's `step` is the number of completed steps (row N describes the step that made version N); `eval/*` in row N is
of version N and is added when that evaluation ends, which may be a few steps later. Row 0 holds the evaluation before
training.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2.documents import parse_json
from echo2.errors import UserError, write_failed
from echo2.runtime.rundir import write_atomically

Row = dict[str, Any]

#: How far TensorBoard's files may lag behind.
TENSORBOARD_SECONDS = 5


class Metrics:
    """Reads what an earlier head wrote, then appends, amends and (after a fall-back) truncates."""

    def __init__(self, path: Path, sinks: list[Sink] | None = None) -> None:
        self._path = path
        self._sinks = sinks or []
        self.rows = read_rows(path)
        if path.is_file() and path.read_bytes().split(b"\n")[len(self.rows) :] != [b""]:
            self._rewrite()  # a kill tore the last line; the next row must not be glued to it

    def write(self, row: Row) -> None:
        """Add a step's row; a row of the same step (trained again after a fall-back) is replaced."""
        if self.rows and self.rows[-1]["step"] >= row["step"]:
            self.rows = [old for old in self.rows if old["step"] < row["step"]] + [row]
            self._rewrite()
        else:
            self.rows.append(row)
            try:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                message = f"Cannot write {self._path}: {error.strerror}. Free some space, then --resume."
                raise write_failed(error, message) from error
        for sink in self._sinks:
            sink.write(row["step"], row)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the row of `step` (made if it is not there)."""
        rows = {row["step"]: row for row in self.rows}
        rows.setdefault(step, {"step": step}).update(values)
        self.rows = [rows[key] for key in sorted(rows)]
        self._rewrite()
        for sink in self._sinks:
            sink.write(step, values)

    def truncate(self, version: int) -> None:
        """Forget the rows of steps after `version`: the learner fell back and does them again."""
        if self.rows and self.rows[-1]["step"] > version:
            self.rows = [row for row in self.rows if row["step"] <= version]
            self._rewrite()

    def close(self) -> None:
        """Let the copies write what they still hold."""
        for sink in self._sinks:
            sink.close()

    def _rewrite(self) -> None:
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))


def ess_of(row: Mapping[str, Any]) -> float | None:
    """ESS / B of a step, from its row or from the learner's share of it; None where it does not say."""
    value = row.get("ess")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0.0 <= value <= 1.0 else None


def known_ess(rows: Sequence[Row], version: int) -> tuple[tuple[int, float], ...]:
    """(step, ESS / B) of the steps that led to `version`, as far as their rows say."""
    found = [(row["step"] - 1, ess_of(row)) for row in rows if row["step"] <= version]
    return tuple((step, ess) for step, ess in found if ess is not None)


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics file up to the first damaged one: a last line torn by a kill is passed over."""
    rows: list[Row] = []
    if path.is_file():
        for line in path.read_bytes().splitlines():
            try:
                row = parse_json(line)
            except ValueError:  # no JSON, or a character cut in two
                break
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                break
            rows.append(row)
    return rows


class Sink:
    """A copy of the metrics elsewhere."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoardSink(Sink):
    """TensorBoard event files (package tensorboardX: no torch in the head)."""

    def __init__(self, directory: Path) -> None:
        self._writer = _import("tensorboardX", "run.tensorboard").SummaryWriter(
            str(directory), flush_secs=TENSORBOARD_SECONDS
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """Weights & Biases, resumed under the run's id. The step is a metric of its own: W&B's takes no late evaluation."""

    def __init__(self, project: str, run_id: str, directory: Path, config: Mapping[str, Any]) -> None:
        wandb = _import("wandb", "run.wandb_project")
        self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(directory), config=dict(config))
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def _import(package: str, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"{setting} needs the package {package}: pip install {package}, or leave {setting} out."
        ) from error
