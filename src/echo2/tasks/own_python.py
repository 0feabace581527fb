"""Finds the separate Python environments of packages whose pinned versions conflict with echo2's."""

from __future__ import annotations

import os
from pathlib import Path

from echo2.core.errors import UserError


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
