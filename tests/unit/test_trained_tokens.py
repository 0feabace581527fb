"""The comparison of an agent's own log with what a ledger holds: it accepts what is the same, and no other."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from trained_tokens import compare

from echo2.transport import wire_pb2

PROMPT = [7, 8]
#: Of two rollouts: what is read, what is written, its logprobs. The second call of each has forgotten the first.
CALLS = {
    "a": [([7, 8, 1], [2, 3], [-0.25, -0.5]), ([7, 8, 1, 2, 3, 9], [4], [-1.5]), ([7, 8, 5], [6], [-0.125])],
    "b": [([7, 8, 1], [2, 3], [-0.25, -0.5]), ([7, 8, 6], [6], [-0.125])],
}
ROWS = [
    (0, [1, 2, 3, 9, 4], [0, 1, 1, 0, 1], [0.0, -0.25, -0.5, 0.0, -1.5]),
    (0, [5, 6], [0, 1], [0.0, -0.125]),
    (1, [1, 2, 3], [0, 1, 1], [0.0, -0.25, -0.5]),
    (1, [6, 6], [0, 1], [0.0, -0.125]),
]


def log(folder: Path, calls: dict[str, Any]) -> Path:
    lines = []
    for key, answers in calls.items():
        for read, wrote, logprobs in answers:
            choice = {"token_ids": wrote, "logprobs": {"content": [{"logprob": one} for one in logprobs]}}
            lines.append(json.dumps({"key": key, "answer": {"prompt_token_ids": read, "choices": [choice]}}) + "\n")
    lines.append(json.dumps({"key": "b", "answer": {"error": {"code": "context_length_exceeded"}}}) + "\n")
    (path := folder / "log.jsonl").write_text("".join(lines))
    return path


def stored(rows: list[Any]) -> bytes:
    rollouts = [
        wire_pb2.Rollout(
            tokens=array("i", tokens).tobytes(), logprobs=array("f", logprobs).tobytes(), loss_mask=bytes(mask)
        )
        for _, tokens, mask, logprobs in rows
    ]
    prompt = array("i", PROMPT).tobytes()
    group = wire_pb2.RolloutGroup(prompt_tokens=prompt, rollouts=rollouts, samples=[sample for sample, *_ in rows])
    return bytes(group.SerializeToString())


def test_equal_logs_have_no_complaints(tmp_path: Path) -> None:
    others = {"c": [([1], [2], [-1.0])]}
    found = compare(log(tmp_path, CALLS | others), {3: stored(ROWS)})
    assert found.complaints == []
    assert (found.rollouts, found.rows, found.calls, found.calls_not_trained) == (2, 4, 5, 1)
    assert found.tokens_sampled == found.tokens_trained == 7


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        (0, (0, [1, 2, 4, 9, 4], [0, 1, 1, 0, 1], [0.0, -0.25, -0.5, 0.0, -1.5])),  # another token
        (0, (0, [1, 2, 3, 9, 4], [0, 1, 1, 0, 1], [0.0, -0.25, -0.5, 0.0, -1.25])),  # another logprob
        (0, (0, [1, 2, 3, 9, 4], [0, 1, 1, 1, 1], [0.0, -0.25, -0.5, 0.0, -1.5])),  # a tool's word as the policy's
        (0, (0, [1, 2, 3, 9, 4], [0, 1, 1, 0, 0], [0.0, -0.25, -0.5, 0.0, 0.0])),  # an answer left out
        (1, (0, [5, 6, 5, 6], [0, 1, 0, 1], [0.0, -0.125, 0.0, -0.125])),  # an answer twice
        (1, (1, [5, 6], [0, 1], [0.0, -0.125])),  # in another rollout
        (3, (1, [9, 6], [0, 1], [0.0, -0.125])),  # after other words
    ],
)
def test_every_difference_is_a_complaint(row: int, changed: Any, tmp_path: Path) -> None:
    rows = [*ROWS[:row], changed, *ROWS[row + 1 :]]
    found = compare(log(tmp_path, CALLS), {3: stored(rows)})
    assert found.complaints
    assert found.tokens_sampled < 7


def test_a_rollout_that_is_stored_twice_is_a_complaint(tmp_path: Path) -> None:
    found = compare(log(tmp_path, CALLS), {3: stored(ROWS), 4: stored(ROWS)})
    assert len(found.complaints) == 2
