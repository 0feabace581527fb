"""What the head and its reward process say to each other over `echo2/pipes.py`.

    head -> child    {"specs", "weights"}, once; then {"task", "rollouts"} for each group
    child -> head    {"ready": true} or {"scores": [[reward, parts], ...]} or {"failed": message}

Scores pass through JSON unharmed: Python writes floats with all their digits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from echo2.types import Message, Rollout, Task


def group_message(task: Task, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """A group as far as rewards can see it: no logprobs, no versions."""
    prompt = task.prompt if isinstance(task.prompt, str) else [asdict(message) for message in task.prompt]
    return {
        "task": {"cursor": task.cursor, "prompt": prompt, "columns": task.columns},
        "rollouts": [
            {"text": r.text, "tokens": r.tokens.tolist(), "finish": r.finish, "parts": dict(r.reward_parts)}
            for r in rollouts
        ],
    }


def group_of(message: dict[str, Any]) -> tuple[Task, list[Rollout]]:
    """The inverse of `group_message`; what was not sent is empty."""
    plain = message["task"]
    prompt = plain["prompt"]
    if not isinstance(prompt, str):
        prompt = tuple(Message(**item) for item in prompt)
    rollouts = [
        Rollout(array("i", r["tokens"]), array("f"), b"", (), r["finish"], r["text"], reward_parts=r["parts"])
        for r in message["rollouts"]
    ]
    return Task(plain["cursor"], prompt, plain["columns"]), rollouts
