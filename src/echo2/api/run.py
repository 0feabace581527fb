"""`echo2.train`, `echo2.start`, `echo2.load`, and the object that they return: a run, its directory and, if this
session started it, its `echo2 run` process.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from echo2.api.inputs import Model, Rewards, Tasks, write_resumed, write_run
from echo2.config.rundir import STOP_WORDS, RunDir, check_directory, read_json
from echo2.core.child import ChildProcess
from echo2.core.errors import Echo2Error, UserError
from echo2.core.logs import TAIL_BYTES, last_error
from echo2.head.ledger import rollout_log
from echo2.views.run_view import RunView
from echo2.views.status import failure_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from echo2.models.evaluate import Step

POLL_SECONDS = 0.2
#: File in logs/ for the output of `echo2 run`.
LOG_NAME = "run.log"
#: Exit statuses of `echo2 run` that finished all its steps or was interrupted.
FINE_STATUSES = (0, 130, -signal.SIGTERM)
#: Values of `kind` in outcome.json with which `echo2 run` exits as after a mistake of the user.
MISTAKES = ("user_error", "stopped")


class Run:
    """A run, read from its run directory. Every property shows the current state, also while the run is training.
    Returned by `echo2.train`, `echo2.start` and `echo2.load`.
    """

    def __init__(self, path: Path, process: ChildProcess | None = None) -> None:
        self.path = path
        self.rundir = RunDir(path)
        self._view = RunView.read(path)
        self._shown: tuple[int, dict[str, str]] = (-1, {})
        self._failures: list[str] = []
        self._process = process

    def __repr__(self) -> str:
        heldout = "" if self.accuracy is None else f", held-out reward {self.accuracy:.3f}"
        return f"<echo2 run {self.path}: {self.state}, step {self.step}{heldout}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- state and results -------------------------------------------------------------------------------------

    @property
    def view(self) -> RunView:
        """The current contents of the run directory, as `echo2 status` and the dashboard show them."""
        self._view = self._view.newer()
        return self._view

    @property
    def state(self) -> str:
        """`running`, `paused: REASON`, or how the run ended: `finished: ...`, `stopped: ...`, `failed: ...`."""
        return self.view.state

    @property
    def step(self) -> int:
        """Number of training steps completed."""
        return self.view.version

    @property
    def accuracy(self) -> float | None:
        """The newest mean reward of the held-out tasks; None before the first evaluation. It is an accuracy, the share
        of rollouts that solve their task, only where every reward is 0 or 1."""
        accuracies = self.view.accuracies
        return accuracies[-1][1] if accuracies else None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one per step; `pandas.DataFrame(run.metrics())` is a table."""
        return [dict(row) for row in self.view.rows]

    def rollouts(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return rollouts of a few groups of a step (default: the newest step with rollouts), one mapping each:
        `prompt`, `text`, `columns` (of the task, as text, cut at 500 characters), `reward`, `reward_parts`, `finish`,
        `versions` ([first token, policy version] pairs), `group` and `worker`; of the first tokens their text
        (`tokens`), `logprobs` and, once the step is trained, `learner_logprobs`. A rollout of several rows has them one
        behind the other, and their lengths as `rows`.

        Raises:
            UserError: no rollouts of that step were written.
        """
        folder = self.rundir.rollouts
        steps = [int(name.removeprefix("step_")) for name in rollout_log.names(folder) if name.startswith("step_")]
        number = step if step is not None else max(steps, default=0)
        if number not in steps:
            raise UserError(f"{self.path} has no rollouts of step {number}; there are of {steps[::-1] or 'none yet'}.")
        return [
            {**{name: group.get(name) for name in ("prompt", "columns", "group", "worker")}, **rollout}
            for group in rollout_log.read_groups(folder, f"step_{number}")
            for rollout in group["rollouts"]
        ]

    def cost(self) -> dict[str, Any]:
        """Return the run's cost in dollars: `total` and `machines` by cause, `usd_per_step` and `usd_per_mtok`, as
        `echo2 cost --json` prints them.

        Raises:
            UserError: no step has been recorded yet.
        """
        return self.view.cost()

    def plot(self) -> Figure:
        """Return a matplotlib figure of reward and held-out reward by step.

        Raises:
            UserError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError("run.plot() needs matplotlib: pip install matplotlib.") from error

        class Shown(Figure):
            """A figure that notebooks display without an inline backend."""

            def _repr_png_(self) -> bytes:
                self.savefig(buffer := BytesIO(), format="png")
                return buffer.getvalue()

        figure, view = Shown(figsize=(7, 3.5), layout="constrained"), self.view
        axes = figure.subplots()
        for name, label, style in (("reward/mean", "reward", "-"), ("eval/accuracy", "held-out reward", "o-")):
            if points := view.series(name):
                axes.plot(*zip(*points, strict=True), style, label=label)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        return figure

    # ---- the model ---------------------------------------------------------------------------------------------

    def checkpoint(self, step: Step = None) -> Path:
        """Return the Hugging Face directory of the checkpoint of a step, or of the "best" one (default: the newest).

        Raises:
            UserError: there is no such checkpoint.
        """
        from echo2.models.evaluate import checkpoint_directory

        return checkpoint_directory(self.rundir, step)

    def model(self, step: Step = None, device: str = "cpu") -> tuple[Any, Any]:
        """Return the trained model, in float32, and its tokenizer, as transformers objects. An adapter is merged into
        its base model.

        Raises:
            UserError: there is no such checkpoint.
        """
        from echo2.models.evaluate import load_model

        model, tokenizer, _ = load_model(self.rundir, step, device)
        return model, tokenizer

    # ---- resume and stop ---------------------------------------------------------------------------------------

    def wait(self) -> Run:
        """Show a progress bar until the run is over.

        Raises:
            UserError: the run ended because of a mistake in its configuration, inputs or rewards, or its budget is
                spent; the message says which.
            Echo2Error: the run failed.
        """
        with tqdm(desc="training", unit="step") as bar:
            while self.goes_on():
                self._show(bar)
                time.sleep(POLL_SECONDS)
            self._show(bar)
        self.check_end()
        return self

    def stop(self) -> None:
        """Stop a run on this machine once its learner has saved a checkpoint. `resume` continues from there."""
        if supervisor := self._supervisor():
            os.kill(supervisor, signal.SIGTERM)
            while self.goes_on():
                time.sleep(POLL_SECONDS)
        self._release()

    def resume(self, **settings: Any) -> Run:
        """Resume a run that has ended, for example for more steps (`max_steps=200`). Like `echo2.start`, this returns
        at once; call `wait` on the returned run.

        Raises:
            UserError: the run has not ended, or a setting cannot be changed.
        """
        if self.goes_on():
            raise UserError(f"{self.path} is still running: stop() it first.")
        return begin(self.path, write_resumed(self.rundir, settings), "--resume")

    def goes_on(self) -> bool:
        """Whether an `echo2 run` process on this machine is working on the run."""
        return bool(self._supervisor())

    def _supervisor(self) -> int:
        """Return the process id of the run's `echo2 run`; 0 if none is alive on this machine."""
        if self._process is not None:
            return self._process.pid if self._process.status is None else 0
        processes = self.view.status.get("processes", ())
        return next((each["pid"] for each in processes if each["role"] == "supervisor" and each["alive"]), 0)

    def _show(self, bar: Any) -> None:
        view = self.view
        shown: dict[str, str] = {}
        if rewards := view.series("reward/mean"):
            shown["reward"] = f"{rewards[-1][1]:.3f}"
        if idle := view.series("learner/idle_ratio"):
            shown["idle"] = f"{idle[-1][1]:.0%}"
        if accuracies := view.accuracies:
            shown["held-out"] = f"{accuracies[-1][1]:.3f}"
        if usd := view.status.get("cost_usd"):
            shown["cost"] = f"${usd:.4f}"
        failures = failure_lines(view.status)
        for line in failures:
            if line not in self._failures:
                bar.write(line, file=sys.stderr)
        self._failures = failures
        if (view.version, shown) != self._shown:
            self._shown = view.version, shown
            bar.total, bar.n = view.max_steps, view.version
            bar.set_postfix(shown)

    def check_end(self) -> None:
        """Raise the error that ended the run, unless it finished all its steps or was stopped. That is whenever
        `echo2 run` has an exit status of failure."""
        self._release()
        outcome = read_json(self.rundir.outcome) or {"kind": "", "reason": ""}
        if self._process is None:
            is_fine = outcome["kind"] in ("", "finished") or outcome["reason"] in STOP_WORDS.values()
            is_mistake, error = outcome["kind"] in MISTAKES, None
        else:
            status, error = self._process.status, last_error(self._process.log_tail(TAIL_BYTES))
            is_fine, is_mistake = status in FINE_STATUSES, status == UserError.exit_status
        if not is_fine:
            reason = error or outcome["reason"] or f"the run ended without a word; see {self.rundir.logs}"
            raise UserError(reason) if is_mistake else Echo2Error(reason)

    def _release(self) -> None:
        if self._process is not None:
            self._process.end_lifeline()


def begin(path: Path, config: Path, *arguments: str) -> Run:
    """Start `echo2 run CONFIG --out PATH`. Return once it has checked everything and the directory holds the run. Its
    processes end when this process does.

    Raises:
        UserError: the checks found a mistake; the message says which.
        Echo2Error: `echo2 run` failed.
    """
    logs = RunDir(path).logs
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "echo2", "run", str(config), "--out", str(path), *arguments]
    run = Run(path, ChildProcess(command, log_path=logs / LOG_NAME, has_lifeline=True))
    try:
        while run.goes_on() and not run.rundir.config.exists():
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        run.stop()
        raise
    if not run.rundir.config.exists():
        run.check_end()
    return run


