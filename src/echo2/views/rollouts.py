"""The rollouts that a run wrote down for people (`runtime/head/rollout_log.py`), read back a file at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from echo2.documents import parse_json
from echo2.errors import UserError

#: Of one file; what comes after it is not shown.
FILE_BYTES_MAX = 32 << 20
#: Files that are searched for a task, the newest first, and bytes of them together.
SEARCHED_FILES, SEARCHED_BYTES = 400, 64 << 20

_NAME = re.compile(r"(step|eval)_(\d{1,12})")

Group = dict[str, Any]


def names(folder: Path) -> list[str]:
    """`step_N` (of the step that made version N) and `eval_N` (of version N), the newest first."""
    found = [match for path in folder.glob("*.jsonl") if (match := _NAME.fullmatch(path.stem))]
    return [match[0] for match in sorted(found, key=lambda match: (int(match[2]), match[1]), reverse=True)]


def read_groups(folder: Path, name: str, most: int | None = None) -> list[Group]:
    """The groups in a file, the first `most` of them, as they were written; none where there is no such file. One that
    is half written is passed over.

    Raises:
        UserError: this is no name of such a file.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is no file of rollouts: they are called step_N and eval_N.")
    groups = (group for line in _lines(folder / f"{name}.jsonl") if (group := _group(line)) is not None)
    return list(islice(groups, most))


def task_over_steps(folder: Path, name: str, number: int) -> list[tuple[str, Group]]:
    """(file, group) wherever the task of group `number` was tried again: by the same prompt, in files of the same kind,
    in ascending order. The newest `SEARCHED_FILES` are searched.

    Raises:
        UserError: as `read_groups`; or there is no such group.
    """
    wanted = next((group for group in read_groups(folder, name) if group["group"] == number), None)
    if wanted is None:
        raise UserError(f"{name}.jsonl has no group {number}.")
    prompt = f'"prompt": {json.dumps(wanted["prompt"], ensure_ascii=False)}'.encode()
    kind, room = name.partition("_")[0], SEARCHED_BYTES
    found = []
    for other in [each for each in names(folder) if each.startswith(kind)][:SEARCHED_FILES]:
        for line in _lines(folder / f"{other}.jsonl"):
            room -= len(line)
            if prompt in line and (group := _group(line)) is not None:
                found.append((other, group))
        if room < 0:
            break
    return found[::-1]


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            room = FILE_BYTES_MAX
            while room > 0 and (line := file.readline(room)):
                room -= len(line)
                yield line
    except FileNotFoundError:
        return


def _group(line: bytes) -> Group | None:
    try:
        group = parse_json(line, with_nan=False)
    except ValueError:
        return None
    return group if isinstance(group, dict) and "group" in group and "prompt" in group else None
