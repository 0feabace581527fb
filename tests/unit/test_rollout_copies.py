"""How often a rollout's tokens are copied on their way from the engine to the loss, in one process: worker, head and
learner have nothing in common but the bytes that they send."""

from __future__ import annotations

import asyncio
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from count_copies import Finder

from echo2.core.types import Rollout, RolloutGroup
from echo2.learner.core.batch import collate
from echo2.learner.core.model import token_logprobs
from echo2.learner.core.output_layer import Choice, Scores, plain_scores
from echo2.learner.grpo.data import group_data
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import packed, parse
from echo2.transport.limits import LOGGED_GROUPS
from head_cases import OpenHead, rows, settings, until
from rollout_cases import VOCAB

#: Long enough that three quarters of it are met nowhere else.
TOKENS = array("i", [5 + (7 * place * place) % 11 for place in range(40)])
COPIES = """
worker: of the engine, as a message, its bytes
head: as a message, checked and decoded, in the ledger, a list for the tokenizer, bytes for the learner
learner: as a message, its group, what the model reads, what it predicts, the same where nothing narrows the choice
"""


@contextmanager
def watched(finder: Finder) -> Iterator[None]:
    """This thread and those that begin in it, whenever functions of echo2 return."""
    threading.setprofile(finder.look)
    sys.setprofile(finder.look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_rollouts_tokens_are_copied_as_often_as_is_listed(tmp_path: Path) -> None:
    finder = Finder()
    finder.marker = TOKENS[len(TOKENS) // 4 : -1].tobytes()
    with watched(finder):
        fed = asyncio.run(delivered_and_fed(tmp_path))
        scored = tuple(replace(row, reward=float(place)) for place, row in enumerate(fed.rollouts))
        data = group_data(replace(fed, rollouts=scored), 0, "grpo", "token", keeps_flat=False).data
        batch = collate(data, "plain", 0.0)

        def scores(choices: Sequence[Choice], wants_total: bool) -> Scores:
            return plain_scores(torch.zeros(len(batch.predict_u), VOCAB), choices)

        token_logprobs(scores, batch)
    assert finder.failed == ""
    found = [words for words, _ in finder.copies.values()]
    assert len(found) == sum(line.count(",") + 1 for line in COPIES.strip().splitlines()), "\n".join(found)


async def delivered_and_fed(path: Path) -> RolloutGroup:
    """The last group of a step, with `TOKENS`, as its learner gets it; people read those before it."""
    num_groups = LOGGED_GROUPS + 1
    raw = settings(
        rows(path / "rows.jsonl", "53="),
        sampling={"max_tokens": len(TOKENS)},
        schedule={"groups_per_step": num_groups, "max_staleness": 0},
    )
    async with OpenHead(path, raw) as head, head.attending() as leases:
        for number in range(num_groups):
            await until(lambda number=number: len(leases) > number)
            lease, batch = leases[number], wire.Deliveries()
            first = TOKENS if number == LOGGED_GROUPS else array("i", [6, 1])
            messages.encode_delivery(lease.lease_id, sampled(lease, first), batch)
            replies = await head.service.deliver(head.peer("w-1"), parse(wire.Deliveries, packed(batch)))
            assert replies.items[0].accepted, replies.items[0].reason
        await until(lambda: len(head.fed) == num_groups)
        return head.fed[-1]


def sampled(lease: wire.Lease, first: array[int]) -> RolloutGroup:
    """The group of a lease, with these tokens and others."""
    assignment = messages.decode_assignment(lease)
    given, others = assignment.lease, [array("i", [6, 7, place, 1]) for place in (8, 9, 10)]
    rollouts = tuple(map(rollout_of, (first, *others)))
    return RolloutGroup(given.group, given.step, 1, given.cursor, assignment.prompt_tokens, rollouts)


def rollout_of(tokens: array[int]) -> Rollout:
    length = len(tokens)
    finish = "length" if length == len(TOKENS) else "stop"
    return Rollout(tokens, array("f", [-0.5] * length), b"\1" * length, ((0, 0),), finish)