def train(
    model: Model,
    tasks: Tasks,
    reward: Rewards = (),
    *,
    heldout: Tasks | dict[str, Tasks] | None = None,
    environment: str | type | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Train a model on this machine and on all machines that join, and return when training is done. Ctrl-C stops the
    run once its learner has saved a checkpoint; `echo2.load(DIR).resume()` continues it.

    Args:
        model: a directory, a hub id, or a transformers (model, tokenizer) pair, which is saved in the run directory.
        tasks: rows, each a mapping with `prompt` (text, or chat messages) and any columns that JSON can represent: a
            list or a Hugging Face Dataset; or a value of the setting tasks.source (a file, `hub:owner/name`, ...).
        reward: a function, or several whose values are added (with weights: a mapping from function to weight). It may
            be defined in your session or in a module, with TRL's signature, `f(completions, **columns) ->
            list[float]`, or verl's; or a value of the setting reward.functions (`"math"`, `"file.py:name"`). Not
            needed with an environment, which returns its own reward, nor with a teacher (`teacher=DIR`).
        heldout: tasks that are not trained on, or several such sets by name. The run measures its mean reward on them.
        environment: a class with `step(action) -> (text, reward, done)`, for tasks of several turns.
        out: the run directory (default: a new one below `outputs/`).
        settings: any setting of `echo2 run --help`, by its name (`lr=1e-5`), or by section (`workers={"count": 2}`).

    Raises:
        UserError: an argument or setting is wrong; the message says which, and what to do.
        Echo2Error: the run failed, or ended itself: `echo2.load(DIR)` has what it trained.
    """
    with start(model, tasks, reward, heldout=heldout, environment=environment, out=out, **settings) as run:
        return run.wait()


def start(
    model: Model,
    tasks: Tasks,
    reward: Rewards = (),
    *,
    heldout: Tasks | dict[str, Tasks] | None = None,
    environment: str | type | None = None,
    out: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Like `train`, but return as soon as everything given is checked and the run's processes are being started. They
    end with this Python process; use `echo2 run` for a run that must outlive it. Used as a context manager, the run is
    stopped when the block ends.

    Raises:
        UserError: an argument or setting is wrong, and no run directory was made. `Run.wait` raises errors that only
            the started processes find.
    """
    with new_directory(out) as path:
        return begin(path, write_run(RunDir(path).inputs, model, tasks, reward, heldout, environment, settings))


def load(directory: str | Path) -> Run:
    """Return the run in a directory, started by this or another session, running or ended.

    Raises:
        UserError: this is not a run directory.
    """
    run = Run(Path(directory).resolve())
    run.rundir.read_config()
    return run


@contextmanager
def new_directory(out: str | Path | None) -> Iterator[Path]:
    """Yield the directory of a new run: `out`, or a new outputs/run-YYYYMMDD-HHMMSS. If the block raises before the run
    is in it, it is removed, unless it existed before or holds the log of a crash.

    Raises:
        UserError: the directory already has a run, or cannot be written.
    """
    is_new = out is None or not Path(out).exists()
    path = _run_directory(out)
    try:
        yield path
    except BaseException as error:
        if is_new and type(error) is not Echo2Error and not RunDir(path).config.exists():
            shutil.rmtree(path, ignore_errors=True)
        raise


def _run_directory(out: str | Path | None) -> Path:
    if out is not None:
        path = Path(out).resolve()
        check_directory(path, resume=False)
        return path
    while True:
        path = Path("outputs", time.strftime("run-%Y%m%d-%H%M%S")).resolve()
        try:
            path.mkdir(mode=0o700, parents=True)
            return path
        except FileExistsError:
            time.sleep(0.1)
        except OSError as error:
            raise UserError(f"Cannot write {path}: {error.strerror}. Give another directory: out=.") from error
