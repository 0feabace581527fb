"""What commands keep on a disk: files below a folder, and files without a name that their processes hold open.

For containers whose files no quota limits (`folders.py`). It is counted while the files change, so a count is near the
truth; what it cannot see, the room that is left on the disk shows.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

#: Files and folders below a folder; with more, counting and removing them takes a machine minutes.
ENTRIES_MAX = 200_000
#: Of the disk, which commands leave to the machine.
LEFT_BYTES = 1 << 30


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has hardly any room left."""
    return shutil.disk_usage(folder).free < LEFT_BYTES


def exceeds(folder: Path, pids: Iterable[int], bytes_max: int) -> bool:
    """Whether more bytes, or more than `ENTRIES_MAX` files, are below a folder or held open by processes without a name
    there. Paths that are longer than the kernel takes count as too much, because files behind them cannot be
    counted."""
    num_bytes, linked = 0, set[int]()
    try:
        for number, facts in enumerate(_facts(folder)):
            if facts.st_ino not in linked:
                num_bytes += 512 * facts.st_blocks
            if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
                linked.add(facts.st_ino)
            if number >= ENTRIES_MAX or num_bytes > bytes_max:
                return True
    except OSError:
        return True
    return num_bytes + _nameless_bytes(pids, folder.stat().st_dev) > bytes_max


def _facts(folder: Path) -> Iterator[os.stat_result]:
    waiting = [str(folder)]
    while waiting:
        changed = suppress(FileNotFoundError, NotADirectoryError, PermissionError)  # or closed by its owner
        with changed, os.scandir(waiting.pop()) as found:
            for entry in found:
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        waiting.append(entry.path)
                    yield facts


def _nameless_bytes(pids: Iterable[int], device: int) -> int:
    """Return what processes hold open of a device after its last name has gone."""
    found = dict[int, int]()
    for pid in pids:
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                facts = os.stat(f"/proc/{pid}/fd/{descriptor}")
                if not facts.st_nlink and facts.st_dev == device:
                    found[facts.st_ino] = 512 * facts.st_blocks
        except OSError:  # it has ended, closed one, or hides its descriptors
            continue
    return sum(found.values())
