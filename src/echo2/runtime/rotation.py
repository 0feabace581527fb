"""Files that grow during a run, kept in parts of bounded size and number: `x` (the newest), `x.1`, `x.2` ... Older
parts are deleted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

#: Bytes of a process's log, and old parts of it that are kept.
LOG_BYTES_MAX = 16 << 20
LOG_PARTS_KEPT = 3


def parts(path: Path) -> list[Path]:
    """The parts that are there, oldest first."""
    older: list[Path] = []
    while (part := _part(path, len(older) + 1)).exists():
        older.append(part)
    return [*reversed(older), path]


def shift(path: Path, num_kept: int, first: int = 0) -> None:
    """`path` becomes `path`.1, that becomes .2, and so on; of the old parts, `num_kept` stay. Nobody may have `path`
    open to write. Parts before the `first` stay where they are.
    """
    for number in range(num_kept, first, -1):
        source = _part(path, number - 1)
        if source.exists():
            os.replace(source, _part(path, number))


def cut_log(path: Path, bytes_max: int = LOG_BYTES_MAX, num_kept: int = LOG_PARTS_KEPT) -> bool:
    """Begin a log anew that has become too long, and keep what it held; whether it had. The process that writes it
    appends, and does not notice; of what it writes in just that moment, a line may be lost. On a full disk all is.
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
    """Part 0 is the file that is written."""
    return path.with_name(f"{path.name}.{number}") if number else path
