"""metrics.jsonl, one object a training step, and the optional TensorBoard and Weights & Biases copies.

A row's `step` is the number of completed steps (row N describes the step that made version N); `eval/*` in row N is
of version N and is added when that evaluation ends, which may be a few steps later. Row 0 holds the evaluation before
training.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.errors import UserError, write_failed
from echo2.rundir import read_metrics, write_atomically

Row = dict[str, Any]

#: How far TensorBoard's files may lag behind.
TENSORBOARD_SECONDS = 5
#: Rows that are kept in memory, at least.
KEPT_ROWS = 64


class Metrics:
    """Appends rows to a file, amends and (after a fall-back) truncates them. In memory are the newest ones alone."""

    def __init__(self, path: Path, sinks: list[Sink] | None = None) -> None:
        self._path, self._sinks = path, sinks or []
        self.recent: list[Row] = []
        self._older_bytes = 0  # of the file, before the rows in memory
        self._read()
        if path.is_file() and path.stat().st_size != self._older_bytes + sum(map(len, map(_line, self.recent))):
            self._rewrite()  # a kill tore the last line; the next row must not be glued to it
        self._keep_recent()

    @property
    def last_step(self) -> int:
        """Of the newest row; -1 where there is none."""
        step: int = self.recent[-1]["step"] if self.recent else -1
        return step

    def evaluated(self) -> list[int]:
        """The versions that have an accuracy, from the whole file."""
        return [row["step"] for row in read_metrics(self._path) if "eval/accuracy" in row]

    def write(self, row: Row) -> None:
        """Add a step's row; rows of the same step and of later ones (trained again after a fall-back) go."""
        if self.last_step >= row["step"]:
            self._reach(row["step"])
            self.recent = [*(old for old in self.recent if old["step"] < row["step"]), row]
            self._rewrite()
        else:
            self.recent.append(row)
            try:
                with open(self._path, "ab") as file:
                    file.write(_line(row))
            except OSError as error:
                message = f"Cannot write {self._path}: {error.strerror}. Free some space, then --resume."
                raise write_failed(error, message) from error
        self._keep_recent()
        for sink in self._sinks:
            sink.write(row["step"], row)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the row of `step` (made if it is not there)."""
        self._reach(step)
        rows = {row["step"]: row for row in self.recent}
        rows.setdefault(step, {"step": step}).update(values)
        self.recent = [rows[key] for key in sorted(rows)]
        self._rewrite()
        self._keep_recent()
        for sink in self._sinks:
            sink.write(step, values)

    def truncate(self, version: int) -> None:
        """Forget the rows of steps after `version`: the learner fell back and does them again."""
        if self.last_step > version:
            self._reach(version)
            self.recent = [row for row in self.recent if row["step"] <= version]
            self._rewrite()

    def close(self) -> None:
        """Let the copies write what they still hold."""
        for sink in self._sinks:
            sink.close()

    def _read(self) -> None:
        self.recent, self._older_bytes = read_metrics(self._path), 0

    def _reach(self, step: int) -> None:
        """Have the row of `step` in memory, and one before it, unless the file begins later."""
        if self._older_bytes and self.recent[0]["step"] >= step:
            self._read()

    def _keep_recent(self) -> None:
        if len(self.recent) > 2 * KEPT_ROWS:
            older, self.recent = self.recent[:-KEPT_ROWS], self.recent[-KEPT_ROWS:]
            self._older_bytes += sum(map(len, map(_line, older)))

    def _rewrite(self) -> None:
        """Replace the rows in memory, in the file; those before them stay as they are."""
        older = b""
        if self._older_bytes:
            with open(self._path, "rb") as file:
                older = file.read(self._older_bytes)
        write_atomically(self._path, (older + b"".join(map(_line, self.recent))).decode())


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


class Sink:
    """A copy of the metrics elsewhere."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoardSink(Sink):
    """TensorBoard event files (package tensorboardX: no torch in the head)."""

    def __init__(self, directory: Path) -> None:
        self._writer = _import("tensorboardX", "tensorboard").SummaryWriter(
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
        wandb = _import("wandb", "wandb")
        self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(directory), config=dict(config))
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def _import(package: str, target: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"run.log_to has {target}, which needs the package {package}: pip install {package}, or leave it out."
        ) from error
