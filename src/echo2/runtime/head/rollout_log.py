"""Writes rollouts for people to read. rollouts/step_N.jsonl has a few groups of the step that makes version N, with
their first tokens one by one, and step_N.logprobs what the learner made of these tokens; rollouts/eval_N.jsonl has all
answers of version N to the held-out tasks, as text.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from echo2.learner.grpo.advantages import Advantage, group_advantages
from echo2.transport.learner_logprobs import LearnerLogprobs, logged_tokens
from echo2.transport.limits import LOGGED_GROUPS
from echo2.types import LOGGED_ROLLOUTS, Rollout, RolloutGroup, Task

log = logging.getLogger(__name__)

#: The files of the newest `KEPT_STEPS` steps are kept; of older ones, one in `KEPT_EVERY`.
KEPT_STEPS, KEPT_EVERY = 400, 20
#: Maximum number of a task's columns that are written, and characters of each.
COLUMNS_MAX, COLUMN_CHARS_MAX = 16, 500

#: Returns the text of each token.
Pieces = Callable[[Sequence[int]], list[str]]


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
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("no rollouts written to %s: %s", path, error.strerror)

    def trained(self, step: int, logprobs: LearnerLogprobs) -> None:
        """Write the logprobs of first tokens under the policy that was trained, by group number and rollout, to
        step_N.logprobs. Readers put them into the groups (`views/rollouts.py`).
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
    """Return what is written of a group: its texts, and its tokens if `pieces` is given."""
    prompt = task.prompt
    is_train = group.group.kind == "train"
    advantages = group_advantages([rollout.reward for rollout in group.rollouts], advantage)
    room = logged_tokens(len(group.rollouts))
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
                **({"num_tokens": len(rollout.tokens), **_tokens(rollout, room, pieces)} if pieces else {}),
            }
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
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
