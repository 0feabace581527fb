"""Makes tables of rollouts for services such as Weights & Biases, from the files of `rollout_log.py`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from echo2.views.rollouts import Group, read_groups

COLUMNS = ("prompt", "completion", "reward", "worker", "version")
#: Maximum number of rows of a table, and of characters of a text in it.
TABLE_ROWS = 32
TEXT_CHARS = 2000


def rollout_rows(folder: Path, name: str) -> list[list[Any]]:
    """Return the first `TABLE_ROWS` rollouts of the file `name`, one row of `COLUMNS` each; [] without such a file.
    `version`: the oldest version that sampled a token of the rollout. Texts longer than `TEXT_CHARS` are cut and end
    with "…".
    """
    rows = (
        [
            _cut(_prompt(group)),
            _cut(rollout["text"]),
            rollout["reward"],
            group["worker"],
            min((version for _, version in rollout["versions"]), default=None),
        ]
        for group in read_groups(folder, name, TABLE_ROWS)
        for rollout in group["rollouts"]
    )
    return list(islice(rows, TABLE_ROWS))


def _prompt(group: Group) -> str:
    prompt = group["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{role}: {content}" for role, content in prompt)


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else text[: TEXT_CHARS - 1] + "…"
