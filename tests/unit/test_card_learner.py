"""A learner that takes turns on its card, against a scripted head that feeds a step once the learner has left it: the
same weights, a checkpoint when it is stopped or loses the head while its tensors are away, and the time it took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from echo2.core.decide.card import CARD
from echo2.core.errors import LinkError
from echo2.core.file_lock import FileLock
from echo2.learner.core import checkpoint
from echo2.learner.grpo.card import LearnerCard
from echo2.learner.grpo.loop import GrpoClient
from learner_cases import tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, undisturbed, weights

__all__ = ["undisturbed"]


class WaitingHead(ScriptedHead):
    """A head whose groups are sampled on the learner's card."""

    def __init__(self, card: LearnerCard, **options: Any) -> None:
        super().__init__(**options)
        self.card = card

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        while method != "LearnerHello" and self.card.has_card:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        async for item in super().stream(method, request):
            yield item


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_learner_that_shares_the_card_trains_the_same_weights_and_reports_its_waits(
    tmp_path: Path, undisturbed: dict[str, bytes], staleness: int
) -> None:
    card, trainer = LearnerCard(tmp_path / "card"), GrpoClient(tiny_policy(), OPTIONS)
    head, beside = WaitingHead(card), FileLock(tmp_path / "card" / CARD)
    card.take()
    assert not beside.take(shared=True)
    options = {"checkpoint_every": 2, "max_staleness": staleness, "card": card}
    assert run(head, trainer, tmp_path, **options) == "all steps are trained"
    assert weights(trainer) == undisturbed
    assert sorted(head.published) == [0, 1, 2, 3, 4, 5]
    for row in head.metrics.values():
        assert row["time/card_move"] > 0.0
        parts = ("wait_for_batch", "train", "publish_wait", "checkpoint", "card_wait", "card_move")
        assert sum(row[f"time/{part}"] for part in parts) <= row["time/step"]
    assert card.has_card
    beside.close()


def test_a_stop_while_its_tensors_are_away_leaves_a_checkpoint(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    card, trainer = LearnerCard(tmp_path / "card"), GrpoClient(tiny_policy(), OPTIONS)
    head = WaitingHead(card)
    head.stop_at = 3
    card.take()
    assert run(head, trainer, tmp_path, checkpoint_every=5, max_staleness=0, card=card) == "stopped by hand"
    assert checkpoint.versions(tmp_path) == [3]
    head.stop_at = None
    again = GrpoClient(tiny_policy(1), OPTIONS)
    assert run(head, again, tmp_path, max_staleness=0, card=card) == "all steps are trained"
    assert weights(again) == undisturbed


def test_a_head_that_is_lost_while_its_tensors_are_away_costs_nothing(tmp_path: Path) -> None:
    def fault(head: ScriptedHead, moment: str, count: int) -> None:
        if head.version == 2 and moment == "before:FedGroups":
            head.is_gone = True  # type: ignore[attr-defined]
        if getattr(head, "is_gone", False):
            raise LinkError("gone")

    card, trainer = LearnerCard(tmp_path / "card"), GrpoClient(tiny_policy(), OPTIONS)
    card.take()
    head = WaitingHead(card, fault=fault)
    with pytest.raises(LinkError):
        run(head, trainer, tmp_path, checkpoint_every=5, max_staleness=0, card=card, patience_seconds=0.2)
    assert checkpoint.versions(tmp_path) == [2]
