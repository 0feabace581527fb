"""Rotates files that grow during a run, in parts of bounded size and number: `x` (the newest), `x.1`, `x.2` ... Older
parts are deleted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

#: Maximum bytes of a process's log, and the number of its old parts that are kept.
LOG_BYTES_MAX = 16 << 20
LOG_PARTS_KEPT = 3


def parts(path: Path) -> list[Path]:
    """Return the paths of the existing parts and of the current file, oldest first."""
    older: list[Path] = []
    while (part := _part(path, len(older) + 1)).exists():
        older.append(part)
    return [*reversed(older), path]


def shift(path: Path, num_kept: int, first: int = 0) -> None:
    """Rename `path` to `path`.1, that to .2, and so on; keep `num_kept` old parts. No process may have `path` open for
    writing. Parts before number `first` are not renamed.
    """
    for number in range(num_kept, first, -1):
        source = _part(path, number - 1)
        if source.exists():
            os.replace(source, _part(path, number))


def cut_log(path: Path, bytes_max: int = LOG_BYTES_MAX, num_kept: int = LOG_PARTS_KEPT) -> bool:
    """Copy a log of more than `bytes_max` to an old part and truncate it. Return whether it was too long. The process
    that writes the log appends and need not reopen it; a line written during the copy may be lost. On a full disk the
    whole old content is lost.
    """
    if not path.exists() or path.stat().st_size <= bytes_max:
        return False
    shift(path, num_kept, first=1)
    try:
        shutil.copyfile(path, _part(path, 1))
    except OSError:
        _part(path, 1).unlink(missing_ok=True)
    os.truncate(path, 0)
    return True


def _part(path: Path, number: int) -> Path:
    """Return the path of a part. Part 0 is the current file."""
    return path.with_name(f"{path.name}.{number}") if number else path
