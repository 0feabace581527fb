"""rollouts/step_N.jsonl: the first groups that a step is fed, whenever their texts are ready."""

from __future__ import annotations

import json
import random
from pathlib import Path

from echo2.runtime.head.rollout_log import LOGGED_GROUPS, RolloutLog
from echo2.types import Task
from learner_cases import random_group

TASK = Task(0, "53=")


def logged(path: Path) -> list[int]:
    return [json.loads(line)["group"] for line in path.read_text().splitlines()]


def test_a_few_groups_are_claimed_and_late_ones_spoil_no_other_step(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    (tmp_path / "step_1.jsonl").write_text("of an earlier head\n")
    claims = {step: [log.claim(step) for _ in range(LOGGED_GROUPS + 3)] for step in (1, 2)}
    assert all(claimed == [True] * LOGGED_GROUPS + [False] * 3 for claimed in claims.values())
    for number, step in enumerate([2, 1, 2, 1, 2]):
        log.write(step, random_group(random.Random(number), number), TASK)
    assert logged(tmp_path / "step_1.jsonl") == [1, 3]
    assert logged(tmp_path / "step_2.jsonl") == [0, 2, 4]


def test_a_step_that_is_fed_anew_begins_its_file_anew(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    for number, step in enumerate([1, 2, 1]):
        assert log.claim(step)
        log.write(step, random_group(random.Random(number), number), TASK)
    assert logged(tmp_path / "step_1.jsonl") == [2]
