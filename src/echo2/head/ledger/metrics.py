"""Writes metrics.jsonl, one object per training step, and copies it to TensorBoard, Weights & Biases and Trackio.

A row's `step` is the number of completed steps: row N describes the step that made version N. `eval/*` in row N
describes version N and is added when that evaluation ends, which may be a few steps later. Row 0 holds the evaluation
before training.

A failure or stall of a service affects only the copy. Services that show tables get rollouts, too, from the files of
`rollout_log.py`.
"""

from __future__ import annotations

import importlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

from echo2.config.rundir import accuracies, read_metrics, write_atomically
from echo2.core.disk import append_whole
from echo2.core.errors import UserError, write_failed
from echo2.head.ledger.rollout_log import Group, read_groups

log = logging.getLogger(__name__)

Row = dict[str, Any]

COLUMNS = ("prompt", "completion", "reward", "worker", "version")
#: Maximum number of rows of a table, and of characters of a text in it.
TABLE_ROWS = 32
TEXT_CHARS = 2000
#: Flush interval of TensorBoard's files.
TENSORBOARD_SECONDS = 5
#: Steps between tables of training rollouts; every evaluation has a table.
TABLE_STEPS = 10
#: Maximum number of rows queued for a sink, and timeout for closing it.
ROWS_MAX = 1024
CLOSE_SECONDS = 30.0
#: Minimum number of rows kept in memory, once there are as many.
KEPT_ROWS = 64


def rollout_rows(folder: Path, name: str) -> list[list[Any]]:
    """Return the first `TABLE_ROWS` rollouts of the file `name`, one row of `COLUMNS` each; [] without such a file.
    `version`: the oldest version that sampled a token of the rollout. Texts longer than `TEXT_CHARS` are cut and end
    with "…".
    """
    rows = (
        [
            _cut(_prompt(group)),
            _cut(rollout["text"]),
            rollout["reward"],
            group["worker"],
            min((version for _, version in rollout["versions"]), default=None),
        ]
        for group in read_groups(folder, name, TABLE_ROWS)
        for rollout in group["rollouts"]
    )
    return list(islice(rows, TABLE_ROWS))


def _prompt(group: Group) -> str:
    prompt = group["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{role}: {content}" for role, content in prompt)


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"


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
        rows_by_table = {name: rollout_rows(self._rollouts, file) for name, file in files.items()}
        return {name: self._table(columns=list(COLUMNS), data=rows) for name, rows in rows_by_table.items() if rows}

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


class Metrics:
    """Appends rows to a file, amends them, and truncates them after a fall-back. Only the newest are kept in memory."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._path, self._copies = path, [Copy(sink) for sink in sinks]
        self.recent: list[Row] = []
        self._on_row: Callable[[Row], None] = lambda row: None
        self._older_bytes = 0  # of the file, before the rows in memory
        self._is_behind = False  # the file is older than the rows: a write of it failed
        self._read()
        self.accuracies = accuracies(self.recent)  # by version
        if path.is_file() and path.stat().st_size != self._older_bytes + sum(map(len, map(_line, self.recent))):
            self._rewrite()  # a kill tore the last line; the next row must not be glued to it
        self._keep_recent()

    @property
    def last_step(self) -> int:
        """The step of the newest row; -1 if there is none."""
        step: int = self.recent[-1]["step"] if self.recent else -1
        return step

    def follow(self, on_row: Callable[[Row], None]) -> None:
        """Call `on_row` with each row that is written or amended from now on."""
        self._on_row = on_row

    def write(self, row: Row) -> None:
        """Add a step's row. Delete rows of the same and later steps: a fall-back trains these steps again."""
        if self.last_step >= row["step"] or self._is_behind:
            self._reach(row["step"])
            self._forget_from(row["step"])
            self.recent.append(row)
            self._rewrite()
        else:
            self.recent.append(row)
            self._is_behind = True
            try:
                with open(self._path, "ab", buffering=0) as file:
                    append_whole(file, _line(row))
            except OSError as error:
                message = f"Cannot write {self._path}: {error.strerror}. Free some space, then --resume."
                raise write_failed(error, message) from error
            self._is_behind = False
        self._keep_recent()
        self._on_row(row)
        for copy in self._copies:
            copy.write(row["step"], row)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values to the row of `step`, which is created if it does not exist."""
        self._reach(step)
        rows = {row["step"]: row for row in self.recent}
        rows.setdefault(step, {"step": step}).update(values)
        self.accuracies |= accuracies([rows[step]])
        self.recent = [rows[key] for key in sorted(rows)]
        self._rewrite()
        self._keep_recent()
        self._on_row(rows[step])
        for copy in self._copies:
            copy.write(step, values)

    def truncate(self, version: int) -> None:
        """Remove the rows of steps after `version`: the learner fell back and trains them again."""
        if self.last_step > version:
            self._reach(version)
            self._forget_from(version + 1)
            self._rewrite()

    def close(self) -> None:
        for copy in self._copies:
            copy.close()

    def _forget_from(self, step: int) -> None:
        self.recent = [row for row in self.recent if row["step"] < step]
        self.accuracies = {version: value for version, value in self.accuracies.items() if version < step}

    def _read(self) -> None:
        self.recent, self._older_bytes = read_metrics(self._path), 0

    def _reach(self, step: int) -> None:
        """Make sure that the rows from `step` on, and one before, are in memory; else read the whole file."""
        if self._older_bytes and self.recent[0]["step"] >= step:
            self._read()

    def _keep_recent(self) -> None:
        if len(self.recent) > 2 * KEPT_ROWS:
            older, self.recent = self.recent[:-KEPT_ROWS], self.recent[-KEPT_ROWS:]
            self._older_bytes += sum(map(len, map(_line, older)))

    def _rewrite(self) -> None:
        """Rewrite the file with the rows in memory; its older rows are unchanged."""
        self._is_behind, older = True, b""
        if self._older_bytes:
            with open(self._path, "rb") as file:
                older = file.read(self._older_bytes)
        write_atomically(self._path, (older + b"".join(map(_line, self.recent))).decode())
        self._is_behind = False


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"
