"""The rollouts that a run keeps for people: how they are written, and read a file at a time.

rollouts/step_N.jsonl has a few groups of the step that makes version N, with their first tokens one by one, and
step_N.logprobs what the learner made of these tokens; rollouts/eval_N.jsonl has all answers of version N to the
held-out tasks, as text.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypedDict

from echo2.config.values import Advantage
from echo2.core.disk import append_whole
from echo2.core.documents import parse_json
from echo2.core.errors import UserError
from echo2.core.printable import CUT_OFF, printable
from echo2.core.types import LOGGED_ROLLOUTS, Rollout, RolloutGroup, Task
from echo2.learner.grpo.data import group_advantages
from echo2.transport.limits import LOGGED_GROUPS
from echo2.transport.message_bytes import LearnerLogprobs, logged_tokens
from echo2.transport.regroup import as_one_row

log = logging.getLogger(__name__)

Group = dict[str, Any]
#: Returns the text of each token.
Pieces = Callable[[Sequence[int]], list[str]]

#: Bytes read of one file; the rest is not shown.
FILE_BYTES_MAX = 32 << 20
#: Limits of the search for a task: number of files, newest first, and bytes of all these files together.
SEARCHED_FILES, SEARCHED_BYTES = 400, 64 << 20

#: Groups of a file from which `samples` chooses.
SAMPLED_GROUPS = 32

_NAME = re.compile(r"(step|eval)_(\d{1,12})")

#: The files of the newest `KEPT_STEPS` steps are kept; of older ones, one in `KEPT_EVERY`.
KEPT_STEPS, KEPT_EVERY = 400, 20
#: Maximum number of a task's columns that are written, and characters of each.
COLUMNS_MAX, COLUMN_CHARS_MAX = 16, 500


class Sample(TypedDict):
    """One rollout for people. `prompt`: a text, or [role, content] of each message."""

    reward: float
    prompt: str | list[list[str]]
    text: str


def names(folder: Path) -> list[str]:
    """Return the file names, newest first: `step_N` (the step that made version N) and `eval_N` (of version N)."""
    matches = [match for path in folder.glob("*.jsonl") if (match := _NAME.fullmatch(path.stem))]
    return [match[0] for match in sorted(matches, key=lambda match: (int(match[2]), match[1]), reverse=True)]


def read_groups(folder: Path, name: str, most: int | None = None) -> list[Group]:
    """Return the first `most` groups of a file, as they were written; none if there is no such file. A half-written
    group is skipped. Logprobs of the learner, which are written later, are put into their rollouts.

    Raises:
        UserError: `name` is not the name of a file of rollouts.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a file of rollouts: they are called step_N and eval_N.")
    groups = (group for line in _lines(folder / f"{name}.jsonl") if (group := _group(line)) is not None)
    return _with_logprobs(list(islice(groups, most)), folder, name)


def samples(folder: Path, kind: str, version: int, line_chars: int) -> list[str]:
    """Return one line each for the best and the worst rollout in the first groups of the newest file of a kind (`step`,
    `eval`) up to a version: `reward 1  the prompt's end → the completion`, at most `line_chars` characters long. No
    lines if there is no such file, one line if all rewards are equal.
    """
    file_names = (each for each in names(folder) if each.startswith(kind) and int(each.partition("_")[2]) <= version)
    groups = read_groups(folder, next(file_names, f"{kind}_0"), SAMPLED_GROUPS)
    return [sample_line(one, line_chars) for one in best_and_worst(groups)]


def best_and_worst(groups: Iterable[Group]) -> list[Sample]:
    """Return the rollouts with the highest and the lowest reward; one if all rewards are equal, none of no groups."""
    tried = [
        Sample(reward=rollout["reward"], prompt=group["prompt"], text=rollout["text"])
        for group in groups
        for rollout in group.get("rollouts", ())
    ]
    if not tried:
        return []
    best, worst = (chosen(tried, key=lambda one: one["reward"]) for chosen in (max, min))
    return [best] if best["reward"] == worst["reward"] else [best, worst]


def sample_line(sample: Sample, line_chars: int) -> str:
    """Return `reward 1  the prompt's end → the completion`, at most `line_chars` characters."""
    reward, prompt, text = sample["reward"], sample["prompt"], sample["text"]
    prompt_end = " ".join((prompt if isinstance(prompt, str) else prompt[-1][1] if prompt else "").split())
    room = line_chars // 3
    prompt_end = prompt_end if len(prompt_end) <= room else CUT_OFF + prompt_end[1 - room :]
    return printable(
        f"reward {reward:.3g}  {printable(prompt_end)} → {' '.join(text[: 4 * line_chars].split())}", line_chars
    )


def task_over_steps(folder: Path, name: str, number: int) -> list[tuple[str, Group]]:
    """Return (file, group) of every attempt at the task of group `number`: groups with the same prompt, in files of the
    same kind, in ascending order. Only the newest `SEARCHED_FILES` are searched.

    Raises:
        UserError: as `read_groups`; or there is no such group.
    """
    task_group = next((group for group in read_groups(folder, name) if group["group"] == number), None)
    if task_group is None:
        raise UserError(f"{name}.jsonl has no group {number}.")
    prompt = f'"prompt": {json.dumps(task_group["prompt"], ensure_ascii=False)}'.encode()
    kind, room = name.partition("_")[0], SEARCHED_BYTES
    attempts = []
    for other in [each for each in names(folder) if each.startswith(kind)][:SEARCHED_FILES]:
        same = []
        for line in _lines(folder / f"{other}.jsonl"):
            room -= len(line)
            if prompt in line and (group := _group(line)) is not None:
                same.append(group)
        attempts += [(other, group) for group in _with_logprobs(same, folder, other)]
        if room < 0:
            break
    return attempts[::-1]


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
    group = _object(line)
    return group if "group" in group and "prompt" in group else None


