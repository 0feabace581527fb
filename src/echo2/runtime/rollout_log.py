"""rollouts/step_N.jsonl: a few groups of the step that makes version N, as text for people."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from echo2.transport import wire_pb2 as wire
from echo2.types import Task

log = logging.getLogger(__name__)


class RolloutLog:
    """Writes the first `groups_per_step` groups fed for each step."""

    def __init__(self, directory: Path, groups_per_step: int) -> None:
        self._directory, self._groups_per_step = directory, groups_per_step
        self._step, self._written = -1, 0

    def write(self, step: int, group: wire.RolloutGroup, task: Callable[[], Task]) -> None:
        """Add a group. A disk that refuses costs the text, not the run."""
        if step != self._step:
            self._step, self._written = step, 0
        if self._written >= self._groups_per_step:
            return
        prompt = task().prompt
        record = {
            "group": group.number,
            "worker": group.worker_id,
            "prompt": prompt if isinstance(prompt, str) else [[m.role, m.content] for m in prompt],
            "rollouts": [
                {
                    "text": rollout.text,
                    "reward": rollout.reward,
                    "reward_parts": dict(rollout.reward_parts),
                    "finish": rollout.finish,
                    "versions": [[span.start, span.version] for span in rollout.version_spans],
                }
                for rollout in group.rollouts
            ],
        }
        path = self._directory / f"step_{step}.jsonl"
        try:
            with open(path, "w" if self._written == 0 else "a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("no rollouts written to %s: %s", path, error.strerror)
        self._written += 1
