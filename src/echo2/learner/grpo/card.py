"""The learner's part of a card that it shares with the run's workers (`core/decide/card.py`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from echo2.core.decide.card import CARD, LOOK_SECONDS, WISH, Act, learner_act, wants_card
from echo2.core.file_lock import FileLock
from echo2.core.types import RolloutGroup
from echo2.engines.parking import Parked
from echo2.learner.grpo.step_meter import StepMeter
from echo2.learner.grpo.trained_policy import TrainedPolicy
from echo2.learner.link.session import HeadSession
from echo2.transport import wire_pb2 as wire


class LearnerCard:
    """A learner's part of a card. `directory`: of its locks."""

    def __init__(self, directory: Path) -> None:
        self._wish, self._card = FileLock(directory / WISH), FileLock(directory / CARD)
        self._parked: Parked | None = None

    @property
    def has_card(self) -> bool:
        """Whether the tensors are on the card."""
        return self._card.is_held

    def take(self, meter: StepMeter | None = None) -> None:
        """Wait for the card, and fetch the tensors. Workers give it up between two tokens."""
        started = time.monotonic()
        while (act := learner_act(True, self._wish.is_held, self._card.is_held)) is not Act.WAIT:
            if not (self._wish if act is Act.WISH else self._card).take():
                time.sleep(LOOK_SECONDS)
        waited = time.monotonic() - started
        if self._parked is not None:
            self._parked.fetch()
            self._parked = None
        if meter is not None:
            meter.add_card_time(waited, time.monotonic() - started - waited)

    def leave(self, client: TrainedPolicy, device: torch.device, meter: StepMeter) -> None:
        """Put the tensors away once no code reads them, and let workers have the card."""
        with meter.time("publish_wait"):
            tensors = client.trainer.tensors()
        started = time.monotonic()
        self._parked = Parked(device, tensors)
        self._card.give_back()
        self._wish.give_back()
        meter.add_card_time(0.0, time.monotonic() - started)

    def groups(
        self, head: HeadSession, client: TrainedPolicy, meter: StepMeter
    ) -> Iterator[RolloutGroup | wire.StepDone]:
        """Yield what `HeadSession.groups` does, once all of it is there and the learner has the card. It has the card,
        too, if the head is gone or says stop: the last version will be saved."""
        arrivals, come, quiet_since = head.groups(), deque[RolloutGroup | wire.StepDone](), time.monotonic()
        try:
            while not (come and isinstance(come[-1], wire.StepDone)):
                with meter.time("wait_for_batch"):
                    while not head.has_arrived and self._keeps(client, quiet_since):
                        time.sleep(LOOK_SECONDS)
                if not head.has_arrived and self.has_card:
                    self.leave(client, client.policy.device, meter)
                head.doing = f"waiting for groups of step {client.version} ({len(come)} came); workers have the card"
                with meter.time("wait_for_batch"):
                    come.append(next(arrivals))
                quiet_since = time.monotonic()
        finally:
            if not self.has_card:
                head.doing = "waiting for the card"
                self.take(meter)
        yield from come

    def _keeps(self, client: TrainedPolicy, quiet_since: float) -> bool:
        quiet_seconds = time.monotonic() - quiet_since
        return wants_card(False, self.has_card, quiet_seconds, client.config.schedule.max_staleness)
