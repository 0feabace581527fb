"""`echo2.train`, `echo2.start` and `echo2.load`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from echo2.api.inputs import Model, Rewards, Tasks, write_run
from echo2.api.run import Run, begin
from echo2.errors import UserError
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
    """Train a model on this machine and whatever machines join, and return when that is done. Ctrl-C stops the run when
    its learner has saved; `echo2.load(DIR).resume()` goes on.

    Args:
        model: a directory, a hub id, or (model, tokenizer) of transformers, which are saved in the run directory.
        tasks: rows, each a mapping with `prompt` (text, or chat messages) and any columns that JSON can carry: a list,
            a Dataset of Hugging Face; or what the setting tasks.source names (a file, `hub:owner/name`, ...).
        reward: a function, or several whose values add up (with weights: a mapping to them). Of your session or a
            module, in TRL's signature, `f(completions, **columns) -> list[float]`, or verl's; or what the setting
            reward.functions names (`"math"`, `"file.py:name"`). None is needed with an environment, which has its own.
        heldout: tasks that are not trained on, or several such sets by name. Their accuracy is measured.
        environment: a class with `step(action) -> (text, reward, done)`, for tasks of several turns.
        out: the run directory (default: a new one below `outputs/`).
        settings: any setting of `echo2 run --help`, by its name (`lr=1e-5`), or section by section
            (`workers={"count": 2}`).

    Raises:
        UserError: something given is wrong; what, and what to do, is in the message.
        Echo2Error: the run failed.
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
    """As `train`, but return as soon as the run's processes are being started. They end with this Python: a run that is
    to outlive it is one for `echo2 run`. As a context manager, the run is stopped where the block is left.

    Raises:
        UserError: something given is wrong. What only the started processes find, `Run.wait` raises.
    """
    path = run_directory(out)
    config = write_run(RunDir(path).inputs, model, tasks, reward, heldout, environment, settings)
    return begin(path, config)


def load(directory: str | Path) -> Run:
    """The run in a directory, of this session or another one, going on or over.

    Raises:
        UserError: this is not a run directory.
    """
    run = Run(Path(directory).resolve())
    run.rundir.read_config()
    return run


def run_directory(out: str | Path | None) -> Path:
    """Where a new run is to be: `out`, or outputs/run-YYYYMMDD-HHMMSS, which is made.

    Raises:
        UserError: a run is there, or nothing can be written.
    """
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
