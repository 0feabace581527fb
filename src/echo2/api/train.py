"""`echo2.train`, `echo2.start` and `echo2.load`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echo2.api.inputs import Model, Rewards, Tasks, write_run
from echo2.api.run import Run, begin
from echo2.errors import Echo2Error, UserError
from echo2.rundir import RunDir, check_directory


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
            needed with an environment, which returns its own reward.
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
