"""The end of a run. It is stopped in order: the learner saves a checkpoint while the head still records, then all
processes end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from echo2.config.rundir import newest_checkpoint
from echo2.core.background import Background
from echo2.core.clock import Clock
from echo2.core.errors import NoRoomError, UserError
from echo2.head.decide.planner import Planner
from echo2.head.serve.connections import Connections
from echo2.transport import wire_pb2 as wire

log = logging.getLogger(__name__)

#: Timeout for the learner to finish its step and save a checkpoint.
SAVE_SECONDS = 600.0
#: Time in which a disconnected learner may reconnect.
LOST_SECONDS = 5.0
LOOK_SECONDS = 0.1


class RunEnd:
    """`stopping`: why the run is about to end; empty while it is not. `outcome`: kind and reason of the end, None
    before; `over` is set then. An exception that background work does not handle ends the run.
    """

    def __init__(self, planner: Planner, connections: Connections, checkpoints: Path, clock: Clock) -> None:
        self._planner, self._connections, self._checkpoints, self._clock = planner, connections, checkpoints, clock
        self._is_requested = False  # by a signal
        self.stopping = ""
        self.outcome: tuple[str, str] | None = None
        self.over = asyncio.Event()
        self.background = Background(self.fail)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background. Its failure stops the run instead of being lost."""
        return self.background.spawn(coroutine)

    def fail(self, error: BaseException) -> None:
        """End the run because of an error."""
        log.error("the run stops", exc_info=error)
        kind = "no_room" if isinstance(error, NoRoomError) else "user_error" if isinstance(error, UserError) else "bug"
        self.end(kind, str(error) or repr(error))

    def end(self, kind: str, reason: str) -> None:
        """End the run; only the first call counts. `kind`: finished, stopped, user_error, bug, or no_room, which ends
        this head but not the run."""
        if self.outcome is None:
            self.outcome = (kind, reason)
            self.over.set()

    def request_stop(self, reason: str) -> None:
        """Stop the run at the request of a person or the supervisor. The first request waits for the learner's
        checkpoint, even if the run is already stopping for another reason; the second one stops the run at once.
        """
        if self._is_requested:
            self.end("stopped", self.stopping)
        self._is_requested = True
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """End the run once the learner has saved a checkpoint. Does nothing if it is already stopping or over."""
        if self.stopping or self.outcome is not None:
            return
        self.stopping = reason
        log.info("stopping: %s; the learner saves a checkpoint of step %d", reason, self._planner.training.version)
        if (learner := self._connections.learner) is not None:
            learner.stop(reason)
            learner.send(wire.StepDone(stop=True, reason=reason))
        self.spawn(self._end_when_saved())

    async def _end_when_saved(self) -> None:
        here_at = self._clock.now()
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                while not self.has_saved() and self._clock.now() - here_at < LOST_SECONDS:
                    await asyncio.sleep(LOOK_SECONDS)  # poll: the learner may save without a report, or be dead
                    if self._connections.learner is not None:
                        here_at = self._clock.now()
        except TimeoutError:
            version = self._planner.training.version
            log.warning("the learner saved no checkpoint of step %d within %.0f s", version, SAVE_SECONDS)
        self.end("stopped", self.stopping)

    def has_saved(self) -> bool:
        """Whether a checkpoint covers every recorded step, or nothing was trained and no learner is connected."""
        training = self._planner.training
        if training.version == 0 and self._connections.learner is None:
            return True
        version = training.version
        return training.checkpoint_version >= version or newest_checkpoint(self._checkpoints) == version