def _with_logprobs(groups: list[Group], folder: Path, name: str) -> list[Group]:
    """Put the learner's logprobs into the rollouts of the groups of this file that have them."""
    if groups:
        logprobs = _object(b"".join(_lines(folder / f"{name}.logprobs")))
        for group in groups:
            of_rollouts = logprobs.get(str(group["group"]), ())
            for rollout, values in zip(group.get("rollouts", ()), of_rollouts, strict=False):
                rollout["learner_logprobs"] = values
    return groups


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; {} if the text is half-written or none."""
    try:
        document = parse_json(text, with_nan=False)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


class RolloutLog:
    """Writes the first `LOGGED_GROUPS` groups that are fed for each step. `advantage`: the learner's setting."""

    def __init__(self, directory: Path, advantage: Advantage) -> None:
        self._directory, self._advantage = directory, advantage
        self._step, self._claimed = -1, 0

    def claim(self, step: int) -> bool:
        """Return whether to write a group that is fed for the step. The first call for a step deletes the step's old
        file, and that of an old step.
        """
        if step != self._step:
            self._step, self._claimed = step, 0
            self.begin(f"step_{step}")
            if (step - KEPT_STEPS) % KEPT_EVERY:
                self.begin(f"step_{step - KEPT_STEPS}")
        self._claimed += 1
        return self._claimed <= LOGGED_GROUPS

    def begin(self, name: str) -> None:
        """Remove the files of this name, if they exist: the step is done again, or is old."""
        for path in (self._path(name), self._directory / f"{name}.logprobs"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("the old %s stays: %s", path, error.strerror)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.jsonl"

    def write(self, name: str, group: RolloutGroup, task: Task, pieces: Pieces | None = None) -> None:
        """Append a group with its texts, and with its tokens if `pieces` is given. A disk error loses this record, not
        the run.
        """
        record = group_record(group, task, self._advantage, pieces)
        path = self._path(name)
        try:
            with open(path, "ab", buffering=0) as file:
                append_whole(file, json.dumps(record, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            log.warning("no rollouts written to %s: %s", path, error.strerror)

    def trained(self, step: int, logprobs: LearnerLogprobs) -> None:
        """Write the logprobs of first tokens under the policy that was trained, by group number and rollout, to
        step_N.logprobs. Readers put them into the groups (`head/ledger/rollout_log.py`).
        """
        rounded = {
            number: [[round(value, 4) if math.isfinite(value) else None for value in each] for each in of_rollouts]
            for number, of_rollouts in logprobs.items()
        }
        path = self._directory / f"step_{step}.logprobs"
        try:
            path.write_text(json.dumps(rounded), encoding="utf-8")
        except OSError as error:
            log.warning("no logprobs written to %s: %s", path, error.strerror)


def group_record(
    group: RolloutGroup, task: Task, advantage: Advantage = "grpo", pieces: Pieces | None = None
) -> dict[str, Any]:
    """Return what is written of a group: its texts, and its tokens if `pieces` is given. A rollout of several rows is
    one entry, with the rows one behind the other, and their lengths in tokens as `rows`."""
    prompt = task.prompt
    is_train = group.group.kind == "train"
    rollouts, room = as_one_row(group), logged_tokens(group.num_rollouts)
    advantages = group_advantages([rollout.reward for rollout in rollouts], advantage)
    lengths = [[len(row.tokens) for row in rows] for rows in group.by_rollout]
    return {
        "group": group.group.number,
        "task": group.cursor,
        "worker": group.worker_id,
        "seconds": round(group.generate_seconds, 3),
        "staleness": group.step - group.oldest_version if is_train and not group.logged else None,
        "prompt": prompt if isinstance(prompt, str) else [[m.role, m.content] for m in prompt],
        "columns": _columns(task),
        "rollouts": [
            {
                "text": rollout.text,
                "reward": rollout.reward,
                "reward_parts": dict(rollout.reward_parts),
                "finish": rollout.finish,
                "versions": [list(span) for span in rollout.version_spans],
                **({"advantage": advantage} if is_train else {}),
                **({"rows": rows} if len(rows) > 1 else {}),
                **({"num_tokens": len(rollout.tokens), **_tokens(rollout, room, pieces)} if pieces else {}),
            }
            for rollout, advantage, rows in zip(rollouts, advantages, lengths, strict=True)
        ],
    }


def _columns(task: Task) -> dict[str, str]:
    """Return the first characters of the task's columns, which the rewards get besides the completions."""
    named = ((name, value) for name, value in task.columns.items() if name != LOGGED_ROLLOUTS)
    return {name: str(value)[:COLUMN_CHARS_MAX] for name, value in islice(named, COLUMNS_MAX)}


def _tokens(rollout: Rollout, room: int, pieces: Pieces) -> dict[str, Any]:
    """Return the first tokens as text, their behaviour logprobs, and the ranges [from, to) of environment tokens."""
    runs, start = [], 0
    for is_policys, run in groupby(rollout.loss_mask[:room]):
        length = len(list(run))
        if not is_policys:
            runs.append([start, start + length])
        start += length
    return {
        "tokens": pieces(rollout.tokens[:room]),
        "logprobs": [round(value, 4) for value in rollout.logprobs[:room]],
        "environment": runs,
    }
