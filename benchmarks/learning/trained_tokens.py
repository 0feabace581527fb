"""Whether tokens trained are tokens sampled, row by row: an agent's own log beside the bytes of a run's ledger.

The log has a line for each answer of the model, as the agent's client received it: {"key", "answer"}, where `answer` is
a chat completion, or a message in Anthropic's form, with token ids and logprobs, and `key` that of one rollout. The
bytes are read by their wire form alone: no code of echo2 that makes, joins or stores rows has a part in this.

    a row        = prompt of the group + tokens of the row, of which the marked ones are trained on
    an answer    = the tokens that the model read, then those that it wrote

Each run of marked tokens has to be one answer: the same tokens with the same logprobs after the same tokens read. And
each answer of a rollout that was trained has to be one run of marked tokens in its rows, and in no other rollout's.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from echo2.transport import wire_pb2

#: What was read, what was written, and the logprobs of that: all as bytes.
Said = tuple[bytes, bytes, bytes]
COMPLAINTS_MAX = 10
#: Of a token id, and of a logprob.
TOKEN_BYTES = 4


@dataclass(slots=True)
class Compared:
    """What was found. `complaints`: the first differences; none: tokens trained are tokens sampled."""

    groups: int = 0
    rollouts: int = 0
    rows: int = 0
    calls: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    calls_not_trained: int = 0
    complaints: list[str] = field(default_factory=list)


def answers(log: Path) -> dict[str, Counter[Said]]:
    """The answers of each rollout, by its key. A last line that is half-written is left out."""
    found: dict[str, Counter[Said]] = {}
    for line in log.read_text(encoding="utf-8").split("\n")[:-1]:
        record = json.loads(line)
        answer: dict[str, Any] = record["answer"]
        for choice in [answer] if "token_ids" in answer else answer.get("choices", ()):  # a refusal has none
            logprobs = array("f", [one["logprob"] for one in choice["logprobs"]["content"]])
            read, wrote = array("i", answer["prompt_token_ids"]), array("i", choice["token_ids"])
            said = (read.tobytes(), wrote.tobytes(), logprobs.tobytes())
            found.setdefault(record["key"], Counter())[said] += 1
    return found


def trained(data: bytes) -> list[tuple[int, list[Said]]]:
    """Of each rollout of a group: the number of its rows, and what in them is trained on."""
    group = wire_pb2.RolloutGroup.FromString(data)
    samples = list(group.samples) or list(range(len(group.rollouts)))
    pairs = zip(samples, group.rollouts, strict=True)
    by_sample = [[row for _, row in rows] for _, rows in groupby(pairs, key=lambda pair: pair[0])]
    return [(len(rows), [said for row in rows for said in _runs(group.prompt_tokens, row)]) for rows in by_sample]


def _runs(prompt: bytes, row: Any) -> Iterator[Said]:
    start = 0
    for is_trained, marks in groupby(row.loss_mask):
        end = start + TOKEN_BYTES * len(list(marks))
        if is_trained:
            yield prompt + row.tokens[:start], row.tokens[start:end], row.logprobs[start:end]
        start = end


def compare(log: Path, groups: Mapping[int, bytes]) -> Compared:
    """Compare the log with the groups that were trained, by number."""
    found = Compared(groups=len(groups))
    given = Counter(frozenset(said.items()) for said in answers(log).values())
    for number, data in sorted(groups.items()):
        for at, (num_rows, runs) in enumerate(trained(data)):
            found.rollouts, found.rows, found.calls = found.rollouts + 1, found.rows + num_rows, found.calls + len(runs)
            found.tokens_trained += _length(Counter(runs).items())
            if given[whole := frozenset(Counter(runs).items())]:
                given[whole] -= 1
                found.tokens_sampled += _length(whole)
            elif len(found.complaints) < COMPLAINTS_MAX:
                told = f"group {number}, rollout {at}: {len(runs)} runs of tokens are trained on"
                found.complaints.append(f"{told}, and no rollout of the log has just these answers")
    found.calls_not_trained = sum(count * sum(one for _, one in whole) for whole, count in given.items())
    return found


def _length(counted: Iterable[tuple[Said, int]]) -> int:
    return sum(count * len(wrote) // TOKEN_BYTES for (_, wrote, _), count in counted)
