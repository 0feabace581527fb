"""Loads the user's code by name: `file.py:Name` or `package.module:Name`. Nothing is discovered or registered.

Shared by tasks (classes) and rewards (functions), which do not know each other.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from echo2.core.errors import UserError, did_you_mean

MAX_LINE_CHARS = 500
TRACEBACK_CHARS = 4000
#: The folder of echo2's own files.
OURS = str(Path(__file__).parents[1]) + os.sep


def load_named(spec: str) -> Any:
    """The object called `spec`, after running its module. A file is run once per process, however often it is named.

    The working directory and the file's own directory become importable (behind everything else), as they would be
    for a script.

    Raises:
        UserError: no such file, module or name in it, or the module raised while it was imported.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"{spec!r} is not a reference to code: write file.py:Name or package.module:Name.")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    if not hasattr(module, name):
        hint = did_you_mean(name, [other for other in vars(module) if not other.startswith("_")])
        raise UserError(f"{where} has no {name!r}.{hint}")
    return getattr(module, name)


def innermost_line(error: BaseException) -> str:
    """`file.py:12 in name: TypeError: ...`: where the user's code broke, on one line. What broke in a library, broke in
    the user's line that called it."""
    frames = _users(traceback.extract_tb(error.__traceback__))
    place = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: " if frames else ""
    line = place + "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    return line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 3] + "..."


def _users(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames in the folder of the first file that is neither echo2's nor the importer's; all if none is."""
    others = [frame for frame in frames if not frame.filename.startswith(("<", OURS))]
    if not others:
        return frames
    folder = os.path.dirname(others[0].filename)
    below = [frame for frame in others if frame.filename.startswith(folder + os.sep)]
    return [frame for frame in below if "site-packages" not in frame.filename[len(folder) :]]


def traceback_of(error: UserError) -> str:
    """The end of the traceback of the failure in the user's code; empty if unknown."""
    raised = error.__cause__
    text = "".join(traceback.format_exception(raised)) if raised is not None else ""
    return (getattr(error, "traceback", "") or text)[-TRACEBACK_CHARS:]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"There is no file {path} (looked in {Path.cwd()}).")
    path = path.resolve()
    # Files with the same name in different directories are different modules.
    module_name = f"echo2_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be imported as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UserError(f"{path} could not be imported: {innermost_line(error)}") from error
    return module


def _from_package(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"There is no module {error.name!r} (wanted for {name}; looked in {Path.cwd()} too)."
        ) from error
    except Exception as error:
        raise UserError(f"The module {name} could not be imported: {innermost_line(error)}") from error


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def own_python(package: str) -> str:
    """Return the Python that has `package`: the one in ECHO2_<PACKAGE>_PYTHON, else `.venv-<package>`, built by `make`.

    Raises:
        UserError: that Python does not exist.
    """
    variable = f"ECHO2_{package.upper()}_PYTHON"
    python = Path(os.environ.get(variable) or f".venv-{package}/bin/python")
    if not python.exists():
        raise UserError(
            f"{package} needs a Python of its own, and there is none at {python}. `make {package}` builds it; "
            f"{variable} names another."
        )
    return str(python.absolute())  # not resolved: a venv's Python is a symbolic link
