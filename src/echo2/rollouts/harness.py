"""Groups whose rollouts are played by harnesses. Each rollout has a key of its own for calls to the model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from echo2.core.background import close_all
from echo2.core.errors import UserError
from echo2.core.types import Assignment
from echo2.engines.engine import RequestFailure, derived_seed
from echo2.engines.tokenizer import Tokenizer
from echo2.rollouts.endpoint import LoopbackEndpoint
from echo2.rollouts.recorded import Played, RecordedRollout
from echo2.rollouts.turns import ENVIRONMENT_SAMPLE, Sampler
from echo2.sandbox.code_process import CodeFailure
from echo2.sandbox.plugins import traceback_of
from echo2.tasks.loopback_model import OutOfRoomError

#: Time limit of a rollout whose lease has none (`echo2 eval`).
PLAY_SECONDS = 600.0
#: How often a rollout is begun, if the harness's process dies each time and another rollout may be to blame.
DEATHS_MAX = 4


class Harness(Protocol):
    """Plays whole rollouts, many at once (`tasks/harness_process.py`)."""

    async def start(self) -> None:
        """Load the harness. Raises UserError if it cannot be loaded."""

    async def play(self, columns: Mapping[str, Any], seed: int, model: Mapping[str, str], seconds: float) -> float:
        """Play one rollout. Returns its reward. `model`: how to call the model. Raises OutOfRoomError if it ends with
        a call that is refused for lack of room, and UserError if it fails."""

    async def close(self) -> None:
        """Stop the harness; rollouts under way are abandoned."""


class HarnessEnvironment:
    """A harness and the endpoint where it calls the model. For one event loop."""

    def __init__(self, harness: Harness) -> None:
        self._harness, self._endpoint = harness, LoopbackEndpoint()
        self._folder = TemporaryDirectory(prefix="echo2-tokenizer-")
        self._saving = asyncio.Lock()
        self._saved: Tokenizer | None = None

    async def start(self) -> None:
        """Load the harness and listen.

        Raises:
            UserError: the harness cannot be loaded, or packages are missing.
        """
        await self._harness.start()
        await self._endpoint.start()

    async def play(
        self, engine: Sampler, tokenizer: Tokenizer, assignment: Assignment, sample: int
    ) -> Played | RequestFailure:
        """Play one rollout of an assignment. If the harness raises the refusal of a call for which the rollout has no
        room, the reward is 0: nothing is at fault, and the tokens are valid. If it fails in any other way, the rollout
        is lost, also if it was cut off before. If another rollout may have ended the shared process, this rollout
        starts again.
        """
        for _ in range(DEATHS_MAX):
            try:
                return await self._play(engine, tokenizer, assignment, sample)
            except CodeFailure:
                continue
        detail = f"The harness's process died {DEATHS_MAX} times while it played this rollout and others."
        return RequestFailure("environment_failed", detail)

    async def _play(
        self, engine: Sampler, tokenizer: Tokenizer, assignment: Assignment, sample: int
    ) -> Played | RequestFailure:
        """Raises CodeFailure if another rollout may be to blame for the end of the process."""
        async with self._saving:
            if self._saved is not tokenizer:
                await asyncio.to_thread(tokenizer.save_pretrained, self._folder.name)
                self._saved = tokenizer
        recorded = RecordedRollout(engine, tokenizer, assignment, sample)
        model = {**self._endpoint.open(recorded), "tokenizer_path": self._folder.name}
        seed = derived_seed(assignment.lease.seed, sample, ENVIRONMENT_SAMPLE)
        try:
            seconds = assignment.lease.seconds or PLAY_SECONDS
            return recorded.played(await self._harness.play(assignment.columns, seed, model, seconds))
        except UserError as error:
            if isinstance(error, CodeFailure) and error.is_shared:
                raise
            if not (isinstance(error, OutOfRoomError) and recorded.is_cut):
                recorded.fail("environment_failed", str(error), traceback_of(error))
            return recorded.played(0.0)
        finally:
            self._endpoint.close_rollout(recorded)

    async def close(self) -> None:
        """Stop the harness and the endpoint."""
        try:
            await close_all(self._harness.close, self._endpoint.close)
        finally:
            self._folder.cleanup()
