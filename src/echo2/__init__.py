"""echo2: one learner you own, kept busy by rollouts from cheap machines anywhere.

    run = echo2.train(model, tasks, reward)     train, with a progress bar (api/run.py)
    run = echo2.start(model, tasks, reward)     the same in the background
    run = echo2.load(directory)                 open an existing run
    echo2.container(image, files)               where an environment's commands run (sandbox/containers.py)

The functions are imported on first use: importing this package loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo2.api.run import Run as Run
    from echo2.api.run import load as load
    from echo2.api.run import start as start
    from echo2.api.run import train as train
    from echo2.sandbox.containers import container as container

__version__ = "0.2.0"
_API = {
    **dict.fromkeys(("Run", "load", "start", "train"), "echo2.api.run"),
    "container": "echo2.sandbox.containers",
}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'echo2' has no attribute {name!r}")
    return getattr(import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
