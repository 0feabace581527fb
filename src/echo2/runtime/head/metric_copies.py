"""Copies metrics to TensorBoard, Weights & Biases and Trackio. A failure or stall there affects only the copy."""

from __future__ import annotations

import importlib
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from echo2.errors import UserError
from echo2.runtime.head.rollout_tables import COLUMNS, rollout_rows

log = logging.getLogger(__name__)

#: Flush interval of TensorBoard's files.
TENSORBOARD_SECONDS = 5
#: Steps between tables of training rollouts; every evaluation has a table.
TABLE_STEPS = 10
#: Maximum number of rows queued for a sink, and timeout for closing it.
ROWS_MAX = 1024
CLOSE_SECONDS = 30.0


class Sink:
    """A destination of copied metrics."""

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
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink(Sink):
    """Weights & Biases, resumed under the run's id. The step is a separate metric: W&B's takes no late evaluation.

    `rollouts`: the directory of the run's rollouts, if tables of them are copied, too.
    """

    def __init__(
        self, project: str, run_id: str, directory: Path, config: Mapping[str, Any], rollouts: Path | None = None
    ) -> None:
        wandb = _import("wandb", "wandb")
        self._table, self._rollouts = wandb.Table, rollouts
        self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(directory), config=dict(config))
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, **self._tables(step, values), "step": step})

    def _tables(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._rollouts is None:
            return {}
        files = {"rollouts/held_out": f"eval_{step}"} if "eval/accuracy" in values else {}
        if "reward/mean" in values and step % TABLE_STEPS == 0:
            files["rollouts/train"] = f"step_{step}"
        found = {name: rollout_rows(self._rollouts, file) for name, file in files.items()}
        return {name: self._table(columns=list(COLUMNS), data=rows) for name, rows in found.items() if rows}

    def close(self) -> None:
        self._run.finish()


class TrackioSink(Sink):
    """Trackio, resumed under the run's id: a database in TRACKIO_DIR, or a Space (TRACKIO_SPACE_ID)."""

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        trackio = _import("trackio", "trackio")
        with redirect_stdout(sys.stderr):  # the head's standard output may be read by a script
            self._run = trackio.init(
                project,
                run_id,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class Copy:
    """Writes rows to a sink on a separate thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._name = sink, type(sink).__name__
        self._rows: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(ROWS_MAX)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue a row and return at once. If the queue is full, the row is missing in the copy."""
        try:
            self._rows.put_nowait((step, dict(values)))
        except queue.Full:
            log.warning("%s is %d rows behind: step %d is missing there", self._name, ROWS_MAX, step)

    def close(self) -> None:
        """Let the copy write its queued rows, for at most `CLOSE_SECONDS` after the queue has room for the end mark."""
        try:
            self._rows.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            pass  # the warning below covers this case
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("%s did not end within %.0f s: its last rows may be missing", self._name, CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (row := self._rows.get()) is not None:
                self._sink.write(*row)
            self._sink.close()
        except Exception:  # each package fails in its own way
            log.exception("%s failed: from here on nothing is copied there; metrics.jsonl has everything", self._name)
            while self._rows.get() is not None:
                pass


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float)) and name != "step"}


def _import(package: str, target: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"run.log_to has {target}, which needs the package {package}: pip install {package}, or leave it out."
        ) from error
