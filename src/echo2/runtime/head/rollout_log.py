"""rollouts/step_N.jsonl: a few groups of the step that makes version N, as text for people."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from echo2.types import RolloutGroup, Task

log = logging.getLogger(__name__)

#: Groups of each step that are written.
LOGGED_GROUPS = 4


class RolloutLog:
    """Takes the first `LOGGED_GROUPS` groups that are fed for each step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step, self._claimed = -1, 0

    def claim(self, step: int) -> bool:
        """Whether a group that is fed for the step is to be written. The first begins the step's file anew."""
        if step != self._step:
            self._step, self._claimed = step, 0
            try:
                self._path(step).unlink(missing_ok=True)
            except OSError as error:
                log.warning("the old %s stays: %s", self._path(step), error.strerror)
        self._claimed += 1
        return self._claimed <= LOGGED_GROUPS

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.jsonl"

    def write(self, step: int, group: RolloutGroup, task: Task) -> None:
        """Add a claimed group with its texts; the next step may have begun. A disk that refuses costs the text, not
        the run.
        """
        prompt = task.prompt
        record = {
            "group": group.group.number,
            "worker": group.worker_id,
            "prompt": prompt if isinstance(prompt, str) else [[m.role, m.content] for m in prompt],
            "rollouts": [
                {
                    "text": rollout.text,
                    "reward": rollout.reward,
                    "reward_parts": dict(rollout.reward_parts),
                    "finish": rollout.finish,
                    "versions": [list(span) for span in rollout.version_spans],
                }
                for rollout in group.rollouts
            ],
        }
        path = self._path(step)
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("no rollouts written to %s: %s", path, error.strerror)
